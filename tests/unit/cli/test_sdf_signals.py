"""`sdf run` as a process: pipes, signals, an end without an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[3]
FLOW = """
apiVersion: 0.6.0
meta: {name: echo, version: 0.1.0, namespace: t}
topics:
  typed: {schema: {value: {type: string, converter: raw}}}
  shouted: {schema: {value: {type: string, converter: raw}}}
services:
  shout:
    sources: [{type: topic, id: typed}]
    transforms: [{operator: map, run: "def shout(line): return line.upper()"}]
    sinks: [{type: topic, id: shouted}]
"""
SECONDS = 60


def started(folder: Path, *flags: str, **options: Any) -> subprocess.Popen[bytes]:
    (folder / "dataflow.yaml").write_text(FLOW)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "arroyo_dagster.cli", "sdf", "run"),
            *(str(folder / "dataflow.yaml"), "--url", str(folder / "state"), *flags),
        ],
        cwd=PROJECT,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **options,
    )


def test_piped_lines_come_out_and_the_end_of_the_pipe_ends_the_run(tmp_path: Path) -> None:
    process = started(
        tmp_path,
        *("--source", "typed=stdin", "--sink", "shouted=stdout"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    out, err = process.communicate(b"to be\nor not\n", SECONDS)
    assert (process.returncode, out) == (0, b"TO BE\nOR NOT\n"), err
    assert b"every source has ended" in err


def test_sigterm_is_a_last_checkpoint_and_the_next_run_goes_on(tmp_path: Path) -> None:
    typed, out = tmp_path / "typed", tmp_path / "out"
    typed.write_text("one\n")
    flags = ("--source", f"typed=jsonl:{typed}?follow=true", "--interval", "0.05")
    process = started(tmp_path, *flags, "--sink", f"shouted=jsonl:{out}")
    try:
        until = time.monotonic() + SECONDS
        while not (out.exists() and out.read_bytes()):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        with typed.open("a") as more:
            more.write("two\nthr")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert b"stopping with a last checkpoint" in err
    assert out.read_bytes() in (b"ONE\n", b"ONE\nTWO\n")
    with typed.open("a") as more:
        more.write("ee\n")
    again = started(tmp_path, *flags, "--until-idle", "--sink", f"shouted=jsonl:{out}")
    again.communicate(timeout=SECONDS)
    assert again.returncode == 0
    assert out.read_bytes() == b"ONE\nTWO\nTHREE\n"


def test_a_prompt_that_waits_for_a_line_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    (tmp_path / "typed").write_text("one\n")
    process = started(
        tmp_path,
        *("--source", f"typed=jsonl:{tmp_path / 'typed'}", "--prompt"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(b"help\n")
        process.stdin.flush()
        shown = [process.stdout.readline() for _ in range(8)]
        assert any(b"show state" in line for line in shown)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, b"Fatal" in err) == (0, False), err
    finally:
        process.kill()
        process.wait()
