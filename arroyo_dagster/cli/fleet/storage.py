"""`fleet abandoned`: what is stored below the checkpoint URL and used by no job."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import click

from arroyo_dagster.cli.common import open_to_read, store_options
from arroyo_dagster.cli.directory import directory_of_environment, directory_options
from arroyo_dagster.cli.fleet.group import fleet
from arroyo_dagster.cli.rendering import age, print_json, print_table, report, show_progress
from arroyo_dagster.cli.settings import Duration
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.catalog.fleet import BUDGET_SECONDS, find_abandoned
from arroyo_dagster.state.planning.fleet.abandoned import PrefixVerdict, Usage


@fleet.command()
@click.option(
    "--budget",
    type=Duration(),
    default=dt.timedelta(seconds=BUDGET_SECONDS),
    show_default="10m",
    help="List nothing more after this time. What was not listed is named.",
)
@directory_options
@store_options
def abandoned(
    budget: dt.timedelta,
    url: str | None,
    as_json: bool,
    api: str | None,
    database: str | None,
    assume: tuple[str, ...],
) -> None:
    """List prefixes that no job uses, with the bytes that can be reclaimed.

    Dead jobs, remains of deleted pipelines, and objects of living jobs that no epoch lists. A job
    is dead only if --arroyo-api, --arroyo-db or --assume proves it. Prefixes that cannot be judged
    are listed with the reason. Every object is listed once; nothing is deleted.

    \b
    Example:
      arroyo-state fleet abandoned --url s3://bucket/arroyo --arroyo-api http://localhost:5115
    """
    directory = directory_of_environment(api, database, assume)
    store = open_to_read(url)
    with show_progress(as_json=as_json) as on_progress:
        found = find_abandoned(
            store, directory, budget_seconds=budget.total_seconds(), on_progress=on_progress
        )
    if as_json:
        print_json([_verdict_json(one) for one in found])
    else:
        _print_abandoned(found)
    report([one.problem for one in found])


def _print_abandoned(found: Sequence[PrefixVerdict]) -> None:
    listed = [one for one in found if one.usage is not Usage.IN_USE or not one.complete]
    if listed:
        columns = ["prefix", "verdict", "bytes", "objects", "written", "why", "next"]
        print_table(columns, [_verdict_cells(one) for one in listed])
    reclaimable = [one for one in found if one.usage is Usage.ABANDONED]
    unknown = sum(one.usage is Usage.NOT_JUDGED for one in found)
    click.echo(
        f"{format_bytes(sum(one.size_bytes or 0 for one in reclaimable))} can be reclaimed in "
        f"{len(reclaimable)} abandoned prefixes; {unknown} not judged, "
        f"{len(found) - len(reclaimable) - unknown} in use"
    )


def _verdict_cells(one: PrefixVerdict) -> list[object]:
    size = format_bytes(one.size_bytes)
    return [
        one.path,
        one.usage.value,
        size if one.complete or size is None else f"at least {size}",
        one.objects,
        None if one.last_write_micros is None else age(one.last_write_micros),
        one.why,
        one.next_step,
    ]


def _verdict_json(one: PrefixVerdict) -> dict[str, Any]:
    return {
        "prefix": one.path,
        "verdict": one.usage.value,
        "bytes": one.size_bytes,
        "objects": one.objects,
        "written_at": iso_micros(one.last_write_micros),
        "complete": one.complete,
        "why": one.why,
        "next_step": one.next_step,
    }
