"""What a deployment may have besides jobs: wrong clocks, users' objects, weak stores, copies.

Each is a feature. A seed decides which of those that are switched on a schedule has; a schedule
without any costs nothing more.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from arroyo_dagster.state import JobId, JobPaths, PipelineId
from arroyo_dagster.state.storage import names as stored_names
from tests.damages import field_ends
from tests.explorer import ours
from tests.explorer.oracle import MANIFEST, METADATA, OURS, Watch, Watches
from tests.explorer.setting import Setting
from tests.explorer.world import DAY, HOUR, SECOND, WRITERS, Clock, Hands, Objects, Process, World
from tests.formats import JobCondition

SHARE = 0.35
"""Of the schedules so many have a feature, and one of five of those has two."""

LINKS = "shown" if hasattr(stored_names, "LinkName") else "followed"
"""What listings of a local disk make of links: `followed`, or `shown` as objects without a path."""

PROTOBUF = (MANIFEST, "/metadata")
MINUTE = 60 * SECOND
SMALL = (0, 20 * SECOND, 2 * MINUTE, 4 * MINUTE)
LARGE = (20 * MINUTE, 3 * HOUR, DAY, 10 * DAY)


@dataclass
class Scene:
    """A schedule before it begins.

    Attributes:
        bases: what each of the settings began with.
        chance: draws what features need, and nothing else.
        more: processes that take part because of a feature.
        lasting: whether each job can go on, whatever nobody does.
        renamed: of the settings, those of jobs that were copied under another name.
    """

    world: World
    settings: list[Setting]
    bases: list[Any]
    watches: Watches
    chance: random.Random
    make_setting: Callable[[Any, str], Setting]
    more: list[Process] = field(default_factory=list)
    renamed: list[Setting] = field(default_factory=list)
    lasting: bool = True


# ---- clocks --------------------------------------------------------------------------------------


def draw_clock(chance: random.Random, now: int, role: str, *, steps: bool = False) -> Clock:
    """The clock of a host: those of writers are often far off, those of maintainers seldom."""
    far = chance.random() < (0.6 if role in WRITERS else 0.3)
    offset = chance.choice((-1, 1)) * chance.choice(LARGE if far else SMALL)
    drift = chance.choice((0.0, 0.0, 1e-4, -1e-4, 0.02, -0.02))
    return Clock(offset, now, drift, steps and chance.random() < 0.5)


def _clocks(scene: Scene, *, steps: bool = False) -> None:
    """Every process has a clock of its own, and the store has another."""
    world, chance = scene.world, scene.chance
    world.coarse = chance.random() < 0.3
    for setting in scene.settings:
        setting.clocks = lambda role: draw_clock(chance, world.now, role, steps=steps)
        setting.ages = setting.watch.fenced = True


def _clock_steps(scene: Scene) -> None:
    """Clocks are set while processes run."""
    _clocks(scene, steps=True)


# ---- names that nobody here gives ----------------------------------------------------------------

_ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
ALIASES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"/generations/\d+/", lambda found: found[0].replace("generations/", "generations/0")),
    (r"/generations/\d+/", lambda found: found[0].translate(_ARABIC)),
    (r"/generations/", "/Generations/"),
    (r"/checkpoint-\d+/", lambda found: f"/checkpoint-{int(found[0][12:-1])}/"),
    (r"/checkpoint-\d+/", lambda found: found[0].replace("-", "-0")),
    (r"/checkpoint-\d+/", lambda found: found[0].translate(_ARABIC)),
    (r"/checkpoint-\d+/", lambda found: found[0].replace("c", "C")),
    (r"/checkpoint-\d+/", lambda found: found[0][:-1] + "./"),
    (r"/checkpoint-\d+/", lambda found: found[0][:-1] + " /"),
    (r"/checkpoint-\d+/", lambda found: "/backup" + found[0]),
    (r"/epoch-\d+\.record", lambda found: f"/epoch-{int(found[0][7:-7])}.record"),
    (r"/epoch-\d+\.record", lambda found: found[0].replace("-", "-0")),
    (r"/epoch-\d+\.record", lambda found: found[0] + ".bak"),
    (r"/operator-[^/]+/", lambda found: found[0].replace("o", "O", 1)),
    (r"/operator-[^/]+/", lambda found: found[0] + "my-backup/"),
    (r"/operator-[^/]+/", lambda found: found[0] + "operator-x/"),
    (r"/table-", "/TABLE-"),
    (r"/table-[^/]*", lambda found: found[0] + "."),
    (r"/checkpoint-manifest\.pb", "/checkpoint-manifest.pb.old"),
)
"""How users' copies are named: what is replaced by what."""


def second_names(names: Iterable[str], chance: random.Random) -> dict[str, str]:
    """Names for copies of some objects that lie together: new name to old."""
    pattern, new = chance.choice(ALIASES)
    found = {name: match for name in names if (match := re.search(pattern, name))}
    if not found:
        return {}
    one = chance.choice(sorted(found))
    together = one[: found[one].end()]
    whole = chance.random() < 0.5
    return {
        re.sub(pattern, new, name, count=1): name
        for name in found
        if (whole and name.startswith(together)) or name == one
    }


def _names(scene: Scene) -> None:
    """Users have put copies beside what is ours, or put them there meanwhile."""
    world, chance = scene.world, scene.chance
    for setting in scene.settings:
        setting.watch.foreign = scene.watches.foreign
        its = [path for path in world.below(setting.watch.place) if OURS not in path]
        for _ in range(chance.choice((1, 1, 2, 3))):
            copies = second_names(its, chance)
            copies = {new: old for new, old in copies.items() if new not in world.objects}
            scene.watches.foreign.update(copies)
            objects = {new: _aged(world, world.objects[old], chance) for new, old in copies.items()}
            if chance.random() < 0.7:
                world.add(objects)
            else:
                scene.more.append(_admin(world, objects))


def _aged(world: World, found: tuple[bytes, int, int], chance: random.Random) -> Any:
    """A copy keeps its time, or has that of copying."""
    return found[0], chance.choice((found[1], world.now - 5 * DAY, world.now)), 0


def _admin(world: World, objects: Objects) -> Process:
    def work(process: Process) -> str:
        hands = Hands(world, process)
        for path, (data, _, _) in objects.items():
            hands.put(path, data)  # type: ignore[arg-type]
        return "copied"

    return Process("admin", "admin", work)


# ---- links ---------------------------------------------------------------------------------------

ELSEWHERE = "elsewhere/private"


def _links(scene: Scene) -> None:
    """On a local disk a second name leads to what is ours, or a name below ours elsewhere."""
    world, chance = scene.world, scene.chance
    world.follows = LINKS == "followed"
    place = chance.choice(scene.settings).watch.place
    kind = chance.choice(("out", "out", "alias", "number", "job"))
    files = [one for one in world.below(place) if "/operator-" in one and OURS not in one]
    if not files:
        return
    directory = chance.choice(files).partition("/operator-")[0]
    if kind == "out":
        old = world.now - 5 * DAY
        theirs = [f"{ELSEWHERE}/{name}" for name in ("table-g-000", "table-t-000", "metadata")]
        world.add(dict.fromkeys(theirs, (b"a user's", old, 0)))
        scene.watches.foreign.update(theirs)
        world.links[f"{directory}/operator-evil"] = ELSEWHERE
    elif kind == "job":
        root = place[:-1]
        world.links[f"{root}2"] = root
        at = next(i for i, one in enumerate(scene.settings) if one.watch.place == place)
        setting = _other_name(scene, at, "2")
        for make in (setting.orphans, setting.expiry, setting.removal):
            scene.more.append(make())
            scene.more[-1].root = root
    else:
        # The directory of a generation, or of an epoch where there are none.
        found = re.match(r"(.+/generations/)(\d+)", directory)
        found = found or re.match(r"(.+/checkpoint-)(\d+)", directory)
        assert found is not None
        unused = "0" + found[2] if kind == "alias" else "0" * (len(found[2]) - 1) + "0"
        if not world.below(f"{found[1]}{unused}/"):
            world.links[found[1] + unused] = found[0]


# ---- stores --------------------------------------------------------------------------------------


def _unconditional(scene: Scene) -> None:
    """The store ignores conditions: `create` writes over what is there."""
    scene.world.conditional = False


def _versions(scene: Scene) -> None:
    """Listings show versions: of what was deleted, and of what was written over."""
    world = scene.world
    world.versions = {}
    for base, setting in zip(scene.bases, scene.settings, strict=True):
        world.versions |= {setting.url + path: one for path, one in base.versions.items()}
    world.shows_versions = True


# ---- copies, and other roots ---------------------------------------------------------------------


def _below(world: World, place: str, to: str, chance: random.Random) -> Objects:
    """Copies of what lies below a place, with their times or with that of copying."""
    kept = chance.random() < 0.5
    found = ((path, world.objects[path]) for path in world.below(place))
    return {
        to + path[len(place) :]: (data, modified if kept else world.now, 0)
        for path, (data, modified, _) in found
    }


def _copy_of_root(scene: Scene) -> None:
    """All of the job was copied to another URL, and there it goes on as well."""
    world, url = scene.world, scene.chance.choice(("copy/", "pl_1/copy/", "copy/of/all/"))
    place = scene.settings[0].watch.place
    world.add(_below(world, place, url + place, scene.chance))
    scene.watches.inner[url + place] = url
    scene.settings.append(scene.make_setting(scene.bases[0], url))
    scene.bases.append(scene.bases[0])
    _sweeps(scene)


def _nested_root(scene: Scene) -> None:
    """Below the URL lies that of another deployment."""
    from tests.explorer.schedules import BASES, KINDS, base_of

    world, chance = scene.world, scene.chance
    base = base_of(chance.choice(KINDS), chance.randrange(BASES))
    root = scene.bases[0].root
    url = chance.choice(("sub/dir/", "sub/", "pl_1/", "job_10/", f"{root}/", f"{root}/sub/"))
    place = f"{url}{base.root}/"
    taken = {one.watch.place for one in scene.settings}
    if world.below(place) or place in taken:
        return
    its = {path: one for path, one in base.objects.items() if path.startswith(f"{base.root}/")}
    world.add({url + path: one for path, one in its.items()})
    world.now = max(world.now, base.now)
    scene.watches.inner[place] = url
    scene.settings.append(scene.make_setting(base, url))
    scene.bases.append(base)
    _sweeps(scene)


def _sweeps(scene: Scene) -> None:
    """Somebody collects every job that is found below the outer URL."""
    world, chance = scene.world, scene.chance

    def known() -> dict[str, Setting]:
        return {one.watch.root: one for one in (*scene.renamed, *scene.settings) if not one.url}

    for _ in range(chance.choice((1, 1, 2))):
        kind = chance.choice(("expiry", "orphans", "removal", "removal"))
        work = ours.sweep(world, known, kind, chance)
        scene.more.append(Process(f"{kind} of all", "collector", work))


def _renamed_copy(scene: Scene) -> None:
    """All of the job was copied under another name, and is named as it was within."""
    world, chance = scene.world, scene.chance
    at = chance.randrange(len(scene.settings))
    root = scene.settings[at].watch.root
    name = chance.choice(("2", "-copy"))
    objects = _below(world, f"{root}/", f"{root}{name}/", chance)
    setting = _other_name(scene, at, name)
    makers = [*setting.makers(), setting.orphans, setting.expiry, setting.removal]
    if chance.random() < 0.3:
        scene.more.append(_admin(world, objects))
    else:
        world.add(objects)
        if setting.controller is None:
            makers += [setting.writer] * 5
    for _ in range(chance.choice((1, 2, 3))):
        make = chance.choice(makers)
        scene.more.append(make(2) if make == setting.writer else make())


def _other_name(scene: Scene, at: int, name: str) -> Setting:
    """A job under its other name: nothing is promised of that, all of the first."""
    world, first = scene.world, scene.settings[at]
    old = first.paths
    paths = JobPaths(JobId(old.job + name), old.pipeline and PipelineId(old.pipeline))
    # A copy of a job without epochs is a new job, whose own retention expires what it writes.
    keep = first.watch.keep
    watch = Watch(world.objects, str(paths.root), first.watch.protocol, ours=False, keep=keep)
    watch.clock, watch.by_arroyo = world.clock, world.taken_by_arroyo
    watch.foreign = scene.watches.foreign
    controller = first.controller and replace(first.controller.copied(), paths=paths)
    job = replace(first.job, paths=paths, known=False)
    setting = Setting(world, watch, job, controller, scene.chance)
    scene.renamed.append(setting)
    scene.watches.of += (watch,)
    return setting


# ---- edits ---------------------------------------------------------------------------------------


def _before_an_edit(setting: Setting, chance: random.Random) -> None:
    """A compaction that waits for the writer, or a pin of the epoch that is edited."""
    watch, protocol = setting.watch, setting.paths.pipeline is not None
    if setting.controller is None and protocol and chance.random() < 0.4:
        setting.world.run([setting.compaction()])
    elif watch.epochs and chance.random() < 0.2:
        setting.world.run([setting.pin(max(watch.epochs))])


def _edits(scene: Scene) -> None:
    """People edit the state, before the schedule and in it, and undo what they have edited."""
    world, chance = scene.world, scene.chance
    ours.inhabit(world)
    for setting in scene.settings:
        if setting.controller is not None:
            setting.controller.condition = JobCondition.STOPPED
        makers = [setting.editing, setting.editing, setting.undoing]
        if chance.random() < 0.6:
            _before_an_edit(setting, chance)
            world.run([setting.editing(chance, fault=chance.random() < 0.3)])
            world.jump(chance.choice((90 * SECOND, 2 * HOUR, 4 * DAY)))
            makers += [setting.undoing] * 3
        for _ in range(chance.choice((1, 1, 2, 3))):
            make = chance.choice(makers)
            scene.more.append(make(chance, fault=chance.random() < 0.3))


def _rescales(scene: Scene) -> None:
    """Somebody starts Arroyo jobs at another parallelism, and has their files split for that."""
    world, chance = scene.world, scene.chance
    ours.inhabit(world)
    for setting in scene.settings:
        if setting.controller is None:
            continue
        setting.controller.condition = JobCondition.STOPPED
        makers = [setting.rescaling, setting.rescaling, setting.undoing]
        if chance.random() < 0.5:
            world.run([setting.rescaling(chance, fault=chance.random() < 0.4)])
            world.jump(chance.choice((90 * SECOND, 2 * HOUR, 4 * DAY)))
        for _ in range(chance.choice((1, 2, 3))):
            make = chance.choice(makers)
            scene.more.append(make(chance, fault=chance.random() < 0.3))


def _forks(scene: Scene) -> None:
    """A stopped Arroyo job takes over the state of another one, which may run."""
    from tests.explorer.schedules import BASES_BESIDE, OF_ARROYO, TARGETS, base_of

    world, chance = scene.world, scene.chance
    source = next((one for one in scene.settings if one.controller is not None), None)
    paths = chance.choice(TARGETS)
    taken = {one.watch.place for one in scene.settings}
    if (
        source is None
        or source.controller is None
        or any(one.startswith(f"{paths.root}/") for one in taken)
    ):
        return
    kind = next(one for one in OF_ARROYO if one.endswith(paths.layout.value))
    bases = [base_of(kind, number, paths) for number in range(BASES_BESIDE)]
    alike = [one for one in bases if one.retention == source.controller.retention]
    base = chance.choice(alike if alike and chance.random() < 0.9 else bases)
    place = f"{base.root}/"
    if world.below(place):
        return
    world.add({path: one for path, one in base.objects.items() if path.startswith(place)})
    world.now = max(world.now, base.now)
    target = scene.make_setting(base, "")
    scene.settings.append(target)
    scene.bases.append(base)
    ours.inhabit(world)
    assert source.watch.truth is not None
    assert target.controller is not None
    source.watch.truth.remember_all(world.below(source.watch.place))
    target.controller.condition = JobCondition.STOPPED
    makers = [target.undoing]

    def forking(chance: random.Random, *, fault: bool = False) -> Process:
        return target.forking(source, chance, fault=fault, epoch=chance.random() < 0.3)

    if chance.random() < 0.5:
        world.run([forking(chance, fault=chance.random() < 0.4)])
        world.jump(chance.choice((90 * SECOND, 2 * HOUR, 4 * DAY)))
        makers += [target.undoing]
    makers += [forking, forking]
    for _ in range(chance.choice((1, 2, 3))):
        make = chance.choice(makers)
        scene.more.append(make(chance, fault=chance.random() < 0.3))


def _rollbacks(scene: Scene) -> None:
    """Stopped Arroyo jobs are taken back to an older epoch, and put back."""
    world, chance = scene.world, scene.chance
    ours.inhabit(world)
    for setting in scene.settings:
        watch, controller = setting.watch, setting.controller
        if controller is None or watch.truth is None:
            continue
        watch.truth.remember_all(path for path in watch.objects if path.startswith(watch.root))
        controller.condition = JobCondition.STOPPED
        makers = [setting.taking_back, setting.taking_back, setting.undoing]
        if chance.random() < 0.5:
            world.run([setting.taking_back(chance, fault=chance.random() < 0.4)])
            world.jump(chance.choice((90 * SECOND, 2 * HOUR, 4 * DAY)))
        for _ in range(chance.choice((1, 2, 3))):
            make = chance.choice(makers)
            scene.more.append(make(chance, fault=chance.random() < 0.3))


def _losses(scene: Scene, *, cut: bool = False) -> None:
    """Metadata objects of an epoch of a stopped Arroyo job are lost or cut, and written anew.

    It is mostly the newest epoch. Where it is an older one, nobody starts the job or rebuilds the
    epoch: only collectors meet it.
    """
    world, chance = scene.world, scene.chance
    scene.lasting = False
    ours.inhabit(world)
    admin = Process("admin", "admin", lambda process: None)
    for setting in scene.settings:
        watch, controller = setting.watch, setting.controller
        if controller is None or not watch.epochs or watch.truth is None:
            continue
        controller.condition = JobCondition.STOPPED
        epoch = max(watch.epochs)
        if chance.random() < 0.3:
            epoch = chance.choice(sorted(watch.epochs)[-4:])
        needs = sorted(watch.epochs[epoch])
        kinds = PROTOBUF if cut else METADATA
        losable = [one for one in needs if one.endswith(kinds) and one in watch.objects]
        for path in chance.sample(losable, chance.choice((1, 1, 1, min(2, len(losable))))):
            data = watch.objects[path][0]
            if cut:
                left = data[: chance.choice(field_ends(data))]
                watch.truth.lose(path, left)
                world.cut_off(setting.url + path, left)
                continue
            watch.truth.lose(path)
            world.lost.add(setting.url + path)
            world.remove(admin, setting.url + path)
            world.taken_by_arroyo.add(setting.url + path)
        if epoch != max(watch.epochs):
            world.held.add(setting.url + watch.place)
            continue
        if chance.random() < 0.4:
            world.run([setting.rebuilding(epoch, fault=chance.random() < 0.5)])
            world.jump(chance.choice((90 * SECOND, 2 * HOUR, 4 * DAY)))
        for _ in range(chance.choice((1, 2, 3))):
            undo = chance.random() < 0.3
            scene.more.append(setting.rebuilding(epoch, undo=undo, fault=chance.random() < 0.3))


def _cuts(scene: Scene) -> None:
    """As `_losses`, but a part of each object is left: protobuf that decodes."""
    _losses(scene, cut=True)


# ---- all of them ---------------------------------------------------------------------------------

FEATURES: dict[str, Callable[[Scene], None]] = {
    "a copy of the root": _copy_of_root,
    "a copy under another name": _renamed_copy,
    "a root below the root": _nested_root,
    "foreign names": _names,
    "links": _links,
    "no conditional create": _unconditional,
    "listings of versions": _versions,
    "several clocks": _clocks,
    "clocks that are set": _clock_steps,
    "edits": _edits,
    "rescales": _rescales,
    "forks": _forks,
    "rollbacks": _rollbacks,
    "lost metadata": _losses,
    "cut metadata": _cuts,
}

OF_ARROYO_JOBS = frozenset({"rescales", "forks", "rollbacks", "lost metadata", "cut metadata"})
"""Features of Arroyo jobs alone."""

CHANGES_OF_ROWS = frozenset({"edits", "forks", "rollbacks"})
SURGERY = CHANGES_OF_ROWS | OF_ARROYO_JOBS
"""Features after which verification must find no error."""

ALONE = ("links", "no conditional create", "lost metadata", "cut metadata")
"""Features that the product answers by refusing, which the model does not follow beside others."""


def features_of(seed: int) -> tuple[str, ...]:
    """The features of the schedule of a seed."""
    chance = random.Random(f"features of {seed}")
    if chance.random() >= SHARE:
        return ()
    pairs = [one for one in FEATURES if one not in ALONE]
    chosen = chance.sample(pairs, 2) if chance.random() < 0.2 else chance.sample([*FEATURES], 1)
    return tuple(one for one in FEATURES if one in chosen)


def set_up(scene: Scene, names: Iterable[str]) -> None:
    """Let a schedule have these features."""
    for name in names:
        FEATURES[name](scene)


def may_finish(scene: Scene) -> bool:
    """Whether jobs must be able to go on days later, and to be collected."""
    places = [one.watch.place for one in scene.settings]
    inner = scene.watches.inner
    overlap = any(one.startswith(place) and one != place for one in inner for place in places)
    return scene.world.conditional and scene.lasting and not overlap


def set_right(scene: Scene) -> None:
    """Somebody repairs what can be: clocks are right, users' copies and links are gone, listings
    show what is there."""
    world = scene.world
    world.links.clear()
    world.shows_versions = False
    for setting in scene.settings:
        setting.clocks = lambda role: None
    admin = Process("admin", "admin", lambda process: None)
    for path in sorted(scene.watches.foreign):
        world.remove(admin, path)
