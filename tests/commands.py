"""The commands of `arroyo-state`, as click knows them."""

from __future__ import annotations

from collections.abc import Iterator

import click


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
