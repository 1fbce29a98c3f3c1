"""A lease on a job: only one maintenance process at a time compacts or deletes.

Leases are numbered, and each is acquired by creating its object: the number is the fencing token.
The holder of the highest number holds the job until it releases the lease or lets it expire.
Writers need none: worker generations fence them, and all maintenance is safe beside a writer. Only
in the legacy layout, which has no generations, a writer holds a lease of its own.

Whether a lease has expired is judged by the store's clock alone (see `lease_records`). How long its
own lease still counts, a holder judges by a monotonic clock of its process. A holder is one
acquisition, never a name: a process that finds a lease held waits, or fails and names the holder.
Only a lease that this process could not release may be taken again at once.

Numbers are found by a listing, but a listing may be incomplete. Therefore `newest.json`, which is
read by its name, contains the number of the newest lease, and is written before the object of any
older lease is deleted. So a number whose object was deleted is never acquired again.
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
    FormatError,
    LeaseHeldError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.codec.derived import decode_json, encode
from arroyo_dagster.state.metadata.lease_records import (
    NEWEST,
    NewestLease,
    decode_newest,
    encode_lease,
    lease_here,
    process_here,
    read_record,
    store_time,
    take_over_text,
    taken,
    too_late,
)
from arroyo_dagster.state.metadata.ownership import check_job_maintained
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

_held_here: set[str] = set()
"""The nonces of the acquisitions of this process that have not ended."""

_POLL_SECONDS = 2.0
_ATTEMPTS = 3


def directory_of(held: LeaseRecord) -> StatePath:
    """Return the directory of a lease, its predecessors and its successors."""
    return held.path.parent or held.path


def successor_of(held: LeaseRecord) -> StatePath:
    """Return the object that shows that another acquisition has taken a lease."""
    return _path_of(directory_of(held), held.token + 1)


def _path_of(directory: StatePath, token: int) -> StatePath:
    return directory / f"{token:010}.json"


class Precondition:
    """A check before each request to delete. Raises an error if its facts have changed."""

    @property
    def from_anywhere(self) -> bool:
        """Whether a worker on another machine, to which it is pickled, comes to the same answer."""
        return False

    def __call__(self) -> object:
        """Check it."""
        raise NotImplementedError


class Leased(Wrapper):
    """The store of a lease's holder; it refuses changes once the lease is lost.

    Args:
        out_of_time: whether the lease has expired by the holder's own clock; called only in the
            process that holds it.

    Attributes:
        took_over: the lease that a process had left behind without a release; None = none.
        before_deleting: called before each request to delete, to check its preconditions; None = no
            check. Only in the process that holds the lease, unless it is a `Precondition` that
            holds from anywhere.
    """

    def __init__(
        self,
        store: ObjectStore,
        held: LeaseRecord,
        out_of_time: Callable[[], bool] = lambda: False,
        took_over: LeaseRecord | None = None,
    ) -> None:
        super().__init__(store)
        self.lease = held
        self.took_over = took_over
        self._successor = successor_of(held)
        self.before_deleting: Callable[[], object] | None = None
        self._out_of_time: Callable[[], bool] | None = out_of_time

    def __getstate__(self) -> dict[str, Any]:
        check = None if self.deletes_here else self.before_deleting
        return super().__getstate__() | {"_out_of_time": None, "before_deleting": check}

    @property
    def deletes_here(self) -> bool:
        """Whether only this process may delete: what is checked before may differ elsewhere."""
        check = self.before_deleting
        if check is None:
            return False
        return not (isinstance(check, Precondition) and check.from_anywhere)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb in MUTATING:
            self.check()
        if verb == "delete_many" and self.before_deleting is not None:
            self.before_deleting()
        return action()

    def check(self) -> None:
        """Check that no other process has acquired the lease, or may be acquiring it now.

        Raises:
            LeaseHeldError: another process has.
            ConflictError: the lease could not be renewed in time.
        """
        if self.inner.head(self._successor) is not None or self._long_lost():
            raise LeaseHeldError(
                "the lease on the job was lost: it ran out or was broken, and another process has "
                "taken it",
                path=self.lease.path,
                owner=self.lease.owner,
                next_step="let the other process continue, then run this again; nothing was lost",
            )
        # After that request, because it may have taken long.
        if self._out_of_time is not None and self._out_of_time():
            raise too_late(self.lease)

    def _long_lost(self) -> bool:
        """Whether the lease was released, or lost so long ago that its successor's object was
        deleted; for processes that cannot read the holder's clock.

        A worker that was given up and still runs finds that the operation has ended.
        """
        if self._out_of_time is not None:
            return False
        if _has_ended(self.inner, self.lease):
            return True
        return _named_token(self.inner, directory_of(self.lease)) > self.lease.token


def _has_ended(store: ObjectStore, held: LeaseRecord) -> bool:
    """Whether the holder has released its lease, or the object is no longer its own."""
    try:
        record = decode_json(store.read(held.path), held.path)
    except NotFoundError:
        return True
    return record.get("nonce") != held.nonce or record.get("expires_at_micros") == 0


@dataclass(frozen=True, kw_only=True)
class LeasedOperation:
    """Options of every operation that holds the lease on its job; a base beside others in slots.

    Attributes:
        owner: who runs it, for the lease and records of what was done.
        lease_wait_seconds: how long to wait for another process that holds the lease.
        on_lease: called with a sentence about the lease; see `LeaseOptions.on_event`.
        clock: microseconds since 1970 in UTC, by this machine.
        sleep: waits this many seconds.
    """

    owner: str
    lease_wait_seconds: float = 0.0
    on_lease: Callable[[str], None] = lambda event: None
    clock: Clock = wall_clock
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """Options of a lease.

    Attributes:
        directory: of the leases; None = those of the job's maintenance.
        deletes: whether its holder deletes objects, so that all records of the job must be known,
            as `check_records` says.
        seconds: how long it stays held if this process dies; it is renewed while the process lives.
        wait_seconds: how long to wait for the present holder; see `EXPIRED_SECONDS`.
        take_over: acquire it even if another process holds it, which then loses it at its next
            call. Requests that it sent before may still arrive: wait `IN_FLIGHT_GRACE_SECONDS`.
        clock: microseconds since 1970. No decision depends on it if the store reports times.
        ticks: microseconds since an arbitrary start, by which the holder measures its own time.
            None = `own_clock`, or `clock` if that is not the wall clock.
        sleep: waits this many seconds.
        on_event: called with a sentence when it begins to wait for a holder, and when it takes over
            from a process that has died.
    """

    directory: StatePath | None = None
    deletes: bool = False
    seconds: float = LEASE_SECONDS
    wait_seconds: float = 0.0
    take_over: bool = False
    clock: Clock = wall_clock
    ticks: Callable[[], int] | None = None
    sleep: Callable[[float], None] = time.sleep
    on_event: Callable[[str], None] = lambda event: None

    @classmethod
    def of(cls, options: LeasedOperation, *, deletes: bool = False) -> LeaseOptions:
        """Return those that an operation's own options ask for."""
        return cls(
            deletes=deletes,
            wait_seconds=options.lease_wait_seconds,
            clock=options.clock,
            sleep=options.sleep,
            on_event=options.on_lease,
        )


@contextmanager
def lease(
    store: ObjectStore, paths: JobPaths, owner: str, options: LeaseOptions | None = None
) -> Iterator[Leased]:
    """Hold the lease on a job, and release it at the end of the block, also if an interrupt ends it
    at any moment after the request for the lease.

    Args:
        owner: what the caller does, for people; the holder is this single acquisition.

    Maintenance of a job that is marked as somebody else's is refused here: every change of a job
    needs its lease. Writers are not: the mark may be that of their own team.

    A store that already holds this lease is returned as it is: its holder may call operations that
    take the lease themselves.

    So is it of a job with a record that this release does not read; writers check that at their
    start, and `take_over` does not.

    Raises:
        LeaseHeldError: another process holds the lease; names it, and until when.
        InputError: the job is marked; see `state.metadata.ownership`.
        FormatError: a record is not of a form that this release reads; see `check_records`.
    """
    chosen = options or LeaseOptions()
    clock, directory = chosen.clock, chosen.directory or paths.leases
    if isinstance(store, Leased) and directory_of(store.lease) == directory:
        yield store
        return
    if directory != paths.writers:
        check_job_maintained(store, paths)
    asked = _LeaseRequest(
        paths=paths,
        directory=directory,
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
        held, runs_out = _awaited(store, asked, chosen)
        if asked.found is not None:
            chosen.on_event(take_over_text(asked.found))
        leased = renewal.begin(held, runs_out)
        if directory == paths.leases and not chosen.take_over:
            from arroyo_dagster.state.metadata.own_records import check_records

            check_records(leased, paths, whole=chosen.deletes)
        yield leased
    finally:
        try:
            renewal.end()
        finally:
            _held_here.discard(asked.nonce)


@dataclass(slots=True, kw_only=True)
class _LeaseRequest:
    """One request for a lease.

    Attributes:
        mine: the lease to release; None before it is requested, and after its release.
        sure: whether it was created; False also if an interrupt came before the answer.
        found: the lease before it, if its holder died without a release.
    """

    paths: JobPaths
    directory: StatePath
    description: str
    nonce: str
    micros: int
    take_over: bool
    clock: Clock
    ticks: Callable[[], int]
    mine: LeaseRecord | None = None
    sure: bool = False
    found: LeaseRecord | None = None


def _awaited(
    store: ObjectStore, asked: _LeaseRequest, options: LeaseOptions
) -> tuple[LeaseRecord, int]:
    """Return the lease once it is free, and the time until which it counts."""
    wait_seconds, sleep = options.wait_seconds, options.sleep
    holder: object = None
    while True:
        runs_out = asked.ticks() + _own_time(asked.micros)
        try:
            return _acquire(store, asked), runs_out
        except LeaseHeldError as error:
            if wait_seconds <= 0:
                raise
            if error.facts.get("owner") != holder:
                holder = error.facts.get("owner")
                options.on_event(f"waiting up to {wait_seconds:.0f} s: {error.message}")
        sleep(min(wait_seconds, _POLL_SECONDS))
        wait_seconds -= _POLL_SECONDS


class _Renewal:
    """Renews a lease until the end, then releases it."""

    def __init__(self, store: ObjectStore, asked: _LeaseRequest) -> None:
        self._store = store
        self._asked = asked
        self._ended: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._over = False

    def begin(self, held: LeaseRecord, runs_out: int) -> Leased:
        """Renew a lease from now on, and return the store through which its holder writes."""
        store, asked = self._store, self._asked
        ended = self._ended = threading.Event()

        def renew() -> None:
            nonlocal runs_out
            while not ended.wait(asked.micros / 3e6):
                with contextlib.suppress(ArroyoStateError):
                    begun = asked.ticks()
                    _write(store, held, expires_at_micros=asked.clock() + asked.micros)
                    # A process that hung may renew a lease that others took and released since.
                    runs_out = 0 if _is_lost(store, held) else begun + _own_time(asked.micros)

        self._thread = threading.Thread(target=renew, name="arroyo-lease", daemon=True)
        self._thread.start()

        def out_of_time() -> bool:
            return self._over or asked.ticks() >= runs_out

        return Leased(store, held, out_of_time, asked.found)

    def end(self) -> None:
        """Release the lease, if there is one, after its last renewal."""
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
        self._over = True
        if self._ended is not None:
            self._ended.set()
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # an interrupt came before its start
                self._thread.join()
            self._thread = None


def _is_lost(store: ObjectStore, held: LeaseRecord) -> bool:
    """Whether another process has acquired the lease since, even if it has released it long ago."""
    if _named_token(store, directory_of(held)) > held.token:
        return True
    return store.head(successor_of(held)) is not None


def newest_token(store: ObjectStore, directory: StatePath) -> int:
    """Return the number of the newest lease in a directory of leases; 0 if there never was one."""
    return max((*_tokens(store, directory), _named_token(store, directory)))


def newest_lease(store: ObjectStore, directory: StatePath) -> LeaseRecord | None:
    """Return the newest lease in a directory of leases; None if there never was one.

    Raises:
        FormatError: it does not decode.
    """
    token = newest_token(store, directory)
    return read_record(store, _path_of(directory, token)) if token else None


def last_released_lease(store: ObjectStore, directory: StatePath) -> LeaseRecord | None:
    """Return the last lease that its holder released: the newest, or the one before if that is held
    now; None if there is none.

    Raises:
        FormatError: it does not decode.
    """
    record = newest_lease(store, directory)
    if record is not None and not record.released:
        record = read_record(store, _path_of(directory, record.token - 1))
    return record if record is not None and record.released else None


def _tokens(store: ObjectStore, directory: StatePath) -> list[int]:
    try:
        listed = store.list_dir(directory).objects
    except NotFoundError:
        return []  # nothing was ever written below the URL
    tokens = (parse_numbered(info.path.name, 10) for info in listed)
    return sorted(token for token in tokens if token is not None)


def _named_token(store: ObjectStore, directory: StatePath) -> int:
    """Return the number in `newest.json`; 0 if it does not exist, as before the first lease."""
    path = directory / NEWEST
    try:
        return decode_newest(store.read(path), path).token
    except NotFoundError:
        return 0


def _own_time(micros: int) -> int:
    """Return how long the holder counts on a lease. That is a little less than its duration, so
    that requests in flight still arrive in time.
    """
    return micros * (_MARGIN - 1) // _MARGIN


def _acquire(store: ObjectStore, asked: _LeaseRequest) -> LeaseRecord:
    directory, ticks = asked.directory, asked.ticks
    began = ticks()
    tokens = _tokens(store, directory)
    newest = tokens[-1] if tokens else 0
    while True:
        path = _path_of(directory, newest + 1)
        if newest and not asked.take_over:
            asked.found = _check_free(store, _path_of(directory, newest), asked)
        mine = lease_here(
            path,
            newest + 1,
            description=asked.description,
            nonce=asked.nonce,
            duration_micros=asked.micros,
            acquired_at_micros=asked.clock(),
        )
        asked.mine, asked.sure = mine, False
        created = _create(store, mine, asked.clock() + asked.micros)
        asked.mine, asked.sure = mine if created else None, created
        try:
            named = _named_token(store, directory)
            if created and named < mine.token:
                if ticks() - began >= _own_time(asked.micros):
                    raise too_late(mine)
                _name(store, mine, tokens)
                return mine
        except ArroyoStateError:
            _release(store, asked)
            raise
        if named < mine.token:
            first = read_record(store, path)
            raise taken(asked.paths, path, first)
        # The number was in use before: the listing missed it, or others acquired and released it.
        asked.mine = None
        newest = named


def _name(store: ObjectStore, mine: LeaseRecord, older: Iterable[int]) -> None:
    """Write which lease is the newest; only then the objects of older ones may be deleted."""
    store.put(directory_of(mine) / NEWEST, encode(NewestLease(token=mine.token)))
    # The newest two are kept: the holder of the one before must find that it was taken.
    expired = [token for token in older if token < mine.token - 1]
    store.delete_many([_path_of(directory_of(mine), token) for token in expired])


def _release(store: ObjectStore, asked: _LeaseRequest) -> None:
    mine = asked.mine
    if mine is None:
        return
    # A lease that cannot be released expires.
    with contextlib.suppress(StorageError):
        if asked.sure or _was_created(store, mine):
            _write(store, mine, expires_at_micros=0)
    asked.mine = None


def _was_created(store: ObjectStore, mine: LeaseRecord) -> bool:
    """Whether the object of a lease exists after a create request without an answer."""
    try:
        record = read_record(store, mine.path)
    except FormatError:
        return False
    return record is not None and record.nonce == mine.nonce


def _create(store: ObjectStore, mine: LeaseRecord, expires_at_micros: int) -> bool:
    data = encode_lease(mine, expires_at_micros)
    try:
        if store.create(mine.path, data):
            return True
    except StorageError:
        # It may exist all the same, and would then block every process until it expires.
        if not _is_there(store, mine.path, data):
            raise
        return True
    return _is_there(store, mine.path, data)


def _is_there(store: ObjectStore, path: StatePath, data: bytes) -> bool:
    try:
        return store.read(path) == data
    except NotFoundError:
        return False  # an older lease, which a later holder has just deleted


def _write(store: ObjectStore, mine: LeaseRecord, *, expires_at_micros: int) -> None:
    store.put(mine.path, encode_lease(mine, expires_at_micros))


def _check_free(store: ObjectStore, path: StatePath, asked: _LeaseRequest) -> LeaseRecord | None:
    """Check that a lease is free; return it if its holder has died without a release."""
    record = read_record(store, path)
    if record is None or record.released:
        return None  # a later holder may have deleted it; the create request decides
    if record.nonce == asked.nonce:
        return None  # this acquisition wrote it, under a number that was another lease's before
    if record.process == process_here() and record.nonce not in _held_here:
        return None  # this process has ended that lease, but could not release it
    until = record.held_until(store_time(store, asked.directory), asked.clock())
    if until is not None:
        raise taken(asked.paths, path, record, until)
    return record
