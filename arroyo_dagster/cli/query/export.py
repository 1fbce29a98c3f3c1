"""`export`: a table to Parquet files, Delta or Iceberg, each epoch exactly once."""

from __future__ import annotations

from operator import attrgetter

import click

from arroyo_dagster.cli.common import main, open_to_read, private_option, store_options
from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.cli.settings import NamedValue
from arroyo_dagster.state.codec.common_types import NANOS, UNSIGNED
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.export.epochs import export_changes, export_epochs
from arroyo_dagster.state.operations.export.tables import open_target
from arroyo_dagster.state.operations.query.state import open_state
from arroyo_dagster.state.planning.exports import FORMATS, TargetOptions
from arroyo_dagster.state.planning.privacy import PrivateColumns


@main.command("export")
@click.argument("job")
@click.argument("operator")
@click.argument("table")
@click.argument("target")
@click.option(
    "--format",
    "table_format",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    help="What TARGET is: a folder of Parquet files, a Delta table, or NAMESPACE.TABLE of an "
    "Iceberg catalog. Default: parquet.",
)
@click.option(
    "--catalog",
    metavar="NAME",
    default="default",
    help="The Iceberg catalog, as pyiceberg's own configuration names it. Default: default.",
)
@click.option(
    "--property",
    "catalog_properties",
    type=NamedValue(),
    multiple=True,
    help="A property of the Iceberg catalog, such as uri=sqlite:///catalog.db; repeatable. "
    "Secrets belong into pyiceberg's configuration.",
)
@click.option(
    "--epoch-column",
    metavar="NAME",
    default="epoch",
    help="The column of a Delta or Iceberg table that has the number of the epoch. Default: epoch.",
)
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
    table_format: str,
    catalog: str,
    catalog_properties: tuple[tuple[str, str], ...],
    epoch_column: str,
    every_epoch: bool,
    changes: bool,
    nanos: str | None,
    unsigned: str | None,
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Export a table to Parquet files, Delta or Iceberg: one epoch or several.

    JOB is JOB or JOB@EPOCH. TARGET is a folder or URL, of Iceberg NAMESPACE.TABLE. Each epoch is a
    folder, `epoch=12`, with an object `_SUCCESS` that is written last; of Delta and Iceberg it is a
    partition, added by one commit. What is there already is not exported again, so that a schedule
    can repeat the command. In Parquet columns keep their types by default; with --nanos or
    --unsigned they become those that Spark, Delta and Iceberg know.

    \b
    Examples:
      arroyo-state export orders/main count counts s3://lake/counts --url s3://bucket/arroyo
      arroyo-state export orders/main count counts s3://lake/counts --every-epoch --format delta
    """
    if every_epoch and changes:
        raise click.UsageError("choose one of --every-epoch and --changes")
    state = open_state(open_to_read(url), private=private)
    epoch = state.epoch(job)
    to = TargetOptions(
        format=table_format,
        unsigned=unsigned,
        nanos=nanos,
        epoch_column=epoch_column,
        catalog={"name": catalog, **dict(catalog_properties)},
    )
    chosen_target = open_target(target, to, state.store.url)
    numbers = epoch.job.epochs()
    if changes:
        first = numbers[0] if epoch.number == numbers[-1] else epoch.number
        exports = list(export_changes(epoch.job, operator, table, chosen_target, first))
    else:
        chosen = numbers if every_epoch else [Epoch(epoch.number)]
        exports = list(export_epochs(epoch.job, operator, table, chosen_target, chosen))
    columns = ["epoch", "files", "rows", "bytes", "new"]
    row_of = attrgetter("epoch", "files", "rows", "size_bytes", "new")
    rows = [*map(row_of, exports)]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    print_table(
        [*columns[:-1], ""],
        [[*row, format_bytes(size), "written" if new else "was there"] for *row, size, new in rows],
    )
