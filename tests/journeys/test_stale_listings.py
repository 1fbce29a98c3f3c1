"""Listings that show what is gone, or an older version beside an object: nothing that stays is
taken for older than it is, and nothing is refused for ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import pytest

from arroyo_dagster.state import (
    GcOptions,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    StatePath,
    plan_gc,
    run_gc,
)
from arroyo_dagster.state.operations.gc.steps import HEADS
from tests.gc_jobs import DAY, JOB, PATHS, Clock, begun, orphans, restorable
from tests.internals import Pace, UndeleteOptions, list_quarantines, read_journal, run_undelete
from tests.jobs import run_word_job
from tests.stores import Listing, ObjectInfo, Wrapper

QUICK = Pace(sleep=lambda seconds: None)


class Stale(Wrapper):
    """A store whose listings go on showing objects as they were at some time.

    Args:
        shown: these, besides what is there.
    """

    def __init__(self, store: ObjectStore, shown: Iterable[ObjectInfo]) -> None:
        super().__init__(store)
        self._shown = tuple(shown)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Go through all objects below a directory, and through the old versions."""
        found = [*self.inner.list(prefix, start_after=start_after)]
        below = f"{prefix}/" if prefix else ""
        old = [one for one in self._shown if one.path.startswith(below)]
        old = [one for one in old if one.path > (start_after or "")]
        return iter(sorted((*found, *old), key=lambda one: one.path))

    def list_dir(self, prefix: str = "") -> Listing:
        """Give one level, with the old versions."""
        found = self.inner.list_dir(prefix)
        old = [one for one in self._shown if one.path.parent == prefix]
        objects = sorted((*found.objects, *old), key=lambda one: one.path)
        return Listing(objects=tuple(objects), prefixes=found.prefixes)


def with_orphans(store: MemoryStore, clock: Clock, count: int) -> list[StatePath]:
    """Files that the job forgot a year ago: their names are like those of epoch 1."""
    ref = ParquetBackend(store, PATHS).load().parent_ref
    assert ref is not None
    directory = ParquetBackend(store, PATHS).load().operators[0].paths[0].parent
    assert directory is not None
    first = StatePath(str(directory).rpartition("checkpoint-")[0] + "checkpoint-0000001")
    clock.days(-365)
    paths = [first / f"operator-lost/table-t-{at:03}" for at in range(count)]
    for path in paths:
        store.put(path, b"rows" * 10)
    clock.days(365)
    return paths


@pytest.mark.parametrize("count", [3, HEADS + 1])
@pytest.mark.parametrize("aside", [False, True])
def test_orphans_that_only_the_listing_shows_end_no_run(count: int, aside: bool) -> None:
    clock = Clock()
    store = begun(6, clock)
    clock.days(10)
    paths = with_orphans(store, clock, count)
    stale = Stale(store, [one for one in store.list(PATHS.root) if one.path in paths])
    store.delete_many(paths[: count // 2])
    outcome = run_gc(stale, PATHS, orphans(), GcOptions(quarantine=aside, clock=clock, pace=QUICK))
    assert outcome.deleted == count
    assert not any(store.head(path) for path in paths)
    restorable(store, PATHS, 5, 6)
    said = {one.path: one.outcome for one in read_journal(store, PATHS) if one.path in paths}
    if aside:
        assert set(map(said.get, paths[: count // 2])) == {"gone"}
        [(found, moved)] = list_quarantines(store, PATHS)
        assert [one.path for one in moved] == paths[count // 2 :]
        run_undelete(store, PATHS, found.name, UndeleteOptions(clock=clock))
        assert [path for path in paths if store.head(path)] == paths[count // 2 :]


def test_a_file_is_as_old_as_its_newest_version(clock: Clock) -> None:
    store = begun(6, clock)
    clock.days(10)
    [path] = with_orphans(store, clock, 1)
    [old] = [one for one in store.list(PATHS.root) if one.path == path]
    store.put(path, b"written again")
    assert old.modified_micros is not None
    for shown in (old, dataclasses.replace(old, modified_micros=old.modified_micros - DAY)):
        stale = Stale(store, [shown])
        assert path not in plan_gc(stale, PATHS, orphans(), now_micros=clock()).data.paths
        run_gc(stale, PATHS, orphans(), GcOptions(clock=clock, pace=QUICK))
    assert store.read(path) == b"written again"


def test_an_expired_epoch_that_only_the_listing_shows_does_not_stop_the_job_s_own_retention() -> (
    None
):
    clock = Clock()
    store = begun(3, clock)
    shown = list(store.list(PATHS.epochs))
    run_word_job(store, **{**JOB, "keep_epochs": 2}, max_epochs=5)
    assert ParquetBackend(store, PATHS).epochs() == [7, 8]
    stale = Stale(store, shown)
    assert ParquetBackend(stale, PATHS).epochs() == [1, 2, 3, 7, 8]
    run_word_job(stale, **{**JOB, "keep_epochs": 2}, max_epochs=4)
    assert ParquetBackend(store, PATHS).epochs() == [11, 12]
    restorable(store, PATHS, 11, 12)


class OnlyStale(Stale):
    """A store whose listings of one directory end before the newest objects."""

    def list_dir(self, prefix: str = "") -> Listing:
        """Give one level; of the epochs only what is gone."""
        found = super().list_dir(prefix)
        if prefix != PATHS.epochs:
            return found
        gone = [one for one in found.objects if self.inner.head(one.path) is None]
        return dataclasses.replace(found, objects=tuple(gone))


def test_a_run_starts_although_the_newest_listed_epoch_is_gone() -> None:
    job = {**JOB, "keep_epochs": 2, "rows_per_epoch": 1}
    store = MemoryStore()
    run_word_job(store, **job, max_epochs=3)
    shown = list(store.list(PATHS.epochs))
    run_word_job(store, **job, max_epochs=13)
    assert ParquetBackend(store, PATHS).epochs() == [15, 16]
    run_word_job(OnlyStale(store, shown), **job, max_epochs=1)
    restorable(store, PATHS, 16, 17)
