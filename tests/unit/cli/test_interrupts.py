"""Ctrl-C ends a command with one sentence, and a closed pipe without any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import click
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli, open_store
from arroyo_dagster.cli.common import EXIT_CLOSED, EXIT_INTERRUPTED
from tests.commands import leaves
from tests.jobs import run_word_job


def found(path: tuple[str, ...]) -> click.Command:
    command: click.Command | None = cli.main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), name)
    assert command is not None
    return command


@pytest.mark.parametrize("path", list(leaves(cli.main)), ids=" ".join)
def test_every_command_leaves_one_sentence(path: tuple[str, ...]) -> None:
    command = found(path)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with (
        mock.patch.object(command, "callback", interrupted),
        mock.patch.object(command, "parse_args", return_value=[]),
    ):
        done = CliRunner().invoke(cli.main, list(path))
    assert (done.exit_code, done.stdout) == (EXIT_INTERRUPTED, "")
    assert done.stderr == "\ninterrupted: nothing was changed\n"


def test_a_command_that_writes_says_what_continues_it(tmp_path: Path) -> None:
    target = "arroyo_dagster.state.operations.catalog.jobs.list_level"
    with mock.patch(target, side_effect=KeyboardInterrupt):
        done = CliRunner().invoke(cli.main, ["stop", "main", "--url", str(tmp_path)])
        read = CliRunner().invoke(cli.main, ["epochs", "main", "--url", str(tmp_path)])
    assert "call the same command again to complete it" in done.stderr
    assert read.stderr == "\ninterrupted: nothing was changed\n"
    assert done.exit_code == read.exit_code == EXIT_INTERRUPTED


def test_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    run_word_job(open_store(str(tmp_path)), rows=8, sinks=0)
    process = subprocess.Popen(
        [sys.executable, "-m", "arroyo_dagster.cli", "jobs", "--url", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == EXIT_CLOSED
