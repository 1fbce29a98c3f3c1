"""Somebody does all of something between any two calls of a collector: every place is tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.explorer import ours
from tests.explorer.arroyo import Controller, LegacyRun
from tests.explorer.ending import check_end
from tests.explorer.mutants import MUTANTS
from tests.explorer.oracle import Watch, Watches
from tests.explorer.schedules import LEGACY, PROTOCOL, SIBLINGS, START
from tests.explorer.setting import Setting
from tests.explorer.world import DAY, SECOND, Process, Violation, World
from tests.formats import JobCondition

LAYOUTS = {"protocol": PROTOCOL, "legacy": LEGACY}
AROUND_ITS_PUTS = 40
MOST_CALLS = 400


@pytest.fixture(autouse=True)
def _machinery() -> Iterator[None]:
    with ours.replaced_machinery():
        yield


def abandoned(
    layout: str,
    whose: str,
    epochs: int = 5,
    *,
    at: str | None = None,
    merged: bool = False,
    retention: int = 3,
) -> Setting:
    """A job with some epochs, and the files of an attempt that died days ago.

    Args:
        at: just before it wrote an object with this in its path.
        merged: whether a compaction waits for the writer.
        retention: of an expiring table of Arroyo's, in epochs.
    """
    paths = LAYOUTS[layout]
    controller = None
    if whose == "arroyo":
        controller = Controller(paths, keep=10, every=4, retention=retention)
    world = World(dict(SIBLINGS), START, random.Random(layout + whose))
    ours.inhabit(world)
    watch = Watch(world.objects, paths.root, layout == "protocol", controller is None)
    watch.by_arroyo = world.taken_by_arroyo
    watch.clock, watch.trap = world.clock, 0 if layout == "protocol" else 10
    world.watch = Watches((watch,))
    setting = Setting(world, watch, ours.Job(paths), controller, random.Random(layout))
    world.run([setting.writer(epochs, stop=False)])
    if merged:
        world.run([setting.compaction()])
    dying = setting.writer(1)
    dying.fault_on, dying.fault = "/checkpoint-manifest.pb", "crash"
    if layout == "legacy":
        dying.fault_on = f"checkpoint-{epochs + 1:07}/operator-op/metadata"
        if controller is not None:
            dying.fault_on = f"checkpoint-{epochs + 1:07}/operator-source_s_0/metadata"
    dying.fault_on = at or dying.fault_on
    world.run([dying])
    assert dying.result == "crashed"
    if controller is not None:
        controller.condition = JobCondition.STOPPED
        watch.restorable = lambda: controller.newest
    world.jump(5 * DAY)
    return setting


def again(setting: Setting, at: int) -> Setting:
    """The same job once more."""
    old = setting.watch
    controller = None if setting.controller is None else setting.controller.copied()
    chance = random.Random(at)
    world = World(dict(setting.world.objects), setting.world.now, chance)
    ours.inhabit(world)
    watch = Watch(world.objects, old.root, old.protocol, old.ours, trap=old.trap)
    if controller is not None and not old.protocol:
        watch.restorable = lambda: controller.newest
    watch.clock, watch.by_arroyo = world.clock, world.taken_by_arroyo
    watch.look()
    world.watch = Watches((watch,))
    return Setting(world, watch, setting.job, controller, chance)


def at_every_call(
    begun: Setting,
    collector: Callable[[Setting], Process],
    others: Callable[[Setting], list[Process]],
    every: int = 1,
) -> tuple[int, int]:
    """Let others do all they do before the k-th call of a collector, for every k.

    Returns:
        How many places there are, and at how many of them something was collected.
    """
    collected = 0
    for at in range(2, MOST_CALLS, every):
        setting = again(begun, at)
        first = collector(setting)
        setting.world.run([first, *others(setting)], pause=at)
        check_end(setting.world, setting.watch)
        collected += first.result == "collected"
        if first.calls < at:
            return at - 2, collected
    raise AssertionError("a collector that never ends")


@pytest.mark.parametrize("whose", ["ours", "arroyo"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["expiry", "orphans"])
def test_a_job_that_starts_and_publishes_between_any_two_calls_loses_nothing(
    what: str, layout: str, whose: str
) -> None:
    long = (what, layout) == ("expiry", "legacy")
    places, collected = at_every_call(
        abandoned(layout, whose, 13 if long else 5),
        lambda one: one.expiry(keep=2) if what == "expiry" else one.orphans(),
        lambda one: [one.writer(2, stop=True)],
        every=3 if long else 1,
    )
    assert places > 20
    assert collected or whose == "arroyo"


def test_a_run_that_would_be_rewritten_between_any_two_of_its_calls_loses_nothing() -> None:
    """It lists what it had in memory; its cleaning up compares that with what was rewritten."""
    begun = abandoned("legacy", "arroyo", 8, retention=12)

    def places() -> int:
        found, _ = at_every_call(
            begun,
            lambda one: one.writer(14, stop=False, fresh=False),
            lambda one: [one.rewriting()],
        )
        return found

    assert places() > 100
    with MUTANTS["a rewrite goes on whatever the job does"](), pytest.raises(Violation):
        places()


def test_a_run_that_begins_between_any_two_calls_of_a_rewrite_keeps_its_files() -> None:
    """Until its cleaning up has passed the epoch that was rewritten."""
    begun = abandoned("legacy", "arroyo", 10, retention=16)
    alone = again(begun, 0)
    rewriting = alone.rewriting()
    alone.world.run([rewriting])
    assert rewriting.result == "rewritten"

    def some_runs() -> None:
        for at in range(rewriting.calls - AROUND_ITS_PUTS, rewriting.calls):
            setting = again(begun, at)
            first, run = setting.rewriting(), setting.writer(2, stop=True, fresh=False)
            setting.world.run([first, run], pause=at)
            setting.world.run([setting.writer(10, stop=False, fresh=False)])
            check_end(setting.world, setting.watch)

    some_runs()
    with MUTANTS["new lists stay although the job was started"](), pytest.raises(Violation):
        some_runs()


def test_what_arroyo_takes_after_it_ignored_the_state_is_not_blamed_on_a_rewrite() -> None:
    broken = 0
    for number in range(30):
        setting = _started_afresh(number)
        rewriting = setting.rewriting()
        setting.world.run([rewriting])
        assert rewriting.result == "rewritten"
        going_on = setting.writer(8, stop=True, fresh=False)
        setting.world.run([going_on])  # cleans up once what it gave again, then by its retention
        assert going_on.result == "done"
        broken += not setting.watch.whole(setting.watch.restorable() or 0)
    assert broken, "no cleaning up has broken the newest epoch: this shows nothing"


def _started_afresh(number: int) -> Setting:
    """A stopped job whose last run ignored the state, and has not cleaned up since."""
    chance = random.Random(number)
    controller = Controller(LEGACY, retention=12)
    world = World({}, START, chance)
    ours.inhabit(world)
    watch = Watch(world.objects, LEGACY.root, protocol=False, ours=False, trap=10)
    watch.clock, watch.by_arroyo = world.clock, world.taken_by_arroyo
    watch.restorable = lambda: controller.newest
    watch.gives_again = lambda: controller.gives_again
    world.watch = Watches((watch,))
    setting = Setting(world, watch, ours.Job(LEGACY), controller, chance)
    world.run([setting.writer(9, stop=True, fresh=False)])
    afresh = Process(
        "Arroyo afresh",
        "arroyo",
        lambda process: LegacyRun(world, process, controller, chance).work(4, True, True),
        root=str(LEGACY.root),
    )
    world.run([afresh])
    assert (afresh.result, controller.gives_again) == ("done", True)
    world.jump(5 * DAY)
    return setting


def test_what_a_start_would_claim_stays_although_no_epoch_lists_it() -> None:
    def collected() -> str:
        setting = again(abandoned("protocol", "arroyo", at="/epochs/epoch-"), 1)
        process = setting.orphans()
        setting.world.run([process])
        check_end(setting.world, setting.watch)
        writer = setting.writer(1)
        setting.world.run([writer])
        assert max(setting.watch.epochs) == 7, "the sixth epoch is claimed, and goes on"
        return str(process.result)

    assert collected() in ("collected", "nothing")
    with MUTANTS["what a start would claim is ignored"](), pytest.raises(Violation):
        collected()


def test_what_a_compaction_has_merged_waits_for_a_writer_that_is_long_in_coming() -> None:
    def collected() -> str:
        setting = again(abandoned("protocol", "ours", merged=True), 1)
        assert setting.watch.waiting()
        process = setting.orphans()
        setting.world.run([process])
        setting.world.run([setting.writer(2)])
        check_end(setting.world, setting.watch)
        return str(process.result)

    assert collected() == "collected"


def merged_too_late() -> Setting:
    """A job whose newest epochs were published just before a compaction put down what it merged."""
    running = abandoned("protocol", "ours")
    dying = again(running, 0)
    before_record = dying.compaction()
    before_record.fault_on, before_record.fault = "/compactions/", "crash"
    dying.world.run([before_record])
    assert before_record.fault_at is not None
    setting = again(running, 0)
    world, compaction, writer = setting.world, setting.compaction(), setting.writer(2)
    write = writer.work

    def write_later(process: Process) -> str:
        for _ in range(4):
            world.now += 30 * SECOND
            compaction.through = True
            for renew in compaction.renewals:
                renew()
            compaction.through = False
        write(process)
        return str(write(process))  # what the newest run went on from is never collected

    writer.work = write_later
    world.run([compaction, writer], pause=before_record.fault_at)
    assert (compaction.result, writer.result) == ("record", "done")
    assert setting.watch.waiting()
    world.jump(5 * DAY)
    return setting


def test_what_was_merged_beside_an_epoch_waits_for_the_next() -> None:
    """The record came too late for the epoch that the writer was at; nothing else speaks for it."""
    late = merged_too_late()

    def collected() -> None:
        setting = again(late, 1)
        setting.world.run([setting.orphans()])
        check_end(setting.world, setting.watch)

    collected()
    with MUTANTS["compactions that wait are ignored"](), pytest.raises(Violation):
        collected()


def test_what_was_merged_and_is_taken_over_between_any_two_calls_of_a_collector_stays() -> None:
    """The collector has listed its record, and no longer finds it."""
    places, _ = at_every_call(
        merged_too_late(), lambda one: one.orphans(), lambda one: [one.writer(1, stop=False)]
    )
    assert places > 20
