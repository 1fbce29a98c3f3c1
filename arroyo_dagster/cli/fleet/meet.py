"""`fleet meet`: the cheapest maintenance that meets a service level. It starts nothing."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, open_to_read, store_options
from arroyo_dagster.cli.directory import directory_of_environment, directory_options
from arroyo_dagster.cli.fleet.group import fleet
from arroyo_dagster.cli.rendering import (
    print_json,
    print_no_jobs,
    print_table,
    report,
    show_progress,
)
from arroyo_dagster.cli.settings import Duration, NamedSetting, WholeNumber
from arroyo_dagster.state.model.compaction import Forecast
from arroyo_dagster.state.model.rewrite import RewritePlan
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.catalog.jobs import jobs_or_all
from arroyo_dagster.state.operations.compaction.service_level import (
    JobProposal,
    propose_maintenance,
)
from arroyo_dagster.state.planning.costs import Prices
from arroyo_dagster.state.planning.fleet.service_level import (
    Proposal,
    RestoreRates,
    ServiceLevel,
    command_of,
    cost_of,
)


@fleet.command()
@click.argument("jobs", nargs=-1)
@click.option(
    "--restore-below",
    type=Duration(),
    help="The estimated time of a restore must be below this, for example 60s.",
)
@click.option(
    "--most-files",
    type=WholeNumber(1),
    help="The newest epoch may list at most this many files.",
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=NamedSetting(RestoreRates),
    metavar="NAME=VALUE",
    help="Change a rate of the estimate, for example mb_per_second=80. May be repeated. A wrong "
    "name prints all rates.",
)
@directory_options
@store_options
def meet(
    jobs: Sequence[str],
    restore_below: dt.timedelta | None,
    most_files: int | None,
    rates: tuple[tuple[str, Any], ...],
    url: str | None,
    as_json: bool,
    api: str | None,
    database: str | None,
    assume: tuple[str, ...],
) -> None:
    """Plan the cheapest compaction that meets a service level.

    Without JOBS, for all jobs. Prints what a restore of each job takes now and afterwards, what the
    compaction costs, and the command. If no compaction meets the level, says so. Starts nothing.

    Exit codes: 0 all jobs meet the level; 1 a job could not be planned; 3 at least one job misses
    it.

    \b
    Example:
      arroyo-state fleet meet --restore-below 60s --most-files 200 --url s3://bucket/arroyo
    """
    seconds = None if restore_below is None else restore_below.total_seconds()
    level = ServiceLevel(restore_seconds=seconds, files=most_files)
    chosen = settings_from(RestoreRates, dict(rates))
    directory = directory_of_environment(api, database, assume)
    store = open_to_read(url)
    wanted, unreadable = jobs_or_all(store, jobs)
    with show_progress(as_json=as_json) as on_progress:
        found = propose_maintenance(store, wanted, level, directory, chosen, on_progress)
    if as_json:
        print_json([_json(one) for one in found])
    elif not wanted and not unreadable:
        print_no_jobs(store)
    else:
        _print(found)
    report([*(one.problem for one in found), *unreadable.values()])
    if any(one.proposal is not None and one.proposal.missed for one in found):
        click.get_current_context().exit(EXIT_FINDINGS)


def _print(found: Sequence[JobProposal]) -> None:
    columns = ["job", "files", "→", "restore", "→ ", "reads", "rewrites", "verdict"]
    print_table(columns, [_cells(one, one.proposal) for one in found if one.proposal is not None])
    for one in found:
        for line in _lines(one):
            click.echo(f"{one.paths.root}: {line}")
    if any(one.proposal is not None and one.proposal.plan is not None for one in found):
        click.echo(
            "The commands print their plans; with --yes they execute them. Those of Arroyo jobs "
            "need the same sources of status."
        )


def _lines(one: JobProposal) -> Iterator[str]:
    """Yield what a job misses, and the command."""
    if one.proposal is None:
        return
    yield from one.proposal.missed
    command = command_of(one.paths.root, one.proposal)
    if one.proposal.still_missed:
        best = (
            "" if command is None else f"; the best leaves: {'; '.join(one.proposal.still_missed)}"
        )
        yield f"no compaction meets it{best}"
    if command is not None:
        yield command
    if isinstance(one.proposal.plan, RewritePlan) and one.proposal.plan.why_not is not None:
        yield f"not now: {one.proposal.plan.why_not}"


def _cells(one: JobProposal, proposal: Proposal) -> list[object]:
    cost = None if proposal.plan is None else cost_of(proposal.plan)
    return [
        one.paths.root,
        proposal.before.files,
        proposal.after.files,
        f"{one.rates.restore_seconds(proposal.before):.1f} s",
        f"{one.rates.restore_seconds(proposal.after):.1f} s",
        None if cost is None else f"{cost.files_read} files",
        None if cost is None else format_bytes(cost.size_bytes),
        _verdict(proposal),
    ]


def _verdict(one: Proposal) -> str:
    if not one.missed:
        return "meets it"
    return "cannot meet it" if one.still_missed else "meets it afterwards"


def _json(one: JobProposal) -> dict[str, Any]:
    proposal = one.proposal
    if proposal is None:
        return {"job": one.paths.root, "verdict": "not planned", "problem": str(one.problem)}
    cost = None if proposal.plan is None else cost_of(proposal.plan)
    return {
        "job": one.paths.root,
        "verdict": _verdict(proposal),
        "missed": list(proposal.missed),
        "still_missed": list(proposal.still_missed),
        "before": _forecast_json(proposal.before, one.rates),
        "after": _forecast_json(proposal.after, one.rates),
        "cost": None
        if cost is None
        else {
            "tables": list(cost.tables),
            "files_read": cost.files_read,
            "files_written": cost.files_written,
            "bytes": cost.size_bytes,
            "usd": cost.usd(Prices()),
        },
        "command": command_of(one.paths.root, proposal),
    }


def _forecast_json(forecast: Forecast, rates: RestoreRates) -> dict[str, Any]:
    return {
        "files": forecast.files,
        "bytes": forecast.size_bytes,
        "restore_seconds": rates.restore_seconds(forecast),
    }
