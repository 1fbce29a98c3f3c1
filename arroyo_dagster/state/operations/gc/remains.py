"""Find what killed writes have left on local disk, in no listing, and delete it when it is old."""

from __future__ import annotations

from dataclasses import replace

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind, WriteRemains
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.write_remains import delete_write_remains, list_write_remains

OLD_MICROS = 24 * 3_600_000_000
"""No write takes so long; one that stood still meanwhile fails, and says so to its caller."""


def write_remains(store: ObjectStore, paths: JobPaths) -> tuple[WriteRemains, ...]:
    """Return what interrupted writes have left below a job, ordered by name; only on local disk.

    Raises:
        StorageError: a directory cannot be listed.
    """
    return tuple(
        WriteRemains(name=str(info.path), size_bytes=info.size_bytes, modified_micros=micros)
        for info in list_write_remains(store, paths.root)
        if (micros := info.modified_micros) is not None
    )


def with_remains(store: ObjectStore, plan: GcPlan) -> GcPlan:
    """Return a plan with the old remains below its job; an expiry takes none."""
    if plan.kind is PlanKind.EXPIRE:
        return plan
    before = plan.made_at_micros - OLD_MICROS
    remains = write_remains(store, plan.paths)
    return replace(plan, remains=tuple(file for file in remains if file.modified_micros < before))


def sweep(held: Leased, plan: GcPlan, fresh: GcPlan) -> int:
    """Delete the remains that a plan and a fresh one have in common, and return their number.

    Raises:
        ConflictError: the lease is lost.
        StorageError: a file cannot be deleted; the others were.
    """
    names = [file.name for file in fresh.remains if file in plan.remains]
    if not names:
        return 0
    held.check()
    failed = delete_write_remains(held, names)
    if failed:
        name, reason = next(iter(failed.items()))
        raise StorageError(
            f"{len(failed)} of {len(names)} remains of interrupted writes were not deleted: "
            f"{reason}",
            retryable=False,
            path=name,
            url=held.url,
        )
    return len(names)
