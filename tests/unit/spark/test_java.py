"""A missing or old Java is refused with one line, before Spark's scripts print several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arroyo_dagster.spark import prepare
from arroyo_dagster.spark.java import find_java


def fake_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return java


def test_the_version_comes_from_the_release_file(tmp_path: Path) -> None:
    java = fake_java(tmp_path, "1.8.0_292")
    (tmp_path / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="21.0.2"\n')
    assert find_java(str(tmp_path)) == (str(java), 21, None)


@pytest.mark.parametrize(
    ("version", "number", "fits"),
    [("1.8.0_292", 8, False), ("11.0.2", 11, False), ("17.0.9", 17, True), ("?", None, True)],
)
def test_without_a_release_file_java_is_asked(
    tmp_path: Path, version: str, number: int | None, fits: bool
) -> None:
    java = fake_java(tmp_path, version)
    found = find_java(str(tmp_path))
    assert (found.number, found.problem is None) == (number, fits)
    if not fits:
        assert found.problem == f"{java} is Java {number}; Spark needs 17 or newer"


def test_no_java_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_java(None).problem == "Java 17 or newer is missing: no java on the PATH"


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


def test_preparing_a_machine_without_java_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="Java 17 or newer is missing") as ended:
        prepare.main()
    assert len(str(ended.value).splitlines()) == 1
