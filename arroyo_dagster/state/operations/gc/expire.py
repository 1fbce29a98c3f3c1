"""Expiry of a job's old epochs by their number: the plan that most people want, in one call."""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind, Retention
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.gc.steps import Delete, Pace, delete_here
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireOutcome:
    """What an expiry did, or would do.

    Attributes:
        done: False for a dry run, and where there was nothing to do.
        kept_epochs: how many epochs stay.
        files, size_bytes: the data files that went, or would go.
        run: the name of the run in the journal; None if nothing was done.
    """

    plan: GcPlan
    done: bool
    kept_epochs: int
    files: int
    size_bytes: int
    run: str | None = None


def to_keep(keep_epochs: int) -> GcRequest:
    """The question of an expiry that keeps so many of the newest epochs.

    Raises:
        InputError: fewer than two are to be kept.
    """
    return GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=keep_epochs))


def plan_expiry(store: ObjectStore, paths: JobPaths, keep_epochs: int) -> GcPlan:
    """Plan to keep the newest epochs, and pinned ones. Writes nothing: this is the dry run.

    Raises:
        InputError: fewer than two are to be kept.
        ProtocolError, FormatError, NotFoundError: as `plan_gc`.
    """
    return plan_gc(store, paths, to_keep(keep_epochs))


def expiry_backlog(store: ObjectStore, paths: JobPaths, keep_epochs: int) -> int:
    """How many epochs of a job are older than the newest `keep_epochs`; 0 for jobs of Arroyo's."""
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if len(epochs) <= keep_epochs:
        return 0
    newest = backend.load_checkpoint_metadata(epochs[-1])
    if newest.progress is None:
        return 0
    pinned = backend.job_pins().pinned
    return sum(epoch not in pinned for epoch in epochs[: len(epochs) - keep_epochs])


def expire_job(
    store: ObjectStore,
    paths: JobPaths,
    *,
    keep_epochs: int,
    yes: bool = False,
    plan: GcPlan | None = None,
    delete: Delete = delete_here,
    pace: Pace | None = None,
    owner: str = "arroyo-state gc",
    clock: Clock = wall_clock,
) -> ExpireOutcome:
    """Remove the epochs of a job but the newest and the pinned ones: `run_gc` with a count.

    Safe beside a running job, and beside its own expiry. Stopped anywhere, every epoch that
    stays is whole, and the next run finishes the rest.

    Args:
        keep_epochs: how many of the newest epochs stay, at least two.
        yes: delete; without it the outcome says what would go.
        plan, delete, pace, owner: as of `GcOptions`.

    Raises:
        InputError, ConflictError, ProtocolError, StorageError: as `run_gc`.
    """
    request, done, run = to_keep(keep_epochs), False, None
    if yes:
        options = GcOptions(delete=delete, pace=pace or Pace(), owner=owner, clock=clock)
        outcome = run_gc(store, paths, request, options, plan=plan)
        chosen, done, run = outcome.plan, outcome.done, outcome.run
    else:
        chosen = plan or plan_gc(store, paths, request, now_micros=clock())
    return ExpireOutcome(
        plan=chosen,
        done=done,
        kept_epochs=chosen.proof.epochs - len(chosen.epochs),
        files=len(chosen.data),
        size_bytes=chosen.data.size_bytes,
        run=run,
    )
