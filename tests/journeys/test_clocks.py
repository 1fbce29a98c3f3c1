"""Ages are the store's: no clock of a writer makes an epoch or a file older than it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    GcRequest,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    StatePath,
    WorkerGeneration,
    WriteProtected,
    list_jobs,
    open_store,
    plan_gc,
    run_gc,
)
from arroyo_dagster.state.storage.wrappers import Counting
from tests.compat.arroyo import ARCHIVES, unpack
from tests.fleets import OPERATOR, SECOND, TABLE, Written, legacy_job, protocol_job
from tests.formats import GcPlan
from tests.gc_jobs import DAY, Clock, expiry, orphans, without_ours
from tests.internals import Pace, UndeleteOptions, run_undelete
from tests.jobs import copied
from tests.stores import Listing, ObjectInfo, Wrapper

PROTOCOL, LEGACY = protocol_job("p"), legacy_job("j")
BOTH = pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
STOPPED = {"p/main": "stopped", "j": "stopped"}
WEEK = 7 * DAY
QUICK = Pace(sleep=lambda seconds: None)


def write(job: Written, clock: Clock, epochs: int, *, apart: int = SECOND, off: int = 0) -> None:
    """Write epochs by a writer whose clock is `off` by so many microseconds."""
    for _ in range(epochs):
        clock.micros += apart
        job._start = clock.micros + off - (job.epoch + 1) * SECOND
        job.write()


def begun(paths: JobPaths, clock: Clock, epochs: int = 15, **how: int) -> Written:
    job = Written(MemoryStore(clock=clock), paths, start=clock.micros)
    write(job, clock, epochs, **how)
    return job


def planned(
    store: ObjectStore, paths: JobPaths, asked: GcRequest, clock: Clock, **how: Any
) -> GcPlan:
    return plan_gc(WriteProtected(store), paths, asked, now_micros=clock(), **how)


def refused(job: Written, asked: GcRequest, clock: Clock) -> ProtocolError:
    """Neither planned nor done."""
    before = without_ours(job.store)
    with pytest.raises(ProtocolError, match="clock") as found:
        planned(job.store, job.paths, asked, clock)
    with pytest.raises(ProtocolError, match="clock"):
        run_gc(job.store, job.paths, asked, GcOptions(clock=clock, pace=QUICK))
    assert without_ours(job.store) == before
    return found.value


# ---- expiry by age -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("listed", [True, False], ids=["with-sizes", "without"])
def test_age_of_an_epoch_is_taken_from_the_store(paths: JobPaths, listed: bool) -> None:
    """The writer's clock was ten days behind until its last epochs."""
    clock = Clock()
    job = begun(paths, clock, off=-10 * DAY)
    write(job, clock, 2)
    asked = expiry(micros=WEEK, **STOPPED)
    assert planned(job.store, paths, asked, clock, with_sizes=listed).epochs == ()
    clock.days(8)
    write(job, clock, 2)
    plan = planned(job.store, paths, asked, clock, with_sizes=listed)
    newest = 19
    legacy_keeps = newest - 1 - 10
    expected = range(1, legacy_keeps if paths.layout is Layout.LEGACY else newest - 1)
    assert plan.epochs == tuple(expected)


@BOTH
@pytest.mark.parametrize("off", [-10 * DAY, 10 * DAY, -301 * SECOND, 301 * SECOND])
def test_clocks_that_disagree_are_refused_with_both_times(paths: JobPaths, off: int) -> None:
    clock = Clock()
    job = begun(paths, clock, off=off)
    clock.days(30)
    running = orphans(**dict.fromkeys(STOPPED, "running"))
    stopped = (expiry(micros=WEEK, **STOPPED), orphans(**STOPPED))
    for asked in stopped if off > 0 else (running,):
        error = refused(job, asked, clock)
        assert "by its writer's clock" in error.message
        assert "by the store's" in error.message
        assert error.message.count("Z") >= 2
        assert "ahead" in error.message if off > 0 else "behind" in error.message
        assert "--keep" in str(error.next_step)
    if off < 0:  # its objects are younger than its writer says, which no decision minds
        for asked in stopped:
            planned(job.store, paths, asked, clock)


@BOTH
def test_a_stopped_job_that_was_copied_is_as_old_as_the_copy(paths: JobPaths, clock: Clock) -> None:
    job = begun(paths, clock)
    generation = None if paths.layout is Layout.LEGACY else job.generation
    orphan = paths.data_file(OPERATOR, TABLE, 0, Epoch(3), generation, attempt="left")
    job.store.put(orphan, b"orphan")
    clock.days(30)
    assert isinstance(job.store, MemoryStore)
    job.store = copied(job.store, clock=clock)
    assert "copied" in refused(job, orphans(**dict.fromkeys(STOPPED, "running")), clock).message
    for days, collected in ((0, False), (8, True)):
        clock.days(days)
        assert bool(planned(job.store, paths, expiry(micros=WEEK, **STOPPED), clock).epochs) is (
            collected
        )
        data = planned(job.store, paths, orphans(**STOPPED), clock).data
        assert [one.path for one in data] == ([orphan] if collected else [])
    run_gc(job.store, paths, orphans(**STOPPED), GcOptions(clock=clock, pace=QUICK))
    assert job.store.head(orphan) is None


@pytest.mark.parametrize(
    ("paths", "rewritten"),
    [
        (PROTOCOL, PROTOCOL.manifest(WorkerGeneration(1), Epoch(15))),
        (LEGACY, LEGACY.legacy_metadata(Epoch(15))),
        (LEGACY, LEGACY.operator_metadata(OPERATOR, Epoch(15))),
    ],
    ids=["manifest", "checkpoint-metadata", "operator-metadata"],
)
def test_metadata_that_was_rewritten_later_is_no_error_of_a_clock(
    paths: JobPaths, rewritten: StatePath
) -> None:
    """By an in-place compaction, by Arroyo's cleanup or restore, long after the epoch."""
    clock = Clock()
    job = begun(paths, clock)
    clock.days(30)
    job.store.put(rewritten, job.store.read(rewritten))
    assert planned(job.store, paths, expiry(micros=WEEK, **STOPPED), clock).epochs
    planned(job.store, paths, orphans(**STOPPED), clock)


class Timeless(Wrapper):
    """A store that does not report when objects were written."""

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Any:
        for info in self.inner.list(prefix, start_after=start_after):
            yield replace(info, modified_micros=None)

    def list_dir(self, prefix: str = "") -> Listing:
        found = self.inner.list_dir(prefix)
        return replace(
            found, objects=tuple(replace(one, modified_micros=None) for one in found.objects)
        )

    def head(self, path: Any) -> ObjectInfo | None:
        found = self.inner.head(path)
        return None if found is None else replace(found, modified_micros=None)


@BOTH
@pytest.mark.parametrize("listed", [True, False], ids=["with-sizes", "without"])
def test_an_epoch_without_a_time_never_expires_by_age(paths: JobPaths, listed: bool) -> None:
    clock = Clock()
    job = begun(paths, clock)
    clock.days(30)
    timeless = Timeless(job.store)
    asked = expiry(micros=WEEK, **STOPPED)
    plan = planned(timeless, paths, asked, clock, with_sizes=listed)
    assert plan.epochs == ()
    assert plan.stays["no_time"] == (15, 0)
    with pytest.raises(ProtocolError, match="does not report when"):
        run_gc(timeless, paths, asked, GcOptions(clock=clock, pace=QUICK))
    assert planned(timeless, paths, expiry(2, **STOPPED), clock, with_sizes=listed).epochs


def test_ages_cost_one_listing_and_no_request_an_epoch(clock: Clock) -> None:
    job = begun(PROTOCOL, clock, 40)
    clock.days(30)
    counted = Counting(job.store)
    planned(counted, PROTOCOL, expiry(2, **STOPPED), clock, with_sizes=False)
    by_count = counted.calls.copy()
    counted.calls.clear()
    planned(counted, PROTOCOL, expiry(micros=WEEK, **STOPPED), clock, with_sizes=False)
    by_age = counted.calls
    assert by_age["read"] == by_count["read"]
    assert by_age["list"] + by_age["list_dir"] == 1
    assert by_age["head"] <= 2


def test_an_epoch_that_a_listing_hides_is_asked_for_by_name(clock: Clock) -> None:
    job = begun(PROTOCOL, clock, off=-10 * DAY)
    write(job, clock, 2)

    class Cut(Wrapper):
        def list_dir(self, prefix: str = "") -> Listing:
            found = self.inner.list_dir(prefix)
            return replace(found, objects=found.objects[:3])

    plan = planned(
        Cut(job.store), PROTOCOL, expiry(micros=WEEK, **STOPPED), clock, with_sizes=False
    )
    assert plan.epochs == ()
    assert "no_time" not in plan.stays


def test_epochs_brought_back_do_not_hold_newer_ones(clock: Clock) -> None:
    """They are pinned, and their objects are new by the store's clock."""
    job = begun(PROTOCOL, clock)
    clock.days(10)
    write(job, clock, 2)
    said = {"p/main": "stopped"}
    moved = run_gc(
        job.store, PROTOCOL, expiry(12, **said), GcOptions(quarantine=True, clock=clock, pace=QUICK)
    )
    assert moved.plan.epochs == (1, 2, 3, 4, 5)
    run_undelete(
        job.store,
        PROTOCOL,
        str(moved.quarantine),
        UndeleteOptions(clock=clock, sleep=lambda _: None),
    )
    plan = planned(job.store, PROTOCOL, expiry(micros=WEEK, **said), clock)
    assert plan.keep_from == 16
    assert plan.epochs == tuple(range(6, 16))


# ---- a real Arroyo -------------------------------------------------------------------------------


@pytest.mark.parametrize("archive", ARCHIVES)
def test_clocks_of_a_real_arroyo_and_its_store_agree(archive: str, tmp_path: Path) -> None:
    store = WriteProtected(open_store(unpack(archive, tmp_path)))
    for paths in list_jobs(store):
        said = {str(paths.root): "stopped"}
        asked = expiry(micros=DAY, **said)
        plan = plan_gc(store, paths, asked)
        assert plan.keep_from is not None
        plan_gc(store, paths, orphans(**said))
