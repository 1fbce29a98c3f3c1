"""The commands of `arroyo-state`, as click knows them, and what they print on a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
from click.testing import CliRunner, Result


def run(url: str, *words: str) -> Result:
    """What a command does on the store of a URL."""
    from arroyo_dagster import cli

    return CliRunner().invoke(cli.main, [*words, "--url", url], catch_exceptions=False)


def document(url: str, *words: str) -> Any:
    """The JSON document of a command that succeeds and warns of nothing."""
    result = run(url, *words, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return json.loads(result.stdout)


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command below one that is no group itself."""
    for words, _ in leaf_commands(command, path):
        yield words


def leaf_commands(
    command: click.Command, path: tuple[str, ...] = (), *, hidden_words: bool = True
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The words of each command that is no group itself, and the command.

    Args:
        hidden_words: name hidden commands; else their words are those of their group, which runs
            one by default.
    """
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for word in command.list_commands(context):
        below = command.get_command(context, word)
        assert below is not None
        named = hidden_words or not below.hidden
        words = (*path, word) if named else path
        yield from leaf_commands(below, words, hidden_words=hidden_words)
