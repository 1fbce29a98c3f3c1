"""What is said of a job by those who may know: facts, never a decision.

Arroyo's state on a store does not tell whether a job runs, nor what people call its pipeline. A
REST server, a controller's database or the user may; each is a *source*, and what they say is
merged here so that nothing is lost: who said it, who contradicts, who could not answer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths


class JobCondition(enum.Enum):
    """What a job is doing, as far as anybody said.

    `CHANGING` covers every state that will become another one by itself. `GONE` is only ever the
    user's word: that a source does not have a job is an `Absence`, which proves less.
    """

    RUNNING = "running"
    CHANGING = "changing"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    GONE = "gone"
    UNKNOWN = "unknown"

    @property
    def at_rest(self) -> bool:
        """Whether no worker runs until somebody starts the job again."""
        return self in (JobCondition.STOPPED, JobCondition.FINISHED, JobCondition.FAILED)


_CHANGING_STATES = (
    *("Created", "Compiling", "Scheduling", "Rescaling", "CheckpointStopping", "Recovering"),
    *("Restarting", "Stopping", "Finishing", "Failing"),
)
_CONDITIONS = {
    "Running": JobCondition.RUNNING,
    "Stopped": JobCondition.STOPPED,
    "Finished": JobCondition.FINISHED,
    "Failed": JobCondition.FAILED,
    **dict.fromkeys(_CHANGING_STATES, JobCondition.CHANGING),
}


def condition_of(state: str | None) -> JobCondition:
    """What Arroyo's word for a state means; UNKNOWN for one that this package has never heard of.

    Source: arroyo-state.md 10.3, the states of a job; crates/arroyo-controller/src/states/mod.rs.
    """
    return _CONDITIONS.get(state or "", JobCondition.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """An epoch that a source lists, neither failed nor already collected.

    Attributes:
        ready: whether it is finished, its commit included.
        state: the word of the database, where that was asked (`ready`, `committing`…).
        final: whether the job stopped with it.
    """

    epoch: Epoch
    ready: bool
    state: str | None = None
    final: bool | None = None
    min_epoch: Epoch | None = None
    start_time_micros: int | None = None
    finish_time_micros: int | None = None


def newest_ready(checkpoints: Iterable[CheckpointFacts]) -> Epoch | None:
    """The newest epoch among `checkpoints` that is ready; None if none is."""
    return max((one.epoch for one in checkpoints if one.ready), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What one source says of a job. None: it does not say.

    Attributes:
        source: who says so; merged facts name who said the condition.
        name: of the pipeline, as people know it.
        state: Arroyo's own word, of which `condition` is the meaning.
        run_id: one higher at every start; in the protocol layout the worker generation.
        newest_ready_epoch, checkpoints: the epochs, oldest first. An empty tuple is no proof that
            there are none: a server lists none for a job that stopped in leader mode.
        action, action_in_progress: what the server would do next if asked, and whether it is
            still at it.
        stop_requested: how the job was last asked to stop (`none`, `checkpoint`…).
        running_desired: whether the job is meant to run.
        failure: the reason of a failure.
        preview: whether this is a short-lived preview.
        state_url: where the pipeline keeps its state, if it has a place of its own.
        ignore_state_before_epoch: epochs below are not restored any more.
    """

    job: JobId
    source: str | None = None
    pipeline: PipelineId | None = None
    name: str | None = None
    condition: JobCondition = JobCondition.UNKNOWN
    state: str | None = None
    run_id: int | None = None
    newest_ready_epoch: Epoch | None = None
    checkpoints: tuple[CheckpointFacts, ...] | None = None
    action: str | None = None
    action_in_progress: bool | None = None
    stop_requested: str | None = None
    running_desired: bool | None = None
    failure: str | None = None
    start_time_micros: int | None = None
    finish_time_micros: int | None = None
    checkpoint_interval_micros: int | None = None
    preview: bool | None = None
    state_url: str | None = None
    ignore_state_before_epoch: Epoch | None = None

    @property
    def knows_state(self) -> bool:
        """Whether the source knows what the job is doing, even in a word nobody here knows."""
        return self.condition is not JobCondition.UNKNOWN or self.state is not None

    def concerns(self, paths: JobPaths) -> bool:
        """Whether these facts are of the job at `paths`. The legacy layout names no pipeline."""
        same = None in (self.pipeline, paths.pipeline) or self.pipeline == paths.pipeline
        return self.job == paths.job and same


class Absence(enum.Enum):
    """How surely a source that answered does not have a job.

    None of them says that the source is the one that ran the job: a server of another cluster
    has none of its jobs either.
    """

    NOT_LISTED = "not listed"  # a server's lists leave out previews
    NO_JOB = "no such job"
    NO_PIPELINE = "no such pipeline"
    UNSAID = "nothing said"  # by the user


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAnswer:
    """What one source answered about one job: facts, that it has no such job, or a problem."""

    source: str
    facts: JobFacts | None = None
    absence: Absence | None = None
    problem: ArroyoStateError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A fact that sources state differently; in the order in which they were asked."""

    fact: str
    answers: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        shown = (
            f"{value.value if isinstance(value, enum.Enum) else value} ({source})"
            for source, value in self.answers
        )
        return f"{self.fact}: {' or '.join(shown)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """All that is known of a job.

    Attributes:
        facts: for each fact the first source that knows it; what belongs to the state (state, run
            id, action, times…) comes from one source, never pieced together.
        answers: what each source answered, in the order asked.
    """

    paths: JobPaths
    facts: JobFacts
    answers: tuple[SourceAnswer, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def problems(self) -> tuple[ArroyoStateError, ...]:
        """Why sources that were asked could not answer."""
        return tuple(answer.problem for answer in self.answers if answer.problem is not None)

    @property
    def reason(self) -> str | None:
        """Why the condition is unknown; None if it is known."""
        if self.facts.condition is not JobCondition.UNKNOWN:
            return None
        return "; ".join(_why(answer) for answer in self.answers) or (
            "no job-status source is configured"
        )


def _why(answer: SourceAnswer) -> str:
    if answer.problem is not None:
        return f"{answer.source}: {answer.problem.message}"
    if answer.absence is not None:
        return f"{answer.source}: {answer.absence.value}"
    state = None if answer.facts is None else answer.facts.state
    if state:
        return f"{answer.source}: unknown state {state!r}"
    return f"{answer.source}: reports no state"


_SHARED = ("pipeline", "name", "checkpoint_interval_micros", "preview", "state_url")
_COMPARED = ("pipeline", "name", "condition", "run_id", "newest_ready_epoch")


def merge_answers(paths: JobPaths, answers: Sequence[SourceAnswer]) -> JobAnswer:
    """Put together what the sources say of the job at `paths`, the first one first."""
    known = [answer.facts for answer in answers if answer.facts is not None]
    # A state that is not understood still counts: an older source must not overrule it.
    base = next((one for one in known if one.knows_state), None)
    facts = JobFacts(job=paths.job) if base is None else base
    changes: dict[str, Any] = {name: _first(known, name) for name in _SHARED}
    changes["pipeline"] = changes["pipeline"] or paths.pipeline
    for one in known:
        if one.checkpoints or one.newest_ready_epoch is not None:
            changes["checkpoints"] = one.checkpoints
            changes["newest_ready_epoch"] = one.newest_ready_epoch
            break
    found = (_disagreement(known, name) for name in _COMPARED)
    return JobAnswer(
        paths=paths,
        facts=replace(facts, **changes),
        answers=tuple(answers),
        disagreements=tuple(one for one in found if one is not None),
    )


def _first(known: Iterable[JobFacts], name: str) -> Any:
    return next((value for one in known if (value := getattr(one, name)) is not None), None)


def _disagreement(facts: Iterable[JobFacts], name: str) -> Disagreement | None:
    values = [(one.source or "", getattr(one, name)) for one in facts]
    known = [(who, it) for who, it in values if it not in (None, JobCondition.UNKNOWN)]
    if len({value for _, value in known}) < 2:
        return None
    return Disagreement(fact=name, answers=tuple(known))
