"""Whether a job may be rolled back to an older epoch, and what is given up for it.

Source: arroyo-state.md 3.2, 3.3; docs/decisions/rollback.md.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.model.checkpoints import CONTENT, Checkpoint, CheckpointState, RunProgress
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.rollback import CommittedOutput, GivenUpEpoch, RollbackPlan
from arroyo_dagster.state.planning.restore.partially_collected import rolled_back

UNREADABLE = "unreadable"
_INVISIBLE = CheckpointState.INVISIBLE
STAGED = {"batch"}
"""The member of the offset of a `SparkSource`."""

_BETWEEN_SERVICES = "from:"
"""Prefix of the keys in an offset that name another service; see `sdf.topics.segments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """One epoch, or one manifest that owns none.

    Attributes:
        owns: whether it owns its epoch; False for a manifest without an epoch record.
        state: as displayed; None if its metadata cannot be read.
        checkpoint: None if its metadata cannot be read.
        problem: why it cannot be restored, as far as metadata and a listing show; None if it can.
    """

    epoch: Epoch
    owns: bool
    state: CheckpointState | None
    checkpoint: Checkpoint | None
    problem: str | None = None

    @property
    def whole(self) -> bool:
        """Whether it can be restored, as far as metadata and a listing show."""
        states = (CheckpointState.READY, CheckpointState.ROLLED_BACK)
        checkpoint = self.checkpoint
        return (
            self.owns
            and self.problem is None
            and self.state in states
            and checkpoint is not None
            and checkpoint.state is CheckpointState.READY
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackFacts:
    """The facts that a rollback is planned from.

    Attributes:
        epochs: all existing ones, ascending.
        newest_number: the highest number of an epoch or a manifest.
        worker_generation: the newest that was started; None in the legacy layout.
        at_rest: whether the run that wrote the newest epoch ended with it.
        siblings: the other jobs of the same pipeline.
        kept_records: whether the job stores rows of its sources, or an SDF service records of its
            topics, beside its state until they are read.
    """

    paths: JobPaths
    epochs: Sequence[EpochFacts]
    newest_number: Epoch
    worker_generation: WorkerGeneration | None
    at_rest: bool
    siblings: Collection[JobId] = ()
    kept_records: bool = False


def choices(facts: RollbackFacts) -> list[Epoch]:
    """Return the epochs that a rollback could restore, ascending."""
    return [fact.epoch for fact in facts.epochs if fact.whole and fact.epoch != facts.newest_number]


def done_before(facts: RollbackFacts, epoch: Epoch) -> Epoch | None:
    """Return the newest epoch that a rollback to `epoch` published, if the job builds on it."""
    numbers = [entry.epoch for entry in facts.epochs if entry.owns]
    restored = _restored(facts)
    left = rolled_back(_current(facts), numbers, restored)
    # An epoch without rows of its own after a rollback names its predecessor as restored.
    rollbacks = [by for by, to in restored.items() if to == epoch < by - 1 and by not in left]
    return max(rollbacks, default=None)


def make_plan(facts: RollbackFacts, epoch: Epoch, *, undoes: bool = False) -> RollbackPlan:
    """Plan the rollback of a job to one of its epochs.

    The plan has no row counts and no committed output; the caller, who reads footers and commit
    data, adds them.

    Args:
        undoes: the epochs since then are edits, so no run has read anything in them.

    Raises:
        NotFoundError: the job has no such epoch.
        FormatError: the epoch cannot be restored.
        InputError: the epoch is the newest one, or the job is an Arroyo job.
        ProtocolError: its commit is not finished, other services depend on the job, or rows that it
            would read again are deleted.
    """
    target = chosen(facts, epoch)
    offsets = _offsets(target)
    if offsets is None:
        raise InputError(
            "this is an Arroyo job: its database or leader decides which epoch is restored, and "
            "would ignore a new one",
            job=facts.paths.root,
            epoch=epoch,
            next_step=f"change the newest one in place: `{rollback_command(facts.paths, epoch)}`",
        )
    if not undoes:
        _check_services(facts, offsets)
        _check_staged_rows(facts, offsets)
    given_up = _given_up(facts, epoch)
    newest = next((entry.checkpoint for entry in reversed(given_up) if entry.checkpoint), None)
    return RollbackPlan(
        pipeline=facts.paths.pipeline,
        job=facts.paths.job,
        epoch=epoch,
        ref=target.ref,
        newest=_current(facts),
        publishes=Epoch(facts.newest_number + 1),
        given_up=tuple(map(_given_up_epoch, given_up)),
        committed=(),
        offsets_now=_positions(_offsets(newest)),
        offsets_then=_positions(offsets) or {},
        worker_generation=facts.worker_generation,
        may_be_running=not facts.at_rest,
        undoes=undoes,
        warnings=tuple(_warnings(facts, epoch)),
    )


def check_same(plan: RollbackPlan, fresh: RollbackPlan) -> None:
    """Check that a plan made earlier still describes what a rollback does.

    Raises:
        ConflictError: an epoch was published, or has expired, since the plan was made.
    """
    before, now = (_identity(version) for version in (plan, fresh))
    if before != now:
        raise ConflictError(
            f"the plan of the rollback is out of date: the newest epoch is now {fresh.newest}, "
            f"it was {plan.newest}",
            job=plan.paths.root,
            retryable=True,
            next_step=f"stop the run if one is alive, with `arroyo-state stop {plan.paths.root}`, "
            "then roll back again; nothing was published",
        )


def progress_after(target: Checkpoint) -> RunProgress:
    """Return the progress of the epoch that a rollback publishes, with the offsets of `target`."""
    assert target.progress is not None
    return RunProgress(
        offsets=target.progress.offsets,
        final=True,
        exhausted=target.progress.exhausted,
        rolled_back_to=target.epoch,
        dropped=target.progress.dropped,
    )


def _identity(plan: RollbackPlan) -> tuple[object, ...]:
    numbers = tuple(entry.epoch for entry in plan.given_up)
    return plan.paths, plan.epoch, plan.ref, plan.newest, plan.publishes, numbers


# ---- checks --------------------------------------------------------------------------------------


def _current(facts: RollbackFacts) -> Epoch:
    return max((entry.epoch for entry in facts.epochs if entry.owns), default=Epoch(0))


def chosen(facts: RollbackFacts, epoch: Epoch) -> Checkpoint:
    """Return the epoch that a rollback restores; errors as `make_plan`."""
    extra: dict[str, object] = {
        "job": facts.paths.root,
        "epoch": epoch,
        "restorable_epochs": ranges(choices(facts)),
    }
    step = "choose one of the restorable epochs"
    if epoch == facts.newest_number:
        raise InputError("nothing to roll back: this is the newest epoch", next_step=step, **extra)  # type: ignore[arg-type]
    entry = next((entry for entry in facts.epochs if entry.owns and entry.epoch == epoch), None)
    if entry is None:
        raise NotFoundError(
            "the job has no such epoch: it was never written, or it has expired",
            next_step=step,
            **extra,  # type: ignore[arg-type]
        )
    checkpoint = entry.checkpoint
    if checkpoint is not None and checkpoint.state is CheckpointState.COMMITTING:
        raise ProtocolError(
            "the epoch cannot be restored: its commit is not finished",
            next_step=step,
            **extra,  # type: ignore[arg-type]
        )
    if checkpoint is None or not entry.whole:
        reason = entry.problem or (entry.state.value if entry.state else UNREADABLE)
        raise FormatError(f"the epoch cannot be restored: {reason}", next_step=step, **extra)  # type: ignore[arg-type]
    return checkpoint


def ranges(epochs: Sequence[Epoch]) -> str:
    """Format ascending numbers as ranges: `1-4, 7`; `none` if there are none."""
    parts: list[list[int]] = []
    for number in epochs:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts) or "none"


def _check_services(facts: RollbackFacts, offsets: Mapping[str, Any]) -> None:
    """Refuse an SDF service with other services: they would miss records or read them twice.

    Also refuse one with stored records of topics and pipes, which are deleted after they were read.
    """
    services = [offset for offset in offsets.values() if is_service(offset)]
    between = bool(facts.siblings) or any(_reads_services(service) for service in services)
    if services and (between or facts.kept_records):
        reason = (
            "other services have read what it wrote in later epochs, and topics between services"
            if between
            else "its pipe or topic"
        )
        raise ProtocolError(
            f"this SDF service cannot go back: {reason} no longer hold all records that it would "
            "read again",
            job=facts.paths.root,
            services=", ".join(sorted(facts.siblings)) or None,
            next_step="run the dataflow again from its sources, below another URL or namespace; "
            "nothing was changed",
        )


def _check_staged_rows(facts: RollbackFacts, offsets: Mapping[str, Any]) -> None:
    """Refuse a pipeline with a source of Spark: staged rows are deleted after they were read."""
    sources = [
        name for name, value in offsets.items() if isinstance(value, dict) and set(value) == STAGED
    ]
    if sources and facts.kept_records:
        raise ProtocolError(
            "this job cannot go back: the staged rows of its source that it would read again are "
            "deleted",
            job=facts.paths.root,
            sources=", ".join(sorted(sources)),
            next_step="run the pipeline under another job id, from what the source still has; "
            "nothing was changed",
        )


def is_service(offset: object) -> bool:
    """Return whether this is the offset of the source of an SDF service."""
    return isinstance(offset, dict) and {"topics", "clock_ms"} <= offset.keys()


def _reads_services(offset: Mapping[str, Any]) -> bool:
    topics = [topic for topic in offset["topics"].values() if isinstance(topic, dict)]
    between = any(str(name).startswith(_BETWEEN_SERVICES) for topic in topics for name in topic)
    return between or bool(offset.get("epochs"))


# ---- what is given up ----------------------------------------------------------------------------


def _given_up(facts: RollbackFacts, epoch: Epoch) -> list[EpochFacts]:
    """Return the epochs that are or would become current, and will not be after the rollback."""
    numbers = [entry.epoch for entry in facts.epochs if entry.owns]
    restored = _restored(facts)
    left = rolled_back(_current(facts), numbers, restored)
    older = [number for number in numbers if number <= epoch]
    stays = {*older} - rolled_back(epoch, older, restored)
    return [
        entry
        for entry in facts.epochs
        if (entry.owns and entry.epoch not in left and entry.epoch not in stays)
        or (not entry.owns and entry.epoch > _current(facts) and entry.state is not _INVISIBLE)
    ]


def _restored(facts: RollbackFacts) -> dict[Epoch, Epoch]:
    return {
        entry.epoch: to
        for entry in facts.epochs
        if entry.owns and entry.checkpoint and (to := entry.checkpoint.rolled_back_to) is not None
    }


def _given_up_epoch(one: EpochFacts) -> GivenUpEpoch:
    return GivenUpEpoch(
        epoch=one.epoch,
        state=one.state.value if one.state else UNREADABLE,
        finished_micros=one.checkpoint.finish_time_micros if one.checkpoint else None,
        problem=one.problem,
    )


def _positions(offsets: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return offsets without what is no position."""
    if offsets is None:
        return None
    return {
        name: {member: value for member, value in offset.items() if member != CONTENT}
        if isinstance(offset, dict)
        else offset
        for name, offset in offsets.items()
    }


def _offsets(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    if checkpoint is None or checkpoint.progress is None:
        return None
    offsets = json.loads(checkpoint.progress.offsets)
    return offsets if isinstance(offsets, dict) else {"": offsets}


def committed_output(
    checkpoint: Checkpoint, names: Mapping[OperatorId, tuple[str, ...] | None]
) -> Iterator[CommittedOutput]:
    """Yield the output that an epoch's sinks have made visible, if its commit is done.

    Args:
        names: by operator, the names of the files; None where commit data does not name files.
    """
    if checkpoint.state is not CheckpointState.READY:
        return
    for operator in checkpoint.operators:
        if operator.operator in names:
            yield CommittedOutput(
                operator=operator.operator,
                epoch=checkpoint.epoch,
                files=names[operator.operator],
            )


def _warnings(facts: RollbackFacts, epoch: Epoch) -> Iterator[str]:
    unreadable = [entry.epoch for entry in _given_up(facts, epoch) if entry.checkpoint is None]
    if unreadable:
        yield (
            f"epochs {ranges(unreadable)} cannot be read: the number of rows they wrote, and "
            "what sinks committed with them, is unknown"
        )
    if facts.at_rest:
        return
    if facts.paths.layout is Layout.LEGACY:
        yield "a run may still be alive: the rollback is refused while the run holds its lease"
        return
    yield (
        f"the run of worker generation {facts.worker_generation} may still be alive: it did not "
        "end with a last epoch. The rollback stops it with a ConflictError; "
        f"`arroyo-state stop {facts.paths.root}` ends it with a checkpoint first"
    )


def rollback_command(paths: JobPaths, epoch: Epoch | None) -> str:
    """Return the command that rolls back to an epoch; None: the one that lists the epochs."""
    return f"arroyo-state rollback {paths.root}" + ("" if epoch is None else f" {epoch}")
