"""How a schedule must end: what stays is whole, a start finds its way, nothing is stuck."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state import verify_job
from arroyo_dagster.state.metadata.lease import IN_FLIGHT_GRACE_SECONDS, LEASE_SECONDS
from tests.explorer.oracle import TakenByArroyo, Watch, listed, manifest_facts, restored
from tests.explorer.setting import Setting
from tests.explorer.world import DAY, REQUEST, SECOND, Hands, Process, Violation, World
from tests.formats import JobCondition
from tests.internals import LeaseOptions, lease


def check_end(world: World, watch: Watch) -> None:
    """Every epoch that stays is whole, and a start finds its way."""
    objects = watch.objects
    if watch.truth is not None and watch.truth.cut and watch.truth.is_lost:
        return  # what is needed cannot be read
    for path in watch.protected():
        if path not in objects and path not in watch.by_arroyo:
            raise Violation(f"{path} is gone in the end")
    if not watch.protocol or not watch.epochs or (watch.truth and watch.truth.is_lost):
        return
    fence = objects.get(f"{watch.root}/current-generation.json")
    if fence is None:
        raise Violation("the fence is gone")
    below = world.below(f"{watch.place}generations/")
    numbers = {path[len(watch.place) :].split("/")[1] for path in below}
    number = 1 + max(int(one) for one in numbers if one.isascii() and one.isdecimal())
    try:
        ref = restored(objects, watch.root, number, follow=watch.ours, by_arroyo=watch.by_arroyo)
    except TakenByArroyo:
        return
    if ref is None:
        raise Violation("a start would begin without state")
    newest = max(watch.epochs)
    if manifest_facts(objects[ref][0])[0] < newest and watch.ours:
        raise Violation(f"a start would go on from {ref}, not from epoch {newest}")
    lost = [path for path in listed(objects[ref][0], True) if path not in objects]
    if lost:
        raise Violation(f"a start would go on from {ref}, of which {lost[0]} is gone")


def check_leases(setting: Setting) -> None:
    """Nobody is at work any more: once a lease has run out, nobody is kept waiting by it."""
    world, paths = setting.world, setting.paths
    world.jump(int((LEASE_SECONDS + IN_FLIGHT_GRACE_SECONDS) * SECOND) + REQUEST)
    cut, world.cut_listings = world.cut_listings, False

    def work(process: Process) -> str:
        store: Any = Hands(world, process)
        for directory in (paths.leases, paths.writers):
            try:
                with lease(
                    store,
                    paths,
                    "next",
                    LeaseOptions(directory=directory, clock=world.clock_of(process)),
                ):
                    pass
            except ConflictError as error:
                raise Violation(f"a lease outlasts its holder: {error}") from error
        return "held"

    next_one = Process("next", "collector", work, root=f"{setting.url}{paths.root}")
    next_one.url, next_one.clock = setting.url, setting.clocks("collector")
    world.run([next_one])
    world.cut_listings = cut


def check_verified(setting: Setting, *, rows_change: bool) -> None:
    """Verification finds no error where the state was edited, or one that an undo takes away.

    Args:
        rows_change: whether an edit may have changed rows, so that half of one is an error.
    """
    truth = setting.watch.truth
    if not setting.watch.epochs or (truth is not None and truth.is_lost):
        return
    found = _errors(setting)
    if found == {"edit-unfinished"} and rows_change:
        assert setting.controller is not None
        setting.controller.condition = JobCondition.STOPPED
        undo = setting.putting_back()
        setting.world.run([undo])
        found = _errors(setting)
        if undo.result != "put back":
            raise Violation(f"an edit was interrupted, and its undo ends with: {undo.result}")
    if found:
        raise Violation(f"verification of {setting.watch.place} finds {sorted(found)}")


_EDITED = {"edit-unfinished", "file-lost"}


def _errors(setting: Setting) -> set[str]:
    """The codes of the errors that verification of the metadata finds."""
    world, controller = setting.world, setting.controller
    world.cut_listings = False
    legacy = controller is not None and setting.paths.pipeline is None
    epoch = controller.newest if legacy and controller is not None else None

    def work(process: Process) -> set[str]:
        store: Any = Hands(world, process)
        verdict = verify_job(store, setting.paths, epoch, level=0).verdict
        found = {one.code for one in verdict.errors}
        if controller is None:
            return found - {"fence-stale"}  # of a start that stood still; the next one raises it
        # Arroyo's own cleaning up may have died half way; an epoch of two runs at once may list
        # what the next epoch of one of them does not.
        return found & ({"edit-unfinished"} if controller.written_late else _EDITED)

    verify = Process("verify", "collector", work, root=f"{setting.url}{setting.paths.root}")
    verify.url = setting.url
    world.jump(int((LEASE_SECONDS + IN_FLIGHT_GRACE_SECONDS) * SECOND) + REQUEST)
    world.run([verify])
    return set(verify.result)


def check_removed(world: World, watch: Watch, chosen: Sequence[Process]) -> None:
    """Of a job that is gone nothing is left, or what was moved aside is back, or it is refused."""
    last = max(chosen, key=lambda one: one.ended_at)  # what was back may have gone since
    if last.result == "back" and not watch.lost:
        check_end(world, watch)
    if watch.sees_all and chosen[-1].result in ("collected", "moved"):
        left = watch.left()
        if left:
            raise Violation(f"it was removed, and {left[0]} is there")


def finish(setting: Setting) -> None:
    """Days later, with nobody else about: the job goes on, and what is dead is collected."""
    world = setting.world
    world.cut_listings = False
    world.jump(5 * DAY)
    if setting.watch.dying:
        _finish_removal(setting)
        return
    for _ in range(6):
        writer = setting.writer(3, stop=True, fresh=False)
        world.run([writer])
        if writer.result != "failed: orphaned":
            break
        # A run that was fenced late has published: Arroyo finds each of its epochs a start later.
    if writer.result == "failed: the parent is not ready" and setting.watch.by_arroyo:
        return  # see `TakenByArroyo`
    if writer.result != "done":
        raise Violation(f"the job does not go on: {writer.result}")
    world.jump(5 * DAY)
    for make in (setting.expiry, setting.orphans):
        if setting.controller is not None and setting.paths.pipeline is None:
            process = make()
            world.run([process])
            if process.result == "ProtocolError":
                # An epoch that Arroyo's cleaning up has half removed is among the ten that stay.
                world.run([setting.writer(12, stop=True, fresh=False)])
        _run(setting, make)


def _finish_removal(setting: Setting) -> None:
    if not setting.watch.left():
        return
    setting.watch.dying = setting.watch.sees_all = True
    removal = setting.removal()
    setting.world.run([removal])
    if removal.result == "ProtocolError":
        # Nobody can read what is left of it, or a listing that was cut short has begun it.
        removal = _run(setting, lambda: setting.removal(unreadable=True))
    if removal.result != "ProtocolError":
        check_removed(setting.world, setting.watch, [removal])


def _run(setting: Setting, make: Callable[[], Process]) -> Process:
    process = make()
    setting.world.run([process])
    if process.result == "conflict":
        # A stored plan to the second: time goes by between it and what it is compared with.
        setting.world.jump(DAY)
        process = make()
        setting.world.run([process])
    if process.result == "ProtocolError" and (setting.ages or setting.url):
        # The newest epoch is of a wrong clock, or was copied later than it was finished: time
        # helps, and a rule that needs no clock.
        setting.world.jump(15 * DAY)
        process = setting.expiry(keep=2) if process.name.startswith("expiry") else make()
        setting.world.run([process])
    if process.result not in ("collected", "moved", "nothing"):
        kept = setting.watch.objects.get(setting.paths.job_pins)
        if kept is None or not json.loads(kept[0])["pins"]:
            raise Violation(f"{process.name} is refused for ever: {process.result}")
        # A pinned epoch that is not there is told, and refused until unpinned.
    return process
