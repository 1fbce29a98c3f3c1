"""Every job that a real Arroyo wrote, evolved into every other one: a job of the same SQL takes the
whole state, any other is refused with the reason, also if the pairs are taken that it suggests."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from arroyo_dagster import JobPaths, ObjectStore, ParquetBackend, WriteProtected, run_undo
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.planning.surgery.matching import match_operators, shapes_of
from tests.arroyo_jobs import content, stopped
from tests.compat.test_surgery import NOW, jobs, positions, verify, with_other_outputs
from tests.damages import copy_job
from tests.evolved_jobs import as_suggested
from tests.formats import Overrides
from tests.internals import StateSource, plan_evolve, run_evolve
from tests.shares import Share, share_or_all

__all__ = ["jobs"]

Job = tuple[ObjectStore, JobPaths]
NO_COUNTERPART = "no operator of the source is like it"
REASONS = {
    ("carrier_totals", "grand_total"): r"its keys are \(\), and in the source \(_key_carrier",
    ("grand_total", "carrier_totals"): r"its keys are \(_key_carrier .*in the source \(\)",
    ("hourly_departures", "median_delays"): "its window is 21600 s long, and in the source 3600 s",
    ("median_delays", "hourly_departures"): "its window is 3600 s long, and in the source 21600 s",
}
"""Of pairs whose operators have the same ids; all others have operators without a counterpart."""


def sql_of(job: Job) -> str:
    """What the SQL of a job is called: the two clusters ran the same."""
    store, paths = job
    names = [one.operator for one in ParquetBackend(store, paths).load().operators]
    (sink,) = [one for one in names if one.startswith("sink_")]
    return str(paths.job) if sink.startswith("sink_result") else sink


def pairs(jobs: dict[str, Job], *, equal: bool) -> list[tuple[Job, Job]]:
    named = [(sql_of(one), one) for one in jobs.values()]
    every = itertools.product(named, named)
    return [(a, b) for (first, a), (second, b) in every if (first == second) is equal]


def test_operators_match_by_what_they_hold(jobs: dict[str, Job]) -> None:
    same = pairs(jobs, equal=True)
    assert (len(same), len(pairs(jobs, equal=False))) == (23, 202)
    for a, b in same:
        theirs, ours = (ParquetBackend(*one).load() for one in (a, b))
        found = match_operators(shapes_of(theirs), shapes_of(ours), Overrides())
        assert found.suggestions == ()
        assert all(one.source == one.operator for one in found.matches)
        stateful = {one.operator for one in ours.operators if one.tables}
        sinks = {one for one in stateful if one.startswith("sink_")}
        assert {one.operator for one in found.matches} >= stateful - sinks


@share_or_all(6)
def test_jobs_of_one_sql_take_the_whole_state(jobs: Any, share: Share) -> None:
    for (store, paths), (other, target) in share(pairs(jobs, equal=True)):
        twin = with_other_outputs(other, target)
        was = copy_job(twin, target)
        source = StateSource(store=WriteProtected(store), paths=paths)
        assert run_evolve(source, twin, target, stopped(target), None, NOW).published
        assert content(twin, target) == content(store, paths)
        assert positions(twin, target) == positions(store, paths)
        assert verify(twin, target).errors == ()
        assert run_undo(twin, target, stopped(target)).operation == "evolve"
        for info in other.list(target.root):
            assert twin.read(info.path) == was.read(info.path)


@share_or_all(24)
def test_jobs_of_other_sql_are_refused_with_the_reason(jobs: Any, share: Share) -> None:
    cases = pairs(jobs, equal=False)
    known = [one for one in cases if (one[0][1].job, one[1][1].job) in REASONS]
    assert len(known) == len(REASONS)
    for (store, paths), (other, target) in [*share(cases), *share(known)]:
        twin = with_other_outputs(other, target)
        source = StateSource(store=WriteProtected(store), paths=paths)
        expected = REASONS.get((str(paths.job), str(target.job)), "")
        act = partial(plan_evolve, source, WriteProtected(twin), target, stopped(target))
        with pytest.raises(InputError) as refused:
            as_suggested(act)
        assert refused.match(
            expected or f"{NO_COUNTERPART}|its keys are|its gap is|nothing shows which"
        )
