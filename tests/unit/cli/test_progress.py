"""Progress on stderr: a line that changes on a terminal, lines elsewhere, nothing with --json."""

from __future__ import annotations

import itertools
import re
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from arroyo_dagster import MemoryStore, Progress, configure
from arroyo_dagster.cli import main, rendering
from arroyo_dagster.cli.rendering import show_progress
from arroyo_dagster.state.model.progress import ProgressUnit
from tests.jobs import copy_into, run_word_job


def report(done: int, seconds: float) -> Progress:
    return Progress(
        step="verified files", done=done, total=4, unit=ProgressUnit.FILES, seconds=seconds
    )


def shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: float,
    name: str | None = None,
) -> str:
    """What is printed of two reports, the second after so many seconds."""
    now = [0.0]
    monkeypatch.setattr(rendering, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with show_progress(as_json=False, name=name) as on_progress:
        on_progress(report(1, 0.1))
        now[0] = at
        on_progress(report(2, at))
    return capsys.readouterr().err


def test_elsewhere_a_line_is_printed_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, capsys, 4.0) == ""
    assert shown(monkeypatch, capsys, 6.0) == "verified files: 50%, 2 of 4, 6 s left\n"


def test_on_a_terminal_one_line_changes_and_is_removed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert shown(monkeypatch, capsys, 0.9) == ""
    line = "\r\x1b[Kverified files: 50%, 2 of 4, 2 s left"
    assert shown(monkeypatch, capsys, 2.0) == f"{line}\r\x1b[K"


# ---- which commands report it --------------------------------------------------------------------

REPORTING = {
    ("jobs",): "read jobs",
    ("epochs", "main"): "read epochs",
    ("verify", "main"): "verified files",
    ("health",): "read footers",
    ("health", "--level", "4"): "words/main: verified files",
    ("rows", "main", "count", "counts"): "opened files",
    ("rows", "main", "keep", "rows"): "opened files",
    ("compact", "plan"): "planned jobs",
    ("compact", "plan", "main"): "read file sizes",
    ("compact", "run", "main"): "words/main: read file sizes",
    ("compact", "run", "main", "--policy", "full", "--yes"): "words/main: merge",
    ("gc", "plan", "orphans", "main"): "read epochs",
    ("gc", "run", "expire", "main", "--keep", "2", "--yes", "--quarantine"): "data",
}


@pytest.fixture(scope="module")
def job() -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, rows=24, rows_per_epoch=2, sinks=0, keep_epochs=None)
    return store


@pytest.mark.parametrize("words", REPORTING, ids=" ".join)
def test_each_command_that_may_take_long_reports_how_far_it_is_and_the_time_left(
    words: tuple[str, ...], job: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_into(MemoryStore("cli-progress"), job)
    seconds = itertools.count(0.0, 10.0)  # each look at the clock is ten seconds later
    monkeypatch.setattr(rendering, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    try:
        shown = CliRunner().invoke(main, [*words, "--url", store.url]).stderr
        quiet = CliRunner().invoke(main, [*words, "--url", store.url, "--json"])
    finally:
        configure(None)
    lines = [line for line in shown.splitlines() if f"{REPORTING[words]}: " in line]
    assert lines, shown
    assert all(re.search(r"\d s left$|, time left unknown$", line) for line in lines)
    assert REPORTING[words] not in quiet.stderr
