"""Schedules: for each seed a job with a past, processes that do things to it, and what goes wrong.

    python -m tests.explorer.schedules --from 0 --count 100000 [--processes 2]

explores them outside of pytest; a violation is printed with its seed and every call that led to it.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.state.local.gc_plans import GcRequest
from arroyo_dagster.state.model.collecting import (
    GRACE_FLOOR_MICROS,
    GRACE_MICROS,
    PlanKind,
    Retention,
)
from arroyo_dagster.state.model.directory import JobCondition
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from tests.explorer import ours
from tests.explorer.arroyo import Controller, Leader, LegacyRun
from tests.explorer.oracle import Watch, data_files, listed, manifest_facts, reachable, restored
from tests.explorer.world import DAY, HOUR, SECOND, Objects, Process, Violation, World

KINDS = ("ours-protocol", "ours-protocol", "arroyo-protocol", "arroyo-legacy", "ours-legacy")
PROTOCOL = JobPaths(JobId("job_1"), PipelineId("pl_1"))
LEGACY = JobPaths(JobId("job_1"))
SIBLINGS: Objects = {
    "pl_1/job_10/current-generation.json": (b"{}", 1, 1),
    "pl_1/job_10/generations/1/checkpoints/checkpoint-0000001/operator-a/table-g-000": (b"x", 1, 1),
    "job_10/checkpoints/checkpoint-0000001/operator-a/table-g-000": (b"x", 1, 1),
}
BASES = 40
START = 1_700_000_000 * SECOND
FAULTS = ("crash", "crash", "crash-after", "crash-after", "fail", "fail-after", "half", "throttled")
BURSTS = ((10_000,), (1, 2, 3), (1, 5, 20), (3, 10, 40, 120), (20, 60), (1, 60))


NARROW = (
    *("/epochs/epoch-", "/epochs/epoch-", "/checkpoint-manifest.pb", "/committed.json"),
    *("/generation-manifest.json", "/metadata", "/compactions/"),
)
NARROW_TOO = ("/retained.json", "/epochs/epoch-", "/checkpoint-manifest.pb", "/metadata", "/table-")


@dataclass(frozen=True, slots=True)
class Base:
    """A job with a past.

    Attributes:
        pinned: the epochs that are pinned in it.
        controller: what Arroyo's controller knows of it.
    """

    kind: str
    objects: Objects
    now: int
    job: ours.Job
    pinned: frozenset[int]
    controller: Controller | None


# ---- the past ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4 * BASES)
def base_of(kind: str, number: int) -> Base:
    """The past of one job: runs that ended or died, collections that did, and days between."""
    chance = random.Random(f"{kind} {number}")
    paths = LEGACY if kind.endswith("legacy") else PROTOCOL
    two_phase = chance.random() < 0.5
    job = ours.Job(paths, two_phase, None)
    controller = None
    if kind.startswith("arroyo"):
        keep, every = chance.choice(
            ((10, 4), (4, 2)) if kind.endswith("legacy") else ((4, 2), (3, 1))
        )
        controller = Controller(
            paths,
            keep=keep,
            every=every,
            two_phase=two_phase and not kind.endswith("legacy"),
            parallelism=chance.choice((1, 1, 2)),
        )
    world = World(dict(SIBLINGS), START, chance)
    ours.inhabit(world)
    past = Setting(world, Watch(world.objects, paths.root, True, True), job, controller, chance)
    past.watch.protocol = paths.pipeline is not None
    past.watch.ours = controller is None
    past.watch.clock = world.clock
    world.watch = past.watch
    long = controller is not None and kind.endswith("legacy")
    first = chance.randint(6, 14) if long else chance.randint(3, 6)
    world.run([past.writer(first, fault=chance.random() < 0.3)])
    for _ in range(chance.randint(1, 3)):
        world.jump(chance.choice((HOUR, DAY, 4 * DAY)))
        make = chance.choice(past.makers())
        world.run([make(fault=chance.random() < 0.4)])
        if chance.random() < 0.5:
            world.jump(chance.choice((90 * SECOND, 4 * DAY)))
            world.run([past.writer(chance.randint(1, 3), fault=chance.random() < 0.4)])
    if chance.random() < 0.5:
        world.jump(chance.choice((90 * SECOND, 4 * DAY)))
        world.run([past.writer(chance.randint(1, 3))])
    _last_words(past)
    if controller is not None and chance.random() < 0.5:
        controller.condition = chance.choice((JobCondition.STOPPED, JobCondition.FAILED))
    world.jump(chance.choice((90 * SECOND, 2 * HOUR, 4 * DAY)))
    return Base(kind, world.objects, world.now, job, frozenset(past.watch.pinned), controller)


def _last_words(past: Setting) -> None:
    """What is easily met too seldom: a run that died at a place where it matters."""
    chance, world = past.chance, past.world
    if past.controller is None and past.paths.pipeline is not None and chance.random() < 0.3:
        world.run([past.compaction()])
    if chance.random() < 0.3:
        dying = past.writer(chance.randint(1, 2), fault=True)
        dying.fault_at, dying.fault = None, chance.choice(("crash", "crash-after"))
        dying.fault_on = chance.choice(("/epochs/epoch-", "/checkpoint-manifest.pb", "/metadata"))
        world.run([dying])
    if chance.random() < 0.2:
        aside = past.expiry(aside=True)
        world.run([aside])
        world.jump(2 * HOUR)
        world.run([past.writer(2)])


# ---- processes -----------------------------------------------------------------------------------


@dataclass
class Setting:
    """A world, and what can be made to happen in it."""

    world: World
    watch: Watch
    job: ours.Job
    controller: Controller | None
    chance: random.Random
    count: int = 0

    @property
    def paths(self) -> JobPaths:
        return self.job.paths

    def _process(
        self, name: str, role: str, work: Callable[[Process], Any], fault: bool, calls: int
    ) -> Process:
        self.count += 1
        process = Process(f"{name} {self.count}", role, work, fault=self.chance.choice(FAULTS))
        if fault and self.chance.random() < 0.5:
            process.fault_at = self.chance.randint(1, calls)
        elif fault:
            process.fault_on = self.chance.choice(NARROW if role != "collector" else NARROW_TOO)
        return process

    def writer(self, epochs: int, *, fault: bool = False, stop: bool | None = None) -> Process:
        """The job's own writer, started anew."""
        chance, world, controller = random.Random(self.chance.random()), self.world, self.controller
        if controller is None:
            return self._process(
                "writer",
                "writer",
                lambda process: ours.write_epochs(world, process, self.job, chance, epochs),
                fault,
                30 * epochs,
            )
        stops = chance.random() < 0.7 if stop is None else stop
        kind = Leader if self.paths.pipeline is not None else LegacyRun

        def work(process: Process) -> str:
            return kind(world, process, controller, chance).work(epochs, stops)

        return self._process("Arroyo", "arroyo", work, fault, 30 * epochs)

    def makers(self) -> list[Callable[..., Process]]:
        """What maintenance does, of a kind each."""
        found = [self.expiry, self.orphans, self.pin, self.expiry, self.orphans, self.undelete]
        if self.controller is None and self.paths.pipeline is not None:
            found += [self.compaction, self.compaction]
        return [*found, self.unpin, self.purge]

    def expiry(
        self, *, fault: bool = False, aside: bool | None = None, keep: int | None = None
    ) -> Process:
        """An expiry, by count or by age."""
        chance, protocol = self.chance, self.paths.pipeline is not None
        by_age = keep is None and chance.random() < 0.4
        keep = keep or chance.choice((2, 2, 3, 4))
        retention = Retention(keep_epochs=keep)
        if by_age:
            keep, retention = 2, Retention(keep_micros=chance.choice((0, SECOND, HOUR)))
        if not protocol:
            self.watch.trap = 10
        asked = GcRequest(
            kind=PlanKind.EXPIRE,
            retention=retention,
            directory=ours.directory(self.controller),
            others=(),
        )
        return self._collector("expiry", asked, keep, fault, aside)

    def orphans(self, *, fault: bool = False) -> Process:
        """A collection of orphans."""
        asked = GcRequest(
            kind=PlanKind.ORPHANS,
            grace_micros=self.chance.choice((GRACE_FLOOR_MICROS, GRACE_FLOOR_MICROS, GRACE_MICROS)),
            directory=ours.directory(self.controller),
            others=(),
        )
        return self._collector("orphans", asked, None, fault)

    def _collector(
        self, name: str, asked: GcRequest, keep: int | None, fault: bool, aside: bool | None = None
    ) -> Process:
        chance, world = self.chance, self.world
        what = ours.Collection(
            asked=asked,
            keep=keep,
            aside=chance.random() < 0.25 if aside is None else aside,
            early=chance.random() < 0.3,
            in_flight=chance.choice((1, 8)),
        )
        return self._process(
            name,
            "collector",
            lambda process: ours.gather(world, process, self.paths, self.watch, what),
            fault,
            90,
        )

    def compaction(self, *, fault: bool = False) -> Process:
        """A compaction of a job of ours."""
        return self._process(
            "compaction",
            "writer",
            lambda process: ours.compact(self.world, process, self.job),
            fault,
            60,
        )

    def pin(self, *, fault: bool = False) -> Process:
        """A pin of one of the epochs there are."""
        epoch = self.chance.choice(sorted(self.watch.epochs) or [1])
        return self._process(
            "pin",
            "collector",
            lambda process: ours.pin(self.world, process, self.paths, self.watch, epoch),
            fault,
            30,
        )

    def unpin(self, *, fault: bool = False) -> Process:
        """The oldest pin taken back."""
        return self._process(
            "unpin",
            "collector",
            lambda process: ours.unpin(self.world, process, self.paths, self.watch),
            fault,
            15,
        )

    def undelete(self, *, fault: bool = False) -> Process:
        """What was moved aside brought back."""
        return self._process(
            "undelete",
            "collector",
            lambda process: ours.bring_back(self.world, process, self.paths, self.watch),
            fault,
            60,
        )

    def purge(self, *, fault: bool = False) -> Process:
        """What was moved aside deleted for good."""
        return self._process(
            "purge",
            "collector",
            lambda process: ours.purge_old(self.world, process, self.paths),
            fault,
            40,
        )


# ---- a schedule ----------------------------------------------------------------------------------


def explore(seed: int, *, trace: list[str] | None = None) -> Counter[str]:
    """Go through the schedule of a seed.

    Returns:
        How each process ended.

    Raises:
        Violation: something that must stay did not.
    """
    chance = random.Random(seed)
    base = base_of(chance.choice(KINDS), chance.randrange(BASES))
    world = World(dict(base.objects), base.now, chance)
    world.trace = trace
    ours.inhabit(world)
    controller = None if base.controller is None else base.controller.copied()
    watch = Watch(
        world.objects,
        base.job.paths.root,
        base.job.paths.pipeline is not None,
        base.controller is None,
        pinned=set(base.pinned),
    )
    watch.look()
    watch.clock = world.clock
    world.watch = watch
    keep_epochs = chance.choice((None, None, 3)) if controller is None else None
    job = ours.Job(base.job.paths, base.job.two_phase, keep_epochs)
    if keep_epochs is not None:
        watch.expires(keep_epochs)
    setting = Setting(world, watch, job, controller, chance)
    if not watch.protocol:
        watch.trap = 10
    if controller is not None and not watch.protocol:
        watch.restorable = lambda: controller.newest
    chosen = _chosen(setting)
    world.page = chance.choice((1000, 1000, 9))
    world.cut_listings = chance.random() < 0.15
    if trace is not None:
        trace.append(
            f"seed {seed}: {base.kind}, epochs {sorted(watch.epochs)}, pins {watch.pinned}"
        )
    if chance.random() < 0.35:
        world.run(chosen, jumps=0.7, pause=chance.randint(1, 90))
    else:
        world.run(chosen, chance.choice(BURSTS), chance.choice((0.0, 0.1, 0.4)))
    if any("/quarantine/" in path for path in world.objects) and chance.random() < 0.5:
        chosen.append(setting.undelete())
        world.run(chosen[-1:])
    check_end(world, watch)
    endings = Counter(f"{one.name.partition(' ')[0]}: {one.result}" for one in chosen)
    if seed % 16 == 0:
        _finish(setting)
        endings["finished"] += 1
    return endings


def _chosen(setting: Setting) -> list[Process]:
    """A collector, mostly a writer, often somebody else."""
    chance = setting.chance
    if chance.random() < 0.15:
        return [setting.expiry(fault=chance.random() < 0.1), setting.pin()]
    some = [chance.choice((setting.expiry, setting.orphans))(fault=chance.random() < 0.25)]
    if chance.random() < 0.8:
        some.append(setting.writer(chance.randint(1, 3), fault=chance.random() < 0.25))
    while len(some) < 4 and chance.random() < 0.55:
        make = chance.choice((*setting.makers(), setting.writer))
        if make == setting.writer:
            some.append(setting.writer(chance.randint(1, 2), fault=chance.random() < 0.25))
        else:
            some.append(make(fault=chance.random() < 0.2))
    return some


def check_end(world: World, watch: Watch) -> None:
    """Every epoch that stays is whole, and a start finds its way."""
    for path in watch.protected():
        if path not in world.objects and path not in watch.by_arroyo:
            raise Violation(f"{path} is gone in the end")
    if not watch.protocol or not watch.epochs:
        return
    fence = world.objects.get(f"{watch.root}/current-generation.json")
    if fence is None:
        raise Violation("the fence is gone")
    number = 1 + max(
        int(path.split("/")[3])
        for path in world.objects
        if path.startswith(f"{watch.root}/generations/")
    )
    ref = restored(world.objects, watch.root, number, follow=watch.ours)
    if ref is None:
        raise Violation("a start would begin without state")
    newest = max(watch.epochs)
    if manifest_facts(world.objects[ref][0])[0] < newest and watch.ours:
        raise Violation(f"a start would go on from {ref}, not from epoch {newest}")
    lost = [path for path in listed(world.objects[ref][0], True) if path not in world.objects]
    if lost:
        raise Violation(f"a start would go on from {ref}, of which {lost[0]} is gone")


def _finish(setting: Setting) -> None:
    """Days later, with nobody else about: the job goes on, and what is dead is collected."""
    world = setting.world
    world.cut_listings = False
    world.jump(5 * DAY)
    writer = setting.writer(3, stop=True)
    world.run([writer])
    if writer.result != "done":
        raise Violation(f"the job does not go on: {writer.result}")
    world.jump(5 * DAY)
    for make in (setting.expiry, setting.orphans):
        process = make()
        world.run([process])
        if process.result not in ("collected", "nothing"):
            kept = world.objects.get(setting.paths.retained)
            if kept is not None and json.loads(kept[0])["pins"]:
                continue  # a pinned epoch that is not there is told, and refused until unpinned
            raise Violation(f"{process.name} is refused for ever: {process.result}")


# ---- outside of pytest ---------------------------------------------------------------------------


def explore_many(first: int, count: int) -> Counter[str]:
    """Go through many seeds; the first violation is raised with its seed."""
    endings: Counter[str] = Counter()
    with ours.replaced_machinery():
        for seed in range(first, first + count):
            try:
                endings += explore(seed)
            except Violation as violation:
                raise Violation(f"seed {seed}: {violation}") from violation
    return endings


def _part(task: tuple[int, int]) -> tuple[int, int, Counter[str], str | None]:
    first, count = task
    try:
        return first, count, explore_many(first, count), None
    except BaseException as error:
        return first, count, Counter(), f"{type(error).__name__}: {error}"


def main() -> int:
    """Explore a range of seeds on several processors; prints how far it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--show", type=int, help="print every call of one seed")
    given = parser.parse_args()
    if given.show is not None:
        trace: list[str] = []
        with ours.replaced_machinery():
            try:
                print(explore(given.show, trace=trace))
            except Violation as violation:
                trace.append(f"VIOLATION: {violation}")
        print("\n".join(trace))
        return 0
    step = 1000
    tasks = [
        (at, min(step, given.first + given.count - at))
        for at in range(given.first, given.first + given.count, step)
    ]
    done, endings, began, bad = 0, Counter[str](), time.monotonic(), 0
    with multiprocessing.Pool(given.processes) as pool:
        for _, count, found, problem in pool.imap_unordered(_part, tasks):
            done += count
            endings += found
            if problem is not None:
                bad += 1
                print(problem, flush=True)
            if done % 10_000 == 0:
                took = time.monotonic() - began
                print(f"{done} schedules, {done / took:.0f} a second, {bad} bad", flush=True)
    print(dict(sorted(endings.items())))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["base_of", "data_files", "explore", "explore_many", "reachable"]
