"""The Spark session of a process, configured for Arrow."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from arroyo_dagster.errors import StorageError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, redacted_cause, register_settings
from arroyo_dagster.spark import fast_start
from arroyo_dagster.spark.java import JAVA_STEP, Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Rows between tasks are few and large (Arrow IPC in a binary column).
    "spark.sql.execution.arrow.maxRecordsPerBatch": "256",
    # The number of partitions is the number of subtasks; Spark must not coalesce them.
    "spark.sql.adaptive.enabled": "false",
    "spark.python.worker.reuse": "true",
    # A task connects to its Python worker about 30 ms faster than over TCP.
    "spark.python.unix.domain.socket.enabled": "true",
}
LOCAL: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_IN_PROCESS = r"local(\[.*\])?"
"""A master with which the driver's JVM runs the tasks."""
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


def get_session(
    master: str | None = None, conf: Mapping[str, str] | None = None
) -> tuple[SparkSession, bool]:
    """Return the session of this process, and start one if none is active.

    Args:
        master: the master; None = `local[*]`. An active session is used unchanged.
        conf: settings that take precedence over `DEFAULTS` and `LOCAL`. Options of the JVM are
            added to those of this package. `spark.arroyo.fastStart=false` starts a local session
            without `fast_start`.

    Returns:
        The session, and whether it was started here, so that the caller must stop it.

    Raises:
        InputError: pyspark is not installed.
        StorageError: Spark did not start.
    """
    with explained_imports():
        from pyspark import SparkContext
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    active = SparkSession.getActiveSession()
    if active is not None:
        return active, False
    # Workers must use the driver's interpreter: the first `python3` on their PATH may have neither
    # pyarrow nor this package.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    master = master or "local[*]"
    register_settings({**(conf or {}), "master": master})
    given = dict(conf or {})
    settings = {**DEFAULTS, **(LOCAL if master.startswith("local") else {})}
    options = [f"-Dlog4j2.configurationFile={LOG_SETTINGS}"]
    fast = given.pop(fast_start.SETTING, "true") != "false" and re.fullmatch(_IN_PROCESS, master)
    java_home = os.environ.get("JAVA_HOME")
    if fast:
        settings["spark.python.daemon.module"] = "arroyo_dagster.spark.daemon"
        options.append(fast_start.java_options(_cache(), java_home))
    settings |= given
    settings[JAVA_OPTIONS] = " ".join([*options, *filter(None, [given.get(JAVA_OPTIONS)])])
    builder = SparkSession.builder.appName("arroyo-dagster").master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    if SparkContext._gateway is None:
        _check_java(master)
    try:
        return builder.getOrCreate(), True
    except (PySparkException, OSError) as error:
        if fast and SparkContext._gateway is None and fast_start.discard(_cache(), java_home):
            return get_session(master, conf)
        raise StorageError(
            f"Spark did not start ({redact_text(str(error))})",
            master=master,
            retryable=False,
            next_step="check that `java -version` says 17 or newer, and that the master answers",
        ) from redacted_cause(error)


def local_archive() -> Path:
    """Return the path of the archive with which local sessions start fast.

    Raises:
        OSError: the JDK or Spark's jars cannot be read.
    """
    return fast_start.archive_path(_cache(), os.environ.get("JAVA_HOME"))


def local_java() -> Java:
    """Return the Java that a session of this process starts."""
    return find_java(os.environ.get("JAVA_HOME"))


def _check_java(master: str) -> None:
    """Refuse what could only fail, with several lines of Java and of Spark's scripts."""
    if {"SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"} & set(os.environ):
        return  # this process starts no JVM
    problem = local_java().problem
    if problem is not None:
        raise StorageError(
            f"Spark did not start ({problem})",
            master=master,
            retryable=False,
            next_step=JAVA_STEP,
        )


def _cache() -> Path:
    # expanduser, as Path.home() fails for a user without a home; nothing can be written there.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "arroyo_dagster"
