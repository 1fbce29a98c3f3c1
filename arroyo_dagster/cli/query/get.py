"""`get`: look up the rows of one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from arroyo_dagster.cli.common import main, open_to_read, private_option, store_options
from arroyo_dagster.cli.query.output import print_rows

if TYPE_CHECKING:
    from arroyo_dagster.state.planning.privacy import PrivateColumns


@main.command("get")
@click.argument("job")
@click.argument("operator")
@click.argument("table")
@click.argument("key", nargs=-1, required=True)
@private_option
@store_options
def get_command(
    job: str,
    operator: str,
    table: str,
    key: tuple[str, ...],
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Look up the rows of one key: only the files and row groups that may hold it are read.

    JOB is JOB or JOB@EPOCH; EPOCH is a number, `latest` or a time. KEY has one value for each key
    column, as text: numbers as digits, bytes in hex, times in ISO 8601; `null` for a column that is
    no text. The key of a global keyed table is one value: JSON if it has several fields.

    \b
    Example:
      arroyo-state get orders/main count counts apple --url s3://bucket/arroyo
    """
    from arroyo_dagster.state.codec.plain import plain_rows, unique_names
    from arroyo_dagster.state.operations.query.keys import parse_key
    from arroyo_dagster.state.operations.query.state import open_state

    state = open_state(open_to_read(url), private=private)
    stored = state.epoch(job).table(operator, table)
    rows = stored.lookup(parse_key(stored, key))
    print_rows(unique_names(rows.schema.names), plain_rows(rows), as_json=as_json)
