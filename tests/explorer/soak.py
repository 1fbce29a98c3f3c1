"""Schedules without end: other seeds in every run, on every processor.

    python -m tests.explorer.soak --schedules 1000000 [--seed 7] [--feature links]

A violation is printed with its seed; `--show SEED` prints every call that leads to it. The seed of
a run is printed, and can be given again, also as EXPLORER_SEED.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.explorer import ours
from tests.explorer.features import FEATURES
from tests.explorer.schedules import explore
from tests.explorer.world import Violation
from tests.faulty_stores import Crash

SCHEDULES = 100_000
BLOCK = 500
"""So many schedules a process goes through before it reports."""

BLOCKS_PER_PROCESS = 60
"""Then a fresh process goes on, so that memory stays what it is."""

SHOWN = 3
"""So many schedules with the same violation are printed."""

REPORT_SECONDS = 30.0
_MACHINERY = contextlib.ExitStack()
"""Keeps what is replaced in a process."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some schedules: `count` of them, from seed `first` on, all with `features` if any."""

    first: int
    count: int
    features: tuple[str, ...] = ()


@dataclass(slots=True)
class Found:
    """What came of schedules: how processes ended, and what was violated, by seed."""

    schedules: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)
    memory_mb: int = 0

    def add(self, other: Found) -> None:
        self.schedules += other.schedules
        self.endings += other.endings
        self.violations += other.violations
        self.memory_mb = max(self.memory_mb, other.memory_mb)


def go_through(block: Block) -> Found:
    """Go through all schedules of a block, whatever is found."""
    found = Found(schedules=block.count)
    gc.disable()  # a quarter of the time: the states that schedules begin from are a large heap
    for seed in range(block.first, block.first + block.count):
        try:
            found.endings += explore(seed, features=block.features or None)
        except (Exception, Crash) as error:
            found.violations.append((seed, f"{type(error).__name__}: {error}"))
    gc.collect()
    gc.freeze()  # what is left is remembered: later collections need not visit it
    found.memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return found


def _begin() -> None:
    """In a process of its own: replace the machinery for as long as it lives."""
    _MACHINERY.enter_context(ours.replaced_machinery())


def blocks(first: int, count: int, features: tuple[str, ...]) -> Iterator[Block]:
    """The blocks of a run, in order."""
    last = first + count
    for at in range(first, last, BLOCK):
        yield Block(at, min(BLOCK, last - at), features)


def soak(first: int, count: int, processes: int, features: tuple[str, ...]) -> Found:
    """Go through `count` schedules from a seed on; prints how far it is, and what is violated."""
    whole, began = Found(), time.monotonic()
    shown: Counter[str] = Counter()
    reported = began
    with ours.replaced_machinery():
        pass  # what cannot be replaced fails here; a pool would begin its processes for ever
    with multiprocessing.Pool(processes, _begin, maxtasksperchild=BLOCKS_PER_PROCESS) as pool:
        for found in pool.imap_unordered(go_through, blocks(first, count, features)):
            for seed, text in found.violations:
                shown[text] += 1  # many schedules begin from one state, and fail alike
                if shown[text] <= SHOWN:
                    print(f"seed {seed}: {text}\n  {_repeat(seed, features)}", flush=True)
            whole.add(found)
            now = time.monotonic()
            if now - reported >= REPORT_SECONDS:
                reported = now
                print(_progress(whole, count, now - began), flush=True)
    return whole


def _progress(found: Found, count: int, took: float) -> str:
    pace = found.schedules / took
    left = (count - found.schedules) / pace
    return (
        f"{found.schedules} of {count} schedules, {pace:.0f} a second, "
        f"{len(found.violations)} violations, {found.memory_mb} MB a process, {left:.0f} s left"
    )


def _repeat(seed: int, features: tuple[str, ...]) -> str:
    given = "".join(f" --feature '{name}'" for name in features)
    return f"every call: python -m tests.explorer.soak --show {seed}{given}"


def show(seed: int, features: tuple[str, ...]) -> int:
    """Print every call of one schedule."""
    trace: list[str] = []
    with ours.replaced_machinery():
        try:
            endings = explore(seed, features=features or None, trace=trace)
            trace.append(str(dict(sorted(endings.items()))))
        except Violation as violation:
            trace.append(f"VIOLATION: {violation}")
        except (Exception, Crash):
            trace.append(traceback.format_exc())
    print("\n".join(trace))
    return 0


def new_seed() -> int:
    """A seed that no run had before: EXPLORER_SEED repeats one."""
    given = os.environ.get("EXPLORER_SEED")
    return int(given) if given else int.from_bytes(os.urandom(5), "big")


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore, and print a summary; 1 if something was violated."""
    parser = argparse.ArgumentParser(prog="tests.explorer.soak", description=__doc__)
    parser.add_argument("--schedules", type=int, default=SCHEDULES)
    parser.add_argument("--seed", type=int, help="the first one; a new one unless given")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--feature", action="append", choices=FEATURES, default=[])
    parser.add_argument("--show", type=int, metavar="SEED", help="print every call of one schedule")
    given = parser.parse_args(arguments)
    features = tuple(name for name in FEATURES if name in given.feature)
    if given.show is not None:
        return show(given.show, features)
    seed = new_seed() if given.seed is None else given.seed
    print(f"explorer: {given.schedules} schedules from seed {seed} on", flush=True)
    print(f"to repeat: EXPLORER_SEED={seed} make soak SCHEDULES={given.schedules}", flush=True)
    began = time.monotonic()
    found = soak(seed, given.schedules, given.processes, features)
    for ending, number in sorted(found.endings.items()):
        print(f"{number:>10}  {ending}")
    took = time.monotonic() - began
    print(
        f"{found.schedules} schedules from seed {seed} on: {len(found.violations)} violations; "
        f"{took:.0f} s, {found.schedules / took:.0f} a second, {found.memory_mb} MB a process"
    )
    return int(bool(found.violations))


if __name__ == "__main__":
    sys.exit(main())
