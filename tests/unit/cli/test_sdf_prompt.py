"""`arroyo-state sdf run --prompt`: commands that read states while the dataflow runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli, open_store
from arroyo_dagster.cli.sdf import run as sdf_run
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.views.view import Views

WORDS = Path(__file__).parents[3] / "examples" / "sdf" / "words" / "dataflow.yaml"
Line = str | Callable[[], None]
SECONDS = 120


class Typed:
    """A standard input: lines, and functions that are called before the next line is read."""

    def __init__(self, *lines: Line) -> None:
        self._lines = iter(lines)

    def read(self, size: int, /) -> bytes:
        for line in self._lines:
            if isinstance(line, str):
                return f"{line}\n".encode()
            line()
        return b""


def counted(url: Path, word: str, count: int) -> Callable[[], None]:
    """Return a function that waits until a published epoch has counted a word that often."""

    def wait() -> None:
        until = time.monotonic() + SECONDS
        dataflow, _ = load_dataflow(WORDS)
        while Views(open_store(str(url)), dataflow).view("count-words.hits").get(word) != count:
            assert time.monotonic() < until
            time.sleep(0.05)

    return wait


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the words example with a prompt, from files in `tmp_path` to a state in it."""
    (tmp_path / "sentences").write_text("rain on the river\n")
    (tmp_path / "asked").write_text("")

    def run(*lines: Line, follow: bool = True, flags: tuple[str, ...] = ()) -> Result:
        monkeypatch.setattr(sdf_run, "open_stdin", lambda: Typed(*lines))
        more = "?follow=true" if follow else ""
        sources = [
            *("--source", f"sentences=jsonl:{tmp_path / 'sentences'}{more}"),
            *("--source", f"asked=jsonl:{tmp_path / 'asked'}"),
        ]
        words = ["sdf", "run", str(WORDS), *sources, "--url", str(tmp_path / "state")]
        words += ["--prompt", "--interval", "0.02", *flags]
        return CliRunner().invoke(cli.main, words, catch_exceptions=False)

    return run


def test_answers_follow_the_run_and_the_end_of_the_input_stops_it(
    tmp_path: Path, started: Callable[..., Result]
) -> None:
    def more() -> None:
        with (tmp_path / "sentences").open("a") as out:
            out.write("rain\n")

    url = tmp_path / "state"
    result = started(
        counted(url, "rain", 1),
        "show state --filter hits/state$",
        "show state count-words/hits --key rain",
        more,
        counted(url, "rain", 2),
        "",
        "show state count-words/hits/state --filter ^ra",
        "select _key, count from word_stats where _key = 'rain'",
        "sql",
        "select max(count) as most from word_stats",
        ".exit",
        "help",
    )
    assert (result.exit_code, "the next run continues from there" in result.stderr) == (0, True)
    first, rest = result.stdout.split(" Key   Window  Value\n", 1)
    assert first == (" Namespace               Keys  Type\n count-words/hits/state  4     u32\n")
    assert rest.startswith(" rain  *       1\n Key   Window  Value\n rain  *       2\n")
    assert "SQL over states" in rest
    assert "most" in rest
    assert "stop the run with a last checkpoint" in rest
    again = started(counted(url, "rain", 2), "exit", "show state")  # nothing is read after exit
    assert (again.exit_code, again.stdout) == (0, "")


def test_wrong_commands_end_no_run(tmp_path: Path, started: Callable[..., Result]) -> None:
    result = started(
        "show stat",
        "show state 'a",
        "show state --kee b",
        "show state nowhere/to/be",
        "show state --filter (",
        "show state --key a",
        "select nothing from nowhere",
        "show state a b",
        counted(tmp_path / "state", "rain", 1),
    )
    assert (result.exit_code, result.stdout) == (0, "")
    for said in (
        "there is no command `show stat`",
        "No closing quotation",
        "No such option",
        "there is no namespace `nowhere/to/be`",
        "not a regular expression",
        "--key needs a NAMESPACE",
        "nowhere",
        "unexpected extra argument",
    ):
        assert said in result.stderr


def test_private_columns_are_masked(tmp_path: Path, started: Callable[..., Result]) -> None:
    private = ("--private", "longest-sentence")
    shown = "show state count-words/word-stats --key rain"
    result = started(counted(tmp_path / "state", "rain", 1), shown, flags=private)
    key, window, count, longest = result.stdout.splitlines()[1].split()
    assert (key, window, count) == ("rain", "*", "1")
    assert not longest.isdigit()


@pytest.mark.parametrize(
    "flags", [("--spark",), ("--source", "asked=stdin")], ids=["spark", "stdin"]
)
def test_prompt_is_refused_beside_other_stdin(flags: tuple[str, ...], tmp_path: Path) -> None:
    words = ["sdf", "run", str(WORDS), "--url", str(tmp_path), "--prompt", *flags]
    result = CliRunner().invoke(cli.main, words)
    assert (result.exit_code, "--prompt: not with --spark" in result.stderr) == (2, True)
