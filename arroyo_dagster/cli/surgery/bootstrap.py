"""`bootstrap`: fill a stopped Arroyo job with tables that Spark computes from stored events."""

from __future__ import annotations

from typing import Any

import click

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.spark import session_of, spark_options
from arroyo_dagster.cli.surgery.commands import carry_out
from arroyo_dagster.cli.surgery.options import edit_options, opened
from arroyo_dagster.cli.surgery.window import check_window, window_options
from arroyo_dagster.optional_packages import check_spark
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.user_modules import load_function


@main.command()
@click.argument("job")
@click.argument("function", metavar="MODULE:FUNCTION")
@spark_options("On which Spark the tables are computed. Default: one in this process.", always=True)
@window_options
@edit_options
def bootstrap(job: str, function: str, spark: SparkSettings | None, **given: Any) -> None:
    """Fill a stopped Arroyo job with tables that Spark computes from stored events.

    FUNCTION gets the Spark session, and returns the tables as DataFrames, with the positions and
    the watermark of the cut that they are of: a `Bootstrap`. MODULE may be a path, as history.py.
    The plan computes the tables and writes nothing. Tables that are not returned start empty.
    Create JOB, let it process rows until its tables exist, and stop it with a checkpoint first.

    \b
    Examples:
      arroyo-state bootstrap job_b history.py:orders --assume job_b=stopped
      arroyo-state bootstrap job_b history.py:orders --assume job_b=stopped --yes --approve DIGEST
    """
    check_window(given)
    check_spark()
    called = load_function(function)
    store, paths, directory = opened(job, given)
    # Only here: a mistake in the name of the function is told without Spark.
    from arroyo_dagster.spark.surgery.bootstrap import computed_bootstrap

    session = session_of(spark or SparkSettings())()
    with computed_bootstrap(session, called, function) as computed:
        carry_out(computed.job(paths, directory).edit(), store, directory, given)
