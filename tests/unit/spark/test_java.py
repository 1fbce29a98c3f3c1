"""A missing or old Java is refused with one line, before Spark's scripts print several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def fake_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return java


CODE = """
from arroyo_dagster.errors import StorageError
from arroyo_dagster.spark.session import get_session
try:
    get_session()
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("version", [None, "1.8.0_292"])
def test_a_session_is_refused_with_one_line(
    tmp_path: Path, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        fake_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("Spark did not start (")
    assert "17 or newer" in line
    assert line.endswith("apt-get install openjdk-17-jre-headless), or set JAVA_HOME")
    assert done.stderr == ""
