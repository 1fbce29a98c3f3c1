"""`sdf log`: list the last records on which steps failed, and messages. It writes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import click

from arroyo_dagster.cli.common import open_to_read, store_options
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import loading_options
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.storage.engine_tables import MOST_LOGGED
from arroyo_dagster.dataflow.views.step_log import LogEntry, read_step_log
from arroyo_dagster.state.codec.iso_times import iso_micros


@sdf.command("log")
@click.argument("file", type=click.Path())
@click.option("--service", metavar="NAME", help="Only this service. Default: all services.")
@click.option(
    "-n",
    "--last",
    type=WholeNumber(1),
    default=MOST_LOGGED,
    show_default=True,
    metavar="N",
    help="Print only the last N entries of each service.",
)
@loading_options
@store_options
def print_log(
    file: str,
    service: str | None,
    last: int,
    reading: Mapping[str, bool],
    url: str | None,
    as_json: bool,
) -> None:
    """List the last records on which steps of a dataflow failed, and messages of its functions.

    Each subtask of a service keeps the last 20 failures of each of its steps with its state, with
    `--on-error skip` and with dead letters, and the last 20 messages (`log_message` of
    arroyo_dagster.sdf). Those of an epoch that was not published are not kept; the run that ended
    has printed why it failed.

    \b
    Example:
      arroyo-state sdf log dataflow.yaml --service count-words --last 5
    """
    dataflow, _ = load_dataflow(file, **reading)
    kept: list[LogEntry] = []
    left = dict.fromkeys(dataflow.services, last)
    for entry in reversed(read_step_log(open_to_read(url), dataflow, service=service)):
        left[entry.service] -= 1
        if left[entry.service] >= 0:
            kept.append(entry)
    entries = kept[::-1]
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in entries])
        return
    for entry in entries:
        click.echo(_text(file, entry))
    if not entries:
        click.echo("no record has failed, and no function has sent a message", err=True)


def _text(file: str, entry: LogEntry) -> str:
    place = f" on {entry.place}" if entry.place else ""
    line = "" if entry.line is None else f"\n  {file}:{entry.line}"
    detail = entry.reason if entry.message is None else f"message: {entry.message}"
    return (
        f"{iso_micros(entry.at_ms * 1000)} {entry.service}/{entry.step} epoch "
        f"{entry.epoch}{place}{line}\n  {detail}"
    )
