"""A week of schedules that collide, kills, a second Dagster and the command line: nothing fails
that was not made to fail.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from arroyo_dagster.errors import ArroyoStateError, LeaseHeldError
from arroyo_dagster.orchestration.batch_requests import (
    BatchKind,
    EarlierBatches,
    decide,
)
from arroyo_dagster.orchestration.catalog.assets import build_catalogue
from arroyo_dagster.orchestration.catalog.checks import FILES_EXIST, RESTORABLE, kept_verdict
from arroyo_dagster.orchestration.compaction.assets import CompactionConfig, build_compacted_state
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.gc.assets import (
    GcConfig,
    OrphansConfig,
    build_collection,
    build_gc_journal,
)
from arroyo_dagster.orchestration.job_pool import JobContext, JobLog, JobPool, Tools
from arroyo_dagster.orchestration.maintenance import (
    MaintenanceAssets,
    MaintenanceOptions,
    build_batches,
)
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.orchestration.skips import SkippedError
from arroyo_dagster.orchestration.translator import DagsterArroyoTranslator, Naming
from arroyo_dagster.state.metadata.interrupts import Interrupts
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.garbage import PlanKind, Retention
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import EXPIRED_SECONDS
from arroyo_dagster.state.model.maintenance_window import WindowEnd
from arroyo_dagster.state.model.objects import ObjectKind, object_name
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.operations.compaction.job import CompactionOptions, run_compaction
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.plan import GcRequest
from arroyo_dagster.state.operations.gc.steps import Pace
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.runtime.in_process import LocalRun
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.wrappers import WriteProtected
from tests.arroyo_server import arroyo
from tests.jobs import listing, word_job
from tests.orchestration.results import JOB
from tests.orchestration.week import HOUR, SECOND, Process, World, simulated, store_of
from tests.orchestration.week_arroyo import WindowedJob, running_job

NAMING = Naming(DagsterArroyoTranslator(), jobs_partitions(None), None)
KEEP = 3
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
OPTIONS = MaintenanceOptions(
    min_backlog=8,
    compaction=CompactionConfig(policy="full", wait_seconds=0.0),
    gc=GcConfig(keep_epochs=KEEP, dry_run=False),
    orphans=OrphansConfig(older_than_days=1 / 24, dry_run=False),
)
KINDS = ("compaction", "gc", "orphans")
FIRST_EPOCHS = 4
ORPHANED_EVERY = 3
"""Of every third epoch there is a file of an attempt that was never published."""


def kinds() -> dict[str, tuple[BatchKind, Any]]:
    """The batches of a deployment, with their settings."""
    expiry, orphans, dead = (build_collection(NAMING, kind) for kind in PlanKind)
    assets = MaintenanceAssets(
        catalogue=build_catalogue(NAMING),
        compacted=build_compacted_state(NAMING),
        expiry_assets=expiry,
        orphans=orphans,
        dead_jobs=dead,
        journal=build_gc_journal(NAMING),
    )
    found = build_batches(NAMING, OPTIONS, assets)
    return {name: (found[name].kind, found[name].settings) for name in KINDS}


class Resource:
    """The store's resource, as one process has it."""

    def __init__(self, store: Any, catalogue: MemoryStore) -> None:
        self._store = store
        self._catalogue = catalogue

    def writable(self) -> Any:
        return self._store

    def reading(self) -> Any:
        return WriteProtected(self._store)

    def catalogue(self) -> MemoryStore:
        return self._catalogue

    def directory(self, assumed: Any) -> JobDirectory:
        return JobDirectory()

    def jobs(self) -> list[JobPaths]:
        return list_jobs(self._store)

    def arroyo_page(self, paths: JobPaths, **given: Any) -> None:
        return None


class Runner(InProcessRunner):
    """Runs by the simulated clock."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        options = replace(options, clock=WORLD[0].clock)
        return super().run_compaction(store, paths, settings, options)

    def run_gc(self, store: Any, paths: Any, request: Any, options: Any, *, plan: Any) -> Any:
        pace = Pace(sleep=WORLD[0].sleep)
        options = replace(options, clock=WORLD[0].clock, pace=pace)
        return super().run_gc(store, paths, request, options, plan=plan)


WORLD: list[World] = []


@dataclass
class Fleet:
    """The jobs of the simulation, and what was done with them.

    Attributes:
        ends: how many jobs of all runs ended how.
        failures: of runs that were not killed.
        orphans: files that nothing references, and never will.
        windows: Arroyo jobs that windows stop and start.
    """

    world: World
    store: MemoryStore
    catalogue: MemoryStore
    epochs: Mapping[JobPaths, Sequence[Mapping[StatePath, bytes]]]
    ends: Counter[str]
    failures: list[str]
    events: list[str]
    orphans: set[StatePath] = field(default_factory=set)
    windows: list[WindowedJob] = field(default_factory=list)

    def write(self, paths: JobPaths, epoch: int) -> None:
        """Let a job write one more epoch."""
        for path, data in self.epochs[paths][epoch].items():
            self.store.put(path, data)
            if epoch % ORPHANED_EVERY == 0 and object_name(paths, path).kind is ObjectKind.DATA:
                orphan = StatePath(f"{path[:-1]}{'0' if path[-1] != '0' else '1'}")
                self.store.put(orphan, data)
                self.orphans.add(orphan)

    def batch(self, kind: BatchKind, settings: Any, keys: Sequence[str]) -> Any:
        """What a batch of Dagster does, in a process of the simulation: first without a wait."""
        return self._run(kind, settings, keys, waits=(0.0, None))

    def single(self, kind: BatchKind, settings: Any, key: str) -> Any:
        """What the run of one partition does, for example of a backfill."""
        return self._run(kind, settings, [key], waits=(None,))

    def _run(
        self,
        kind: BatchKind,
        settings: Any,
        keys: Sequence[str],
        *,
        waits: Sequence[float | None],
    ) -> Any:
        def work(process: Process) -> None:
            store: Any = Resource(store_of(process, self.store), self.catalogue)
            context: Any = SimpleNamespace(run=SimpleNamespace(run_id=process.name))
            config = SimpleNamespace(settings=settings, budget_minutes=10**6, parallel_jobs=1)
            tools = Tools(store, Runner(), ArroyoDirectory())
            pool = JobPool(kind.events, context, config, tools)
            left = keys
            for wait in waits:
                left = self._served(pool, context, left, wait)
            self.ends["skipped"] += len(left)
            while not pool._lines.empty():
                self.events.append(pool._lines.get()[1])

        return work

    def _served(
        self, pool: JobPool, context: Any, keys: Sequence[str], wait: float | None
    ) -> list[str]:
        skipped = []
        for key in keys:
            log = JobLog(key, pool._lines)
            job = JobContext(context, key, log=log, more_jobs_follow=True, lease_wait_seconds=wait)
            served = pool._serve(job, Interrupts())
            if isinstance(served.error, SkippedError):
                skipped.append(key)
            elif served.error is not None:
                self.failures.append(f"{key}: {served.error!r} {served.error.__cause__!r}")
            else:
                self.ends["done"] += 1
        return skipped

    def command(self, paths: JobPaths, *, compact: bool) -> Any:
        """What `arroyo-state compact run` and `gc run` do."""

        def work(process: Process) -> None:
            store, clock = store_of(process, self.store), self.world.clock
            try:
                if compact:
                    options = CompactionOptions(lease_wait_seconds=EXPIRED_SECONDS, clock=clock)
                    run_compaction(
                        store, paths, CompactionConfig(policy="full").settings(), options
                    )
                else:
                    retention = Retention(keep_epochs=KEEP)
                    asked = GcRequest(kind=PlanKind.EXPIRE, retention=retention)
                    pace = Pace(sleep=self.world.sleep)
                    gc = GcOptions(lease_wait_seconds=EXPIRED_SECONDS, clock=clock, pace=pace)
                    run_gc(store, paths, asked, gc)
                self.ends["done by command"] += 1
            except LeaseHeldError:
                self.ends["skipped by command"] += 1
            except ArroyoStateError as error:
                self.failures.append(f"command on {paths.root}: {error!r}")

        return work

    def checks(self, jobs: Sequence[JobPaths]) -> Any:
        """What the checks of jobs do."""

        def work(process: Process) -> None:
            resource: Any = Resource(store_of(process, self.store), self.catalogue)
            for paths in jobs:
                for name in (FILES_EXIST, RESTORABLE):
                    verdict = kept_verdict(name, resource, paths)
                    if not verdict.passed:
                        self.failures.append(f"{name} of {paths.root}: {verdict.errors}")
            self.ends["checked"] += 1

        return work


def hours_of_epochs(number: int, hours: int, every_hours: int) -> list[int]:
    """In which hours a job writes an epoch."""
    later = [hour for hour in range(1, hours) if (hour + number) % every_hours == 0]
    return [*[0] * FIRST_EPOCHS, *later]


def built(jobs: int, hours: int, every_hours: int, seed: int) -> Fleet:
    """A fleet of running jobs; what each epoch adds is written beforehand."""
    world = World(seed, time.time_ns() // 1000)
    found: dict[JobPaths, list[dict[StatePath, bytes]]] = {}
    for number in range(jobs):
        written = hours_of_epochs(number, hours, every_hours)
        times = [world.now_micros + hour * HOUR + at * SECOND for at, hour in enumerate(written)]
        store = MemoryStore()
        job = word_job(store, **{**JOB, "rows": 2 * len(written) + 8}, job=f"job{number}")
        run, before = LocalRun.start(job, store), dict[StatePath, str | None]()
        steps = found[job.paths] = []
        for micros in times:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "time_ns", functools.partial(int, micros * 1000))
                run.step()
            after = listing(store)
            changed = [path for path in after if after[path] != before.get(path)]
            steps.append({path: store.read(path) for path in changed})
            before = after
    store = MemoryStore(clock=world.clock)
    return Fleet(world, store, MemoryStore(), found, Counter(), [], [])


def simulate(fleet: Fleet, hours: int, *, every_hours: int, kills: float) -> None:
    """In each hour start all schedules of two Dagsters at the same minute, commands, checks and
    windows; in every so many hours a backfill of each job, too.
    """
    world, chance = fleet.world, fleet.world.chance

    def fate(most_calls: int) -> int | None:
        return chance.randrange(1, most_calls) if chance.random() < kills else None

    batches, jobs = kinds(), list(fleet.epochs)
    epoch = dict.fromkeys(jobs, 0)
    running: dict[tuple[str, str], Process] = {}
    start = world.now_micros
    resource: Any = Resource(fleet.store, fleet.catalogue)
    for hour in range(hours):
        for number, paths in enumerate(jobs):
            for _ in range(hours_of_epochs(number, hours, every_hours).count(hour)):
                fleet.write(paths, epoch[paths])
                epoch[paths] += 1
        for name, (kind, settings) in batches.items():
            backlog = {str(key): count for key, count in kind.backlog(resource).items()}
            for dagster in ("first", "second"):
                last = running.get((dagster, name))
                busy = None if last is None or last.ended else "run is started"
                asked = EarlierBatches(busy, frozenset(), {})
                keys = decide(kind, asked, backlog, set(backlog))
                if isinstance(keys, str):
                    continue
                work = fleet.batch(kind, settings, keys)
                title = f"{dagster}-{name}-{hour}"
                running[dagster, name] = world.start(title, work, dies_at=fate(400))
            if hour % every_hours == 0:
                for key in backlog:
                    work = fleet.single(kind, settings, key)
                    world.start(f"backfill-{name}-{hour}-{key}", work, dies_at=fate(100))
        for number, paths in enumerate(chance.sample(jobs, max(1, len(jobs) // 10))):
            work = fleet.command(paths, compact=number % 2 == 0)
            world.start(f"command-{hour}-{number}", work, dies_at=fate(60))
        for job in fleet.windows:
            job.write()
            for dagster in ("first", "second"):
                title = f"{dagster}-window-{hour}-{job.model.job.job}"
                world.start(title, job.window, dies_at=fate(120))
        world.start(f"checks-{hour}", fleet.checks(chance.sample(jobs, max(1, len(jobs) // 5))))
        world.run_until(start + (hour + 1) * HOUR)
    for job in fleet.windows:  # what a killed one left stopped is started by the next
        world.start(f"last-window-{job.model.job.job}", job.window)
    world.run_until(start + (hours + 2) * HOUR)
    assert not world.busy
    for job in fleet.windows:
        job.check()
    for process in world.processes:
        if process.error is not None:
            fleet.failures.append(f"{process.name}: {process.error!r}")


@pytest.mark.parametrize(
    ("jobs", "hours", "every_hours", "seed"),
    [
        pytest.param(5, 5, 1, 1, id="hours"),
        pytest.param(100, 168, 6, 2, id="week", marks=pytest.mark.soak),
    ],
)
def test_in_a_week_of_collisions_nothing_fails_that_was_not_killed(
    jobs: int, hours: int, every_hours: int, seed: int
) -> None:
    fleet = built(jobs, hours, every_hours, seed)
    WORLD[:] = [fleet.world]
    with contextlib.ExitStack() as servers, simulated(fleet.world):
        for number in range(max(1, jobs // 25)):
            model = running_job(fleet.world, f"arroyo{number}")
            url = servers.enter_context(arroyo(model)).url
            fleet.windows.append(WindowedJob(model, url, fleet.ends, fleet.failures))
        simulate(fleet, hours, every_hours=every_hours, kills=0.15)
    print(f"{dict(fleet.ends)}, {sum(one.killed for one in fleet.world.processes)} killed")
    assert fleet.failures == []
    assert fleet.ends["done"] > hours
    assert fleet.ends["done by command"]
    assert fleet.ends["checked"] == hours
    assert fleet.ends[f"window {WindowEnd.REWRITTEN.value}"] >= hours // 2
    killed = [process for process in fleet.world.processes if process.killed]
    assert killed
    assert any("took over the lease of" in line for line in fleet.events) or jobs < 100
    # Those of the last hours are younger than the grace period.
    left = [path for path in fleet.orphans if fleet.store.head(path) is not None]
    assert len(left) < len(fleet.orphans) / 2
    for paths in fleet.epochs:
        verdict = verify_job(fleet.store, paths, level=2).verdict
        assert verdict.passed, verdict.errors
