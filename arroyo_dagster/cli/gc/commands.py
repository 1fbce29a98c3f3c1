"""`gc plan | run`: delete unreferenced state. Nothing is deleted without --yes.

Until then, read-only credentials are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import open_to_read, open_url, print_lease_event, store_options
from arroyo_dagster.cli.directory import directory_options
from arroyo_dagster.cli.gc.group import gc
from arroyo_dagster.cli.gc.rendering import outcome_json, print_outcome
from arroyo_dagster.cli.rendering import print_json, show_progress
from arroyo_dagster.cli.settings import FiniteRange, setting_option, settings_options
from arroyo_dagster.cli.spark import session_of, spark_options
from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.derived import encode_json
from arroyo_dagster.state.codec.gc import decode_gc_plan, gc_plan_to_json
from arroyo_dagster.state.model.garbage import (
    GRACE_MICROS,
    PURGE_MICROS,
    DeletionSettings,
    GcPlan,
    GraceSettings,
    OrphanSettings,
    PlanKind,
    Retention,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.operations.catalog.jobs import find_any_job
from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome, run_gc
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc, why_none_expires
from arroyo_dagster.state.operations.gc.steps import Pace
from arroyo_dagster.state.planning.gc.dead_jobs import UNREADABLE
from arroyo_dagster.state.storage.local_documents import read_document
from arroyo_dagster.state.storage.store import ObjectStore

_F = TypeVar("_F", bound=Callable[..., Any])


def _plan_options(command: _F) -> _F:
    options = (
        click.argument("kind", type=click.Choice([kind.value for kind in PlanKind])),
        click.argument("job"),
        settings_options(Retention, only_for="expire"),
        # Without a value, a stored plan has its own.
        setting_option(GraceSettings, "grace_micros", only_for="orphans, dead-job", default=None),
        setting_option(OrphanSettings, "purge_after_micros", only_for="orphans", default=None),
        click.option(
            "--listing",
            metavar="FILE_OR_URL",
            multiple=True,
            help="orphans: plan from this listing of the bucket instead of listing every object: "
            "Parquet or CSV, gzipped or not, with the columns path, size, time and etag. May be "
            "repeated. What is newer stays.",
        ),
        click.option(
            "--listing-columns",
            metavar="FIELD=COLUMN,…",
            default="",
            help="Names of the listing's columns, or numbers if it has no header: "
            "path=Key,size=Size,time=LastModifiedDate,etag=ETag; encoded_path=Key for URL-encoded "
            "keys.",
        ),
        click.option(
            "--unreadable",
            is_flag=True,
            help="dead-job: continue even if the job's metadata cannot be read; requires "
            "--quarantine.",
        ),
        directory_options,
        store_options,
    )
    for option in reversed(options):
        command = option(command)
    return command


def _asked(kind: str, given: Mapping[str, Any], plan: GcPlan | None = None) -> GcRequest:
    """What the options ask for; what they leave out is as the stored plan was asked for.

    Args:
        given: the options of `_plan_options`.
    """
    plan_kind = PlanKind(kind)
    retains = given["keep_epochs"] is not None or given["keep_micros"] is not None
    if plan_kind is not PlanKind.EXPIRE and retains:
        raise click.UsageError("--keep and --keep-for are options of `expire`")
    if plan is not None and plan.kind is not plan_kind:
        raise InputError(
            f"the stored plan is a plan of kind {plan.kind.value}",
            job=plan.paths.root,
            next_step=f"to execute it: `gc run {plan.kind.value} {plan.paths.root} --plan FILE`",
        )
    rule: Mapping[str, Any] = {} if plan is None else plan.rule
    retention = None
    if retains:
        retention = settings_from(Retention, given)
    elif plan_kind is PlanKind.EXPIRE and plan is None:
        raise click.UsageError("`expire` needs --keep N, --keep-for AGE, or both")
    elif plan_kind is PlanKind.EXPIRE:
        retention = Retention(
            keep_epochs=rule.get("keep_epochs"), keep_micros=rule.get("keep_micros")
        )
    grace = rule.get("grace_micros", GRACE_MICROS)
    if given["grace_micros"] is not None:
        grace = settings_from(GraceSettings, given).grace_micros
    purge = rule.get("purge_after_micros", PURGE_MICROS)
    if given["purge_after_micros"] is not None:
        purge = settings_from(OrphanSettings, given).purge_after_micros
    return GcRequest(
        kind=plan_kind,
        retention=retention,
        grace_micros=grace,
        purge_after_micros=purge,
        directory=given["directory"],
        unreadable=given["unreadable"] or UNREADABLE in rule,
    )


def _with_listing(
    request: GcRequest, given: Mapping[str, Any], store: ObjectStore, paths: JobPaths
) -> GcRequest:
    """Read the listing that the request is to be planned from, if there is one."""
    sources, columns = given["listing"], given["listing_columns"]
    if columns and not sources:
        raise click.UsageError("--listing-columns names the columns of --listing")
    if not sources:
        return request
    if request.kind is not PlanKind.ORPHANS:
        raise click.UsageError("--listing is an option of `orphans`")
    from arroyo_dagster.state.operations.gc.listing_files import read_store_listing

    return replace(request, listing=read_store_listing(sources, store, paths, columns))


@gc.command("plan")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Save the plan for `gc run --plan`.",
)
@_plan_options
def plan_command(
    kind: str, job: str, out: Path | None, url: str | None, as_json: bool, **asked: Any
) -> None:
    """Print what would be deleted. KIND is expire, orphans or dead-job. Writes nothing to the
    store.

    \b
    Example:
      arroyo-state gc plan expire orders/main --keep 10 --url s3://bucket/arroyo
    """
    store = open_to_read(url)
    paths = find_any_job(store, job)
    request = _with_listing(_asked(kind, asked), asked, store, paths)
    plan = _planned(store, paths, request, as_json)
    if out is not None:
        out.write_bytes(encode_json(gc_plan_to_json(plan)))
    if as_json:
        print_json(gc_plan_to_json(plan))
    else:
        _print(GcOutcome.of_plan(plan), store, request, yes=False)


@gc.command("run")
@click.option("--yes", is_flag=True, help="Execute the plan. Without it, print the plan only.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Execute this stored plan, with the retention it was made with. Refuses if the state "
    "has changed so that something in it may no longer be deleted.",
)
@settings_options(DeletionSettings)
@setting_option(OrphanSettings, "delete")
@settings_options(LeaseSettings)
@spark_options("Delete on Spark's workers if there are many objects.")
@click.option(
    "--rate",
    type=FiniteRange(0, min_open=True),
    help="Send at most this many requests per second.",
)
@_plan_options
def run_command(
    kind: str,
    job: str,
    yes: bool,
    plan_file: Path | None,
    quarantine: bool,
    delete: bool,
    max_checkpoint_slowdown: float,
    journal_micros: int | None,
    lease_wait_seconds: float,
    spark: SparkSettings | None,
    rate: float | None,
    url: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Delete what a plan names: data, then records, then metadata, verified and journalled.

    Orphans are moved to quarantine: `gc undelete` restores them, and a later run purges them.
    Without --yes it prints the plan and deletes nothing. A job that another process maintains is
    skipped after --lease-wait, with exit code 4.

    \b
    Example:
      arroyo-state gc run orphans orders/main --older-than 3d --url s3://bucket/arroyo
    """
    moves = OrphanSettings(delete=delete).moves(PlanKind(kind), quarantine=quarantine)
    store = open_url(url) if yes else open_to_read(url)
    paths = find_any_job(store, job)
    plan = None if plan_file is None else _stored_plan(plan_file, paths)
    request = _with_listing(_asked(kind, asked, plan), asked, store, paths)
    if yes:
        with show_progress(as_json=as_json) as on_progress:
            options = GcOptions(
                quarantine=moves,
                max_checkpoint_slowdown=max_checkpoint_slowdown,
                journal_micros=settings_from(
                    DeletionSettings, {"journal_micros": journal_micros}
                ).journal_micros,
                lease_wait_seconds=lease_wait_seconds,
                on_lease=print_lease_event(paths),
                pace=Pace(batches_per_second=rate),
                on_progress=on_progress,
            )
            outcome = _executed(store, paths, request, options, plan, spark)
    else:
        outcome = GcOutcome.of_plan(plan or _planned(store, paths, request, as_json))
    if as_json:
        print_json(outcome_json(outcome))
    else:
        _print(outcome, store, request, yes=yes)


def _print(outcome: GcOutcome, store: ObjectStore, request: GcRequest, *, yes: bool) -> None:
    why = None
    if request.retention is not None and not outcome.plan.objects:
        why = why_none_expires(store, outcome.plan.paths, request)
    print_outcome(outcome, yes=yes, why=why)


_MOST_PLAN_BYTES = 1 << 29
"""About four million objects."""


def _stored_plan(path: Path, paths: JobPaths) -> GcPlan:
    data = read_document(path, most_bytes=_MOST_PLAN_BYTES)
    plan = decode_gc_plan(data, str(path))
    if plan.paths != paths:
        raise InputError("the stored plan is of another job", job=paths.root, found=plan.paths.root)
    return plan


def _planned(store: ObjectStore, paths: JobPaths, request: GcRequest, as_json: bool) -> GcPlan:
    with show_progress(as_json=as_json) as on_progress:
        return plan_gc(store, paths, request, on_progress=on_progress)


def _executed(
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    options: GcOptions,
    plan: GcPlan | None,
    spark: SparkSettings | None,
) -> GcOutcome:
    if spark is None:
        return run_gc(store, paths, request, options, plan=plan)
    from arroyo_dagster.spark.gc import run_gc_on_spark

    return run_gc_on_spark(
        session_of(spark), store, paths, request, options, plan=plan, thresholds=spark.thresholds
    )
