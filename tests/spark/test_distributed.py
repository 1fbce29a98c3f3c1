"""Jobs of many files: verify, gc and compaction on Spark come to the same as in process."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from arroyo_dagster.spark.gc import run_gc_on_spark, run_undelete_on_spark
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.spark.verify import verify_job_on_spark
from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Epoch,
    GcOptions,
    JobPaths,
    ObjectStore,
    ParquetBackend,
    open_store,
    run_gc,
    verify_job,
)
from arroyo_dagster.state.model.verify import VerifySettings
from arroyo_dagster.state.planning.engines import StepEngine
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.formats import encode_pairs
from tests.gc_jobs import expiry, without_ours
from tests.internals import read_journal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
ALWAYS = SparkThresholds(size_bytes=0, files=0, objects=0)
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
