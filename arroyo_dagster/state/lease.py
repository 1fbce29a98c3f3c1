"""A lease on a job: of all who maintain it, one at a time compacts or deletes.

Leases are numbered, and each is won by creating its object: the number is the fencing token. The
holder of the highest one holds the job, until it gives the lease back or lets it run out. Writers
need none: worker generations fence them, and whatever a maintainer does is safe beside them.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from arroyo_dagster.errors import ConflictError, NotFoundError, StorageError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import MUTATING, Wrapper

T = TypeVar("T")
LEASE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One lease of a job.

    Attributes:
        token: its number; higher ones are newer.
        owner: who took it, for people to read.
    """

    path: StatePath
    token: int
    owner: str
    nonce: str

    @property
    def successor(self) -> StatePath:
        """The object that tells that somebody has taken over."""
        return _path_of(self.path.parent or self.path, self.token + 1)


def _path_of(directory: StatePath, token: int) -> StatePath:
    return directory / f"{token:010}.json"


class Leased(Wrapper):
    """A store through which the holder of a lease changes things: nothing, once it is lost."""

    def __init__(self, store: ObjectStore, held: Lease) -> None:
        super().__init__(store)
        self.lease = held

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb in MUTATING:
            self.check()
        return action()

    def check(self) -> None:
        """Make sure that nobody else has taken the lease.

        Raises:
            ConflictError: somebody has.
        """
        if self.inner.head(self.lease.successor) is not None:
            raise ConflictError(
                "the lease on the job ran out, and somebody else has taken it",
                path=self.lease.path,
                owner=self.lease.owner,
                retryable=True,
                next_step="let the other go on, then run it again; nothing was lost",
            )


@contextmanager
def lease(
    store: ObjectStore,
    paths: JobPaths,
    owner: str,
    *,
    seconds: float = LEASE_SECONDS,
    clock: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> Iterator[Leased]:
    """Hold the lease on a job, and give it back in the end.

    Args:
        owner: who asks, for people to read; the same owner takes over from itself.
        seconds: how long it is held against others if this process dies; renewed while it lives.
        clock: microseconds since the Unix epoch; the clocks of maintainers should agree to within
            a fraction of `seconds`. If they do not, two may run at once, which costs work only.

    Raises:
        ConflictError: somebody else maintains the job.
    """
    micros = int(seconds * 1e6)
    held = _acquire(store, paths, owner, micros, clock)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(seconds / 3):
            with contextlib.suppress(StorageError):
                _write(store, held, expires_at_micros=clock() + micros)

    thread = threading.Thread(target=renew, name="arroyo-lease", daemon=True)
    thread.start()
    try:
        yield Leased(store, held)
    finally:
        ended.set()
        thread.join()
        # One that cannot be given back runs out.
        with contextlib.suppress(StorageError):
            _write(store, held, expires_at_micros=0)


def _acquire(
    store: ObjectStore, paths: JobPaths, owner: str, micros: int, clock: Callable[[], int]
) -> Lease:
    tokens = sorted(
        int(info.path.name.removesuffix(".json"))
        for info in store.list_dir(paths.leases).objects
        if info.path.name.removesuffix(".json").isdecimal()
    )
    newest = tokens[-1] if tokens else 0
    if newest:
        _check_free(store, _path_of(paths.leases, newest), paths, owner, clock())
    token = newest + 1
    path = _path_of(paths.leases, token)
    mine = Lease(path=path, token=token, owner=owner, nonce=uuid.uuid4().hex)
    if not _create(store, mine, clock() + micros):
        raise _taken(paths, "somebody who came first")
    # The newest two stay: whoever held the one before must find that it was taken.
    store.delete_many([_path_of(paths.leases, old) for old in tokens if old < newest])
    return mine


def _create(store: ObjectStore, mine: Lease, expires_at_micros: int) -> bool:
    data = _encoded(mine, expires_at_micros)
    return store.create(mine.path, data) or store.read(mine.path) == data


def _write(store: ObjectStore, mine: Lease, *, expires_at_micros: int) -> None:
    store.put(mine.path, _encoded(mine, expires_at_micros))


def _encoded(mine: Lease, expires_at_micros: int) -> bytes:
    return records.encode_json(
        {
            "version": 1,
            "owner": mine.owner,
            "token": mine.token,
            "nonce": mine.nonce,
            "expires_at_micros": expires_at_micros,
        }
    )


def _check_free(
    store: ObjectStore, path: StatePath, paths: JobPaths, owner: str, now_micros: int
) -> None:
    try:
        held = records.decode_json(store.read(path), path)
    except NotFoundError:
        return  # whoever came after it has removed it; creating ours will tell
    expires = held.get("expires_at_micros")
    if isinstance(expires, int) and expires > now_micros and held.get("owner") != owner:
        left = -(-(expires - now_micros) // 1_000_000)
        raise _taken(paths, str(held.get("owner")), f"it runs out in {left} seconds")


def _taken(paths: JobPaths, owner: str, note: str | None = None) -> ConflictError:
    return ConflictError(
        "somebody else maintains the job" + (f"; {note}" if note else ""),
        job=paths.root,
        owner=owner,
        retryable=True,
        next_step="wait for the other to end, then run it again; nothing was changed",
    )
