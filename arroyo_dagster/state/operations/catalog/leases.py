"""List the leases on jobs, and break the lease of a holder that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state.metadata.lease import (
    IN_FLIGHT_GRACE_SECONDS,
    LeaseOptions,
    lease,
    newest_lease,
)
from arroyo_dagster.state.metadata.lease_records import store_time
from arroyo_dagster.state.metadata.ownership import check_job_maintained
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseRecord
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

KINDS = ("maintenance", "writer", "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLease:
    """The newest lease of one kind on one job.

    Attributes:
        kind: `maintenance`; `writer` (legacy layout only); `window` (a maintenance window).
        record: None if it cannot be read; if it does not decode, nobody can acquire this lease
            until it is broken.
        problem: why it cannot be read.
    """

    paths: JobPaths
    kind: str
    record: LeaseRecord | None
    problem: ArroyoStateError | None = None

    def state(self, now_micros: int) -> str:
        """Return `held`, `expired`, `released`, `broken` (its record cannot be read), or `unknown`:
        a clock is wrong.
        """
        if self.record is None:
            return "broken"
        if self.record.released:
            return "released"
        age = self.age_seconds(now_micros)
        if age is not None and age < -1:
            return "unknown"
        return "expired" if self.record.held_until(now_micros, now_micros) is None else "held"

    def age_seconds(self, now_micros: int) -> float | None:
        """Return the time since the last renewal, by this machine's clock; None = not known."""
        renewed = None if self.record is None else self.record.renewed_at_micros
        return None if renewed is None else (now_micros - renewed) / 1e6

    def expires_in_seconds(self, now_micros: int) -> float | None:
        """Return the time until it expires unless it is renewed; None = it is not held."""
        if self.record is None or self.state(now_micros) != "held":
            return None
        until = self.record.held_until(now_micros, now_micros)
        return None if until is None else (until - now_micros) / 1e6


def lease_directory(paths: JobPaths, kind: str) -> StatePath:
    """Return the directory of a job's leases of one kind."""
    return {"writer": paths.writers, "window": paths.windows}.get(kind, paths.leases)


def list_leases(
    store: ObjectStore, jobs: Iterable[JobPaths], kinds: Iterable[str] = KINDS
) -> list[JobLease]:
    """Return the newest lease of each kind on each job, if there ever was one. Reads only."""
    pairs = [(paths, kind) for paths in jobs for kind in kinds]
    leases = concurrently(lambda pair: _newest(store, *pair), pairs)
    return [job_lease for job_lease in leases if job_lease is not None]


def _newest(store: ObjectStore, paths: JobPaths, kind: str) -> JobLease | None:
    try:
        record = newest_lease(store, lease_directory(paths, kind))
    except ArroyoStateError as error:
        return JobLease(paths=paths, kind=kind, record=None, problem=error)
    return None if record is None else JobLease(paths=paths, kind=kind, record=record)


def break_lease(
    store: ObjectStore,
    paths: JobPaths,
    kind: str,
    *,
    owner: str = "arroyo-state lease break",
    clock: Clock = wall_clock,
    sleep: Callable[[float], None] = time.sleep,
) -> int | None:
    """End a lease that another process holds: acquire it with the next token, then release it.

    The holder loses the lease at its next call that changes anything. A request that it sent before
    may still arrive, so the lease stays held for ten seconds before it is released.

    Returns:
        The time since the holder last renewed it, in microseconds by the store's clock; None if the
        store reports no times or the record does not decode.

    Raises:
        ConflictError: another process acquired the lease at the same moment.
        FormatError: `newest.json` does not decode.
        InputError: the job is marked; see `state.metadata.ownership`.
    """
    if kind != "writer":
        check_job_maintained(store, paths)
    directory = lease_directory(paths, kind)
    newest = _newest(store, paths, kind)
    if newest is not None and isinstance(newest.problem, StorageError):
        raise newest.problem
    renewed = None if newest is None or newest.record is None else newest.record.renewed_at_micros
    now = store_time(store, directory)
    with lease(store, paths, owner, LeaseOptions(directory=directory, take_over=True, clock=clock)):
        sleep(IN_FLIGHT_GRACE_SECONDS)
    return None if renewed is None or now is None else now - renewed
