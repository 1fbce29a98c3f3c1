"""Compaction of one job: planned, carried out here or by whoever is given the merges, verified,
published.

How a result becomes visible (`design.md` 7): a job that may be running gets a record, which its
writer takes over at its next checkpoint. For one at rest the compactor is a writer for a moment:
next worker generation, next epoch, same content, shorter lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, FormatError, InputError, ProtocolError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.interrupts import uninterrupted
from arroyo_dagster.state.metadata.lease import Leased, lease
from arroyo_dagster.state.metadata.reader import restore_or_roll_back
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, Manifest
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.compaction import (
    CompactionPlan,
    CompactionRecord,
    CompactionSettings,
    Forecast,
    Merged,
    MergeOutcome,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.operations.catalog.jobs import newest_generation
from arroyo_dagster.state.operations.compaction.execute import (
    Meter,
    OnProgress,
    RunMerges,
    check_same,
    merge_here,
)
from arroyo_dagster.state.operations.compaction.forecasts import forecast_merges
from arroyo_dagster.state.planning.compaction.apply import apply_merges
from arroyo_dagster.state.planning.compaction.plan import backlog, forecast, plan_compaction
from arroyo_dagster.state.planning.restore.batch_identity import carried_progress
from arroyo_dagster.state.planning.restore.checkpoint import carry_operator
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.tables.merge.task import MergeTask

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOutcome:
    """What a compaction did.

    Attributes:
        merges: every merge, verified.
        published: how it became visible: `record`, `epoch`, or None if nothing was written.
        record: the record that was left for the writer.
        epoch: the epoch that lists the merged files; None while no writer has taken them over.
        files_after, size_bytes_after: what a restore reads from then on.
        after: the same, with how often each subtask opens a file; None where nothing changed.
        waiting: compactions that the job has not taken over yet; the plan counts them as done.
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

    @property
    def changed(self) -> bool:
        """Whether anything was merged or published."""
        return self.published is not None


@dataclass(frozen=True, slots=True)
class _FileFootprints:
    """What a plan is made from."""

    checkpoint: Checkpoint
    at_rest: bool
    pending: tuple[tuple[StatePath, CompactionRecord], ...]
    sizes: dict[StatePath, int]
    stamps: dict[StatePath, str]


# ---- planning ------------------------------------------------------------------------------------


def plan_job(
    store: ObjectStore,
    paths: JobPaths,
    settings: CompactionSettings | None = None,
    *,
    sampled: bool = False,
) -> CompactionPlan:
    """Plan the compaction of a job's newest epoch. Writes nothing: this is the dry run.

    Args:
        sampled: merge some of the files in memory, to forecast how many bytes are left.

    Raises:
        NotFoundError: the job has no checkpoint.
        FormatError: a file that it lists is missing.
    """
    facts, settings = _facts(store, paths), settings or CompactionSettings()
    plan = _plan(facts, settings)
    return _sampled(store, paths, facts, plan, settings) if sampled else plan


def _sampled(
    store: ObjectStore,
    paths: JobPaths,
    facts: _FileFootprints,
    plan: CompactionPlan,
    settings: CompactionSettings,
) -> CompactionPlan:
    if not plan.merges:
        return plan
    tasks = _tasks(paths, facts, plan, settings)
    return _plan(facts, settings, forecast_merges(store, tasks))


def _facts(store: ObjectStore, paths: JobPaths) -> _FileFootprints:
    backend = ParquetBackend(store, paths)
    pending = [(p, r) for p, r in backend.compaction_records().items() if r is not None]
    checkpoint = backend.load()
    outputs = (path for _, r in pending for merged in r.merged for path in merged.output_paths)
    listed = list(dict.fromkeys((*checkpoint.paths, *outputs)))
    found = concurrently(store.head, listed)
    sizes = {info.path: info.size_bytes for info in found if info is not None}
    stamps = {info.path: stamp for info in found if info is not None and (stamp := _stamp(info))}
    missing = [path for path in dict.fromkeys(checkpoint.paths) if path not in sizes]
    if missing:
        raise FormatError(
            f"{len(missing)} of {len(listed)} data files are missing, so nothing is merged",
            job=paths.root,
            epoch=checkpoint.epoch,
            path=missing[0],
            next_step=f"{restore_or_roll_back(paths, checkpoint, 'file')}; if the job runs, run "
            "it again: this epoch may just have expired",
        )
    whole = [
        (path, record)
        for path, record in pending
        if all(p in sizes for merged in record.merged for p in merged.output_paths)
    ]
    # While a commit is not finished only the job itself can write the next epoch.
    ready = checkpoint.state is CheckpointState.READY
    at_rest = ready and is_at_rest(checkpoint, newest_generation(store, paths))
    return _FileFootprints(checkpoint, at_rest, tuple(whole), sizes, stamps)


def _stamp(info: ObjectInfo) -> str | None:
    return info.etag or (None if info.modified_micros is None else str(info.modified_micros))


def _plan(
    facts: _FileFootprints,
    settings: CompactionSettings,
    merged_bytes: Sequence[int] | None = None,
) -> CompactionPlan:
    return plan_compaction(
        facts.checkpoint,
        facts.sizes,
        settings,
        [record for _, record in facts.pending],
        stamps=facts.stamps,
        merged_bytes=merged_bytes,
    )


def compaction_backlog(store: ObjectStore, paths: JobPaths) -> int:
    """How many files of a job's newest epoch were never merged, beyond one a subtask and table.

    Read from metadata alone. What waits to be taken over counts as done; jobs of Arroyo's and
    those without an epoch have nothing to do.
    """
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if not epochs or paths.layout is Layout.LEGACY:
        return 0
    checkpoint = backend.load_checkpoint_metadata(epochs[-1])
    records = [record for record in backend.compaction_records().values() if record is not None]
    waiting = [merged for record in records for merged in record.merged]
    applied = apply_merges(checkpoint.operators, waiting)
    return backlog(replace(checkpoint, operators=applied.operators))


# ---- carrying out --------------------------------------------------------------------------------


def compact_job(
    store: ObjectStore,
    paths: JobPaths,
    settings: CompactionSettings | None = None,
    *,
    run: RunMerges = merge_here,
    owner: str = "arroyo-state compact",
    wait_seconds: float = 0.0,
    lease_wait_seconds: float = 0.0,
    dry_run: bool = False,
    sampled: bool = False,
    clock: Clock = wall_clock,
    on_merge: Callable[[MergeOutcome, int], None] = lambda outcome, left: None,
    on_progress: OnProgress = lambda progress: None,
    on_published: Callable[[CompactionOutcome], None] = lambda outcome: None,
) -> CompactionOutcome:
    """Merge small files of a job, verify what a restore would load, publish the result.

    Nothing is deleted: inputs stay for the epochs that list them. Stopped anywhere, the job is
    restorable, and files that nothing lists are left behind for gc. A second run finds nothing
    to do, and writes nothing.

    Args:
        run: carries the merges out; in this process unless given.
        owner: who asks, for the lease.
        wait_seconds: how long to wait for a writer to take over what was merged.
        lease_wait_seconds: how long to wait for whoever maintains the job now.
        dry_run: plan, and change nothing.
        sampled: as of `plan_job`.
        on_merge: called with every merge that is done, before it is judged, and how many are left.
        on_progress: told now and then how many bytes are read, perhaps by another thread.
        on_published: called with what was published, before an interrupt can come in between.

    Raises:
        ConflictError: somebody else maintains the job, or it was started or changed meanwhile.
        ProtocolError: what was written would not restore as what was read; nothing was published.
        InputError: the job is in the legacy layout, or Arroyo's.
        NotFoundError, FormatError: the epoch, or a file of it, is missing or broken.
    """
    settings = settings or CompactionSettings()
    facts = _facts(store, paths)
    plan = _plan(facts, settings)
    if dry_run or not _worth_it(plan, facts):
        plan = _sampled(store, paths, facts, plan, settings) if sampled else plan
        return _nothing(plan, facts)
    if paths.layout is Layout.LEGACY:
        raise InputError(
            "a job in the legacy layout has no epoch records: a running job could not adopt "
            "merged files",
            job=paths.root,
            next_step="let its runs merge (merge_files_after), or use the protocol layout",
        )
    with lease(store, paths, owner, wait_seconds=lease_wait_seconds, clock=clock) as held:
        # Whoever held the lease before may have done some of it.
        facts = _facts(held, paths)
        plan = _plan(facts, settings)
        if not _worth_it(plan, facts):
            return _nothing(plan, facts)
        if sampled:
            plan = _sampled(held, paths, facts, plan, settings)
        outcomes = _carried_out(held, paths, facts, plan, settings, run, on_merge, on_progress)
        backend = ParquetBackend(held, paths, clock=clock)
        # A generation without an epoch would look like a job that was started.
        with uninterrupted():
            if facts.at_rest:
                outcome = _publish_epoch(backend, facts, plan, outcomes)
            else:
                outcome = _publish_record(backend, held, facts, plan, outcomes, clock())
            on_published(outcome)
    if outcome.epoch is None and wait_seconds > 0:
        return _awaited(store, paths, outcome, wait_seconds)
    return outcome


def _worth_it(plan: CompactionPlan, facts: _FileFootprints) -> bool:
    # Nobody else takes over what was left for the writer of a job that has come to rest.
    return bool(plan.merges) or (facts.at_rest and bool(facts.pending))


def _nothing(plan: CompactionPlan, facts: _FileFootprints) -> CompactionOutcome:
    return CompactionOutcome(
        plan=plan,
        files_after=plan.files_before,
        size_bytes_after=plan.size_bytes_before,
        waiting=tuple(path for path, _ in facts.pending),
    )


def _tasks(
    paths: JobPaths, facts: _FileFootprints, plan: CompactionPlan, settings: CompactionSettings
) -> list[MergeTask]:
    operators = {operator.operator: operator for operator in facts.checkpoint.operators}
    return [
        MergeTask(
            paths=paths,
            epoch=facts.checkpoint.epoch,
            worker_generation=facts.checkpoint.worker_generation,
            parallelism=plan.parallelism or operators[merge.operator].parallelism,
            config=operators[merge.operator].configs[merge.table],
            merge=merge,
            shard_bytes=settings.part_bytes,
        )
        for merge in plan.merges
    ]


def _carried_out(
    store: ObjectStore,
    paths: JobPaths,
    facts: _FileFootprints,
    plan: CompactionPlan,
    settings: CompactionSettings,
    run: RunMerges,
    on_merge: Callable[[MergeOutcome, int], None],
    on_progress: OnProgress,
) -> tuple[MergeOutcome, ...]:
    tasks = _tasks(paths, facts, plan, settings)
    meter = Meter(sum(merge.size_bytes for merge in plan.merges), on_progress)
    outcomes: list[MergeOutcome] = []
    for outcome in run(store, tasks, meter.add) if tasks else ():
        outcomes.append(outcome)
        on_merge(outcome, len(tasks) - len(outcomes))
        check_same(paths, plan.epoch, outcome)
    if len(outcomes) != len(tasks):
        raise ProtocolError(
            f"{len(outcomes)} of {len(tasks)} merges returned a result",
            job=paths.root,
            next_step="run it again; nothing was published",
        )
    return tuple(outcomes)


# ---- publishing ----------------------------------------------------------------------------------


def _outcome(
    facts: _FileFootprints, plan: CompactionPlan, merges: tuple[MergeOutcome, ...]
) -> CompactionOutcome:
    gone = sum(len(one.merged.input_paths) - len(one.merged.output_paths) for one in merges)
    saved = sum(one.size_bytes_in - one.size_bytes_out for one in merges)
    return CompactionOutcome(
        plan=plan,
        merges=merges,
        files_after=plan.files_before - gone,
        size_bytes_after=plan.size_bytes_before - saved,
        after=_after(facts, plan, merges),
    )


def _after(
    facts: _FileFootprints, plan: CompactionPlan, merges: tuple[MergeOutcome, ...]
) -> Forecast:
    waiting = [merged for _, record in facts.pending for merged in record.merged]
    done = [*waiting, *(one.merged for one in merges)]
    applied = apply_merges(facts.checkpoint.operators, done).operators
    sizes = dict(facts.sizes)
    for one in merges:
        paths = one.merged.output_paths
        sizes.update(dict.fromkeys(paths, one.size_bytes_out // max(1, len(paths))))
    return forecast(replace(facts.checkpoint, operators=applied), sizes, plan.parallelism)


def _publish_record(
    backend: ParquetBackend,
    held: Leased,
    facts: _FileFootprints,
    plan: CompactionPlan,
    outcomes: tuple[MergeOutcome, ...],
    now_micros: int,
) -> CompactionOutcome:
    assert plan.pipeline is not None
    record = CompactionRecord(
        pipeline=plan.pipeline,
        job=plan.job,
        epoch=plan.epoch,
        token=held.lease.token,
        created_at_micros=now_micros,
        merged=tuple(outcome.merged for outcome in outcomes),
    )
    path = backend.write_compaction_record(record)
    return replace(_outcome(facts, plan, outcomes), published="record", record=path)


def _publish_epoch(
    backend: ParquetBackend,
    facts: _FileFootprints,
    plan: CompactionPlan,
    outcomes: tuple[MergeOutcome, ...],
) -> CompactionOutcome:
    """Write the next epoch of a job at rest, as its next worker generation."""
    base = _started_from(backend, facts)
    waiting = [merged for _, record in facts.pending for merged in record.merged]
    merged: list[Merged] = [*waiting, *(outcome.merged for outcome in outcomes)]
    applied = apply_merges(base.operators, merged)
    if not {outcome.merged for outcome in outcomes} <= set(applied.done):
        raise ConflictError(
            f"merged files no longer match what the job lists: {applied.stale[0].reason}",
            job=backend.paths.root,
            retryable=True,
            next_step="run it again; nothing was published",
        )
    epoch = Epoch(base.epoch + 1)
    now = backend.clock()
    assert base.pipeline is not None
    progress = carried_progress(base)
    assert progress is not None
    assert backend.generation is not None
    manifest = Manifest(
        pipeline=base.pipeline,
        job=base.job,
        worker_generation=backend.generation,
        epoch=epoch,
        min_epoch=base.min_epoch,
        start_time_micros=now,
        finish_time_micros=now,
        needs_commit=False,  # what its parent had to commit is committed
        operators=tuple(carry_operator(operator, epoch) for operator in applied.operators),
        parent_ref=base.ref,
        progress=progress,
    )
    backend.publish(manifest)
    backend.store.delete_many([path for path, _ in facts.pending])
    return replace(_outcome(facts, plan, outcomes), published="epoch", epoch=epoch)


def _started_from(backend: ParquetBackend, facts: _FileFootprints) -> Checkpoint:
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


def _awaited(
    store: ObjectStore, paths: JobPaths, outcome: CompactionOutcome, seconds: float
) -> CompactionOutcome:
    """Wait until the writer has looked at the record, and say in which epoch it took it over."""
    backend = ParquetBackend(store, paths)
    assert outcome.record is not None
    outputs = {path for one in outcome.merges for path in one.merged.output_paths}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if store.head(outcome.record) is None:
            newest = backend.load()
            taken = outputs & set(newest.paths)
            return replace(outcome, epoch=newest.epoch if taken else None)
        time.sleep(_POLL_SECONDS)
    return outcome
