"""Fork the state of one Arroyo job into another, stopped one: the asset, its job and a schedule."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, InputError, LeaseHeldError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.catalog.checks import (
    RESTORABLE,
    check_result,
    kept_verdict,
    not_checked,
)
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure, failure_of, name_failed_checks
from arroyo_dagster.orchestration.launchpad import LaunchpadConfig
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.schedules import JOB_TAG, maintenance_tags, schedule_status
from arroyo_dagster.orchestration.settings import configured, setting_field
from arroyo_dagster.orchestration.skips import end_skipped_steps, leases_skip
from arroyo_dagster.orchestration.surgery.rendering import fork_metadata, plan_metadata
from arroyo_dagster.orchestration.translator import (
    FORKED_STATE,
    DagsterArroyoTranslator,
    Naming,
    specified_assets,
)
from arroyo_dagster.redaction import without_secrets
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.maintenance_window import WindowEnd, WindowLimits, WindowSteps
from arroyo_dagster.state.model.rewrite import QuietSettings
from arroyo_dagster.state.planning.verify.findings import Verdict

if TYPE_CHECKING:
    from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
    from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions
    from arroyo_dagster.state.operations.surgery.carried_files import StateSource
    from arroyo_dagster.state.operations.surgery.execute import EditOptions
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit

OP = "arroyo_forked_state"
FORK_CRON = "41 3 * * *"


class ForkConfig(LaunchpadConfig):
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
    execute: bool = Field(
        default=False, description="Fork the state. Otherwise plan only; change nothing."
    )
    approve: str = Field(
        default="",
        description="With `execute`: execute only the plan with this digest. Empty: any plan.",
    )
    window: bool = Field(
        default=False,
        description="With `execute`: the job may run. It is stopped with a checkpoint through "
        "Arroyo's API, and started again, whatever happens.",
    )
    stop_seconds: float = setting_field(WindowSteps, "stop")
    rewrite_seconds: float = setting_field(WindowSteps, "rewrite")
    start_seconds: float = setting_field(WindowSteps, "start")
    quiet_seconds: float = setting_field(QuietSettings, "quiet_seconds")
    lease_wait_seconds: float = setting_field(LeaseSettings, "lease_wait_seconds")


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
    job = dg.define_asset_job(
        naming.name("arroyo_fork"),
        description="Plan or execute a fork of the state of one job into another, stopped one.",
        selection=dg.AssetSelection.assets(asset),
        executor_def=dg.in_process_executor,
        run_tags=maintenance_tags(deployment),
    )
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
    key = naming.key(FORKED_STATE)

    @specified_assets(
        name=naming.name(OP),
        specs=[
            naming.spec(FORKED_STATE, partitioned=False).replace_attributes(
                skippable=True  # a plan has made nothing
            )
        ],
        check_specs=[
            naming.check_spec(
                RESTORABLE,
                FORKED_STATE,
                "The job that took the state can be restored.",
                blocking=True,
            )
        ],
        pool=naming.name("arroyo_compaction"),
        can_subset=True,  # so that a plan may leave out the check
    )
    @naming.bind
    @end_skipped_steps(key)
    @name_failed_checks
    def arroyo_forked_state(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        config: ForkConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
    ):
        from arroyo_dagster.state.operations.catalog.jobs import find_job

        with as_failure(), leases_skip():
            paths, forked = find_job(arroyo_store.reading(), config.job), True
            if key in context.selected_asset_keys:
                forked = yield from _fork_events(
                    context, paths, config, arroyo_store, arroyo_directory, key
                )
            if forked and dg.AssetCheckKey(key, RESTORABLE) in context.selected_asset_check_keys:
                yield check_result(_restorable(arroyo_store, paths), RESTORABLE, key)

    return arroyo_forked_state


def _fork_events(
    context: dg.AssetExecutionContext,
    paths: JobPaths,
    config: ForkConfig,
    store: ArroyoStateStore,
    directory: ArroyoDirectory,
    key: dg.AssetKey,
) -> Generator[Any, Any, bool]:
    """Plan or execute a fork, and give what Dagster shows of it; return whether it was done.

    Raises:
        dagster.Failure: the execution failed. It is never retried, since a retry after the
            publication would fork again.
    """
    if not config.execute:
        plan = _planned(paths, config, store, directory)
        context.log.info(_format_plan(plan))
        yield dg.AssetObservation(key, metadata=plan_metadata(plan), description=_format_plan(plan))
        return False
    if config.window:
        return (yield from _window_events(context, paths, config, store, directory, key))
    published: list[EditOutcome] = []
    try:
        outcome = _edit(paths, config, store).run(
            store.writable(), directory.directory(store), _options(context, config, published)
        )
    except LeaseHeldError:
        raise
    except ArroyoStateError as error:
        raise failure_of(error) from error
    except Exception:
        raise
    except BaseException:  # an interrupt
        yield from (_materialized(one, key) for one in published)
        raise
    if not outcome.published:
        text = f"nothing to change at epoch {outcome.plan.epoch}"
        yield dg.AssetObservation(key, metadata=plan_metadata(outcome.plan), description=text)
        return False
    yield _materialized(outcome, key)
    return True


def _window_events(
    context: dg.AssetExecutionContext,
    paths: JobPaths,
    config: ForkConfig,
    store: ArroyoStateStore,
    directory: ArroyoDirectory,
    key: dg.AssetKey,
) -> Generator[Any, Any, bool]:
    """Execute a fork in a window, as `_fork_events` does it for a stopped job."""
    from arroyo_dagster.state.operations.surgery.window import run_edit_window

    if config.approve:
        raise InputError(
            "a plan is approved, but the stop writes an epoch, so the plan gets another digest",
            next_step="leave `approve` empty, or stop the job before",
        )
    outcome = run_edit_window(
        store.writable(),
        directory.control(store),
        _edit(paths, config, store),
        _window_options(context, config),
    )
    context.log.info(f"{paths.root}: {outcome.end.value}")
    change = outcome.change
    if change is not None and change.published and outcome.end is not WindowEnd.UNDONE:
        yield _materialized(
            change,
            key,
            {
                "arroyo/window": outcome.end.value,
                "downtime": shown.duration(outcome.downtime_seconds * 1e6),
            },
        )
    if not outcome.started:
        raise dg.Failure(
            f"{paths.root}: NOT STARTED AGAIN: {outcome.problem}. Next: check it in Arroyo; this "
            "job, or a sensor of a maintenance window, starts it",
            allow_retries=False,
        )
    if outcome.problem is not None:
        raise failure_of(outcome.problem) from outcome.problem
    if change is None or not change.published:
        metadata = {} if outcome.plan is None else plan_metadata(outcome.plan)
        yield dg.AssetObservation(key, metadata=metadata, description=outcome.end.value)
        return False
    return True


def _restorable(store: ArroyoStateStore, paths: JobPaths) -> Verdict:
    """Return whether a job can be restored; a problem is a finding, so that nothing is retried."""
    try:
        return kept_verdict(RESTORABLE, store, paths)
    except ArroyoStateError as problem:
        return not_checked(paths, problem)


def _materialized(
    outcome: "EditOutcome", key: dg.AssetKey, more: Mapping[str, Any] | None = None
) -> "dg.MaterializeResult[Any]":
    version = dg.DataVersion(outcome.plan.digest)
    metadata = {**fork_metadata(outcome), **(more or {})}
    return dg.MaterializeResult(asset_key=key, metadata=metadata, data_version=version)


def _planned(
    paths: JobPaths, config: ForkConfig, store: ArroyoStateStore, directory: ArroyoDirectory
) -> "EditPlan":
    if config.approve:
        raise InputError(
            "a plan is approved, but nothing is executed",
            next_step="set `execute: true`, or leave `approve` empty",
        )
    return _edit(paths, config, store).plan(store.reading(), directory.directory(store))


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


def _options(
    context: dg.AssetExecutionContext, config: ForkConfig, published: "list[EditOutcome]"
) -> "EditOptions":
    from arroyo_dagster.state.operations.surgery.execute import EditOptions

    return EditOptions(
        approved=config.approve or None,
        owner=f"dagster run {context.run.run_id}",
        lease_wait_seconds=config.lease_wait_seconds,
        on_lease=context.log.info,
        quiet_seconds=config.quiet_seconds,
        on_published=published.append,
    )


def _window_options(context: dg.AssetExecutionContext, config: ForkConfig) -> "JobWindowOptions":
    from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions

    return JobWindowOptions(
        limits=configured(WindowLimits, config),
        owner=f"dagster run {context.run.run_id}",
        lease_wait_seconds=config.lease_wait_seconds,
        on_step=lambda step: context.log.info(step.did),
    )


def _format_plan(plan: "EditPlan") -> str:
    if plan.empty:
        return f"nothing to change at epoch {plan.epoch}"
    text = (
        f"plan {plan.digest} changes {len(plan.changed)} tables of {plan.paths.root} at epoch "
        f"{plan.epoch}; nothing was changed"
    )
    if plan.why_not is not None:
        return f"{text}, not now: {without_secrets(plan.why_not)}"
    return f"{text}. Next: run it with `execute: true` and this digest as `approve`"


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
