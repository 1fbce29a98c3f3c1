"""The Spark session of a process, configured for Arrow."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from arroyo_dagster.errors import StorageError
from arroyo_dagster.optional_packages import check_spark, explained_imports
from arroyo_dagster.redaction import redact_text, redact_url, register_settings, replaced
from arroyo_dagster.spark import fast_start
from arroyo_dagster.spark.settings import (
    MASTER,
    REMOTE,
    SparkChoice,
    SparkEnvironment,
    SparkSettings,
    choose_spark,
    parse_properties,
    parse_submit_arguments,
    target_of,
)
from arroyo_dagster.spark.versions import CONNECT, require_pyspark
from arroyo_dagster.spark.workers import ship_package

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PER_SESSION: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    # Rows between tasks are few and large (Arrow IPC in a binary column).
    "spark.sql.execution.arrow.maxRecordsPerBatch": "256",
    # The number of partitions is the number of subtasks; Spark must not coalesce them.
    "spark.sql.adaptive.enabled": "false",
}
"""What a server of Spark Connect lets a client set, too."""
DEFAULTS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    **PER_SESSION,
    "spark.python.worker.reuse": "true",
    # A task connects to its Python worker about 30 ms faster than over TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    # Spark keeps workers by their environment. With this setting SQL sets a variable, and its jobs
    # and those of RDDs do not share workers.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}
LOCAL: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_WORKER_PYTHON = "spark.pyspark.python"
_CONNECT_PACKAGES = ("google.rpc", "grpc", "grpc_status", "zstandard")
_CONNECT_PORT = 15002
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A Spark session.

    Attributes:
        session: the session.
        choice: which Spark it is, and why.
        started: whether it was started here, so that the caller must stop it.
    """

    session: SparkSession
    choice: SparkChoice
    started: bool


def open_session(settings: SparkSettings | None = None) -> OpenedSession:
    """Return the session of this process, and start one if there is none.

    Args:
        settings: which Spark; see `choose_spark` for what comes before and after them. An active
            session is used unchanged. What `spark-submit` and `spark-defaults.conf` set takes
            precedence over the defaults of this package. Options of the JVM are added to those of
            this package. `spark.arroyo.fastStart=false` starts a local session without
            `fast_start`.

    Raises:
        InputError: a package is not installed that Spark needs, or Spark Connect besides; or
            pyspark is too old.
        StorageError: Spark did not start, or the Spark Connect server does not answer.
    """
    check_spark()
    require_pyspark("arroyo_dagster")
    settings = settings or SparkSettings()
    active = _active_session()
    environment = spark_environment(active)
    choice = choose_spark(settings, environment)
    register_settings({**settings.conf, "target": choice.target, "given": settings.given})
    if active is not None:
        session = active
    elif choice.connect:
        session = _start_connect(choice, settings)
    elif environment.submitted is not None:
        # Start the session of an application of spark-submit, whose settings stay.
        from pyspark import SparkConf

        present = dict(SparkConf().getAll())
        defaults = {name: value for name, value in DEFAULTS.items() if name not in present}
        conf = settings.conf_with_packages
        for name in (MASTER, REMOTE, fast_start.SETTING):
            conf.pop(name, None)
        session = _started(defaults | conf, "the application of spark-submit")
    else:
        session = _start_classic(choice, settings, environment.defaults)
    if settings.ship and not choice.in_process:
        ship_package(session)
    return OpenedSession(session, choice, started=active is None)


def get_session(
    master: str | None = None, conf: Mapping[str, str] | None = None
) -> tuple[SparkSession, bool]:
    """Return the session of this process, and whether the caller must stop it.

    See `open_session`, which takes all settings.
    """
    opened = open_session(SparkSettings(master=master, conf=conf or {}))
    return opened.session, opened.started


def _active_session() -> SparkSession | None:
    """Return the session that this process has, whichever thread started it."""
    from pyspark import SparkContext
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    if is_remote():
        with suppress(PySparkException, ImportError):
            return SparkSession.active()
        return None
    if SparkContext._active_spark_context is None:
        return None
    # A context without a session: starting one with settings would change it.
    return SparkSession.builder.getOrCreate()


def spark_environment(active: SparkSession | None) -> SparkEnvironment:
    """Read what decides about Spark besides the settings.

    Args:
        active: the session that this process has; None = there is none.
    """
    from pyspark import SparkConf, SparkContext

    if active is not None:
        return SparkEnvironment(active=target_of(active))
    submitted = None
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()
        submitted = SparkConf().get(MASTER)
    return SparkEnvironment(
        submitted=submitted, remote=os.environ.get("SPARK_REMOTE"), defaults=_spark_defaults()
    )


def _spark_defaults() -> dict[str, str]:
    from pyspark.find_spark_home import _find_spark_home

    directory = os.environ.get("SPARK_CONF_DIR")
    folder = Path(directory) if directory else Path(_find_spark_home()) / "conf"
    defaults: dict[str, str] = {}
    with suppress(OSError):
        defaults = parse_properties((folder / "spark-defaults.conf").read_text(errors="replace"))
    return defaults | parse_submit_arguments(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))


def _start_classic(
    choice: SparkChoice, settings: SparkSettings, before: Mapping[str, str]
) -> SparkSession:
    from pyspark import SparkContext

    configured = settings.conf_with_packages
    configured.pop(REMOTE, None)
    # Workers must use the driver's interpreter: the first `python3` on their PATH may have neither
    # pyarrow nor this package.
    python = configured.get(_WORKER_PYTHON) or before.get(_WORKER_PYTHON) or sys.executable
    os.environ.setdefault("PYSPARK_PYTHON", python)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    defaults = {**DEFAULTS, **(LOCAL if choice.target.startswith("local") else {})}
    conf = {name: value for name, value in defaults.items() if name not in before}
    options = [f"-Dlog4j2.configurationFile={LOG_SETTINGS}"]
    fast = {**before, **configured}.get(fast_start.SETTING, "true") != "false"
    configured.pop(fast_start.SETTING, None)
    java_home = os.environ.get("JAVA_HOME")
    if fast:
        if choice.in_process:  # elsewhere workers may lack this package when they start
            conf["spark.python.daemon.module"] = "arroyo_dagster.spark.daemon"
        options.append(fast_start.java_options(_cache(), java_home))
    own = configured.get(JAVA_OPTIONS) or before.get(JAVA_OPTIONS)
    conf |= configured | {
        MASTER: choice.target,
        JAVA_OPTIONS: " ".join([*options, *filter(None, [own])]),
    }
    if SparkContext._gateway is None:
        # Refuse what could only fail, with several lines of Java and of Spark's scripts.
        problem = local_java().problem
        if problem is not None:
            raise StorageError(
                f"Spark did not start ({problem})",
                master=choice.target,
                retryable=False,
                next_step=JAVA_STEP,
            )
    try:
        with _without_variable("SPARK_REMOTE"):
            return _started(conf, choice.target)
    except StorageError:
        if fast and SparkContext._gateway is None and fast_start.discard(_cache(), java_home):
            return _start_classic(choice, settings, before)
        raise


def _start_connect(choice: SparkChoice, settings: SparkSettings) -> SparkSession:
    require_pyspark("Spark Connect", CONNECT)
    with explained_imports():
        for package in _CONNECT_PACKAGES:
            importlib.import_module(package)
    address = urlsplit(choice.target)
    with replaced(
        (OSError, ValueError),
        lambda error: StorageError(
            f"the Spark Connect server does not answer ({redact_text(str(error))})",
            remote=redact_url(choice.target),
            next_step="check the URL, and that the server runs: sbin/start-connect-server.sh",
        ),
    ):
        # A client would try for ten minutes.
        where = (address.hostname or "", address.port or _CONNECT_PORT)
        socket.create_connection(where, _CONNECT_SECONDS).close()
    conf = settings.conf_with_packages
    for name in (MASTER, fast_start.SETTING):
        conf.pop(name, None)
    return _started({**PER_SESSION, **conf, REMOTE: choice.target}, choice.target)


def _started(conf: Mapping[str, str], target: str) -> SparkSession:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("arroyo-dagster")
    for name, value in conf.items():
        builder = builder.config(name, value)
    with replaced(
        (PySparkException, OSError),
        lambda error: StorageError(
            f"Spark did not start ({redact_text(str(error))})",
            master=redact_url(target),
            retryable=False,
            next_step="check that `java -version` says 17 or newer, and that the master answers",
        ),
    ):
        return builder.getOrCreate()


@contextmanager
def _without_variable(name: str) -> Iterator[None]:
    """Hide a variable from pyspark, which refuses a master beside it."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def local_archive() -> Path:
    """Return the path of the archive with which local sessions start fast.

    Raises:
        OSError: the JDK or Spark's jars cannot be read.
    """
    return fast_start.archive_path(_cache(), os.environ.get("JAVA_HOME"))


def local_java() -> Java:
    """Return the Java that a session of this process starts."""
    return find_java(os.environ.get("JAVA_HOME"))


def _cache() -> Path:
    # expanduser, as Path.home() fails for a user without a home; nothing can be written there.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "arroyo_dagster"


# ---- the Java that a Spark session starts: where it is, and whether it is new enough -------------

OLDEST_JAVA = 17
JAVA_STEP = (
    f"install Java {OLDEST_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless), "
    "or set JAVA_HOME"
)
_NUMBER = re.compile(r'(?:version |JAVA_VERSION=)"(?:1\.)?(\d+)')


class Java(NamedTuple):
    """A command of Java.

    Attributes:
        command: its path, or `java` if there is none.
        number: its version, for example 17; None if it is unknown.
        problem: why Spark cannot start with it; None if it can.
    """

    command: str
    number: int | None
    problem: str | None


def find_java(java_home: str | None) -> Java:
    """Find the Java that Spark starts, and its version.

    Reads the file `release` of the JDK, which takes microseconds. Without it, Java is asked.

    Args:
        java_home: `JAVA_HOME` of this process, as Spark reads it.
    """
    java = f"{java_home}/bin/java" if java_home else "java"
    path = shutil.which(java)
    if path is None:
        place = f"JAVA_HOME={java_home} has no bin/java" if java_home else "no java on the PATH"
        return Java(java, None, f"Java {OLDEST_JAVA} or newer is missing: {place}")
    try:
        number = _number(Path(path))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Java(path, None, f"{path} does not run ({error})")
    if number is not None and number < OLDEST_JAVA:
        return Java(path, number, f"{path} is Java {number}; Spark needs {OLDEST_JAVA} or newer")
    return Java(path, number, None)


def _number(java: Path) -> int | None:
    release = java.resolve().parent.parent / "release"
    match = _NUMBER.search(release.read_text(errors="replace")) if release.is_file() else None
    if match is None:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
        match = _NUMBER.search(done.stderr + done.stdout)
    return int(match[1]) if match else None
