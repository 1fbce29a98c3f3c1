"""Assets that change the state of one stopped Arroyo job: how they plan, execute and report."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, InputError, LeaseHeldError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import format_verdict
from arroyo_dagster.orchestration.failures import as_failure, failure_of
from arroyo_dagster.orchestration.launchpad import LaunchpadConfig
from arroyo_dagster.orchestration.pipelines.model import Pipeline
from arroyo_dagster.orchestration.requests import maintenance_tags
from arroyo_dagster.orchestration.serving import SINCE, WAITING, Tools
from arroyo_dagster.orchestration.settings import configured, setting_field
from arroyo_dagster.orchestration.surgery.rendering import outcome_metadata, plan_metadata
from arroyo_dagster.orchestration.translator import SPARK, Names, in_layers
from arroyo_dagster.redaction import without_secrets
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.maintenance_window import WindowEnd, WindowLimits, WindowSteps
from arroyo_dagster.state.model.rewrite import QuietSettings

if TYPE_CHECKING:
    from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions
    from arroyo_dagster.state.operations.surgery.execute import EditOptions
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit


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


def change_assets(
    names: Names,
    table: str,
    name: str,
    run: Callable[[Pipeline, Any, ChangeConfig], "ChangeRun"],
    config_class: type[ChangeConfig],
) -> list[dg.AssetsDefinition]:
    """Build the asset of each Arroyo pipeline whose runs change its state.

    Args:
        table: the asset, as the translator names it.
        name: of its op.
        run: returns what a run does for a pipeline, with the step's context and configuration.
    """
    specs = [
        (
            pipeline,
            names.spec(table, pipeline).replace_attributes(skippable=True),  # a plan makes nothing
        )
        for pipeline in names.pipelines.pipelines
        if not pipeline.managed
    ]

    def build(op: str, layer: Any) -> dg.AssetsDefinition:
        keys = {spec.key: pipeline for pipeline, spec in layer}

        @dg.multi_asset(
            name=op,
            specs=[spec for _, spec in layer],
            pool=names.name("arroyo_compaction"),
            can_subset=True,
            required_resource_keys={*names.resources, names.name(SPARK)},
        )
        def change(
            context: dg.AssetExecutionContext,
            config: config_class,  # type: ignore[valid-type]
        ) -> Any:
            wanted = [keys[key] for key in keys if key in context.selected_asset_keys]
            if len(wanted) != 1:
                raise dg.Failure(
                    f"{len(wanted)} pipelines are selected; a run changes one. Next: materialize "
                    "the asset of one pipeline",
                    allow_retries=False,
                )
            yield from run(wanted[0], context, config).events()

        return change

    return in_layers(names.name(name), specs, build)


def change_job(
    names: Names, name: str, assets: Sequence[dg.AssetsDefinition], description: str
) -> Any:
    """Return the job of such assets: one process a run."""
    return dg.define_asset_job(
        names.name(name),
        description=description,
        selection=dg.AssetSelection.assets(*assets),
        executor_def=dg.in_process_executor,
        run_tags=maintenance_tags(names.deployment),
    )


@dataclass(frozen=True, kw_only=True)
class ChangeRun:
    """One run of such an asset.

    Attributes:
        edit: opens what the run plans or executes, for the paths of the job.
    """

    context: dg.AssetExecutionContext
    key: dg.AssetKey
    pipeline: Pipeline
    config: ChangeConfig
    tools: Tools
    edit: "Callable[[JobPaths], AbstractContextManager[PlannableEdit]]"

    def events(self) -> Generator[Any, Any, None]:
        """Plan or execute the change, and give what Dagster shows of it.

        Raises:
            dagster.Failure: the execution failed. It is never retried, since a retry after the
                publication would change the state again.
        """
        from arroyo_dagster.state.operations.catalog.footers import check_newest, check_restorable

        paths, store = self.pipeline.paths, self.tools.store
        with as_failure():
            self._check_approval()
            with self.edit(paths) as edit:
                try:
                    changed = yield from self._change_events(edit)
                except LeaseHeldError as error:
                    self.context.log.warning(str(error))
                    text = f"waiting, because {error.message}"
                    yield dg.AssetObservation(
                        self.key,
                        description=text,
                        metadata={WAITING: error.message, SINCE: time.time()},
                    )
                    return
        if changed:
            verdict = check_newest(store.reading(), paths, check_restorable)
            if not verdict.passed:
                raise dg.Failure(
                    f"{paths.root} cannot be restored after the change: {format_verdict(verdict)}",
                    allow_retries=False,
                )

    def _check_approval(self) -> None:
        """Check that a plan is approved only where exactly it can be executed."""
        if self.config.approve and not self.config.execute:
            raise InputError(
                "a plan is approved, but nothing is executed",
                next_step="set `execute: true`, or leave `approve` empty",
            )
        if self.config.approve and self.config.window:
            raise InputError(
                "a plan is approved, but the stop writes an epoch, so the plan gets another digest",
                next_step="leave `approve` empty, or stop the job before",
            )

    def _change_events(self, edit: "PlannableEdit") -> Generator[Any, Any, bool]:
        """Return whether the state was changed."""
        if not self.config.execute:
            plan = edit.plan(self.tools.store.reading(), self._status())
            text = _format_plan(plan)
            self.context.log.info(text)
            yield dg.AssetObservation(self.key, metadata=plan_metadata(plan), description=text)
            return False
        if self.config.window:
            return (yield from self._window_events(edit))
        published: list[EditOutcome] = []
        try:
            outcome = edit.run(
                self.tools.store.writable(),
                self._status(),
                self._options(published),
            )
        except LeaseHeldError:
            raise
        except ArroyoStateError as error:
            raise failure_of(error) from error
        except Exception:
            raise
        except BaseException:  # an interrupt
            yield from (self._materialized(one) for one in published)
            raise
        if not outcome.published:
            text = f"nothing to change at epoch {outcome.plan.epoch}"
            metadata = plan_metadata(outcome.plan)
            yield dg.AssetObservation(self.key, metadata=metadata, description=text)
            return False
        yield self._materialized(outcome)
        return True

    def _window_events(self, edit: "PlannableEdit") -> Generator[Any, Any, bool]:
        """Execute the change in a window, as `_change_events` does it for a stopped job."""
        from arroyo_dagster.state.operations.surgery.window import run_edit_window

        control = self.tools.directory.control(self.tools.store)
        outcome = run_edit_window(
            self.tools.store.writable(), control, edit, self._window_options()
        )
        self.context.log.info(f"{edit.paths.root}: {outcome.end.value}")
        change = outcome.change
        if change is not None and change.published and outcome.end is not WindowEnd.UNDONE:
            downtime = shown.duration(outcome.downtime_seconds * 1e6)
            told = {"arroyo/window": outcome.end.value, "downtime": downtime}
            yield self._materialized(change, told)
        if not outcome.started:
            raise dg.Failure(
                f"{edit.paths.root}: NOT STARTED AGAIN: {outcome.problem}. Next: check it in "
                "Arroyo; this job, or a sensor of a maintenance window, starts it",
                allow_retries=False,
            )
        if outcome.problem is not None:
            raise failure_of(outcome.problem) from outcome.problem
        if change is None or not change.published:
            metadata = {} if outcome.plan is None else plan_metadata(outcome.plan)
            text = outcome.end.value
            yield dg.AssetObservation(self.key, metadata=metadata, description=text)
            return False
        return True

    def _status(self) -> "JobDirectory":
        return self.tools.directory.directory(self.tools.store)

    def _materialized(
        self, outcome: "EditOutcome", more: Mapping[str, Any] | None = None
    ) -> "dg.MaterializeResult[Any]":
        return dg.MaterializeResult(
            asset_key=self.key,
            metadata={**outcome_metadata(outcome), **(more or {})},
            data_version=dg.DataVersion(outcome.plan.digest),
        )

    def _options(self, published: "list[EditOutcome]") -> "EditOptions":
        from arroyo_dagster.state.operations.surgery.execute import EditOptions

        return EditOptions(
            approved=self.config.approve or None,
            owner=f"dagster run {self.context.run.run_id}",
            lease_wait_seconds=self.config.lease_wait_seconds,
            on_lease=self.context.log.info,
            quiet_seconds=self.config.quiet_seconds,
            on_published=published.append,
        )

    def _window_options(self) -> "JobWindowOptions":
        from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions

        return JobWindowOptions(
            limits=configured(WindowLimits, self.config),
            owner=f"dagster run {self.context.run.run_id}",
            lease_wait_seconds=self.config.lease_wait_seconds,
            on_step=lambda step: self.context.log.info(step.did),
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
