"""`bootstrap`: fill a stopped Arroyo job with tables that Spark computes from stored events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.spark import check_spark, session_of, spark_options
from arroyo_dagster.cli.surgery.commands import carry_out, edit_options, opened
from arroyo_dagster.cli.surgery.documents import read_yaml
from arroyo_dagster.cli.surgery.window import check_window, window_options
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.operations.surgery.declared import parse_declared_bootstrap


@main.command()
@click.argument("job")
@click.argument("file", type=click.Path(path_type=Path))
@spark_options("On which Spark the tables are computed. Default: one in this process.", always=True)
@window_options
@edit_options
def bootstrap(job: str, file: Path, spark: SparkSettings | None, **given: Any) -> None:
    """Fill a stopped Arroyo job with tables that Spark computes from stored events.

    FILE declares the events, the cut, and what each table holds. The plan computes the tables and
    writes nothing. Tables that FILE does not name start empty. Create JOB, let it process rows
    until its tables exist, and stop it with a checkpoint first.

    \b
    Examples:
      arroyo-state bootstrap job_b history.yaml --assume job_b=stopped
      arroyo-state bootstrap job_b history.yaml --assume job_b=stopped --yes --approve DIGEST
    """
    check_window(given)
    check_spark()
    declared = parse_declared_bootstrap(read_yaml(file, "the bootstrap"))
    store, paths, directory = opened(job, given)
    # Only here: a mistake in FILE is told without Spark.
    from arroyo_dagster.spark.surgery.declared import declared_bootstrap

    session = session_of(spark or SparkSettings())()
    with declared_bootstrap(session, store, paths, directory, declared) as found:
        carry_out(found.edit(), store, directory, given)
