"""Runs of the journal archived: none is lost or told twice, wherever it is stopped."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.state.codec.journal import (
    SCHEMA,
    ArchivedRun,
    decode_archive,
    encode_archive,
)
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.operations.gc import journal_archive
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.journal import (
    JournalEntry,
    list_runs,
    read_journal,
)
from arroyo_dagster.state.operations.gc.journal_archive import archive_runs
from arroyo_dagster.state.storage import MemoryStore, ObjectStore
from tests.faulty_stores import Crash, FaultInjecting
from tests.fleets import Written
from tests.gc_jobs import Clock, Hiding, orphans
from tests.jobs import copied
from tests.journals import PATHS, begin_run

RUNS = 100
KEPT = 16
"""Of the newest runs."""


def with_runs(count: int = RUNS, clock: Clock | None = None) -> MemoryStore:
    store = MemoryStore(clock=clock or Clock())
    for number in range(count):
        batches = number % 4  # none at all, too
        run = begin_run(store, number, batches=batches, more={"rule": {"keep": number}})
        for batch in range(1, batches + 1):
            names = [PATHS.root / f"{number}-{batch}-{one}" for one in ("a", "b")]
            objects = [StoredObject(names[0], 7, None, "etag"), StoredObject(names[1])]
            run.write([(batch, objects)], {names[0]: "deleted", names[1]: "there: it said 403"})
        run.end({"deleted": batches})
    return store


def told(store: ObjectStore) -> tuple[list[Any], list[JournalEntry]]:
    return list_runs(store, PATHS), list(read_journal(store, PATHS))


def archived(store: ObjectStore) -> int:
    return archive_runs(store, PATHS, store.list_dir(PATHS.journal))


def test_what_is_told_stays_the_same_and_is_a_few_objects() -> None:
    store = with_runs()
    before = told(store)
    assert len(before[0]) == RUNS
    assert len(before[1]) == sum(2 * (number % 4) for number in range(RUNS))
    many = len([*store.list(PATHS.journal)])
    assert archived(store) == RUNS - KEPT
    assert told(store) == before
    kept = [*store.list(PATHS.journal)]
    assert len(kept) < many / 4
    assert len(store.list_dir(PATHS.journal).objects) == 2  # and head.json
    name = before[0][50].name
    assert list(read_journal(store, PATHS, name)) == [e for e in before[1] if e.run == name]
    assert archived(store) == 0
    assert told(store) == before


def test_few_runs_and_large_ones_and_open_ones_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = with_runs(journal_archive.ARCHIVE_AFTER + KEPT - 1)
    assert archived(store) == 0
    store = with_runs()
    monkeypatch.setattr(journal_archive, "MOST_OBJECTS", 5)  # those of 6 are a quarter
    before = told(store)
    directories = sorted(store.list_dir(PATHS.journal).prefixes)
    store.delete_many([directories[0] / "end.json"])
    monkeypatch.setattr(journal_archive, "ARCHIVE_AFTER", 50)
    assert archived(store) == (RUNS - KEPT) * 3 // 4 - 1
    left = {path.name for path in store.list_dir(PATHS.journal).prefixes}
    assert directories[0].name in left
    assert told(store)[1] == before[1]
    assert [one.name for one in told(store)[0]] == [one.name for one in before[0]]


@pytest.mark.parametrize("crash", [True, False], ids=["crash", "failure"])
@pytest.mark.parametrize("mode", ["before", "after"])
def test_stopped_anywhere_nothing_is_lost_and_the_next_finishes_it(mode: Any, crash: bool) -> None:
    start = with_runs()
    before = told(start)
    counted = FaultInjecting(copied(start))
    archived(counted)
    assert counted.changes >= 2
    for at in range(1, counted.changes + 1):
        store = copied(start)
        faulty = FaultInjecting(store, fail_at=at, mode=mode, crash=crash)
        with contextlib.suppress(Crash, StorageError):
            archived(faulty)
        assert told(store) == before, f"at change {at}"
        archived(store)
        assert told(store) == before
        assert len(store.list_dir(PATHS.journal).prefixes) <= RUNS - KEPT
        with_more(store)
        archived(store)
        assert told(store)[1][: len(before[1])] == before[1]
        assert len(store.list_dir(PATHS.journal).prefixes) == KEPT


def with_more(store: MemoryStore) -> None:
    """As many runs again: what was left of the first ones goes with them."""
    for number in range(RUNS, 2 * RUNS):
        begin_run(store, number, batches=0, kind="purge", owner="later").end({})


@pytest.mark.parametrize("hides", ["000001.json", "000002.json", "000003.json", "plan.json"])
def test_what_a_listing_hides_of_a_run_is_not_lost(hides: str) -> None:
    store = with_runs(200)
    before = told(store)
    archived(Hiding(store, lambda path: path.endswith(f"/{hides}")))
    assert told(store) == before
    archived(store)
    assert told(store) == before


def test_an_archive_that_reads_back_different_removes_nothing() -> None:
    class Rotten(MemoryStore):
        def put(self, path: StatePath, data: bytes) -> None:
            if path.endswith(".parquet"):
                data = encode_archive(decode_archive(data, path)[1:])
            super().put(path, data)

    store = Rotten()
    for info in (start := with_runs()).list():
        store.put(info.path, start.read(info.path))
    before = {info.path for info in store.list()}
    with pytest.raises(FormatError, match="reads back different"):
        archived(store)
    assert before <= {info.path for info in store.list()}


@pytest.mark.parametrize("data", [b"", b"PAR1", encode_archive([])[:-9]])
def test_a_broken_archive_is_named(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"journal/x\.parquet"):
        decode_archive(data, "journal/x.parquet")


def test_an_archive_of_a_later_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from arroyo_dagster.state.codec import journal as codec

    with monkeypatch.context() as later:
        later.setattr(codec, "SCHEMA", SCHEMA.with_metadata({"version": "2"}))
        data = encode_archive([ArchivedRun(name="a", plan="{}", end="{}", lines=())])
    with pytest.raises(FormatError, match="but of '2'"):
        decode_archive(data, "x")


def test_a_collection_archives_and_a_broken_journal_stops_none() -> None:
    clock = Clock()
    store = with_runs(clock=clock)
    job = Written(store, PATHS, start=clock.micros)
    job.epochs(3)
    lost = PATHS.root / "generations/1/checkpoints/checkpoint-0000001/operator-x/table-y-000-z"
    store.put(StatePath(lost), b"lost")
    first = copied(store, clock=clock)
    clock.days(30)
    asked = orphans(**{str(PATHS.root): "stopped"})
    before = told(store)
    assert run_gc(first, PATHS, asked, GcOptions(clock=clock)).deleted
    assert told(first)[1][: len(before[1])] == before[1]
    assert len(first.list_dir(PATHS.journal).prefixes) == KEPT + 1
    store.put(PATHS.journal / "0--1.parquet", b"broken")
    assert run_gc(store, PATHS, asked, GcOptions(clock=clock)).deleted
