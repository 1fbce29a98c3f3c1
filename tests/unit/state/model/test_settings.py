"""A setting is said once: the command line and Dagster give the same values for it."""

from __future__ import annotations

from typing import Any, TypeVar

import click
import dagster as dg
import pytest
from click.testing import CliRunner

from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.orchestration import (
    CompactionConfig,
    GcConfig,
    MaintenanceWindow,
    OrphansConfig,
)
from arroyo_dagster.orchestration.settings import configured, settings_config
from arroyo_dagster.state import CompactionPolicy, CompactionSettings, Retention, WindowLimits
from arroyo_dagster.state.model.compaction import MEBIBYTE, AdoptionSettings, Budget, MergeOrder
from arroyo_dagster.state.model.garbage import DeletionSettings, GraceSettings
from arroyo_dagster.state.model.maintenance_window import WindowSteps
from arroyo_dagster.state.model.rewrite import QuietSettings
from arroyo_dagster.state.model.settings import setting_fields, settings_from
from tests.formats import SortOrder

T = TypeVar("T")
FIELDS = {field.name: field for field in setting_fields(CompactionSettings)}
Config = settings_config(CompactionSettings)


def orphans(days: float) -> OrphansConfig:
    return OrphansConfig(older_than_days=days)


def by_options(*args: str) -> CompactionSettings:
    return given_to(CompactionSettings, *args)


def given_to(settings: type[T], *args: str) -> T:
    """The settings that options give, by themselves."""
    found: list[T] = []

    @click.command()
    @settings_options(settings)
    def command(**given: Any) -> None:
        found.append(settings_from(settings, given))

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
    described = {name: str(field.description) for name, field in Config.model_fields.items()}
    assert "{" not in "".join(described.values())
    assert "merge level_files files" in described["policy"]


# ---- the settings of other journeys --------------------------------------------------------------

RETENTION = Retention(keep_epochs=3, keep_micros=129_600_000_000)
STEPS = WindowSteps(
    limits=WindowLimits(stop=1.5, rewrite=2.0, start=3.0, quiet=0.0), verify_level=4
)
EQUAL: list[tuple[Any, str, dg.Config]] = [
    (RETENTION, "--keep 3 --keep-for 36h", GcConfig(keep_epochs=3, keep_days=1.5)),
    (GraceSettings(grace_micros=7_200_000_000), "--older-than 2h", orphans(1 / 12)),
    (GraceSettings(), "", orphans(3.0)),
    (DeletionSettings(quarantine=True), "--quarantine", GcConfig(quarantine=True)),
    (DeletionSettings(), "", GcConfig()),
    (AdoptionSettings(wait_seconds=2.5), "--wait 2.5", CompactionConfig(wait_seconds=2.5)),
    (QuietSettings(quiet_seconds=0.0), "--quiet 0", CompactionConfig(quiet_seconds=0.0)),
    (QuietSettings(), "", CompactionConfig()),
    (
        STEPS,
        "--stop 1.5 --rewrite 2 --start 3 --quiet 0 --level 4",
        MaintenanceWindow(
            jobs=[],
            stop_seconds=1.5,
            rewrite_seconds=2.0,
            start_seconds=3.0,
            quiet_seconds=0.0,
            verify_level=4,
        ),
    ),
    (WindowSteps(), "", MaintenanceWindow(jobs=[])),
]


@pytest.mark.parametrize(("wanted", "args", "config"), EQUAL)
def test_options_and_config_give_equal_settings(wanted: Any, args: str, config: dg.Config) -> None:
    assert given_to(type(wanted), *args.split()) == wanted
    assert configured(type(wanted), config) == wanted
