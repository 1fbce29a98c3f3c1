"""The one Spark session of a process, configured for Arrow in and out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Rows that travel are few and big (Arrow IPC in a binary column).
    "spark.sql.execution.arrow.maxRecordsPerBatch": "256",
    "spark.sql.adaptive.enabled": "false",
    "spark.python.worker.reuse": "true",
    "spark.sql.streaming.stopTimeout": "30s",
}


def get_session(
    master: str | None = None, conf: Mapping[str, str] | None = None
) -> tuple[SparkSession, bool]:
    """The session of this process.

    Args:
        master: where to run; `local[*]` by default. An active session is used as it is.
        conf: settings that go before ours.

    Returns:
        The session, and whether it was started here (then the caller stops it).
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active, False
    # Workers must be of the driver's interpreter: the first `python3` on a worker's PATH has
    # neither pyarrow nor us.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("arroyo-dagster").master(master or "local[*]")
    for name, value in {**DEFAULTS, **(conf or {})}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session, True
