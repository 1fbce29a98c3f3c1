"""What contributors meet first: lock files, licence, decisions, and the commands pages name."""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from arroyo_dagster import cli
from tests.commands import leaves

PROJECT = Path(__file__).parents[1]
NAMES = ("base", "runtime", "core", "dev", "docs")
LOCKS = {name: PROJECT / "requirements" / f"{name}.txt" for name in NAMES}
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
    base = wanted(project["project"]["dependencies"])
    assert base <= {name for name, _ in pins("base")}, "run `make lock`"
    extras = project["project"]["optional-dependencies"]
    also = wanted([*extras["spark"], *extras["ui"]])
    assert also <= {name for name, _ in pins("runtime")}, "run `make lock`"
    assert not also & {name for name, _ in pins("base")}, "a run worker needs neither"
    for group in ("core", "dev", "docs"):
        names = wanted(project["dependency-groups"][group])
        assert names <= {name for name, _ in pins(group)}, "run `make lock`"


def test_the_lock_files_agree() -> None:
    assert pins("core") < pins("base") < pins("runtime") <= pins("dev"), "run `make lock`"


def test_the_core_is_all_but_spark_and_dagster() -> None:
    project = pyproject()
    core, all_of_them = (
        set(project["dependency-groups"]["core"]),
        set(project["project"]["dependencies"]),
    )
    assert core <= all_of_them
    assert wanted(list(all_of_them - core)) == {"dagster", "pyspark"}
    assert not wanted(list(all_of_them - core)) & {name for name, _ in pins("core")}


def test_the_description_shows_on_a_package_index() -> None:
    # An index renders neither pictures in data URIs nor relative links, and no address is ours.
    text = (PROJECT / "DESCRIPTION.md").read_text()
    assert pyproject()["project"]["readme"] == "DESCRIPTION.md"
    tokens = list(_tokens(MarkdownIt("commonmark").enable("table").parse(text)))
    assert not [one for one in tokens if one.type in ("image", "html_block", "html_inline")]
    links = [one.attrs["href"] for one in tokens if one.type == "link_open"]
    assert all(str(one).startswith("https://") for one in links)
    readme = (PROJECT / "README.md").read_text()
    assert readme.startswith(text.partition("## Install")[0].rstrip())


def _tokens(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _tokens(token.children or ())


def test_the_license_is_the_text_of_apache_2() -> None:
    assert hashlib.sha256((PROJECT / "LICENSE").read_bytes()).hexdigest() == APACHE


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "requirements/README.md"])
def test_every_make_command_on_the_page_exists(page: str) -> None:
    text = (PROJECT / page).read_text()
    commands = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert commands <= targets


def test_every_command_that_a_message_or_a_page_names_exists() -> None:
    known = {words[:length] for words in leaves(cli.main) for length in range(1, len(words) + 1)}
    pages = [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")]
    pages += (PROJECT / "docs" / "operate").glob("*.md")
    modules = list((PROJECT / "arroyo_dagster").rglob("*.py"))
    named = {words for path in (*pages, *modules) for words in _commands_in(path.read_text())}
    assert len(named) > 50
    wrong = [
        words
        for words in sorted(named)
        if words[:1] not in known or (words[:1] in groups(known) and words[:2] not in known)
    ]
    assert not wrong


def groups(commands: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {words[:1] for words in commands if len(words) > 1}


def _commands_in(text: str) -> Iterator[tuple[str, ...]]:
    """The first words of each command that a page or, over its lines, a text in code names."""
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    for match in re.finditer(r"arroyo-state((?: [a-z][a-z-]*){1,2})(?![\w/.-])", text):
        yield tuple(match[1].split())


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


def test_signals_are_not_ignored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    assert signal.SIG_IGN not in map(signal.getsignal, numbers)
    code = "import signal; print(signal.SIG_IGN in map(signal.getsignal, (2, 15)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "False\n"


def test_the_suite_can_be_started_with_ignored_signals() -> None:
    """As `nohup make test &` does: what tests start could not be ended."""
    one = f"{__file__}::{test_signals_are_not_ignored.__name__}"
    pytest_one = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    ignoring = ["bash", "-c", 'trap "" INT TERM; exec "$@"', "bash", *pytest_one]
    done = subprocess.run(ignoring, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---- tests that do not end -----------------------------------------------------------------------


def run_as_make_does(text: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests with the options of pyproject.toml, conftest.py and the Makefile."""
    file = folder / "test_small.py"
    file.write_text(text)
    match = re.search(r"^PARALLEL := (.+)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest"]
    return subprocess.run(
        [*command, *match[1].replace("=3", "=1").split(), *options, str(file)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_a_test_that_takes_too_long_fails_alone_and_names_itself(tmp_path: Path) -> None:
    assert re.search(r"^timeout = \d+$", (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    text = "import threading\ndef test_a(): threading.Event().wait()\ndef test_b(): pass\n"
    done = run_as_make_does(text, tmp_path, "--timeout=1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"FAILED .*::test_a - Failed: Timeout", done.stdout), done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_a_worker_that_dies_ends_the_run_with_an_error(tmp_path: Path) -> None:
    text = "import os\ndef test_a(): os.kill(os.getpid(), 11)\ndef test_b(): pass\n"
    done = run_as_make_does(text, tmp_path)
    assert done.returncode not in (0, 5), done.stdout
    for told in ("crashed", "of gw0 was ended by a signal", "Segmentation fault", "in test_a"):
        assert told in done.stdout
