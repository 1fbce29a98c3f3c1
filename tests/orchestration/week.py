"""A simulated deployment: processes that take turns at each call of a store, on a simulated clock.

Every process is a thread, and exactly one runs. At each call of the store, and at each sleep, it
hands over to the process whose time comes next. A process may be killed at any call: it then does
nothing more, and what it held stays held.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from arroyo_dagster.state.metadata import lease as leases
from arroyo_dagster.state.metadata import lease_records
from arroyo_dagster.state.operations.gc import plan as gc_plan
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.wrappers import Wrapper
from tests.faulty_stores import Crash

T = TypeVar("T")
SECOND = 1_000_000
HOUR = 3600 * SECOND
PATIENCE_SECONDS = 300.0
"""How long one turn may take on this machine."""


@dataclass(order=True)
class Turn:
    """When a process goes on."""

    at_micros: int
    number: int
    process: Process = field(compare=False)


class Process:
    """One process of the simulation.

    Attributes:
        dies_at: the number of the call of the store at which it is killed; None = it lives.
        outcome: what its work returned; None while it runs, and if it was killed.
        error: what ended it, apart from a kill.
    """

    def __init__(
        self, world: World, name: str, work: Callable[[Process], Any], dies_at: int | None
    ) -> None:
        self.world = world
        self.name = name
        self.dies_at = dies_at
        self.calls = 0
        self.killed = False
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self._go = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._wait()
        try:
            self.outcome = self._work(self)
        except Crash:
            self.killed = True
        except BaseException as error:
            self.error = error
        self.ended = True
        self.world.back.set()

    def _wait(self) -> None:
        self._go.wait()  # without a limit: hundreds of others may have their turn first
        self._go.clear()

    def resume(self) -> None:
        """Let it run until it hands over; called by the world."""
        self._go.set()
        assert self.world.back.wait(PATIENCE_SECONDS), f"{self.name} hangs"
        self.world.back.clear()

    def pause(self, micros: int) -> None:
        """Hand over for so long."""
        if threading.current_thread() is not self._thread:
            return  # a helper of this process, which waits for it
        self.world.schedule(self, micros)
        self.world.back.set()
        self._wait()

    def called(self) -> None:
        """Take the time of a call of the store, and die there if that is its fate.

        Raises:
            Crash: it is dead.
        """
        self.calls += 1
        if self.killed or (self.dies_at is not None and self.calls >= self.dies_at):
            self.killed = True
            raise Crash(self.name)
        self.pause(self.world.chance.randrange(5_000, 60_000))


class World:
    """The clock and the processes.

    Args:
        start_micros: since 1970.
    """

    def __init__(self, seed: int, start_micros: int) -> None:
        self.now_micros = start_micros
        self.chance = random.Random(seed)
        self.back = threading.Event()
        self.current: Process | None = None
        self.processes: list[Process] = []
        self._turns: list[Turn] = []
        self._numbers = iter(range(10**9))

    def clock(self) -> int:
        """The simulated time, in microseconds since 1970."""
        return self.now_micros

    def sleep(self, seconds: float) -> None:
        """Let the process that runs sleep."""
        assert self.current is not None
        self.current.pause(int(seconds * SECOND))

    def start(
        self, name: str, work: Callable[[Process], Any], *, dies_at: int | None = None
    ) -> Process:
        """Start a process, which runs from now on."""
        found = Process(self, name, work, dies_at)
        self.processes.append(found)
        self.schedule(found, self.chance.randrange(0, 2 * SECOND))
        return found

    def schedule(self, process: Process, micros: int) -> None:
        """Let a process go on after a time."""
        heapq.heappush(self._turns, Turn(self.now_micros + micros, next(self._numbers), process))

    def run_until(self, end_micros: int) -> None:
        """Let all processes run until a time."""
        while self._turns and self._turns[0].at_micros <= end_micros:
            turn = heapq.heappop(self._turns)
            self.now_micros = max(self.now_micros, turn.at_micros)
            self.current = turn.process
            turn.process.resume()
            self.current = None
        self.now_micros = max(self.now_micros, end_micros)

    @property
    def busy(self) -> bool:
        """Whether a process has not ended."""
        return bool(self._turns)


class InTurns(Wrapper):
    """The store of one process: each call is a turn."""

    process: Process

    def open_input(self, path: Any) -> Any:
        self.process.called()
        return self.inner.open_input(path)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        self.process.called()
        return action()


def store_of(process: Process, store: MemoryStore) -> InTurns:
    """The store as one process sees it."""
    found = InTurns(store)
    found.process = process
    return found


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """Let leases be of the simulated processes, and wait on the simulated clock."""

    def process_here() -> str:
        return "the test" if world.current is None else world.current.name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc_plan, "wall_clock", world.clock)
        for module in (leases, lease_records):
            patch.setattr(module, "process_here", process_here)
        defaults = leases.LeaseOptions.__init__.__kwdefaults__
        changed = {**defaults, "sleep": world.sleep, "clock": world.clock, "ticks": world.clock}
        patch.setattr(leases.LeaseOptions.__init__, "__kwdefaults__", changed)
        yield
