"""Progress on stderr: a line that changes on a terminal, lines elsewhere, nothing with --json."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from arroyo_dagster.cli import rendering
from arroyo_dagster.cli.rendering import show_progress
from arroyo_dagster.state.model.progress import Progress, ProgressUnit


def report(done: int, seconds: float) -> Progress:
    return Progress(
        step="verified files", done=done, total=4, unit=ProgressUnit.FILES, seconds=seconds
    )


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: float) -> str:
    """What is printed of two reports, the second after so many seconds."""
    now = [0.0]
    monkeypatch.setattr(rendering, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with show_progress(as_json=False) as on_progress:
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


def test_with_json_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(as_json=True) as on_progress:
        on_progress(report(4, 60.0))
    assert capsys.readouterr().err == ""
