"""Which jobs a batch serves, and when a batch is asked for: at most one of a kind at a time."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import key_error
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.schedules import MAX_RUNTIME_SECONDS, Backlog, schedule_status
from arroyo_dagster.orchestration.translator import Naming

MOST_JOBS = 500
BUDGET_MINUTES = 45.0
ROOT_TAG = "arroyo/checkpoint_root"
"""The run tag that tells batches of one checkpoint URL from those of another."""

_DAY_SECONDS = 86_400.0
_RUNS_INSPECTED = 50
_UNFINISHED = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


class BatchConfig(dg.Config):
    """Which jobs a batch serves, and how long. Kinds add a field `settings`."""

    jobs: list[str] = Field(
        default_factory=list,
        description="Partition keys, in order; without any those that need it most are chosen.",
    )
    budget_minutes: float = Field(
        default=BUDGET_MINUTES, gt=0, description="No further job is begun after so long."
    )


@dataclass(frozen=True, kw_only=True)
class BatchKind:
    """A kind of maintenance that is done in batches.

    Attributes:
        name: of the Dagster job; its op is called the same with `_op` behind it.
        config: a subclass of `BatchConfig` with a field `settings`.
        events: does the work for one job and gives its events.
        backlog: how much each job has to do.
        min_backlog: jobs with less are left for later.
        single: the partitioned Dagster job of the same work, which people start by hand.
        pool: of Dagster, which limits how many run at once.
    """

    name: str
    description: str
    config: type[BatchConfig]
    events: Callable[[Any, Any, Any], Iterator[Any]]
    backlog: Backlog
    min_backlog: int = 1
    single: str
    pool: str | None = None

    @property
    def op(self) -> str:
        """The name of the op, for run configuration."""
        return f"{self.name}_op"


# ---- which jobs, and when ------------------------------------------------------------------------


def chosen(
    backlog: Mapping[str, int],
    asked_seconds_ago: Mapping[str, float],
    *,
    min_backlog: int = 1,
    most_jobs: int = MOST_JOBS,
) -> list[str]:
    """The jobs that need it most, first those with most to do for the longest time.

    Args:
        backlog: how much each job has to do.
        asked_seconds_ago: when a batch served a job last, where that is known; else a day counts,
            so that jobs that never get smaller do not keep the others waiting.
        min_backlog: jobs with less are left out.
        most_jobs: no more than so many.
    """

    def need(key: str) -> float:
        age = min(_DAY_SECONDS, max(60.0, asked_seconds_ago.get(key, _DAY_SECONDS)))
        return backlog[key] / min_backlog * age

    due = [key for key, count in backlog.items() if count >= min_backlog]
    return sorted(due, key=lambda key: (-need(key), key))[:most_jobs]


@dataclass(frozen=True)
class EarlierBatches:
    """What runs of Dagster say of earlier batches of a kind.

    Attributes:
        unfinished: a batch that is queued or running, in words; None if there is none.
        busy: jobs for which somebody has started a run of their own.
        seconds_ago: when each job was served last.
    """

    unfinished: str | None
    busy: frozenset[str]
    seconds_ago: Mapping[str, float]


def inspect_runs(
    instance: dg.DagsterInstance, kind: BatchKind, root: str, now: float
) -> EarlierBatches:
    """Find out what was asked already.

    A batch that has been running for twice as long as it may has died with its process: where
    nobody monitors runs, it must not hold up the others for ever.

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
    """Choose the jobs of the next batch; or say why there is none.

    Args:
        backlog: how much each job has to do.
        partitions: the partition keys there are: a materialisation of another would show nowhere.
    """
    if asked.unfinished is not None:
        return f"nothing asked: {asked.unfinished}"
    free = {k: n for k, n in backlog.items() if k in partitions and k not in asked.busy}
    keys = chosen(free, asked.seconds_ago, min_backlog=kind.min_backlog, most_jobs=most_jobs)
    if keys:
        return keys
    busy = f"; {len(asked.busy)} have a run of their own" if asked.busy else ""
    return f"nothing due: {len(backlog)} jobs, none with {kind.min_backlog} or more{busy}"


@dataclass(frozen=True, kw_only=True)
class BatchRequests:
    """Asks for the batches of a kind.

    Attributes:
        settings: of the kind; its own defaults unless given.
        most_jobs: in one batch.
        budget_minutes: no job of a batch is begun after so long.
    """

    naming: Naming
    kind: BatchKind
    settings: dg.Config | None = None
    most_jobs: int = MOST_JOBS
    budget_minutes: float = BUDGET_MINUTES

    def ask(
        self,
        context: dg.ScheduleEvaluationContext | dg.SensorEvaluationContext,
        store: ArroyoStateStore,
    ) -> dg.RunRequest | dg.SkipReason:
        """Ask for one run that serves the jobs that need it most; or say why not."""
        kind, root = self.kind, root_of(store)
        asked = inspect_runs(context.instance, kind, root, time.time())
        partitions = set(context.instance.get_dynamic_partitions(str(self.naming.jobs.name)))
        found: Mapping[str, int] = {}
        if asked.unfinished is None:
            with as_failure():
                found = kind.backlog(store)
        new = [key for key in found if key not in partitions and key_error(key) is None]
        if new:
            context.log.warning(f"{len(new)} jobs have no partition key yet: {new[:5]}")
        keys = decide(kind, asked, found, partitions, self.most_jobs)
        if isinstance(keys, str):
            return dg.SkipReason(keys)
        given: dict[str, Any] = {} if self.settings is None else {"settings": self.settings}
        config = kind.config(jobs=keys, budget_minutes=self.budget_minutes, **given)
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
    """A schedule that asks for one batch at most: none while the last one is queued or running."""

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
        description=requests.kind.description,
    )
    def batch_schedule(
        context: dg.ScheduleEvaluationContext, arroyo_store: ArroyoStateStore
    ) -> dg.RunRequest | dg.SkipReason:
        return requests.ask(context, arroyo_store)

    return batch_schedule


def root_of(store: ArroyoStateStore) -> str:
    """What tells the batches of one checkpoint URL from those of another, as a run tag."""
    return hashlib.sha256(store.reading().url.encode()).hexdigest()[:12]
