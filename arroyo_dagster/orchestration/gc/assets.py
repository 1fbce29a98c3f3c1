"""gc as assets: `retained_epochs` of managed pipelines, `orphans` and `dead_jobs` of the root.

A run plans and executes in one step, so that it executes what was proved and approved. It deletes
only if its configuration enables it and the credentials of the store allow it; everything else
needs read-only credentials.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, ConflictError, LeaseHeldError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import format_verdict
from arroyo_dagster.orchestration.failures import as_failure, failure_of
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.runners import Tools
from arroyo_dagster.orchestration.serving import (
    BoundsConfig,
    PipelineStep,
    Turn,
    build_pipeline_assets,
    serve,
    unlisted_pipeline,
)
from arroyo_dagster.orchestration.settings import configured, setting_field
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    COMPACTED_STATE,
    DEAD_JOBS,
    ORPHANS,
    RETAINED_EPOCHS,
    Names,
)
from arroyo_dagster.state.model.garbage import (
    DeletionSettings,
    GcPlan,
    GraceSettings,
    OrphanSettings,
    PlanKind,
    Retention,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.model.units import format_bytes

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.gc.execute import GcOutcome
    from arroyo_dagster.state.operations.gc.plan import GcRequest


class GcRunConfig(BoundsConfig):
    """Fields that all three kinds of gc share."""

    kind: ClassVar[PlanKind]
    dry_run: bool = Field(default=True, description="Plan only. Set to false to delete.")
    quarantine: bool = setting_field(DeletionSettings, "quarantine")
    max_checkpoint_slowdown: float = setting_field(DeletionSettings, "max_checkpoint_slowdown")
    journal_days: float | None = setting_field(DeletionSettings, "journal_micros")
    lease_wait_seconds: float = setting_field(LeaseSettings, "lease_wait_seconds")
    needs_approval: bool = Field(
        default=False, description="Delete only the plan that `approved_plan` names."
    )
    approved_plan: str | None = Field(
        default=None,
        description="The digest of a plan that a person has reviewed: it stands in the metadata of "
        "the asset. A run deletes nothing else.",
    )

    def asked(self, tools: Tools) -> "GcRequest":
        """Return the request for the state package."""
        from arroyo_dagster.state.operations.gc.plan import GcRequest

        kind = self.kind
        purge_after = configured(OrphanSettings, self).purge_after_micros
        return GcRequest(
            kind=kind,
            retention=configured(Retention, self) if kind is PlanKind.EXPIRE else None,
            grace_micros=configured(GraceSettings, self).grace_micros,
            purge_after_micros=purge_after if kind is PlanKind.ORPHANS else None,
            directory=tools.store.directory(self.assumed()),
        )

    def assumed(self) -> dict[str, str]:
        """Return the status that the user assumes, by job."""
        return {}

    def moves(self) -> bool:
        """Return whether objects are moved to quarantine. Raises InputError: contradictory."""
        return configured(OrphanSettings, self).moves(self.kind, quarantine=self.quarantine)


class GcConfig(GcRunConfig):
    """Which epochs to keep. With both fields, an epoch stays if either keeps it."""

    kind = PlanKind.EXPIRE
    keep_epochs: int | None = setting_field(Retention, "keep_epochs", default=10)
    keep_days: float | None = setting_field(Retention, "keep_micros")


class OrphansConfig(GcRunConfig):
    """How long to keep unreferenced objects, and what earlier runs moved to quarantine."""

    kind = PlanKind.ORPHANS
    older_than_days: float = setting_field(GraceSettings, "grace_micros")
    delete: bool = setting_field(OrphanSettings, "delete")
    purge_after_days: float = setting_field(OrphanSettings, "purge_after_micros")


class DeadJobsConfig(GcRunConfig):
    """When a complete job may be deleted."""

    kind = PlanKind.DEAD_JOB
    older_than_days: float = setting_field(GraceSettings, "grace_micros")
    gone: list[str] = Field(
        default_factory=list, description="Jobs of which you say that they will never run again."
    )

    def assumed(self) -> dict[str, str]:
        """Return these jobs as gone."""
        return dict.fromkeys(self.gone, "gone")


# ---- epochs of one pipeline ----------------------------------------------------------------------


def build_epoch_expiry(
    names: Names, pipelines: Sequence[ListedPipeline], compacted: Sequence[ListedPipeline]
) -> list[dg.AssetsDefinition]:
    """Build the asset of each pipeline's kept epochs, made by one step.

    Args:
        compacted: the pipelines that have `compacted_state`, on which their epochs depend.
    """
    upstream = {
        pipeline: [names.key(COMPACTED_STATE if pipeline in compacted else CHECKPOINT, pipeline)]
        for pipeline in pipelines
    }
    step = PipelineStep(table=RETAINED_EPOCHS, config=GcConfig, work=_expire, pool="arroyo_gc")
    return build_pipeline_assets(names, step, upstream)


def _expire(turn: Turn, key: dg.AssetKey, config: GcConfig, context: Any) -> Iterator[Any]:
    run = _GcRun(turn, config)
    try:
        run.plan_and_execute()
    finally:  # of an interrupted run, too: what it deleted stands in the journal
        for plan in run.plans:
            yield dg.AssetObservation(
                key, description=format_plan(plan), metadata=plan_metadata(plan)
            )
        for outcome in run.outcomes:
            yield dg.MaterializeResult(
                asset_key=key,
                metadata=outcome_metadata(outcome),
                data_version=dg.DataVersion(outcome.run or outcome.plan.digest),
            )


@dataclass
class _GcRun:
    """Plans a collection for one job, and carries it out if the run may.

    Attributes:
        plans: what would be deleted, and was not.
        outcomes: what was deleted.
    """

    turn: Turn
    config: GcRunConfig
    plans: "list[GcPlan]" = field(default_factory=list)
    outcomes: "list[GcOutcome]" = field(default_factory=list)

    def plan_and_execute(self) -> None:
        """Plan, and execute what is configured and approved.

        Raises:
            dagster.Failure: another plan was approved, or the store does not show the outcome.
            ArroyoStateError: as `plan_gc` and `run_gc`.
        """
        from arroyo_dagster.state.operations.gc.execute import GcOptions
        from arroyo_dagster.state.operations.gc.plan import plan_gc

        turn, config = self.turn, self.config
        store, paths = turn.tools.store, turn.pipeline.paths
        request = config.asked(turn.tools)
        plan = plan_gc(store.reading(), paths, request)
        if not plan.objects and not plan.purges:
            turn.log.info("nothing to delete")
            return
        if not self._may_delete(plan):
            self.plans.append(plan)
            return
        options = GcOptions(
            quarantine=config.moves(),
            max_checkpoint_slowdown=config.max_checkpoint_slowdown,
            journal_micros=configured(DeletionSettings, config).journal_micros,
            approved=config.approved_plan is not None,
            owner=turn.owner,
            lease_wait_seconds=turn.lease_wait_seconds(config.lease_wait_seconds),
            on_lease=turn.log.info,
            on_progress=progress_logger(turn.log.info),
        )
        run = partial(turn.tools.runner.run_gc, store.writable(), paths, request, plan=plan)
        done: list[GcOutcome] = []
        try:
            outcome: GcOutcome = run(replace(options, on_done=done.append))
        except LeaseHeldError:
            self.outcomes += done
            raise
        except ConflictError as error:
            self.outcomes += done
            if self.config.approved_plan is None:
                raise
            raise failure_of(error) from error  # no later run carries this plan out
        except BaseException:
            self.outcomes += done
            raise
        self.outcomes.append(outcome)
        turn.log.info(format_outcome(outcome))
        if outcome.deleted != plan.objects:
            raise dg.Failure(
                f"{outcome.deleted} of {plan.objects} objects are gone; the store still has the "
                "others. Next: run it again, and check the permission to delete",
                allow_retries=False,
            )
        if request.kind is not PlanKind.DEAD_JOB:
            self._check_files()

    def _may_delete(self, plan: "GcPlan") -> bool:
        """Whether this run deletes: configured for it, and approved where approval is asked for."""
        config, log = self.config, self.turn.log
        if config.dry_run:
            log.info(f"dry run: {format_plan(plan)}")
            return False
        if config.approved_plan is not None and config.approved_plan != plan.digest:
            raise dg.Failure(
                f"plan {config.approved_plan} was approved, but the current plan is "
                f"{plan.digest}; nothing was deleted. Next: review the new plan and approve it",
                allow_retries=False,
            )
        if config.needs_approval and config.approved_plan is None:
            log.info(
                f"waits for approval: {format_plan(plan)}; to execute it, run again with "
                f"approved_plan: {plan.digest}"
            )
            return False
        return True

    def _check_files(self) -> None:
        """Check that every file that the newest epoch lists still exists.

        Raises:
            dagster.Failure: one does not.
        """
        from arroyo_dagster.state.operations.catalog.footers import check_files_exist, check_newest

        store, paths = self.turn.tools.store.reading(), self.turn.pipeline.paths
        verdict = check_newest(store, paths, check_files_exist)
        if not verdict.passed:
            raise dg.Failure(
                f"the newest epoch is damaged: {format_verdict(verdict)}", allow_retries=False
            )


# ---- the whole root ------------------------------------------------------------------------------

_CONFIGS: dict[str, type[GcRunConfig]] = {ORPHANS: OrphansConfig, DEAD_JOBS: DeadJobsConfig}


def build_root_gc(names: Names, table: str) -> dg.AssetsDefinition:
    """Build `orphans` or `dead_jobs`: one run looks at every job below the root."""
    config_class = _CONFIGS[table]
    spec = names.spec(table).replace_attributes(skippable=True)

    @dg.multi_asset(
        name=names.name(f"arroyo_{table}"),
        specs=[spec],
        pool=names.name("arroyo_gc"),
        required_resource_keys=names.resources,
    )
    def collection(
        context: dg.AssetExecutionContext,
        config: config_class,  # type: ignore[valid-type]
    ) -> Any:
        tools, runs = names.tools(context), list[_GcRun]()
        gc_config: GcRunConfig = config
        with as_failure():
            jobs, others = _allowed(gc_config, tools)

        def work(turn: Turn) -> Iterator[Any]:
            runs.append(_GcRun(turn, gc_config))
            runs[-1].plan_and_execute()
            yield from ()

        try:
            yield from serve(context, jobs, work, gc_config, tools)
        except GeneratorExit:
            raise
        except BaseException:  # what was deleted is on record all the same
            yield from _root_events(spec.key, runs, others)
            raise
        yield from _root_events(spec.key, runs, others)

    return collection


def _root_events(
    key: dg.AssetKey, runs: "Sequence[_GcRun]", others: "dict[str, str]"
) -> Iterator[Any]:
    """Yield what a run over the root deleted, or what it would delete, with a row for each job."""
    plans = [(run, plan) for run in runs for plan in run.plans]
    outcomes = [(run, outcome) for run in runs for outcome in run.outcomes]
    rows = [
        {"job": run.turn.pipeline.root, "outcome": format_outcome(outcome)}
        for run, outcome in outcomes
    ]
    rows += [{"job": run.turn.pipeline.root, "outcome": format_plan(plan)} for run, plan in plans]
    rows += [{"job": root, "outcome": reason} for root, reason in others.items()]
    metadata = shown.known({"jobs": shown.table(rows)})
    if outcomes:
        metadata["arroyo/objects"] = sum(outcome.deleted for _, outcome in outcomes)
        metadata["arroyo/bytes"] = sum(outcome.size_bytes for _, outcome in outcomes)
        yield dg.MaterializeResult(asset_key=key, metadata=metadata)
    elif rows:
        yield dg.AssetObservation(key, metadata=metadata)


def _allowed(config: GcRunConfig, tools: Tools) -> "tuple[list[ListedPipeline], dict[str, str]]":
    """Return the jobs that may be collected, and why others may not.

    Of orphans: managed jobs, and Arroyo jobs with a sufficient source of their status. Of dead
    jobs: those that Arroyo's API or database, or the configuration, says are gone.
    """
    from arroyo_dagster.state.operations.gc.plan import check_allowed
    from arroyo_dagster.state.operations.gc.roots import newest_root
    from arroyo_dagster.state.planning.gc.safety_checks import why_dead
    from arroyo_dagster.state.storage.concurrency import concurrently

    request, reading = config.asked(tools), tools.store.reading()
    jobs = tools.store.jobs()
    maintained = set(tools.store.maintained(str(paths.root) for paths in jobs))
    jobs = [paths for paths in jobs if str(paths.root) in maintained]
    dead = config.kind is PlanKind.DEAD_JOB
    answers = dict(zip(jobs, request.directory.look_up(jobs), strict=True)) if dead else {}

    def problem(paths: JobPaths) -> str | None:
        try:
            if dead:
                head = newest_root(reading, paths)
                others = [answer for other, answer in answers.items() if other != paths]
                managed = head is not None and head.managed
                why_dead(paths, answers[paths], others, managed=managed)
            else:
                check_allowed(reading, paths, request)
        except ArroyoStateError as error:
            return error.message
        return None

    problems = dict(zip(jobs, concurrently(problem, jobs), strict=True))
    allowed = [unlisted_pipeline(str(paths.root)) for paths in jobs if problems[paths] is None]
    others = {str(paths.root): f"not touched: {why}" for paths, why in problems.items() if why}
    return allowed, ({} if dead else others)


# ---- format a gc run for people: its plan, its proof, its outcome and its journal ----------------

_OBJECTS_LISTED = 20
"""How many objects a page lists; `arroyo-state gc plan` and `sql @journal` list all."""


def format_plan(plan: GcPlan) -> str:
    """Format the plan as one line for the log of a run."""
    epochs = f"{shown.counted(len(plan.epochs), 'epoch')}, " if plan.kind is PlanKind.EXPIRE else ""
    objects = _format_objects(plan.objects, plan.size_bytes)
    return f"{epochs}{objects} would be deleted; plan {plan.digest}"


def format_outcome(outcome: "GcOutcome") -> str:
    """Format the outcome as one line for the log of a run."""
    aside = f", moved to {outcome.quarantine}" if outcome.quarantine else ""
    return f"{_format_objects(outcome.deleted, outcome.size_bytes)} deleted{aside}"


def _format_objects(count: int, size_bytes: int) -> str:
    return f"{shown.counted(count, 'object')}, {shown.size(size_bytes)}"


def plan_metadata(plan: GcPlan) -> dict[str, Any]:
    """Return what a plan would delete, and why the rest stays."""
    rule = {name: value for name, value in plan.rule.items() if value is not None}
    return shown.known(
        {
            "would be deleted": _format_objects(plan.objects, plan.size_bytes),
            "epochs": _format_epochs(plan),
            "arroyo/plan": plan.digest,
            "rule": ", ".join(f"{name}: {value}" for name, value in rule.items()) or None,
            "why the rest stays": shown.table(_stays(plan)),
            "what goes first": shown.table(_objects(plan.data)),
            "foreign": shown.table({"object": str(path)} for path in plan.foreign),
            "remains of interrupted writes": len(plan.remains) or None,
            **proof_metadata(plan),
        }
    )


def _format_epochs(plan: GcPlan) -> str | None:
    """Format which epochs go and which stay; None if no epoch goes."""
    if not plan.epochs:
        return None
    from_epoch = "" if plan.keep_from is None else f", from epoch {plan.keep_from} on"
    kept = plan.proof.epochs - len(plan.epochs)
    return f"{len(plan.epochs):,} removed, {kept:,} kept{from_epoch}"


def _objects(objects: Iterable[StoredObject]) -> Iterable[Mapping[str, Any]]:
    return (
        {"object": str(file.path), "size": format_bytes(file.size_bytes)}
        for file in islice(objects, _OBJECTS_LISTED)
    )


def _stays(plan: GcPlan) -> Iterable[Mapping[str, Any]]:
    return (
        {"because": reason, "objects": f"{count:,}", "size": format_bytes(size)}
        for reason, (count, size) in plan.stays.items()
    )


def proof_metadata(plan: GcPlan) -> dict[str, Any]:
    """Return the proof that nothing that stays needs what would be deleted."""
    proof = plan.proof
    read = {
        "root": len(proof.roots),
        "epoch": proof.epochs,
        "referenced file": proof.referenced,
        "listed object": proof.listed or 0,
    }
    counts = (shown.counted(count, noun) for noun, count in read.items())
    return shown.known(
        {
            "proof": f"read {', '.join(counts)}",
            "arroyo/digest_of_referenced": proof.digest,
            "arroyo/head": proof.head,
            "arroyo/condition": proof.condition,
        }
    )


def outcome_metadata(outcome: "GcOutcome") -> dict[str, Any]:
    """Return what a run deleted, as read back; Dagster plots the numbers over time."""
    plan = outcome.plan
    return shown.known(
        {
            "deleted": _format_objects(outcome.deleted, outcome.size_bytes),
            "epochs": _format_epochs(plan),
            "data files": _format_files(plan),
            "engine": "; ".join(map(str, outcome.engines)) or None,
            "arroyo/plan": plan.digest,
            "arroyo/journal": outcome.run and f"{plan.paths.journal}/{outcome.run}",
            "arroyo/quarantine": outcome.quarantine,
        }
    )


def _format_files(plan: GcPlan) -> str:
    return f"{shown.counted(len(plan.data), 'file')}, {shown.size(plan.data.size_bytes)}"
