"""The catalogue: every epoch read once, rows that outlive it, and a store of its own."""

from __future__ import annotations

import pytest

from arroyo_dagster import JobPaths, MemoryStore, ObjectStore, WriteProtected
from arroyo_dagster.state.operations.catalog.epochs import (
    UNREADABLE,
    Refreshed,
    RefreshOptions,
    newest_rows,
    read_history,
    refresh,
)
from tests.faulty_stores import Crash, FaultInjecting
from tests.fleets import START, Written, legacy_job, protocol_job

ONE = protocol_job("words")
OLD = legacy_job("old")
BOTH = pytest.mark.parametrize("paths", [ONE, OLD], ids=["protocol", "legacy"])


def refreshed(
    store: ObjectStore, catalogue: ObjectStore, paths: JobPaths, **options: int
) -> Refreshed:
    return refresh(WriteProtected(store), catalogue, paths, RefreshOptions(**options))  # type: ignore[arg-type]


@BOTH
def test_every_epoch_has_a_row_and_every_file_of_it_one(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    Written(store, paths, keep=2).epochs(4)
    found = refreshed(store, catalogue, paths)
    assert found.added == 4
    assert found.history == read_history(catalogue, paths)
    rows = found.history.epochs
    assert [row.epoch for row in rows] == [1, 2, 3, 4]
    assert [row.files for row in rows] == [1, 2, 2, 2]
    assert [row.new_files for row in rows] == [1, 1, 1, 1]
    assert [row.rows for row in rows] == [1, 2, 2, 2]
    assert {row.state for row in rows} == {"ready"}
    assert {row.duration_micros for row in rows} == {500}
    assert [len(found.history.files_of(row.epoch)) for row in rows] == [1, 2, 2, 2]
    assert found.history.files[0].columns == "key: binary not null, value: binary not null"


@BOTH
def test_an_epoch_that_expired_keeps_its_row_and_loses_its_files(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, paths)
    job.epochs(4)
    refreshed(store, catalogue, paths)
    job.expire([1, 2])
    found = refreshed(store, catalogue, paths)
    assert (found.added, found.expired) == (0, 2)
    assert [row.present for row in found.history.epochs] == [False, False, True, True]
    assert {row.epoch for row in found.history.files} == {3, 4}
    assert found.history.newest is not None
    assert found.history.newest.epoch == 4
    assert newest_rows(catalogue, [paths, legacy_job("never")]) == {
        paths.root: found.history.newest
    }


def test_more_epochs_than_a_run_may_read_are_left_for_the_next() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    Written(store, ONE).epochs(5)
    first = refreshed(store, catalogue, ONE, max_new_epochs=2)
    assert ([row.epoch for row in first.history.epochs], first.left) == ([4, 5], 3)
    assert first.history.epochs[0].new_files is None  # the epoch before it is not known
    second = refreshed(store, catalogue, ONE, max_new_epochs=10)
    assert ([row.epoch for row in second.history.epochs], second.left) == ([1, 2, 3, 4, 5], 0)


def test_a_committing_epoch_is_read_again_until_it_is_ready() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, ONE)
    job.epochs(1)
    job.write(committing=True)
    assert refreshed(store, catalogue, ONE).history.epochs[-1].state == "committing"
    job.commit()
    job.epochs(1)
    rows = refreshed(store, catalogue, ONE).history.epochs
    assert [row.state for row in rows] == ["ready", "ready", "ready"]


@BOTH
def test_an_unreadable_epoch_has_a_row_that_says_why(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, paths)
    job.epochs(3)
    job.damage(2)
    found = refreshed(store, catalogue, paths)
    assert len(found.problems) == 1
    assert [row.state for row in found.history.epochs] == ["ready", UNREADABLE, "ready"]
    assert "checkpoint-0000002" in str(found.history.epochs[1].problem)
    assert refreshed(store, catalogue, paths).problems == ()


@BOTH
def test_a_job_that_began_anew_keeps_the_rows_of_the_one_before(paths: JobPaths) -> None:
    clock = iter(range(1, 10_000))
    store, catalogue = MemoryStore(clock=lambda: next(clock)), MemoryStore()
    job = Written(store, paths)
    job.epochs(3)
    refreshed(store, catalogue, paths)
    job.vanish()
    Written(store, paths, start=START + 10**9).epochs(2)
    history = refreshed(store, catalogue, paths).history
    assert [(row.epoch, row.present) for row in history.epochs] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
        (3, False),
    ]
    assert refreshed(store, catalogue, paths).history == history


def test_a_copy_of_a_job_is_the_same_job() -> None:
    clock = iter(range(1, 10_000))
    store, copy, catalogue = MemoryStore(), MemoryStore(clock=lambda: next(clock)), MemoryStore()
    Written(store, ONE).epochs(3)
    refreshed(store, catalogue, ONE)
    for info in store.list():
        copy.put(info.path, store.read(info.path))
    rows = refreshed(copy, catalogue, ONE).history.epochs
    assert [(row.epoch, row.present) for row in rows] == [(1, True), (2, True), (3, True)]


# ---- its own store -------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_run_killed_at_any_write_is_made_good_by_the_next(fail_at: int) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, ONE)
    job.epochs(2)
    refreshed(store, catalogue, ONE)
    job.epochs(1)
    with pytest.raises(Crash):
        refreshed(store, FaultInjecting(catalogue, fail_at, crash=True), ONE)
    found = refreshed(store, catalogue, ONE).history
    assert [row.epoch for row in found.epochs] == [1, 2, 3]
    assert len(found.files) == len({(row.epoch, row.path) for row in found.files}) == 6
