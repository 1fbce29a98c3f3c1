"""`offsets` and `watermarks`: how far a job is, how fast it goes, and what stands still."""

from __future__ import annotations

import datetime as dt
from typing import Any

import click

from arroyo_dagster.cli.common import main, open_to_read, store_options
from arroyo_dagster.cli.rendering import clock, print_json, print_table
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.operations.query.advance import (
    EPOCHS,
    PartitionAdvance,
    WatermarkAdvance,
    source_advance,
    watermark_advance,
)
from arroyo_dagster.state.operations.query.state import open_state

_epochs_option = click.option(
    "--epochs",
    type=WholeNumber(1),
    default=EPOCHS,
    show_default=True,
    help="Compare this many of the newest epochs.",
)


@main.command("offsets")
@click.argument("job")
@_epochs_option
@click.option(
    "--high-water",
    multiple=True,
    metavar="PARTITION=OFFSET",
    help="The end of a partition, for its lag. May be repeated.",
)
@store_options
def offsets_command(
    job: str, epochs: int, high_water: tuple[str, ...], url: str | None, as_json: bool
) -> None:
    """Print how far each partition of each source is read, how fast, and which stand still.

    A position is an offset, or a number of records, lines or events: as the connector counts.

    \b
    Examples:
      arroyo-state offsets orders/main --url s3://bucket/arroyo
      arroyo-state offsets orders/main --high-water 0=120000 --url s3://bucket/arroyo
    """
    found = source_advance(
        open_state(open_to_read(url)).job(job), epochs, dict(map(_high_water, high_water))
    )
    if as_json:
        print_json([_partition_json(one) for one in found])
        return
    columns = ["operator", "connector", "partition", "position", "per second", "advanced", "state"]
    columns += ["lag"] if high_water else []
    print_table(columns, [_partition_cells(one, bool(high_water)) for one in found])
    if not found:
        click.echo("No source of the job keeps a position in its state.")


def _high_water(text: str) -> tuple[str, int]:
    partition, equals, offset = text.rpartition("=")
    if not equals or not offset.isdecimal():
        raise click.BadParameter(f"{text!r} is not PARTITION=OFFSET", param_hint="--high-water")
    return partition, int(offset)


def _partition_cells(one: PartitionAdvance, with_lag: bool) -> list[object]:
    position = one.newest.position
    cells: list[object] = [
        one.newest.operator,
        one.newest.connector,
        one.newest.partition,
        one.newest.state if position is None else position,
        None if one.rate is None else f"{one.rate:.1f}",
        clock(one.advanced_at_micros),
        one.status,
    ]
    return [*cells, one.lag] if with_lag else cells


def _partition_json(one: PartitionAdvance) -> dict[str, Any]:
    return {
        "operator_id": one.newest.operator,
        "table": one.newest.table,
        "connector": one.newest.connector,
        "partition": one.newest.partition,
        "epoch": one.newest.epoch,
        "position": one.newest.position,
        "state": one.newest.state,
        "finished": one.newest.finished,
        "stands_still": one.stands_still,
        "advanced_at": iso_micros(one.advanced_at_micros),
        "per_second": one.rate,
        "lag": one.lag,
        "positions": [
            {"finished_at": iso_micros(at), "position": position} for at, position in one.positions
        ],
    }


@main.command("watermarks")
@click.argument("job")
@_epochs_option
@store_options
def watermarks_command(job: str, epochs: int, url: str | None, as_json: bool) -> None:
    """Print how far event time has advanced at each operator, and how far it is behind.

    The lag is behind the end of the newest epoch, by the writer's clock. The rate is in seconds of
    event time a second: below 1 the job falls behind.

    \b
    Example:
      arroyo-state watermarks orders/main --url s3://bucket/arroyo
    """
    found = watermark_advance(open_state(open_to_read(url)).job(job), epochs)
    if as_json:
        print_json([_watermark_json(one) for one in found])
        return
    print_table(
        ["operator", "watermark", "lag", "fastest subtask ahead", "rate"],
        [
            [
                one.operator,
                clock(one.watermark_micros),
                _span(one.lag_micros),
                _span(one.ahead_micros),
                None if one.rate is None else f"{one.rate:.2f}",
            ]
            for one in found
        ],
    )


def _span(micros: int | None) -> str | None:
    return None if micros is None else str(dt.timedelta(seconds=round(micros / 1e6)))


def _watermark_json(one: WatermarkAdvance) -> dict[str, Any]:
    return {
        "operator_id": one.operator,
        "watermark": iso_micros(one.watermark_micros),
        "lag_seconds": None if one.lag_micros is None else one.lag_micros / 1e6,
        "ahead_seconds": None if one.ahead_micros is None else one.ahead_micros / 1e6,
        "rate": one.rate,
        "watermarks": [
            {"finished_at": iso_micros(at), "watermark": iso_micros(reached)}
            for at, reached in one.watermarks
        ],
    }
