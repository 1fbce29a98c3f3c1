"""`sdf replay`: process the dead letters of a dataflow again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from arroyo_dagster.cli.common import open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import (
    allow_functions,
    binding_flags,
    check_bound,
    check_functions,
    error_options,
    function_options,
    keep_epochs_option,
    loading_options,
    parallelism_option,
)
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.cli.sdf.run import (
    failed_counts,
    finish_run,
    print_epoch,
    run_pipelines,
    spark_topics,
    stopping,
)
from arroyo_dagster.cli.spark import spark_options
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.in_process import DataflowOptions, DataflowOutcome
from arroyo_dagster.dataflow.runtime.letters import Letter
from arroyo_dagster.dataflow.runtime.service import DEAD_LETTER, RunOptions
from arroyo_dagster.dataflow.topics.replay import ServiceReplay, build_replay, plan_replay
from arroyo_dagster.dataflow.topics.wiring import Letters, wire
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
@click.option(
    "--sink", "sinks", multiple=True, metavar="TOPIC=KIND:PATH", help="Where a topic's records go."
)
@click.option(
    "--bindings",
    metavar="FILE",
    help="Read sinks, functions and env from this YAML file; its sources are not read.",
)
@function_options
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
    sinks: Sequence[str],
    bindings: str | None,
    functions: Sequence[str],
    env: Sequence[str],
    keep_epochs: int,
    on_error: str,
    max_errors: int | None,
    parallelism: int,
    spark: SparkSettings | None,
    reading: Mapping[str, bool],
    url: str | None,
    as_json: bool,
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
    bound = replace(binding_flags((), sinks, functions, env, bindings), sources={})
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
    outside = spark_topics(store, spark, None)
    wired = wire(
        dataflow,
        bound,
        store,
        packages=packages,
        outside=outside,
        letters=Letters(written=on_error == DEAD_LETTER, replayed=True),
    )
    options = RunOptions(
        parallelism=parallelism, keep_epochs=keep_epochs, on_error=on_error, max_errors=max_errors
    )
    pipelines = build_replay(dataflow, store, replays, bindings=wired.bindings, options=options)
    failed_before = failed_counts(store, dataflow)
    with stopping() as stop:
        outcome = DataflowOutcome(rounds=0, epochs={}, ended=True)
        if pipelines:
            run_options = DataflowOptions(until_idle=True, stop=stop, on_epoch=print_epoch)
            outcome = run_pipelines(pipelines, store, wired, run_options, spark, outside)
    finish_run(dataflow, store, outcome, failed_before, on_error, as_json=as_json)


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
