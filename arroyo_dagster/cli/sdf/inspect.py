"""`sdf show` and `sdf sql`: draw and list definitions, query states. They write nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from arroyo_dagster import __version__
from arroyo_dagster.cli.common import open_to_read, print_error, private_option, store_options
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import loading_options
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.dataflow.definition.definition import Package
from arroyo_dagster.dataflow.definition.loading import load_dataflow, load_with_packages
from arroyo_dagster.dataflow.views.graph import dot_text
from arroyo_dagster.dataflow.views.namespaces import CliError, Namespace, Namespaces
from arroyo_dagster.dataflow.views.rendering import borderless, frame_text, table_text, window_text
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.planning.privacy import PrivateColumns

_F = TypeVar("_F", bound=Callable[..., Any])
_COMMANDS = {
    ".help": "list the commands",
    ".exit": "leave",
    ".quit": "leave",
    "show tables": "list the tables",
    "anything else": "is SQL over the states, read-only",
}


def narrowing_options(command: _F) -> _F:
    """Add `NAMESPACE`, `--key` and `--filter`, for every command that prints rows of states."""
    namespace = click.argument("namespace", required=False)
    key = click.option("--key", metavar="KEY", help="Print only the row of this key.")
    pattern = click.option(
        "--filter",
        "pattern",
        metavar="REGEX",
        help="Print only namespaces that match; with a NAMESPACE, only keys that match.",
    )
    return namespace(key(pattern(command)))


@sdf.command("show")
@click.argument("file", type=click.Path())
@narrowing_options
@click.option("--dot", is_flag=True, help="Print the graph of a dataflow for Graphviz.")
@loading_options
@private_option
@store_options
def print_definition(
    file: str,
    dot: bool,
    namespace: str | None,
    key: str | None,
    pattern: str | None,
    reading: Mapping[str, bool],
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """List the stored namespaces of a dataflow, or the rows of one; what a package has.

    A namespace is service/state/state, service/function/metrics, service/topic/topic.offset or
    service/name/watermark. All rows of a service are of one epoch, its newest ready one.
    Of a package its functions and states are listed, one per line; it has no stored state.

    \b
    Example:
      arroyo-state sdf show dataflow.yaml --url s3://bucket/arroyo
    """
    document, _ = load_with_packages(file, **reading)
    if isinstance(document, Package):
        if namespace is not None or key is not None or pattern is not None or dot:
            raise click.UsageError("a package has no stored state and no graph: give a dataflow")
        _print_package(document, as_json)
        return
    if dot:
        click.echo(dot_text(document), nl=False)
        return
    spaces = Namespaces(open_to_read(url), document, private=private)
    print_namespaces(spaces, namespace, key, pattern, as_json=as_json)


def _print_package(package: Package, as_json: bool) -> None:
    names = {"functions": sorted(package.functions), "states": sorted(package.states)}
    if as_json:
        print_json(names)
        return
    for kind, below in names.items():
        for name in below:
            click.echo(f"{kind[:-1]} {name}")


def print_namespaces(
    spaces: Namespaces,
    namespace: str | None,
    key: str | None,
    pattern: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the list of namespaces, or the rows of one."""
    if namespace is None:
        if key is not None:
            raise click.UsageError("--key needs a NAMESPACE")
        _print_list(spaces.all(pattern), as_json)
    else:
        _print_rows(spaces.get(namespace), key, pattern, as_json)


def _print_list(found: list[Namespace], as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"namespace": ns.name, "keys": len(ns.rows), "type": ns.type, "epoch": ns.epoch}
                for ns in found
            ]
        )
        return
    rows = [[ns.name, str(len(ns.rows)), ns.type] for ns in found]
    click.echo(borderless(["Namespace", "Keys", "Type"], rows))


def _print_rows(found: Namespace, key: str | None, pattern: str | None, as_json: bool) -> None:
    if not as_json:
        click.echo(borderless(found.header, found.lines(key, pattern)))
        return
    rows = [
        {
            "key": row.key,
            "window": window_text(row.window),
            "values": dict(zip(found.names, row.values, strict=True)),
        }
        for row in found.select(key, pattern)
    ]
    print_json_rows(
        {"namespace": found.name, "epoch": found.epoch, "type": found.type, "rows": rows}
    )


def print_json_rows(document: Any) -> None:
    """Print JSON of a document that holds times, as epoch milliseconds like in user code."""
    text = json.dumps(document, default=_plain)
    print_json(json.loads(text))


def _plain(value: Any) -> Any:
    return round(value.timestamp() * 1000) if hasattr(value, "timestamp") else str(value)


# ---- SQL -----------------------------------------------------------------------------------------


@sdf.command("sql")
@click.argument("file", type=click.Path())
@click.argument("query", required=False)
@loading_options
@private_option
@store_options
def query_states(
    file: str,
    query: str | None,
    reading: Mapping[str, bool],
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Query the arrow-row states of a dataflow.

    Tables are named like the states, with underscores. A windowed state shows the window that
    closed last. Without a QUERY, SQL mode starts: enter one query per line; `.help` lists the
    commands. Every query reads the newest ready epoch.

    \b
    Example:
      arroyo-state sdf sql dataflow.yaml "select * from counts" --url s3://bucket/arroyo
    """
    dataflow, _ = load_dataflow(file, **reading)
    views = Views(open_to_read(url), dataflow, private=private)
    if query is not None:
        print_answer(views, query, as_json)
        return
    sql_mode(views, sys.stdin.readline, prompting=sys.stdin.isatty(), as_json=as_json)


def print_answer(views: Views, query: str, as_json: bool) -> None:
    """Print the result of a query."""
    frame = views.sql(query)
    if not as_json:
        click.echo(frame_text(frame))
        return
    columns = [{"name": name, "type": str(kind)} for name, kind in frame.schema.items()]
    print_json_rows({"columns": columns, "rows": frame.rows()})


def sql_mode(views: Views, read_line: Callable[[], str], *, prompting: bool, as_json: bool) -> None:
    """Answer queries, one per line, until `.exit` or the end of the input.

    Args:
        views: the states.
        read_line: returns the next line with its end; empty = the input has ended.
        prompting: whether to print a prompt before each line.
        as_json: whether to print nothing but answers, as JSON.
    """
    if not as_json:
        click.echo(f"arroyo-state {__version__}, SQL over states; .help lists the commands")
    while True:
        if prompting and not as_json:
            click.echo("sql >> ", nl=False)
        line = read_line()
        text = line.strip()
        if not line or text in (".exit", ".quit"):
            return
        try:
            if text == ".help":
                click.echo(table_text(["command", "description"], list(_COMMANDS.items())))
            elif text.startswith("."):
                raise _unknown_command(text)
            elif text:
                views.refresh()
                print_answer(views, text, as_json)
        except ArroyoStateError as error:
            print_error(error)


def _unknown_command(text: str) -> CliError:
    return CliError(
        f"there is no command `{text}`",
        number="E47",
        nearest=".help, .exit, .quit",
        next_step="`.help` lists the commands",
    )
