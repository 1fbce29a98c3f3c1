"""Fork the state of one Arroyo job into another, stopped one: the asset, its job and a schedule."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.schedules import JOB_TAG, schedule_status
from arroyo_dagster.orchestration.surgery.state_change import (
    ChangeConfig,
    ChangeRun,
    change_asset,
    change_job,
)
from arroyo_dagster.orchestration.translator import (
    FORKED_STATE,
    DagsterArroyoTranslator,
    Naming,
)
from arroyo_dagster.redaction import without_secrets
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.surgery.carried_files import StateSource
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit

OP = "arroyo_forked_state"
FORK_CRON = "41 3 * * *"


class ForkConfig(ChangeConfig):
    """Whose state to fork, and into which job."""

    source: str = Field(
        description="The job whose state is taken, as job or pipeline/job. It is only read, and "
        "may run.",
        examples=["orders/main"],
    )
    job: str = Field(
        description="The stopped job of this deployment that takes the state, as job or "
        "pipeline/job.",
        examples=["staging/main"],
    )
    source_url: str = Field(
        default="",
        description="The checkpoint URL of the source, with credentials from the environment. "
        "Empty: that of this deployment.",
    )
    epoch: int | None = Field(
        default=None,
        ge=1,
        description="The source's epoch. Default: its newest visible epoch.",
        examples=[42],
    )
    evolve: bool = Field(
        default=False,
        description="The SQL of the jobs differs: match operators by what they are, not by ids.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Decisions of an evolve: map, drop, start_empty, same_columns, fill, rename, "
        "accumulators. They imply `evolve`.",
        examples=[{"start_empty": ["tumbling_4"]}],
    )


@dataclass(frozen=True, kw_only=True)
class StateFork:
    """The forked state of a deployment, and when a schedule forks it.

    Attributes:
        nightly: what the schedule forks; None = no schedule.
        cron, timezone: when it does.
    """

    nightly: ForkConfig | None = None
    cron: str = FORK_CRON
    timezone: str = "UTC"


def build_forked_state(
    nightly: ForkConfig | None = None,
    *,
    cron: str = FORK_CRON,
    timezone: str = "UTC",
    running: bool = False,
    deployment: str | None = None,
    translator: DagsterArroyoTranslator | None = None,
) -> dg.Definitions:
    """Build the asset of a forked state, the job `arroyo_fork`, and optionally a schedule.

    Merge the result with that of `build_arroyo_definitions`, whose resources it uses; its argument
    `fork` does that. A run plans only, unless its configuration has `execute: true`.

    Args:
        nightly: what the schedule `arroyo_fork_schedule` forks; its runs execute. A tick is skipped
            while the job that takes the state is not stopped, unless `window` lets it run. None =
            no schedule.
        cron, timezone: when the schedule runs.
        running: start the schedule as running.
        deployment, translator: those given to `build_arroyo_definitions`.

    Raises:
        InputError: `nightly` approves a plan: the next night has another one.
    """
    naming = Naming(
        translator or DagsterArroyoTranslator(), jobs_partitions(deployment), deployment
    )
    asset = _build_asset(naming)
    description = "Plan or execute a fork of the state of one job into another, stopped one."
    job = change_job(naming, "arroyo_fork", asset, description)
    schedules = []
    if nightly is not None:
        if nightly.approve:
            raise InputError(
                "a schedule cannot approve a plan: the next tick has another one",
                next_step="leave `approve` of the nightly fork empty",
            )
        schedules.append(_build_schedule(naming, job, nightly, cron, timezone, running))
    return dg.Definitions(assets=[asset], jobs=[job], schedules=schedules)


# ---- the asset -----------------------------------------------------------------------------------


def _build_asset(naming: Naming) -> dg.AssetsDefinition:
    @change_asset(naming, FORKED_STATE, OP)
    def arroyo_forked_state(
        context: dg.AssetExecutionContext,
        config: ForkConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
    ) -> Any:
        yield from ChangeRun(
            context=context,
            key=naming.key(FORKED_STATE),
            job=config.job,
            config=config,
            store=arroyo_store,
            directory=arroyo_directory,
            edit=lambda paths: nullcontext(_edit(paths, config, arroyo_store)),
        ).events()

    return arroyo_forked_state


def _edit(paths: JobPaths, config: ForkConfig, store: ArroyoStateStore) -> "PlannableEdit":
    """Return what a run plans or executes: a fork, or an evolve."""
    from arroyo_dagster.state.operations.surgery.evolve import plan_evolve, run_evolve
    from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit
    from arroyo_dagster.state.planning.surgery.overrides import parse_overrides

    source = _source(config, store)
    if not (config.evolve or config.overrides):
        return PlannableEdit(
            paths,
            plan=lambda at, status: plan_fork(source, at, paths, status),
            run=lambda at, status, options: run_fork(source, at, paths, status, options),
        )
    wanted = parse_overrides(config.overrides)
    return PlannableEdit(
        paths,
        plan=lambda at, status: plan_evolve(source, at, paths, status, wanted),
        run=lambda at, status, options: run_evolve(source, at, paths, status, wanted, options),
    )


def _source(config: ForkConfig, store: ArroyoStateStore) -> "StateSource":
    from arroyo_dagster.state.operations.catalog.jobs import find_job
    from arroyo_dagster.state.operations.surgery.carried_files import StateSource

    other = store
    if config.source_url:
        other = ArroyoStateStore(checkpoint_url=config.source_url)
        other.check_fields()
    reading = other.reading()
    paths = find_job(reading, config.source)
    return StateSource(store=reading, paths=paths, epoch=config.epoch)


# ---- the schedule --------------------------------------------------------------------------------


def _build_schedule(
    naming: Naming, job: Any, nightly: ForkConfig, cron: str, timezone: str, running: bool
) -> dg.ScheduleDefinition:
    config = nightly.model_copy(update={"execute": True})

    @dg.schedule(
        name=naming.name("arroyo_fork_schedule"),
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
        description=f"Fork the state of {config.source} into {config.job}, "
        + ("which is stopped for it." if config.window else "while that is stopped."),
    )
    @naming.bind
    def arroyo_fork_schedule(
        context: dg.ScheduleEvaluationContext,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
    ) -> Any:
        from arroyo_dagster.state.operations.catalog.jobs import find_job
        from arroyo_dagster.state.operations.compaction.rewrite_preconditions import take_snapshot

        with as_failure():
            reading = arroyo_store.reading()
            paths = find_job(reading, config.job)
            snapshot = take_snapshot(reading, paths, arroyo_directory.directory(arroyo_store))
        runs = snapshot.answer.facts.condition is JobCondition.RUNNING
        if snapshot.why_not is not None and not (nightly.window and runs):
            reason = without_secrets(snapshot.why_not)
            return dg.SkipReason(
                f"{paths.root}: {reason}. Next: stop the job with a checkpoint before "
                f"{context.scheduled_execution_time:%H:%M}, or set `window`"
            )
        return dg.RunRequest(
            run_config=dg.RunConfig({naming.name(OP): config}), tags={JOB_TAG: str(paths.root)}
        )

    return arroyo_fork_schedule
