"""A maintenance window of a running Arroyo job, as values.

The job is stopped with a checkpoint, its state is rewritten or edited, and it is started again. It
is started again even if a step fails.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Generic, Protocol, TypeVar

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.job_facts import JobFacts
from arroyo_dagster.state.model.settings import Setting
from arroyo_dagster.state.model.verify import MAX_LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """The maximum duration of each step of a window, in seconds.

    Attributes:
        stop: until the job has stopped with a checkpoint.
        rewrite: to write, verify and publish; after that the rewrite is abandoned unpublished.
        start: until the job runs again. A start that takes longer is reported and checked later.
        quiet: for a job that was already stopped: its objects must not have changed for this long
            before metadata is written. A job that the window itself stopped needs no quiet period.

    Raises:
        InputError: a limit that is not positive; `quiet` may be 0.
    """

    stop: Annotated[
        float,
        Setting(
            config="stop_seconds",
            fractions=True,
            above=0,
            metavar="SECONDS",
            help="How many seconds the job may take to stop.",
        ),
    ] = 300.0
    rewrite: Annotated[
        float,
        Setting(
            config="rewrite_seconds",
            fractions=True,
            above=0,
            metavar="SECONDS",
            help="How many seconds the job may be down for the rewrite.",
        ),
    ] = 1800.0
    start: Annotated[
        float,
        Setting(
            config="start_seconds",
            fractions=True,
            above=0,
            metavar="SECONDS",
            help="How many seconds the job may take to run again.",
        ),
    ] = 300.0
    quiet: Annotated[
        float,
        Setting(
            config="quiet_seconds",
            fractions=True,
            minimum=0,
            metavar="SECONDS",
            help="For a job that was stopped before: how many seconds its files must not have "
            "changed.",
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        if min(self.stop, self.rewrite, self.start) <= 0 or self.quiet < 0:
            raise InputError(
                "a limit of a window is not above 0 seconds",
                stop=self.stop,
                rewrite=self.rewrite,
                start=self.start,
                quiet=self.quiet,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSteps:
    """How the steps of a window are carried out.

    Attributes:
        limits: how long each may take.
        verify_level: how closely the rewritten epoch is verified before the job is started.
    """

    limits: WindowLimits = field(default_factory=WindowLimits)
    verify_level: Annotated[
        int,
        Setting(
            option="level",
            minimum=0,
            maximum=MAX_LEVEL,
            help="How closely to verify the rewritten epoch before the start, 0 to 4.",
        ),
    ] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """The record beside a job, written before the job is stopped and deleted once it runs again.

    Attributes:
        pipeline: the pipeline's id in Arroyo's API, in both layouts.
        run_id: of the run that is stopped; a later run was not started by this window.
        edits: the window edits the state: half published, it must not be started.
    """

    pipeline: PipelineId
    job: JobId
    run_id: int | None
    owner: str
    opened_at_micros: int
    edits: bool = False
    version: int = 1


class WindowEnd(enum.Enum):
    """How a window ended.

    Attributes:
        NOTHING_TO_DO: there was nothing to change; the job was not touched.
        DRY_RUN: only planned.
        REWRITTEN: rewritten or edited, and runs again.
        KEPT: stopped and started again with unchanged state; `problem` has the reason.
        UNDONE: it did not run from the changed state, or that was published in part; it runs again
            from the original state.
        NOT_STARTED: the job may be down: start it by hand, or let the next check start it.
        AT_REST: it had been stopped before the window: rewritten or edited, and not started.
        RECOVERED: an earlier window was interrupted: started again, nothing else done.
    """

    NOTHING_TO_DO = "nothing to do"
    DRY_RUN = "planned only"
    REWRITTEN = "rewritten, runs again"
    KEPT = "state as it was, runs again"
    UNDONE = "put back, runs again"
    NOT_STARTED = "NOT STARTED AGAIN"
    AT_REST = "rewritten, stays stopped"
    RECOVERED = "started again after a window that was cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStep:
    """One completed step, with its time and result."""

    at_micros: int
    did: str


class PlannedChange(Protocol):
    """The plan of a change of a stopped job's state."""

    @property
    def epoch(self) -> Epoch:
        """The epoch that the next start restores."""


class WindowChange(Protocol):
    """What was done to the state of a stopped job: a rewrite, or an edit."""

    @property
    def published(self) -> bool:
        """Whether the epoch was changed."""

    @property
    def plan(self) -> PlannedChange:
        """What was planned after the job had stopped."""


PlanT = TypeVar("PlanT")
ChangeT = TypeVar("ChangeT", bound=WindowChange)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOutcome(Generic[PlanT, ChangeT]):
    """What a window did.

    Attributes:
        plan: what was planned before the job was stopped; None if it was not planned.
        change: what was rewritten or edited; None if nothing was.
        problem: the first error.
        facts: the last facts of the job from Arroyo's API.
        downtime_seconds: from the request to stop until it ran again.
    """

    end: WindowEnd
    steps: tuple[WindowStep, ...] = ()
    plan: PlanT | None = None
    change: ChangeT | None = None
    problem: ArroyoStateError | None = None
    facts: JobFacts | None = None
    downtime_seconds: float = 0.0

    @property
    def started(self) -> bool:
        """Whether the job runs, or the window was not responsible for starting it."""
        return self.end is not WindowEnd.NOT_STARTED
