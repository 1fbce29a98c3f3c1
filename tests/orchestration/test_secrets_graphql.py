"""No page, launchpad or record of Dagster shows a secret: GraphQL and the database are searched."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster import redaction
from arroyo_dagster.orchestration import failures
from arroyo_dagster.state import MemoryStore
from arroyo_dagster.state.storage.remote import obstore_options
from tests.graphql_walk import REPOSITORY, Word, answers, served
from tests.jobs import run_word_job
from tests.journeys.test_secrets import QUICK, SENT, echoing
from tests.orchestration.terminating import events_of
from tests.secrets import CANARY, assert_no_canary

SECRETS = {
    "CANARY_S3": CANARY,
    "CANARY_SESSION": SENT,
    "CANARY_API": SENT,
    "CANARY_SPARK": CANARY,
    "CANARY_REMOTE": f"sc://somewhere:15002/;token={SENT}",
}
ASKED_JOBS = ("arroyo_verify", "arroyo_fleet", "arroyo_compaction")

# What showed secrets once, and what it shows now.
PAGES = {
    "topLevelResourceDetailsOrError": "CANARY_S3",
    "allTopLevelResourceDetailsOrError": "CANARY_S3",
    "resourcesOrError": "CANARY_S3",
    "runConfigSchemaOrError": "CANARY_S3",
    "pipelineSnapshotOrError": '"name": "arroyo_verify"',
    "runOrError": "eventConnection",
    "logsForRun": "arroyo_verify",
    "sensorOrError": "arroyo_checkpoint_sensor",
}

COMPONENT = """
import dagster as dg
from arroyo_dagster.orchestration.component import ArroyoStateComponent

defs = dg.build_defs_for_component(ArroyoStateComponent.resolve_from_yaml('''
checkpoint_url: {url}
storage_options:
  region: here
  access_key_id: somebody
  secret_access_key: {s3}
  client_kwargs: {{aws_session_token: {session}}}
mode: maintain
advanced: {{maintenance: {{engine: in-process}}}}
'''))
"""
PYTHON = """
import dagster as dg
from arroyo_dagster.orchestration import MaintenanceOptions, OrphansConfig
from arroyo_dagster.orchestration.definitions import ArroyoOptions, build_arroyo_definitions
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline, PipelineList
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource

defs = build_arroyo_definitions(
    ArroyoStateStore(
        checkpoint_url="{url}",
        storage_options={{
            "region": "here",
            "access_key_id": "somebody",
            "secret_access_key": dg.EnvVar("CANARY_S3"),
            "session_token": dg.EnvVar("CANARY_SESSION"),
        }},
        arroyo_api_url="http://127.0.0.1:9",
        arroyo_api_token=dg.EnvVar("CANARY_API"),
    ),
    mode="maintain",
    pipelines=PipelineList(
        "s3://list", (ListedPipeline("words/main", ("words", "main"), managed=True),)
    ),
    options=ArroyoOptions(
        spark=SparkSessionResource(
            conf={{"spark.hadoop.fs.s3a.secret.key": dg.EnvVar("CANARY_SPARK")}},
            remote_url=dg.EnvVar("CANARY_REMOTE"),
        ),
        maintenance=MaintenanceOptions(orphans=OrphansConfig()),
    ),
)
"""


def _definitions(way: str, url: str) -> str:
    if way == "python":
        return PYTHON.format(url=url)
    if way == "template":
        names = {"s3": "'{{ env.CANARY_S3 }}'", "session": "\"{{ env('CANARY_SESSION') }}\""}
    else:
        names = {"s3": "{env: CANARY_S3}", "session": "{env: CANARY_SESSION}"}
    return COMPONENT.format(url=url, **names)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, retries_at_once: None) -> None:
    monkeypatch.setattr(redaction, "_KNOWN", set())
    monkeypatch.setattr(obstore_options, "patience_of", lambda options, url: QUICK)
    monkeypatch.setattr(failures, "MAX_RETRIES", 0)
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with echoing() as port:
        yield port


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("way", "situation", "only"),
    [
        ("template", "works", PAGES),
        pytest.param("env", "works", PAGES, marks=pytest.mark.soak),
        ("python", "echo", PAGES),
        pytest.param("python", "echo", None, marks=pytest.mark.soak),  # every field: 35 s
    ],
)
def test_graphql_and_the_database_hold_no_secret(
    way: str, situation: str, only: Any, echo: int, tmp_path: Path
) -> None:
    run_word_job(MemoryStore("secrets-of-graphql"), rows=8, sinks=0, keep_epochs=None)
    url = "memory://secrets-of-graphql"
    if situation == "echo":
        url = f"s3::http://127.0.0.1:{echo}/bucket/k"
    file = tmp_path / "canaries.py"
    file.write_text(_definitions(way, url))
    with (
        dg.instance_for_test(temp_dir=str(tmp_path)) as instance,
        served(instance, file) as context,
    ):
        arguments = _arguments(_ran(instance, file))
        told = dict(answers(context, arguments, only))
        for field, text in told.items():
            assert_no_canary(f"{field}: {text}")
        _assert_pages_are_there(told)
        assert only or sum(len(text) > 200 for text in told.values()) > 30
    for text in _stored(tmp_path):
        assert_no_canary(text)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_step_that_is_retried_tells_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "MAX_RETRIES", 1)
    file = tmp_path / "canaries.py"
    with echoing(status=503) as port, dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        file.write_text(_definitions("python", f"s3::http://127.0.0.1:{port}/bucket/k"))
        run = _ran(instance, file, ["arroyo_orphans_gc"])
        assert {"STEP_UP_FOR_RETRY", "STEP_RESTARTED"} <= set(events_of(instance, run))
        with served(instance, file) as context:
            told = dict(answers(context, _arguments(run), ("logsForRun", "runOrError")))
    for text in (*told.values(), *_stored(tmp_path)):
        assert_no_canary(text)


def _ran(instance: dg.DagsterInstance, file: Path, jobs: Sequence[str] = ASKED_JOBS) -> str:
    """Run some jobs and ticks; the id of the run of the first job."""
    import runpy

    defs = runpy.run_path(str(file))["defs"]
    found = ""
    for name in jobs:
        job = defs.resolve_job_def(name)
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        found = found or result.run_id
    return found


def _arguments(run_id: str) -> dict[str, Any]:
    job = {**REPOSITORY, "pipelineName": ASKED_JOBS[0], "jobName": ASKED_JOBS[0]}
    del job["jobName"]
    key = {"path": ["arroyo", "words", "main", "checkpoint"]}
    return {
        "repositorySelector": REPOSITORY,
        "repositoryID": "",
        "name": "canaries",
        "locationName": "canaries",
        "params": job,
        "pipeline": job,
        "pipelineSelector": job,
        "selector": job,
        "mode": "default",
        "pipelineName": ASKED_JOBS[0],
        "scheduleSelector": {**REPOSITORY, "scheduleName": "arroyo_verify_schedule"},
        "sensorSelector": {**REPOSITORY, "sensorName": "arroyo_checkpoint_sensor"},
        "instigationSelector": {**REPOSITORY, "name": "arroyo_checkpoint_sensor"},
        "resourceSelector": {**REPOSITORY, "resourceName": "arroyo_store"},
        "runId": run_id,
        "limit": 100,
        "view": Word("ROOTS"),
        "assetKey": key,
        "assetKeys": [key],
        "logKey": [run_id, "compute_logs", "arroyo_verify"],
        "pipelineSnapshotOrError.activePipelineSelector": job,
        "tags": [],
    }


def _assert_pages_are_there(told: dict[str, str]) -> None:
    """The pages that showed secrets once were really looked at, and name variables instead."""
    for field, text in PAGES.items():
        assert text in told[field], field


def _stored(folder: Path) -> Iterator[str]:
    """Every value of every database below `folder`, and every other file, as text."""
    found = 0
    for path in folder.rglob("*"):
        if path.name == "canaries.py" or not path.is_file():
            continue
        if path.suffix != ".db":
            yield path.read_bytes().decode(errors="replace")
            continue
        with sqlite3.connect(path) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (table,) in tables.fetchall():
                for row in database.execute(f'SELECT * FROM "{table}"'):
                    found += 1
                    yield " ".join(map(_text, row))
    assert found > 20


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        return json.dumps(value, ensure_ascii=False, default=str)
    try:
        return zlib.decompress(value).decode(errors="replace")
    except zlib.error:
        return value.decode(errors="replace")
