"""Expiry of a job's old epochs: planned, checked against fresh facts, carried out here or by
whoever is given the deletes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.backend import ParquetBackend, delete_all
from arroyo_dagster.state.lease import lease
from arroyo_dagster.state.model.gc import ExpirePlan
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.gc import check_expire, min_epoch_to_keep
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

Delete = Callable[[ObjectStore, Sequence[StatePath]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireOutcome:
    """What an expiry did, or would do.

    Attributes:
        done: False for a dry run, and where there was nothing to do.
        kept_epochs: how many epochs stay.
        files, size_bytes: the data files that went, or would go; those that were there.
    """

    plan: ExpirePlan
    done: bool
    kept_epochs: int
    files: int
    size_bytes: int


def plan_expiry(store: ObjectStore, paths: JobPaths, keep_epochs: int) -> ExpirePlan:
    """Plan to keep the newest epochs only. Writes nothing: this is the dry run.

    Raises:
        InputError: fewer than two are to be kept, or the job is Arroyo's.
        NotFoundError, FormatError: an object of an epoch that stays is missing or broken.
    """
    backend = ParquetBackend(store, paths)
    if backend.load().progress is None:
        raise InputError(
            "this is a job of Arroyo's: its epochs are not expired from outside yet",
            job=paths.root,
            next_step="let Arroyo's own controller clean up",
        )
    return backend.expire_plan(min_epoch_to_keep(backend.epochs(), keep_epochs))


def expiry_backlog(store: ObjectStore, paths: JobPaths, keep_epochs: int) -> int:
    """How many epochs of a job are older than the newest `keep_epochs`; 0 for jobs of Arroyo's."""
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if len(epochs) <= keep_epochs:
        return 0
    newest = backend.load_checkpoint_metadata(epochs[-1])
    return 0 if newest.progress is None else len(epochs) - keep_epochs


def expire_job(
    store: ObjectStore,
    paths: JobPaths,
    *,
    keep_epochs: int,
    yes: bool = False,
    plan: ExpirePlan | None = None,
    delete: Delete = delete_all,
    owner: str = "arroyo-state gc",
    clock: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> ExpireOutcome:
    """Remove the epochs of a job but the newest ones: data, then records, then manifests.

    Safe beside a running job, and beside its own expiry. Stopped anywhere, every epoch that
    stays is whole, and the next run finishes the rest.

    Args:
        keep_epochs: how many of the newest epochs stay, at least two.
        yes: delete; without it the outcome says what would go.
        plan: carry out this one, made earlier, if it still fits.
        delete: deletes the data files; in this process unless given.
        owner: who asks, for the lease.

    Raises:
        ConflictError: somebody else maintains the job, or `plan` no longer fits.
        StorageError: objects could not be deleted; what refers to them is still there.
        InputError, NotFoundError, FormatError: as `plan_expiry`.
    """
    if not yes:
        return _outcome(store, paths, plan or plan_expiry(store, paths, keep_epochs), done=False)
    with lease(store, paths, owner, clock=clock) as held:
        backend = ParquetBackend(held, paths, clock=clock)
        fresh = plan_expiry(held, paths, keep_epochs)
        chosen = fresh
        if plan is not None:
            _check(backend, plan)
            chosen = plan
        outcome = _outcome(held, paths, chosen, done=bool(chosen.epochs))
        backend.carry_out(chosen, delete)
    return outcome


def _check(backend: ParquetBackend, plan: ExpirePlan) -> None:
    fresh = backend.expire_plan(plan.min_epoch)
    staying = (epoch for epoch in backend.epochs() if epoch >= fresh.keep_from)
    history = concurrently(backend.load_checkpoint_metadata, staying)
    check_expire(plan, fresh, (path for checkpoint in history for path in checkpoint.paths))


def _outcome(store: ObjectStore, paths: JobPaths, plan: ExpirePlan, *, done: bool) -> ExpireOutcome:
    found = [info for info in concurrently(store.head, plan.data) if info is not None]
    kept = [e for e in ParquetBackend(store, paths).epochs() if e >= plan.keep_from]
    return ExpireOutcome(
        plan=plan,
        done=done,
        kept_epochs=len(kept),
        files=len(found),
        size_bytes=sum(info.size_bytes for info in found),
    )
