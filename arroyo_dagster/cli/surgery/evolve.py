"""`evolve`: give a stopped Arroyo job the state of a job of other SQL. A dry run without --yes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.surgery.commands import carry_out, edit_options, opened
from arroyo_dagster.cli.surgery.documents import read_yaml
from arroyo_dagster.cli.surgery.sources import open_source, source_options
from arroyo_dagster.cli.surgery.window import check_window, window_options
from arroyo_dagster.state.model.surgery.evolve import Overrides
from arroyo_dagster.state.operations.surgery.evolve import plan_evolve, run_evolve
from arroyo_dagster.state.operations.surgery.graphs.find import GivenGraphs, read_graph
from arroyo_dagster.state.operations.surgery.window import PlannableEdit
from arroyo_dagster.state.planning.surgery.overrides import parse_overrides


@main.command()
@source_options
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
@click.option(
    "--graph",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The graph of JOB's pipeline: JSON, the answer of GET /api/v1/pipelines/ID. Default: that "
    "of --arroyo-db or --arroyo-api.",
)
@click.option(
    "--source-graph",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The graph of SOURCE's pipeline, likewise.",
)
@window_options
@edit_options
def evolve(
    source: str,
    job: str,
    epoch: int | None,
    from_url: str | None,
    file: Path | None,
    start_empty: tuple[str, ...],
    graph: Path | None,
    source_graph: Path | None,
    **given: Any,
) -> None:
    """Give a stopped Arroyo job the state of another job whose SQL differs.

    Operators are matched by kind, tables, keys and place in the graphs of the pipelines; the plan
    says why, and what becomes of each table.
    SOURCE is only read, and may run. JOB keeps the state of its sinks. Create JOB, let it take a
    checkpoint, and stop it with a checkpoint first.

    \b
    Examples:
      arroyo-state evolve job_a job_b --assume job_b=stopped
      arroyo-state evolve job_a job_b --arroyo-api http://HOST:5115
      arroyo-state evolve job_a job_b --overrides changes.yaml --assume job_b=stopped
    """
    check_window(given)
    store, paths, directory = opened(job, given)
    taken = open_source(store, source, epoch, from_url)
    overrides = _overrides(file, start_empty)
    graphs = GivenGraphs(
        source=None if source_graph is None else read_graph(source_graph),
        job=None if graph is None else read_graph(graph),
    )
    planned = PlannableEdit(
        paths,
        plan=lambda at, status: plan_evolve(taken, at, paths, status, overrides, graphs),
        run=lambda at, status, options: run_evolve(
            taken, at, paths, status, overrides, options, graphs
        ),
    )
    carry_out(planned, store, directory, given)


def _overrides(file: Path | None, start_empty: tuple[str, ...]) -> Overrides:
    document = None if file is None else read_yaml(file, "the overrides")
    return parse_overrides(document, start_empty)
