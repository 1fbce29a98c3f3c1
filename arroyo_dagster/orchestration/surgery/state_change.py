"""Assets that change the state of one stopped Arroyo job: how they plan, execute and report."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, InputError, LeaseHeldError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import format_verdict
from arroyo_dagster.orchestration.compaction.assets import published_events
from arroyo_dagster.orchestration.failures import failure_of
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.requests import asset_job
from arroyo_dagster.orchestration.serving import PipelineStep, Turn, build_pipeline_assets
from arroyo_dagster.orchestration.settings import LaunchpadConfig, configured, setting_field
from arroyo_dagster.orchestration.translator import SPARK, Names
from arroyo_dagster.redaction import without_secrets
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.maintenance_window import (
    WindowEnd,
    WindowLimits,
    WindowOutcome,
    WindowSteps,
)
from arroyo_dagster.state.model.rewrite import QuietSettings

if TYPE_CHECKING:
    from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
    from arroyo_dagster.state.operations.surgery.window import EditWindow, PlannableEdit

Edit = Callable[[Turn, Any, Any], "AbstractContextManager[PlannableEdit]"]
"""Opens what a run plans or executes for a pipeline, with the configuration and the context of the
step."""


class ChangeConfig(LaunchpadConfig):
    """How a change of a job's state is planned, approved and executed."""

    execute: bool = Field(
        default=False, description="Change the state. Otherwise plan only; change nothing."
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

    def check_approval(self) -> None:
        """Check that a plan is approved only where exactly it can be executed.

        Raises:
            InputError: it cannot be.
        """
        if self.approve and not self.execute:
            raise InputError(
                "a plan is approved, but nothing is executed",
                next_step="set `execute: true`, or leave `approve` empty",
            )
        if self.approve and self.window:
            raise InputError(
                "a plan is approved, but the stop writes an epoch, so the plan gets another digest",
                next_step="leave `approve` empty, or stop the job before",
            )


def build_change(
    names: Names,
    table: str,
    job: str,
    description: str,
    config_class: type[ChangeConfig],
    edit: Edit,
) -> tuple[list[dg.AssetsDefinition], Any]:
    """Build the asset of each Arroyo pipeline whose runs change its state, and their job.

    A run changes one pipeline.

    Args:
        table: the asset, as the translator names it.
        job, description: of the job.
    """

    def work(turn: Turn, key: dg.AssetKey, config: ChangeConfig, context: Any) -> Iterator[Any]:
        config.check_approval()
        with edit(turn, config, context) as opened:
            yield from _steps(turn, key, config, opened)

    arroyos = {pipeline: () for pipeline in names.pipelines.pipelines if not pipeline.managed}
    step = PipelineStep(
        table=table,
        config=config_class,
        work=work,
        pool="arroyo_compaction",
        resources=[names.name(SPARK)],
        check=_check_single,
        in_turn=True,
    )
    assets = build_pipeline_assets(names, step, arroyos)
    return assets, asset_job(names, job, assets, description)


def _check_single(selected: Sequence[ListedPipeline]) -> None:
    """Fail unless a run changes one pipeline.

    Raises:
        dagster.Failure: it selects none, or several.
    """
    if len(selected) != 1:
        raise dg.Failure(
            f"{len(selected)} pipelines are selected; a run changes one. Next: materialize the "
            "asset of one pipeline",
            allow_retries=False,
        )


def _steps(
    turn: Turn, key: dg.AssetKey, config: ChangeConfig, edit: "PlannableEdit"
) -> Iterator[Any]:
    """Plan or execute a change, and yield what Dagster shows of it.

    Raises:
        dagster.Failure: the execution failed. It is never retried, since a retry after the
            publication would change the state again.
        LeaseHeldError: another process maintains the job, which was not changed.
    """
    store = turn.tools.store
    if config.execute:
        try:
            yield from _execute(turn, key, config, edit)
        except LeaseHeldError:
            raise
        except ArroyoStateError as error:
            raise failure_of(error) from error
        return
    plan = edit.plan(store.reading(), turn.tools.directory.directory(store))
    text = _format_plan(plan)
    turn.log.info(text)
    yield dg.AssetObservation(key, metadata=plan_metadata(plan), description=text)


def _execute(
    turn: Turn, key: dg.AssetKey, config: ChangeConfig, edit: "PlannableEdit"
) -> Iterator[Any]:
    from arroyo_dagster.state.operations.catalog.footers import check_newest, check_restorable

    store, root, changes = turn.tools.store, edit.paths.root, list["EditOutcome"]()
    ended: dict[str, Any] = {"arroyo/window": "interrupted"} if config.window else {}

    def event(change: "EditOutcome") -> "dg.MaterializeResult[Any]":
        return dg.MaterializeResult(
            asset_key=key,
            metadata={**outcome_metadata(change), **ended},
            data_version=dg.DataVersion(change.plan.digest),
        )

    run = partial(_run_window if config.window else _run, turn, config, edit, changes)
    outcome = yield from published_events(run, changes, event)
    plan, text = outcome.plan, ""
    if isinstance(outcome, WindowOutcome):
        text = outcome.end.value
        turn.log.info(text)
        ended["arroyo/window"] = text
        ended["downtime"] = shown.duration(outcome.downtime_seconds * 1e6)
        if outcome.end is WindowEnd.UNDONE:
            changes.clear()
    yield from map(event, changes)
    if isinstance(outcome, WindowOutcome):
        if not outcome.started:
            raise dg.Failure(
                f"{root}: NOT STARTED AGAIN: {outcome.problem}. Next: check it in Arroyo; this "
                "job, or a sensor of a maintenance window, starts it"
            )
        if outcome.problem is not None:
            raise outcome.problem
    elif plan is not None:
        text = f"nothing to change at epoch {plan.epoch}"
    if not changes:
        metadata = {} if plan is None else plan_metadata(plan)
        yield dg.AssetObservation(key, metadata=metadata, description=text)
        return
    verdict = check_newest(store.reading(), edit.paths, check_restorable)
    if not verdict.passed:
        why = format_verdict(verdict)
        raise dg.Failure(f"{root} cannot be restored after the change: {why}")


def _run(
    turn: Turn, config: ChangeConfig, edit: "PlannableEdit", changes: "list[EditOutcome]"
) -> "EditOutcome":
    """Change the state of a stopped job."""
    from arroyo_dagster.state.operations.surgery.execute import EditOptions

    store = turn.tools.store
    options = EditOptions(
        approved=config.approve or None,
        owner=turn.owner,
        lease_wait_seconds=turn.lease_wait_seconds(config.lease_wait_seconds),
        on_lease=turn.log.info,
        quiet_seconds=config.quiet_seconds,
        on_published=changes.append,
    )
    return edit.run(store.writable(), turn.tools.directory.directory(store), options)


def _run_window(
    turn: Turn, config: ChangeConfig, edit: "PlannableEdit", changes: "list[EditOutcome]"
) -> "EditWindow":
    """Change the state of a job that runs, while it is stopped for it."""
    from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions
    from arroyo_dagster.state.operations.surgery.window import run_edit_window

    store = turn.tools.store
    options = JobWindowOptions(
        limits=configured(WindowLimits, config),
        owner=turn.owner,
        lease_wait_seconds=turn.lease_wait_seconds(config.lease_wait_seconds),
        on_step=lambda step: turn.log.info(step.did),
        on_change=lambda change: changes.extend([change] * change.published),
    )
    return run_edit_window(store.writable(), turn.tools.directory.control(store), edit, options)


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


# ---- metadata of a planned or executed change of a job's state -----------------------------------


def plan_metadata(plan: "EditPlan") -> dict[str, Any]:
    """Return what becomes of each table, what outputs will show, and the digest to approve."""
    return shown.known(
        {
            "arroyo/plan": plan.digest,
            "job": str(plan.paths.root),
            "epoch": int(plan.epoch),
            "operation": plan.edit.name,
            "why not": None if plan.why_not is None else without_secrets(plan.why_not),
            "tables": shown.table(
                {
                    "operator": table.operator,
                    "table": table.table,
                    "action": table.action.value,
                    "files": len(table.files),
                    "takes the state of": table.source,
                    "reason": table.reason,
                }
                for table in plan.tables
            ),
            "seen twice": _texts(plan.duplicate_outputs),
            "never seen": _texts(plan.missing_outputs),
            "not known": _texts(plan.unknown),
            "preconditions": shown.table(
                {
                    "precondition": precondition.name,
                    "met": precondition.met,
                    "evidence": without_secrets(precondition.evidence),
                }
                for precondition in plan.preconditions
            ),
        }
    )


def outcome_metadata(outcome: "EditOutcome") -> dict[str, Any]:
    """Return what was done, and the record that undoes it."""
    return {
        **plan_metadata(outcome.plan),
        "arroyo/record": str(outcome.record),
        "metadata objects": shown.table(
            {"object": path, "sha256 before": before, "sha256 after": after}
            for path, (before, after) in outcome.objects.items()
        ),
        "unlisted files": len(outcome.unlisted),
        "undo": f"arroyo-state undo {outcome.plan.paths.root} --yes",
    }


def _texts(texts: Iterable[str]) -> Any:
    return shown.table({"what": text} for text in texts)
