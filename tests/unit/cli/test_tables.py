"""Tables fit the terminal and lose no character of a name."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from arroyo_dagster import open_store
from arroyo_dagster.cli.tables import format_table
from tests.jobs import run_word_job

COLUMNS = ("operator", "subtasks", "watermark", "table", "kind", "files", "rows", "bytes", "of")
LINES: list[list[object]] = [
    [
        *("Aggregate[sum]_3_tumbling-window-of-ten-seconds", 16, "2024-01-01 00:00:07Z"),
        *("aggregate[bold]/s", "expiring time-key", 1203, 7, "1.7 kB", None),
    ],
    ["sink", 4, None, "s", "global keyed", 2, 2, "1.1 kB", "[red]a two-phase sink[/red]"],
]


@pytest.mark.parametrize("width", [60, 80, 200, None])
def test_every_cell_is_whole_at_any_width(width: int | None) -> None:
    shown = list(format_table(COLUMNS, LINES, width))
    assert all(width is None or cell_len(line) <= width for line in shown)
    for line in LINES:
        for cell in line:
            assert "-" if cell is None else in_order(str(cell), shown)
    for name in COLUMNS:
        assert any(re.search(rf"(?<!\w){name}(?!\w)", line) for line in shown)


def in_order(text: str, lines: Sequence[str]) -> bool:
    """Whether a text is in the lines: on one, or folded over following ones at one column."""
    for at, line in enumerate(lines):
        for size in range(len(text), 0, -1):
            place = line.find(text[:size])
            if place >= 0:
                break
        else:
            continue
        rest, below = text[size:], at + 1
        while rest and below < len(lines):
            part = re.match(r"\S+", lines[below][place:])
            if part is None or not rest.startswith(part[0]):
                break
            rest, below = rest[len(part[0]) :], below + 1
        if not rest:
            return True
    return not text


def test_long_texts_continue_below_and_numbers_stay_whole() -> None:
    shown = list(format_table(("job", "rows"), [["a" * 30, 1_234_567]], 30))
    assert shown == [
        "job                       rows",
        "─" * 30,
        "aaaaaaaaaaaaaaaaaaaaa  1234567",
        "a" * 9,
    ]


def test_a_cell_cannot_move_the_cursor() -> None:
    assert list(format_table(("job",), [["a\x1b[2Jb\nc"]], None))[1] == "a\\x1b[2Jb\\nc"


cells = st.one_of(st.none(), st.integers(0, 10**9), st.text(max_size=40))


@given(st.lists(st.tuples(cells, cells, cells), max_size=4), st.integers(30, 120))
def test_no_line_is_wider_than_the_terminal(lines: list[tuple[Any, ...]], width: int) -> None:
    shown = list(format_table(("first", "second", "third"), lines, width))
    assert all(cell_len(line) <= width for line in shown)


# ---- on a terminal -------------------------------------------------------------------------------


def on_terminal(columns: int, *command: str) -> str:
    """What a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "arroyo_dagster.cli", *command],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
    )
    os.close(theirs)
    text = b""
    try:
        while data := os.read(ours, 65_536):
            text += data
    except OSError:  # Linux: the other side was closed
        pass
    os.close(ours)
    assert process.wait(60) == 0, text
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_commands_fit_the_terminal(columns: int, tmp_path: Path) -> None:
    run_word_job(open_store(str(tmp_path)), rows=8, sinks=0)
    for command in (["jobs"], ["show", "main"]):
        shown = on_terminal(columns, *command, "--url", str(tmp_path))
        # Sentences before the table are wrapped by the terminal.
        table = shown.splitlines()[2 if command[0] == "show" else 0 :]
        assert max(map(cell_len, table)) <= columns
        assert "2024-01-01 00:00:07Z" in shown  # a time is as whole as a name
        assert "main" in shown
