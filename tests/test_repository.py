"""What contributors meet first: lock files, licence, decisions, and the commands pages name."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
LOCKS = {name: PROJECT / "requirements" / f"{name}.txt" for name in ("runtime", "dev", "docs")}
PIN = re.compile(r"(?P<name>[a-z0-9-]+)(\[[a-z0-9,-]+\])?==(?P<version>[^ ]+)( ; .+)? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""The digest of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def pyproject() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())


def pins(name: str) -> set[tuple[str, str]]:
    found = [PIN.fullmatch(line) for line in LOCKS[name].read_text().splitlines()]
    return {(match["name"], match["version"]) for match in found if match}


def wanted(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^\w.-]", one)[0] for one in requirements}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_holds_pins_and_hashes_only(name: str) -> None:
    lines = [line for line in LOCKS[name].read_text().splitlines() if not line.startswith("#")]
    other = [line for line in lines if not (PIN.fullmatch(line) or HASH.fullmatch(line))]
    assert not other, "run `make lock`"
    assert "://" not in LOCKS[name].read_text()


def test_every_dependency_is_locked() -> None:
    project = pyproject()
    runtime = wanted(project["project"]["dependencies"])
    assert runtime <= {name for name, _ in pins("runtime")}, "run `make lock`"
    for group in ("dev", "docs"):
        names = wanted(project["dependency-groups"][group])
        assert names <= {name for name, _ in pins(group)}, "run `make lock`"


def test_runtime_and_dev_agree() -> None:
    assert pins("runtime") <= pins("dev"), "run `make lock`"


def test_the_license_is_the_text_of_apache_2() -> None:
    assert hashlib.sha256((PROJECT / "LICENSE").read_bytes()).hexdigest() == APACHE


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "requirements/README.md"])
def test_every_make_command_on_the_page_exists(page: str) -> None:
    text = (PROJECT / page).read_text()
    commands = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert commands <= targets


# ---- decisions -----------------------------------------------------------------------------------

DECISIONS = sorted(
    path for path in (PROJECT / "docs" / "decisions").glob("*.md") if path.name != "README.md"
)
DATE = r"20\d\d-\d\d-\d\d"
STATUS = re.compile(
    rf"Status: (accepted|superseded by \[[\w-]+\]\([\w-]+\.md\)) · Date: ({DATE})"
    rf"( · Revised: {DATE})?"
)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_begins_with_its_status_and_date(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert STATUS.fullmatch(lines[2]), lines[2]


def test_the_index_of_decisions_lists_each_page_with_its_status_and_date() -> None:
    index = (PROJECT / "docs" / "decisions" / "README.md").read_text()
    rows = re.findall(rf"^\| \[([\w-]+)\]\(\1\.md\) \| .+ \| (\w+) \| ({DATE}) \|$", index, re.M)
    told = {}
    for page in DECISIONS:
        match = STATUS.fullmatch(page.read_text().splitlines()[2])
        assert match is not None
        told[page.stem] = (match[1].split()[0], match[2])
    assert {name: (status, date) for name, status, date in rows} == told
    assert len(rows) == len(told)


# ---- commits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "accepted"),
    [
        ("Check the fence before claiming an epoch", True),
        ("x" * 72, True),
        ("é" * 72, True),
        ("x" * 73, False),
        ("", False),
        ("check the fence", True),
        ("Check the fence.", False),
    ],
)
def test_the_hook_refuses_long_subjects(subject: str, accepted: bool, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\n{'a long line of the body ' * 9}\n")
    done = subprocess.run(
        [sys.executable, str(PROJECT / ".ci" / "commit_subject.py"), str(message)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is accepted, done.stdout + done.stderr
    assert accepted or "72" in done.stderr
