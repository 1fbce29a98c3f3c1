"""`gc plan | run | explain | fate | journal | undelete | purge`, and `pin | unpin | pins`.

Nothing is deleted without --yes; until then, read-only credentials are enough.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import main, open_to_read, open_url, store_options
from arroyo_dagster.cli.directory import TOKEN_VARIABLE, directory_of, directory_options
from arroyo_dagster.cli.fate_rendering import (
    directory_fate_json,
    fate_json,
    print_directory_fate,
    print_fate,
)
from arroyo_dagster.cli.gc_rendering import (
    check_json,
    entry_json,
    format_undelete,
    moved_json,
    outcome_json,
    pins_json,
    print_check,
    print_outcome,
    print_progress,
    print_reasons,
    reasons_json,
)
from arroyo_dagster.cli.rendering import clock, format_bytes, print_json, print_table
from arroyo_dagster.cli.settings import Duration, format_duration, setting_option, settings_options
from arroyo_dagster.cli.verify import EXIT_FINDINGS
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.codec.gc import decode_gc_plan, gc_plan_to_json
from arroyo_dagster.state.codec.records import encode_json
from arroyo_dagster.state.model.garbage import (
    GRACE_MICROS,
    PURGE_MICROS,
    DeletionSettings,
    GcPlan,
    GraceSettings,
    PlanKind,
    Retention,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job, list_jobs
from arroyo_dagster.state.operations.gc.execute import (
    GcOptions,
    GcOutcome,
    run_gc,
)
from arroyo_dagster.state.operations.gc.explain import (
    explain_directory,
    explain_object,
    job_of_path,
)
from arroyo_dagster.state.operations.gc.fate import (
    fate_of_directory,
    fate_of_object,
    job_of_object,
    path_of_object,
)
from arroyo_dagster.state.operations.gc.journal import read_journal
from arroyo_dagster.state.operations.gc.journal_check import check_journal
from arroyo_dagster.state.operations.gc.pins import pin_epoch, read_pins, unpin_epochs
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines, purge
from arroyo_dagster.state.operations.gc.steps import Pace
from arroyo_dagster.state.operations.gc.undelete import UndeleteOptions, plan_undelete, run_undelete
from arroyo_dagster.state.operations.progress import heartbeat
from arroyo_dagster.state.planning.gc.dead_jobs import UNREADABLE
from arroyo_dagster.state.storage.store import ObjectStore

_F = TypeVar("_F", bound=Callable[..., Any])
_PURGE = dt.timedelta(microseconds=PURGE_MICROS)


@main.group()
def gc() -> None:
    """Delete unreferenced state: expired epochs, orphans, dead jobs. Dry run unless --yes is given.

    A plan is refused, with the evidence, if it cannot be proved that nothing that stays refers to
    what would be deleted.
    """


def _plan_options(command: _F) -> _F:
    options = (
        click.argument("kind", type=click.Choice([kind.value for kind in PlanKind])),
        click.argument("job"),
        settings_options(Retention, only_for="expire"),
        # Without a value, a stored plan has its own.
        setting_option(GraceSettings, "grace_micros", only_for="orphans, dead-job", default=None),
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


def _job(store: ObjectStore, name: str) -> JobPaths:
    """A job by its name; also one that was removed, and of which the journal is left."""
    try:
        return find_job(store, name)
    except NotFoundError:
        pipeline, _, job = name.rpartition("/")
        paths = JobPaths(JobId(job), PipelineId(pipeline) if pipeline else None)
        if not store.list_dir(paths.maintenance).prefixes:
            raise
        return paths


def _asked(kind: str, given: Mapping[str, Any], plan: GcPlan | None = None) -> GcRequest:
    """What the options ask for; what they leave out is as the stored plan was asked for.

    Args:
        given: the options of `_plan_options`.
    """
    chosen = PlanKind(kind)
    retains = given["keep_epochs"] is not None or given["keep_micros"] is not None
    if chosen is not PlanKind.EXPIRE and retains:
        raise click.UsageError("--keep and --keep-for are options of `expire`")
    if plan is not None and plan.kind is not chosen:
        raise InputError(
            f"the stored plan is a plan of kind {plan.kind.value}",
            job=plan.paths.root,
            next_step=f"to execute it: `gc run {plan.kind.value} {plan.paths.root} --plan FILE`",
        )
    rule: Mapping[str, Any] = {} if plan is None else plan.rule
    retention = None
    if retains:
        retention = settings_from(Retention, given)
    elif chosen is PlanKind.EXPIRE:
        retention = Retention(
            keep_epochs=rule.get("keep_epochs"), keep_micros=rule.get("keep_micros")
        )
    grace = rule.get("grace_micros", GRACE_MICROS)
    if given["grace_micros"] is not None:
        grace = settings_from(GraceSettings, given).grace_micros
    token = os.environ.get(TOKEN_VARIABLE)
    directory = directory_of(given["api"], given["database"], given["assume"], token)
    return GcRequest(
        kind=chosen,
        retention=retention,
        grace_micros=grace,
        directory=directory,
        unreadable=given["unreadable"] or UNREADABLE in rule,
    )


def _orphans_request(grace: dt.timedelta, directory: JobDirectory) -> GcRequest:
    grace_micros = settings_from(GraceSettings, {"grace_micros": grace}).grace_micros
    return GcRequest(kind=PlanKind.ORPHANS, grace_micros=grace_micros, directory=directory)


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
    """
    store = open_to_read(url)
    plan = _planned(store, _job(store, job), _asked(kind, asked), as_json)
    if out is not None:
        out.write_bytes(encode_json(gc_plan_to_json(plan)))
    if as_json:
        print_json(gc_plan_to_json(plan))
    else:
        print_outcome(GcOutcome.of_plan(plan), yes=False)


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
@click.option("--spark", is_flag=True, help="Delete on Spark's workers if there are many objects.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Send at most this many requests per second.",
)
@_plan_options
def run_command(
    kind: str,
    job: str,
    yes: bool,
    plan_file: Path | None,
    quarantine: bool,
    spark: bool,
    rate: float | None,
    url: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Delete what a plan names: data first, then records, then metadata, verified and journalled.

    Without --yes it prints the plan and deletes nothing.
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = _job(store, job)
    plan = None if plan_file is None else _stored_plan(plan_file, paths)
    request = _asked(kind, asked, plan)
    if yes:
        options = GcOptions(
            quarantine=quarantine,
            pace=Pace(batches_per_second=rate),
            on_progress=print_progress(as_json=as_json),
        )
        outcome = _executed(store, paths, request, options, plan, spark)
    else:
        outcome = GcOutcome.of_plan(plan or _planned(store, paths, request, as_json))
    if as_json:
        print_json(outcome_json(outcome))
    else:
        print_outcome(outcome, yes=yes)


def _stored_plan(path: Path, paths: JobPaths) -> GcPlan:
    plan = decode_gc_plan(path.read_bytes(), str(path))
    if plan.paths != paths:
        raise InputError("the stored plan is of another job", job=paths.root, found=plan.paths.root)
    return plan


def _planned(store: ObjectStore, paths: JobPaths, request: GcRequest, as_json: bool) -> GcPlan:
    with heartbeat(print_progress(as_json=as_json)) as on_progress:
        return plan_gc(store, paths, request, on_progress=on_progress)


def _executed(
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    options: GcOptions,
    plan: GcPlan | None,
    spark: bool,
) -> GcOutcome:
    if not spark:
        return run_gc(store, paths, request, options, plan=plan)
    from arroyo_dagster.spark.gc import run_gc_on_spark
    from arroyo_dagster.spark.session import get_session

    return run_gc_on_spark(lambda: get_session()[0], store, paths, request, options, plan=plan)


# ---- looking -------------------------------------------------------------------------------------


@gc.command()
@click.argument("path")
@settings_options(GraceSettings)
@directory_options
@store_options
def explain(
    path: str,
    grace_micros: dt.timedelta,
    url: str | None,
    as_json: bool,
    api: str | None,
    database: str | None,
    assume: tuple[str, ...],
) -> None:
    """Explain why an object stays or may be deleted. For a directory (PATH ends in /), sum up by
    reason.

    PATH is relative to the URL, as in Arroyo's metadata or as in the store.
    """
    store = open_to_read(url)
    path = path.removeprefix(f"{store.url.rstrip('/')}/")
    paths = job_of_path(list_jobs(store), path)
    directory = directory_of(api, database, assume, os.environ.get(TOKEN_VARIABLE))
    asked = _orphans_request(grace_micros, directory)
    if path.endswith("/") or path.rstrip("/") == paths.root:
        reasons = explain_directory(store, paths, path, asked)
        if as_json:
            print_json(reasons_json(reasons))
        else:
            print_reasons(reasons)
        return
    found = explain_object(store, paths, path, asked)
    if as_json:
        document = {
            "path": found.path,
            "kind": found.kind.value,
            "size_bytes": found.size_bytes,
            "modified_micros": found.modified_micros,
            "referenced_by": list(found.by),
            "reason": found.reason.name.lower(),
            "deletable": found.reason.goes,
            "undecided": found.undecided,
        }
        print_json(document)
        return
    click.echo(
        f"{found.path}: {found.kind.value}, {format_bytes(found.size_bytes)}, written "
        f"{clock(found.modified_micros) or 'at an unknown time'}"
    )
    verdict = "may be deleted" if found.reason.goes else "stays"
    click.echo(f"{verdict}: {found.undecided or found.reason.value}")
    if found.by:
        click.echo(f"referenced by {', '.join(found.by)}")


@gc.command()
@click.argument("path")
@click.option("--job", help="The job that PATH is relative to.")
@settings_options(GraceSettings)
@directory_options
@store_options
def fate(
    path: str,
    job: str | None,
    grace_micros: dt.timedelta,
    url: str | None,
    as_json: bool,
    api: str | None,
    database: str | None,
    assume: tuple[str, ...],
) -> None:
    """Print what happened to an object: present, deleted, in quarantine, purged, or never seen.

    PATH is a full URL, a path below the URL, or relative to --job. If it ends in /, the answer
    counts the objects below it by what happened to them. Writes nothing.
    """
    store = open_to_read(url)
    known = None if job is None else _job(store, job)
    path = path_of_object(path, store.url, known)
    paths = known or job_of_object(store, path)
    if path.endswith("/"):
        below = fate_of_directory(store, paths, path)
        print_json(directory_fate_json(below)) if as_json else print_directory_fate(below)
        return
    directory = directory_of(api, database, assume, os.environ.get(TOKEN_VARIABLE))
    asked = _orphans_request(grace_micros, directory)
    found = fate_of_object(store, paths, path, asked)
    print_json(fate_json(found)) if as_json else print_fate(found)


@gc.command()
@click.argument("job")
@click.option("--run", help="Print this run only.")
@click.option(
    "--check",
    is_flag=True,
    help="Compare every part of the journal with its digest in the hash chain.",
)
@store_options
def journal(job: str, run: str | None, check: bool, url: str | None, as_json: bool) -> None:
    """List what was deleted or moved to quarantine: when, by whom, under which plan.

    With --check, exit code 0 if no part of the journal was changed, removed or inserted; 3 if one
    was.
    """
    if check and run is not None:
        raise click.UsageError("--check reads the complete journal: leave out --run")
    store = open_to_read(url)
    if check:
        found = check_journal(store, _job(store, job))
        print_json(check_json(found)) if as_json else print_check(job, found)
        if not found.whole:
            click.get_current_context().exit(EXIT_FINDINGS)
        return
    entries = list(read_journal(store, _job(store, job), run))
    if as_json:
        print_json([entry_json(entry) for entry in entries])
        return
    columns = ("when", "who", "plan", "outcome", "bytes", "object")
    print_table(
        columns,
        [
            (clock(e.at_micros), e.owner, e.kind, e.outcome, e.size_bytes, str(e.path))
            for e in entries
        ],
    )


# ---- back, and for good --------------------------------------------------------------------------


@gc.command("undelete")
@click.argument("job")
@click.argument("quarantine", required=False)
@click.option(
    "--yes", is_flag=True, help="Restore the objects. Without it, print what would be restored."
)
@store_options
def undelete_command(
    job: str, quarantine: str | None, yes: bool, url: str | None, as_json: bool
) -> None:
    """Restore objects from quarantine, byte for byte. Without NAME, list the quarantines.

    If a run was interrupted, several quarantines hold parts of the same epochs; they are restored
    together.

    Waits ten seconds if these epochs are outside the job's retention, because the job may be
    deleting them now.
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = _job(store, job)
    if quarantine is None:
        found = list_quarantines(store, paths)
        lines = [
            (one.name, clock(one.moved_at_micros), len(moved), sum(m.size_bytes for m in moved))
            for one, moved in found
        ]
        columns = ("quarantine", "moved", "objects", "bytes")
        if as_json:
            print_json([dict(zip(columns, line, strict=True)) for line in lines])
        else:
            print_table(columns, lines)
        return
    plan = plan_undelete(store, paths, quarantine)
    options = UndeleteOptions(sleep=_wait)
    moved = run_undelete(store, paths, quarantine, options) if yes else plan.objects
    if as_json:
        fields = {"quarantines": plan.quarantines, "incomplete_epochs": plan.incomplete}
        print_json({"done": yes, "objects": [moved_json(one) for one in moved], **fields})
        return
    click.echo(f"{paths.root}: {format_undelete(plan, moved, done=yes)}")


@gc.command("purge")
@click.argument("job")
@click.option(
    "--older-than",
    type=Duration(),
    default=_PURGE,
    show_default=format_duration(_PURGE),
    help="Delete quarantines older than this; at least an hour.",
)
@click.option(
    "--yes", is_flag=True, help="Delete the quarantines. Without it, print what would be deleted."
)
@store_options
def purge_command(
    job: str, older_than: dt.timedelta, yes: bool, url: str | None, as_json: bool
) -> None:
    """Permanently delete what has been in quarantine for long enough."""
    store = open_url(url) if yes else open_to_read(url)
    paths = _job(store, job)
    gone = purge(
        store, paths, older_than_micros=older_than // dt.timedelta(microseconds=1), yes=yes
    )
    if as_json:
        print_json({"done": yes, "quarantines": [one.name for one in gone]})
        return
    went = "deleted" if yes else "would be deleted; nothing was deleted, add --yes to execute"
    click.echo(f"{paths.root}: {len(gone)} quarantines {went}")


# ---- pins ----------------------------------------------------------------------------------------


@main.command("pin")
@click.argument("job")
@click.argument("epoch", type=click.IntRange(0))
@click.option("--reason", default="", help="A note for people.")
@store_options
def pin_command(job: str, epoch: int, reason: str, url: str | None, as_json: bool) -> None:
    """Keep an epoch until it is unpinned, and check that it is restorable.

    Waits ten seconds if the epoch is outside its job's retention, because the job may be deleting
    it now.
    """
    store = open_url(url)
    found = pin_epoch(store, _job(store, job), Epoch(epoch), reason=reason, sleep=_wait)
    _print_pins(pins_json(found), as_json)


def _wait(seconds: float) -> None:
    click.echo(
        f"the epoch is outside its job's retention: waiting {seconds:.0f} seconds for deletions "
        "in flight",
        err=True,
    )
    time.sleep(seconds)


@main.command("unpin")
@click.argument("job")
@click.argument("epoch", type=click.IntRange(0))
@store_options
def unpin_command(job: str, epoch: int, url: str | None, as_json: bool) -> None:
    """Let an epoch expire with the others again."""
    store = open_url(url)
    found = unpin_epochs(store, _job(store, job), [Epoch(epoch)])
    _print_pins(pins_json(found), as_json)


@main.command("pins")
@click.argument("job")
@store_options
def pins_command(job: str, url: str | None, as_json: bool) -> None:
    """List the pinned epochs."""
    store = open_to_read(url)
    _print_pins(pins_json(read_pins(store, _job(store, job))), as_json)


def _print_pins(pins: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(pins)
        return
    if not pins:
        click.echo("no epoch is pinned")
        return
    print_table(
        ("epoch", "pinned", "by", "reason"),
        [
            (pin["epoch"], clock(pin["pinned_at_micros"]), pin["owner"], pin["reason"])
            for pin in pins
        ],
    )
