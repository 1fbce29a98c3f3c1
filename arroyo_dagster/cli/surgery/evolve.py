"""`evolve`: give a stopped Arroyo job the state of a job of other SQL. A dry run without --yes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.surgery.commands import carry_out
from arroyo_dagster.cli.surgery.options import edit_options, opened
from arroyo_dagster.cli.surgery.sources import open_source, source_options
from arroyo_dagster.cli.surgery.window import check_window, window_options
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.operations.surgery.evolve import plan_evolve, run_evolve
from arroyo_dagster.state.operations.surgery.window import PlannableEdit
from arroyo_dagster.state.planning.surgery.overrides import parse_overrides
from arroyo_dagster.state.storage.local_documents import read_document


@main.command()
@source_options
@click.option(
    "--map",
    "pairs",
    metavar="OLD=NEW",
    multiple=True,
    help="The operator NEW of JOB takes the state of OLD of SOURCE. May be given several times.",
)
@click.option(
    "--overrides",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="YAML with decisions: map, drop, start_empty, same_columns, fill, rename, accumulators.",
)
@click.option(
    "--start-empty",
    metavar="OPERATOR",
    multiple=True,
    help="An operator of JOB that starts without state. May be given several times.",
)
@window_options
@edit_options
def evolve(
    source: str,
    job: str,
    from_url: str | None,
    pairs: tuple[str, ...],
    file: Path | None,
    start_empty: tuple[str, ...],
    **given: Any,
) -> None:
    """Give a stopped Arroyo job the state of another job whose SQL differs.

    Operators match by themselves if name, tables and place are equal. For others the refusal
    suggests --map, with the reasons. The plan says what becomes of each table.
    SOURCE is JOB or JOB@EPOCH; it is only read, and may run. JOB keeps the state of its sinks.
    Create JOB, let it take a checkpoint, and stop it with a checkpoint first.

    \b
    Examples:
      arroyo-state evolve job_a job_b --assume job_b=stopped
      arroyo-state evolve job_a job_b --map tumbling_4=tumbling_9 --arroyo-api http://HOST:5115
      arroyo-state evolve job_a job_b --overrides changes.yaml --assume job_b=stopped
    """
    check_window(given)
    store, paths, directory = opened(job, given)
    taken = open_source(store, source, from_url)
    document = None if file is None else read_yaml(file, "the overrides")
    overrides = parse_overrides(document, start_empty, map(_pair, pairs))
    planned = PlannableEdit(
        paths,
        plan=lambda to, status: plan_evolve(taken, to, paths, status, overrides),
        run=lambda to, status, options: run_evolve(taken, to, paths, status, overrides, options),
    )
    carry_out(planned, store, directory, given)


def _pair(text: str) -> tuple[str, str]:
    source, _, operator = text.partition("=")
    if not source or not operator:
        raise click.UsageError(f"--map {text}: expected OLD=NEW")
    return source, operator


# ---- the YAML files of surgery: overrides of an evolve -------------------------------------------


def read_yaml(file: Path, what: str) -> Any:
    """Return the content of a YAML file, as plain values.

    Args:
        what: what the file holds, for messages: "the overrides".

    Raises:
        InputError: it cannot be read, or is no YAML; names the line.
    """
    # Only here, as most calls read no YAML.
    from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
    from arroyo_dagster.dataflow.definition.yaml_tree import read_tree

    diagnostics = Diagnostics()
    try:
        tree = read_tree(read_document(file).decode(), diagnostics)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} cannot be read ({error})", path=str(file)) from error
    if tree is None or diagnostics.found:
        first = diagnostics.found[0]
        raise InputError(f"no YAML: {first.place}{first.message}", path=str(file))
    return tree.plain()
