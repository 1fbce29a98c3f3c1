"""A local session starts with an archive of classes that fits it, or without. What older
versions of pyspark lack is done in other ways, with the same result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import functions as f

from arroyo_dagster.spark import fast_start, session
from arroyo_dagster.spark.versions import in_partitions

COMPLETE = b"\xa8\xab\x0b\xf0"


@pytest.fixture
def jdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A JDK, and a Spark of one jar."""
    (tmp_path / "jdk" / "bin").mkdir(parents=True)
    (tmp_path / "jdk" / "bin" / "java").touch()
    (tmp_path / "jdk" / "release").write_text('JAVA_VERSION="17.0.15"')
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    (tmp_path / "spark" / "jars" / "core.jar").write_text("1")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    return str(tmp_path / "jdk")


def test_first_session_leaves_a_mark_second_writes_third_reads(tmp_path: Path, jdk: str) -> None:
    cache = tmp_path / "cache"
    assert "jsa" not in fast_start.java_options(cache, jdk)
    archive = fast_start.archive_path(cache, jdk)
    assert archive.read_bytes() == b""
    assert f"-XX:ArchiveClassesAtExit={archive}" in fast_start.java_options(cache, jdk)
    archive.write_bytes(bytes(100))  # the JVM is writing it, or was killed
    assert f"-XX:ArchiveClassesAtExit={archive}" in fast_start.java_options(cache, jdk)
    archive.write_bytes(COMPLETE + bytes(100))
    assert f"-XX:SharedArchiveFile={archive}" in fast_start.java_options(cache, jdk)


@pytest.mark.parametrize("changed", ["spark/jars/core.jar", "spark/jars/new.jar", "jdk/release"])
def test_another_jdk_or_spark_has_another_archive(tmp_path: Path, jdk: str, changed: str) -> None:
    before = fast_start.archive_path(tmp_path, jdk)
    (tmp_path / changed).write_text("another version")
    assert fast_start.archive_path(tmp_path, jdk) != before


def test_archive_of_another_user_is_not_used(
    tmp_path: Path, jdk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = fast_start.archive_path(tmp_path, jdk)
    archive.write_bytes(COMPLETE)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert "jsa" not in fast_start.java_options(tmp_path, jdk)


SESSION = """
import sys
from arroyo_dagster.spark.session import get_session
conf = dict(pair.split("=", 1) for pair in sys.argv[2:])
session, _ = get_session(sys.argv[1], conf)
jvm = session.sparkContext._jvm
arguments = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
print("ARGUMENTS", *arguments)
print("DAEMON", session.conf.get("spark.python.daemon.module", "pyspark.daemon"))
session.stop()
"""


def _session(master: str, *conf: str, **process: Any) -> str:
    command = [sys.executable, "-c", SESSION, master, *conf]
    found = subprocess.run(command, capture_output=True, text=True, check=True, **process)
    return found.stdout


def test_truncated_archive_does_not_keep_spark_from_starting(tmp_path: Path) -> None:
    real = session.local_archive()
    if not fast_start.is_complete(real):
        pytest.skip("no archive here: `python -m tests.quick_spark` writes it")
    damaged = tmp_path / "a cache" / "arroyo_dagster" / real.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(real.read_bytes()[:50_000_000])
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "a cache")}
    assert "SharedArchiveFile" not in _session("local[1]", env=environment, cwd=tmp_path)
    assert damaged.stat().st_size == 0


@pytest.mark.parametrize("partitions", [1, 7, 24])
def test_rows_are_in_the_partition_that_a_column_names(session: Any, partitions: int) -> None:
    rows = session.range(2 * partitions).select((f.col("id") % partitions).cast("int").alias("n"))
    old = SimpleNamespace(repartition=rows.repartition)  # before 4.1
    for frame in (rows, old):
        placed: Any = in_partitions(frame, partitions, "n")
        found = placed.select("n", f.spark_partition_id().alias("partition")).collect()
        assert len(found) == 2 * partitions
        assert all(row.n == row.partition for row in found)
