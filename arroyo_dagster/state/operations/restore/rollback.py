"""Rollback to an older epoch: planned from the store's objects, then published as a new epoch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.metadata.backend import ParquetBackend, writer_lease
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import Epoch, JobId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.rollback import CommittedOutput, RollbackOutcome, RollbackPlan
from arroyo_dagster.state.operations.catalog.epoch_summaries import EpochSummary, list_epochs
from arroyo_dagster.state.operations.catalog.footers import Footers
from arroyo_dagster.state.operations.gc.pins import pinned_while
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.planning.restore.rollback import (
    EpochFacts,
    RollbackFacts,
    check_same,
    choices,
    chosen,
    committed_output,
    done_before,
    make_plan,
    progress_after,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.managed import staged_paths

MAX_FOOTERS = 2_000
"""The maximum number of files in which rows are counted; with more, their number is unknown."""

REASON = "a rollback to this epoch is under way"


# ---- planning ------------------------------------------------------------------------------------


def restorable_epochs(store: ObjectStore, paths: JobPaths) -> list[Epoch]:
    """Return the epochs that a rollback could restore, ascending. No data file is opened."""
    return choices(_facts(store, paths))


def restorable_epoch(store: ObjectStore, paths: JobPaths, epoch: int) -> Checkpoint:
    """Return an epoch that a rollback could restore. No data file is opened.

    Raises:
        NotFoundError, FormatError, InputError, ProtocolError: as `plan_rollback`.
    """
    return chosen(_facts(store, paths), Epoch(epoch))


def way_back(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> Checkpoint | None:
    """Return the newest whole epoch of a job whose newest epoch is damaged.

    Args:
        epoch: the damaged one. The five before it are checked in detail, newest first.

    Returns:
        The epoch; None if `epoch` is not the newest one, and if there is none.
    """
    facts = _facts(store, paths)
    if epoch != facts.newest_number:
        return None
    older = [entry.epoch for entry in reversed(facts.epochs) if entry.whole and entry.epoch < epoch]
    backend = ParquetBackend(store, paths)
    for number in older[:5]:
        with contextlib.suppress(NotFoundError, FormatError, ProtocolError):
            return backend.prepare_checkpoint_load(number)
    return None


def rollback_done(store: ObjectStore, paths: JobPaths, epoch: int) -> Epoch | None:
    """Return the epoch that a rollback to `epoch` published, if the job continues from it."""
    return done_before(_facts(store, paths), Epoch(epoch))


def plan_rollback(
    store: ObjectStore,
    paths: JobPaths,
    epoch: int,
    on_progress: OnProgress = no_progress,
    *,
    undoes: bool = False,
) -> RollbackPlan:
    """Plan a rollback to an epoch. Writes nothing: this is the dry run.

    Args:
        on_progress: called with how many epochs were read.
        undoes: the epochs since then are edits, so no run has read anything in them.

    Raises:
        NotFoundError: the job has no such epoch.
        FormatError: the epoch cannot be restored; names the first reason.
        InputError: the epoch is the newest one, or the job is an Arroyo job.
        ProtocolError: the commit of the epoch is not finished, or other services depend on the job.
    """
    facts = _facts(store, paths, on_progress)
    plan = make_plan(facts, Epoch(epoch), undoes=undoes)
    ParquetBackend(store, paths).prepare_checkpoint_load(plan.epoch)
    return _measured(store, facts, plan)


def _facts(
    store: ObjectStore, paths: JobPaths, on_progress: OnProgress = no_progress
) -> RollbackFacts:
    backend = ParquetBackend(store, paths)
    summaries = list_epochs(store, paths, on_progress=on_progress)
    numbers = {*backend.every_epoch()}
    listed = {summary.epoch for summary in summaries}
    epochs = [
        _epoch_facts(paths, one, owns=one.epoch in numbers and _owns(one)) for one in summaries
    ]
    epochs += [
        EpochFacts(epoch=n, owns=True, state=None, checkpoint=None) for n in numbers - listed
    ]
    epochs.sort(key=lambda epoch: (epoch.epoch, epoch.owns))
    head = next((epoch.checkpoint for epoch in reversed(epochs) if epoch.owns), None)
    generation = _generation(store, paths)
    return RollbackFacts(
        paths=paths,
        epochs=tuple(epochs),
        newest_number=backend.newest_number(),
        worker_generation=generation,
        at_rest=head is not None and is_at_rest(head, generation),
        siblings=_siblings(store, paths),
        kept_records=_keeps_records(store, paths),
    )


def _owns(one: EpochSummary) -> bool:
    """Whether this is an epoch, and not only an attempt at one."""
    attempt = (CheckpointState.INVISIBLE, CheckpointState.UNCLAIMED, CheckpointState.ORPHANED)
    return one.state not in attempt


def _epoch_facts(paths: JobPaths, one: EpochSummary, *, owns: bool) -> EpochFacts:
    stored, problem = one.checkpoint, None if one.problem is None else one.problem.message
    if stored is not None and (stored.job, stored.epoch) != (paths.job, one.epoch):
        problem = f"its metadata belongs to epoch {stored.epoch} of {stored.job or 'no job'}"
        stored = None
    return EpochFacts(
        epoch=one.epoch, owns=owns, state=one.state, checkpoint=stored, problem=problem
    )


def _generation(store: ObjectStore, paths: JobPaths) -> WorkerGeneration | None:
    try:
        return CheckpointTree(store, paths).fence()
    except FormatError:
        return None


def _siblings(store: ObjectStore, paths: JobPaths) -> tuple[JobId, ...]:
    if paths.pipeline is None:
        return ()
    below = store.list_dir(paths.pipeline).prefixes
    return tuple(JobId(path.name) for path in below if path.name != paths.job)


def _keeps_records(store: ObjectStore, paths: JobPaths) -> bool:
    below = {path.name for path in store.list_dir(paths.maintenance).prefixes}
    return not below.isdisjoint({"topics", "stdin", "landed"})


# ---- the contents of abandoned epochs ------------------------------------------------------------


def _measured(store: ObjectStore, facts: RollbackFacts, plan: RollbackPlan) -> RollbackPlan:
    known = {one.epoch: one.checkpoint for one in facts.epochs if one.owns and one.checkpoint}
    new: dict[Epoch, Sequence[StatePath]] = {}
    before = {*known[plan.epoch].paths}
    for epoch in plan.given_up:
        if (checkpoint := known.get(epoch.epoch)) is not None:
            new[epoch.epoch] = [path for path in checkpoint.paths if path not in before]
            before.update(checkpoint.paths)
    rows = _rows(store, new)
    return replace(
        plan,
        given_up=tuple(replace(epoch, rows=rows.get(epoch.epoch)) for epoch in plan.given_up),
        committed=tuple(
            delivered_output(known[epoch.epoch] for epoch in plan.given_up if epoch.epoch in known)
        ),
    )


def _rows(store: ObjectStore, new: dict[Epoch, Sequence[StatePath]]) -> dict[Epoch, int]:
    """Return the rows of the files that each epoch added, by footers; unknown ones are left out."""
    added = [path for paths in new.values() for path in paths]
    if len(added) > MAX_FOOTERS:
        return {}
    footers = Footers().read(store, added)
    by_epoch: dict[Epoch, int] = {}
    for epoch, paths in new.items():
        counts = [footers[path].rows for path in paths if path in footers]
        numbers = [rows for rows in counts if rows is not None]
        if len(numbers) == len(paths):
            by_epoch[epoch] = sum(numbers)
    return by_epoch


def delivered_output(checkpoints: Iterable[Checkpoint]) -> Iterator[CommittedOutput]:
    """Yield what sinks have made visible with these epochs, by their commit data."""
    for checkpoint in checkpoints:
        names = {
            operator.operator: _files(operator)
            for operator in checkpoint.operators
            if any(any(data.values()) for data in operator.commit_data().values())
        }
        yield from committed_output(checkpoint, names)


def _files(operator: OperatorCheckpoint) -> tuple[str, ...] | None:
    """Return the names of the files that a sink has written; None if its commit data names none."""
    try:
        staged = [path for data in operator.commit_data().values() for path in staged_paths(data)]
    except (ArroyoStateError, ValueError):
        return None  # a sink with its own form of commit data
    return tuple(path.name for path in staged)


# ---- execution -----------------------------------------------------------------------------------


def run_rollback(
    store: ObjectStore,
    plan: RollbackPlan,
    *,
    owner: str = "arroyo-state rollback",
    clock: Clock = wall_clock,
    sleep: Callable[[float], None] = time.sleep,
) -> RollbackOutcome:
    """Publish the content of an older epoch as the newest epoch of the job.

    An older run that is still alive is fenced; in the legacy layout, which has no fence, the
    rollback is refused while such a run holds its lease. The abandoned epochs stay until they
    expire. If it is interrupted at any point, the job is unchanged or rolled back, and the next
    call continues from there.

    Raises:
        ConflictError: the plan no longer fits, or another process maintains or runs the job.
        NotFoundError, FormatError, InputError, ProtocolError: as `plan_rollback`.
        StorageError: the store failed; it is unknown whether the epoch was published.
    """
    paths = plan.paths
    with writer_lease(store, paths, owner, clock) as leased:
        check_same(plan, make_plan(_facts(leased, paths), plan.epoch, undoes=plan.undoes))
        # A live run may be about to let it expire.
        with pinned_while(leased, paths, [plan.epoch], REASON, owner, clock, sleep):
            return _published(ParquetBackend(leased, paths, clock=clock), plan)


def _published(backend: ParquetBackend, plan: RollbackPlan) -> RollbackOutcome:
    # Checked before the fence is raised, so that an impossible rollback stops no run.
    backend.prepare_checkpoint_load(plan.epoch)
    if plan.pipeline is not None:
        backend.start_from(plan.ref)
        # An older run may have published epochs until it was fenced; they are found now.
        facts = _facts(backend.store, plan.paths)
        check_same(plan, make_plan(facts, plan.epoch, undoes=plan.undoes))
    target = backend.prepare_checkpoint_load(plan.epoch)
    check_same(plan, replace(plan, epoch=target.epoch, ref=target.ref))
    min_epoch = max(target.min_epoch, *_min_epochs(backend, plan))
    published = backend.publish_carried(
        target,
        target.operators,
        epoch=plan.publishes,
        progress=progress_after(target),
        min_epoch=min_epoch,
        now_micros=backend.clock(),
    )
    return RollbackOutcome(
        plan=plan, epoch=plan.publishes, ref=published.ref, worker_generation=backend.generation
    )


def _min_epochs(backend: ParquetBackend, plan: RollbackPlan) -> Iterator[Epoch]:
    """Yield the `min_epoch` of each abandoned epoch.

    Cleanups that these epochs have begun may still be active, and pinning an epoch depends on it.
    """
    for epoch in plan.given_up:
        with contextlib.suppress(NotFoundError, FormatError, ProtocolError):
            yield backend.load_checkpoint_metadata(epoch.epoch).min_epoch
    yield Epoch(0)
