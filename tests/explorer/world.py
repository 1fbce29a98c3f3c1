"""A world of a few processes on one store, in which a seed decides everything.

Every process is ordinary code in a thread of its own; one holds the baton at a time. Before each
call of the store the seed decides who goes on, whether the process dies there, whether the store
fails, and how much time goes by. Nothing waits: time is a number.
"""

from __future__ import annotations

import bisect
import functools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from arroyo_dagster.errors import ConflictError, InputError, NotFoundError, StorageError
from arroyo_dagster.state import StatePath
from arroyo_dagster.state.storage import names
from arroyo_dagster.state.storage.store import open_by_ranges
from tests.faulty_stores import Crash
from tests.stores import MUTATING, DeleteOutcome, Listing, ObjectInfo

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
REQUEST = 5 * SECOND
"""No request takes longer than this: what a lease's margin is for."""

STILL = HOUR // 2
"""A writer that stands still for longer is taken for dead once another starts (see `publish`)."""

STEPS = (-DAY, -HOUR, -70 * SECOND, 70 * SECOND, HOUR, DAY)
"""By how much somebody sets a clock."""

WRITERS = ("writer", "arroyo")
"""Roles of those that write epochs."""

LEASE = "/_arroyo_dagster/leases/0"
"""In the path of every lease of a job's maintainers."""

Object = tuple[bytes, int, int]
"""Bytes, when it was written, and a number that no other has."""

Objects = dict[str, Object]


class Within:
    """The objects, or names, below a URL of its own, by their paths from there."""

    def __init__(self, whole: Any, url: str) -> None:
        self._whole, self._url = whole, url

    def __contains__(self, path: object) -> bool:
        return f"{self._url}{path}" in self._whole

    def __getitem__(self, path: str) -> Object:
        return self._whole[self._url + path]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        cut = len(self._url)
        return (path[cut:] for path in self._whole if path.startswith(self._url))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, path: str) -> Object | None:
        return self._whole.get(self._url + path)  # type: ignore[no-any-return]

    def keys(self) -> set[str]:
        return {*self}

    def items(self) -> Iterator[tuple[str, Object]]:
        return ((path, self[path]) for path in self)

    def issuperset(self, paths: Iterable[str]) -> bool:
        return all(path in self for path in paths)


@dataclass
class Clock:
    """The clock of one host: off by something, and by more from day to day.

    Attributes:
        since: the time at which it is off by `offset_micros`.
        drift: by how much it gains, as a share of the time that goes by.
        steps: whether somebody sets it, now and then.
    """

    offset_micros: int = 0
    since: int = 0
    drift: float = 0.0
    steps: bool = False

    def reading(self, now: int) -> int:
        """What it shows."""
        return now + self.offset_micros + int((now - self.since) * self.drift)

    def monotonic(self, now: int) -> int:
        """What counts the time there, which nobody sets."""
        return now + int((now - self.since) * self.drift)


class Violation(AssertionError):
    """Something that must stay was taken away, or changed."""


@dataclass(eq=False)
class Process:
    """Something that uses the store.

    Attributes:
        role: `writer`, `arroyo`, `rewriter` or `collector`: whose changes count as what.
        url: where the URL that it was given begins: a prefix of full paths, with a slash.
        root: of the job that it does something to, in full.
        clock: of its host; None: it shows the store's time.
        token: the number of the lease that it took last; 0 for none.
        fault_at: the call at which something happens to it; None for none.
        fault_on: instead: the first change of an object with this in its path.
        fault: `crash`, `crash-after`, `fail`, `fail-after`, `half` or `throttled`.
        ended_at: when it ended.
        still: whether it has stood still for long.
        runs, followed: whether it has started a run, and whether a later one was started since.
    """

    name: str
    role: str
    work: Callable[[Process], Any]
    root: str = ""
    url: str = ""
    clock: Clock | None = None
    token: int = 0
    fault_at: int | None = None
    fault: str = "crash"
    fault_on: str | None = None
    calls: int = 0
    pending: str = ""
    on_its_way: Callable[[], Any] | None = None
    arrived: list[Any] = field(default_factory=list)
    dead: bool = False
    ended: bool = False
    ended_at: int = 0
    still: bool = False
    runs: bool = False
    followed: bool = False
    through: bool = False
    result: Any = None
    error: BaseException | None = None
    renewals: list[Callable[[], None]] = field(default_factory=list)
    seat: _Seat | None = None


class _Seat(threading.Thread):
    """A thread that runs one process after the other; its lock is the baton handed to it."""

    def __init__(self) -> None:
        super().__init__(name="explorer", daemon=True)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.run_next: Callable[[], None] = lambda: None
        self.start()

    def run(self) -> None:
        while True:
            self.baton.acquire()
            self.run_next()


_SEATS: list[_Seat] = []
os.register_at_fork(after_in_child=_SEATS.clear)  # a child has the objects, and no threads


class World:
    """A store, a clock, and who uses them.

    Args:
        watch: told of every change: the process, the verb, the path, what was there before.

    Time is the store's: hosts have clocks of their own, if the seed gives them one.

    Attributes:
        taken_by_arroyo: what Arroyo's own cleaning up has deleted.
        lost: metadata that was lost once.
        cut: metadata that was cut once, with what was left of it.
        held: jobs that nobody starts, since metadata of an older epoch is lost or cut.
        coarse: whether the store tells times in whole seconds.
        conditional: whether `create` leaves alone what is there.
        links: names below which the objects of another name appear, as links on a disk do.
        follows: whether links are followed; else each is listed as one object that no path leads
            to, and nothing is listed or changed through it: only read.
        versions: what deleted and overwritten objects were, where anybody keeps that; else None.
        shows_versions: whether listings show them.
    """

    def __init__(
        self,
        objects: Objects,
        now_micros: int,
        chance: random.Random,
        watch: Callable[[Process, str, str, Object | None], None] = lambda *_: None,
    ) -> None:
        self.objects = objects
        self.now = now_micros
        self.chance = chance
        self.watch = watch
        self._names = sorted(objects)
        self.number = max((one[2] for one in objects.values()), default=0)
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.violation: Violation | None = None
        self.trace: list[str] | None = None
        self.taken_by_arroyo: set[str] = set()
        self.lost: set[str] = set()
        self.cut: dict[str, bytes] = {}
        self.held: set[str] = set()
        self.page = 1000
        self.cut_listings = False
        self.coarse = False
        self.conditional = True
        self.links: dict[str, str] = {}
        self.follows = True
        self.versions: dict[str, Object] | None = None
        self.shows_versions = False
        self._versions: list[str] = []
        self._left = 0
        self._paused: Process | None = None
        self._bursts: Sequence[int] = (10_000,)
        self._jumps = 0.0
        self._over = threading.Lock()
        self._over.acquire()

    # ---- time ------------------------------------------------------------------------------------

    def clock(self) -> int:
        """Microseconds, by the store's clock."""
        return self.now

    def clock_of(self, process: Process) -> Callable[[], int]:
        """Microseconds, by the clock of a process."""
        return lambda: self.now if process.clock is None else process.clock.reading(self.now)

    def time_here(self, *, monotonic: bool = False) -> int:
        """Microseconds, by the clock of whoever is at work."""
        clock = None if self.current is None else self.current.clock
        if clock is None:
            return self.now
        return clock.monotonic(self.now) if monotonic else clock.reading(self.now)

    def jump(self, micros: int, processes: Iterable[Process] = ()) -> None:
        """Let time go by. Who stands still meanwhile does not renew its leases."""
        self.now += micros
        self.note(f"{micros / SECOND:.0f} seconds go by")
        for process in processes:
            if process.ended or process.dead:
                continue
            if process.clock is not None and process.clock.steps and self.chance.random() < 0.3:
                process.clock.offset_micros += self.chance.choice(STEPS)
            if process.renewals and self.chance.random() < 0.5:
                before, self.current = self.current, process
                process.through = True
                for renew in process.renewals:
                    renew()
                process.through = False
                self.current = before
            elif micros >= STILL:
                process.still = True
                process.dead = process.followed

    def _maybe_jump(self) -> None:
        if self.chance.random() >= self._jumps:
            return
        # The request of a lease's holder that is on its way arrives in time.
        if any(one.pending in MUTATING and one.renewals for one in self.processes):
            return
        micros = self.chance.choice((25 * SECOND, 70 * SECOND, 70 * SECOND, 2 * HOUR, 4 * DAY))
        self.jump(micros, self.processes)

    def started(self, process: Process) -> None:
        """A writer has raised the fence: older ones that stood still are dead by now, and those
        that will stand still from now on are dead then.
        """
        process.runs = True
        for one in self.processes:
            if one is not process and one.root == process.root and one.role in WRITERS:
                one.followed = one.runs
                one.dead = one.dead or one.still

    def wait(self, process: Process, seconds: float) -> None:
        """A process waits; if for longer than any request takes, all have arrived then."""
        micros = int(seconds * SECOND)
        self.jump(micros, [one for one in self.processes if one is not process])
        if micros > REQUEST:
            self.wait_for_requests(process)

    def wait_for_requests(self, process: Process) -> None:
        """A run that has just been scheduled writes nothing for some seconds: what others have sent
        to the store arrives before that, or never.
        """
        for one in self.processes:
            if one is process or one.root != process.root or one.on_its_way is None:
                continue
            if one.fault_on is not None or one.fault_at == one.calls:
                one.dead = True
            else:
                self.note(f"{one.name}: its request arrives")
                one.arrived.append(one.on_its_way())
                one.on_its_way = None

    # ---- who goes on -----------------------------------------------------------------------------

    def run(
        self,
        processes: Sequence[Process],
        bursts: Sequence[int] = (10_000,),
        jumps: float = 0.0,
        pause: int | None = None,
    ) -> None:
        """Run all to their ends.

        Args:
            bursts: for how many calls one goes on before somebody else may.
            jumps: how likely time goes by where one stops.
            pause: the first one stops after so many calls, and goes on when all others have ended.
        """
        self.processes = list(processes)
        self._bursts, self._jumps, self._paused = bursts, jumps, None
        while len(_SEATS) < len(self.processes):
            _SEATS.append(_Seat())
        for process, seat in zip(self.processes, _SEATS, strict=False):
            process.seat = seat
            seat.run_next = self._body(process)
        if pause is None:
            self._hand_on(None)
        else:
            self._paused, self._left = self.processes[0], pause
            self._give(self.processes[0])
        self._over.acquire()
        self.current = None
        if self.violation is not None:
            raise self.violation
        for process in self.processes:
            if process.error is not None:
                raise process.error

    def _body(self, process: Process) -> Callable[[], None]:
        def run() -> None:
            try:
                if not process.dead:
                    process.result = process.work(process)
            except Crash:
                process.result = "crashed"
            except Violation as found:
                self.violation = self.violation or found
            except BaseException as error:
                process.error = error
            process.ended, process.ended_at = True, self.now
            process.pending = ""
            self.note(f"{process.name} has ended: {process.result}")
            self._hand_on(process)

        return run

    def _hand_on(self, ended: Process | None) -> None:
        waiting = [one for one in self.processes if not one.ended]
        if not waiting:
            self._over.release()
            return
        if self.violation is not None:
            for one in waiting:
                one.dead = True
        self._left = self.chance.choice(self._bursts)
        self._give(self._next(waiting))

    def _next(self, waiting: list[Process]) -> Process:
        others = [one for one in waiting if one is not self._paused]
        return self.chance.choice(others or waiting)

    def _give(self, process: Process) -> None:
        self.current = process
        assert process.seat is not None
        process.seat.baton.release()

    def _stop_here(self, process: Process) -> None:
        """Let others go first, if the seed says so."""
        self._left -= 1
        if self._left > 0:
            return
        self._left = self.chance.choice(self._bursts)
        self._maybe_jump()
        waiting = [one for one in self.processes if not one.ended]
        chosen = self._next(waiting)
        if chosen is not process:
            self._give(chosen)
            assert process.seat is not None
            process.seat.baton.acquire()

    # ---- calls -----------------------------------------------------------------------------------

    def call(self, process: Process, verb: str, path: str, action: Callable[[], Any]) -> Any:
        """One call of the store by a process."""
        if process.through:
            return action()
        if process.dead:
            raise Crash(process.name)
        process.calls += 1
        if len(self.processes) > 1:
            process.pending = verb
            process.on_its_way = action if verb in MUTATING else None
            self._stop_here(process)
            process.pending, process.on_its_way = "", None
            if process.dead:
                raise Crash(process.name)
            if process.arrived:
                return process.arrived.pop()
        self.now += 1000
        if process.fault_on is not None and process.fault_on in path and verb in MUTATING:
            process.fault_on, process.fault_at = None, process.calls
        if process.fault_at == process.calls:
            return self._faulty(process, verb, path, action)
        if self.trace is not None:
            self.note(f"{process.name} {verb} {path}")
        return action()

    def _faulty(self, process: Process, verb: str, path: str, action: Callable[[], Any]) -> Any:
        fault = process.fault
        if fault in ("half", "throttled"):
            return action()  # of deletions only; see `Hands.delete_many`
        self.note(f"{process.name} {verb} {path}: {fault}")
        if fault in ("crash-after", "fail-after"):
            action()
        if fault.startswith("crash"):
            process.dead = True
            raise Crash(process.name)
        raise StorageError(f"injected fault in {verb}", path=path, retryable=True)

    def note(self, text: str) -> None:
        """Write down what happens, where somebody wants to know."""
        if self.trace is not None:
            self.trace.append(f"{self.now / SECOND:.3f} {text}")

    def write(self, process: Process, verb: str, path: str, data: bytes) -> None:
        """Change an object."""
        before = self.objects.get(path)
        self.number += 1
        if self.trace is not None:
            self.note(f"  {path} is written")
        if before is None:
            bisect.insort(self._names, path)
        modified = self.now - self.now % SECOND if self.coarse else self.now
        self.objects[path] = (bytes(data), modified, self.number)
        if self.versions is not None and before is not None:
            self.versions[path] = before
        self.taken_by_arroyo.discard(path)
        leased = verb == "create" and "/_arroyo_dagster/writers/" in path
        if verb == "create" and LEASE in path:
            process.token = int(path.rpartition("/")[2].partition(".")[0])
        if leased or path.endswith("/current-generation.json"):
            self.started(process)
        self.watch(process, verb, path, before)

    def remove(self, process: Process, path: str) -> None:
        """Remove an object."""
        before = self.objects.pop(path, None)
        if before is not None:
            del self._names[bisect.bisect_left(self._names, path)]
            if self.versions is not None:
                self.versions[path] = before
            if process.role == "arroyo":
                self.taken_by_arroyo.add(path)
            self.note(f"  {path} is gone")
            self.watch(process, "delete", path, before)

    def cut_off(self, path: str, data: bytes) -> None:
        """Leave only a part of an object there, with the time that it has."""
        _, modified, number = self.objects[path]
        self.objects[path] = (data, modified, number)
        self.cut[path] = data
        self.note(f"  {path} is cut to {len(data)} bytes")

    def add(self, objects: Objects) -> None:
        """Put objects there that nobody has written before the eyes of this world."""
        for path, (data, modified, _) in objects.items():
            self.number += 1
            if path not in self.objects:
                bisect.insort(self._names, path)
            self.objects[path] = (data, modified, self.number)

    def resolved(self, path: str, *, reading: bool) -> str:
        """The name of the object that a path leads to.

        Raises:
            InputError: through a link, which is followed by reads at most.
        """
        for link, target in self.links.items():
            if path.startswith(f"{link}/") or path == link:
                if not self.follows and not reading:
                    raise InputError("a link is never followed", path=path)
                return target + path[len(link) :]
        return path

    def shown(self, prefix: str, after: str = "") -> list[str]:
        """The names that a listing of a directory, or of all, shows, in order."""
        if not self.links and not self.shows_versions:
            return self.below(prefix, after)
        names = {*self.below(prefix, after)}
        if self.shows_versions and self.versions is not None:
            if len(self._versions) != len(self.versions):
                self._versions = sorted(self.versions)
            names.update(_range(self._versions, prefix, after))
        for link, target in self.links.items():
            inside = [link]
            if self.follows:
                inside = [link + one[len(target) :] for one in self.below(f"{target}/")]
            names.update(one for one in inside if one.startswith(prefix) and one > after)
        return sorted(names)

    def below(self, prefix: str, after: str = "") -> list[str]:
        """The names of the objects in a directory, or in all of the store, in order."""
        return _range(self._names, prefix, after)


def _range(names: list[str], prefix: str, after: str) -> list[str]:
    """Those of sorted names that are in a directory, and behind a name."""
    if not prefix:
        return names[bisect.bisect_right(names, after) :]
    first = bisect.bisect_right(names, max(after, prefix))
    return names[first : bisect.bisect_left(names, prefix[:-1] + "0")]


@functools.lru_cache(maxsize=50_000)
def _described(path: str, size: int, modified: int, number: int) -> ObjectInfo:
    return ObjectInfo(
        path=str.__new__(StatePath, path),
        size_bytes=size,
        modified_micros=modified,
        etag=f"v{number}",
    )


try:
    from arroyo_dagster.state.storage.conditional_create import prove_conditional_create
except ImportError:  # a release that takes every store at its word
    prove_conditional_create = None  # type: ignore[assignment]

LINK_NAME: type[names.StoredName] = getattr(names, "LinkName", names.StoredName)
UNADDRESSABLE: Any = {"size_bytes": 0, "modified_micros": 1, "etag": None, "addressable": False}


class Hands:
    """The store, as one process sees it: below the URL that it was given."""

    url = "memory://explored"

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._base = process.url
        if self._base:
            self.url = f"{Hands.url}/{self._base[:-1]}"

    def read(self, path: StatePath) -> bytes:
        return self._world.call(self._process, "read", path, lambda: self._read(path))

    def _at(self, path: str, *, reading: bool = False) -> str:
        """The name of an object in full."""
        if self._base:
            path = self._base + path
        return self._world.resolved(path, reading=reading) if self._world.links else path

    def _read(self, path: str) -> bytes:
        found = self._world.objects.get(self._at(path, reading=True))
        if found is None:
            raise NotFoundError("there is no such object", path=path)
        return found[0]

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        return self.read(path)[start : start + length]

    def open_input(self, path: StatePath) -> BinaryIO:
        found = self.head(path)
        if found is None:
            raise NotFoundError("there is no such object", path=path)
        return open_by_ranges(self, path, found.size_bytes)  # type: ignore[arg-type]

    def put(self, path: StatePath, data: bytes) -> None:
        self._world.call(
            self._process,
            "put",
            path,
            lambda: self._world.write(self._process, "put", self._at(path), data),
        )

    def create(self, path: StatePath, data: bytes) -> bool:
        if not self._world.conditional and prove_conditional_create is not None:
            # As the product's stores do, once a process: such a store never passes.
            prove_conditional_create(self, self._create_now, path)  # type: ignore[arg-type]
        return self._create_now(path, data)

    def _create_now(self, path: StatePath, data: bytes) -> bool:
        return self._world.call(self._process, "create", path, lambda: self._create(path, data))

    def _create(self, path: str, data: bytes) -> bool:
        path = self._at(path)
        if path in self._world.objects and self._world.conditional:
            return False
        if self._process.followed and self._claims_what_has_expired(path):
            self._process.dead = True
            raise Crash(self._process.name)
        self._world.write(self._process, "create", path, data)
        return True

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        return self._world.call(
            self._process, "copy", target, lambda: self._copy(source, target, create)
        )

    def _copy(self, source: StatePath, target: StatePath, create: bool) -> bool:
        data = self._read(source)
        if create:
            return self._create(target, data)
        self._world.write(self._process, "put", self._at(target), data)
        return True

    def _claims_what_has_expired(self, path: str) -> bool:
        """Whether the request has been on its way since before a later run published, and let this
        epoch expire: what is not closed, and what no request takes.
        """
        directory, _, name = path.rpartition("/")
        if not name.endswith(".record"):
            return False
        return any(other > path for other in self._world.below(f"{directory}/"))

    def head(self, path: StatePath) -> ObjectInfo | None:
        return self._world.call(self._process, "head", path, lambda: self._info(path))

    def _info(self, path: str) -> ObjectInfo | None:
        found = self._world.objects.get(self._at(path, reading=True))
        if found is None:
            return None
        return _described(path, len(found[0]), found[1], found[2])

    def _listed(self, path: str) -> tuple[ObjectInfo, ...]:
        """What a listing says of a name: nothing if it went since, as a rule."""
        world = self._world
        if not world.links and not world.shows_versions:
            info = self._info(path)
            return () if info is None else (info,)
        full = self._base + path
        if full in world.links and not world.follows:
            return (ObjectInfo(**UNADDRESSABLE, path=LINK_NAME(path)),)
        info = self._info(path)
        infos = () if info is None else (info,)
        old = world.versions.get(full) if world.shows_versions and world.versions else None
        if old is None or old[2] % 2:
            return infos  # it shows some versions, the same ones every time
        return (*infos, _described(path, len(old[0]), old[1], old[2]))

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Page by page; between two pages anything may happen."""
        world, after = self._world, start_after or ""
        below = f"{prefix}/" if prefix else ""
        while True:
            page = functools.partial(self._page, below, after)
            names = world.call(self._process, "list", prefix, page)
            for name in names:
                yield from self._listed(name)
            if len(names) < world.page:
                return
            after = names[-1]

    def _page(self, below: str, after: str) -> list[str]:
        return self._cut(self._names(below, after)[: self._world.page])

    def _names(self, below: str, after: str = "") -> list[str]:
        base = self._base
        if self._world.links and below:
            self._at(below)
        if not base:
            return self._world.shown(below, after)
        names = self._world.shown(base + below, after and base + after)
        return [name[len(base) :] for name in names]

    def _cut(self, names: list[str]) -> list[str]:
        """A listing that lacks a part, where the seed wants one."""
        if not self._world.cut_listings or self._process.role == "arroyo" or not names:
            return names
        first = self._world.chance.randrange(len(names))
        last = first + self._world.chance.randrange(1, 30)
        return names[:first] + names[last:]

    def list_dir(self, prefix: str = "") -> Listing:
        return self._world.call(self._process, "list_dir", prefix, lambda: self._level(prefix))

    def _level(self, prefix: str) -> Listing:
        below = f"{prefix}/" if prefix else ""
        cut = len(below)
        names = self._names(below)
        if self._world.cut_listings:
            names = self._cut(names)
        here, inside, last = [], [], ""
        for name in names:
            if name.startswith(last) and last:
                continue
            at = name.find("/", cut)
            if at < 0:
                here.append(name)
            else:
                inside.append(name[:at])
                last = name[: at + 1]
        return Listing(
            objects=tuple(info for name in here for info in self._listed(name)),
            prefixes=tuple(str.__new__(StatePath, name) for name in inside),
        )

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        doomed = tuple(paths)
        shown = doomed[0] if doomed else ""
        process, world = self._process, self._world
        if process.fault_at == process.calls + 1 and process.fault in ("half", "throttled"):
            kept = doomed[len(doomed) // 2 :]
            world.call(process, "delete_many", shown, lambda: self._delete(doomed[: -len(kept)]))
            if process.fault == "half":
                process.dead = True
                raise Crash(process.name)
            return DeleteOutcome(
                deleted=doomed[: len(doomed) - len(kept)],
                failed=dict.fromkeys(kept, "SlowDown: reduce your request rate"),
            )
        return world.call(process, "delete_many", shown, lambda: self._delete(doomed))

    def _delete(self, doomed: Sequence[StatePath]) -> DeleteOutcome:
        failed: dict[StatePath, str] = {}
        for path in doomed:
            try:
                self._world.remove(self._process, self._at(path))
            except InputError as error:
                failed[path] = error.message
        gone = tuple(path for path in doomed if path not in failed) if failed else doomed
        return DeleteOutcome(deleted=gone, failed=failed)


def refused(error: Exception) -> str:
    """How a process that gave up is counted."""
    return "conflict" if isinstance(error, ConflictError) else type(error).__name__
