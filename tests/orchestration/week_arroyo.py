"""Arroyo jobs of the simulated deployment, which maintenance windows stop and start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, LeaseHeldError
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.model.leases import EXPIRED_SECONDS
from arroyo_dagster.state.model.maintenance_window import WindowEnd, WindowLimits
from arroyo_dagster.state.operations.compaction.maintenance_window import WindowOptions, run_window
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.arroyo.api import ArroyoControl
from tests.arroyo_jobs import EVENTS, SECOND, ArroyoJob, content, table_rows, window_config
from tests.arroyo_server import DyingControl, ModelArroyo
from tests.orchestration.week import Process, World, store_of

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
LIMITS = WindowLimits(stop=60, rewrite=600, start=60, quiet=5)
WINDOW = window_config(EVENTS, ["k"], retention=600)
EPOCHS_AT_ONCE = 4


class ArroyoOfWorld(ModelArroyo):
    """A model whose time is the simulation's."""

    world: World

    def answer(self, path: str, query: dict[str, str]) -> Any:
        """Answer as it is by now."""
        self.catch_up()
        return super().answer(path, query)

    def change(self, method: str, path: str, document: Any) -> Any:
        """Change it as it is by now."""
        self.catch_up()
        return super().change(method, path, document)

    def catch_up(self) -> None:
        """Let it do what it does until now."""
        if self.due_micros <= self.now_micros:  # nothing was going on
            self.now_micros = max(self.now_micros, self.world.now_micros - SECOND)
        self.sleep(max(0.0, (self.world.now_micros - self.now_micros) / SECOND))


@dataclass
class WindowedJob:
    """A running Arroyo job and its windows.

    Attributes:
        rows: what the job has in memory, which every restore must load.
    """

    model: ArroyoOfWorld
    url: str
    ends: Counter[str]
    failures: list[str]
    rows: Any = None

    def write(self) -> None:
        """Let the job write some epochs, if it runs."""
        self.model.catch_up()
        if self.model.state != "Running":
            return
        for _ in range(EPOCHS_AT_ONCE):
            at = self.model.job.epoch
            times = [(20 + at % 8 + n) * SECOND * 1000 for n in range(4)]
            rows = table_rows(EVENTS, [[f"k{n}" for n in range(4)], [at] * 4, times])
            self.model.job.write({("tumbling_1", WINDOW): rows})
        self.rows = content(self.model.job.store, self.model.job.paths)

    def window(self, process: Process) -> None:
        """What a run of Dagster's window does, and `arroyo-state compact window`."""
        world, job = self.model.world, self.model.job
        options = WindowOptions(
            settings=FULL,
            limits=LIMITS,
            clock=world.clock,
            sleep=world.sleep,
            lease_wait_seconds=EXPIRED_SECONDS,
        )
        control: ArroyoControl = DyingControl(self.url, dead=lambda: bool(process.called()))
        try:
            found = run_window(store_of(process, job.store), job.paths, control, options)
        except LeaseHeldError:
            self.ends["windows skipped"] += 1
        except ArroyoStateError as error:
            self.failures.append(f"window of {job.paths.root}: {error!r}")
        else:
            self.ends[f"window {found.end.value}"] += 1
            other = found.end is WindowEnd.RECOVERED  # its problem: nothing was rewritten
            if found.end not in _FINE or (found.problem is not None and not other):
                self.failures.append(f"window of {job.paths.root}: {found.end} {found.problem!r}")

    def check(self) -> None:
        """The job runs, means to run, and has what it had."""
        self.model.catch_up()
        if (self.model.state, self.model.stop) != ("Running", "none"):
            self.failures.append(f"{self.model.job.paths.root} is {self.model.state}")
        elif content(self.model.job.store, self.model.job.paths) != self.rows:
            self.failures.append(f"{self.model.job.paths.root} restores other rows than it had")


_FINE = (WindowEnd.REWRITTEN, WindowEnd.NOTHING_TO_DO, WindowEnd.RECOVERED, WindowEnd.KEPT)


def running_job(world: World, name: str) -> ArroyoOfWorld:
    """A job that runs and has written nothing yet."""
    store = MemoryStore(clock=world.clock)
    job = ArroyoJob(Layout.PROTOCOL, watermark_micros=30 * SECOND, store=store, job=name)
    model = ArroyoOfWorld(job, now_micros=world.now_micros)
    model.world = world
    return model
