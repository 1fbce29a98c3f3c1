"""`sql`: query any table of any job at any epoch, once or at a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arroyo_dagster.cli.common import (
    main,
    open_to_read,
    print_error,
    private_option,
    store_options,
)
from arroyo_dagster.cli.query.output import FORMATS, print_rows, write_rows
from arroyo_dagster.cli.rendering import report
from arroyo_dagster.errors import ArroyoStateError, InputError

if TYPE_CHECKING:
    from arroyo_dagster.state.planning.privacy import PrivateColumns


@main.command("sql")
@click.argument("query", required=False)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="How to print or write the rows. Default: table; with --output by the name of the file.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the rows to this new file instead.",
)
@click.option(
    "--raw",
    is_flag=True,
    help="Read every stored row, with the file that holds it; default: as a restore loads them.",
)
@private_option
@store_options
def sql_command(
    query: str | None,
    form: str | None,
    output: Path | None,
    raw: bool,
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Query any table of any job at any epoch. Without QUERY, a prompt; or the query from stdin.

    Tables: "pipeline/job".operator.table, the same at epoch 12 as "pipeline/job@12".operator.table,
    and metadata: jobs, epochs, files, offsets, watermarks and more, of one job or of all.
    `show tables` lists all of them, `describe NAME` prints columns. The dialect is that of Polars.

    The metadata of all jobs leaves out jobs that cannot be read, names them on stderr and exits
    with 1. The table jobs has a column `problem` instead.

    \b
    Examples:
      arroyo-state sql "select job, epochs, watermark from jobs" --url s3://bucket/arroyo
      arroyo-state sql 'select * from "shop/main".join_2.left limit 5' --url s3://bucket/arroyo
      arroyo-state sql "select * from offsets" --output offsets.parquet --url s3://bucket/arroyo
    """
    from arroyo_dagster.state.operations.query.sql import SqlCatalog
    from arroyo_dagster.state.operations.query.state import open_state

    if as_json and (form is not None or output is not None):
        raise click.UsageError("--json prints one document; leave out --format and --output")
    unreadable: dict[str, ArroyoStateError] = {}
    state = open_state(open_to_read(url), private=private)
    catalog = SqlCatalog(state, raw, unreadable.__setitem__)
    if query is None and sys.stdin.isatty() and output is None:
        from arroyo_dagster.cli.query.prompt import Prompt

        catalog = SqlCatalog(state, raw, lambda _, error: print_error(error))
        Prompt(catalog, "json" if as_json else form or "table").run()
        return
    text = _stdin() if query is None else query
    if not text.strip():
        raise InputError("there is no query", next_step="give one, or call `sql` in a terminal")
    found = catalog.collect(text).to_arrow()
    if output is not None:
        write_rows(found, output, form)
    else:
        print_rows(found, "json" if as_json else form or "table")
    report(list(unreadable.values()))


def _stdin() -> str:
    from arroyo_dagster.state.storage.local_documents import read_stream

    try:
        return read_stream(sys.stdin.buffer, "stdin").decode()
    except UnicodeDecodeError as error:
        raise InputError(f"the query is no text in UTF-8 ({error})") from error
