"""What a start restores: the whole matrix of arroyo-state.md 3.3, every situation of the latest
reference with every one of the base, whoever the fence names and whatever came before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import Epoch, StatePath
from arroyo_dagster.state.planning.restore.recovery import CannotStart
from tests.formats import EpochRecord, Manifest
from tests.internals import Claim, Restore, StartEmpty
from tests.unit.state.planning.restore.test_recovery import PATHS, World

STARTING = 8


class Result(Enum):
    """The right column of the table."""

    RESTORE = auto()
    REPLAY = auto()
    CLAIM_OR_NEXT = auto()
    NEXT = auto()
    FAIL = auto()
    CANONICAL = auto()
    REPLAY_CANONICAL = auto()


class Place:
    """Where one candidate lies: its generation and epoch, the epoch before, and the winner's."""

    def __init__(self, world: World, generation: int, epoch: int) -> None:
        self.world, self.generation, self.epoch = world, generation, epoch
        self.ref = world.ref(generation, epoch)
        self.winner = world.ref(generation + 20, epoch)

    def manifest(
        self, parent: StatePath | None, *, needs_commit: bool = False, claim: bool = True
    ) -> None:
        ref = self.world.manifest(
            self.generation, self.epoch, parent=parent, needs_commit=needs_commit
        )
        if claim:
            self.world.claim(ref)

    def win(self, parent: StatePath | None, *, needs_commit: bool = False) -> None:
        """Another checkpoint owns the epoch."""
        self.world.manifest(
            self.generation + 20, self.epoch, parent=parent, needs_commit=needs_commit
        )
        self.world.claim(self.winner)

    def win_by(self, epoch: int) -> None:
        """The record names a manifest that says it is of another epoch."""
        manifest = self.world.objects[self.winner]
        assert isinstance(manifest, Manifest)
        self.world.objects[self.winner] = replace(manifest, epoch=Epoch(epoch))


Parent = Callable[[Place], StatePath | None]


def parent_of(kind: str) -> Parent:
    def build(at: Place) -> StatePath | None:
        world, epoch = at.world, at.epoch - 1
        ref = world.ref(at.generation, epoch)
        if kind == "none":
            return None
        if kind in ("ready", "committed", "committing", "unclaimed", "orphaned"):
            commits = kind in ("committed", "committing")
            world.manifest(at.generation, epoch, needs_commit=commits)
        if kind in ("ready", "committed", "committing"):
            world.claim(ref)
        if kind == "committed":
            world.commit(ref)
        if kind == "orphaned":
            world.ready(at.generation + 20, epoch)
        return ref

    return build


GOOD_PARENTS = ("none", "ready", "committed")
BAD_PARENTS = ("missing", "unclaimed", "committing", "orphaned")


def ready(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent)


def committed(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent, needs_commit=True)
    at.world.commit(at.ref)


def committing(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent, needs_commit=True)


def unclaimed(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent, claim=False)


def unclaimed_with_commit(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent, needs_commit=True, claim=False)


def orphaned(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent, claim=False)
    at.win(parent)


def orphaned_by_committing(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent, claim=False)
    at.win(parent, needs_commit=True)


def orphaned_by_nothing(at: Place, parent: StatePath | None) -> None:
    orphaned(at, parent)
    del at.world.objects[at.winner]


def orphaned_by_unclaimed(at: Place, parent: StatePath | None) -> None:
    orphaned(at, parent)
    at.win_by(at.epoch + 100)


def orphaned_by_orphaned(at: Place, parent: StatePath | None) -> None:
    orphaned(at, parent)
    at.win_by(at.epoch + 100)
    at.world.ready(at.generation + 40, at.epoch + 100)


def orphaned_by_one_without_a_ready_parent(at: Place, parent: StatePath | None) -> None:
    at.manifest(parent, claim=False)
    at.win(at.world.ref(99, 99))


def missing(at: Place, parent: StatePath | None) -> None:
    del at, parent


STATES: dict[Callable[[Place, StatePath | None], None], Result] = {
    ready: Result.RESTORE,
    committed: Result.RESTORE,
    committing: Result.REPLAY,
    unclaimed: Result.CLAIM_OR_NEXT,
    unclaimed_with_commit: Result.CLAIM_OR_NEXT,
    orphaned: Result.CANONICAL,
    orphaned_by_committing: Result.REPLAY_CANONICAL,
    orphaned_by_nothing: Result.FAIL,
    orphaned_by_unclaimed: Result.FAIL,
    orphaned_by_orphaned: Result.FAIL,
    orphaned_by_one_without_a_ready_parent: Result.FAIL,
}
Situation = tuple[Callable[[Place, StatePath | None], None], str, Result]
SITUATIONS: list[Situation] = [
    (missing, "none", Result.NEXT),
    *((state, parent, result) for state, result in STATES.items() for parent in GOOD_PARENTS),
    # The parent comes first, whatever the candidate itself is.
    *((state, parent, Result.FAIL) for state in STATES for parent in BAD_PARENTS),
]


def outcome(at: Place, result: Result, *, current: bool) -> object:
    """What a start does with one candidate; None = the next is tried."""
    if result is Result.RESTORE:
        return "restore", at.ref, False
    if result is Result.REPLAY:
        return "restore", at.ref, True
    if result is Result.CANONICAL:
        return "restore", at.winner, False
    if result is Result.REPLAY_CANONICAL:
        return "restore", at.winner, True
    if result is Result.CLAIM_OR_NEXT:
        return ("claim", at.ref) if current else None
    return "fail" if result is Result.FAIL else None


PLACE = Place(World(), 5, 20)


def told(found: Restore | Claim | CannotStart | StartEmpty) -> object:
    if isinstance(found, Restore):
        return "restore", found.ref, found.replay_commit
    if isinstance(found, Claim):
        assert found.record.worker_generation in (2, 4, 5)
        return "claim", found.record.checkpoint_ref
    return "fail" if isinstance(found, CannotStart) else "empty"


@pytest.mark.parametrize("current", [True, False], ids=["current", "overtaken"])
def test_every_situation_of_latest_and_base_is_resolved_as_arroyo_does(current: bool) -> None:
    cases = 0
    for latest in [None, *SITUATIONS]:
        # Where the latest settles it, the base is not looked at: a few show that.
        settled = latest is not None and outcome(PLACE, latest[2], current=current) is not None
        bases = SITUATIONS[::13] if settled else [None, *SITUATIONS]
        for base, earlier in itertools.product(bases, (False, True)):
            world = World()
            first = world.ready(2, 3)
            world.generation(2, latest=first if earlier else None)
            places = Place(world, 5, 20), Place(world, 4, 10)
            expected: object = None
            for at, situation in zip(places, (latest, base), strict=True):
                if situation is not None:
                    state, parent, result = situation
                    state(at, parent_of(parent)(at))
                    expected = expected or outcome(at, result, current=current)
            world.generation(
                6, latest=places[0].ref if latest else None, base=places[1].ref if base else None
            )
            expected = expected or (("restore", first, False) if earlier else "empty")
            fence = STARTING if current else STARTING + 1
            for as_arroyo in (True, False):
                found = world.start(STARTING, fence=fence, as_arroyo=as_arroyo)
                assert told(found) == expected, (latest, base, earlier)
            cases += 1
    assert cases > 1_000


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: f"{one[0].__name__}-{one[1]}")
def test_a_latest_reference_that_is_the_base_too_is_looked_at_once(situation: Situation) -> None:
    world = World()
    state, parent, result = situation
    at = Place(world, 5, 20)
    state(at, parent_of(parent)(at))
    world.generation(6, latest=at.ref, base=at.ref)
    for current in (True, False):
        fence = STARTING if current else STARTING + 1
        found = world.start(STARTING, fence=fence, as_arroyo=True)
        assert told(found) == (outcome(at, result, current=current) or "empty")


def test_without_a_fence_nothing_is_claimed() -> None:
    world = World()
    at = Place(world, 5, 20)
    unclaimed(at, None)
    world.generation(6, latest=at.ref)
    assert world.start(STARTING, fence=STARTING) != StartEmpty()
    assert world.start(STARTING, fence=STARTING - 1) == StartEmpty()


def test_an_arroyo_does_not_follow_what_a_fenced_run_left_behind() -> None:
    world = World()
    first = world.ready(1, 1)
    late = world.ready(1, 2, first)
    world.generation(2, base=first)
    assert told(world.start(3, as_arroyo=True)) == ("restore", first, False)
    assert told(world.start(3)) == ("restore", late, False)


def with_record(**changes: object) -> World:
    world = World()
    at = Place(world, 5, 20)
    committing(at, None)
    world.generation(6, latest=at.ref)
    path = PATHS.epoch_record(Epoch(20))
    record = world.objects[path]
    assert isinstance(record, EpochRecord)
    world.objects[path] = replace(record, **changes)  # type: ignore[arg-type]
    return world


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"worker_generation": 4}, {"job": "other"}, {"pipeline": "other"}],
    ids=lambda changes: next(iter(changes)),
)
def test_commit_is_replayed_only_on_its_own_record(changes: dict[str, object]) -> None:
    assert told(with_record().start(STARTING)) == ("restore", World().ref(5, 20), True)
    with pytest.raises(ProtocolError, match="record") as error:
        with_record(**changes).start(STARTING)
    assert error.value.facts["path"] == World().ref(5, 20)
