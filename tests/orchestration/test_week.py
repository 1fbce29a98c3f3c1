"""A week of schedules that collide, kills, a second Dagster and the command line: nothing fails
that was not made to fail.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from arroyo_dagster.orchestration.gc.assets import GcConfig, build_collection, build_gc_journal
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
from tests.jobs import listing, word_job
from tests.orchestration.week import HOUR, Process, World, simulated, store_of

JOB: dict[str, Any] = {
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
    "sinks": 0,
    "parallelism": 1,
}
NAMING = Naming(DagsterArroyoTranslator(), jobs_partitions(None), None)
KEEP = 3
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
OPTIONS = MaintenanceOptions(
    min_backlog=8,
    compaction=CompactionConfig(policy="full", wait_seconds=0.0),
    gc=GcConfig(keep_epochs=KEEP, dry_run=False),
)


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
    return {name: (found[name].kind, found[name].settings) for name in ("compaction", "gc")}


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
    """

    world: World
    store: MemoryStore
    catalogue: MemoryStore
    epochs: Mapping[JobPaths, Sequence[Mapping[StatePath, bytes]]]
    ends: Counter[str]
    failures: list[str]
    events: list[str]

    def write(self, paths: JobPaths, epoch: int) -> None:
        """Let a job write one more epoch."""
        for path, data in self.epochs[paths][epoch].items():
            self.store.put(path, data)

    def batch(self, kind: BatchKind, settings: Any, keys: Sequence[str]) -> Any:
        """What a run of Dagster does, in a process of the simulation."""

        def work(process: Process) -> None:
            store: Any = Resource(store_of(process, self.store), self.catalogue)
            context: Any = SimpleNamespace(run=SimpleNamespace(run_id=process.name))
            config = SimpleNamespace(settings=settings, budget_minutes=10**6, parallel_jobs=1)
            tools = Tools(store, Runner(), ArroyoDirectory())
            pool = JobPool(kind.events, context, config, tools)
            waiting = self._served(pool, context, keys, 0.0)
            left = self._served(pool, context, waiting, None)
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


def built(jobs: int, epochs: int, seed: int) -> Fleet:
    """A fleet of running jobs; what each epoch adds is written beforehand."""
    found: dict[JobPaths, list[dict[StatePath, bytes]]] = {}
    for number in range(jobs):
        store = MemoryStore()
        job = word_job(store, rows=2 * epochs + 8, job=f"job{number}", **JOB)
        run, before = LocalRun.start(job, store), dict[StatePath, str | None]()
        steps = found[job.paths] = []
        for _ in range(epochs):
            run.step()
            now = listing(store)
            steps.append({path: store.read(path) for path in now if now[path] != before.get(path)})
            before = now
    world = World(seed, time.time_ns() // 1000)
    store = MemoryStore(clock=world.clock)
    return Fleet(world, store, MemoryStore(), found, Counter(), [], [])


def simulate(fleet: Fleet, hours: int, *, every_hours: int, kills: float) -> None:
    """In each hour start all schedules of two Dagsters at the same minute, commands and checks."""
    world, chance = fleet.world, fleet.world.chance
    batches, jobs = kinds(), list(fleet.epochs)
    epoch = dict.fromkeys(jobs, 0)
    running: dict[tuple[str, str], Process] = {}
    start = world.now_micros
    resource: Any = Resource(fleet.store, fleet.catalogue)
    for hour in range(hours):
        for number, paths in enumerate(jobs):
            due = 4 if hour == 0 else int((hour + number) % every_hours == 0)
            for _ in range(min(due, len(fleet.epochs[paths]) - epoch[paths])):
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
                dies_at = chance.randrange(1, 400) if chance.random() < kills else None
                work = fleet.batch(kind, settings, keys)
                title = f"{dagster}-{name}-{hour}"
                running[dagster, name] = world.start(title, work, dies_at=dies_at)
        for number, paths in enumerate(chance.sample(jobs, max(1, len(jobs) // 10))):
            dies_at = chance.randrange(1, 60) if chance.random() < kills else None
            work = fleet.command(paths, compact=number % 2 == 0)
            world.start(f"command-{hour}-{number}", work, dies_at=dies_at)
        world.start(f"checks-{hour}", fleet.checks(chance.sample(jobs, max(1, len(jobs) // 5))))
        world.run_until(start + (hour + 1) * HOUR)
    world.run_until(start + (hours + 2) * HOUR)
    assert not world.busy
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
    fleet = built(jobs, 4 + hours // every_hours, seed)
    WORLD[:] = [fleet.world]
    with simulated(fleet.world):
        simulate(fleet, hours, every_hours=every_hours, kills=0.15)
    assert fleet.failures == []
    assert fleet.ends["done"] > hours
    assert fleet.ends["done by command"]
    assert fleet.ends["checked"] == hours
    killed = [process for process in fleet.world.processes if process.killed]
    assert killed
    assert any("took over the lease of" in line for line in fleet.events) or jobs < 100
    for paths in fleet.epochs:
        verdict = verify_job(fleet.store, paths, level=2).verdict
        assert verdict.passed, verdict.errors
