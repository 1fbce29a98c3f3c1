"""`skew`: which keys, subtasks or groups hold most of a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from arroyo_dagster.cli.common import main, open_to_read, private_option, store_options
from arroyo_dagster.cli.rendering import bar, print_json, print_table
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.state.model.keys import MOST_SUBTASKS
from arroyo_dagster.state.model.units import format_bytes

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.query.skew import TableSkew
    from arroyo_dagster.state.planning.privacy import PrivateColumns


@main.command("skew")
@click.argument("job")
@click.argument("operator")
@click.argument("table")
@click.option(
    "--by",
    metavar="EXPRESSION",
    help='Group rows by an expression of SQL over the columns, such as "substr(key, 1, 3)" or '
    "tenant. Default: by key.",
)
@click.option(
    "--parallelism", type=WholeNumber(1, MOST_SUBTASKS), help="Default: of the operator now."
)
@click.option(
    "--limit",
    type=WholeNumber(1),
    default=20,
    show_default=True,
    help="Print this many of the largest groups.",
)
@private_option
@store_options
def skew_command(
    job: str,
    operator: str,
    table: str,
    by: str | None,
    parallelism: int | None,
    limit: int,
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Print which subtasks and keys hold most of a table: rows and bytes.

    JOB is JOB or JOB@EPOCH. All rows are read. Bytes are those of decoded values. Beyond 100000
    groups, a sketch keeps the largest: their rows are then "at least", with the largest error.

    \b
    Examples:
      arroyo-state skew orders/main count counts --url s3://bucket/arroyo
      arroyo-state skew orders/main count counts --by "substr(key, 1, 3)" --url s3://bucket/arroyo
    """
    from arroyo_dagster.state.operations.query.skew import table_skew
    from arroyo_dagster.state.operations.query.state import open_state

    at = open_state(open_to_read(url), private=private).epoch(job).table(operator, table)
    found = table_skew(at, by=by, parallelism=parallelism, limit=limit)
    if as_json:
        print_json(_json(found))
    else:
        _print(found)


def _print(found: TableSkew) -> None:
    most = max((one.rows for one in found.subtasks), default=0)
    if found.subtasks:
        print_table(
            ["subtask", "rows", "bytes", ""],
            [
                [one.subtask, one.rows, format_bytes(one.size_bytes), bar(one.rows, most)]
                for one in found.subtasks
            ],
        )
    most = max((one.rows for one in found.groups), default=0)
    if found.groups:
        print_table(
            [*found.columns, "rows", "bytes", "share", ""],
            [
                [
                    *map(_text, one.values),
                    one.rows,
                    format_bytes(one.size_bytes),
                    f"{one.rows / found.rows:.1%}",
                    bar(one.rows, most),
                ]
                for one in found.groups
            ],
        )
    elif not found.columns:
        click.echo("the rows of this table have no key: group them with --by")
    counted = f"{found.rows:,} rows, {format_bytes(found.size_bytes)}"
    sketch = f"; each group may have {found.max_error:,} rows more" if found.max_error else ""
    click.echo(f"{counted}{sketch}")


def _text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _json(found: TableSkew) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "bytes": found.size_bytes,
        "max_error_rows": found.max_error,
        "subtasks": [
            {
                "subtask": one.subtask,
                "first_routing_key": one.keys.start,
                "last_routing_key": one.keys.end,
                "rows": one.rows,
                "bytes": one.size_bytes,
            }
            for one in found.subtasks
        ],
        "groups": [
            {
                "group": dict(zip(found.columns, one.values, strict=True)),
                "rows": one.rows,
                "bytes": one.size_bytes,
            }
            for one in found.groups
        ],
    }
