"""`gc explain | fate | journal`: why an object stays, and what was deleted. They write nothing."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import click

from arroyo_dagster.cli.common import open_to_read, store_options
from arroyo_dagster.cli.directory import directory_of_environment, directory_options
from arroyo_dagster.cli.gc.group import gc
from arroyo_dagster.cli.gc.options import find_any_job
from arroyo_dagster.cli.gc.rendering import (
    entry_json,
    explained_lines,
    print_reasons,
    reasons_json,
)
from arroyo_dagster.cli.rendering import clock, print_json, print_table
from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.state.model.garbage import (
    GraceSettings,
    PlanKind,
)
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.operations.gc.journal import read_journal

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.gc.plan import GcRequest


def _orphans_request(grace: dt.timedelta, directory: JobDirectory) -> GcRequest:
    from arroyo_dagster.state.operations.gc.plan import GcRequest

    grace_micros = settings_from(GraceSettings, {"grace_micros": grace}).grace_micros
    return GcRequest(kind=PlanKind.ORPHANS, grace_micros=grace_micros, directory=directory)


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

    \b
    Example:
      arroyo-state gc explain orders/main/ --url s3://bucket/arroyo
    """
    from arroyo_dagster.state.operations.gc.explain import (
        explain_directory,
        explain_object,
        job_of_path,
    )

    store = open_to_read(url)
    path = path.removeprefix(f"{store.url.rstrip('/')}/")
    paths = job_of_path(list_jobs(store), path)
    directory = directory_of_environment(api, database, assume)
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
    for line in explained_lines(found):
        click.echo(line)


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

    \b
    Example:
      arroyo-state gc fate epochs/7 --job orders/main --url s3://bucket/arroyo
    """
    from arroyo_dagster.cli.gc.fate_rendering import (
        directory_fate_json,
        fate_json,
        print_directory_fate,
        print_fate,
    )
    from arroyo_dagster.state.operations.gc.fate import (
        fate_of_directory,
        fate_of_object,
        job_of_object,
        path_of_object,
    )

    store = open_to_read(url)
    known = None if job is None else find_any_job(store, job)
    path = path_of_object(path, store.url, known)
    paths = known or job_of_object(store, path)
    if path.endswith("/"):
        below = fate_of_directory(store, paths, path)
        print_json(directory_fate_json(below)) if as_json else print_directory_fate(below)
        return
    directory = directory_of_environment(api, database, assume)
    asked = _orphans_request(grace_micros, directory)
    found = fate_of_object(store, paths, path, asked)
    print_json(fate_json(found)) if as_json else print_fate(found)


@gc.command()
@click.argument("job")
@click.option("--run", help="Print this run only.")
@store_options
def journal(job: str, run: str | None, url: str | None, as_json: bool) -> None:
    """List what was deleted or moved to quarantine: when, by whom, under which plan.

    \b
    Example:
      arroyo-state gc journal orders/main --url s3://bucket/arroyo
    """
    store = open_to_read(url)
    entries = list(read_journal(store, find_any_job(store, job), run))
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
