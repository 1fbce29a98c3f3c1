"""Read and write the records of leases, the time by the store's clock, and errors about leases."""

from __future__ import annotations

import os
import platform
import uuid
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, LeaseHeldError, NotFoundError
from arroyo_dagster.state.codec.derived import OWN_VERSION, decode, decoder, encode, encode_json
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseRecord
from arroyo_dagster.state.storage.store import ObjectStore

CLOCK = "clock.json"
"""The object of which only the time counts."""

NEWEST = "newest.json"
"""The object that contains the number of the newest lease."""

_PROCESS = uuid.uuid4().hex


def read_record(store: ObjectStore, path: StatePath) -> LeaseRecord | None:
    """Read one lease; None if it does not exist.

    Raises:
        FormatError: it does not decode.
    """
    try:
        fields = decode_lease(store.read(path), path)
    except NotFoundError:
        return None
    # After the read: a renewal in between only makes the lease look younger.
    info = store.head(path)
    return None if info is None else replace(fields, renewed_at_micros=info.modified_micros or None)


def decode_lease(data: bytes, path: str) -> LeaseRecord:
    """Decode a lease, without the time of its renewal. Raises FormatError: invalid, or of a later
    release.
    """
    return decode(LeaseRecord, data, path, path=StatePath(path), renewed_at_micros=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestLease:
    """The number of the newest lease."""

    token: int


decode_newest = decoder(NewestLease)


def lease_here(
    path: StatePath,
    token: int,
    *,
    description: str,
    nonce: str,
    duration_micros: int,
    acquired_at_micros: int,
) -> LeaseRecord:
    """Return a lease of this process, which is not written yet."""
    return LeaseRecord(
        path=path,
        owner=f"{platform.node()}/{os.getpid()} ({description})",
        description=description,
        host=platform.node(),
        pid=os.getpid(),
        process=process_here(),
        token=token,
        nonce=nonce,
        duration_micros=duration_micros,
        acquired_at_micros=max(0, acquired_at_micros),  # a clock may be before 1970
        renewed_at_micros=None,
        expires_at_micros=0,
    )


def encode_lease(lease: LeaseRecord, expires_at_micros: int) -> bytes:
    """Encode a lease that expires then, or 0 if it is released. Raises InputError: a number does
    not fit.
    """
    # A clock may be before 1970.
    return encode(replace(lease, expires_at_micros=expires_at_micros and max(1, expires_at_micros)))


def process_here() -> str:
    """Return an id of this process that no other process has, even one with the same pid."""
    return f"{os.getpid()}-{_PROCESS}"


def store_time(store: ObjectStore, directory: StatePath) -> int | None:
    """Return a lower bound of the time by the store's clock: the time of an object just written.

    All processes write the same object, so that none is left over; a concurrent write only makes
    the time later.

    Args:
        directory: of leases.

    Returns:
        Microseconds since 1970; None if the store reports no times.
    """
    path = directory / CLOCK
    store.put(path, encode_json({"version": OWN_VERSION}))
    info = store.head(path)
    return None if info is None else info.modified_micros or None


# ---- what is said of leases ----------------------------------------------------------------------


def take_over_text(record: LeaseRecord) -> str:
    """Return what to say when a lease is taken over that a process did not release."""
    renewed = record.renewed_at_micros
    last = "" if renewed is None else f", and renewed it last at {_time_of_day(renewed)}"
    return (
        f"took over the lease of {record.owner}, which ended without releasing it{last}; what it "
        "had not published is not used"
    )


def too_late(lease: LeaseRecord) -> ConflictError:
    """Return the error of a holder whose lease has run out."""
    return ConflictError(
        "the lease on the job could not be renewed before it ran out",
        path=lease.path,
        owner=lease.owner,
        retryable=True,
        next_step="run it again once the store answers in time; nothing was lost",
    )


def taken(
    paths: JobPaths, path: StatePath, held: LeaseRecord | None, until_micros: int | None = None
) -> LeaseHeldError:
    """Return the error of a process that finds the job leased by another one."""
    owner = "another process" if held is None else held.owner
    until = None if until_micros is None else _time_of_day(until_micros)
    doing = {
        paths.writers: "it runs the job",
        paths.windows: "it holds the job's maintenance window",
    }
    what = doing.get(path.parent or path, "it maintains the job")
    return LeaseHeldError(
        f"the job is leased by {owner}{'' if until is None else f' until {until}'}: {what}",
        job=paths.root,
        owner=owner,
        host=None if held is None else held.host,
        pid=None if held is None else held.pid,
        until=until,
        next_step="wait for the other process to end, then run this again; see "
        "`arroyo-state sql @leases`, and `arroyo-state lease break` for a process that hangs; "
        "nothing was changed",
    )


def _time_of_day(micros: int) -> str:
    """Format a time in UTC, as 12:04:10Z."""
    return f"{(iso_micros(micros) or '').rpartition('T')[2].partition('.')[0]}Z"
