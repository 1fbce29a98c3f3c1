"""Read and write the records of leases, and the time by the store's clock."""

from __future__ import annotations

import os
import platform
import uuid
from dataclasses import dataclass, replace

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec.derived import OWN_VERSION, decode, decoder, encode, encode_json
from arroyo_dagster.state.model.ids import StatePath
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


def encode_record(
    *,
    token: int,
    owner: str,
    description: str,
    nonce: str,
    duration_micros: int,
    acquired_at_micros: int,
    expires_at_micros: int,
) -> bytes:
    """Encode the lease of this process. Raises InputError: a number does not fit."""
    lease = LeaseRecord(
        path=StatePath("lease"),  # not stored
        owner=owner,
        description=description,
        host=platform.node(),
        pid=os.getpid(),
        process=process_here(),
        token=token,
        nonce=nonce,
        duration_micros=duration_micros,
        # A clock may be before 1970. An expiry of 0 is a release.
        acquired_at_micros=max(0, acquired_at_micros),
        renewed_at_micros=None,
        expires_at_micros=expires_at_micros and max(1, expires_at_micros),
    )
    return encode(lease)


def process_here() -> str:
    """Return an id of this process that no other process has, even one with the same pid."""
    return f"{os.getpid()}-{_PROCESS}"


def owner_here(description: str) -> str:
    """Return the name of this process, for people."""
    return f"{platform.node()}/{os.getpid()} ({description})"


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
