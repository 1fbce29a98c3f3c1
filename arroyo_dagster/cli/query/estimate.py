"""`estimate`: what a restore would cost, also at another parallelism or retention."""

from __future__ import annotations

import datetime as dt
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, main, open_to_read, store_options
from arroyo_dagster.cli.rendering import bar, print_json, print_table
from arroyo_dagster.cli.settings import Duration, FiniteRange, NamedSetting, WholeNumber
from arroyo_dagster.state.model.keys import MOST_SUBTASKS
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.query.restore_estimate import (
    RestoreEstimate,
    estimate_restore,
)
from arroyo_dagster.state.operations.query.state import open_state
from arroyo_dagster.state.planning.restore.rates import RestoreRates


@main.command("estimate")
@click.argument("job")
@click.option(
    "--parallelism", type=WholeNumber(1, MOST_SUBTASKS), help="Default: of each operator now."
)
@click.option(
    "--retention", type=Duration(), help="Of all expiring tables, for example 12h; default: theirs."
)
@click.option("--max-seconds", type=FiniteRange(0), help="Exit with 3 if a restore takes longer.")
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=NamedSetting(RestoreRates),
    metavar="NAME=VALUE",
    help="Change a rate of the estimate, for example mb_per_second=80. May be repeated. A wrong "
    "name prints all rates.",
)
@store_options
def estimate_command(
    job: str,
    parallelism: int | None,
    retention: dt.timedelta | None,
    max_seconds: float | None,
    rates: tuple[tuple[str, Any], ...],
    url: str | None,
    as_json: bool,
) -> None:
    """Estimate what a restore costs: files, bytes, rows, seconds and memory.

    JOB is JOB or JOB@EPOCH. Files, bytes and rows are exact. Seconds are those of the slowest
    subtask; memory is what one subtask of each operator reads, decoded.

    Exit codes: 0 done; 1 it could not be estimated; 3 longer than --max-seconds.

    \b
    Example:
      arroyo-state estimate orders/main --parallelism 8 --max-seconds 60 --url s3://bucket/arroyo
    """
    epoch = open_state(open_to_read(url)).epoch(job)
    found = estimate_restore(
        epoch,
        parallelism=parallelism,
        retention_micros=None if retention is None else round(retention.total_seconds() * 1e6),
        rates=settings_from(RestoreRates, dict(rates)),
    )
    if as_json:
        print_json(_json(found, job=epoch.job.name, epoch=epoch.number))
    else:
        _print(found)
    if max_seconds is not None and found.seconds > max_seconds:
        if not as_json:
            click.echo(f"longer than {max_seconds:g} s")
        click.get_current_context().exit(EXIT_FINDINGS)


def _print(found: RestoreEstimate) -> None:
    print_table(
        ["operator", "table", "files", "bytes", "rows", "opens", "rows of the largest subtask"],
        [
            [
                one.operator,
                one.table,
                one.files,
                format_bytes(one.size_bytes),
                one.rows,
                one.opens,
                one.most_rows,
            ]
            for one in found.tables
        ],
    )
    most = max(found.subtask_bytes, default=0)
    for at, size in enumerate(found.subtask_bytes):
        click.echo(f"subtask {at:3}  {format_bytes(size):>10}  {bar(size, most)}")
    click.echo(
        f"a restore takes about {found.seconds:.1f} s, and {format_bytes(found.memory_bytes)} of "
        "memory in the largest subtask"
    )


def _json(found: RestoreEstimate, *, job: str, epoch: int) -> dict[str, Any]:
    return {
        "job": job,
        "epoch": epoch,
        "parallelism": found.parallelism,
        "seconds": found.seconds,
        "memory_bytes": found.memory_bytes,
        "subtask_bytes": list(found.subtask_bytes),
        "tables": [
            {
                "operator_id": one.operator,
                "table": one.table,
                "files": one.files,
                "bytes": one.size_bytes,
                "rows": one.rows,
                "opens": one.opens,
                "most_rows": one.most_rows,
            }
            for one in found.tables
        ],
    }
