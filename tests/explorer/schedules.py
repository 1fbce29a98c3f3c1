"""Schedules: for each seed a job with a past, processes that do things to it, and what goes wrong.

`soak` goes through as many of them as there is time for.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from arroyo_dagster.state import JobId, JobPaths, PipelineId
from tests.explorer import ours
from tests.explorer.arroyo import Controller
from tests.explorer.ending import check_end, check_leases, check_removed, check_verified, finish
from tests.explorer.features import (
    CHANGES_OF_ROWS,
    OF_ARROYO_JOBS,
    SURGERY,
    Scene,
    draw_clock,
    features_of,
    may_finish,
    set_right,
    set_up,
)
from tests.explorer.oracle import Watch, Watches
from tests.explorer.setting import Setting
from tests.explorer.truth import Truth
from tests.explorer.world import DAY, HOUR, SECOND, Objects, Process, Violation, Within, World
from tests.formats import JobCondition

KINDS = ("ours-protocol", "ours-protocol", "arroyo-protocol", "arroyo-legacy", "ours-legacy")
PROTOCOL = JobPaths(JobId("job_1"), PipelineId("pl_1"))
LEGACY = JobPaths(JobId("job_1"))
SIBLINGS: Objects = {
    "pl_1/job_10/current-generation.json": (b"{}", 1, 1),
    "pl_1/job_10/generations/1/checkpoints/checkpoint-0000001/operator-a/table-g-000": (b"x", 1, 1),
    "job_10/checkpoints/checkpoint-0000001/operator-a/table-g-000": (b"x", 1, 1),
}
BESIDE = {
    "protocol": (
        JobPaths(JobId("job_10"), PipelineId("pl_1")),
        JobPaths(JobId("job_1"), PipelineId("pl_10")),
    ),
    "legacy": (JobPaths(JobId("job_10")),),
}
"""Other jobs below the same URL, whose names begin alike, by layout."""

TARGETS = (
    JobPaths(JobId("job_2"), PipelineId("pl_1")),
    JobPaths(JobId("job_1"), PipelineId("pl_2")),
    JobPaths(JobId("job_2")),
)
"""Jobs that take over the state of another one."""

BASES = 40
BASES_BESIDE = 6
OF_ARROYO = ("arroyo-protocol", "arroyo-legacy")
OF_OURS = ("ours-protocol", "ours-protocol", "ours-legacy")
CLOCKS = frozenset({"several clocks", "clocks that are set"})
SEEDS_PER_PAST = 50_000
"""So many seeds share the pasts of their jobs: no more than that are kept."""

START = 1_700_000_000 * SECOND
BURSTS = ((10_000,), (1, 2, 3), (1, 5, 20), (3, 10, 40, 120), (20, 60), (1, 60))


@dataclass(frozen=True, slots=True)
class Base:
    """A job with a past.

    Attributes:
        pinned: the epochs that are pinned in it.
        controller: what Arroyo's controller knows of it.
        taken: what Arroyo's own cleaning up has deleted.
        versions: what was deleted or written over.
        written: when each epoch was written.
    """

    kind: str
    objects: Objects
    now: int
    job: ours.Job
    pinned: frozenset[int]
    controller: Controller | None
    taken: frozenset[str]
    versions: Objects
    written: dict[int, int]

    @property
    def retention(self) -> int | None:
        """Of an Arroyo job, in epochs."""
        return None if self.controller is None else self.controller.retention

    @property
    def root(self) -> str:
        return str(self.job.paths.root)


# ---- the past ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=10 * BASES)
def base_of(kind: str, number: int, paths: JobPaths | None = None, *, clocks: bool = False) -> Base:
    """The past of one job: runs that ended or died, collections that did, and days between.

    Args:
        clocks: whether its processes had clocks of their own.
    """
    chance = random.Random(f"{kind} {number} {paths}" + (" clocks" if clocks else ""))
    paths = paths or (LEGACY if kind.endswith("legacy") else PROTOCOL)
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
            retention=chance.choice((3, 3, 12)),
        )
    inside = f"{paths.root}/"
    beside = {path: one for path, one in SIBLINGS.items() if not path.startswith(inside)}
    world = World(beside, START, chance)
    ours.inhabit(world)
    past = Setting(world, Watch(world.objects, paths.root, True, True), job, controller, chance)
    past.watch.protocol = paths.pipeline is not None
    past.watch.ours = controller is None
    past.watch.clock, past.watch.by_arroyo = world.clock, world.taken_by_arroyo
    _ask_controller(past.watch, controller)
    world.watch, world.versions = Watches((past.watch,)), {}
    if clocks:
        past.clocks = lambda role: draw_clock(chance, world.now, role)
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
    pinned, taken = frozenset(past.watch.pinned), frozenset(world.taken_by_arroyo)
    return Base(
        kind,
        world.objects,
        world.now,
        job,
        pinned,
        controller,
        taken,
        world.versions,
        past.watch.written,
    )


def _last_words(past: Setting) -> None:
    """What is easily met too seldom: a run that died at a place where it matters."""
    chance, world = past.chance, past.world
    if past.controller is None and past.paths.pipeline is not None and chance.random() < 0.3:
        world.run([past.compaction()])
    elif past.controller is None and past.paths.pipeline is not None and chance.random() < 0.5:
        # A compaction that may end behind an epoch which was begun without it.
        world.run([past.compaction(), past.writer(8)], (25, 40), 1.0)
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
    if past.controller is not None and chance.random() < 0.35:
        past.controller.condition = JobCondition.STOPPED
        world.run([past.rewriting(fault=chance.random() < 0.2)])
        world.jump(chance.choice((90 * SECOND, 4 * DAY)))
        if chance.random() < 0.3:
            world.run([past.writer(1)])


# ---- a schedule ----------------------------------------------------------------------------------


def explore(
    seed: int, *, features: Collection[str] | None = None, trace: list[str] | None = None
) -> Counter[str]:
    """Go through the schedule of a seed.

    Args:
        features: those that it has; drawn from those that are switched on unless given.

    Returns:
        How each process ended.

    Raises:
        Violation: something that must stay did not.
    """
    names = features_of(seed) if features is None else tuple(features)
    chance = random.Random(seed)
    bases = bases_of(chance, seed // SEEDS_PER_PAST, names)
    world = _world_of(bases, chance)
    world.trace = trace
    settings = [_setting_of(base, world, chance) for base in bases]
    watches = world.watch = Watches(tuple(one.watch for one in settings))
    if len(settings) > 1:
        settings[0].beside, settings[1].beside = settings[1].paths, settings[0].paths
    gone = settings[-1] if chance.random() < (0.4 if len(settings) > 1 else 0.05) else None
    scene = _scene(seed, world, settings, bases, watches)
    set_up(scene, names)
    ours.inhabit(world)
    chosen = [one for setting in settings for one in _chosen(setting, dies=setting is gone)]
    chosen += scene.more
    world.page = chance.choice((1000, 1000, 9))
    world.cut_listings = chance.random() < 0.15
    for base, setting in zip(bases, settings, strict=True):
        watch = setting.watch
        watch.sees_all = not world.cut_listings
        epochs = f"epochs {sorted(watch.epochs)}, pins {watch.pinned}"
        world.note(f"seed {seed}: {base.kind} at {watch.place}, {epochs}, {', '.join(names)}")
    if chance.random() < 0.35:
        world.run(chosen, jumps=0.7, pause=chance.randint(1, 90))
    else:
        world.run(chosen, chance.choice(BURSTS), chance.choice((0.0, 0.1, 0.4)))
    _check(scene, gone, chosen)
    if SURGERY.intersection(names):
        for setting in settings:
            if setting is not gone:
                check_verified(setting, rows_change=bool(CHANGES_OF_ROWS.intersection(names)))
    endings = Counter(f"{one.name.partition(' ')[0]}: {one.result}" for one in chosen)
    for name in names:
        endings[f"with {name}"] += 1
    if seed % 16 == 0 and may_finish(scene):
        set_right(scene)
        for setting in settings:
            finish(setting)
        endings["finished"] += 1
    return endings


def _check(scene: Scene, gone: Setting | None, chosen: list[Process]) -> None:
    """See that everything is as it must be in the end."""
    world = scene.world
    for setting in scene.settings:
        if setting.watch.has_aside() and scene.settings[0].chance.random() < 0.5:
            chosen.append(setting.undelete())
            world.run(chosen[-1:])
        if setting is gone:
            its = [one for one in chosen if f"{one.root}/" == gone.watch.place]
            its = [one for one in its if not one.name.endswith("of all")]
            check_removed(world, setting.watch, its)
        else:
            check_end(world, setting.watch)
        if setting.watch.fenced:
            check_leases(setting)
    for setting in scene.renamed:
        if setting.watch.epochs:
            check_end(world, setting.watch)


def _scene(
    seed: int, world: World, settings: list[Setting], bases: list[Base], watches: Watches
) -> Scene:
    chance = random.Random(f"{seed} in full")

    def make_setting(base: Base, url: str) -> Setting:
        made = _setting_of(base, world, chance, url)
        watches.of += (made.watch,)
        return made

    return Scene(world, settings, bases, watches, chance, make_setting)


def bases_of(chance: random.Random, past: int = 0, names: Collection[str] = ()) -> list[Base]:
    """The jobs of a schedule, by the first numbers that it draws.

    Args:
        past: which of endless collections of pasts they are from.
        names: the features of the schedule.
    """
    clocks = not CLOCKS.isdisjoint(names)
    most, fewer = (BASES_BESIDE, 2) if clocks else (BASES, BASES_BESIDE)
    kinds = OF_OURS if "no conditional create" in names else KINDS
    kinds = OF_ARROYO if OF_ARROYO_JOBS.intersection(names) else kinds
    kind, number = chance.choice(kinds), past * most + chance.randrange(most)
    bases = [base_of(kind, number, clocks=clocks)]
    if chance.random() < 0.2:
        kind, number = chance.choice(kinds), past * fewer + chance.randrange(fewer)
        paths = chance.choice(BESIDE[kind.partition("-")[2]])
        bases.append(base_of(kind, number, paths, clocks=clocks))
    return bases


def _world_of(bases: list[Base], chance: random.Random) -> World:
    objects: Objects = {}
    for base in bases:
        inside = f"{base.root}/"
        objects = {path: one for path, one in objects.items() if not path.startswith(inside)}
        mine = base is bases[0]
        objects |= {p: one for p, one in base.objects.items() if mine or p.startswith(inside)}
    world = World(objects, max(base.now for base in bases), chance)
    world.taken_by_arroyo.update(*(base.taken for base in bases))
    return world


def _setting_of(base: Base, world: World, chance: random.Random, url: str = "") -> Setting:
    controller = None if base.controller is None else base.controller.copied()
    protocol = base.job.paths.pipeline is not None
    watch = Watch(world.objects, base.root, protocol, controller is None, pinned=set(base.pinned))
    watch.clock, watch.by_arroyo = world.clock, world.taken_by_arroyo
    watch.written = dict(base.written)
    if url:
        world.taken_by_arroyo.update(url + path for path in base.taken)
        watch.url, watch.objects = url, Within(world.objects, url)
        watch.by_arroyo = Within(world.taken_by_arroyo, url)
    watch.look()
    watch.truth = Truth(watch.objects, controller is None)
    watch.truth.look(base.root, watch.epochs)
    keep_epochs = chance.choice((None, None, 3)) if controller is None else None
    job = ours.Job(base.job.paths, base.job.two_phase, keep_epochs)
    if keep_epochs is not None:
        watch.expires(keep_epochs)
    if not protocol:
        watch.trap = 10
    _ask_controller(watch, controller)
    return Setting(world, watch, job, controller, chance, url=url)


def _ask_controller(watch: Watch, controller: Controller | None) -> None:
    """In the legacy layout the controller chooses what a start restores."""
    if controller is not None and not watch.protocol:
        watch.restorable = lambda: controller.newest
        watch.gives_again = lambda: controller.gives_again


def _chosen(setting: Setting, *, dies: bool) -> list[Process]:
    """A collector, mostly a writer, often somebody else."""
    chance = setting.chance
    if dies:
        return _undertakers(setting)
    if chance.random() < 0.15:
        return [setting.expiry(fault=chance.random() < 0.1), setting.pin()]
    if setting.controller is not None and chance.random() < 0.25:
        return _rewriters(setting)
    if setting.controller is None and chance.random() < 0.1:
        # Beside a run that cleans up, or right behind one that died.
        beside = (setting.writer(3, fault=chance.random() < 0.3), setting.expiry())
        return [setting.rollback(fault=chance.random() < 0.3), chance.choice(beside)]
    some = [chance.choice((setting.expiry, setting.orphans))(fault=chance.random() < 0.25)]
    if chance.random() < 0.8:
        some.append(setting.writer(chance.randint(1, 3), fault=chance.random() < 0.25))
    while len(some) < (4 if setting.beside is None else 2) and chance.random() < 0.55:
        make = chance.choice((*setting.makers(), setting.writer))
        if make == setting.writer:
            some.append(setting.writer(chance.randint(1, 2), fault=chance.random() < 0.25))
        else:
            some.append(make(fault=chance.random() < 0.2))
    return some


def _rewriters(setting: Setting) -> list[Process]:
    """Who rewrites a stopped job of Arroyo's in place, and who starts or cleans it meanwhile."""
    chance = setting.chance
    assert setting.controller is not None
    setting.controller.condition = JobCondition.STOPPED
    if chance.random() < 0.4:
        # The first is the one that may be paused: a run that is rewritten behind its back.
        return [setting.writer(14, fresh=False), setting.rewriting()]
    some = [chance.choice((setting.rewriting, setting.putting_back))(fault=chance.random() < 0.3)]
    others = (setting.orphans, setting.expiry, setting.putting_back, setting.rewriting)
    while len(some) < 4 and chance.random() < 0.7:
        some.append(chance.choice(others)(fault=chance.random() < 0.2))
    if chance.random() < 0.6:
        # So many that its own cleaning up comes to the epoch that was rewritten.
        some.append(setting.writer(chance.choice((1, 14)), fault=chance.random() < 0.25))
    return some


def _undertakers(setting: Setting) -> list[Process]:
    """Who removes a job that is gone, and who thinks better of it."""
    chance = setting.chance
    if setting.controller is not None:
        setting.controller.condition = JobCondition.GONE
    some = [setting.removal(fault=chance.random() < 0.5)]
    if chance.random() < 0.5:
        some.append(setting.removal(fault=chance.random() < 0.25))
    if chance.random() < 0.3:
        some.append(chance.choice((setting.pin, setting.unpin, setting.undelete))())
    return some


def explore_many(
    first: int, count: int, *, features: Collection[str] | None = None
) -> Counter[str]:
    """Go through many seeds; the first violation is raised with its seed.

    Args:
        features: as of `explore`.
    """
    endings: Counter[str] = Counter()
    with ours.replaced_machinery():
        for seed in range(first, first + count):
            try:
                endings += explore(seed, features=features)
            except Violation as violation:
                raise Violation(f"seed {seed}: {violation}") from violation
    return endings
