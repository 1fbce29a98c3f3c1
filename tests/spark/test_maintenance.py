"""Compaction and expiry with their work on Spark, against the same in process."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.errors import ConflictError, StorageError
from arroyo_dagster.spark.compaction import run_compaction_on_spark
from arroyo_dagster.spark.gc import run_gc_on_spark
from arroyo_dagster.spark.rewrite import rewrites_on_spark
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    Layout,
    ObjectStore,
    ParquetBackend,
    RewriteOptions,
    WorkerGeneration,
    open_store,
    run_compaction,
    run_rewrite,
)
from tests.arroyo_jobs import ArroyoJob, begun, content, expect_whole, stopped
from tests.faulty_stores import FaultInjecting
from tests.fleets import OPERATOR, TABLE, Written, protocol_job
from tests.gc_jobs import expiry, orphans, whole
from tests.jobs import copy_into
from tests.words import newest, output_of, random_words, tables_of, words_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
ALWAYS = SparkThresholds(size_bytes=0, files=0, objects=0)


def _run(folder: Path, epochs: int | None) -> tuple[ObjectStore, Pipeline]:
    store = open_store(str(folder / "checkpoints"))
    rows = random_words(120, seed=5)
    pipeline = words_pipeline(rows, str(folder / "output"), rows_per_epoch=8)
    run_pipeline(pipeline, store, max_epochs=epochs)
    return store, pipeline


def test_compacted_and_expired_on_spark_the_job_goes_on_as_if_nothing_had_been(
    session: SparkSession, tmp_path: Path
) -> None:
    undisturbed, pipeline = _run(tmp_path / "undisturbed", None)
    store, _ = _run(tmp_path / "compacted", 9)
    twin, _ = _run(tmp_path / "twin", 9)
    before = newest(store, pipeline)
    content = tables_of(store, before)
    outcome = run_compaction_on_spark(
        lambda: session, store, pipeline.paths, FULL, thresholds=ALWAYS
    )
    in_process = run_compaction(twin, pipeline.paths, FULL)
    assert outcome.published == "epoch"
    assert [(one.step, one.engine.value) for one in outcome.engines] == [("merge files", "Spark")]
    assert all(merge.same for merge in outcome.merges)
    assert [m.rows_out for m in outcome.merges] == [m.rows_out for m in in_process.merges]
    after = newest(store, pipeline)
    assert tables_of(store, after) == content == tables_of(twin, newest(twin, pipeline))
    assert len(set(after.paths)) == outcome.files_after < len(set(before.paths))
    expired = run_gc_on_spark(lambda: session, store, pipeline.paths, expiry(2), thresholds=ALWAYS)
    assert expired.done
    assert ParquetBackend(store, pipeline.paths).epochs() == [9, 10]
    assert not any(store.head(path) for path in expired.plan.data.paths)
    _run(tmp_path / "compacted", None)
    assert tables_of(store, newest(store, pipeline)) == tables_of(
        undisturbed, newest(undisturbed, pipeline)
    )
    outputs = [output_of(tmp_path / name / "output") for name in ("compacted", "undisturbed")]
    assert outputs[0] == outputs[1]


def test_orphans_are_found_and_deleted_by_workers(session: SparkSession, tmp_path: Path) -> None:
    paths, root = protocol_job("p"), tmp_path / "state"
    store = open_store(f"file://{root}")
    Written(store, paths, start=time.time_ns() // 1000).epochs(4)
    for number in range(30):
        lost = paths.data_file(OPERATOR, TABLE, number, Epoch(1), WorkerGeneration(1), attempt="l")
        store.put(lost, b"lost")
    for path in root.rglob("*-l"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    asked = orphans(**{"p/main": "stopped"})
    outcome = run_gc_on_spark(lambda: session, store, paths, asked, thresholds=ALWAYS)
    assert outcome.deleted == 30
    assert {(one.step, one.engine.value) for one in outcome.engines} == {
        ("plan orphans", "Spark"),
        ("delete", "Spark"),
    }
    whole(store, paths, 1, 2, 3, 4)
    assert not list(root.rglob("*-l"))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fault_somewhere_on_spark_loses_and_doubles_nothing(
    session: SparkSession, tmp_path: Path, seed: int
) -> None:
    store, pipeline = _run(tmp_path, 6)
    content = tables_of(store, newest(store, pipeline))
    chance = random.Random(seed)
    # Workers count their own changes: the fault comes in one of them, or where it is published.
    at, late = chance.randint(1, 12), chance.choice(["before", "after"])
    faulty = FaultInjecting(store, fail_at=at, mode=late)  # type: ignore[arg-type]
    with contextlib.suppress(StorageError, ConflictError):
        run_compaction_on_spark(lambda: session, faulty, pipeline.paths, FULL, thresholds=ALWAYS)
    assert tables_of(store, newest(store, pipeline)) == content
    run_compaction_on_spark(lambda: session, store, pipeline.paths, FULL, thresholds=ALWAYS)
    assert tables_of(store, newest(store, pipeline)) == content


@pytest.mark.parametrize("layout", list(Layout), ids=[one.value for one in Layout])
def test_a_stopped_job_of_arroyos_is_rewritten_by_workers(
    session: SparkSession, tmp_path: Path, layout: Layout
) -> None:
    job, store = _arroyo_job(tmp_path, layout)
    before = content(job.store, job.paths)
    run = rewrites_on_spark(lambda: session, ALWAYS)
    outcome = run_rewrite(
        store, job.paths, stopped(job.paths), FULL, RewriteOptions(run=run, quiet_seconds=0)
    )
    assert outcome.published
    here = run_rewrite(
        job.store, job.paths, stopped(job.paths), FULL, RewriteOptions(quiet_seconds=0)
    )
    assert [part.after for part in outcome.parts] == [part.after for part in here.parts]
    expect_whole(store, job, before, "on Spark")
    again = run_rewrite(
        store, job.paths, stopped(job.paths), FULL, RewriteOptions(run=run, quiet_seconds=0)
    )
    assert not again.published


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fault_somewhere_leaves_a_job_of_arroyos_that_restores_the_same(
    session: SparkSession, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    job, store = _arroyo_job(tmp_path, chance.choice(list(Layout)))
    before = content(job.store, job.paths)
    run = rewrites_on_spark(lambda: session, ALWAYS)
    at, late = chance.randint(1, 14), chance.choice(["before", "after"])
    faulty = FaultInjecting(store, fail_at=at, mode=late)  # type: ignore[arg-type]
    with contextlib.suppress(StorageError, ConflictError):
        run_rewrite(
            faulty, job.paths, stopped(job.paths), FULL, RewriteOptions(run=run, quiet_seconds=0)
        )
    expect_whole(store, job, before, f"change {at} failed, {late}")
    run_rewrite(
        store, job.paths, stopped(job.paths), FULL, RewriteOptions(run=run, quiet_seconds=0)
    )
    expect_whole(store, job, before, "done again")


def _arroyo_job(folder: Path, layout: Layout) -> tuple[ArroyoJob, ObjectStore]:
    """The same job in memory and in files."""
    job, store = begun(layout), open_store(str(folder / "arroyo"))
    copy_into(store, job.store)
    return job, store


def test_the_assets_compact_and_expire_through_spark(session: SparkSession, tmp_path: Path) -> None:
    import dagster as dg

    from arroyo_dagster.orchestration import build_arroyo_definitions

    store, pipeline = _run(tmp_path, 9)
    content = tables_of(store, newest(store, pipeline))
    defs = build_arroyo_definitions(str(tmp_path / "checkpoints"), mode="maintain")
    configs = {
        "arroyo_compaction": {"arroyo_compacted_state": {"config": {"policy": "full"}}},
        "arroyo_gc": {"arroyo_retained_epochs": {"config": {"keep_epochs": 2, "dry_run": False}}},
    }
    with dg.instance_for_test() as instance:
        for job, ops in configs.items():
            result = defs.resolve_job_def(job).execute_in_process(
                instance=instance, run_config={"ops": ops}
            )
            made = [event.asset_key for event in result.get_asset_materialization_events()]
            assert [key.path[-1] for key in made if key is not None] == {
                "arroyo_compaction": ["compacted_state"],
                "arroyo_gc": ["retained_epochs"],
            }[job]
    assert ParquetBackend(store, pipeline.paths).epochs() == [9, 10]
    assert tables_of(store, newest(store, pipeline)) == content
    assert session.range(3).count() == 3  # a session that was there before is not stopped
