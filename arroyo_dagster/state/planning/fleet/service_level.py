"""Which compaction is the cheapest that meets a service level of restores.

The time of a restore is estimated: subtasks restore at the same time, and the slowest decides. The
rates are settings, since stores and machines differ.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.compaction import (
    MEBIBYTE,
    Budget,
    CompactionPlan,
    CompactionPolicy,
    CompactionSettings,
    Forecast,
)
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.rewrite import RewritePlan
from arroyo_dagster.state.model.settings import Setting
from arroyo_dagster.state.planning.compaction.plan import most_outputs
from arroyo_dagster.state.planning.costs import Prices

_MICROS = 1_000_000

MaintenancePlan = CompactionPlan | RewritePlan
Planner = Callable[[CompactionSettings], MaintenancePlan]
"""Plans a compaction of one job from facts that were read before. Reads nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRates:
    """How fast a restore is. `docs/operate/sizing.md` says which defaults were measured."""

    start_micros: Annotated[
        int,
        Setting(
            config="start_seconds",
            scale=_MICROS,
            fractions=True,
            minimum=0,
            help="Seconds until a worker begins to read: scheduling, compilation, metadata.",
        ),
    ] = 5 * _MICROS
    file_micros: Annotated[
        int,
        Setting(
            config="file_millis",
            scale=1000,
            fractions=True,
            minimum=0,
            help="Milliseconds to open a file of an Arroyo job, which reads one after the other.",
        ),
    ] = 60_000
    managed_file_micros: Annotated[
        int,
        Setting(
            config="managed_file_millis",
            scale=1000,
            fractions=True,
            minimum=0,
            help="Milliseconds to open a file of a managed job, which opens many at once.",
        ),
    ] = 3_000
    bytes_a_second: Annotated[
        int,
        Setting(
            config="mb_per_second",
            scale=1_000_000,
            fractions=True,
            above=0,
            help="Megabytes (10^6 bytes) that a subtask reads and decodes per second.",
        ),
    ] = 30 * _MICROS

    def of_job(self, *, managed: bool) -> RestoreRates:
        """Return the rates of a job, in whose `file_micros` is that of its kind."""
        return replace(self, file_micros=self.managed_file_micros) if managed else self

    def restore_seconds(self, forecast: Forecast) -> float:
        """Return how long the slowest subtask of a restore takes."""
        reads = zip(forecast.opens, forecast.read_bytes, strict=True)
        slowest = max(
            (opens * self.file_micros / _MICROS + size / self.bytes_a_second)
            for opens, size in ((0, 0), *reads)
        )
        return self.start_micros / _MICROS + slowest


DEFAULT_RATES = RestoreRates()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """What a restore of a job must not exceed; None = unlimited.

    Attributes:
        restore_seconds: the estimated time of a restore.
        files: the number of files that the newest epoch lists.

    Raises:
        InputError: no limit, or one that is not positive.
    """

    restore_seconds: float | None = None
    files: int | None = None

    def __post_init__(self) -> None:
        limits = [one for one in (self.restore_seconds, self.files) if one is not None]
        if not limits or min(limits) <= 0:
            raise InputError(
                "a service level needs a positive limit",
                next_step="pass --restore-below 60s, --most-files 200, or both",
            )

    def missed(self, forecast: Forecast, rates: RestoreRates) -> list[str]:
        """Return what a restore exceeds; empty if it meets the level."""
        found = []
        seconds = rates.restore_seconds(forecast)
        if self.restore_seconds is not None and seconds >= self.restore_seconds:
            found.append(
                f"a restore takes about {seconds:.1f} s; expected below {self.restore_seconds:g} s"
            )
        if self.files is not None and forecast.files > self.files:
            found.append(f"{forecast.files} files; expected at most {self.files}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceCost:
    """What a compaction reads and writes. Traffic within the store's region is free.

    Attributes:
        tables: the tables that are compacted, each `operator.table`.
        files_written: the maximum number of new files.
    """

    tables: tuple[str, ...] = ()
    files_read: int = 0
    files_written: int = 0
    size_bytes: int = 0

    def usd(self, prices: Prices) -> float:
        """Return the price of its requests, in US dollars. Each new file is read back once."""
        gets = self.files_read + self.files_written
        return prices.requests_usd(puts=self.files_written, gets=gets)


def cost_of(plan: MaintenancePlan) -> MaintenanceCost:
    """Return the cost of a plan."""
    if isinstance(plan, RewritePlan):
        files_written = sum(len(one.parts) for one in plan.tables)
        parts = [(one.operator, one.table, len(one.paths), one.size_bytes) for one in plan.tables]
    else:
        files_written = sum(map(most_outputs, plan.merges))
        parts = [(one.operator, one.table, len(one.paths), one.size_bytes) for one in plan.merges]
    return MaintenanceCost(
        tables=tuple(dict.fromkeys(f"{operator}.{table}" for operator, table, _, _ in parts)),
        files_read=sum(files for _, _, files, _ in parts),
        files_written=files_written,
        size_bytes=sum(size for _, _, _, size in parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What meets a service level for one job.

    Attributes:
        missed: what a restore exceeds now; empty if the job meets the level.
        before: what a restore reads now.
        plan: the cheapest plan found that meets the level; of a job that no plan helps, the one
            that comes closest; None if none is needed or none changes anything.
        settings: how `plan` was made.
        still_missed: what a restore would exceed after `plan`; empty if the level is met.
    """

    missed: tuple[str, ...]
    before: Forecast
    plan: MaintenancePlan | None = None
    settings: CompactionSettings = field(default_factory=CompactionSettings)
    still_missed: tuple[str, ...] = ()

    @property
    def after(self) -> Forecast:
        """What a restore reads after the plan."""
        return self.before if self.plan is None else self.plan.after


DEFAULTS = CompactionSettings()

_LADDER = (
    DEFAULTS,
    CompactionSettings(min_files=2),
    CompactionSettings(policy=CompactionPolicy.FULL),
)
"""From the policy that rewrites least to the one that merges everything."""


def propose(plan: Planner, level: ServiceLevel, rates: RestoreRates) -> Proposal:
    """Return the cheapest compaction that meets a service level, of those that the command line can
    execute: a policy with a budget of bytes or files. In a maintenance window there are no budgets.
    """
    first = plan(_LADDER[0])
    before, in_window = first.before, _needs_window(first)
    missed = tuple(level.missed(before, rates))
    if not missed:
        return Proposal(missed=(), before=before)
    ladder = [one for one in _LADDER if one.min_files == DEFAULTS.min_files or not in_window]
    plans = [(settings, found) for settings in ladder if _reads(found := plan(settings))]
    enough = [
        one
        for settings, found in plans
        if not level.missed(found.after, rates)
        for one in (
            [(settings, found)] if in_window else _cheaper(plan, settings, found, level, rates)
        )
    ]
    if enough:
        settings, chosen = min(enough, key=lambda one: _effort(one[1]))
        return Proposal(missed=missed, before=before, plan=chosen, settings=settings)
    if not plans:
        return Proposal(missed=missed, before=before, still_missed=missed)
    settings, chosen = min(plans, key=lambda one: _excess(one[1].after, level, rates))
    still = tuple(level.missed(chosen.after, rates))
    return Proposal(
        missed=missed, before=before, plan=chosen, settings=settings, still_missed=still
    )


def _cheaper(
    plan: Planner,
    settings: CompactionSettings,
    whole: MaintenancePlan,
    level: ServiceLevel,
    rates: RestoreRates,
) -> Iterator[tuple[CompactionSettings, MaintenancePlan]]:
    """Yield a plan that meets the level, and those with the smallest budgets of bytes and of files
    that still meet it.
    """
    yield settings, whole
    cost = cost_of(whole)
    units = {
        "size_bytes": (MEBIBYTE, -(-cost.size_bytes // MEBIBYTE)),
        "files": (1, cost.files_read),
    }
    for name, (unit, most) in units.items():
        too_few, enough, found = 0, most, None
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            limits: dict[str, Any] = {name: middle * unit}
            budgeted = replace(settings, budget=Budget(**limits))
            tried = plan(budgeted)
            if level.missed(tried.after, rates):
                too_few = middle
            else:
                enough, found = middle, (budgeted, tried)
        if found is not None:
            yield found


def _needs_window(plan: MaintenancePlan) -> bool:
    """Return whether the job must be stopped for the plan: an Arroyo job that runs."""
    return isinstance(plan, RewritePlan) and plan.condition is JobCondition.RUNNING


def _reads(plan: MaintenancePlan) -> bool:
    return cost_of(plan).files_read > 0


def _effort(plan: MaintenancePlan) -> tuple[int, int]:
    cost = cost_of(plan)
    return cost.size_bytes, cost.files_read


def _excess(forecast: Forecast, level: ServiceLevel, rates: RestoreRates) -> float:
    """Return by which factor a restore exceeds the level at most."""
    seconds = rates.restore_seconds(forecast)
    return max(
        0.0 if level.restore_seconds is None else seconds / level.restore_seconds,
        0.0 if level.files is None else forecast.files / level.files,
    )


def command_of(job: str, proposal: Proposal) -> str | None:
    """Return the command that prints the plan of a proposal; with --yes it executes it.

    None if no plan changes anything.
    """
    plan, settings = proposal.plan, proposal.settings
    if plan is None:
        return None
    if _needs_window(plan):
        words = ["arroyo-state", "compact", "window", job, "--policy", settings.policy.value]
        return shlex.join([*words, "--now"])
    words = ["arroyo-state", "compact", "run", job]
    if settings.policy is not DEFAULTS.policy:
        words += ["--policy", settings.policy.value]
    if settings.min_files != DEFAULTS.min_files:
        words += ["--min-files", str(settings.min_files)]
    if settings.budget.size_bytes is not None:
        words += ["--max-mb", str(settings.budget.size_bytes // MEBIBYTE)]
    if settings.budget.files is not None:
        words += ["--max-files", str(settings.budget.files)]
    return shlex.join(words)
