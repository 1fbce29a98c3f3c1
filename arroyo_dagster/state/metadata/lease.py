"""A lease on a job: of all who maintain it, one at a time compacts or deletes.

Leases are numbered, and each is won by creating its object: the number is the fencing token. The
holder of the highest one holds the job, until it gives the lease back or lets it run out. Writers
need none: worker generations fence them, and whatever a maintainer does is safe beside them. Only
in the legacy layout, which has no generations, a writer holds a lease of its own.

Whether a lease has expired is judged by the store's clock alone (see `lease_records`); how long its
own still counts a holder judges by a clock of its process that nobody sets. A holder is one
acquisition, never a name: who finds a lease held waits, or fails and says by whom. Only what this
very process could not give back it may take again at once.

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
from arroyo_dagster.state.codec.plain import iso_micros
from arroyo_dagster.state.metadata.lease_records import (
    encode_record,
    owner_here,
    process_here,
    read_record,
    store_time,
)
from arroyo_dagster.state.model.clock import Clock, own_clock, wall_clock
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LEASE_SECONDS, LeaseRecord
from arroyo_dagster.state.model.numbers import parse_numbered
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import MUTATING, Wrapper

T = TypeVar("T")
_MARGIN = 6
IN_FLIGHT_GRACE_SECONDS = LEASE_SECONDS / _MARGIN
"""The time after which a request to a store has arrived or never will: the margin of a lease."""

_NEWEST = "newest.json"
_held_here: set[str] = set()
"""The nonces of the acquisitions of this process that have not ended."""

_POLL_SECONDS = 2.0
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One lease of a job.

    Attributes:
        token: its number; higher ones are newer.
        owner: who took it: `HOST/PID (description)`.
        description: what its holder does, for people to read.
        nonce: no other acquisition has it.
        duration_micros: so long after it was renewed others may take it.
    """

    path: StatePath
    token: int
    owner: str
    description: str
    nonce: str
    duration_micros: int

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
                "the lease on the job was lost: it ran out or was broken, and another process has "
                "taken it",
                path=self.lease.path,
                owner=self.lease.owner,
                retryable=True,
                next_step="let the other process continue, then run this again; nothing was lost",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """How a lease is taken and held.

    Attributes:
        directory: where the leases lie; those of the job's maintainers unless given.
        seconds: how long it is held against others if this process dies; renewed while it lives.
        wait_seconds: how long to wait for whoever holds it now; see `EXPIRED_SECONDS`.
        take_over: take it even if somebody holds it, who then loses it at the next call. What that
            one has sent before may still arrive: let `IN_FLIGHT_GRACE_SECONDS` pass.
        clock: microseconds since 1970. No decision rests on it where the store gives times.
        ticks: microseconds since whenever, by which the holder counts its own time: `own_clock`;
            for a `clock` that a test gives, that one.
        sleep: how to wait.
    """

    directory: StatePath | None = None
    seconds: float = LEASE_SECONDS
    wait_seconds: float = 0.0
    take_over: bool = False
    clock: Clock = wall_clock
    ticks: Callable[[], int] | None = None
    sleep: Callable[[float], None] = time.sleep


@contextmanager
def lease(
    store: ObjectStore, paths: JobPaths, owner: str, options: LeaseOptions | None = None
) -> Iterator[Leased]:
    """Hold the lease on a job, and give it back in the end, whatever ends the block: an interrupt,
    too, at any moment from the request for it on.

    Args:
        owner: what the caller does, for people to read; who holds it is this very acquisition.

    Raises:
        ConflictError: somebody else holds the lease; says who, and until when.
    """
    chosen = options or LeaseOptions()
    clock = chosen.clock
    asked = _LeaseRequest(
        paths=paths,
        directory=chosen.directory or paths.leases,
        description=owner,
        nonce=uuid.uuid4().hex,
        micros=int(chosen.seconds * 1e6),
        take_over=chosen.take_over,
        clock=clock,
        ticks=chosen.ticks or (own_clock if clock is wall_clock else clock),
    )
    renewal = _Renewal(store, asked)
    _held_here.add(asked.nonce)
    try:
        held, runs_out = _awaited(store, asked, chosen.wait_seconds, chosen.sleep)
        yield renewal.begin(held, runs_out)
    finally:
        try:
            renewal.end()
        finally:
            _held_here.discard(asked.nonce)


@dataclass(slots=True, kw_only=True)
class _LeaseRequest:
    """One acquisition, as it was asked for.

    Attributes:
        mine: the lease that is to be given back; None before the request for it, and afterwards.
        sure: whether it was created; else an interrupt may have come before the answer.
    """

    paths: JobPaths
    directory: StatePath
    description: str
    nonce: str
    micros: int
    take_over: bool
    clock: Clock
    ticks: Callable[[], int]
    mine: Lease | None = None
    sure: bool = False


def _awaited(
    store: ObjectStore, asked: _LeaseRequest, wait_seconds: float, sleep: Callable[[float], None]
) -> tuple[Lease, int]:
    """The lease, once it is free, and until when it counts."""
    while True:
        runs_out = asked.ticks() + _own_time(asked.micros)
        try:
            return _acquire(store, asked), runs_out
        except ConflictError:
            if wait_seconds <= 0:
                raise
        sleep(min(wait_seconds, _POLL_SECONDS))
        wait_seconds -= _POLL_SECONDS


class _Renewal:
    """Renews a lease until the end, then gives it back."""

    def __init__(self, store: ObjectStore, asked: _LeaseRequest) -> None:
        self._store = store
        self._asked = asked
        self._ended: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def begin(self, held: Lease, runs_out: int) -> Leased:
        """Renew a lease from now on, and give the store through which its holder changes things."""
        store, asked = self._store, self._asked
        ended = self._ended = threading.Event()

        def renew() -> None:
            nonlocal runs_out
            while not ended.wait(asked.micros / 3e6):
                with contextlib.suppress(ArroyoStateError):
                    begun = asked.ticks()
                    _write(store, held, expires_at_micros=asked.clock() + asked.micros)
                    # A process that stood still may renew what others have taken since, and left.
                    runs_out = 0 if _is_lost(store, held) else begun + _own_time(asked.micros)

        self._thread = threading.Thread(target=renew, name="arroyo-lease", daemon=True)
        self._thread.start()
        return Leased(store, held, lambda: asked.ticks() >= runs_out)

    def end(self) -> None:
        """Give the lease back, if there is one, after its last renewal."""
        interrupt: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                self._stop()
                _release(self._store, self._asked)
                break
            except Exception:
                raise
            except BaseException as another:  # it does not keep the lease either
                interrupt = another
        if interrupt is not None:
            raise interrupt

    def _stop(self) -> None:
        if self._ended is not None:
            self._ended.set()
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # an interrupt came before its start
                self._thread.join()
            self._thread = None


def _is_lost(store: ObjectStore, held: Lease) -> bool:
    """Whether somebody has taken the lease since, even if that one has given it back long ago."""
    if _named_token(store, held.directory) > held.token:
        return True
    return store.head(held.successor) is not None


def newest_token(store: ObjectStore, directory: StatePath) -> int:
    """The number of the newest lease in a directory of leases; 0 if there never was one."""
    return max((*_tokens(store, directory), _named_token(store, directory)))


def newest_lease(store: ObjectStore, directory: StatePath) -> LeaseRecord | None:
    """The newest lease in a directory of leases; None if there never was one.

    Raises:
        FormatError: it does not decode.
    """
    token = newest_token(store, directory)
    return read_record(store, _path_of(directory, token)) if token else None


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
            "the object does not contain the number of a lease",
            path=path,
            next_step="find out which other program writes there; if no process maintains the "
            "job now, delete the object: the next lease writes it anew",
        )
    return found


def _own_time(micros: int) -> int:
    """For how long the holder counts on a lease. It ends a little early: what is on its way to the
    store then still arrives in time."""
    return micros * (_MARGIN - 1) // _MARGIN


def _acquire(store: ObjectStore, asked: _LeaseRequest) -> Lease:
    directory, ticks = asked.directory, asked.ticks
    began = ticks()
    tokens = _tokens(store, directory)
    newest = tokens[-1] if tokens else 0
    while True:
        path = _path_of(directory, newest + 1)
        if newest and not asked.take_over:
            _check_free(store, _path_of(directory, newest), asked)
        mine = Lease(
            path=path,
            token=newest + 1,
            owner=owner_here(asked.description),
            description=asked.description,
            nonce=asked.nonce,
            duration_micros=asked.micros,
        )
        asked.mine, asked.sure = mine, False
        created = _create(store, mine, asked.clock() + asked.micros)
        asked.mine, asked.sure = mine if created else None, created
        try:
            named = _named_token(store, directory)
            if created and named < mine.token:
                if ticks() - began >= _own_time(asked.micros):
                    raise _too_late(mine)
                _name(store, mine, tokens)
                return mine
        except ArroyoStateError:
            _release(store, asked)
            raise
        if named < mine.token:
            first = read_record(store, path)
            raise _taken(asked.paths, path, "another process" if first is None else first.owner)
        # It was somebody's before: the listing left names out, or others came and went behind it.
        asked.mine = None
        newest = named


def _name(store: ObjectStore, mine: Lease, older: Iterable[int]) -> None:
    """Tell by name which lease is the newest; only then may the objects of older ones go."""
    fields = {"version": 1, "token": mine.token}
    store.put(mine.directory / _NEWEST, records.encode_json(fields))
    # The newest two stay: whoever held the one before must find that it was taken.
    gone = [token for token in older if token < mine.token - 1]
    store.delete_many([_path_of(mine.directory, token) for token in gone])


def _release(store: ObjectStore, asked: _LeaseRequest) -> None:
    mine = asked.mine
    if mine is None:
        return
    # One that cannot be given back runs out.
    with contextlib.suppress(StorageError):
        if asked.sure or _was_created(store, mine):
            _write(store, mine, expires_at_micros=0)
    asked.mine = None


def _was_created(store: ObjectStore, mine: Lease) -> bool:
    """Whether the object of a lease is there, of whose creation no answer came."""
    try:
        found = read_record(store, mine.path)
    except FormatError:
        return False
    return found is not None and found.nonce == mine.nonce


def _create(store: ObjectStore, mine: Lease, expires_at_micros: int) -> bool:
    data = _encoded(mine, expires_at_micros)
    try:
        if store.create(mine.path, data):
            return True
    except StorageError:
        # It may be there all the same, and would be held against everybody until it expires.
        if not _is_there(store, mine.path, data):
            raise
        return True
    return _is_there(store, mine.path, data)


def _is_there(store: ObjectStore, path: StatePath, data: bytes) -> bool:
    try:
        return store.read(path) == data
    except NotFoundError:
        return False  # an older one, which whoever came later has just removed


def _write(store: ObjectStore, mine: Lease, *, expires_at_micros: int) -> None:
    store.put(mine.path, _encoded(mine, expires_at_micros))


def _encoded(mine: Lease, expires_at_micros: int) -> bytes:
    return encode_record(
        token=mine.token,
        owner=mine.owner,
        description=mine.description,
        nonce=mine.nonce,
        duration_micros=mine.duration_micros,
        expires_at_micros=expires_at_micros,
    )


def _check_free(store: ObjectStore, path: StatePath, asked: _LeaseRequest) -> None:
    held = read_record(store, path)
    if held is None or held.released:
        return  # whoever came after it may have removed it; creating ours will tell
    if held.nonce == asked.nonce:
        return  # this acquisition wrote it, under a number that was another lease's before
    if held.process == process_here() and held.nonce not in _held_here:
        return  # this very process is done with it, and could not give it back
    until = held.held_until(store_time(store, asked.directory), asked.clock())
    if until is not None:
        raise _taken(asked.paths, path, held.owner, until)


def _too_late(mine: Lease) -> ConflictError:
    return ConflictError(
        "the lease on the job could not be renewed before it ran out",
        path=mine.path,
        owner=mine.owner,
        retryable=True,
        next_step="run it again once the store answers in time; nothing was lost",
    )


def _taken(
    paths: JobPaths, path: StatePath, owner: str, until_micros: int | None = None
) -> ConflictError:
    until = "" if until_micros is None else f" until {_time_of_day(until_micros)}"
    kind = lease_kind(paths, path)
    return ConflictError(
        f"the job is leased by {owner}{until}: {_DOES[kind]}",
        job=paths.root,
        owner=owner,
        retryable=True,
        next_step="wait for the other process to end, then run this again; see `arroyo-state "
        "leases`, and `arroyo-state lease break` for a process that hangs; nothing was changed",
    )


_DOES = {
    "maintenance": "it maintains the job",
    "writer": "it runs the job",
    "window": "it holds the job's maintenance window",
}


def lease_kind(paths: JobPaths, path: StatePath) -> str:
    """Which lease of a job an object is: `maintenance`, `writer` or `window`."""
    return {paths.writers: "writer", paths.windows: "window"}.get(
        path.parent or path, "maintenance"
    )


def _time_of_day(micros: int) -> str:
    """In UTC, as 12:04:10Z."""
    return f"{(iso_micros(micros) or '').rpartition('T')[2].partition('.')[0]}Z"
