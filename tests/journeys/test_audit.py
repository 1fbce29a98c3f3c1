"""`make audit` passes only if every locked dependency was looked up and none is known to be bad."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TABLE = "Name Version ID Fix Versions\nurllib3 1.0 PYSEC-1 2.0"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


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


def test_what_is_found_is_shown_and_fails(tmp_path: Path) -> None:
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
