"""Read and write the records of leases, and the time by the store's clock."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.leases import LEASE_SECONDS, LeaseRecord
from arroyo_dagster.state.storage.store import ObjectStore

_CLOCK = "clock.json"
_PROCESS = uuid.uuid4().hex


def read_record(store: ObjectStore, path: StatePath) -> LeaseRecord | None:
    """Read one lease; None if it does not exist.

    Raises:
        FormatError: it does not decode.
    """
    try:
        fields = records.decode_json(store.read(path), path)
    except NotFoundError:
        return None
    # After the read: a renewal in between only makes the lease look younger.
    info = store.head(path)
    if info is None:
        return None
    pid, host, process = fields.get("pid"), fields.get("host"), fields.get("process")
    owner = str(fields.get("owner"))
    expires, acquired = fields.get("expires_at_micros"), fields.get("acquired_at_micros")
    return LeaseRecord(
        path=path,
        token=int(path.name.removesuffix(".json")),
        owner=owner,
        host=host if isinstance(host, str) else None,
        pid=pid if isinstance(pid, int) else None,
        description=str(fields.get("description", owner)),
        nonce=str(fields.get("nonce")),
        process=process if isinstance(process, str) else None,
        duration_micros=_duration(fields),
        acquired_at_micros=acquired if isinstance(acquired, int) else None,
        renewed_at_micros=info.modified_micros or None,
        expires_at_micros=expires if isinstance(expires, int) else 0,
    )


def _duration(fields: Mapping[str, Any]) -> int:
    found = fields.get("duration_micros")
    return found if isinstance(found, int) and found > 0 else int(LEASE_SECONDS * 1e6)


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
    """Encode the lease of this process."""
    return records.encode_json(
        {
            "version": 1,
            # Older releases let an owner take its own lease again, so the owner names the process.
            "owner": owner,
            "description": description,
            "host": platform.node(),
            "pid": os.getpid(),
            "process": process_here(),
            "token": token,
            "nonce": nonce,
            "duration_micros": duration_micros,
            "acquired_at_micros": acquired_at_micros,
            "expires_at_micros": expires_at_micros,
        }
    )


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
    path = directory / _CLOCK
    store.put(path, records.encode_json({"version": 1}))
    info = store.head(path)
    return None if info is None else info.modified_micros or None
