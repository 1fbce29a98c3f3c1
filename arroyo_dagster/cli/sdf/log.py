"""`sdf log`: list the records on which steps failed. It writes nothing."""

from __future__ import annotations

import dataclasses

import click

from arroyo_dagster.cli.common import open_to_read, store_options
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import load_dataflow, loading_options
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.dataflow.storage.engine_tables import MOST_FAILURES
from arroyo_dagster.dataflow.views.failures import StepFailure, last_failures
from arroyo_dagster.state.codec.iso_times import iso_micros


@sdf.command("log")
@click.argument("file", type=click.Path())
@click.option("--service", metavar="NAME", help="Only this service. Default: all services.")
@click.option(
    "-n",
    "--last",
    type=click.IntRange(1),
    default=MOST_FAILURES,
    show_default=True,
    metavar="N",
    help="Print only the last N failures of each service.",
)
@loading_options
@store_options
def print_log(
    file: str,
    service: str | None,
    last: int,
    legacy: bool,
    extended: bool,
    prod: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """List the last records on which steps of a dataflow failed: when, where and why.

    Each subtask of a service keeps the last 20 failures of each of its steps with its state, with
    `--on-error skip` and with dead letters. Those of an epoch that was not published are not kept;
    the run that ended has printed them.

    \b
    Example:
      arroyo-state sdf log dataflow.yaml --service count-words --last 5
    """
    dataflow, _ = load_dataflow(file, legacy=legacy, extended=extended, prod=prod)
    kept: list[StepFailure] = []
    left = dict.fromkeys(dataflow.services, last)
    for one in reversed(last_failures(open_to_read(url), dataflow, service=service)):
        left[one.service] -= 1
        if left[one.service] >= 0:
            kept.append(one)
    chosen = kept[::-1]
    if as_json:
        print_json([dataclasses.asdict(one) for one in chosen])
        return
    for one in chosen:
        click.echo(_text(file, one))
    if not chosen:
        click.echo("no record has failed", err=True)


def _text(file: str, failure: StepFailure) -> str:
    place = f" on {failure.place}" if failure.place else ""
    line = "" if failure.line is None else f"\n  {file}:{failure.line}"
    return (
        f"{iso_micros(failure.at_ms * 1000)} {failure.service}/{failure.step} epoch "
        f"{failure.epoch}{place}{line}\n  {failure.reason}"
    )
