"""The verdict of `doctor` about a Dagster instance: what is on, and what to do."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from arroyo_dagster.orchestration.readiness import check_instance
from arroyo_dagster.state.operations.verify.store import CheckStatus


def test_schedules_and_sensors_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    found = check_instance()
    assert found.status is CheckStatus.WARNING
    assert found.detail == f"{dg.__version__}; 0 schedules on, 0 off; 0 sensors on, 0 off"
    assert "Automation" in str(found.next_step)


def test_no_dagster_home_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    found = check_instance()
    assert found.status is CheckStatus.NOT_CHECKED
    assert "DAGSTER_HOME" in found.detail


def test_an_instance_that_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text("storage: {sqlite: {base_dir: /proc/nowhere}}\n")
    assert check_instance().status is CheckStatus.ERROR
