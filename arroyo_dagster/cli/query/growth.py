"""`growth`: how the tables of a job grow over its newest epochs."""

from __future__ import annotations

from typing import Any

import click

from arroyo_dagster.cli.common import main, open_to_read, store_options
from arroyo_dagster.cli.rendering import bar, print_json, print_table
from arroyo_dagster.cli.settings import FiniteRange, WholeNumber
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.query.advance import EPOCHS
from arroyo_dagster.state.operations.query.growth import TableGrowth, table_growth
from arroyo_dagster.state.operations.query.state import open_state

DAYS = 30.0


@main.command("growth")
@click.argument("job")
@click.option(
    "--epochs",
    type=WholeNumber(1),
    default=EPOCHS,
    show_default=True,
    help="Compare this many of the newest epochs.",
)
@click.option(
    "--days",
    type=FiniteRange(0),
    default=DAYS,
    show_default=True,
    help="Forecast the sizes after this many days.",
)
@store_options
def growth_command(job: str, epochs: int, days: float, url: str | None, as_json: bool) -> None:
    """Print how the tables of a job grow, with a forecast of their size.

    Sizes are those of the data files that an epoch lists. The forecast continues the line of least
    squares through the compared epochs: the more of them, the better. Only metadata is read.

    \b
    Example:
      arroyo-state growth orders/main --epochs 50 --days 90 --url s3://bucket/arroyo
    """
    found = table_growth(open_state(open_to_read(url)).job(job), epochs)
    if as_json:
        print_json([_json(one, days) for one in found])
        return
    most = max((one.growth.sizes[-1][1] for one in found), default=0)
    print_table(
        ["operator", "table", "bytes", "a day", f"in {days:g} days", ""],
        [
            [
                one.operator,
                one.table,
                format_bytes(one.growth.sizes[-1][1]),
                _signed(one.growth.bytes_per_day),
                format_bytes(one.growth.after_days(days)),
                bar(one.growth.sizes[-1][1], most, 20),
            ]
            for one in found
        ],
    )


def _signed(count: float | None) -> str | None:
    if count is None:
        return None
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(round(count)))}"


def _json(one: TableGrowth, days: float) -> dict[str, Any]:
    return {
        "operator_id": one.operator,
        "table": one.table,
        "bytes": one.growth.sizes[-1][1],
        "bytes_per_day": one.growth.bytes_per_day,
        "days": days,
        "forecast_bytes": one.growth.after_days(days),
        "sizes": [
            {"finished_at": iso_micros(at), "bytes": size_bytes}
            for at, size_bytes in one.growth.sizes
        ],
    }
