"""A subtask's state stays in one process of a cluster, and is handed over when that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.state import open_store
from tests.clusters.standalone import SETTINGS, standalone
from tests.clusters.test_connect import connect_server
from tests.clusters.test_standalone import PROJECT
from tests.located import KEYS, Places, counts_of, located_pipeline

pytestmark = pytest.mark.clusters
SUBTASKS, EPOCHS, AFTER = 8, 100, 20

DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from arroyo_dagster.spark.engine.pipeline import SparkOptions, run_pipeline
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.storage import open_store
from tests.located import located_pipeline

given = json.loads(sys.argv[1])
remote = given["master"].startswith("sc://")
kind = {"remote": given["master"]} if remote else {"master": given["master"], "conf": given["conf"]}
opened = open_session(SparkSettings(**kind))
pipeline = located_pipeline(Path(given["log"]), **given["pipeline"])
began, seconds = time.monotonic(), []

def on_epoch(checkpoint):
    seconds.append(time.monotonic() - began)
    if checkpoint.epoch == given["kill_after"]:
        os.kill(given["victim"], signal.SIGKILL)

options = SparkOptions(session=opened.session)
done = run_pipeline(pipeline, open_store(given["url"]), options, on_epoch=on_epoch)
opened.session.stop()
print(json.dumps({"epochs": done.epochs, "seconds": seconds}))
"""


def drive(folder: Path, master: str, *, epochs: int, **given: Any) -> Any:
    """Run the pipeline from a driver process of its own; one process has one Spark."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    python = {"PYTHONPATH": str(PROJECT)}
    conf = {f"spark.executorEnv.{name}": value for name, value in python.items()}
    conf["spark.pyspark.python"] = sys.executable
    size = {"epochs": epochs, "parallelism": SUBTASKS, "count_copies_every": 10}
    given = {
        "master": master,
        "url": f"file://{folder}/state",
        "log": str(folder / "located.log"),
        "conf": {**SETTINGS, **conf},
        "pipeline": {**size, "ballast_bytes": 4_000_000},
        "kill_after": None,
        "victim": None,
        **given,
    }
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


def test_subtasks_stay_on_a_cluster_and_those_of_a_lost_worker_move_once(tmp_path: Path) -> None:
    log = tmp_path / "located.log"
    with standalone(tmp_path) as cluster:
        lost = {"kill_after": EPOCHS, "victim": cluster.workers[0]}
        found = drive(tmp_path, cluster.master, epochs=EPOCHS + AFTER, **lost)
    assert found["epochs"] == EPOCHS + AFTER
    calm = Places.read(log, up_to_epoch=EPOCHS)
    assert all(len(held) == EPOCHS for held in calm.processes.values())
    assert max(calm.moves.values()) <= 2, calm.moves
    assert calm.starts == {subtask: 1 + moves for subtask, moves in calm.moves.items()}
    assert max(calm.copies.values()) <= 1.3 * SUBTASKS, calm.copies
    # Both workers hold some, and only those of the lost one moved.
    held = [found[-1] for found in calm.processes.values()]
    assert {held.count(process) for process in held} == {SUBTASKS // 2}
    after = Places.read(log, after_epoch=EPOCHS - 1)
    left = set(held) - {found[-1] for found in after.processes.values()}
    assert len(left) == 1
    assert after.moves == {subtask: int(process in left) for subtask, process in enumerate(held)}
    assert sum(after.starts.values()) == SUBTASKS // 2
    pipeline = located_pipeline(log, epochs=EPOCHS + AFTER)
    counts = counts_of(open_store(f"file://{tmp_path}/state"), pipeline)
    assert set(counts.values()) == {EPOCHS + AFTER}
    assert len(counts) == KEYS


def test_subtasks_stay_over_spark_connect(tmp_path: Path) -> None:
    epochs, log = 20, tmp_path / "located.log"
    with connect_server(tmp_path, sys.executable, variables={"PYTHONPATH": str(PROJECT)}) as remote:
        drive(tmp_path, remote, epochs=epochs)
    found = Places.read(log)
    assert max(found.moves.values()) <= 2, found.moves
    assert found.starts == {subtask: 1 + moves for subtask, moves in found.moves.items()}
    assert found.copies[epochs] <= 1.3 * SUBTASKS, found.copies
    pipeline = located_pipeline(log, epochs=epochs)
    counts = counts_of(open_store(f"file://{tmp_path}/state"), pipeline)
    assert set(counts.values()) == {epochs}
