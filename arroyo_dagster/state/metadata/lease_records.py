"""The records of leases read and written, and the time by the store's clock."""

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
    """Read one lease; None if there is none.

    Raises:
        FormatError: it does not decode.
    """
    try:
        fields = records.decode_json(store.read(path), path)
    except NotFoundError:
        return None
    # Behind the read: what is renewed in between only looks younger.
    info = store.head(path)
    if info is None:
        return None
    pid, host, process = fields.get("pid"), fields.get("host"), fields.get("process")
    owner = str(fields.get("owner"))
    expires = fields.get("expires_at_micros")
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
    expires_at_micros: int,
) -> bytes:
    """Encode the lease of this process."""
    return records.encode_json(
        {
            "version": 1,
            # Older releases let the same owner take over from itself: so it names the process.
            "owner": owner,
            "description": description,
            "host": platform.node(),
            "pid": os.getpid(),
            "process": process_here(),
            "token": token,
            "nonce": nonce,
            "duration_micros": duration_micros,
            "expires_at_micros": expires_at_micros,
        }
    )


def process_here() -> str:
    """What tells this process from all others, those of the same number included."""
    return f"{os.getpid()}-{_PROCESS}"


def owner_here(description: str) -> str:
    """This process, for people to read."""
    return f"{platform.node()}/{os.getpid()} ({description})"


def store_time(store: ObjectStore, directory: StatePath) -> int | None:
    """The time by the store's clock, at least: an object is written to see its time.

    Everybody writes the same object, so that none is left over; who writes it just then as well
    only makes the time later.

    Args:
        directory: of leases.
    """
    path = directory / _CLOCK
    store.put(path, records.encode_json({"version": 1}))
    info = store.head(path)
    return None if info is None else info.modified_micros or None
