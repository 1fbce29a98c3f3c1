"""Choose the jobs of a batch, and request a batch: at most one of a kind at a time."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.launchpad import LaunchpadConfig
from arroyo_dagster.orchestration.partitions import key_error
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.schedules import MAX_RUNTIME_SECONDS, Backlog, schedule_status
from arroyo_dagster.orchestration.translator import Naming

MOST_JOBS = 500
BUDGET_MINUTES = 45.0
PARALLEL_JOBS = 4
ROOT_TAG = "arroyo/checkpoint_root"
"""The run tag that identifies the checkpoint URL of a batch."""

_DAY_SECONDS = 86_400.0
_RUNS_INSPECTED = 50
_UNFINISHED = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


class BatchConfig(LaunchpadConfig):
    """Which jobs a batch serves, and its time budget. A kind may add a field `settings`."""

    jobs: list[str] = Field(
        default_factory=list,
        description="Partition keys, served in this order. Empty: the jobs with the largest "
        "backlog.",
    )
    budget_minutes: float = Field(
        default=BUDGET_MINUTES, gt=0, description="Start no further job after this many minutes."
    )
    parallel_jobs: int = Field(
        default=PARALLEL_JOBS, ge=1, description="Serve this many jobs at the same time."
    )


@dataclass(frozen=True, kw_only=True)
class BatchKind:
    """A kind of maintenance that runs in batches.

    Attributes:
        name: of the Dagster job; its op has the same name with the suffix `_op`.
        config: a subclass of `BatchConfig`.
        events: does the work for one job and yields its events.
        backlog: returns the backlog of each job.
        min_backlog: jobs with a smaller backlog wait.
        single: the partitioned Dagster job that does the same work when it is started by hand.
        pool: of Dagster, which limits how many run at once.
        changes: whether it changes or deletes state, which marks and `read_only` forbid.
    """

    name: str
    description: str
    config: type[BatchConfig]
    events: Callable[[Any, Any, Any], Iterator[Any]]
    backlog: Backlog
    min_backlog: int = 1
    single: str
    pool: str | None = None
    changes: bool = True

    @property
    def op(self) -> str:
        """Return the name of the op, for run configuration."""
        return f"{self.name}_op"


def maintained_backlog(kind: BatchKind, store: ArroyoStateStore) -> Mapping[str, int]:
    """Return the backlog of each job; for what changes jobs, of those that may be changed."""
    backlog = kind.backlog(store)
    return {key: backlog[key] for key in store.maintained(backlog)} if kind.changes else backlog


# ---- which jobs, and when ------------------------------------------------------------------------


def chosen(
    backlog: Mapping[str, int],
    asked_seconds_ago: Mapping[str, float],
    *,
    min_backlog: int = 1,
    most_jobs: int = MOST_JOBS,
) -> list[str]:
    """Return the jobs with the largest backlog for the longest time, in order.

    Args:
        backlog: of each job.
        asked_seconds_ago: when a batch last served a job, where that is known; else a day counts,
            so that jobs whose backlog never shrinks do not block the others.
        min_backlog: jobs with a smaller backlog are left out.
        most_jobs: the maximum number of jobs.
    """

    def need(key: str) -> float:
        age = min(_DAY_SECONDS, max(60.0, asked_seconds_ago.get(key, _DAY_SECONDS)))
        return backlog[key] / min_backlog * age

    due = [key for key, count in backlog.items() if count >= min_backlog]
    return sorted(due, key=lambda key: (-need(key), key))[:most_jobs]


@dataclass(frozen=True)
class EarlierBatches:
    """What the instance's runs show about earlier batches of a kind.

    Attributes:
        unfinished: describes a batch that is queued or running; None if there is none.
        busy: jobs that have an individual run.
        seconds_ago: when each job was last served.
    """

    unfinished: str | None
    busy: frozenset[str]
    seconds_ago: Mapping[str, float]


def inspect_runs(
    instance: dg.DagsterInstance, kind: BatchKind, root: str, now: float
) -> EarlierBatches:
    """Find out what was already requested.

    A batch that has been running for twice its limit has died with its process. Without run
    monitoring it must not block the others forever.

    Args:
        root: the value of `ROOT_TAG`.
        now: seconds since 1970.
    """
    batches = instance.get_run_records(
        dg.RunsFilter(job_name=kind.name, tags={ROOT_TAG: root}), limit=_RUNS_INSPECTED
    )
    unfinished = None
    ago: dict[str, float] = {}
    for record in batches:
        run = record.dagster_run
        age = now - record.create_timestamp.timestamp()
        running = now - (record.start_time or now)
        if run.status in _UNFINISHED and running < 2 * MAX_RUNTIME_SECONDS:
            unfinished = f"run {run.run_id[:8]} is {run.status.value.lower()}"
        for key in _jobs_of(run, kind):
            ago.setdefault(key, age)
    singles = instance.get_run_records(
        dg.RunsFilter(job_name=kind.single, statuses=list(_UNFINISHED))
    )
    partitions = (record.dagster_run.tags.get("dagster/partition") for record in singles)
    return EarlierBatches(unfinished, frozenset(key for key in partitions if key), ago)


def _jobs_of(run: dg.DagsterRun, kind: BatchKind) -> Iterable[str]:
    found: Any = run.run_config
    for name in ("ops", kind.op, "config", "jobs"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, list) else []


def decide(
    kind: BatchKind,
    asked: EarlierBatches,
    backlog: Mapping[str, int],
    partitions: Collection[str],
    most_jobs: int = MOST_JOBS,
) -> list[str] | str:
    """Choose the jobs of the next batch, or return why there is none.

    Args:
        backlog: of each job.
        partitions: the existing partition keys. A materialization of any other key would not be
            visible.
    """
    if asked.unfinished is not None:
        return f"nothing requested: {asked.unfinished}"
    free = {k: n for k, n in backlog.items() if k in partitions and k not in asked.busy}
    keys = chosen(free, asked.seconds_ago, min_backlog=kind.min_backlog, most_jobs=most_jobs)
    if keys:
        return keys
    busy = f"; {len(asked.busy)} have a run of their own" if asked.busy else ""
    return f"nothing due: {len(backlog)} jobs, none with {kind.min_backlog} or more{busy}"


@dataclass(frozen=True, kw_only=True)
class BatchRequests:
    """Requests the batches of one kind.

    Attributes:
        settings: of the kind; its defaults unless given, None = it has none.
        most_jobs: the maximum number of jobs in one batch.
        budget_minutes: a batch starts no further job after this time.
        parallel_jobs: how many jobs a batch serves at the same time.
    """

    naming: Naming
    kind: BatchKind
    settings: dg.Config | None = None
    most_jobs: int = MOST_JOBS
    budget_minutes: float = BUDGET_MINUTES
    parallel_jobs: int = PARALLEL_JOBS

    def ask(
        self,
        context: dg.ScheduleEvaluationContext | dg.SensorEvaluationContext,
        store: ArroyoStateStore,
    ) -> dg.RunRequest | dg.SkipReason:
        """Request one run for the jobs with the largest backlog, or return why there is none."""
        kind, root = self.kind, root_of(store)
        asked = inspect_runs(context.instance, kind, root, time.time())
        partitions = set(context.instance.get_dynamic_partitions(str(self.naming.jobs.name)))
        found: Mapping[str, int] = {}
        if asked.unfinished is None:
            with as_failure():
                found = maintained_backlog(kind, store)
        new = [key for key in found if key not in partitions and key_error(key) is None]
        if new:
            context.log.warning(f"{len(new)} jobs have no partition key yet: {new[:5]}")
        keys = decide(kind, asked, found, partitions, self.most_jobs)
        if isinstance(keys, str):
            return dg.SkipReason(keys)
        given: dict[str, Any] = {} if self.settings is None else {"settings": self.settings}
        config = kind.config(
            jobs=keys,
            budget_minutes=self.budget_minutes,
            parallel_jobs=self.parallel_jobs,
            **given,
        )
        return dg.RunRequest(run_config=dg.RunConfig({kind.op: config}), tags={ROOT_TAG: root})


def build_batch_schedule(
    name: str,
    job: Any,
    cron: str,
    requests: BatchRequests,
    *,
    running: bool = False,
    timezone: str = "UTC",
) -> dg.ScheduleDefinition:
    """Build a schedule that requests one batch, unless the last one is unfinished."""

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
        description=requests.kind.description,
    )
    @requests.naming.bind
    def batch_schedule(
        context: dg.ScheduleEvaluationContext, arroyo_store: ArroyoStateStore
    ) -> dg.RunRequest | dg.SkipReason:
        return requests.ask(context, arroyo_store)

    return batch_schedule


def root_of(store: ArroyoStateStore) -> str:
    """Return the run tag value that identifies the checkpoint URL of a batch."""
    return hashlib.sha256(store.reading().url.encode()).hexdigest()[:12]
