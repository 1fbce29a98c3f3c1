"""What runs on a cluster whose workers are not this process: versions, shipping, shared disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.standalone import SETTINGS, python_without_the_package, standalone

PROJECT = Path(__file__).parents[2]

DRIVER = """
import json, sys
from dataclasses import replace
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.engine.pipeline import SparkOptions, run_pipeline
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.engine.loading import load_pipeline
from arroyo_dagster.state.storage import open_store

given = json.loads(sys.argv[1])
remote = given["master"].startswith("sc://")
kind = {"remote": given["master"]} if remote else {"master": given["master"], "conf": given["conf"]}
settings = SparkSettings(**kind)
opened = open_session(settings)
pipeline, store = load_pipeline(given["pipeline"]), open_store(given["url"])
options = SparkOptions(session=opened.session)

def attempt():
    try:
        done = run_pipeline(pipeline, store, options)
        return [done.newest.epoch, verify_job(store, pipeline.paths).passed]
    except ArroyoStateError as error:
        return [type(error).__name__, error.message, error.retryable]

found = {"choice": str(opened.choice), "first": attempt()}
found["written"] = sorted(one.path for one in store.list(""))
if given["ship"]:
    open_session(replace(settings, ship=True))
    found["shipped"] = attempt()
opened.session.stop()
print(json.dumps(found))
"""


def drive(folder: Path, master: str, url: str, *, ship: bool = False, **conf: str) -> Any:
    """Run a pipeline from a driver process of its own; one process has one Spark."""
    program, _, last = (
        (PROJECT / "examples" / "hello_state.py").read_text().strip().rpartition("\n")
    )
    assert last.startswith("ad.run_pipeline(")
    (folder / "hello.py").write_text(f"{program}\npipeline = rows.pipeline\n")
    given = {
        "master": master,
        "url": url,
        "ship": ship,
        "conf": {**SETTINGS, **conf},
        "pipeline": f"{folder / 'hello.py'}:pipeline",
    }
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    environment.pop("PYSPARK_PYTHON", None)  # of a session of this process; it would win
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(given)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.clusters
def test_workers_without_the_package_are_refused_by_name_and_served_by_shipping(
    tmp_path: Path,
) -> None:
    python = python_without_the_package(tmp_path / "env")
    url = f"file://{tmp_path}/state"
    with standalone(tmp_path) as cluster:
        conf = {"spark.pyspark.python": str(python)}
        found = drive(tmp_path, cluster.master, url, ship=True, **conf)
    assert found["choice"] == f"{cluster.master} (the setting)"
    kind, message, retryable = found["first"]
    assert (kind, retryable) == ("InputError", False)
    assert "cannot run this package: it has no arroyo_dagster (the driver has " in message
    assert found["written"] == []
    assert found["shipped"] == [2, True]


def _can_hide() -> bool:
    script = "mount -t tmpfs none /mnt"
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, check=False
    )
    return found.returncode == 0


@pytest.mark.clusters
@pytest.mark.skipif(not _can_hide(), reason="needs unshare --mount, as root")
def test_a_worker_on_another_disk_is_refused_before_an_epoch_is_written(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with standalone(tmp_path, hidden=[None, state]) as cluster:
        executors = {"PYTHONPATH": str(PROJECT)}
        conf = {f"spark.executorEnv.{name}": value for name, value in executors.items()}
        conf["spark.pyspark.python"] = sys.executable
        found = drive(tmp_path, cluster.master, f"file://{state}", **conf)
    kind, message, retryable = found["first"]
    assert (kind, retryable) == ("InputError", False)
    assert "is on a disk that they do not share" in message
    assert found["written"] == []
