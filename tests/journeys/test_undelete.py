"""All that a run moved to quarantine comes back, metadata last, or nothing does: whatever run was
stopped where, `undelete` leaves no job that cannot be started, or that has an epoch without files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster import (
    Epoch,
    GcOptions,
    GcRequest,
    JobPaths,
    Layout,
    MemoryStore,
    ParquetBackend,
    StatePath,
    run_gc,
    unpin_epochs,
)
from arroyo_dagster.errors import ConflictError, NotFoundError
from arroyo_dagster.state.codec.records import decode_epoch_record
from arroyo_dagster.state.model.garbage import Moved
from arroyo_dagster.state.operations.gc.undelete import plan_undelete
from tests.faulty_stores import Crash, FaultInjecting, once_before
from tests.fleets import Written
from tests.gc_jobs import (
    JOB,
    KINDS,
    PATHS,
    Clock,
    begun,
    dead,
    expiry,
    restorable,
    whole,
    without_ours,
)
from tests.internals import Pace, UndeleteOptions, purge, read_pins, run_undelete
from tests.jobs import copied, run_word_job
from tests.shares import Share, dealt_out, share_or_all

pytestmark = pytest.mark.usefixtures("one_at_a_time")

SMALL: dict[str, Any] = {"sinks": 0, "parallelism": 1}
EVERYWHERE = Share(0, 1)


def quarantine_objects(store: Any, paths: JobPaths, asked: GcRequest, clock: Clock) -> str | None:
    """Move what a request is about into quarantine."""
    options = GcOptions(quarantine=True, clock=clock, pace=Pace(sleep=lambda seconds: None))
    return run_gc(store, paths, asked, options).quarantine


def its_own(store: Any, paths: JobPaths) -> dict[StatePath, bytes]:
    """Every object of the job: no sink's, and nothing that maintenance keeps."""
    root = f"{paths.root}/"
    return {path: data for path, data in without_ours(store).items() if path.startswith(root)}


def a_job(kind: str, clock: Clock, epochs: int) -> MemoryStore:
    if kind == "ours":
        return begun(epochs, clock, **{**SMALL, "sinks": 1})
    store = MemoryStore(clock=clock)
    Written(store, KINDS[kind], start=clock.micros).epochs(epochs)
    return store


def stopped_anywhere(
    start: MemoryStore,
    paths: JobPaths,
    make: Callable[[], GcRequest],
    clock: Clock,
    *,
    go_on: bool = True,
    share: Share = EVERYWHERE,
) -> Iterator[MemoryStore]:
    """A store for each place where a first run may be stopped; a second one may have finished."""
    counted = FaultInjecting(copied(start, clock=clock, keep_times=True))
    quarantine_objects(counted, paths, make(), clock)
    for at in share(range(1, counted.changes + 1)):
        store = copied(start, clock=clock, keep_times=True)
        faulty = FaultInjecting(store, fail_at=at, mode="partial", crash=True)
        with contextlib.suppress(Crash):
            quarantine_objects(faulty, paths, make(), clock)
        clock.micros += 120_000_000
        if go_on and its_own(store, paths):
            quarantine_objects(store, paths, make(), clock)
        yield store


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("what", ["removal", "expiry"])
@pytest.mark.parametrize(("kind", "share"), dealt_out(KINDS, 4))
def test_what_two_runs_moved_between_them_comes_back_whole(
    kind: str, share: Share, what: str
) -> None:
    """The next run finishes the quarantine of the one that was killed."""
    clock = Clock()
    paths = KINDS[kind]
    start = a_job(kind, clock, 3 if what == "removal" else 5 if kind == "ours" else 16)
    before = its_own(start, paths)
    clock.days(4)
    epochs = ParquetBackend(start, paths).epochs()
    said = {} if kind == "ours" else {str(paths.root): "stopped"}
    asked = expiry(2, **said) if what == "expiry" else dead(**{str(paths.root): "gone"})
    for store in stopped_anywhere(start, paths, lambda: asked, clock, share=share):
        assert what == "expiry" or its_own(store, paths) == {}
        names = read_pins(store, paths).quarantines
        assert len(names) <= 1
        for name in names:
            run_undelete(store, paths, name, UndeleteOptions(clock=clock, sleep=clock.seconds))
            assert its_own(store, paths) == before
            whole(store, paths, *epochs)


@pytest.mark.parametrize(("kind", "share"), dealt_out(KINDS, 3))
def test_an_undelete_that_was_killed_anywhere_is_finished_by_a_second_call(
    kind: str, share: Share
) -> None:
    clock = Clock()
    paths = KINDS[kind]
    start = a_job(kind, clock, 3)
    before = its_own(start, paths)
    clock.days(4)
    name = quarantine_objects(start, paths, dead(**{str(paths.root): "gone"}), clock)
    assert name is not None
    options = UndeleteOptions(clock=clock, sleep=clock.seconds)
    counted = FaultInjecting(copied(start, clock=clock, keep_times=True))
    run_undelete(counted, paths, name, options)
    for at in share(range(1, counted.changes + 1)):
        store = copied(start, clock=clock, keep_times=True)
        with contextlib.suppress(Crash):
            faulty = FaultInjecting(store, fail_at=at, mode="partial", crash=True)
            run_undelete(faulty, paths, name, options)
        whole(store, paths, *_visible(store, paths))
        clock.micros += 120_000_000
        run_undelete(store, paths, name, options)
        assert its_own(store, paths) == before, at
        whole(store, paths, 1, 2, 3)


def _visible(store: MemoryStore, paths: JobPaths) -> list[int]:
    """The epochs that a reader would see."""
    heads = paths.epoch_record, paths.legacy_metadata
    head = heads[paths.layout is Layout.LEGACY]
    return [n for n in (1, 2, 3) if store.head(head(Epoch(n))) is not None]


@share_or_all(4)
def test_a_job_goes_on_from_its_newest_epoch_after_either_quarantine_came_back(
    share: Share,
) -> None:
    clock = Clock()
    start = begun(4, clock, **SMALL)
    clock.days(4)
    gone = {str(PATHS.root): "gone"}
    for store in stopped_anywhere(start, PATHS, lambda: dead(**gone), clock, share=share):
        name = read_pins(store, PATHS).quarantines[-1]
        run_undelete(store, PATHS, name, UndeleteOptions(clock=clock, sleep=clock.seconds))
        run_word_job(store, **{**JOB, **SMALL}, max_epochs=1)
        restorable(store, PATHS, 4, 5)


def test_each_run_that_ended_has_a_quarantine_of_its_own(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    first = quarantine_objects(store, PATHS, expiry(3), clock)
    run_word_job(store, **{**JOB, **SMALL}, max_epochs=2)
    second = quarantine_objects(store, PATHS, expiry(3), clock)
    assert first
    assert second
    assert first != second
    run_undelete(store, PATHS, second, UndeleteOptions(clock=clock, sleep=clock.seconds))
    assert ParquetBackend(store, PATHS).epochs() == [3, 4, 5, 6, 7]
    # What was brought back, and moved aside once more, is in both: each is enough.
    unpin_epochs(store, PATHS, [Epoch(3), Epoch(4)], clock=clock)
    third = quarantine_objects(store, PATHS, expiry(3), clock)
    assert third not in (None, first, second)


@share_or_all(3)
@pytest.mark.parametrize("what", ["expiry", "removal"])
def test_a_quarantine_that_cannot_come_back_whole_is_refused(share: Share, what: str) -> None:
    """A run moves objects and is killed; the next one deletes the rest."""
    clock = Clock()
    start = begun(5, clock, **SMALL)
    clock.days(4)
    asked = expiry(2) if what == "expiry" else dead(**{str(PATHS.root): "gone"})
    refused = 0
    for store in stopped_anywhere(start, PATHS, lambda: asked, clock, go_on=False, share=share):
        if its_own(store, PATHS):
            quick = Pace(sleep=lambda seconds: None)
            run_gc(store, PATHS, asked, GcOptions(clock=clock, pace=quick))
        for name in read_pins(store, PATHS).quarantines:
            before, pins = without_ours(store), read_pins(store, PATHS).pinned
            try:
                run_undelete(store, PATHS, name, UndeleteOptions(clock=clock))
            except ConflictError:
                assert (without_ours(store), read_pins(store, PATHS).pinned) == (before, pins)
                refused += 1
                continue
            whole(store, PATHS, *_epochs(store))
            if _epochs(store):
                run_word_job(store, **{**JOB, **SMALL}, max_epochs=1)
    assert refused


def _epochs(store: MemoryStore) -> list[int]:
    return [n for n in range(1, 9) if store.head(PATHS.epoch_record(Epoch(n))) is not None]


def test_no_more_comes_back_than_was_planned(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    name = quarantine_objects(store, PATHS, expiry(3), clock)
    assert name
    plan, options = plan_undelete(store, PATHS, name), UndeleteOptions(clock=clock)
    less, before = replace(plan, objects=plan.objects[:-1]), without_ours(store)
    with pytest.raises(ConflictError, match="1 other objects would come back now") as caught:
        run_undelete(store, PATHS, name, options, plan=less)
    assert caught.value.facts["path"] == plan.objects[-1].path
    assert without_ours(store) == before
    assert not read_pins(store, PATHS).pinned
    assert run_undelete(store, PATHS, name, options, plan=plan) == list(plan.objects)


@pytest.mark.usefixtures("small_batches")
def test_an_epoch_that_a_writer_breaks_before_it_reads_the_pins_stays_away(clock: Clock) -> None:
    start = begun(5, clock, **SMALL)
    broken = 0
    for store in stopped_anywhere(start, PATHS, lambda: expiry(3), clock, go_on=False):
        for name in read_pins(store, PATHS).quarantines:
            moved = plan_undelete(store, PATHS, name).objects
            heads = [one for one in moved if one.path.name.endswith(".record")]
            pairs = {one.path: _manifest_of(store, one.copy) for one in heads}
            in_place = {head: ref for head, ref in pairs.items() if store.head(ref) is not None}
            # A writer whose retention deletes them just before the pins are written.
            writer = once_before(
                store,
                lambda verb, path: (verb, path) == ("put", PATHS.job_pins),
                functools.partial(store.delete_many, [*in_place, *in_place.values()]),
            )
            back: list[Moved] = []
            with contextlib.suppress(ConflictError):
                options = UndeleteOptions(clock=clock, sleep=clock.seconds)
                back = run_undelete(writer, PATHS, name, options)
            there = _epochs(store)
            assert {3, 4, 5} <= {*there}
            whole(store, PATHS, *there)
            assert read_pins(store, PATHS).pinned == {
                n for n in there if PATHS.epoch_record(Epoch(n)) in {one.path for one in back}
            }
            broken += bool(in_place)
    assert broken


def _manifest_of(store: MemoryStore, record: StatePath) -> StatePath:
    return decode_epoch_record(store.read(record), record).checkpoint_ref


def test_a_quarantine_of_which_a_purge_has_begun_is_refused(clock: Clock) -> None:
    store = begun(8, clock, **SMALL)
    name = quarantine_objects(store, PATHS, expiry(2), clock)
    assert name is not None
    clock.micros += 3_600_000_000
    counted = FaultInjecting(copied(store, clock=clock, keep_times=True))
    purge(counted, PATHS, older_than_micros=3_600_000_000, yes=True, clock=clock)
    told = set()
    for at in range(1, counted.changes + 1):
        twin = copied(store, clock=clock, keep_times=True)
        faulty = FaultInjecting(twin, fail_at=at, mode="partial", crash=True)
        with contextlib.suppress(Crash):
            purge(faulty, PATHS, older_than_micros=3_600_000_000, yes=True, clock=clock)
        clock.micros += 3_600_000_000
        before = without_ours(twin)
        try:
            run_undelete(twin, PATHS, name, UndeleteOptions(clock=clock, sleep=clock.seconds))
        except (ConflictError, NotFoundError) as error:
            told.add(error.message)
            assert without_ours(twin) == before
            assert not read_pins(twin, PATHS).pinned
        else:
            whole(twin, PATHS, *range(1, 9))
    assert told == {
        "the quarantine holds no object: it was purged, or nothing was moved to it",
        "a purge of this quarantine has begun; nothing was restored",
        "there is no such quarantine",
    }
