"""A machine that cannot run the project gets one line: what is missing, and the next step.
`make audit` passes only if every locked dependency was looked up and none is known to be bad."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with what a recipe needs, and no Java."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("sh", "head", "touch", "make"):
        (folder / name).symlink_to(str(shutil.which(name)))
    (folder / "python3").symlink_to(sys.executable)
    return folder


@pytest.fixture
def refused(tools: Path, tmp_path: Path) -> Callable[..., str]:
    def call(*given: str, **settings: str) -> str:
        """The one line of `make demo`, beside that of make itself."""
        # Make tells a make within it of itself, and the inner one then prints its folder.
        ours = ("JAVA_HOME", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        env = {name: value for name, value in os.environ.items() if name not in ours}
        done = subprocess.run(
            ["make", "demo", f"VENV={tmp_path / 'venv'}", *given],
            cwd=PROJECT,
            env={**env, "PATH": str(tools), **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0, done.stdout
        assert not (tmp_path / "venv" / "runs").exists()
        lines = (done.stdout + done.stderr).splitlines()
        (line,) = [one for one in lines if not one.startswith(("make: ", "Setting up ", "  "))]
        assert "Next: " in line
        return line

    return call


def test_no_python(refused: Callable[..., str]) -> None:
    line = refused("PYTHON=python3.99")
    assert line.startswith("Python 3.11 or newer is needed; python3.99 is missing. Next: ")


def test_an_old_python(refused: Callable[..., str], tools: Path) -> None:
    script(tools / "python3.8", 'test "$1" = -V && echo "Python 3.8.10" && exit; exit 1')
    line = refused("PYTHON=python3.8")
    assert line.startswith("Python 3.11 or newer is needed; python3.8 is Python 3.8.10. Next: ")


def test_no_java(refused: Callable[..., str]) -> None:
    assert refused().startswith("Java 17 or newer is missing: no java on the PATH. Next: ")
    line = refused(JAVA_HOME="/nowhere")
    assert line.startswith("Java 17 or newer is missing: JAVA_HOME=/nowhere has no bin/java.")


def test_an_old_java(refused: Callable[..., str], tools: Path) -> None:
    java = script(tools / "java", "echo 'openjdk version \"1.8.0_292\"' >&2")
    assert refused().startswith(f"Java 17 or newer is needed; {java} is Java 8. Next: ")


def test_no_package_index(refused: Callable[..., str], tools: Path) -> None:
    script(tools / "java", "echo 'openjdk version \"17.0.2\"' >&2")
    index = "http://127.0.0.1:9/simple"
    line = refused(PIP_INDEX_URL=index, UV_DEFAULT_INDEX=index, PIP_NO_CACHE_DIR="1")
    assert line.startswith("No package index answers: cannot download the installer, uv. Next: ")


# ---- in process ----------------------------------------------------------------------------------


@pytest.fixture
def set_up() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up", PROJECT / "requirements/set_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_full_disk(set_up: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(set_up.Refusal, match=r"too full: 1000000000\.0 GB are needed, .+ Next"):
        set_up.check_disk(tmp_path / "venv", 10**18)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "uv").touch()
    set_up.check_disk(tmp_path / "venv", 10**18)  # it is there already


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("error: failed to write: No space left on device (os error 28)", "no space is left"),
        ("error: Failed to fetch: `x`\n  Caused by: dns error", "No package index answers"),
        ("ERROR: No matching distribution (from versions: none)", "No package index answers"),
        ("The virtual environment was not created: ensurepip is not available", "python3-venv"),
        ("error: one\nerror: two\n", "Cannot install it: error: two. Next: see all output in"),
        ("", "Cannot install it: no output"),
    ],
)
def test_what_a_step_prints_becomes_one_line(
    set_up: ModuleType, tmp_path: Path, output: str, line: str
) -> None:
    found = str(set_up.explained(tmp_path / "venv", "it", output))
    assert line in found
    assert "Next: " in found
    assert len(found.splitlines()) == 1


def test_a_write_to_a_full_disk_is_one_line(set_up: ModuleType) -> None:
    code = "open('/dev/full', 'wb', buffering=0).write(b'x')"
    with pytest.raises(set_up.Refusal, match="is too full: no space is left while installing it"):
        set_up.run("/nowhere", "it", [sys.executable, "-c", code])


def test_the_demo_needs_no_test_tools() -> None:
    text = (PROJECT / "Makefile").read_text()
    assert "\ndemo: $(VENV)/runs " in text
    assert "\nui: $(VENV)/runs " in text
    assert "$(VENV)/runs: requirements/runtime.txt pyproject.toml\n\t$(call set_up,runtime)" in text


@pytest.mark.parametrize("version", [None, "1.8.0_292"])
def test_the_demo_without_a_fitting_java_is_one_line(tmp_path: Path, version: str | None) -> None:
    if version:
        script(tmp_path / "bin" / "java", f"echo 'openjdk version \"{version}\"' >&2")
    done = subprocess.run(
        [sys.executable, "examples/flights/demo.py"],
        cwd=PROJECT,
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("The demo failed: ")
    assert "17 or newer" in line


TABLE = "Name Version ID Fix Versions\nurllib3 1.0 PYSEC-1 2.0"


def audit(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run it with a pip-audit that does what `script` says."""
    tool = folder / "venv-audit" / "bin" / "pip-audit"
    tool.parent.mkdir(parents=True)
    tool.write_text(f'#!/bin/sh\necho "$@" > {folder}/words\n{script}\n')
    tool.chmod(0o755)
    return subprocess.run(
        ["make", "--silent", "audit", f"VENV={folder / 'venv'}"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_whole_lock_is_audited_strictly(tmp_path: Path) -> None:
    done = audit(tmp_path, "echo 'No known vulnerabilities found' >&2")
    assert done.returncode == 0
    assert done.stdout.startswith("No known vulnerabilities in requirements/runtime.txt")
    words = (tmp_path / "words").read_text().split()
    assert {"--strict", "--require-hashes", "requirements/runtime.txt"} <= set(words)
    assert not any("://" in word or "index" in word for word in words)


def test_findings_are_printed_and_fail(tmp_path: Path) -> None:
    done = audit(tmp_path, f"echo '{TABLE}'; echo 'Found 1 known vulnerability' >&2; exit 1")
    assert done.returncode != 0
    assert done.stdout.strip() == TABLE


def test_a_service_that_does_not_answer_is_one_line_and_fails(tmp_path: Path) -> None:
    done = audit(tmp_path, "echo 'Traceback (most recent call last):' >&2; exit 1")
    assert done.returncode != 0
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith("Nothing was audited")
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in (tmp_path / "venv-audit" / "log").read_text()
