"""An application of spark-submit keeps its master and its settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.find_spark_home import _find_spark_home

PROJECT = Path(__file__).parents[2]
pytestmark = pytest.mark.clusters

APPLICATION = """
import json, os, sys
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings

opened = open_session(SparkSettings(**json.loads(sys.argv[1])))
session = opened.session
print(json.dumps({
    "choice": str(opened.choice),
    "master": session.sparkContext.master,
    "name": session.sparkContext.appName,
    "adaptive": session.conf.get("spark.sql.adaptive.enabled"),
    "zone": session.conf.get("spark.sql.session.timeZone"),
    "count": session.range(10).count(),
}))
session.stop()
"""


def _answer(folder: Path, *command: str, given: dict[str, str], **variables: str) -> Any:
    script = folder / "application.py"
    script.write_text(APPLICATION)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **variables}
    environment["PYSPARK_PYTHON"] = sys.executable
    done = subprocess.run(
        [*command, str(script), json.dumps(given)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(one for one in done.stdout.splitlines() if one.startswith('{"choice"')))


def test_spark_submit_decides_and_a_setting_that_differs_is_named(tmp_path: Path) -> None:
    submit = [f"{_find_spark_home()}/bin/spark-submit", "--master", "local[2]", "--name", "mine"]
    submit += ["--conf", "spark.sql.adaptive.enabled=true"]
    found = _answer(tmp_path, *submit, given={"master": "local[1]"})
    assert found["choice"] == "local[2] (spark-submit); local[1] has no effect"
    # What spark-submit sets stays; defaults of this package fill in the rest.
    assert (found["master"], found["adaptive"], found["zone"]) == ("local[2]", "true", "UTC")
    assert found["count"] == 10


def test_defaults_of_spark_decide_where_nothing_is_set(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.master  local[2]\nspark.sql.adaptive.enabled=true\n"
    )
    folder = {"SPARK_CONF_DIR": str(tmp_path)}
    found = _answer(tmp_path, sys.executable, given={}, **folder)
    assert found["choice"] == "local[2] (spark-defaults.conf)"
    assert (found["master"], found["adaptive"]) == ("local[2]", "true")


def test_a_master_takes_precedence_over_the_variable_of_spark_connect(tmp_path: Path) -> None:
    remote = {"SPARK_REMOTE": "sc://127.0.0.1:1"}
    found = _answer(tmp_path, sys.executable, given={"master": "local[1]"}, **remote)
    assert (found["choice"], found["count"]) == ("local[1] (the setting)", 10)
