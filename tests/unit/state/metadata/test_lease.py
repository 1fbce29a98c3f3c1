"""Leases: one maintainer of a job at a time."""

from __future__ import annotations

import json
import os
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    LeaseHeldError,
    StorageError,
)
from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    JobId,
    JobPaths,
    MemoryStore,
    ObjectStore,
    PipelineId,
    StatePath,
)
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.lease import (
    Leased,
    Precondition,
    last_released_lease,
    newest_token,
    successor_of,
)
from arroyo_dagster.state.model.checkpoints import CommitNote
from arroyo_dagster.state.model.clock import own_clock, wall_clock
from arroyo_dagster.state.model.leases import EXPIRED_SECONDS
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import Hiding
from tests.internals import LeaseOptions, lease, newest_lease
from tests.stores import Listing, ObjectInfo, Wrapper

PATHS = JobPaths(JobId("j"), PipelineId("p"))
SOMETHING = StatePath("p/j/something")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> int:
        return int(self.seconds * 1e6)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def take(
    store: ObjectStore, owner: str, clock: Clock | None = None, **options: Any
) -> AbstractContextManager[Leased]:
    """Hold the lease of `PATHS`, by a clock of the test if there is one."""
    chosen = options if clock is None else {"clock": clock, **options}
    return lease(store, PATHS, owner, LeaseOptions(**chosen))


def test_one_holds_it_and_gives_it_back(clock: Clock, store: MemoryStore) -> None:
    with take(store, "one", clock) as held:
        held.put(SOMETHING, b"1")
        with pytest.raises(ConflictError, match="leased by"), take(store, "two", clock):
            pass
    with take(store, "two", clock) as held:
        assert held.lease.token == 2
        assert held.read(SOMETHING) == b"1"


def test_expired_lease_changes_nothing_any_more(clock: Clock, store: MemoryStore) -> None:
    held = died(store, PATHS, "dead", clock=clock)
    clock.seconds += 61
    with take(store, "next", clock) as new:
        new.put(SOMETHING, b"new")
        for change in (
            lambda: held.put(SOMETHING, b"old"),
            lambda: held.create(StatePath("p/j/other"), b"old"),
            lambda: held.delete_many([SOMETHING]),
        ):
            with pytest.raises(ConflictError, match="lease on the job"):
                change()
        assert held.read(SOMETHING) == b"new"


def test_overlapping_runs_of_one_owner_exclude_each_other(clock: Clock, store: MemoryStore) -> None:
    with take(store, "run 7", clock) as held:
        with pytest.raises(LeaseHeldError) as error:
            take(store, "run 7", clock).__enter__()
        who = f"{platform.node()}/{os.getpid()} (run 7)"
        assert error.value.message.startswith(f"the job is leased by {who} until 00:17:41Z")
        assert error.value.retryable
        facts = error.value.facts
        assert (facts["host"], facts["pid"]) == (platform.node(), os.getpid())
        assert facts["until"] == "00:17:41Z"
        assert error.value.message.endswith("Z: it maintains the job")
        held.put(SOMETHING, b"1")


def test_refusal_says_what_the_holder_s_lease_is_for(clock: Clock, store: MemoryStore) -> None:
    for directory, does in (
        (PATHS.writers, "it runs the job"),
        (PATHS.windows, "it holds the job's maintenance window"),
    ):
        with (
            take(store, "one", clock, directory=directory),
            pytest.raises(ConflictError, match=f"Z: {does}") as error,
        ):
            take(store, "two", clock, directory=directory).__enter__()
        assert error.value.facts["job"] == PATHS.root


def test_newest_lease_is_the_record_of_the_last_holder(clock: Clock, store: MemoryStore) -> None:
    assert newest_lease(store, PATHS.leases) is last_released_lease(store, PATHS.leases) is None
    with take(store, "first", clock):
        assert last_released_lease(store, PATHS.leases) is None
    leased(store, clock, 1)
    assert last_released_lease(store, PATHS.leases) == newest_lease(store, PATHS.leases)
    with take(store, "gc", clock, seconds=300) as held:
        found = last_released_lease(store, PATHS.leases)
        assert found is not None
        assert found.token == 2
        found = newest_lease(store, PATHS.leases)
        assert found is not None
        assert (found.path, found.token) == (PATHS.leases / "0000000003.json", 3)
        assert (found.owner, found.nonce) == (held.lease.owner, held.lease.nonce)
        assert (found.description, found.duration_micros) == ("gc", 300_000_000)
        assert found.acquired_at_micros == clock()
        assert not found.released


def test_of_many_at_once_one_gets_it() -> None:
    store = MemoryStore()
    won: list[int] = []
    barrier = threading.Barrier(8)

    def ask(number: int) -> None:
        barrier.wait()
        try:
            with lease(store, PATHS, f"owner {number}"):
                won.append(number)
                time.sleep(0.2)
        except ConflictError:
            pass

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


@pytest.mark.parametrize("timeless", [False, True])
def test_it_is_renewed_while_its_holder_lives(timeless: bool) -> None:
    store = Timeless(MemoryStore()) if timeless else MemoryStore()
    once = FaultInjecting(store, fail_at=4, error=StorageError("down"))  # at the first renewal
    with take(once, "one", seconds=1) as held:
        threads = {one.daemon for one in threading.enumerate() if one.name == "arroyo-lease"}
        assert threads == {True}, "it would keep a process that ends without a release"
        time.sleep(2.5)
        with pytest.raises(ConflictError), lease(store, PATHS, "two"):
            pass
        held.put(SOMETHING, b"1")


def test_what_deletes_reads_the_notes_of_old_epochs_too(store: MemoryStore) -> None:
    store.put(PATHS.commit_note(Epoch(1)), b"{")
    note = CommitNote(job=PATHS.job, epoch=Epoch(2), finish_time_micros=1)
    store.put(PATHS.commit_note(Epoch(2)), encode(note))
    with lease(store, PATHS, "merges", LeaseOptions.of(GcOptions())):
        pass
    with (
        pytest.raises(FormatError, match="this release does not read"),
        lease(store, PATHS, "deletes", LeaseOptions.of(GcOptions(), deletes=True)),
    ):
        pass


def test_a_crash_at_any_change_leaves_a_lease_that_runs_out() -> None:
    for at in range(1, 7):
        clock = Clock()
        store = MemoryStore(clock=clock)
        with take(store, "before", clock):
            pass
        try:
            with take(FaultInjecting(store, fail_at=at, crash=True), "one", clock):
                pass
        except Crash:
            pass
        clock.seconds += 61
        with take(store, "next", clock) as held:
            held.put(SOMETHING, b"1")


@pytest.mark.parametrize(("at", "taken"), [(1, 3), (2, 4), (3, 4)])
def test_failed_acquisition_is_released(
    at: int, taken: int, clock: Clock, store: MemoryStore
) -> None:
    """And a create that failed takes nothing."""
    leased(store, clock, 3)
    failing = FaultInjecting(store, fail_at=at, error=StorageError("down"))
    with pytest.raises(StorageError, match="down"):
        take(failing, "one", clock).__enter__()
    assert newest_token(store, PATHS.leases) == taken
    with take(store, "next", clock) as held:
        assert held.lease.token == taken + 1


def test_a_lost_answer_to_the_create_is_found_out() -> None:
    store = MemoryStore()

    class Forgetful(FaultInjecting):
        def create(self, path: StatePath, data: bytes) -> bool:
            super().create(path, data)
            return False  # a client that repeated its request sees its own object

    with lease(Forgetful(store), PATHS, "one") as held:
        assert held.lease.token == 1


def test_a_create_that_others_won_and_removed_since_is_no_lease() -> None:
    class Lost(MemoryStore):
        def create(self, path: StatePath, data: bytes) -> bool:
            return False

    with pytest.raises(LeaseHeldError, match="the job is leased by another process: it maintains"):
        lease(Lost(), PATHS, "one").__enter__()


def test_an_interrupted_create_releases_no_lease_that_it_cannot_read() -> None:
    class Newer(MemoryStore):
        def create(self, path: StatePath, data: bytes) -> bool:
            self.put(path, b'{"version": 99}')
            raise KeyboardInterrupt

    store = Newer()
    with pytest.raises(KeyboardInterrupt):
        lease(store, PATHS, "one").__enter__()
    assert store.read(PATHS.leases / "0000000001.json") == b'{"version": 99}'


def test_a_create_whose_outcome_is_unknown_is_read_back(clock: Clock, store: MemoryStore) -> None:
    failing = FaultInjecting(store, fail_at=1, mode="after", error=StorageError("timed out"))
    with take(failing, "one", clock) as held:
        assert held.lease.token == 1
    with take(store, "next", clock) as held:
        assert held.lease.token == 2


def test_process_takes_an_unreleased_lease_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    down = FaultInjecting(store, fail_at=4, error=StorageError("down"))
    with take(down, "one", clock):
        pass
    with monkeypatch.context() as other:
        other.setattr("arroyo_dagster.state.metadata.lease.process_here", lambda: "another process")
        with pytest.raises(ConflictError, match="leased by"):
            take(store, "one", clock).__enter__()
    with take(store, "one", clock) as held:
        assert held.lease.token == 2


def test_an_older_number_that_is_removed_just_then_is_not_won() -> None:
    class Vanishing(MemoryStore):
        def create(self, path: StatePath, data: bytes) -> bool:
            found = super().create(path, data)
            if not found:
                self.delete_many([path])
            return found

    clock = Clock()
    store = Vanishing(clock=clock)
    leased(store, clock, 3)
    died(store, PATHS, "one", clock=clock)
    older = PATHS.leases / "0000000002.json"
    store.put(older, store.read(PATHS.leases / "0000000003.json"))
    cut = Hiding(store, lambda path: path.endswith(("0000000003.json", "0000000004.json")))
    with pytest.raises(ConflictError, match="the job is leased by"):
        take(cut, "two", clock).__enter__()


def test_old_leases_do_not_pile_up() -> None:
    store = MemoryStore()
    leased(store, Clock(), 6)
    left = [info.path.name for info in store.list(PATHS.leases)]
    assert left == ["0000000005.json", "0000000006.json", "newest.json"]
    assert newest_token(store, PATHS.leases) == 6


@pytest.mark.parametrize("at", [2, 3], ids=["naming the newest", "removing older ones"])
def test_deaths_while_leases_are_taken_never_free_an_old_number(at: int) -> None:
    """`newest.json` is written before older leases go: where no listing shows any, it is all that
    tells that their numbers were taken."""
    store, clock = MemoryStore(), Clock()
    leased(store, clock, 3)
    for _ in range(4):
        with pytest.raises(Crash):
            take(FaultInjecting(store, fail_at=at, crash=True), "dies", clock).__enter__()
        clock.seconds += 61
    taken = 7
    nothing = Hiding(store, lambda path: "/leases/" in path)
    try:
        with take(nothing, "next", clock) as held:
            assert held.lease.token > taken
    except ConflictError:
        assert at == 2  # numbers are taken that `newest.json` does not tell: that is refused


def test_holder_stops_shortly_before_the_lease_expires(clock: Clock, store: MemoryStore) -> None:
    with take(store, "one", clock) as held:
        began = clock.seconds
        clock.seconds = began + 60 * 5 / 6 - 0.001
        held.put(SOMETHING, b"1")
        clock.seconds = began + 60 * 5 / 6
        with pytest.raises(ConflictError, match="could not be renewed"):
            held.put(SOMETHING, b"2")
        assert held.read(SOMETHING) == b"1"


def test_lease_is_free_from_its_expiry_on(clock: Clock, store: MemoryStore) -> None:
    died(store, PATHS, "dead", clock=clock)
    clock.seconds += 60.9  # by the store's clock, whose seconds may be whole
    with pytest.raises(ConflictError):
        take(store, "next", clock).__enter__()
    clock.seconds += 0.2
    with take(store, "next", clock) as held:
        assert held.lease.token == 2


def test_precondition_is_asked_before_each_delete_only(clock: Clock, store: MemoryStore) -> None:
    asked: list[bytes] = []
    with take(store, "one", clock) as held:
        held.delete_many([SOMETHING])  # nothing is to be asked yet
        held.before_deleting = lambda: asked.append(store.read(SOMETHING))
        held.put(SOMETHING, b"1")
        held.create(StatePath("p/j/other"), b"1")
        assert asked == []
        held.delete_many([SOMETHING])
        assert asked == [b"1"]


@dataclass(frozen=True)
class Sure(Precondition):
    """Something that a worker on another machine makes sure of as well as its driver."""

    anywhere: bool

    @property
    def from_anywhere(self) -> bool:
        return self.anywhere

    def __call__(self) -> None:
        raise InputError("asked")


@pytest.mark.parametrize("anywhere", [True, False])
def test_worker_asks_what_it_can_ask(anywhere: bool, clock: Clock, store: MemoryStore) -> None:
    with take(store, "one", clock) as held:
        assert not held.deletes_here
        held.before_deleting = Sure(anywhere)
        assert held.deletes_here is not anywhere
        worker = pickle.loads(pickle.dumps(held))
        if anywhere:
            with pytest.raises(InputError, match="asked"):
                worker.delete_many([SOMETHING])
        else:
            worker.delete_many([SOMETHING])
        held.before_deleting = lambda: None
        assert held.deletes_here


def test_worker_outliving_the_operation_changes_nothing(clock: Clock, store: MemoryStore) -> None:
    """Spark leaves attempts running that it has given up: the lease is released meanwhile."""
    with take(store, "one", clock) as held:
        worker = pickle.loads(pickle.dumps(held))
        worker.put(SOMETHING, b"1")
        record = store.read(held.lease.path)
        store.delete_many([held.lease.path])  # with the whole job
        with pytest.raises(ConflictError, match="the lease on the job was lost"):
            worker.put(SOMETHING, b"2")
        store.put(held.lease.path, record)
    for change in (
        lambda: worker.put(SOMETHING, b"2"),
        lambda: worker.delete_many([SOMETHING]),
        lambda: worker.copy(SOMETHING, StatePath("p/j/copy")),
    ):
        with pytest.raises(ConflictError, match="the lease on the job was lost"):
            change()
    assert store.read(SOMETHING) == b"1"
    assert store.head(StatePath("p/j/copy")) is None


def test_one_owner_twice_tells_both_leases_apart(clock: Clock, store: MemoryStore) -> None:
    """The second one gets no answer to its create, and finds an object that only looks alike."""
    failing = FaultInjecting(store, fail_at=2, crash=True)
    with pytest.raises(Crash):
        take(failing, "same", clock).__enter__()
    unlisted = Hiding(store, lambda path: "/leases/" in path)
    with pytest.raises(ConflictError) as error:
        take(unlisted, "same", clock).__enter__()
    who = f"{platform.node()}/{os.getpid()} (same)"
    assert error.value.facts["owner"] == who
    assert error.value.message == f"the job is leased by {who}: it maintains the job"


def test_number_of_newest_is_taken_without_its_object(clock: Clock, store: MemoryStore) -> None:
    leased(store, clock, 3)
    store.delete_many([PATHS.leases / "0000000003.json"])
    with take(store, "before", clock) as held:
        assert held.lease.token == 4


# ---- listings that cannot be trusted -------------------------------------------------------------


def leased(store: ObjectStore, clock: Clock, times: int) -> None:
    for _ in range(times):
        with take(store, "before", clock):
            pass


HIDDEN = [set(), {"0000000006"}, {"0000000005"}, {"0000000005", "0000000006"}]


@pytest.mark.parametrize("hidden", HIDDEN, ids=["none", "newest", "oldest", "both"])
def test_stale_listing_adds_no_holder(hidden: set[str], clock: Clock, store: MemoryStore) -> None:
    leased(store, clock, 5)
    holder = died(store, PATHS, "one", clock=clock)
    cut = Hiding(store, lambda path: path.rpartition("/")[2].removesuffix(".json") in hidden)
    for owner in ("two", "three"):
        with pytest.raises(ConflictError, match="the job is leased by"):
            take(cut, owner, clock).__enter__()
        holder.put(SOMETHING, b"1")
    clock.seconds += 61
    with take(cut, "two", clock) as found:
        assert found.lease.token == 7
        found.put(SOMETHING, b"2")
    with pytest.raises(ConflictError, match="another process has taken it"):
        holder.put(SOMETHING, b"1")


@pytest.mark.parametrize("hidden", HIDDEN, ids=["none", "newest", "oldest", "both"])
def test_no_number_is_given_twice(hidden: set[str], clock: Clock, store: MemoryStore) -> None:
    leased(store, clock, 6)
    cut = Hiding(store, lambda path: path.rpartition("/")[2].removesuffix(".json") in hidden)
    assert newest_token(cut, PATHS.leases) == 6
    for token in (7, 8, 9):
        with take(cut, "two", clock) as found:
            assert found.lease.token == token


def test_who_comes_and_goes_between_a_listing_and_its_use_is_noticed(clock: Clock) -> None:

    class Slow(MemoryStore):
        behind: Callable[[], object] | None = None

        def list_dir(self, prefix: str = "") -> Listing:
            found = super().list_dir(prefix)
            if self.behind is not None:
                behind, self.behind = self.behind, None
                behind()
            return found

    store = Slow(clock=clock)
    leased(store, clock, 1)
    stays = take(store, "stays", clock)
    others: list[Leased] = []
    store.behind = lambda: (leased(store, clock, 4), others.append(stays.__enter__()))
    with pytest.raises(ConflictError, match="leased by"):
        take(store, "slow", clock).__enter__()
    others[0].put(SOMETHING, b"1")
    assert others[0].lease.token == 6


@pytest.mark.parametrize("seconds", [50, 55])
def test_who_needs_too_long_to_take_a_lease_does_not_hold_it(seconds: int, clock: Clock) -> None:

    class Stuck(MemoryStore):
        def create(self, path: StatePath, data: bytes) -> bool:
            found = super().create(path, data)
            clock.seconds += seconds
            return found

    store = Stuck(clock=clock)
    with pytest.raises(ConflictError, match="could not be renewed"):
        take(store, "slow", clock).__enter__()
    assert store.head(PATHS.leases / "newest.json") is None


def test_lease_lost_long_ago_is_lost_in_all_processes(clock: Clock, store: MemoryStore) -> None:
    holder = died(store, PATHS, "dead", clock=clock)
    elsewhere = Leased.__new__(Leased)
    elsewhere.__dict__.update(holder.__getstate__())
    elsewhere.put(SOMETHING, b"1")
    clock.seconds += 61
    leased(store, clock, 4)
    assert store.head(successor_of(holder.lease)) is None
    with pytest.raises(ConflictError, match="another process has taken it"):
        elsewhere.put(SOMETHING, b"2")


def test_leases_continue_without_the_newest_record(clock: Clock, store: MemoryStore) -> None:
    leased(store, clock, 3)
    store.delete_many([PATHS.leases / "newest.json"])
    assert newest_token(store, PATHS.leases) == 3
    with take(store, "next", clock) as held:
        assert held.lease.token == 4


@pytest.mark.parametrize("found", [b"{", b"{}", b'{"token": -1}', b'{"token": true}'])
def test_unreadable_number_is_refused(found: bytes, clock: Clock, store: MemoryStore) -> None:
    store.put(PATHS.leases / "newest.json", found)
    with pytest.raises(FormatError) as error:
        take(store, "one", clock).__enter__()
    assert "leases/newest.json" in str(error.value)


# ---- clocks --------------------------------------------------------------------------------------


DAY = 86_400.0
_DEAD: list[Any] = []


@pytest.fixture(autouse=True)
def _buried() -> Iterator[None]:
    yield
    while _DEAD:
        _DEAD.pop().__exit__(None, None, None)


def died(*given: Any, **options: Any) -> Leased:
    """Take a lease and never give it back."""
    _DEAD.append(
        lease(*given, LeaseOptions(**options))
    )  # what is collected as garbage would give it back
    held: Leased = _DEAD[-1].__enter__()
    return held


@pytest.mark.parametrize("off", [DAY, -DAY], ids=["ahead", "behind"])
@pytest.mark.parametrize("whose", ["holder", "contender"])
def test_no_clock_but_the_store_s_says_when_a_lease_expires(off: float, whose: str) -> None:
    clock, wrong = Clock(), Clock()
    wrong.seconds += off
    store = MemoryStore(clock=clock)
    first, second = (wrong, clock) if whose == "holder" else (clock, wrong)
    died(store, PATHS, "dead", clock=first)
    for seconds in (0, 30, 30.9):
        clock.seconds += seconds
        wrong.seconds += seconds
        with pytest.raises(ConflictError, match="leased by"):
            take(store, "next", clock=second).__enter__()
    clock.seconds += 0.1
    with take(store, "next", clock=second) as held:
        assert held.lease.token == 2


def test_a_wall_clock_that_jumps_neither_ends_nor_prolongs_the_holder_s_own_time() -> None:
    clock, wall, own = Clock(), Clock(), Clock()
    store = MemoryStore(clock=clock)
    held = died(store, PATHS, "one", clock=wall, ticks=own)
    for jump in (DAY, -2 * DAY):
        wall.seconds += jump
        held.put(SOMETHING, b"1")
    own.seconds += 49
    held.put(SOMETHING, b"1")
    own.seconds += 1
    with pytest.raises(ConflictError, match="could not be renewed"):
        held.put(SOMETHING, b"2")


def test_a_lease_is_counted_by_a_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with lease(store, PATHS, "one") as held:
        ahead = time.time_ns() + int(DAY * 1e9)
        monkeypatch.setattr(time, "time_ns", lambda: ahead)
        held.put(SOMETHING, b"1")


def test_waiting_ends_when_a_dead_lease_expires(clock: Clock, store: MemoryStore) -> None:
    died(store, PATHS, "dead", clock=clock)
    began = clock.seconds

    def sleep(seconds: float) -> None:
        clock.seconds += seconds

    with pytest.raises(ConflictError):
        take(store, "hasty", clock, wait_seconds=20, sleep=sleep).__enter__()
    assert clock.seconds == began + 20
    with take(store, "next", clock, wait_seconds=EXPIRED_SECONDS, sleep=sleep) as held:
        assert 61 <= clock.seconds - began <= EXPIRED_SECONDS
        assert held.lease.token == 2


@pytest.mark.parametrize(("wait", "slept"), [(0, []), (1, [1]), (4, [2, 2]), (5, [2, 2, 1])])
def test_waiting_takes_the_seconds_that_were_asked_for(
    wait: int, slept: list[float], clock: Clock, store: MemoryStore
) -> None:
    died(store, PATHS, "dead", clock=clock)
    found: list[float] = []
    with pytest.raises(ConflictError):
        take(store, "hasty", clock, wait_seconds=wait, sleep=found.append).__enter__()
    assert found == slept


def test_lease_is_held_for_its_own_duration(clock: Clock, store: MemoryStore) -> None:
    died(store, PATHS, "long", seconds=300, clock=clock)
    clock.seconds += 300
    with pytest.raises(ConflictError, match="leased by"):
        take(store, "next", clock).__enter__()
    clock.seconds += 2
    with take(store, "next", clock) as held:
        assert held.lease.token == 2


def test_clocks_count_whole_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = SimpleNamespace(
        CLOCK_BOOTTIME=7,
        clock_gettime_ns=lambda which: {7: 5_000_001_999}[which],
        monotonic_ns=lambda: 6_000_001_999,
        time_ns=lambda: 7_000_001_999,
    )
    monkeypatch.setattr("arroyo_dagster.state.model.clock.time", clocks)
    assert (repr(own_clock()), repr(wall_clock())) == ("5000001", "7000001")
    del clocks.CLOCK_BOOTTIME  # as on macOS
    assert repr(own_clock()) == "6000001"


def test_a_store_s_clock_that_was_set_back_locks_nothing(clock: Clock, store: MemoryStore) -> None:
    clock.seconds += DAY
    died(store, PATHS, "dead", clock=Clock())
    clock.seconds -= DAY
    here = Clock()
    here.seconds += 61
    with take(store, "next", clock=here) as held:
        assert held.lease.token == 2


class Timeless(Wrapper):
    """A store that does not say when objects were written."""

    def head(self, path: StatePath) -> ObjectInfo | None:
        found = self.inner.head(path)
        return None if found is None else replace(found, modified_micros=None)


def test_where_a_store_gives_no_times_those_of_the_records_count(clock: Clock) -> None:
    store = Timeless(MemoryStore(clock=clock))
    died(store, PATHS, "dead", clock=clock)
    clock.seconds += 59
    with pytest.raises(ConflictError, match="leased by"):
        take(store, "next", clock).__enter__()
    clock.seconds += 2
    told: list[str] = []
    with take(store, "next", clock, on_event=told.append) as held:
        assert held.lease.token == 2
    assert "ended without releasing it; what" in told[0]


def test_what_an_older_release_reads_is_still_written(clock: Clock, store: MemoryStore) -> None:
    """It compares `expires_at_micros` with its clock, and lets an owner take over from itself."""
    with take(store, "arroyo-state gc", clock) as held:
        found = json.loads(store.read(held.lease.path))
        assert found["expires_at_micros"] == int((clock.seconds + 60) * 1e6)
        assert found["owner"] != "arroyo-state gc"
        assert (found["host"], found["pid"]) == (platform.node(), os.getpid())
        assert (found["token"], found["description"]) == (1, "arroyo-state gc")
    assert json.loads(store.read(held.lease.path))["expires_at_micros"] == 0


def test_lease_taken_by_force_is_lost_at_once(clock: Clock, store: MemoryStore) -> None:
    held = died(store, PATHS, "hangs", clock=clock)
    with take(store, "breaker", clock, take_over=True) as new:
        assert new.lease.token == 2
        assert last_released_lease(store, PATHS.leases) is None
        with pytest.raises(ConflictError, match="another process has taken it"):
            held.put(SOMETHING, b"old")
    with take(store, "next", clock) as found:
        assert found.lease.token == 3


def test_a_holder_whose_clocks_stood_still_does_not_renew_what_others_had_since() -> None:
    """A machine that was suspended: no clock of its own has noticed, and the successor's object has
    gone, too."""
    clock, own = Clock(), Clock()
    store = MemoryStore(clock=clock)
    held = died(store, PATHS, "slept", clock=own, seconds=0.3)
    for _ in range(4):
        with take(store, "other", clock, take_over=True):
            pass
    assert store.head(successor_of(held.lease)) is None
    _put_until_refused(held)


def test_a_renewal_notices_who_has_created_the_next_lease_and_not_yet_named_it() -> None:
    """A holder that stood still between its question for a successor and its own change: the
    renewal behind it must not make its own time look like enough."""

    class Before(Wrapper):
        def head(self, path: StatePath) -> ObjectInfo | None:
            if threading.current_thread() is threading.main_thread():
                return None  # asked before there was one
            return self.inner.head(path)

    clock, own = Clock(), Clock()
    store = MemoryStore(clock=clock)
    held = died(Before(store), PATHS, "slept", clock=own, seconds=0.3)
    with pytest.raises(Crash):
        take(
            FaultInjecting(store, fail_at=2, crash=True), "other", clock, take_over=True
        ).__enter__()
    assert store.head(successor_of(held.lease)) is not None
    assert newest_token(Hiding(store, lambda path: "/leases/" in path), PATHS.leases) == 1
    _put_until_refused(held)


def _put_until_refused(held: Leased) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            held.put(SOMETHING, b"old")
        except ConflictError:
            return
        time.sleep(0.05)
    raise AssertionError("it still believes that it holds the lease")


class Interrupting(Wrapper):
    """Interrupts the process at chosen changes, before or after what the call does."""

    def __init__(self, store: ObjectStore, at: set[int], *, done: bool) -> None:
        super().__init__(store)
        self.at, self.done, self.calls = at, done, 0

    def _call(self, verb: str, path: str, action: Callable[[], Any], data: bytes = b"") -> Any:
        self.calls += 1
        now = self.calls in self.at
        if now and not self.done:
            raise KeyboardInterrupt
        try:
            return action()
        finally:
            if now:
                raise KeyboardInterrupt


def _calls_of_a_lease() -> int:
    counted = Interrupting(MemoryStore(), set(), done=False)
    with lease(counted, PATHS, "one"):
        pass
    return counted.calls


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_interrupt_frees_the_lease(
    done: bool, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _calls_of_a_lease()
    assert calls > 4
    for at in range(1, calls + 1):
        store = MemoryStore()
        interrupting = Interrupting(store, {at, at + 1} if twice else {at}, done=done)
        with pytest.raises(KeyboardInterrupt), lease(interrupting, PATHS, "one"):
            store.put(SOMETHING, b"1")
        with monkeypatch.context() as patched:
            patched.setattr("arroyo_dagster.state.metadata.lease.process_here", lambda: "another")
            with lease(store, PATHS, "next") as held:
                held.put(SOMETHING, b"2")
        assert "arroyo-lease" not in {thread.name for thread in threading.enumerate()}


def test_interrupt_before_the_renewal_frees_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    store = MemoryStore()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease(store, PATHS, "one").__enter__()
    assert last_released_lease(store, PATHS.leases) is not None


# ---- waiting, taking over, nesting ---------------------------------------------------------------


def test_a_wait_and_a_take_over_are_told_once_each(clock: Clock, store: MemoryStore) -> None:
    told: list[str] = []

    def sleep(seconds: float) -> None:
        clock.seconds += seconds

    died(store, PATHS, "dead", clock=clock)
    options = LeaseOptions(
        clock=clock, wait_seconds=EXPIRED_SECONDS, sleep=sleep, on_event=told.append
    )
    with lease(store, PATHS, "next", options) as held:
        assert held.took_over is not None
        assert held.took_over.description == "dead"
    assert len(told) == 2
    assert told[0].startswith("waiting up to 65 s: the job is leased by ")
    assert told[1].startswith("took over the lease of ")
    assert "ended without releasing it, and renewed it last at 00:16:40Z; what" in told[1]
    with take(store, "third", clock, on_event=told.append) as held:
        assert held.took_over is None
    assert len(told) == 2


def test_operations_hand_their_options_on_to_the_lease() -> None:
    told: list[str] = []
    clock, sleep, tell = Clock(), print, told.append
    asked = SimpleNamespace(lease_wait_seconds=3.0, clock=clock, sleep=sleep, on_lease=tell)
    expected = LeaseOptions(wait_seconds=3.0, clock=clock, sleep=sleep, on_event=tell)
    assert LeaseOptions.of(asked) == expected


def test_a_holder_may_call_what_takes_the_lease_itself() -> None:
    store = MemoryStore()
    with lease(store, PATHS, "outer") as outer:
        with lease(outer, PATHS, "inner") as inner:
            assert inner is outer
        outer.put(SOMETHING, b"still held")
        directory = LeaseOptions(directory=PATHS.windows)
        with lease(outer, PATHS, "another kind", directory) as window:
            assert window is not outer
    with pytest.raises(ConflictError):
        outer.put(SOMETHING, b"after its end")


def test_leases_of_many_jobs_in_threads_of_one_process_do_not_mix() -> None:
    store = MemoryStore()
    jobs = [JobPaths(JobId(f"j{number}"), PipelineId("p")) for number in range(8)]
    held: dict[JobPaths, int] = {}
    problems: list[str] = []

    def work(turn: int) -> None:
        paths = jobs[turn % len(jobs)]
        try:
            with lease(store, paths, f"turn {turn}") as mine:
                if held.setdefault(paths, turn) != turn:
                    problems.append(f"{paths.root} is held twice")
                mine.put(paths.root / "something", b"1")
                del held[paths]
        except LeaseHeldError as error:
            if error.facts["job"] != paths.root:
                problems.append(str(error))

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    for paths in jobs:
        with lease(store, paths, "free again"):
            pass
