"""One line per row on a terminal; no word or name is broken, and a program gets every column."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from arroyo_dagster import open_store
from arroyo_dagster.cli.tables import TableCell, format_table
from tests.compat.arroyo import unpack
from tests.jobs import run_word_job

JOBS = ("aircraft_sessions", "busiest_routes", "carrier_totals", "grand_total")
COLUMNS = ("operator", "watermark", "files", "of")
LINES: list[list[object]] = [
    [
        "Aggregate[sum]_3_tumbling-window-of-ten-seconds",
        TableCell("2024-01-01 00:00:07.5Z", ("2024-01-01 00:00:07Z (2 d 3 h ago)", "2 d 3 h ago")),
        1203,
        "a [bold]two-phase[/bold] sink of files",
    ],
    ["sink", None, 2, "a [bold]two-phase[/bold] sink of files"],
]


def test_columns_narrow_in_their_order_and_a_sentence_stands_once_below() -> None:
    def format_at(width: int | None) -> list[str]:
        narrow = ("watermark", "watermark", "files")
        return list(format_table(COLUMNS, LINES, width, narrow=narrow, notes="of"))

    assert "2024-01-01 00:00:07.5Z" in format_at(None)[1]
    assert "2024-01-01 00:00:07Z (2 d 3 h ago)" in format_at(100)[2]
    rows = format_at(75)
    assert rows[2].split("  ") == [LINES[0][0], "2 d 3 h ago", " 1203", " 1"]
    assert rows[4:] == ["of 1: a [bold]two-phase[/bold] sink of files"]
    assert "not shown: watermark, files; --wide prints" in format_at(52)[-2]
    name, row = format_at(40)[2:4]
    assert (name, row.split()) == (LINES[0][0], ["1"])


def test_without_an_order_a_text_continues_below_or_rows_become_records() -> None:
    shown = list(format_table(("job", "why"), [["a" * 30, "is lost " * 5]], 60))
    assert shown[2:4] == ["a" * 30 + "  is lost is lost is lost is", " " * 32 + "lost is lost"]
    shown = list(format_table(("job", "rows"), [["a" * 30, 1], ["b c", 2]], 30))
    assert shown == ["job   " + "a" * 30, "rows  1", "", "job   b c", "rows  2"]


def test_a_cell_cannot_move_the_cursor() -> None:
    assert list(format_table(("job",), [["a\x1b[2Jb\nc"]], None))[1] == "a\\x1b[2Jb\\nc"


cells = st.one_of(st.none(), st.integers(0, 10**9), st.text(max_size=40))


@given(st.lists(st.tuples(cells, cells, cells), max_size=4), st.integers(30, 120))
def test_every_cell_is_whole_at_any_width(lines: list[tuple[Any, ...]], width: int) -> None:
    shown = " ".join(" ".join(format_table(("first", "second", "third"), lines, width)).split())
    for line in lines:
        for cell in line:
            if cell is not None and str(cell).isprintable():
                assert " ".join(str(cell).split()) in shown


# ---- on a terminal -------------------------------------------------------------------------------


def on_terminal(columns: int, *command: str, **environment: str) -> str:
    """What a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "arroyo_dagster.cli", *command],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **environment},
    )
    os.close(theirs)
    text = b""
    try:
        while data := os.read(ours, 65_536):
            text += data
    except OSError:  # Linux: the other side was closed
        pass
    os.close(ours)
    assert process.wait(60) in (0, 3), text
    return text.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flights")
    unpack("flights", root)
    return root


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_jobs_prints_a_line_per_job_and_shared_facts_once(columns: int, flights: Path) -> None:
    shown = on_terminal(columns, "jobs", "--url", str(flights), NO_COLOR="1")
    assert max(map(cell_len, shown.splitlines())) <= columns
    assert all(shown.count(job) == 1 for job in JOBS)
    assert " ".join(shown.split()).count("--assume JOB=stopped") == 1
    assert re.search(r"\d d \d+ h ago|not shown: .*written", " ".join(shown.split()))
    assert "\x1b" not in shown


def test_other_commands_have_one_line_per_row_and_wide_prints_all(flights: Path) -> None:
    job, at = "carrier_totals", ("--url", str(flights))
    for command in (["epochs", job], ["show", job], ["verify", job], ["compact", "plan", job]):
        shown = on_terminal(80, *command, *at)
        plain = re.sub(r"\x1b\[\d*[mK]|\r", "", shown)
        assert max(map(cell_len, plain.splitlines())) <= 80
        if command[0] == "epochs":
            assert "\x1b[32mready\x1b[0m" in shown
            assert len(re.findall(r"^ +\d  ready  2026-11-21 \S+Z \(", plain, re.M)) == 8
        if command[0] == "compact":
            assert plain.count("every epoch writes it completely") == 1
    piped = [sys.executable, "-m", "arroyo_dagster.cli", "jobs", *at]
    expected = subprocess.run(piped, capture_output=True, text=True, check=True).stdout
    wide = on_terminal(80, "jobs", "--wide", *at)
    without_age = re.compile(r"\d+ (d|h|min|s) (\d+ (h|min|s) )?ago")
    assert without_age.sub("", wide) == without_age.sub("", expected)


def test_a_managed_job_is_named_as_commands_take_it(tmp_path: Path) -> None:
    run_word_job(open_store(str(tmp_path)), rows=8, sinks=0)
    shown = on_terminal(80, "jobs", "--url", str(tmp_path))
    assert "words/main  " in shown
    assert "2024-01-01 00:00:07Z" in shown
