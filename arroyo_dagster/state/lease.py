"""A lease on a job: of all who maintain it, one at a time compacts or deletes.

Leases are numbered, and each is won by creating its object: the number is the fencing token. The
holder of the highest one holds the job, until it gives the lease back or lets it run out. Writers
need none: worker generations fence them, and whatever a maintainer does is safe beside them. Only
in the legacy layout, which has no generations, a writer holds a lease of its own.

Numbers are found by a listing, and no listing is trusted with the job: `newest.json`, read by its
name, tells the number of the newest lease, and is written before the object of any older one goes.
So a number whose object has gone is never won again.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.numbers import parse_numbered
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import MUTATING, Wrapper

T = TypeVar("T")
LEASE_SECONDS = 60.0
_MARGIN = 6
ON_ITS_WAY_SECONDS = LEASE_SECONDS / _MARGIN
"""What was sent to a store has arrived after so long, or never does: the margin of a lease."""

_NEWEST = "newest.json"


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
    def directory(self) -> StatePath:
        """Where it lies, beside those before and after it."""
        return self.path.parent or self.path

    @property
    def successor(self) -> StatePath:
        """The object that tells that somebody has taken over."""
        return _path_of(self.directory, self.token + 1)


def _path_of(directory: StatePath, token: int) -> StatePath:
    return directory / f"{token:010}.json"


class Leased(Wrapper):
    """A store through which the holder of a lease changes things: nothing, once it is lost.

    Args:
        out_of_time: whether the lease has run out by the holder's own clock; asked in the process
            that holds it only.

    Attributes:
        before_deleting: what is made sure of last before a request to delete, if anything;
            likewise.
    """

    def __init__(
        self, store: ObjectStore, held: Lease, out_of_time: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(store)
        self.lease = held
        self._successor = held.successor
        self.before_deleting: Callable[[], object] | None = None
        self._out_of_time: Callable[[], bool] | None = out_of_time

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_out_of_time": None, "before_deleting": None}

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb in MUTATING:
            self.check()
        if verb == "delete_many" and self.before_deleting is not None:
            self.before_deleting()
        return action()

    def check(self) -> None:
        """Make sure that nobody else has taken the lease, or may be taking it now.

        Raises:
            ConflictError: somebody has, or it could not be renewed in time.
        """
        if self.inner.head(self._successor) is not None or self._long_lost():
            raise ConflictError(
                "the lease on the job ran out, and somebody else has taken it",
                path=self.lease.path,
                owner=self.lease.owner,
                retryable=True,
                next_step="let the other go on, then run it again; nothing was lost",
            )
        # Behind that request, which may have taken its time.
        if self._out_of_time is not None and self._out_of_time():
            raise _too_late(self.lease)

    def _long_lost(self) -> bool:
        """In a process that cannot ask its holder's clock: whether the lease was lost so long ago
        that the object of its successor has gone."""
        if self._out_of_time is not None:
            return False
        return _named_token(self.inner, self.lease.directory) > self.lease.token


@contextmanager
def lease(
    store: ObjectStore,
    paths: JobPaths,
    owner: str,
    *,
    directory: StatePath | None = None,
    seconds: float = LEASE_SECONDS,
    clock: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> Iterator[Leased]:
    """Hold the lease on a job, and give it back in the end.

    Args:
        owner: who asks, for people to read; the same owner takes over from itself.
        directory: where the leases lie; those of the job's maintainers unless given.
        seconds: how long it is held against others if this process dies; renewed while it lives.
        clock: microseconds since the Unix epoch; the clocks of maintainers should agree to within
            a fraction of `seconds`. If they do not, two may run at once, which costs work only.

    Raises:
        ConflictError: somebody else holds the lease.
    """
    micros = int(seconds * 1e6)
    runs_out = clock() + _own_time(micros)
    held = _acquire(store, paths, owner, micros, clock, directory or paths.leases)
    ended = threading.Event()

    def renew() -> None:
        nonlocal runs_out
        while not ended.wait(seconds / 3):
            with contextlib.suppress(StorageError):
                asked = clock()
                _write(store, held, expires_at_micros=asked + micros)
                runs_out = asked + _own_time(micros)

    thread = threading.Thread(target=renew, name="arroyo-lease", daemon=True)
    thread.start()
    try:
        yield Leased(store, held, lambda: clock() >= runs_out)
    finally:
        ended.set()
        thread.join()
        _give_back(store, held)


def newest_token(store: ObjectStore, directory: StatePath) -> int:
    """The number of the newest lease in a directory of leases; 0 if there never was one."""
    return max((*_tokens(store, directory), _named_token(store, directory)))


def _tokens(store: ObjectStore, directory: StatePath) -> list[int]:
    try:
        listed = store.list_dir(directory).objects
    except NotFoundError:
        return []  # nothing was ever written below the URL
    found = (parse_numbered(info.path.name, 10) for info in listed)
    return sorted(token for token in found if token is not None)


def _named_token(store: ObjectStore, directory: StatePath) -> int:
    """The number that `newest.json` tells; 0 if there is none, as before the first lease."""
    path = directory / _NEWEST
    try:
        found = records.decode_json(store.read(path), path).get("token")
    except NotFoundError:
        return 0
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise FormatError(
            "this does not tell the number of a lease",
            path=path,
            next_step="see who else writes there; if nobody maintains the job now, remove the "
            "object: the next lease writes it anew",
        )
    return found


def _own_time(micros: int) -> int:
    """For how long the holder counts on a lease. It ends a little early: what is on its way to the
    store then still arrives in time."""
    return micros * (_MARGIN - 1) // _MARGIN


def _acquire(
    store: ObjectStore,
    paths: JobPaths,
    owner: str,
    micros: int,
    clock: Callable[[], int],
    directory: StatePath,
) -> Lease:
    began = clock()
    tokens = _tokens(store, directory)
    newest = tokens[-1] if tokens else 0
    while True:
        if newest:
            _check_free(store, _path_of(directory, newest), paths, owner, clock())
        path = _path_of(directory, newest + 1)
        mine = Lease(path=path, token=newest + 1, owner=owner, nonce=uuid.uuid4().hex)
        created = _create(store, mine, clock() + micros)
        try:
            named = _named_token(store, directory)
            if created and named < mine.token:
                if clock() - began >= _own_time(micros):
                    raise _too_late(mine)
                _name(store, mine, tokens)
                return mine
        except ArroyoStateError:
            if created:
                _give_back(store, mine)
            raise
        if named < mine.token:
            raise _taken(paths, path, "somebody who came first")
        # It was somebody's before: the listing left names out, or others came and went behind it.
        newest = named


def _name(store: ObjectStore, mine: Lease, older: Iterable[int]) -> None:
    """Tell by name which lease is the newest; only then may the objects of older ones go."""
    fields = {"version": 1, "token": mine.token}
    store.put(mine.directory / _NEWEST, records.encode_json(fields))
    # The newest two stay: whoever held the one before must find that it was taken.
    gone = [token for token in older if token < mine.token - 1]
    store.delete_many([_path_of(mine.directory, token) for token in gone])


def _give_back(store: ObjectStore, mine: Lease) -> None:
    # One that cannot be given back runs out.
    with contextlib.suppress(StorageError):
        _write(store, mine, expires_at_micros=0)


def _create(store: ObjectStore, mine: Lease, expires_at_micros: int) -> bool:
    data = _encoded(mine, expires_at_micros)
    if store.create(mine.path, data):
        return True
    try:
        return store.read(mine.path) == data
    except NotFoundError:
        return False  # an older one, which whoever came later has just removed


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
        raise _taken(paths, path, str(held.get("owner")), f"it runs out in {left} seconds")


def _too_late(mine: Lease) -> ConflictError:
    return ConflictError(
        "the lease on the job could not be renewed before it ran out",
        path=mine.path,
        owner=mine.owner,
        retryable=True,
        next_step="run it again once the store answers in time; nothing was lost",
    )


def _taken(paths: JobPaths, path: StatePath, owner: str, note: str | None = None) -> ConflictError:
    does = "maintains" if path.parent == paths.leases else "runs"
    return ConflictError(
        f"somebody else {does} the job" + (f"; {note}" if note else ""),
        job=paths.root,
        owner=owner,
        retryable=True,
        next_step="wait for the other to end, then run it again; nothing was changed",
    )
