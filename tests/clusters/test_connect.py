"""Spark Connect: a server that pyspark's own files start, and a client without a Java."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home

from arroyo_dagster.spark.versions import CONNECT, pyspark_version
from tests.clusters.standalone import free_port, python_without_the_package, wait_for
from tests.clusters.test_standalone import PROJECT, drive

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(pyspark_version() < CONNECT, reason="refused: see tests/unit/spark"),
]


@contextlib.contextmanager
def connect_server(
    folder: Path,
    python: str,
    *,
    master: str = "local[2]",
    variables: Mapping[str, str] | None = None,
    **conf: str,
) -> Iterator[str]:
    """Run a server whose workers use an interpreter; with two slots, unless a master is given.

    Args:
        variables: environment variables of the server and of its workers.
    """
    port, home = free_port(), _find_spark_home()
    settings = {
        **conf,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    line = [f"{home}/bin/spark-submit", "--master", master, *options, "--class", server]
    environment = {**os.environ, "PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    environment |= dict(variables or {})
    log = folder / f"connect-{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*line, "spark-internal"], env=environment, stdout=file, stderr=file, cwd=folder
        )
    try:
        wait_for(log, "Spark Connect server started at")
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def command(folder: Path, url: str, *words: str) -> str:
    """Run a command that must not find a Java of its own."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "JAVA_HOME": str(folder / "nowhere")}
    done = subprocess.run(
        [sys.executable, "-m", "arroyo_dagster.cli", *words, "--url", url],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_pipeline_and_maintenance_run_on_a_server_of_spark_connect(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state"
    with connect_server(tmp_path, sys.executable) as remote:
        found = drive(tmp_path, remote, url)
        assert found["choice"] == f"{remote} (the setting)"
        assert found["first"] == [2, True]
        spark = ("--spark", f"remote={remote}", "from-files=0")
        said = command(tmp_path, url, "verify", "main", *spark, "--json")
        assert f"Spark: {remote} (the setting)" in said
        engines = json.loads(said[said.index("{") :].partition("\nSpark:")[0])["engines"]
        assert {one["engine"] for one in engines if one["step"] == "verify files"} == {"Spark"}
        said = command(tmp_path, url, "compact", "run", "main", "--yes", "--policy", "full", *spark)
        assert "Spark" in said
        assert "can be restored" in command(tmp_path, url, "verify", "main")


def test_a_server_whose_workers_lack_the_package_is_served_by_shipping(tmp_path: Path) -> None:
    python = python_without_the_package(tmp_path / "env")
    with connect_server(tmp_path, str(python)) as remote:
        found = drive(tmp_path, remote, f"file://{tmp_path}/state", ship=True)
    kind, message, retryable = found["first"]
    assert (kind, retryable) == ("InputError", False)
    assert "it has no arroyo_dagster (the driver has " in message
    assert found["written"] == []
    assert found["shipped"] == [2, True]
