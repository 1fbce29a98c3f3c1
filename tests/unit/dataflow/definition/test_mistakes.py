"""Protects what a user reads after a mistake: one message with its line and its exit code.

`data/mistakes` has a dataflow per mistake, and `table.md` what `sdf check` says of it, or `sdf run`
of those whose bodies fail when they run. To write the table anew:
`PYTHONPATH=. python tests/unit/dataflow/definition/test_mistakes.py`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli

FOLDER = Path(__file__).parent / "data" / "mistakes"
FILES = sorted(FOLDER.glob("*.yaml"))
TABLE = FOLDER / "table.md"
HEAD = "| Dataflow | Exit | Line | Message |\n|---|---|---|---|\n"


def said(file: Path, folder: Path) -> str:
    """The row of the table: the exit code, the line of the file or of the body, the message."""
    runner = CliRunner()
    if not file.stem.startswith("fails-"):
        result = runner.invoke(cli.main, ["sdf", "check", str(file)])
        return _row(file, result, _line_of_check(result.output))
    (folder / "words.txt").write_text("be\nto\nbe\n")
    words = ("--url", str(folder / "state"), "--source", f"words=jsonl:{folder}/words.txt")
    with _logged() as warnings:
        result = runner.invoke(cli.main, ["sdf", "run", str(file), *words])
    return _row(file, result, _line_of_run(warnings, result.output))


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What is logged of user code, in order."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("arroyo_dagster.sdf")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _line_of_check(output: str) -> tuple[str, str]:
    assert "\nNext: " in output or "no errors" in output
    errors = re.search(r"^ *(E\d+) line (\d+): (.*)", output, re.MULTILINE)
    found = errors or re.search(r"(warning [EL]\d+) line (\d+): (.*)", output)
    assert found is not None, output
    return found[2], f"{found[1]} {found[3]}"


def _line_of_run(warnings: list[str], output: str) -> tuple[str, str]:
    text = warnings[0] if warnings else output.splitlines()[-1]
    assert ". Next: " in text
    line = re.search(r"in line (\d+) of the body", text)
    return f"{line[1]} of the body" if line else "", text


def _row(file: Path, result: Result, found: tuple[str, str]) -> str:
    line, message = found
    message = message.replace("|", "\\|")
    return f"| {file.stem} | {result.exit_code} | {line} | {message} |"


def test_there_are_forty_and_each_has_a_row() -> None:
    rows = TABLE.read_text().removeprefix(HEAD).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [one.stem for one in FILES]
    assert len(FILES) >= 40


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_mistake_is_told_as_the_table_says(file: Path, tmp_path: Path) -> None:
    assert said(file, tmp_path) in TABLE.read_text().splitlines()


@pytest.mark.parametrize(
    ("file", "meant"),
    [
        ("name-member-operator", "operator"),
        ("name-member-properties", "properties"),
        ("name-member-run", "run"),
        ("name-member-states", "states"),
        ("name-member-stats", "states"),
        ("name-member-update-state", "update-state"),
    ],
)
def test_a_misspelt_member_is_named_beside_what_it_causes(file: str, meant: str) -> None:
    path = str(FOLDER / f"{file}.yaml")
    result = CliRunner().invoke(cli.main, ["sdf", "check", path])
    lines = result.output.splitlines()
    warned = next(
        at for at, line in enumerate(lines) if f"ignored; did you mean `{meant}`?" in line
    )
    errors = [at for at, line in enumerate(lines) if re.match(r" +E\d+ line", line)]
    assert (result.exit_code, bool(errors)) in [(0, False), (3, True)]
    # The warning of a service precedes or follows an error, without another service in between.
    assert not errors or min(abs(warned - at) for at in errors) <= 2
    strict = CliRunner().invoke(cli.main, ["sdf", "check", "--strict", path])
    assert (strict.exit_code, strict.output) == (3, result.output)


if __name__ == "__main__":
    rows = []
    for one in FILES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(said(one, Path(folder)))
    TABLE.write_text(HEAD + "\n".join(rows) + "\n")
