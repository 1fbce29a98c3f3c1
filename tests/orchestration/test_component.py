"""The component: YAML to the same definitions, as `dg` loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

import arroyo_dagster
from arroyo_dagster.orchestration.component import ArroyoStateComponent, Maintenance

ROOT = Path(__file__).parents[2]
ATTRIBUTES: dict[str, Any] = {
    "checkpoint_url": "/does/not/exist",
    "layout": "protocol",
    "deployment": "blue",
    "sensor_running": True,
    "schedules": {"fleet": "*/5 * * * *", "timezone": "Europe/Berlin", "running": True},
    "arroyo_api_url": "http://arroyo:5115",
    "window": {"jobs": ["job_x"], "between": "02:00-04:00", "time_zone": "Asia/Tokyo"},
    "translation": {"group_name": "streaming", "tags": {"team": "platform"}},
}


def test_the_type_that_users_write_is_found_at_the_root_of_the_package() -> None:
    assert arroyo_dagster.ArroyoStateComponent is ArroyoStateComponent
    assert "ArroyoStateComponent" in dir(arroyo_dagster)


def test_yaml_gives_the_definitions() -> None:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            ArroyoStateComponent,
            defs_yaml_contents={
                "type": "arroyo_dagster.ArroyoStateComponent",
                "attributes": ATTRIBUTES,
            },
        )
        with sandbox.load_component_and_build_defs(path) as (component, defs):
            assert isinstance(component, ArroyoStateComponent)
            dg.Definitions.validate_loadable(defs)
            specs = {spec.key.to_user_string(): spec for spec in defs.resolve_all_asset_specs()}
            assert {"arroyo/blue/checkpoint", "arroyo/blue/fleet"} <= specs.keys()
            assert {spec.group_name for spec in specs.values()} == {"streaming"}
            assert all(spec.tags["team"] == "platform" for spec in specs.values())
            schedule = defs.resolve_schedule_def("arroyo_fleet_schedule")
            assert schedule.cron_schedule == "*/5 * * * *"
            assert schedule.execution_timezone == "Europe/Berlin"
            assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
            window = defs.resolve_schedule_def("arroyo_window_schedule")
            assert (window.cron_schedule, window.execution_timezone) == ("0 2 * * *", "Asia/Tokyo")


def test_what_is_misspelt_in_yaml_is_refused() -> None:
    for wrong in ({"layout": "modern"}, {"checkpoint_uri": "/x"}):
        with create_defs_folder_sandbox() as sandbox:
            path = sandbox.scaffold_component(
                ArroyoStateComponent,
                defs_yaml_contents={
                    "type": "arroyo_dagster.ArroyoStateComponent",
                    "attributes": {"checkpoint_url": "/x", **wrong},
                },
            )
            with (
                pytest.raises(Exception, match=r"ArroyoStateComponent\) \(error"),
                sandbox.load_component_and_build_defs(path),
            ):
                pass


def dg_check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `dg check defs`, without a home of its own to write to."""
    command = [str(Path(sys.executable).parent / "dg"), "check", "defs"]
    environment = {
        **os.environ,
        "ARROYO__CHECKPOINT_URL": "/does/not/exist",
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "VIRTUAL_ENV": sys.prefix,
        "XDG_CONFIG_HOME": str(folder),
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_dg_check_defs_accepts_a_project_that_uses_the_component(tmp_path: Path) -> None:
    package = tmp_path / "my_project"
    (package / "defs" / "arroyo").mkdir(parents=True)
    for folder in (package, package / "defs"):
        (folder / "__init__.py").write_text("")
    (package / "definitions.py").write_text(
        "from pathlib import Path\nimport dagster as dg\n\n"
        "@dg.definitions\ndef defs():\n"
        "    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "my-project"\nversion = "0.1"\n\n'
        '[tool.dg]\ndirectory_type = "project"\n\n[tool.dg.project]\nroot_module = "my_project"\n'
    )
    yaml = package / "defs" / "arroyo" / "defs.yaml"
    yaml.write_text(
        "type: arroyo_dagster.ArroyoStateComponent\n"
        "attributes:\n"
        "  checkpoint_url: '{{ env.ARROYO__CHECKPOINT_URL }}'\n"
        "  schedules: {running: true}\n"
    )
    answer = dg_check(tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "All definitions loaded successfully" in answer.stdout + answer.stderr
    yaml.write_text("type: arroyo_dagster.ArroyoStateComponent\nattributes: {url: /x}\n")
    answer = dg_check(tmp_path)
    assert answer.returncode != 0
    assert "checkpoint_url" in answer.stdout + answer.stderr


def test_dg_check_defs_accepts_this_project() -> None:
    answer = dg_check(ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_how_many_jobs_a_run_serves_and_how_long_is_configured() -> None:
    options = Maintenance(most_jobs=7, budget_minutes=5.0).options()
    assert (options.most_jobs, options.budget_minutes) == (7, 5.0)
    with pytest.raises(ValueError, match="most_jobs"):
        Maintenance(most_jobs=0)
