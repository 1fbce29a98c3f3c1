"""Fork the state of one Arroyo job into another, stopped one: the asset, its job and a schedule."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.compaction.maintenance_window import build_window_definitions
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.requests import schedule_status
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.serving import Turn
from arroyo_dagster.orchestration.surgery.state_change import ChangeConfig, build_change
from arroyo_dagster.orchestration.translator import FORKED_STATE, Names
from arroyo_dagster.redaction import without_secrets
from arroyo_dagster.state.model.job_facts import JobCondition

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.surgery.carried_files import StateSource
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit

FORK_CRON = "41 3 * * *"


class ForkConfig(ChangeConfig):
    """Whose state to fork into the pipeline of the asset."""

    source: str = Field(
        description="The job whose state is taken, as job or pipeline/job. It is only read, and "
        "may run.",
        examples=["orders/main"],
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
        job: into which job of this deployment, as job or pipeline/job; required with `nightly`.
        cron, timezone: when it does.
    """

    nightly: ForkConfig | None = None
    job: str = ""
    cron: str = FORK_CRON
    timezone: str = "UTC"


def build_forked_state(
    names: Names, fork: StateFork, *, window: bool, running: bool = False
) -> dg.Definitions:
    """Build `forked_state` of each Arroyo pipeline, the job `arroyo_fork`, and maybe a schedule.

    A run plans only, unless its configuration has `execute: true`. Runs of the schedule execute; a
    tick is skipped while the job that takes the state is not stopped, unless `window` of its
    configuration lets it run.

    Args:
        window: whether there is a maintenance window, whose sensor starts what was left stopped.

    Raises:
        InputError: `nightly` approves a plan: the next night has another one; or names no job. A
            job that is not listed fails the ticks only: the list may be that of an outage.
    """
    text = "Plan or execute a fork of the state of one job into another, stopped one."
    assets, job = build_change(names, FORKED_STATE, "arroyo_fork", text, ForkConfig, _edit)
    nightly = fork.nightly
    if nightly is not None and nightly.approve:
        raise InputError(
            "a schedule cannot approve a plan: the next tick has another one",
            next_step="leave `approve` of the nightly fork empty",
        )
    if nightly is not None and not fork.job:
        raise InputError(
            "the nightly fork names no job that takes the state",
            field="job",
            next_step="name it as job or pipeline/job",
        )
    if not assets:
        return dg.Definitions()
    parts = [dg.Definitions(assets=assets, jobs=[job])]
    if nightly is not None:
        schedule = _build_schedule(names, job, assets, fork, nightly, running)
        parts.append(dg.Definitions(schedules=[schedule]))
        if nightly.window and not window:
            parts.append(build_window_definitions(names, None))
    return dg.Definitions.merge(*parts)


# ---- the asset -----------------------------------------------------------------------------------


def _edit(turn: Turn, config: ForkConfig, context: Any) -> "AbstractContextManager[PlannableEdit]":
    """Return what a run plans or executes: a fork, or an evolve."""
    from arroyo_dagster.state.operations.surgery.evolve import plan_evolve, run_evolve
    from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit
    from arroyo_dagster.state.planning.surgery.overrides import parse_overrides

    paths, source = turn.pipeline.paths, _source(config, turn.tools.store)
    if not (config.evolve or config.overrides):
        edit = PlannableEdit(
            paths,
            plan=lambda to, status: plan_fork(source, to, paths, status),
            run=lambda to, status, options: run_fork(source, to, paths, status, options),
        )
        return nullcontext(edit)
    overrides = parse_overrides(config.overrides)
    edit = PlannableEdit(
        paths,
        plan=lambda to, status: plan_evolve(source, to, paths, status, overrides),
        run=lambda to, status, options: run_evolve(source, to, paths, status, overrides, options),
    )
    return nullcontext(edit)


def _source(config: ForkConfig, store: ArroyoStateStore) -> "StateSource":
    from arroyo_dagster.state.operations.catalog.jobs import find_job
    from arroyo_dagster.state.operations.surgery.carried_files import StateSource

    if config.source_url:
        store = ArroyoStateStore(checkpoint_url=config.source_url)
        store.check_fields()
    reading = store.reading()
    return StateSource(store=reading, paths=find_job(reading, config.source), epoch=config.epoch)


# ---- the schedule --------------------------------------------------------------------------------


def _build_schedule(
    names: Names,
    job: Any,
    assets: Sequence[dg.AssetsDefinition],
    fork: StateFork,
    nightly: ForkConfig,
    running: bool,
) -> dg.ScheduleDefinition:
    config = nightly.model_copy(update={"execute": True})
    stopped = "which is stopped for it." if config.window else "while that is stopped."

    @dg.schedule(
        name=names.name("arroyo_fork_schedule"),
        job=job,
        cron_schedule=fork.cron,
        execution_timezone=fork.timezone,
        default_status=schedule_status(running),
        description=f"Fork the state of {config.source} into {fork.job}, {stopped}",
        required_resource_keys=names.resources,
    )
    def arroyo_fork_schedule(context: dg.ScheduleEvaluationContext) -> Any:
        from arroyo_dagster.state.operations.compaction.rewrite_preconditions import take_snapshot

        tools = names.tools(context)
        with as_failure():
            pipeline = names.find(fork.job)
            key = names.key(FORKED_STATE, pipeline)
            ops = [asset.op.name for asset in assets if key in asset.keys]
            if not ops:
                raise InputError(
                    "the nightly fork names a managed job, which takes no state of an Arroyo job",
                    job=pipeline.root,
                    next_step="name an Arroyo job",
                )
            status = tools.directory.directory(tools.store)
            snapshot = take_snapshot(tools.store.reading(), pipeline.paths, status)
        runs = snapshot.answer.facts.condition is JobCondition.RUNNING
        if snapshot.why_not is not None and not (config.window and runs):
            reason = without_secrets(snapshot.why_not)
            return dg.SkipReason(
                f"{pipeline.root}: {reason}. Next: stop the job with a checkpoint before "
                f"{context.scheduled_execution_time:%H:%M}, or set `window`"
            )
        return dg.RunRequest(asset_selection=[key], run_config=dg.RunConfig({ops[0]: config}))

    return arroyo_fork_schedule
