"""Every pyspark from 3.5 on: what one lacks is refused in one line; packages are not user code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.packing import pickled, user_code_by_value
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings, runs_in_process
from arroyo_dagster.spark.versions import NEWEST, OLDEST
from tests.test_repository import pyproject

SOURCE = "arroyo_dagster.spark.query.source"
CONNECT = SparkSettings(remote="sc://127.0.0.1:1")
LOCAL = SparkSettings(master="local[1]")


@pytest.mark.parametrize(
    ("installed", "use", "message"),
    [
        (
            "3.5.9",
            lambda: importlib.import_module(SOURCE),
            "the data source `arroyo` needs pyspark 4.0 or newer; 3.5.9",
        ),
        ("3.5.9", lambda: open_session(CONNECT), "Spark Connect needs pyspark 4.0 or newer; 3.5.9"),
        (
            "3.5.9",
            lambda: runs_in_process(SimpleNamespace(client=None)),
            "Spark Connect needs pyspark 4.0 or newer; 3.5.9",
        ),
        ("3.4.4", lambda: open_session(LOCAL), "arroyo_dagster needs pyspark 3.5 or newer; 3.4.4"),
    ],
)
def test_what_a_pyspark_is_too_old_for_is_refused_in_one_line(
    installed: str, use: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.__version__", installed)
    monkeypatch.setattr("arroyo_dagster.spark.session._active_session", lambda: None)
    monkeypatch.delitem(sys.modules, SOURCE, raising=False)
    with pytest.raises(InputError) as raised:
        use()
    assert raised.value.message.startswith(f"{message} is installed")
    needed = message.split(" pyspark ")[1].split()[0]
    assert raised.value.next_step == f"install it: pip install 'pyspark>={needed},<5'"


def test_the_declared_versions_are_those_of_the_module() -> None:
    (declared,) = [one for one in pyproject()["project"]["dependencies"] if "pyspark" in one]
    assert declared == f"pyspark>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}"


def test_installed_packages_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a notebook of Databricks, whose environment sees the packages of the cluster's.
    folder = tmp_path / "site-packages"
    folder.mkdir()
    lines = ("import threading", "LOCK = threading.Lock()", "def held(): return LOCK")
    (folder / "lent.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    lent = importlib.import_module("lent")
    with user_code_by_value():
        assert b"lent" in pickled(lent.held)
    monkeypatch.delitem(sys.modules, "lent")
