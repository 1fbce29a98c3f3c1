"""Runs of Dagster whose work an application of spark-submit does, on a standalone cluster."""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyspark
import pytest

from arroyo_dagster.orchestration import (
    ArroyoOptions,
    ArroyoStateStore,
    PipesRunner,
    build_arroyo_definitions,
    run_pipes_command,
)
from arroyo_dagster.orchestration.resources import SPARK_TAG
from arroyo_dagster.state import open_store, verify_job
from tests.clusters.standalone import StandaloneCluster, standalone
from tests.clusters.test_kills import ON_CLUSTER, options
from tests.clusters.test_standalone import PROJECT
from tests.internals import lease
from tests.jobs import run_word_job, word_job

pytestmark = pytest.mark.clusters

JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
    "sinks": 0,
}
PATHS = word_job(None, **JOB).paths  # type: ignore[arg-type]
COMPACT = {"policy": "full", "wait_seconds": 0.0}
SCRIPT = """
from arroyo_dagster.cli.pipes import serve
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.spark.thresholds import SparkThresholds

serve(spark=SparkSettings(thresholds=SparkThresholds(size_bytes=0, files=0, objects=0)))
"""
HELD = """
import pathlib, time
import arroyo_dagster.spark.compaction as compaction
def held(session, *given):
    pathlib.Path(__file__).with_name("held").touch()
    time.sleep(600)
compaction._on_spark = held
"""


def submit(cluster: StandaloneCluster, script: Path) -> dict[str, Any]:
    """The arguments of the client of subprocesses that start an application."""
    # Below the Spark home of the tests lie all packages, as if they were the user's modules.
    program = ["env", "-u", "SPARK_HOME", f"{Path(pyspark.__file__).parent}/bin/spark-submit"]
    program += ["--master", cluster.master]
    return {"command": [*program, *options(ON_CLUSTER), str(script)]}


def run(
    root: Path, instance: dg.DagsterInstance, arguments: Mapping[str, Any], job: str, config: Any
) -> dg.ExecuteInProcessResult:
    store = ArroyoStateStore(checkpoint_url=str(root))
    runner = PipesRunner(
        client=dg.PipesSubprocessClient(env=VARIABLES),
        store=store,
        arguments=dict(arguments),
        in_process_mb=0,
        spark_from_files=0,
        spark_from_objects=0,
    )
    defs = build_arroyo_definitions(store, mode="maintain", options=ArroyoOptions(runner=runner))
    return defs.resolve_job_def(job).execute_in_process(
        run_config={"ops": config}, instance=instance, raise_on_error=False
    )


VARIABLES = {"PYTHONPATH": str(PROJECT), "PYSPARK_PYTHON": sys.executable}


def test_compaction_gc_and_a_pipeline_are_applications_of_spark_submit(tmp_path: Path) -> None:
    root, script = tmp_path / "checkpoints", tmp_path / "maintain.py"
    script.write_text(SCRIPT)
    (tmp_path / "words.py").write_text(
        f"from tests.jobs import word_job\ndef pipeline():\n    return word_job(None, **{JOB!r})\n"
    )

    @dg.asset
    def words(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        command = ["run", f"{tmp_path}/words.py:pipeline", "--url", str(root), "--spark"]
        client = dg.PipesSubprocessClient(env=VARIABLES)
        return dg.MaterializeResult(
            metadata=run_pipes_command(context, client, [*command, "--epochs", "5"], **arguments)
        )

    with standalone(tmp_path) as cluster, dg.DagsterInstance.ephemeral() as instance:
        arguments = submit(cluster, script)
        done = dg.materialize([words], instance=instance)
        (event,) = done.get_asset_materialization_events()
        assert event.materialization.metadata["newest_epoch"].value == 5
        log = "\n".join(one.user_message for one in instance.all_logs(done.run_id))
        assert f"Spark: {cluster.master} (spark-submit)" in log
        assert "epoch 5: " in log

        config: Any = {"arroyo_compacted_state": {"config": COMPACT}}
        done = run(root, instance, arguments, "arroyo_compaction", config)
        assert done.success
        (event,) = done.get_asset_materialization_events()
        metadata = event.materialization.metadata
        assert "merge files: Spark" in str(metadata["engine"].value)
        found = instance.get_run_by_id(done.run_id)
        assert found is not None
        assert found.tags[SPARK_TAG] == f"{cluster.master} (spark-submit)"

        config = {"arroyo_retained_epochs": {"config": {"keep_epochs": 2, "dry_run": False}}}
        done = run(root, instance, arguments, "arroyo_gc", config)
        assert done.success
        engines = [
            str(one.materialization.metadata["engine"].value)
            for one in done.get_asset_materialization_events()
            if "engine" in one.materialization.metadata
        ]
        assert ["delete: Spark" in one for one in engines] == [True]
    assert verify_job(open_store(str(root)), PATHS).passed


def test_ending_a_run_ends_the_application_which_gives_its_lease_back(tmp_path: Path) -> None:
    root, script = tmp_path / "checkpoints", tmp_path / f"held-{tmp_path.name}.py"
    run_word_job(open_store(str(root)), **JOB, max_epochs=4)
    script.write_text(HELD + SCRIPT)

    def interrupt() -> None:
        until = time.monotonic() + 120
        while not (tmp_path / "held").exists() and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    with standalone(tmp_path) as cluster, dg.DagsterInstance.ephemeral() as instance:
        thread = threading.Thread(target=interrupt)
        thread.start()
        config = {"arroyo_compacted_state": {"config": COMPACT}}
        done = run(root, instance, submit(cluster, script), "arroyo_compaction", config)
        thread.join()
        assert (tmp_path / "held").exists()
        assert not done.success
        until = time.monotonic() + 30
        while _processes(script.name) and time.monotonic() < until:
            time.sleep(0.2)
        assert _processes(script.name) == []
    with lease(open_store(str(root)), PATHS, "the next run"):
        pass  # nobody holds it
    assert verify_job(open_store(str(root)), PATHS).passed


def _processes(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and int(folder.name) != os.getpid():
            found.append(line)
    return found
