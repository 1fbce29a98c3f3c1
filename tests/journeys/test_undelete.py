"""All that a run moved to quarantine comes back, metadata last, or nothing does: whatever run was
stopped where, `undelete` leaves no job that cannot be started, or that has an epoch without files.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster import (
    Epoch,
    GcOptions,
    GcRequest,
    JobPaths,
    ParquetBackend,
    run_gc,
    unpin_epochs,
)
from arroyo_dagster.errors import ConflictError, NotFoundError
from arroyo_dagster.state.operations.gc.undelete import plan_undelete
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import (
    JOB,
    PATHS,
    Clock,
    begun,
    expiry,
    whole,
    without_ours,
)
from tests.internals import Pace, UndeleteOptions, purge, read_pins, run_undelete
from tests.jobs import copied, run_word_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")

SMALL: dict[str, Any] = {"sinks": 0, "parallelism": 1}


def quarantine_objects(store: Any, paths: JobPaths, asked: GcRequest, clock: Clock) -> str | None:
    """Move what a request is about into quarantine."""
    options = GcOptions(quarantine=True, clock=clock, pace=Pace(sleep=lambda seconds: None))
    return run_gc(store, paths, asked, options).quarantine


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
