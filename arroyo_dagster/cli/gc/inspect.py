"""`gc explain`: why an object stays. It writes nothing."""

from __future__ import annotations

import datetime as dt

import click

from arroyo_dagster.cli.common import open_to_read, store_options
from arroyo_dagster.cli.directory import directory_options
from arroyo_dagster.cli.gc.group import gc
from arroyo_dagster.cli.gc.rendering import explained_lines, print_reasons, reasons_json
from arroyo_dagster.cli.rendering import clock, print_json
from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.state.model.garbage import GraceSettings, PlanKind
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import list_jobs


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
    directory: JobDirectory,
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
    from arroyo_dagster.state.operations.gc.plan import GcRequest

    store = open_to_read(url)
    path = path.removeprefix(f"{store.url.rstrip('/')}/")
    paths = job_of_path(list_jobs(store), path)
    grace = settings_from(GraceSettings, {"grace_micros": grace_micros})
    request = GcRequest(kind=PlanKind.ORPHANS, grace_micros=grace.grace_micros, directory=directory)
    if path.endswith("/") or path.rstrip("/") == paths.root:
        reasons = explain_directory(store, paths, path, request)
        if as_json:
            print_json(reasons_json(reasons))
        else:
            print_reasons(reasons)
        return
    info = explain_object(store, paths, path, request)
    if as_json:
        document = {
            "path": info.path,
            "kind": info.kind.value,
            "size_bytes": info.size_bytes,
            "modified_micros": info.modified_micros,
            "referenced_by": list(info.by),
            "reason": info.reason.name.lower(),
            "deletable": info.reason.goes,
            "undecided": info.undecided,
        }
        print_json(document)
        return
    click.echo(
        f"{info.path}: {info.kind.value}, {format_bytes(info.size_bytes)}, written "
        f"{clock(info.modified_micros) or 'at an unknown time'}"
    )
    for line in explained_lines(info):
        click.echo(line)
