"""Verify, compaction and expiry with their work on Spark, against the same in process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.errors import ConflictError, StorageError
from arroyo_dagster.spark.compaction import run_compaction_on_spark
from arroyo_dagster.spark.gc import run_gc_on_spark, run_undelete_on_spark
from arroyo_dagster.spark.rewrite import rewrites_on_spark
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.spark.verify import verify_job_on_spark
from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    JobPaths,
    Layout,
    ObjectStore,
    ParquetBackend,
    RewriteOptions,
    WorkerGeneration,
    open_store,
    run_compaction,
    run_gc,
    run_rewrite,
    verify_job,
)
from arroyo_dagster.state.model.verify import VerifySettings
from arroyo_dagster.state.planning.engines import StepEngine
from tests.arroyo_jobs import ArroyoJob, begun, content, expect_whole, stopped
from tests.faulty_stores import FaultInjecting
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.formats import encode_pairs
from tests.gc_jobs import expiry, orphans, whole, without_ours
from tests.internals import read_journal
from tests.jobs import copy_into
from tests.words import newest, output_of, random_words, tables_of, words_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
from tests.shares import all_but

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


@pytest.mark.parametrize("seed", all_but([1, 2, 3], [2, 3]))
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


@pytest.mark.parametrize("seed", all_but([1, 2, 3], [2, 3]))
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


if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOBS = {"protocol": protocol_job("p"), "legacy": legacy_job("j")}
MANY = [
    pytest.param("protocol", 1000, id="protocol"),
    pytest.param("legacy", 300, id="legacy"),
    pytest.param("protocol", 10_000, id="10^4 files", marks=pytest.mark.soak),
]


class ManyFiles(Written):
    """A job whose every epoch lists many small files, of several subtasks."""

    def add(self, count: int) -> None:
        """Put this many files of the next epoch, with keys that repeat between subtasks."""
        epoch = Epoch(self.epoch + 1)
        generation = self.generation if self.paths.pipeline else None
        for number in range(count):
            path = self.paths.data_file(
                OPERATOR, TABLE, number % 8, epoch, generation, attempt=f"{number:05}"
            )
            keys = [b"\x05key-%d" % (number % 5), b"\x06own-%02d" % (number % 97)]
            values = [b"\x01" + bytes([97 + number % 26])] * 2
            data = encode_pairs(sorted(keys), values, GLOBAL_KEY_VALUE_SCHEMA, version=0)
            self.store.put(path, data)
            self._listed.append(path)


def many(folder: Path, layout: str, files: int, epochs: int = 3) -> tuple[ObjectStore, JobPaths]:
    store = open_store(f"file://{folder}", options={"sync": False})
    paths = JOBS[layout]
    job = ManyFiles(store, paths, keep=1 << 20, start=time.time_ns() // 1000)
    for _ in range(epochs):
        job.add(files // epochs)
        job.write()
    return store, paths


@pytest.mark.parametrize(("layout", "files"), MANY)
def test_verify_finds_the_same_in_the_same_order_at_every_level(
    session: SparkSession, tmp_path: Path, layout: str, files: int
) -> None:
    store, paths = many(tmp_path / "state", layout, files)
    listed = ParquetBackend(store, paths).load().paths
    store.delete_many([listed[files // 3], listed[-1]])
    for at in (5, files // 2, files - 20):
        store.put(listed[at], store.read(listed[at])[:-9])
    store.put(listed[7], b"")
    found = set()
    for level in range(5) if layout == "legacy" else (0, 1, 4):
        here = verify_job(store, paths, level=level)
        there = verify_job_on_spark(
            lambda: session, store, paths, settings=VerifySettings(level=level), thresholds=ALWAYS
        )
        assert replace(there, engines=()) == here, level
        assert there.engines[0].engine is StepEngine.SPARK
        found |= {finding.code for finding in here.verdict.findings}
    assert len(found) > 2


def _journal(store: ObjectStore, paths: JobPaths) -> list[tuple[str, int | None, str]]:
    return [(one.path, one.size_bytes, one.outcome) for one in read_journal(store, paths)]


@pytest.mark.parametrize(
    ("layout", "files"),
    [
        pytest.param("protocol", 600, id="protocol"),
        pytest.param("legacy", 300, id="legacy", marks=pytest.mark.soak),
        pytest.param("protocol", 10_000, id="10^4 files", marks=pytest.mark.soak),
    ],
)
def test_an_expiry_moves_and_restores_the_same_objects(
    session: SparkSession, tmp_path: Path, layout: str, files: int
) -> None:
    epochs = 3 if layout == "protocol" else 14
    here, paths = many(tmp_path / "here", layout, files, epochs=epochs)
    _last_epochs_list_little(here, paths, layout)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    there = open_store(f"file://{tmp_path / 'there'}", options={"sync": False})
    said = {str(paths.root): "stopped"}
    before = without_ours(there)
    options = GcOptions(quarantine=True)
    expected = run_gc(here, paths, expiry(2, **said), options)
    outcome = run_gc_on_spark(
        lambda: session, there, paths, expiry(2, **said), options, thresholds=ALWAYS
    )
    steps = {one.step: one.engine for one in outcome.engines}
    assert {steps[step] for step in ("plan expire", "copy to quarantine", "delete")} == {
        StepEngine.SPARK
    }
    assert outcome.deleted == expected.deleted > files // 4
    assert list(outcome.plan.data.paths) == list(expected.plan.data.paths)
    assert list(outcome.plan.metadata.paths) == list(expected.plan.metadata.paths)
    assert _journal(there, paths) == _journal(here, paths)
    assert without_ours(there) == without_ours(here)
    assert outcome.quarantine is not None
    moved = run_undelete_on_spark(
        lambda: session, there, paths, outcome.quarantine, thresholds=ALWAYS
    )
    assert len(moved) == outcome.deleted
    assert without_ours(there) == before


def _last_epochs_list_little(store: ObjectStore, paths: JobPaths, layout: str) -> None:
    """Write the epochs after which most files are listed by expiring epochs only."""
    newest = ParquetBackend(store, paths).load()
    job = Written(store, paths, keep=1, start=newest.finish_time_micros)
    job.epoch, job._ref = newest.epoch, newest.ref if layout == "protocol" else None
    job.epochs(3 if layout == "protocol" else 12)
