"""gc as assets: plan, check the proof, approve, execute, read back.

A run plans and executes in one step, so that it executes what was checked and approved. It deletes
only if its configuration enables it and the credentials of the store allow it; everything else
needs read-only credentials.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError, ProtocolError
from arroyo_dagster.orchestration.catalog.checks import FILES_EXIST, check_result, kept_verdict
from arroyo_dagster.orchestration.failures import (
    as_failure,
    failure_of,
    name_failed_checks,
    of_selected,
)
from arroyo_dagster.orchestration.gc import rendering as gc_shown
from arroyo_dagster.orchestration.launchpad import LaunchpadConfig
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.settings import configured, setting_field
from arroyo_dagster.orchestration.skips import end_skipped_steps, lease_wait_seconds, leases_skip
from arroyo_dagster.orchestration.translator import (
    COMPACTED_STATE,
    DEAD_JOBS,
    GC_JOURNAL,
    ORPHANS,
    RETAINED_EPOCHS,
    Naming,
    specified_assets,
)
from arroyo_dagster.state.model.garbage import (
    DeletionSettings,
    GraceSettings,
    OrphanSettings,
    PlanKind,
    Retention,
)
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.planning.verify.findings import Verdict

if TYPE_CHECKING:
    from arroyo_dagster.state.model.garbage import GcPlan
    from arroyo_dagster.state.model.layout import JobPaths
    from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome
    from arroyo_dagster.state.operations.gc.plan import GcRequest

PROVED = "referenced_set_proved"
READ_BACK = "read_back"


class GcRunConfig(LaunchpadConfig):
    """Fields that all three kinds of gc share."""

    dry_run: bool = Field(default=True, description="Plan only. Set to false to delete.")
    quarantine: bool = setting_field(DeletionSettings, "quarantine")
    max_checkpoint_slowdown: float = setting_field(DeletionSettings, "max_checkpoint_slowdown")
    journal_days: float | None = setting_field(DeletionSettings, "journal_micros")
    lease_wait_seconds: float = setting_field(LeaseSettings, "lease_wait_seconds")
    needs_approval: bool = Field(
        default=False, description="Delete only the plan that `approved_plan` names."
    )
    approved_plan: str | None = Field(
        default=None, description="The digest of a plan that a person has reviewed."
    )

    def asked(self, paths: "JobPaths", store: ArroyoStateStore) -> "GcRequest":
        """Return the request for the state package."""
        raise NotImplementedError

    def moves(self, kind: PlanKind) -> bool:
        """Return whether objects are moved to quarantine. Raises InputError: contradictory."""
        return OrphanSettings().moves(kind, quarantine=self.quarantine)


class GcConfig(GcRunConfig):
    """Which epochs of a job to keep. With both fields, an epoch stays if either keeps it."""

    keep_epochs: int | None = setting_field(Retention, "keep_epochs", default=10)
    keep_days: float | None = setting_field(Retention, "keep_micros")

    def asked(self, paths: "JobPaths", store: ArroyoStateStore) -> "GcRequest":
        """Return the request of an expiry."""
        return _asked(PlanKind.EXPIRE, store, retention=configured(Retention, self))


class GraceConfig(GcRunConfig):
    """How long to keep unreferenced objects."""

    older_than_days: float = setting_field(GraceSettings, "grace_micros")

    def grace_micros(self) -> int:
        """Return the same time for the state package."""
        return configured(GraceSettings, self).grace_micros


class OrphansConfig(GraceConfig):
    """How long to keep unreferenced objects, and what earlier runs moved to quarantine."""

    delete: bool = setting_field(OrphanSettings, "delete")
    purge_after_days: float = setting_field(OrphanSettings, "purge_after_micros")

    def asked(self, paths: "JobPaths", store: ArroyoStateStore) -> "GcRequest":
        """Return the request of a gc of orphans."""
        return _asked(
            PlanKind.ORPHANS,
            store,
            grace_micros=self.grace_micros(),
            purge_after_micros=configured(OrphanSettings, self).purge_after_micros,
        )

    def moves(self, kind: PlanKind) -> bool:
        """Return as `GcRunConfig.moves`."""
        return configured(OrphanSettings, self).moves(kind, quarantine=self.quarantine)


class DeadJobsConfig(GraceConfig):
    """When a complete job may be deleted."""

    gone: bool = Field(default=False, description="Confirm that this job will never run again.")

    def asked(self, paths: "JobPaths", store: ArroyoStateStore) -> "GcRequest":
        """Return the request of a gc of a dead job."""
        assumed = {str(paths.root): "gone"} if self.gone else {}
        return _asked(PlanKind.DEAD_JOB, store, assumed, grace_micros=self.grace_micros())


def _asked(
    kind: PlanKind, store: ArroyoStateStore, assumed: dict[str, str] | None = None, **options: Any
) -> "GcRequest":
    from arroyo_dagster.state.operations.gc.plan import GcRequest

    return GcRequest(kind=kind, directory=store.directory(assumed), **options)


@dataclass(frozen=True)
class _AssetKind:
    table: str
    config: type[GcRunConfig]
    deps: tuple[str, ...]


_KINDS = {
    PlanKind.EXPIRE: _AssetKind(RETAINED_EPOCHS, GcConfig, (COMPACTED_STATE,)),
    PlanKind.ORPHANS: _AssetKind(ORPHANS, OrphansConfig, ()),
    PlanKind.DEAD_JOB: _AssetKind(DEAD_JOBS, DeadJobsConfig, ()),
}


def build_collection(naming: Naming, kind: PlanKind) -> dg.AssetsDefinition:
    """Build the assets of one kind of gc: its plan and its outcome, with their checks."""
    found, config_class = _KINDS[kind], _KINDS[kind].config
    plan_table = f"{found.table}_plan"
    plan_key, key = naming.key(plan_table), naming.key(found.table)
    specs = [
        naming.spec(plan_table, deps=list(found.deps)).replace_attributes(skippable=True),
        naming.spec(found.table, deps=[plan_table]).replace_attributes(skippable=True),
    ]

    @specified_assets(
        name=naming.name(f"arroyo_{found.table}"),
        specs=specs,
        check_specs=[
            naming.check_spec(
                PROVED,
                plan_table,
                "Every root was read, and nothing that stays refers to what would be deleted.",
                blocking=True,
            ),
            naming.check_spec(
                READ_BACK,
                found.table,
                "The store reports that every deleted object is gone.",
                blocking=True,
            ),
            *(
                ()
                if kind is PlanKind.DEAD_JOB
                else (
                    naming.check_spec(
                        FILES_EXIST,
                        found.table,
                        "Every file that the newest epoch lists still exists.",
                        blocking=True,
                    ),
                )
            ),
        ],
        pool=naming.name("arroyo_gc"),
        can_subset=True,  # so that a check of what was not done may be left out
    )
    @naming.bind
    @end_skipped_steps(key)
    @name_failed_checks
    def arroyo_collection(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        config: config_class,  # type: ignore[valid-type]
        arroyo_store: ArroyoStateStore,
        arroyo_runner: MaintenanceRunner,
    ):
        with as_failure(), leases_skip():
            paths, given = job_of(context.partition_key), cast(GcRunConfig, config)
            if context.selected_asset_keys:
                yield from of_selected(
                    context,
                    _collection_events(
                        paths, given, arroyo_store, arroyo_runner, context, plan_key, key
                    ),
                )
            if dg.AssetCheckKey(key, FILES_EXIST) in context.selected_asset_check_keys:
                verdict = kept_verdict(FILES_EXIST, arroyo_store, paths)
                yield check_result(verdict, FILES_EXIST, key)

    return arroyo_collection


def _collection_events(
    paths: "JobPaths",
    config: GcRunConfig,
    store: ArroyoStateStore,
    runner: MaintenanceRunner,
    context: dg.AssetExecutionContext,
    plan_key: dg.AssetKey,
    key: dg.AssetKey,
) -> Iterator[Any]:
    """Plan a collection, carry it out if this run may, and give what Dagster shows of both."""
    from arroyo_dagster.state.operations.gc.execute import GcOptions

    asked = config.asked(paths, store)
    try:
        plan = _planned(store, paths, asked)
    except (ProtocolError, FormatError, NotFoundError) as error:
        yield _refused(error, plan_key)
        raise
    yield from _plan_metadata(plan, plan_key)
    work = plan.objects or plan.purges
    if key in context.selected_asset_keys and work and _may_delete(config, plan, context):
        options = GcOptions(
            quarantine=config.moves(asked.kind),
            max_checkpoint_slowdown=config.max_checkpoint_slowdown,
            journal_micros=configured(DeletionSettings, config).journal_micros,
            approved=config.approved_plan is not None,
            owner=f"dagster run {context.run.run_id}",
            lease_wait_seconds=lease_wait_seconds(context, config),
            on_lease=context.log.info,
            on_progress=progress_logger(context.log.info),
        )
        run = partial(runner.run_gc, store.writable(), paths, asked, plan=plan)
        yield from _collected_events(plan, run, options, context, key)


def _planned(store: ArroyoStateStore, paths: "JobPaths", asked: "GcRequest") -> "GcPlan":
    from arroyo_dagster.state.operations.gc.plan import plan_gc

    return plan_gc(store.reading(), paths, asked)


def _collected_events(
    plan: "GcPlan",
    run: "Callable[[GcOptions], GcOutcome]",
    options: "GcOptions",
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
) -> Iterator[Any]:
    """Carry a plan out, and give what Dagster shows of it; of an interrupted run only what is done.

    What a run had deleted before it was interrupted stands in the journal.
    """
    done: list[GcOutcome] = []

    def result_events(outcome: "GcOutcome") -> Iterator[Any]:
        yield dg.MaterializeResult(
            asset_key=key,
            metadata=gc_shown.outcome_metadata(outcome),
            data_version=dg.DataVersion(outcome.run or plan.digest),
        )
        yield _read_back(outcome, key)

    try:
        outcome = run(replace(options, on_done=done.append))
    except Exception:
        raise
    except BaseException:  # an interrupt
        for finished in done:
            yield from result_events(finished)
        raise
    context.log.info(gc_shown.format_outcome(outcome))
    yield from result_events(outcome)


def _refused(error: ArroyoStateError, key: dg.AssetKey) -> dg.AssetCheckResult:
    failure = failure_of(error)
    return dg.AssetCheckResult(
        check_name=PROVED,
        asset_key=key,
        passed=False,
        description=failure.description,
        metadata=failure.metadata,
    )


def _plan_metadata(plan: "GcPlan", key: dg.AssetKey) -> Iterator[Any]:
    """The plan as an asset, if there is something in it, and the check of its proof."""
    if plan.objects:
        yield dg.MaterializeResult(
            asset_key=key,
            metadata=gc_shown.plan_metadata(plan),
            data_version=dg.DataVersion(plan.digest),
        )
    verdict = Verdict(inspected=len(plan.proof.roots), findings=())
    yield check_result(verdict, PROVED, key, metadata=gc_shown.proof_metadata(plan))


def _may_delete(config: GcRunConfig, plan: "GcPlan", context: dg.AssetExecutionContext) -> bool:
    """Whether this run deletes: configured for it, and approved where approval is asked for."""
    if config.dry_run:
        context.log.info(f"dry run: {gc_shown.format_plan(plan)}")
        return False
    if config.approved_plan is not None and config.approved_plan != plan.digest:
        raise dg.Failure(
            f"plan {config.approved_plan} was approved, but the current plan is {plan.digest}; "
            "nothing was deleted. Next: review the new plan and approve it",
            allow_retries=False,
        )
    if config.needs_approval and config.approved_plan is None:
        context.log.info(
            f"waits for approval: {gc_shown.format_plan(plan)}; to execute it, run again with "
            f"approved_plan: {plan.digest}"
        )
        return False
    return True


def _read_back(outcome: "GcOutcome", key: dg.AssetKey) -> dg.AssetCheckResult:
    planned = outcome.plan.objects
    return dg.AssetCheckResult(
        check_name=READ_BACK,
        asset_key=key,
        passed=outcome.deleted == planned,
        description=f"{outcome.deleted} of {planned} objects are gone",
        metadata={
            "arroyo/objects_planned": planned,
            "arroyo/objects_gone": outcome.deleted,
        },
    )


def build_gc_journal(naming: Naming) -> dg.AssetsDefinition:
    """Build the asset of a job's deletions: run by run, from the journal in the store."""
    deps = [found.table for found in _KINDS.values()]
    spec = naming.spec(GC_JOURNAL, deps=deps).replace_attributes(skippable=True)

    @specified_assets(
        name=naming.name("arroyo_gc_journal"), specs=[spec], pool=naming.name("arroyo_gc")
    )
    @naming.bind
    def arroyo_gc_journal(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore
    ):
        from arroyo_dagster.state.operations.gc.journal import list_runs, read_journal

        paths = job_of(context.partition_key)
        with as_failure():
            runs = list_runs(arroyo_store.reading(), paths)
            newest = runs[-1].name if runs else None
            entries = list(read_journal(arroyo_store.reading(), paths, newest)) if runs else []
        if runs:
            yield dg.MaterializeResult(
                asset_key=spec.key,
                metadata=gc_shown.journal_metadata(runs, entries),
                data_version=dg.DataVersion(runs[-1].name),
            )

    return arroyo_gc_journal


# ---- when ----------------------------------------------------------------------------------------


def orphans_backlog(store: ArroyoStateStore) -> Mapping[str, int]:
    """Return the jobs whose orphans may be deleted: managed jobs, and Arroyo jobs with a sufficient
    status source.
    """
    from arroyo_dagster.state.operations.gc.plan import GcRequest, check_allowed

    reading = store.reading()
    asked = GcRequest(kind=PlanKind.ORPHANS, directory=store.directory(None))
    return _allowed(store.jobs(), lambda paths: check_allowed(reading, paths, asked))


def dead_jobs_backlog(store: ArroyoStateStore) -> Mapping[str, int]:
    """Return the jobs that Arroyo's API or database proves to be gone."""
    from arroyo_dagster.state.operations.gc.roots import newest_root
    from arroyo_dagster.state.planning.gc.safety_checks import why_dead

    jobs, directory, reading = store.jobs(), store.directory(None), store.reading()
    if not directory.sources:
        return dict.fromkeys((str(job.root) for job in jobs), 0)
    answers = directory.look_up(jobs)
    known = dict(zip(jobs, answers, strict=True))

    def check(paths: "JobPaths") -> None:
        head = newest_root(reading, paths)
        others = [answer for other, answer in known.items() if other != paths]
        why_dead(paths, known[paths], others, managed=head is not None and head.managed)

    return _allowed(jobs, check)


def _allowed(
    jobs: Sequence["JobPaths"], check: Callable[["JobPaths"], object]
) -> Mapping[str, int]:
    """1 for each job that a check lets pass, 0 for the others."""
    from arroyo_dagster.state.storage.concurrency import concurrently

    def of_job(paths: "JobPaths") -> int:
        try:
            check(paths)
        except ArroyoStateError:
            return 0
        return 1

    return dict(zip((str(job.root) for job in jobs), concurrently(of_job, jobs), strict=True))
