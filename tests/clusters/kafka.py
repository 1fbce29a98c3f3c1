"""A broker of Kafka on loopback, from Kafka's own jars."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.find_spark_home import _find_spark_home

from tests.clusters.standalone import free_port, wait_for
from tests.documentation import PROJECT

BROKER = "org.apache.kafka:kafka_2.13:3.9.2,org.slf4j:slf4j-simple:1.7.36"
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
"""The newest connector that the registry had for Spark 4.3, which it fits."""

_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
num.partitions=2
group.initial.rebalance.delay.ms=0
"""


def resolved(packages: str) -> Path:
    """Return a folder with the jars of packages, which Spark resolves as for `--packages`.

    A test is skipped where they cannot be resolved.
    """
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "arroyo_dagster-tests"
    )
    folder = folder / re.sub(r"[:,]", "-", packages)
    jars, ready = folder / "jars", folder / "ready"
    if ready.exists():
        return jars
    done = subprocess.run(
        [
            f"{_find_spark_home()}/bin/spark-submit",
            *("--master", "local[1]", "--packages", packages),
            *("--conf", f"spark.jars.ivy={folder}", "--class", "org.example.None", "none.jar"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if not jars.exists() or "unresolved dependency" in done.stderr:
        shutil.rmtree(folder, ignore_errors=True)
        last = [line for line in done.stderr.splitlines() if "unresolved" in line]
        pytest.skip(f"{packages} cannot be resolved: {(last or done.stderr.splitlines())[-1]}")
    ready.touch()
    return jars


@contextlib.contextmanager
def kafka_broker(folder: Path) -> Iterator[str]:
    """Run a broker in KRaft mode, and yield its bootstrap server."""
    (scala,) = Path(_find_spark_home(), "jars").glob("scala-library-*.jar")  # never resolved
    classes = f"{resolved(BROKER)}/*:{scala}"
    port, controller = free_port(), free_port()
    settings = folder / "server.properties"
    settings.write_text(_SETTINGS.format(port=port, controller=controller, folder=folder))
    java = ["java", "-Xmx512m", "-cp", classes]
    format_disk = ["kafka.tools.StorageTool", "format", "-t", "YXJyb3lvLWRhZ3N0ZXItdGVzdA"]
    subprocess.run(
        [*java, *format_disk, "-c", str(settings)], check=True, capture_output=True, cwd=folder
    )
    log = folder / "kafka.log"
    with log.open("wb") as out:
        broker = subprocess.Popen(
            [*java, "kafka.Kafka", str(settings)], stdout=out, stderr=out, cwd=folder
        )
    try:
        wait_for(log, "Kafka Server started")
        yield f"127.0.0.1:{port}"
    finally:
        broker.terminate()
        try:
            broker.wait(30)
        except subprocess.TimeoutExpired:
            broker.kill()


def answer_of(application: str, folder: Path, servers: str, *arguments: str) -> Any:
    """Run a Spark application in a process of its own; return the JSON object of its last line.

    Args:
        application: the program. Its arguments are the broker, `folder`, the folder of Ivy, the
            connector, and `arguments`.
    """
    file = folder / "application.py"
    file.write_text(application)
    ivy = str(resolved(CONNECTOR).parent)
    done = subprocess.run(
        [sys.executable, str(file), servers, str(folder), ivy, CONNECTOR, *arguments],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(one for one in done.stdout.splitlines() if one.startswith('{"')))
