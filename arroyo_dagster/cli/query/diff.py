"""`diff`: what changed between two epochs, of one job or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from arroyo_dagster.cli.common import main, open_to_read, private_option, store_options
from arroyo_dagster.cli.query.output import format_cell
from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.cli.settings import WholeNumber

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.query.diff import TableDiff
    from arroyo_dagster.state.planning.privacy import PrivateColumns

_COLUMNS = ("inserted", "updated", "removed", "expired")


@main.command("diff")
@click.argument("before")
@click.argument("after", required=False)
@click.option("--operator", help="Compare only the tables of this operator.")
@click.option("--table", help="Compare only tables of this name.")
@click.option("--rows", "with_rows", is_flag=True, help="Print the rows that changed, too.")
@click.option("--keys", is_flag=True, help="Print only the keys of the rows that changed.")
@click.option(
    "--limit",
    type=WholeNumber(0),
    default=20,
    show_default=True,
    help="Print at most this many rows for each table; 0 = all.",
)
@private_option
@store_options
def diff_command(
    before: str,
    after: str | None,
    operator: str | None,
    table: str | None,
    with_rows: bool,
    keys: bool,
    limit: int,
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Print what changed between two epochs: inserted, updated, removed and expired rows.

    BEFORE and AFTER are JOB@EPOCH, of one job or of two; EPOCH is a number, `latest` or a time.
    AFTER is by default the newest epoch of the job in BEFORE. Rows that only moved to another file
    are no change. Files that both epochs list are not read, unless rows in them have expired.

    \b
    Examples:
      arroyo-state diff orders/main@41 orders/main@42 --url s3://bucket/arroyo
      arroyo-state diff orders/main@41 --operator count --rows --url s3://bucket/arroyo
    """
    from arroyo_dagster.state.operations.query.diff import diff_epochs
    from arroyo_dagster.state.operations.query.names import split_epoch
    from arroyo_dagster.state.operations.query.state import open_state

    state = open_state(open_to_read(url), private=private)
    second = split_epoch(before)[0] if after is None else after
    diffs = diff_epochs(state.epoch(before), state.epoch(second), operator, table)
    if as_json:
        print_json([_json(diff, with_rows, keys, limit) for diff in diffs])
        return
    print_table(
        ["operator", "table", *_COLUMNS, "files not read"],
        [[one.operator, one.table, *_counts(one).values(), one.skipped_files] for one in diffs],
    )
    for diff in diffs if with_rows or keys else ():
        if not diff.is_empty:
            click.echo(f"\n{diff.operator} {diff.table}")
            rows = _rows(diff, keys, limit)
            columns = list(rows[0])
            print_table(columns, [[format_cell(row[name]) for name in columns] for row in rows])
            if len(rows) < diff.changes.num_rows:
                click.echo(f"{len(rows)} of {diff.changes.num_rows}; --limit 0 prints all")


def _counts(one: TableDiff) -> dict[str, int]:
    from arroyo_dagster.state.operations.query.diff import Change

    kinds = (Change.INSERTED, Change.UPDATED_TO, Change.REMOVED, Change.EXPIRED)
    return dict(zip(_COLUMNS, map(one.count, kinds), strict=True))


def _rows(one: TableDiff, keys: bool, limit: int) -> list[dict[str, Any]]:
    from arroyo_dagster.state.codec.plain import plain_rows
    from arroyo_dagster.state.operations.query.diff import CHANGE

    rows = one.changes
    names = [CHANGE, *(name for name in rows.schema.names if name != CHANGE)]
    if keys:
        names = [CHANGE, *(one.key_columns or names[1:])]
    return plain_rows(rows.select(names).slice(0, limit or None))


def _json(one: TableDiff, with_rows: bool, keys: bool, limit: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "operator_id": one.operator,
        "table": one.table,
        **_counts(one),
        "skipped_files": one.skipped_files,
        "by_subtask": one.by_subtask,
    }
    if with_rows or keys:
        document["rows"] = _rows(one, keys, limit)
    return document
