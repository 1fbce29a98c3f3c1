"""The status of jobs as sources report it: facts, no decisions.

Arroyo's state on a store does not contain whether a job runs, nor the name of its pipeline. A REST
server, a controller's database or the user may report it; each is a *source*. This module merges
their answers without losing which source reported what, which disagree, and which failed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths


class JobCondition(enum.Enum):
    """The status of a job, as far as it is known.

    `CHANGING` covers every state that will change by itself. Only the user can report `GONE`; a
    source that does not have a job reports an `Absence`, which proves less.
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
        """Whether no worker runs until the job is started again."""
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
    """Return the condition for Arroyo's name of a state; UNKNOWN for a name not known here.

    Source: arroyo-state.md 10.3, the states of a job; crates/arroyo-controller/src/states/mod.rs.
    """
    return _CONDITIONS.get(state or "", JobCondition.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """An epoch that a source lists, neither failed nor already collected.

    Attributes:
        ready: whether it is finished, including its commit.
        state: the state in the database, if that is the source (`ready`, `committing`…).
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
    """Return the newest epoch among `checkpoints` that is ready; None if none is."""
    return max((checkpoint.epoch for checkpoint in checkpoints if checkpoint.ready), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What one source reports of a job; None: it does not report the field.

    Attributes:
        source: the source; of merged facts the one that reported the condition.
        name: of the pipeline, for display.
        sql: of the pipeline, as its user wrote it, which may hold secrets.
        state: Arroyo's name of the state, from which `condition` follows.
        run_id: increases by one at every start; in the protocol layout the worker generation.
        newest_ready_epoch, checkpoints: the epochs, oldest first. An empty tuple does not prove
            that there are none: a server lists none for a job that stopped in leader mode.
        action, action_in_progress: the next action that the server offers, and whether it is in
            progress.
        stop_requested: how the job was last requested to stop (`none`, `checkpoint`…).
        running_desired: whether the job is meant to run.
        failure: the reason of a failure.
        ignore_state_before_epoch: epochs below are no longer restored.
    """

    job: JobId
    source: str | None = None
    pipeline: PipelineId | None = None
    name: str | None = None
    sql: str | None = field(default=None, repr=False)
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
    ignore_state_before_epoch: Epoch | None = None

    @property
    def knows_state(self) -> bool:
        """Whether the source reports the job's state, even if its name is not known here."""
        return self.condition is not JobCondition.UNKNOWN or self.state is not None

    def concerns(self, paths: JobPaths) -> bool:
        """Return whether these facts are of the job at `paths`; None matches any pipeline."""
        same_pipeline = None in (self.pipeline, paths.pipeline) or self.pipeline == paths.pipeline
        return self.job == paths.job and same_pipeline


class Absence(enum.Enum):
    """How certainly a source that answered does not have a job.

    None of them proves that the source ever ran the job: a server of another cluster has none of
    its jobs either.
    """

    NOT_LISTED = "not listed"  # a server's lists omit previews
    NO_JOB = "no such job"
    NO_PIPELINE = "no such pipeline"
    UNSAID = "nothing said"  # the user made no statement about the job


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAnswer:
    """What one source answered about one job: facts, that it has no such job, or a problem."""

    source: str
    facts: JobFacts | None = None
    absence: Absence | None = None
    problem: ArroyoStateError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A fact that sources report differently, in the order in which they were asked."""

    fact: str
    answers: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        answers = (
            f"{value.value if isinstance(value, enum.Enum) else value} ({source})"
            for source, value in self.answers
        )
        return f"{self.fact}: {' or '.join(answers)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """The merged answers of all sources about a job.

    Attributes:
        facts: each fact from the first source that reports it; the fields that belong to the state
            (state, run id, action, times…) come from a single source.
        answers: what each source answered, in the order asked.
    """

    paths: JobPaths
    facts: JobFacts
    answers: tuple[SourceAnswer, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def problems(self) -> tuple[ArroyoStateError, ...]:
        """The errors of sources that could not answer."""
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


_SHARED = ("pipeline", "name", "sql")
_COMPARED = ("pipeline", "name", "condition", "run_id", "newest_ready_epoch")


def merge_answers(paths: JobPaths, answers: Sequence[SourceAnswer]) -> JobAnswer:
    """Merge the answers about the job at `paths`; earlier sources take precedence."""
    all_facts = [answer.facts for answer in answers if answer.facts is not None]
    # An unknown state counts as well: a source of lower precedence must not override it.
    base = next((entry for entry in all_facts if entry.knows_state), None)
    facts = JobFacts(job=paths.job) if base is None else base
    changes: dict[str, Any] = {name: _first(all_facts, name) for name in _SHARED}
    changes["pipeline"] = changes["pipeline"] or paths.pipeline
    for entry in all_facts:
        if entry.checkpoints or entry.newest_ready_epoch is not None:
            changes["checkpoints"] = entry.checkpoints
            changes["newest_ready_epoch"] = entry.newest_ready_epoch
            break
    disagreements = (_disagreement(all_facts, name) for name in _COMPARED)
    return JobAnswer(
        paths=paths,
        facts=replace(facts, **changes),
        answers=tuple(answers),
        disagreements=tuple(item for item in disagreements if item is not None),
    )


def _first(known: Iterable[JobFacts], name: str) -> Any:
    return next((value for facts in known if (value := getattr(facts, name)) is not None), None)


def _disagreement(facts: Iterable[JobFacts], name: str) -> Disagreement | None:
    values = [(entry.source or "", getattr(entry, name)) for entry in facts]
    stated = [(who, value) for who, value in values if value not in (None, JobCondition.UNKNOWN)]
    if len({value for _, value in stated}) < 2:
        return None
    return Disagreement(fact=name, answers=tuple(stated))
