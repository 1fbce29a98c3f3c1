"""Publication of the result of a compaction.

A job that may be running gets a record, which its writer adopts at its next checkpoint. For a job
at rest the compactor acts as a writer once: next worker generation, next epoch, same content,
shorter lists (`design.md` 7).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.compaction import (
    CompactionPlan,
    CompactionRecord,
    Forecast,
    Merged,
    MergeOutcome,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.operations.compaction.plan import CompactionFacts
from arroyo_dagster.state.operations.gc.pins import keep_compaction
from arroyo_dagster.state.planning.compaction.apply import adoptable, apply_merges
from arroyo_dagster.state.planning.compaction.plan import forecast
from arroyo_dagster.state.planning.engines import EngineChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOutcome:
    """The outcome of a compaction.

    Attributes:
        merges: every merge, verified.
        published: how it became visible: `record`, `epoch`, or None if nothing was written.
        record: the record that was written for the job's writer.
        epoch: the epoch that lists the merged files; None while no writer has adopted them.
        files_after, size_bytes_after: what a restore reads afterwards.
        after: the same, with how often each subtask opens a file; None where nothing changed.
        waiting: compactions that the job has not adopted yet; the plan counts them as done. Empty
            in a dry run.
        engines: which engine ran the merges, if there was a choice.
    """

    plan: CompactionPlan
    merges: tuple[MergeOutcome, ...] = ()
    published: str | None = None
    record: StatePath | None = None
    epoch: Epoch | None = None
    files_after: int = 0
    size_bytes_after: int = 0
    after: Forecast | None = None
    waiting: tuple[StatePath, ...] = ()
    engines: tuple[EngineChoice, ...] = ()

    @classmethod
    def of_plan(cls, plan: CompactionPlan) -> CompactionOutcome:
        """Return the outcome of a dry run: nothing changed."""
        return cls(
            plan=plan, files_after=plan.files_before, size_bytes_after=plan.size_bytes_before
        )

    @property
    def changed(self) -> bool:
        """Whether anything was merged or published."""
        return self.published is not None


def _outcome(
    facts: CompactionFacts, plan: CompactionPlan, merges: tuple[MergeOutcome, ...]
) -> CompactionOutcome:
    gone = sum(len(merge.merged.input_paths) - len(merge.merged.output_paths) for merge in merges)
    saved = sum(merge.size_bytes_in - merge.size_bytes_out for merge in merges)
    return CompactionOutcome(
        plan=plan,
        merges=merges,
        files_after=plan.files_before - gone,
        size_bytes_after=plan.size_bytes_before - saved,
        after=_after(facts, plan, merges),
    )


def _after(
    facts: CompactionFacts, plan: CompactionPlan, merges: tuple[MergeOutcome, ...]
) -> Forecast:
    done = [*_waiting(facts), *(merge.merged for merge in merges)]
    applied = apply_merges(facts.checkpoint.operators, done).operators
    sizes = dict(facts.sizes)
    for merge in merges:
        paths = merge.merged.output_paths
        sizes.update(dict.fromkeys(paths, merge.size_bytes_out // max(1, len(paths))))
    return forecast(replace(facts.checkpoint, operators=applied), sizes, plan.parallelism)


def _waiting(facts: CompactionFacts) -> list[Merged]:
    """Return the merges of earlier compactions that the job has not adopted yet."""
    records = (record for _, record in facts.pending)
    return adoptable(facts.checkpoint.operators, records, facts.checkpoint.epoch)


def publish_record(
    backend: ParquetBackend,
    token: int,
    facts: CompactionFacts,
    plan: CompactionPlan,
    outcomes: tuple[MergeOutcome, ...],
) -> CompactionOutcome:
    """Write a record, which the job's writer adopts at its next checkpoint.

    Args:
        token: of the held lease.
    """
    assert plan.pipeline is not None
    record = CompactionRecord(
        pipeline=plan.pipeline,
        job=plan.job,
        epoch=plan.epoch,
        token=token,
        created_at_micros=backend.clock(),
        merged=tuple(outcome.merged for outcome in outcomes),
    )
    path = backend.paths.compaction_record(plan.epoch, uuid.uuid4().hex[:16])
    keep_compaction(backend.store, backend.paths, path.name)
    backend.write_compaction_record(record, path)
    return replace(_outcome(facts, plan, outcomes), published="record", record=path)


def publish_epoch(
    backend: ParquetBackend,
    facts: CompactionFacts,
    plan: CompactionPlan,
    outcomes: tuple[MergeOutcome, ...],
) -> CompactionOutcome:
    """Write the next epoch of a job at rest, as its next worker generation."""
    base = _started_from(backend, facts)
    merged = [*_waiting(facts), *(outcome.merged for outcome in outcomes)]
    applied = apply_merges(base.operators, merged)
    if not {outcome.merged for outcome in outcomes} <= set(applied.done):
        raise ConflictError(
            f"merged files no longer match what the job lists: {applied.stale[0].reason}",
            job=backend.paths.root,
            retryable=True,
            next_step="run it again; nothing was published",
        )
    epoch = Epoch(base.epoch + 1)
    assert base.progress is not None
    backend.publish_carried(
        base,
        applied.operators,
        epoch=epoch,
        progress=replace(base.progress, rolled_back_to=None, revises=None),
        min_epoch=base.min_epoch,
        now_micros=backend.clock(),
    )
    backend.store.delete_many([path for path, _ in facts.pending])
    return replace(_outcome(facts, plan, outcomes), published="epoch", epoch=epoch)


def _started_from(backend: ParquetBackend, facts: CompactionFacts) -> Checkpoint:
    started = backend.start()
    base = started.restored
    if base is None or base.ref != facts.checkpoint.ref or started.replay_commit:
        raise ConflictError(
            "the job was started while its files were merged",
            job=backend.paths.root,
            epoch=facts.checkpoint.epoch,
            retryable=True,
            next_step="run it again; nothing was published",
        )
    return base
