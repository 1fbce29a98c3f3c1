"""`fleet abandoned | cost`: what is stored below the checkpoint URL, for whom, at which price."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import open_to_read, store_options
from arroyo_dagster.cli.directory import directory_of_environment, directory_options
from arroyo_dagster.cli.fleet.group import fleet
from arroyo_dagster.cli.rendering import age, print_json, print_table, report, show_progress
from arroyo_dagster.cli.settings import Duration, NamedSetting
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.catalog.fleet import (
    BUDGET_SECONDS,
    find_abandoned,
    job_costs,
)
from arroyo_dagster.state.planning.costs import Prices
from arroyo_dagster.state.planning.fleet.abandoned import PrefixVerdict, Usage
from arroyo_dagster.state.planning.fleet.tenants import (
    JobCost,
    TenantCost,
    TenantExpression,
    costs_by_tenant,
)

_F = TypeVar("_F", bound=Callable[..., Any])


def _budget_option(command: _F) -> _F:
    option = click.option(
        "--budget",
        type=Duration(),
        default=dt.timedelta(seconds=BUDGET_SECONDS),
        show_default="10m",
        help="List nothing more after this time. What was not listed is named.",
    )
    return option(command)


@fleet.command()
@_budget_option
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


# ---- cost ----------------------------------------------------------------------------------------


@fleet.command()
@click.option(
    "--tenant",
    default="{pipeline}",
    show_default=True,
    metavar="EXPRESSION",
    help="What a tenant is: a format of {pipeline}, {job} and {name} (the pipeline's name in "
    "Arroyo), or a regular expression with a group (?P<tenant>…), searched in pipeline/job and in "
    "the name.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    type=NamedSetting(Prices),
    metavar="NAME=USD",
    help="Change a price, for example gb_month=0.02. May be repeated. A wrong name prints all "
    "prices.",
)
@click.option(
    "--inspection/--no-inspection",
    default=True,
    help="Add the requests of Dagster's sensor and schedules with their defaults, divided equally "
    "among the jobs.",
)
@_budget_option
@directory_options
@store_options
def cost(
    tenant: str,
    prices: tuple[tuple[str, Any], ...],
    inspection: bool,
    budget: dt.timedelta,
    url: str | None,
    as_json: bool,
    api: str | None,
    database: str | None,
    assume: tuple[str, ...],
) -> None:
    """Print bytes, objects, requests and USD per month, by tenant.

    Bytes and objects are those stored now, of all epochs. Writes follow from the usual interval and
    number of objects of the newest epochs. Each object is listed once; none is read.

    \b
    Example:
      arroyo-state fleet cost --tenant '^(?P<tenant>[^-/]+)' --url s3://bucket/arroyo
    """
    expression = TenantExpression(tenant)
    charged = settings_from(Prices, dict(prices))
    directory = directory_of_environment(api, database, assume)
    store = open_to_read(url)
    with show_progress(as_json=as_json) as on_progress:
        jobs, problems = job_costs(
            store,
            expression,
            directory,
            inspection=inspection,
            budget_seconds=budget.total_seconds(),
            on_progress=on_progress,
        )
    found = costs_by_tenant(jobs, charged)
    if as_json:
        print_json([_tenant_json(one, charged) for one in found])
    else:
        columns = ["tenant", "jobs", "bytes", "objects", "writes a day", "USD a month", "storage"]
        print_table([*columns, "requests"], [_tenant_cells(one) for one in found])
        total = sum(one.month_usd for one in found)
        click.echo(f"{len(jobs)} jobs, {total:.2f} USD a month")
        incomplete = [job.job for job in jobs if not job.complete]
        if incomplete:
            click.echo(f"not listed completely in --budget: {', '.join(incomplete)}")
    report(problems)


def _tenant_cells(one: TenantCost) -> list[object]:
    return [
        one.tenant,
        len(one.jobs),
        format_bytes(sum(job.size_bytes for job in one.jobs)),
        sum(job.objects for job in one.jobs),
        round(sum(job.writes_a_day for job in one.jobs)),
        f"{one.month_usd:.2f}",
        f"{one.storage_usd:.2f}",
        f"{one.requests_usd:.2f}",
    ]


def _tenant_json(one: TenantCost, prices: Prices) -> dict[str, Any]:
    return {
        "tenant": one.tenant,
        "usd_per_month": one.month_usd,
        "storage_usd_per_month": one.storage_usd,
        "requests_usd_per_month": one.requests_usd,
        "jobs": [_job_json(job, prices) for job in one.jobs],
    }


def _job_json(job: JobCost, prices: Prices) -> dict[str, Any]:
    return {
        "job": job.job,
        "bytes": job.size_bytes,
        "objects": job.objects,
        "writes_per_day": job.writes_a_day,
        "lists_per_day": job.lists_a_day,
        "gets_per_day": job.gets_a_day,
        "usd_per_month": job.month_usd(prices),
        "complete": job.complete,
    }
