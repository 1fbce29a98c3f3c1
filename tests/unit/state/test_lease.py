"""Leases: one maintainer of a job at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from arroyo_dagster.errors import ConflictError, FormatError, StorageError
from arroyo_dagster.state.lease import Leased, lease, newest_token
from arroyo_dagster.state.model.ids import JobId, PipelineId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage import Crash, FaultInjecting, MemoryStore, ObjectStore
from arroyo_dagster.state.storage.store import Listing
from tests.collecting import Hiding

PATHS = JobPaths(JobId("j"), PipelineId("p"))
SOMETHING = StatePath("p/j/something")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> int:
        return int(self.seconds * 1e6)


def test_one_holds_it_and_gives_it_back() -> None:
    store, clock = MemoryStore(), Clock()
    with lease(store, PATHS, "one", clock=clock) as held:
        held.put(SOMETHING, b"1")
        with (
            pytest.raises(ConflictError, match="runs out in 60 seconds"),
            lease(store, PATHS, "two", clock=clock),
        ):
            pass
    with lease(store, PATHS, "two", clock=clock) as held:
        assert held.lease.token == 2
        assert held.read(SOMETHING) == b"1"


def test_a_dead_ones_lease_runs_out_and_it_changes_nothing_any_more() -> None:
    store, clock = MemoryStore(), Clock()
    dead = lease(store, PATHS, "dead", clock=clock)
    held = dead.__enter__()
    clock.seconds += 61
    with lease(store, PATHS, "next", clock=clock) as new:
        new.put(SOMETHING, b"new")
        for change in (
            lambda: held.put(SOMETHING, b"old"),
            lambda: held.create(StatePath("p/j/other"), b"old"),
            lambda: held.delete_many([SOMETHING]),
        ):
            with pytest.raises(ConflictError, match="lease on the job"):
                change()
        assert held.read(SOMETHING) == b"new"


def test_the_same_owner_takes_over_from_itself() -> None:
    store, clock = MemoryStore(), Clock()
    first = lease(store, PATHS, "run 7", clock=clock)
    first.__enter__()
    with lease(store, PATHS, "run 7", clock=clock) as held:
        assert held.lease.token == 2


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


def test_it_is_renewed_while_its_holder_lives() -> None:
    store = MemoryStore()
    with lease(store, PATHS, "one", seconds=0.3):
        time.sleep(0.8)
        with pytest.raises(ConflictError), lease(store, PATHS, "two"):
            pass


def test_a_crash_at_any_change_leaves_a_lease_that_runs_out() -> None:
    for at in range(1, 7):
        store, clock = MemoryStore(), Clock()
        with lease(store, PATHS, "before", clock=clock):
            pass
        try:
            with lease(FaultInjecting(store, fail_at=at, crash=True), PATHS, "one", clock=clock):
                pass
        except Crash:
            pass
        clock.seconds += 61
        with lease(store, PATHS, "next", clock=clock) as held:
            held.put(SOMETHING, b"1")


@pytest.mark.parametrize("at", [2, 3])
def test_a_failure_while_it_is_taken_gives_it_back(at: int) -> None:
    store, clock = MemoryStore(), Clock()
    leased(store, clock, 3)
    failing = FaultInjecting(store, fail_at=at, error=StorageError("down"))
    with pytest.raises(StorageError, match="down"):
        lease(failing, PATHS, "one", clock=clock).__enter__()
    with lease(store, PATHS, "next", clock=clock) as held:
        assert held.lease.token == 5


def test_a_lost_answer_to_the_create_is_found_out() -> None:
    store = MemoryStore()

    class Forgetful(FaultInjecting):
        def create(self, path: StatePath, data: bytes) -> bool:
            super().create(path, data)
            return False  # a client that repeated its request sees its own object

    with lease(Forgetful(store), PATHS, "one") as held:
        assert held.lease.token == 1


def test_an_older_number_that_is_removed_just_then_is_not_won() -> None:
    class Vanishing(MemoryStore):
        def create(self, path: StatePath, data: bytes) -> bool:
            found = super().create(path, data)
            if not found:
                self.delete_many([path])
            return found

    store, clock = Vanishing(), Clock()
    leased(store, clock, 3)
    dead = lease(store, PATHS, "one", clock=clock)
    dead.__enter__()
    older = PATHS.leases / "0000000002.json"
    store.put(older, store.read(PATHS.leases / "0000000003.json"))
    cut = Hiding(store, lambda path: path.endswith(("0000000003.json", "0000000004.json")))
    with pytest.raises(ConflictError, match="else maintains the job"):
        lease(cut, PATHS, "two", clock=clock).__enter__()


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
            lease(
                FaultInjecting(store, fail_at=at, crash=True), PATHS, "dies", clock=clock
            ).__enter__()
        clock.seconds += 61
    taken = 7
    nothing = Hiding(store, lambda path: "/leases/" in path)
    try:
        with lease(nothing, PATHS, "next", clock=clock) as held:
            assert held.lease.token > taken
    except ConflictError:
        assert at == 2  # numbers are taken that `newest.json` does not tell: that is refused


def test_holder_stops_by_its_own_clock_a_little_before_the_lease_runs_out() -> None:
    store, clock = MemoryStore(), Clock()
    with lease(store, PATHS, "one", clock=clock) as held:
        began = clock.seconds
        clock.seconds = began + 60 * 5 / 6 - 0.001
        held.put(SOMETHING, b"1")
        clock.seconds = began + 60 * 5 / 6
        with pytest.raises(ConflictError, match="could not be renewed"):
            held.put(SOMETHING, b"2")
        assert held.read(SOMETHING) == b"1"


def test_lease_is_free_at_the_moment_it_runs_out_and_not_before() -> None:
    store, clock = MemoryStore(), Clock()
    dead = lease(store, PATHS, "dead", clock=clock)
    dead.__enter__()
    clock.seconds += 59.999
    with pytest.raises(ConflictError):
        lease(store, PATHS, "next", clock=clock).__enter__()
    clock.seconds = 1_060.0
    with lease(store, PATHS, "next", clock=clock) as held:
        assert held.lease.token == 2


def test_what_is_made_sure_of_before_deleting_is_asked_before_each_delete_only() -> None:
    store, clock = MemoryStore(), Clock()
    asked: list[bytes] = []
    with lease(store, PATHS, "one", clock=clock) as held:
        held.delete_many([SOMETHING])  # nothing is to be asked yet
        held.before_deleting = lambda: asked.append(store.read(SOMETHING))
        held.put(SOMETHING, b"1")
        held.create(StatePath("p/j/other"), b"1")
        assert asked == []
        held.delete_many([SOMETHING])
        assert asked == [b"1"]


def test_of_one_owner_twice_neither_takes_the_other_s_lease_for_its_own() -> None:
    """The second one gets no answer to its create, and finds an object that only looks alike."""
    store, clock = MemoryStore(), Clock()
    failing = FaultInjecting(store, fail_at=2, crash=True)
    with pytest.raises(Crash):
        lease(failing, PATHS, "same", clock=clock).__enter__()
    unlisted = Hiding(store, lambda path: "/leases/" in path)
    with pytest.raises(ConflictError):
        lease(unlisted, PATHS, "same", clock=clock).__enter__()


def test_number_that_newest_tells_is_taken_although_its_object_is_gone() -> None:
    store, clock = MemoryStore(), Clock()
    leased(store, clock, 3)
    store.delete_many([PATHS.leases / "0000000003.json"])
    with lease(store, PATHS, "before", clock=clock) as held:
        assert held.lease.token == 4


# ---- listings that cannot be trusted -------------------------------------------------------------


def leased(store: ObjectStore, clock: Clock, times: int) -> None:
    for _ in range(times):
        with lease(store, PATHS, "before", clock=clock):
            pass


HIDDEN = [set(), {"0000000006"}, {"0000000005"}, {"0000000005", "0000000006"}]


@pytest.mark.parametrize("hidden", HIDDEN, ids=["none", "newest", "oldest", "both"])
def test_a_listing_that_leaves_leases_out_makes_no_second_holder(hidden: set[str]) -> None:
    store, clock = MemoryStore(), Clock()
    leased(store, clock, 5)
    dead = lease(store, PATHS, "one", clock=clock)
    holder = dead.__enter__()
    cut = Hiding(store, lambda path: path.rpartition("/")[2].removesuffix(".json") in hidden)
    for owner in ("two", "three"):
        with pytest.raises(ConflictError, match="else maintains the job"):
            lease(cut, PATHS, owner, clock=clock).__enter__()
        holder.put(SOMETHING, b"1")
    clock.seconds += 61
    with lease(cut, PATHS, "two", clock=clock) as found:
        assert found.lease.token == 7
        found.put(SOMETHING, b"2")
    with pytest.raises(ConflictError, match="somebody else has taken it"):
        holder.put(SOMETHING, b"1")


@pytest.mark.parametrize("hidden", HIDDEN, ids=["none", "newest", "oldest", "both"])
def test_no_number_is_given_twice_whatever_a_listing_shows(hidden: set[str]) -> None:
    store, clock = MemoryStore(), Clock()
    leased(store, clock, 6)
    cut = Hiding(store, lambda path: path.rpartition("/")[2].removesuffix(".json") in hidden)
    assert newest_token(cut, PATHS.leases) == 6
    for token in (7, 8, 9):
        with lease(cut, PATHS, "two", clock=clock) as found:
            assert found.lease.token == token


def test_who_comes_and_goes_between_a_listing_and_its_use_is_noticed() -> None:
    clock = Clock()

    class Slow(MemoryStore):
        behind: Callable[[], object] | None = None

        def list_dir(self, prefix: str = "") -> Listing:
            found = super().list_dir(prefix)
            if self.behind is not None:
                behind, self.behind = self.behind, None
                behind()
            return found

    store = Slow()
    leased(store, clock, 1)
    stays = lease(store, PATHS, "stays", clock=clock)
    others: list[Leased] = []
    store.behind = lambda: (leased(store, clock, 4), others.append(stays.__enter__()))
    with pytest.raises(ConflictError, match="runs out in"):
        lease(store, PATHS, "slow", clock=clock).__enter__()
    others[0].put(SOMETHING, b"1")
    assert others[0].lease.token == 6


def test_who_needs_too_long_to_take_a_lease_does_not_hold_it() -> None:
    clock = Clock()

    class Stuck(MemoryStore):
        def create(self, path: StatePath, data: bytes) -> bool:
            found = super().create(path, data)
            clock.seconds += 55
            return found

    store = Stuck()
    with pytest.raises(ConflictError, match="could not be renewed"):
        lease(store, PATHS, "slow", clock=clock).__enter__()
    assert store.head(PATHS.leases / "newest.json") is None


def test_a_lease_that_was_lost_long_ago_is_lost_in_other_processes_too() -> None:
    clock = Clock()
    store = MemoryStore()
    dead = lease(store, PATHS, "dead", clock=clock)
    holder = dead.__enter__()
    elsewhere = Leased.__new__(Leased)
    elsewhere.__dict__.update(holder.__getstate__())
    elsewhere.put(SOMETHING, b"1")
    clock.seconds += 61
    leased(store, clock, 4)
    assert store.head(holder.lease.successor) is None
    with pytest.raises(ConflictError, match="somebody else has taken it"):
        elsewhere.put(SOMETHING, b"2")


def test_leases_of_releases_that_did_not_name_the_newest_go_on() -> None:
    store, clock = MemoryStore(), Clock()
    leased(store, clock, 3)
    store.delete_many([PATHS.leases / "newest.json"])
    assert newest_token(store, PATHS.leases) == 3
    with lease(store, PATHS, "next", clock=clock) as held:
        assert held.lease.token == 4


@pytest.mark.parametrize("found", [b"{", b"{}", b'{"token": -1}', b'{"token": true}'])
def test_a_number_that_cannot_be_read_is_refused(found: bytes) -> None:
    store, clock = MemoryStore(), Clock()
    store.put(PATHS.leases / "newest.json", found)
    with pytest.raises(FormatError) as error:
        lease(store, PATHS, "one", clock=clock).__enter__()
    assert "leases/newest.json" in str(error.value)
