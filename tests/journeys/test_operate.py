"""The operator's guide: settings load, and names, versions and stores are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from arroyo_dagster import (
    ArroyoDirectory,
    ArroyoOptions,
    DeadJobsConfig,
    MaintenanceOptions,
    MaintenanceWindow,
    OrphansConfig,
    build_arroyo_definitions,
)
from arroyo_dagster.state import MemoryStore
from arroyo_dagster.state.planning import polling
from tests.contract.conftest import BACKENDS
from tests.documentation import PROJECT, blocks
from tests.fleets import Written, legacy_job
from tests.jobs import run_word_job
from tests.stores import parse_url

DEPLOYMENT = "docs/operate/deployment.md"
SCHEDULES = "docs/operate/schedules.md"
VERSIONS = "docs/operate/versions.md"
SIZING = "docs/operate/sizing.md"


def _text(page: str) -> str:
    return (PROJECT / page).read_text()


def _repository() -> dg.RepositoryDefinition:
    store = MemoryStore()
    run_word_job(store, rows=4, rows_per_epoch=2)
    options = ArroyoOptions(
        directory=ArroyoDirectory(assume={"JOB": "stopped"}),
        maintenance=MaintenanceOptions(orphans=OrphansConfig(), dead_jobs=DeadJobsConfig()),
        window=MaintenanceWindow(jobs=["JOB"], between="02:00-04:00"),
        dataflows=[PROJECT / "examples" / "sdf" / "words" / "dataflow.yaml"],
    )
    return build_arroyo_definitions(
        store.url, mode="maintain", options=options
    ).get_repository_def()


# ---- dagster.yaml --------------------------------------------------------------------------------


def test_dagster_takes_the_settings(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(blocks(DEPLOYMENT, "yaml")[0])
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.run_monitoring_enabled
        assert instance.run_retries_enabled
        assert instance.run_retries_max_retries == 1
        assert not instance.run_retries_retry_on_asset_or_op_failure
        pools = instance.get_concurrency_config().pool_config
        assert pools.pool_granularity is not None
        assert pools.pool_granularity.value == "run"


def test_the_pools_and_tags_of_the_page_are_those_of_the_code() -> None:
    repository = _repository()
    defs = [job for job in repository.get_all_jobs() if job.name.startswith("arroyo_")]
    pools = {pool for job in defs for node in job.all_node_defs for pool in node.pools}
    text = _text(DEPLOYMENT)
    assert pools == {"arroyo_compaction", "arroyo_gc"}
    assert all(f"`{pool}`" in text for pool in pools)
    assert {"arroyo/maintenance"} == set(re.findall(r"arroyo/[a-z_]+", text))
    run = repository.get_job("arroyo_compaction").run_tags
    assert run["dagster/max_runtime"] == "7200"
    assert run["dagster/priority"] == "-1"


def test_the_values_of_kubernetes_are_yaml() -> None:
    values = yaml.safe_load(blocks(DEPLOYMENT, "yaml")[1])
    assert values["runLauncher"]["type"] == "K8sRunLauncher"


# ---- schedules and alerts ------------------------------------------------------------------------


def test_every_schedule_and_sensor_has_its_place_in_the_order() -> None:
    repository = _repository()
    names = {one.name for one in (*repository.schedule_defs, *repository.sensor_defs)}
    shown = re.findall(r"`(\w+(?:_schedule|_sensor|_recovery))`", _text(SCHEDULES))
    assert set(shown) == names


def test_the_alert_names_the_pipeline_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(SCHEDULES, "python")
    found: dict[str, Any] = {}
    exec(compile(code, SCHEDULES, "exec", dont_inherit=True), found)
    store = MemoryStore()
    Written(store, legacy_job("orders"), files=False).epochs(1)
    defs = build_arroyo_definitions(store.url)
    instance = dg.DagsterInstance.ephemeral()
    job = defs.resolve_job_def("arroyo_verify")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    sensor = found["defs"].get_sensor_def("arroyo_alerts")
    context = dg.build_run_status_sensor_context(
        sensor_name=sensor.name,
        dagster_instance=instance,
        dagster_run=result.dagster_run,
        dagster_event=[event for event in result.all_events if event.is_run_failure][-1],
    )
    sensor(context.for_run_failure())
    message = capsys.readouterr().out
    assert "arroyo_verify" in message
    assert "1 of 1 pipeline failed: orders: " in message
    assert "file-missing" in message
    assert "Next: " in message


def test_the_alerts_name_jobs_and_checks_that_exist() -> None:
    repository = _repository()
    alerts = _text(SCHEDULES).split("| A run of this job fails")[1]
    jobs = {job.name for job in repository.get_all_jobs()}
    rows = "".join(line for line in alerts.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", rows)) <= jobs
    checks = {key.name for key in repository.asset_graph.asset_check_keys}
    assert {"every_pipeline_known", "healthy"} <= checks & set(re.findall(r"`(\w+)`", alerts))


# ---- versions and stores -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shown"),
    [("dagster", "1.12"), ("pyspark", "3.5"), ("pyarrow", "20"), ("polars", "1.42")],
)
def test_the_versions_are_those_of_the_package(name: str, shown: str) -> None:
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    (wanted,) = (one for one in project["dependencies"] if re.match(rf"{name}>=", one))
    assert re.search(rf">={re.escape(shown)}(,|$)", wanted)
    assert re.search(rf"(?i)^\| {name} \| {re.escape(shown)} and newer", _text(VERSIONS), re.M)
    assert project["requires-python"] == ">=3.11"


def test_platforms_have_a_spark_of_the_matrix_whose_newest_is_the_locked_one() -> None:
    matrix, platforms = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        for table in _text(VERSIONS).split("## Versions of Spark")[1].split("\n\n")[1:4:2]
    )
    assert re.search(rf"(?m)^pyspark=={matrix[0][-1]} ", _text("requirements/dev.txt"))
    assert {row[2] for row in platforms[2:]} <= {one.rpartition(".")[0] for one in matrix[0][1:]}
    pages = {page for row in platforms for page in re.findall(r"\((.+)\.md\)", row[0])}
    assert pages == {"spark-emr", "spark-dataproc", "spark-databricks"}
    for page in pages:
        versions = re.findall(r"(?m)^\|[^|]+\| (\d\.\d)", _text(f"docs/operate/{page}.md"))
        assert set(versions) == {row[2] for row in platforms[2:]}


def test_the_tested_stores_are_those_of_the_contract_suite() -> None:
    listed = _text(VERSIONS).split("run on: ")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z0-9-]+)`", listed)) - {"make servers"} == set(BACKENDS)
    assert parse_url("s3://bucket/checkpoints").backend == "s3"


# ---- sizing --------------------------------------------------------------------------------------

POLLS = re.compile(r"^\| (\d+) \| (\d+) s \| (\d+) \| ([\d,]+) \|$", re.MULTILINE)


def test_the_requests_of_a_poll_are_those_of_the_code() -> None:
    rows = POLLS.findall(_text(SIZING))
    assert len(rows) >= 5
    for number, interval, lists, gets in rows:
        jobs, seconds = int(number), int(interval)
        assert seconds == polling.poll_interval_seconds(jobs)
        tick = polling.quiet_poll(jobs, seconds)
        assert (tick.lists, tick.gets) == (int(lists), int(gets.replace(",", "")))
    assert f"once in {polling.TURN_SECONDS // 60} minutes" in _text(SIZING)
