"""`verify_job` on stores that change or fail meanwhile, on bytes nobody meant, and on big files."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster import (
    Catalogue,
    JobId,
    JobPaths,
    MemoryStore,
    ObjectStore,
    PipelineId,
    StatePath,
    TableConfig,
    WriteProtected,
    global_table_config,
    verify_job,
)
from arroyo_dagster.errors import ConflictError, InputError, NotFoundError, StorageError
from tests import fleets
from tests.fleets import Written, legacy_job, protocol_job
from tests.jobs import copied, run_word_job

WORDS = JobPaths(JobId("main"), PipelineId("words"))
FLIPS = pytest.mark.parametrize("flips", [30, pytest.param(100, marks=pytest.mark.soak)])


class Meanwhile(WriteProtected):
    """Does something when a data file is first opened."""

    def __init__(self, inner: ObjectStore, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self._act = act

    def open_input(self, path: StatePath) -> Any:
        self._act()
        return super().open_input(path)


def expiring(job: Written, *, times: int) -> Callable[[], None]:
    left = [times]

    def act() -> None:
        if left[0]:
            left[0] -= 1
            old = range(1, job.epoch + 1)
            doomed = [info.path for info in job.store.list(job.paths.root) if "table-" in info.path]
            job.epochs(4)
            job.expire(old)
            job.store.delete_many(doomed)

    return act


@pytest.mark.parametrize("paths", [protocol_job("p"), legacy_job("j")], ids=["protocol", "legacy"])
def test_an_epoch_that_expires_while_it_is_looked_at_is_no_finding(paths: JobPaths) -> None:
    store = MemoryStore()
    job = Written(store, paths)
    job.epochs(5)
    found = verify_job(Meanwhile(store, expiring(job, times=1)), paths, level=1)
    assert found.epoch == 9
    with pytest.raises(ConflictError, match="faster than"):
        verify_job(Meanwhile(store, expiring(job, times=100)), paths, level=1)
    with pytest.raises(NotFoundError, match="no such epoch"):
        verify_job(Meanwhile(store, expiring(job, times=100)), paths, int(job.epoch), level=1)


def test_a_store_that_fails_is_no_finding() -> None:
    store = MemoryStore()
    job = Written(store, protocol_job("p"))
    job.epochs(2)

    def fail() -> None:
        raise StorageError("down")

    with pytest.raises(StorageError, match="down"):
        verify_job(Meanwhile(store, fail), job.paths, level=2)


def test_what_cannot_be_asked_for() -> None:
    store = MemoryStore()
    job = Written(store, protocol_job("p"))
    with pytest.raises(NotFoundError, match="no visible epoch"):
        verify_job(store, job.paths)
    job.epochs(2)
    for options in ({"level": 5}, {"level": -1}, {"parallelism": 0}, {"history": -1}):
        with pytest.raises(InputError):
            verify_job(store, job.paths, **options)  # type: ignore[arg-type]


def test_tables_nobody_knows_are_a_note_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(name: str, **_: object) -> TableConfig:
        return global_table_config(name)

    monkeypatch.setattr(fleets, "global_table_config", bare)
    store = MemoryStore()
    job = Written(store, legacy_job("j"))
    job.epochs(3)
    found = verify_job(store, job.paths, level=3, catalogue=Catalogue(()))
    (finding,) = found.verdict.findings
    assert (finding.severity.value, finding.code) == ("note", "table-unknown")
    assert finding.object == "count.counts"
    assert "register_table" in finding.evidence
    assert verify_job(store, job.paths, level=2).verdict.findings == ()


# ---- bytes that nobody meant ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, sinks=1, keep_epochs=None, merge_files_after=512, rows=16)
    return store


@FLIPS
def test_whatever_is_flipped_there_is_a_verdict(written: MemoryStore, flips: int) -> None:
    """Never another error than that the epoch is not there; and nothing is written."""
    store, chance = copied(written), random.Random(7)
    objects = [info.path for info in store.list(WORDS.root)]
    for _ in range(flips):
        path = chance.choice(objects)
        data = bytearray(written.read(path))
        data[chance.randrange(len(data))] ^= chance.choice([0xFF, 1, 0x80])
        store.put(path, bytes(data))
        verdict = verify_job(WriteProtected(store), WORDS, parallelism=3).verdict
        assert all(one.evidence and one.next_step for one in verdict.findings)
        store.put(path, written.read(path))


@FLIPS
def test_flip_in_our_data_file_is_found_or_harmless(written: MemoryStore, flips: int) -> None:
    """Pages carry checksums; what lies between them is the footer, or harmless."""
    store, chance = copied(written), random.Random(8)
    listed = [path for path in verify_paths(written) if written.read(path)]
    for _ in range(flips):
        path = chance.choice(listed)
        data = bytearray(written.read(path))
        data[chance.randrange(4, len(data))] ^= 0xFF
        store.put(path, bytes(data))
        verdict = verify_job(store, WORDS, history=0).verdict
        if not verdict.findings:
            assert rows_of(store, path) == rows_of(written, path)
        store.put(path, written.read(path))


def verify_paths(store: MemoryStore) -> list[StatePath]:
    found = verify_job(store, WORDS, history=0).restore
    return list(dict.fromkeys(path for one in found for path in one.files))


def rows_of(store: MemoryStore, path: StatePath) -> pa.Table:
    from tests.formats import decode_file

    return decode_file(store.read(path), path)[0]
