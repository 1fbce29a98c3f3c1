"""`sdf replay`: process the dead letters of a dataflow again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from arroyo_dagster.cli.common import open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import (
    allow_functions,
    binding_options,
    check_bound,
    check_functions,
    error_options,
    keep_epochs_option,
    loading_options,
    parallelism_option,
)
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.cli.sdf.running import ServiceRun
from arroyo_dagster.cli.spark import spark_options
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.in_process import DataflowOptions
from arroyo_dagster.dataflow.runtime.letters import Letter
from arroyo_dagster.dataflow.runtime.service import DEAD_LETTER, RunOptions
from arroyo_dagster.dataflow.topics.bindings import BindingsText
from arroyo_dagster.dataflow.topics.replay import ServiceReplay, build_replay, plan_replay
from arroyo_dagster.dataflow.topics.wiring import Letters
from arroyo_dagster.dataflow.views.rendering import borderless
from arroyo_dagster.spark.settings import SparkSettings


@sdf.command()
@click.argument("file", type=click.Path())
@click.option("--service", metavar="NAME", help="Only the dead letters of this service.")
@click.option(
    "--partial",
    is_flag=True,
    help="Also replay records of which parts had effects. These parts then count twice.",
)
@click.option("--dry-run", is_flag=True, help="List the dead letters that wait; process nothing.")
@binding_options("sink")
@keep_epochs_option
@error_options(DEAD_LETTER)
@parallelism_option
@spark_options("Run on Spark instead of in this process.", always=True)
@loading_options
@store_options
def replay(
    file: str,
    service: str | None,
    partial: bool,
    dry_run: bool,
    bound: BindingsText,
    spark: SparkSettings | None,
    reading: Mapping[str, bool],
    url: str | None,
    as_json: bool,
    **running: Any,
) -> None:
    """Process the records again that failed in runs with `--on-error dead-letter`.

    Each service reads its own dead letters instead of its topics: the record as it came, from the
    beginning. Each letter is replayed once, however the replay is killed. A record that fails again
    becomes a new letter. A letter is left where parts of its record had effects: another record
    that a flat-map made of it, a state that an earlier step of the partition changed, another
    sink. A record whose window has closed is late.

    Exit codes: as of `sdf run`.

    \b
    Example:
      arroyo-state sdf replay dataflow.yaml --bindings bindings.yaml
    """
    dataflow, packages = load_dataflow(file, **reading)
    store = open_to_read(url) if dry_run else open_url(url)
    replays = plan_replay(dataflow, store, service=service, partial=partial)
    if dry_run:
        _print_letters(replays, as_json)
        return
    dataflow = check_functions(file, dataflow, packages)
    check_bound(dataflow, packages, bound.functions)
    _print_left(replays)
    allow_functions(file)
    options = RunOptions(**running)
    services = ServiceRun(
        (dataflow, packages),
        bound,
        store,
        letters=Letters(written=options.on_error == DEAD_LETTER, replayed=True),
        spark=spark,
    )
    pipelines = build_replay(
        dataflow, store, replays, bindings=services.wired.bindings, options=options
    )
    services.carry_out(pipelines, DataflowOptions(until_idle=True), as_json=as_json)


def _print_left(replays: Sequence[ServiceReplay]) -> None:
    for replay in replays:
        click.echo(f"{replay.service}: {len(replay.letters)} dead letters to replay", err=True)
        if replay.partial:
            click.echo(
                f"{replay.service}: {len(replay.partial)} are left: parts of their records "
                "had effects; to repeat these, replay them with --partial",
                err=True,
            )


def _print_letters(replays: Sequence[ServiceReplay], as_json: bool) -> None:
    letters = [letter for replay in replays for letter in (*replay.letters, *replay.partial)]
    if as_json:
        print_json([_letter_json(letter) for letter in letters])
        return
    counted = Counter(
        (letter.service, letter.step, letter.reason, letter.partial) for letter in letters
    )
    first = {
        (letter.service, letter.step, letter.reason, letter.partial): letter
        for letter in reversed(letters)
    }
    rows = [
        [service, step, str(count), "partial" if partial else "whole", reason, first[key].place]
        for key, count in counted.items()
        for service, step, reason, partial in [key]
    ]
    click.echo(borderless(["Service", "Step", "Letters", "Records", "Reason", "First"], rows))


def _letter_json(letter: Letter) -> dict[str, Any]:
    return {
        "service": letter.service,
        "step": letter.step,
        "reason": letter.reason,
        "topic": letter.topic,
        "file": letter.file,
        "partition": letter.partition,
        "offset": letter.offset,
        "record": None if letter.record is None else letter.record.decode(errors="replace"),
        "partial": letter.partial,
    }
