"""`gc undelete | purge`: restore objects from quarantine, or delete them permanently."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import asdict

import click

from arroyo_dagster.cli.common import (
    leased,
    open_to_read,
    open_url,
    print_lease_event,
    store_options,
)
from arroyo_dagster.cli.gc.group import gc
from arroyo_dagster.cli.rendering import (
    clock,
    print_json,
    print_table,
    show_progress,
    wait_for_deletions,
)
from arroyo_dagster.cli.settings import Duration, format_duration, settings_options
from arroyo_dagster.cli.spark import session_of, spark_options
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.model.garbage import PURGE_MICROS, Moved
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.catalog.jobs import find_any_job
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines, purge
from arroyo_dagster.state.operations.gc.undelete import UndeleteOptions, plan_undelete, run_undelete
from arroyo_dagster.state.storage.store import ObjectStore

_PURGE = dt.timedelta(microseconds=PURGE_MICROS)


@gc.command("undelete")
@click.argument("job")
@click.argument("quarantine", required=False)
@click.option(
    "--yes", is_flag=True, help="Restore the objects. Without it, print what would be restored."
)
@settings_options(LeaseSettings)
@spark_options("Compare and copy objects on Spark if they are many or large.")
@store_options
def undelete_command(
    job: str,
    quarantine: str | None,
    yes: bool,
    lease_wait_seconds: float,
    spark: SparkSettings | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Restore objects from quarantine, byte for byte. Without NAME, list the quarantines.

    It restores all that the quarantine holds, metadata last, or refuses.

    Waits ten seconds if these epochs are outside the job's retention, because the job may be
    deleting them now.

    \b
    Example:
      arroyo-state gc undelete orders/main --url s3://bucket/arroyo
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = find_any_job(store, job)
    if quarantine is None:
        quarantines = list_quarantines(store, paths)
        lines = [
            (entry.name, clock(entry.moved_at_micros), len(moved), sum(m.size_bytes for m in moved))
            for entry, moved in quarantines
        ]
        columns = ("quarantine", "moved", "objects", "bytes")
        if as_json:
            print_json([dict(zip(columns, line, strict=True)) for line in lines])
        else:
            print_table(columns, lines)
        return
    plan = plan_undelete(store, paths, quarantine)
    moved: Sequence[Moved] = plan.objects
    if yes:
        with show_progress(as_json=as_json) as on_progress:
            options = UndeleteOptions(
                sleep=wait_for_deletions,
                on_progress=on_progress,
                lease_wait_seconds=lease_wait_seconds,
                on_lease=print_lease_event(paths),
            )
            moved = _restored(store, paths, quarantine, options, spark)
    if as_json:
        print_json({"done": yes, "objects": [asdict(file) for file in moved]})
        return
    size = format_bytes(sum(file.size_bytes for file in moved))
    came = ("was" if len(moved) == 1 else "were") if yes else "would be"
    rest = "" if yes else "; nothing was changed, add --yes to execute"
    click.echo(f"{paths.root}: {plural(len(moved), 'object')}, {size} {came} restored{rest}")


def _restored(
    store: ObjectStore,
    paths: JobPaths,
    quarantine: str,
    options: UndeleteOptions,
    spark: SparkSettings | None,
) -> list[Moved]:
    if spark is None:
        return run_undelete(store, paths, quarantine, options)
    from arroyo_dagster.spark.gc import run_undelete_on_spark

    return run_undelete_on_spark(
        session_of(spark), store, paths, quarantine, options, thresholds=spark.thresholds
    )


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
@settings_options(LeaseSettings)
@store_options
def purge_command(
    job: str,
    older_than: dt.timedelta,
    yes: bool,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Permanently delete what has been in quarantine for long enough.

    \b
    Example:
      arroyo-state gc purge orders/main --older-than 30d --url s3://bucket/arroyo
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = find_any_job(store, job)
    micros = older_than // dt.timedelta(microseconds=1)
    if yes:
        with (
            show_progress(as_json=as_json) as on_progress,
            leased(store, paths, "arroyo-state gc purge", lease_wait_seconds, deletes=True) as held,
        ):
            gone = purge(held, paths, older_than_micros=micros, yes=True, on_progress=on_progress)
    else:
        gone = purge(store, paths, older_than_micros=micros)
    if as_json:
        print_json({"done": yes, "quarantines": [quarantine.name for quarantine in gone]})
        return
    went = "deleted" if yes else "would be deleted; nothing was deleted, add --yes to execute"
    click.echo(f"{paths.root}: {plural(len(gone), 'quarantine')} {went}")
