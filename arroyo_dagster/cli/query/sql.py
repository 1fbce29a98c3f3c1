"""`sql`: query any table of any job at any epoch, once or at a prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arroyo_dagster.cli.common import main, open_to_read, print_error, private_option, store_options
from arroyo_dagster.cli.query.output import FORMATS, print_answer, write_answer
from arroyo_dagster.cli.rendering import print_json, report
from arroyo_dagster.errors import ArroyoStateError, InputError

if TYPE_CHECKING:
    from arroyo_dagster.state.planning.privacy import PrivateColumns


@main.command("sql")
@click.argument("query", required=False)
@click.argument("job", required=False)
@click.option("--list", "listed", is_flag=True, help="List the saved queries and their parameters.")
@click.option(
    "--param",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a parameter of a saved query. May be repeated.",
)
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
    job: str | None,
    listed: bool,
    parameters: tuple[str, ...],
    form: str | None,
    output: Path | None,
    raw: bool,
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Query any table of any job at any epoch. Without QUERY, a prompt; or the query from stdin.

    @NAME is a saved query, of JOB or JOB@EPOCH: @offsets, @watermarks, @growth, @skew, @restore,
    @leases, @pins, @journal, @fate. `--list` prints what each answers, and its parameters.

    Tables: "pipeline/job".operator.table, the same at epoch 12 as "pipeline/job@12".operator.table,
    and metadata: jobs, epochs, files, offsets, watermarks and more, of one job or of all.
    `show tables` lists all of them, `describe NAME` prints columns. The dialect is that of Polars.

    The metadata of all jobs leaves out jobs that cannot be read, names them on stderr and exits
    with 1. The table jobs has a column `problem` instead.

    \b
    Examples:
      arroyo-state sql "select job, epochs, watermark from jobs" --url s3://bucket/arroyo
      arroyo-state sql 'select * from "shop/main".join_2.left limit 5' --url s3://bucket/arroyo
      arroyo-state sql @offsets shop/main --param high_water=6000 --url s3://bucket/arroyo
      arroyo-state sql "select * from offsets" --output offsets.parquet --url s3://bucket/arroyo
    """
    if listed:
        _print_saved(as_json)
        return
    from arroyo_dagster.state.operations.query.sql import SqlCatalog
    from arroyo_dagster.state.operations.query.state import open_state

    if as_json and (form is not None or output is not None):
        raise click.UsageError("--json prints one document; leave out --format and --output")
    saved = query is not None and query.startswith("@")
    if (job is not None or parameters) and not saved:
        raise click.UsageError("JOB and --param are of a saved query: sql @NAME JOB")
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
    values = dict(map(_parameter, parameters))
    answer = catalog.saved(text[1:], job, values) if saved else catalog.collect(text)
    if output is not None:
        write_answer(answer, output, form)
    else:
        print_answer(answer, "json" if as_json else form or "table")
    report(list(unreadable.values()))


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--param")
    return name, value


def _print_saved(as_json: bool) -> None:
    from arroyo_dagster.state.operations.query.saved import saved_queries

    queries = saved_queries().values()
    if as_json:
        print_json([asdict(query) | {"usage": query.usage.value} for query in queries])
        return
    for query in queries:
        click.echo(f"{query.synopsis}\n  {query.description}")
        for parameter in query.parameters:
            default = "required" if parameter.default is None else f"default {parameter.default}"
            click.echo(f"  {parameter.name} ({parameter.kind}, {default}): {parameter.help}")


def _stdin() -> str:
    from arroyo_dagster.state.storage.local_documents import read_stream

    try:
        return read_stream(sys.stdin.buffer, "stdin").decode()
    except UnicodeDecodeError as error:
        raise InputError(f"the query is no text in UTF-8 ({error})") from error
