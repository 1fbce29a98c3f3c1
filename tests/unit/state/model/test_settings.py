"""A setting is said once: the command line and Dagster give the same values for it."""

from __future__ import annotations

from typing import Any

import click
import dagster as dg
import pytest
from click.testing import CliRunner

from arroyo_dagster.cli.compaction.settings import settings_options
from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.settings import configured, settings_config
from arroyo_dagster.state.model.compaction import (
    MEBIBYTE,
    Budget,
    CompactionPolicy,
    CompactionSettings,
    MergeOrder,
    SortOrder,
)
from arroyo_dagster.state.model.settings import setting_fields, settings_from

FIELDS = {field.name: field for field in setting_fields(CompactionSettings)}
Config = settings_config(CompactionSettings)


def by_options(*args: str) -> CompactionSettings:
    found: list[CompactionSettings] = []

    @click.command()
    @settings_options(CompactionSettings)
    def command(**given: Any) -> None:
        found.append(settings_from(CompactionSettings, given))

    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    return found[0]


def test_defaults_are_equal_on_the_command_line_and_in_dagster() -> None:
    assert by_options() == CompactionSettings()
    assert configured(CompactionSettings, Config()) == CompactionSettings()
    assert settings_from(CompactionSettings, {}) == CompactionSettings()


def test_both_surfaces_give_the_same_settings() -> None:
    wanted = CompactionSettings(
        policy=CompactionPolicy.WINDOW,
        target_bytes=8 * MEBIBYTE,
        min_files=3,
        window_micros=1_500_000,
        parallelism=4,
        sort=SortOrder.KEY,
        deduplicate=False,
        budget=Budget(size_bytes=2 * MEBIBYTE, files=7, order=MergeOrder.SMALLEST),
    )
    text = "--policy window --target-mb 8 --min-files 3 --window-seconds 1.5 --parallelism 4"
    more = "--sort key --keep-generations --max-mb 2 --max-files 7 --order smallest"
    assert by_options(*text.split(), *more.split()) == wanted
    config = Config(
        policy="window",
        target_file_mb=8,
        min_files=3,
        window_seconds=1.5,
        parallelism=4,
        sort="key",
        deduplicate=False,
        max_mb=2,
        max_files=7,
        order="smallest",
    )
    assert configured(CompactionSettings, config) == wanted


def test_every_setting_has_one_option_one_field_and_help_that_names_them() -> None:
    names = {name: field.option for name, field in FIELDS.items()}
    assert len(set(names.values())) == len({one.config for one in FIELDS.values()}) == len(FIELDS)
    assert "--level-files" in FIELDS["policy"].setting.help.format(**names)
    described = {name: field.description for name, field in Config.model_fields.items()}
    assert "{" not in "".join(described.values())
    assert "merge level_files files" in described["policy"]


def test_what_cannot_be_is_refused_with_the_choices() -> None:
    with pytest.raises(InputError, match="there is no policy 'most'") as caught:
        settings_from(CompactionSettings, {"policy": "most"})
    assert caught.value.next_step == "choose one of bin-pack, levels, window, full"
    with pytest.raises(dg.Failure, match="there is no sort 'x'"):
        configured(CompactionSettings, Config(sort="x"))
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        Config(min_files=1)
    with pytest.raises(ValueError, match="greater than 0"):
        Config(window_seconds=0)
