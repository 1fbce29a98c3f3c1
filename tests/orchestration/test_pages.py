"""The commands that Dagster's pages show are commands that exist."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from arroyo_dagster.cli import main
from arroyo_dagster.orchestration import ArroyoAssetProps
from arroyo_dagster.orchestration import DagsterArroyoTranslator as Translator
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.translator import TABLES


def commands_of(description: str | None) -> list[list[str]]:
    (block,) = re.findall(r"\n\n```sh\n(.*?)\n```$", description or "", re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def parsed(words: list[str]) -> None:
    """Let click parse a command, as far as its options and its number of arguments."""
    command: click.Command = main
    context = click.Context(main, info_name=words.pop(0))
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, parent=context, info_name=name)
    words = ["1" if word == "EPOCH" else word for word in words]
    command.parse_args(context, words)


@pytest.mark.parametrize("table", TABLES)
def test_the_commands_in_an_asset_s_description_exist(table: str) -> None:
    pipeline = ListedPipeline(root="words/main", key=("words", "main"))
    spec = Translator().get_asset_spec(ArroyoAssetProps(table=table, pipeline=pipeline))
    for words in commands_of(spec.description):
        parsed(words)
