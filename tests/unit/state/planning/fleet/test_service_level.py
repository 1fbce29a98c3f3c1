"""Service levels: the cheapest plan that meets one, and honesty where none does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.compaction import (
    MEBIBYTE,
    CompactionPlan,
    CompactionPolicy,
    CompactionSettings,
    Forecast,
    PairsMerge,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.rewrite import RewritePlan
from arroyo_dagster.state.planning.compaction.budget import within_budget
from arroyo_dagster.state.planning.compaction.plan import gain, most_outputs
from arroyo_dagster.state.planning.costs import Prices
from arroyo_dagster.state.planning.fleet.service_level import (
    Proposal,
    RestoreRates,
    ServiceLevel,
    command_of,
    cost_of,
    propose,
)

RATES = RestoreRates(start_micros=0, file_micros=1_000_000, bytes_a_second=MEBIBYTE)
JOB: dict[str, Any] = {
    "pipeline": None,
    "job": JobId("job"),
    "epoch": Epoch(1),
    "ref": StatePath("r"),
}


def merge(table: int, files: int, size_bytes: int) -> PairsMerge:
    sizes = tuple(size_bytes // files for _ in range(files))
    return PairsMerge(
        operator=OperatorId("o"),
        table=TableName(f"t{table}"),
        inputs=tuple(StatePath(f"t{table}/{at}") for at in range(files)),
        size_bytes=sum(sizes),
        from_oldest=True,
        sizes=sizes,
        level=0,
    )


class Job:
    """Plans with the real budgets over made-up merges: bin-pack finds every second of them."""

    def __init__(self, merges: list[PairsMerge]) -> None:
        self.merges = merges
        self.before = self._forecast([])
        self.plans = 0

    def _forecast(self, done: list[PairsMerge]) -> Forecast:
        files = sum(len(one.paths) for one in self.merges)
        files -= sum(len(one.paths) - most_outputs(one) for one in done)
        size = sum(one.size_bytes for one in self.merges)
        return Forecast(files=files, size_bytes=size, opens=(files,), read_bytes=(size,))

    def __call__(self, settings: CompactionSettings) -> CompactionPlan:
        self.plans += 1
        every = settings.policy is CompactionPolicy.FULL
        offered = self.merges if every else self.merges[::2]
        done, _ = within_budget(settings.budget, offered, gain)
        return CompactionPlan(
            **JOB, merges=tuple(done), before=self.before, after=self._forecast(done)
        )


JOBS = st.lists(
    st.tuples(st.integers(2, 40), st.integers(40, 50 * MEBIBYTE)), min_size=1, max_size=6
).map(lambda found: Job([merge(at, files, size) for at, (files, size) in enumerate(found)]))


@given(job=JOBS, files=st.integers(1, 200), seconds=st.none() | st.floats(0.5, 500))
def test_a_proposal_meets_the_level_or_says_that_nothing_does(
    job: Job, files: int, seconds: float | None
) -> None:
    level = ServiceLevel(restore_seconds=seconds, files=files)
    found = propose(job, level, RATES)
    assert list(found.missed) == level.missed(job.before, RATES)
    assert job.plans < 60
    everything = job(CompactionSettings(policy=CompactionPolicy.FULL))
    possible = not level.missed(everything.after, RATES)
    if not found.missed:
        assert found.plan is None
        assert command_of("job", found) is None
    elif possible:
        assert found.plan is not None
        assert not found.still_missed
        assert not level.missed(found.plan.after, RATES)
        assert cost_of(found.plan).size_bytes <= cost_of(everything).size_bytes
        assert job(found.settings) == found.plan  # what the command plans
    else:
        assert list(found.still_missed) == level.missed(found.after, RATES) != []


def test_no_smaller_budget_of_files_meets_the_level() -> None:
    job = Job([merge(at, 4 * (at + 1), 1000 * (at + 1)) for at in range(6)])
    level = ServiceLevel(files=60)
    found = propose(job, level, RATES)
    most = found.settings.budget.files
    assert most is not None
    for fewer in range(1, most):
        smaller = replace(found.settings, budget=replace(found.settings.budget, files=fewer))
        assert level.missed(job(smaller).after, RATES)
    assert command_of("shop/job", found) == (
        f"arroyo-state compact run shop/job --policy full --max-files {most}"
    )


def test_the_slowest_subtask_decides_how_long_a_restore_takes() -> None:
    forecast = Forecast(files=9, opens=(1, 5, 3), read_bytes=(8 * MEBIBYTE, MEBIBYTE, MEBIBYTE))
    assert RATES.restore_seconds(forecast) == pytest.approx(9)
    assert RATES.restore_seconds(Forecast()) == 0
    managed = replace(RATES, start_micros=2_000_000, managed_file_micros=0).of_job(managed=True)
    assert managed.restore_seconds(forecast) == pytest.approx(10)
    assert RATES.of_job(managed=False) is RATES


def test_the_cost_counts_each_file_once() -> None:
    job = Job([merge(0, 4, 4000), merge(1, 2, 2000)])
    cost = cost_of(job(CompactionSettings(policy=CompactionPolicy.FULL)))
    assert (cost.tables, cost.files_read, cost.files_written) == (("o.t0", "o.t1"), 6, 2)
    assert cost.size_bytes == 6000
    assert cost.usd(Prices()) == pytest.approx(2 * 0.005e-3 + 8 * 0.0004e-3)


@pytest.mark.parametrize("limits", [{}, {"files": 0}, {"restore_seconds": -1.0}])
def test_a_level_without_a_positive_limit_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="positive limit"):
        ServiceLevel(**limits)


def test_a_running_arroyo_job_is_compacted_in_a_window_without_budgets() -> None:
    before = Forecast(files=10, opens=(10,), read_bytes=(10,))
    tried: list[CompactionSettings] = []

    def plan(settings: CompactionSettings) -> RewritePlan:
        tried.append(settings)
        return RewritePlan(
            **JOB,
            worker_generation=None,
            condition=JobCondition.RUNNING,
            before=before,
            after=before,
        )

    found = propose(plan, ServiceLevel(files=2), RATES)
    assert found.plan is None  # nothing to rewrite
    assert found.still_missed == found.missed
    assert all(one.budget.files is None and one.min_files == 4 for one in tried)
    shown = Proposal(missed=("x",), before=before, plan=plan(tried[0]), settings=tried[0])
    command = "arroyo-state compact window job --policy bin-pack --now"
    assert command_of("job", shown) == command


def test_seconds_below_a_limit_are_not_equal_to_it() -> None:
    forecast = Forecast(files=2, opens=(2,), read_bytes=(0,))
    assert ServiceLevel(restore_seconds=2.0).missed(forecast, RATES)
    assert not ServiceLevel(restore_seconds=math.nextafter(2.0, 3)).missed(forecast, RATES)
