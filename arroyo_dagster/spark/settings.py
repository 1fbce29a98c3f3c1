"""Which Spark to use: one value for Python, the command line and Dagster. Loads no pyspark.

`choose_spark` decides, and says why: what this process already is (an active session, an
application of spark-submit) comes first, then the settings, then Spark's own configuration.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.spark.versions import CONNECT, require_pyspark
from arroyo_dagster.state.model.settings import Setting

LOCAL_MASTER = "local[*]"
MASTER, REMOTE, PACKAGES = "spark.master", "spark.remote", "spark.jars.packages"
_PROPERTY = re.compile(r"\s*((?:\\.|[^\s=:\\])+)\s*[=:\s]\s*(.*)")
_IN_PROCESS = re.compile(r"local(\[.*\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings:
    """Which Spark to use, and how this package reaches its workers.

    Attributes:
        master: a master such as `local[4]`, `spark://HOST:7077` or `yarn`.
        remote: the URL of a Spark Connect server, `sc://HOST:15002`.
        conf: Spark settings; they take precedence over those of this package.
        packages: Maven coordinates of jars, such as a Kafka connector.
        ship: whether to send this package to the workers, which then need only its dependencies.
        thresholds: from which amount of work maintenance uses Spark.

    Raises:
        InputError: both `master` and `remote`; or `packages` with `remote`, as a server loads its
            jars when it starts.
    """

    master: Annotated[
        str | None,
        Setting(
            help="The Spark master, for example local[4], spark://HOST:7077 or yarn. Default: what "
            "spark-submit, SPARK_REMOTE or spark-defaults.conf say, else local[*].",
            metavar="URL",
        ),
    ] = None
    remote: Annotated[
        str | None,
        Setting(
            help="Use the Spark Connect server at this URL, for example sc://HOST:15002.",
            config="remote_url",
            metavar="URL",
        ),
    ] = field(default=None, repr=False)
    conf: Annotated[
        Mapping[str, str],
        Setting(
            help="Settings of Spark, for example spark.executor.memory=4g. They take precedence "
            "over those of this package.",
            metavar="NAME=VALUE",
        ),
    ] = field(default_factory=dict, repr=False)
    packages: Annotated[
        tuple[str, ...],
        Setting(
            help="Jars to load, for example of a Kafka connector, as Maven coordinates.",
            metavar="GROUP:NAME:VERSION",
        ),
    ] = ()
    ship: Annotated[
        bool,
        Setting(
            help="Send this package to the workers of the cluster. Without it they must have the "
            "same version installed."
        ),
    ] = False
    thresholds: SparkThresholds = field(default_factory=SparkThresholds)

    def __post_init__(self) -> None:
        if self.master is not None and self.remote is not None:
            raise InputError(
                "a Spark master and a Spark Connect server are given",
                master=redact_url(self.master),
                remote=redact_url(self.remote),
                next_step="leave one of them out",
            )
        if self.remote is not None and (self.packages or PACKAGES in self.conf):
            raise InputError(
                "a Spark Connect server loads its jars when it starts, not for a client",
                remote=redact_url(self.remote),
                next_step=f"start the server with {PACKAGES}, and leave the packages out here",
            )

    @property
    def given(self) -> str | None:
        """The Spark that the settings name; None = none."""
        return self.remote or self.master or self.conf.get(REMOTE) or self.conf.get(MASTER)

    @property
    def conf_with_packages(self) -> dict[str, str]:
        """The Spark settings, the packages among them."""
        conf = dict(self.conf)
        if self.packages:
            also = [conf[PACKAGES]] if PACKAGES in conf else []
            conf[PACKAGES] = ",".join([*also, *self.packages])
        return conf


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkEnvironment:
    """What decides about Spark besides the settings.

    Attributes:
        active: the master or Spark Connect URL of the active session; None = there is none.
        submitted: the master with which spark-submit started this process; None = it did not.
        remote: the variable SPARK_REMOTE.
        defaults: `spark-defaults.conf` and PYSPARK_SUBMIT_ARGS.
    """

    active: str | None = None
    submitted: str | None = None
    remote: str | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SparkChoice:
    """The Spark that a process uses.

    Attributes:
        target: the master, or the URL of a Spark Connect server.
        reason: who chose it.
        ignored: the setting that has no effect because of that; None = there is none.
    """

    target: str = field(repr=False)
    reason: str
    ignored: str | None = field(default=None, repr=False)

    @property
    def connect(self) -> bool:
        """Whether it is reached over Spark Connect."""
        return self.target.startswith("sc://")

    @property
    def in_process(self) -> bool:
        """Whether the JVM of this process runs the tasks, with this process's Python."""
        return _IN_PROCESS.fullmatch(self.target) is not None

    def __str__(self) -> str:
        """Return a line for people, without secrets."""
        line = f"{redact_url(self.target)} ({self.reason})"
        return line if self.ignored is None else f"{line}; {redact_url(self.ignored)} has no effect"


def choose_spark(settings: SparkSettings, environment: SparkEnvironment) -> SparkChoice:
    """Choose the Spark to use.

    A process is one Spark application: an active session and spark-submit cannot be overruled.
    """
    requested = settings.given
    for target, reason in (
        (environment.active, "the active session"),
        (environment.submitted, "spark-submit"),
    ):
        if target is not None:
            return SparkChoice(target, reason, None if requested in (None, target) else requested)
    if requested is not None:
        return SparkChoice(requested, "the setting")
    for target, reason in (
        (environment.remote, "SPARK_REMOTE"),
        (environment.defaults.get(REMOTE), "spark-defaults.conf"),
        (environment.defaults.get(MASTER), "spark-defaults.conf"),
    ):
        if target:
            return SparkChoice(target, reason)
    return SparkChoice(LOCAL_MASTER, "the default")


def target_of(session: Any) -> str:
    """Return the master of a session, or the URL of its Spark Connect server.

    Raises:
        InputError: the session is one of Spark Connect, and pyspark too old for it.
    """
    if hasattr(session, "_jsparkSession"):
        return str(session.sparkContext.master)
    require_pyspark("Spark Connect", CONNECT)
    return f"sc://{session.client._builder.endpoint}"


def runs_in_process(session: Any) -> bool:
    """Whether the JVM of this process runs the tasks of a session, with this process's Python."""
    return SparkChoice(target_of(session), "").in_process


def parse_properties(text: str) -> dict[str, str]:
    """Return the settings in a `spark-defaults.conf`.

    Source: java.util.Properties, in which Spark reads it; without line continuations and escapes,
    which no Spark setting needs.
    """
    properties = {}
    for line in text.splitlines():
        if line.lstrip().startswith(("#", "!")):
            continue
        if match := _PROPERTY.match(line):
            properties[match[1]] = match[2].strip()
    return properties


def parse_submit_arguments(text: str) -> dict[str, str]:
    """Return the settings in PYSPARK_SUBMIT_ARGS: `--master`, `--remote` and `--conf`."""
    try:
        words = shlex.split(text)
    except ValueError:
        return {}
    properties = {}
    for option, value in itertools.pairwise(words):
        if option == "--master":
            properties[MASTER] = value
        elif option == "--remote":
            properties[REMOTE] = value
        elif option in ("--conf", "-c") and "=" in value:
            name, _, setting = value.partition("=")
            properties[name] = setting
    return properties
