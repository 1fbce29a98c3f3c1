"""`export`: a table as Parquet files, one epoch or epoch after epoch, each exactly once."""

from __future__ import annotations

from pathlib import Path

import click

from arroyo_dagster.cli.common import main, open_to_read, private_option, store_options
from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.common_types import NANOS, UNSIGNED, TypeOptions
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.query.export import (
    ParquetTarget,
    export_changes,
    export_epochs,
)
from arroyo_dagster.state.operations.query.state import open_state
from arroyo_dagster.state.planning.privacy import PrivateColumns
from arroyo_dagster.state.storage.remote.open import open_store


@main.command("export")
@click.argument("job")
@click.argument("operator")
@click.argument("table")
@click.argument("target")
@click.option("--every-epoch", is_flag=True, help="Export every visible epoch, oldest first.")
@click.option(
    "--changes",
    is_flag=True,
    help="Export what changed from each visible epoch to the next, from JOB@EPOCH on; default: "
    "from the oldest.",
)
@click.option(
    "--nanos",
    type=click.Choice(NANOS),
    help="For readers without nanoseconds: times in microseconds, or as numbers.",
)
@click.option(
    "--unsigned",
    type=click.Choice(UNSIGNED),
    help="For readers without unsigned numbers of 64 bits: as decimal(20,0), or as long.",
)
@private_option
@store_options
def export_command(
    job: str,
    operator: str,
    table: str,
    target: str,
    every_epoch: bool,
    changes: bool,
    nanos: str | None,
    unsigned: str | None,
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Export a table to Parquet files below TARGET, a folder or URL: one epoch or several.

    JOB is JOB or JOB@EPOCH. Each epoch is a folder, `epoch=12`, with an object `_SUCCESS` that is
    written last: what is there already is not exported again, so that a schedule can repeat the
    command. By default columns keep their types; with --nanos or --unsigned they become those that
    Spark, Delta and Iceberg know.

    \b
    Examples:
      arroyo-state export orders/main count counts s3://lake/counts --url s3://bucket/arroyo
      arroyo-state export orders/main count counts s3://lake/counts --every-epoch --nanos floor
    """
    if every_epoch and changes:
        raise click.UsageError("choose one of --every-epoch and --changes")
    state = open_state(open_to_read(url), private=private)
    epoch = state.epoch(job)
    types = None
    if nanos is not None or unsigned is not None:
        types = TypeOptions(unsigned or UNSIGNED[0], nanos or NANOS[0])
    url_of_target = target if "://" in target else str(Path(target).absolute())
    folder = ParquetTarget(store=open_store(url_of_target), types=types)
    if folder.store.url.rstrip("/") == state.store.url.rstrip("/"):
        raise InputError(
            "the target is the checkpoint URL itself",
            target=target,
            next_step="export to another folder",
        )
    numbers = epoch.job.epochs()
    if changes:
        first = numbers[0] if epoch.number == numbers[-1] else epoch.number
        found = list(export_changes(epoch.job, operator, table, folder, first))
    else:
        chosen = numbers if every_epoch else [Epoch(epoch.number)]
        found = list(export_epochs(epoch.job, operator, table, folder, chosen))
    if as_json:
        print_json(
            [
                {
                    "epoch": one.epoch,
                    "files": one.files,
                    "rows": one.rows,
                    "bytes": one.size_bytes,
                    "new": one.new,
                }
                for one in found
            ]
        )
        return
    print_table(
        ["epoch", "files", "rows", "bytes", ""],
        [
            [
                one.epoch,
                one.files,
                one.rows,
                format_bytes(one.size_bytes),
                "written" if one.new else "was there",
            ]
            for one in found
        ],
    )
