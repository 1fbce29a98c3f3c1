"""Every command's help holds an example, which is a command line of that command."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.cli.config import ALLOWED_EVERYWHERE
from tests.commands import leaves

EXAMPLE = re.compile(r"^  Examples?:\n((?:    arroyo-state .*\n?)+)", re.MULTILINE)


def parsed(words: list[str]) -> click.Context:
    """The context in which click would call the command of a command line."""
    context = cli.main.make_context("arroyo-state", list(words))
    command: click.Command = cli.main
    while isinstance(command, click.Group):
        args = [*getattr(context, "_protected_args", ()), *context.args]
        name, below, rest = command.resolve_command(context, args)
        assert below is not None
        context, command = below.make_context(name, rest, parent=context), below
    return context


@pytest.mark.parametrize("path", list(leaves(cli.main)), ids=" ".join)
def test_the_example_of_a_command_parses(path: tuple[str, ...]) -> None:
    text = CliRunner().invoke(cli.main, [*path, "--help"]).stdout
    found = EXAMPLE.search(text)
    assert found, text
    for line in found[1].splitlines():
        program, *words = shlex.split(line)
        assert program == "arroyo-state"
        command = parsed(words).command_path.removeprefix("arroyo-state ")
        assert command == " ".join(path)


def test_options_that_several_commands_have_are_the_same_everywhere() -> None:
    helps: dict[str, set[str | None]] = {name: set() for name in ALLOWED_EVERYWHERE}
    for path in leaves(cli.main):
        context = click.Context(cli.main)
        command: click.Command | None = cli.main
        for name in path:
            assert isinstance(command, click.Group)
            command = command.get_command(context, name)
        assert command is not None
        for option in command.params:
            for spelling in option.opts:
                if spelling.removeprefix("--") in helps and option.name != "api":
                    assert isinstance(option, click.Option)
                    helps[spelling.removeprefix("--")].add(option.help)
    assert all(len(texts) <= 1 for texts in helps.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["jbos"], "No such command 'jbos'. Did you mean jobs?"),
        (["gc", "purgee"], "No such command 'purgee'. Did you mean purge?"),
        (["xyzzy"], "No such command 'xyzzy'."),
    ],
)
def test_a_misspelled_command_is_answered_with_the_closest(words: list[str], said: str) -> None:
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: {said}"
