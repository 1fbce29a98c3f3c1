"""No event, log, tag, cursor or error of Dagster repeats a secret, whatever fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._serdes import serialize_value

from arroyo_dagster import redaction
from arroyo_dagster.orchestration import (
    ArroyoOptions,
    ArroyoStateComponent,
    ArroyoStateStore,
    DeadJobsConfig,
    ForkConfig,
    InProcessRunner,
    MaintenanceOptions,
    MaintenanceWindow,
    OrphansConfig,
    PipelineList,
    SparkSessionResource,
    StateFork,
    build_arroyo_definitions,
    failures,
)
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.state import MemoryStore, TableExport
from arroyo_dagster.state.storage.remote import obstore_options
from tests.jobs import run_word_job
from tests.journeys.test_secrets import DATAFLOW, QUICK, SENT, echoing
from tests.secrets import CANARY, assert_no_canary
from tests.shares import all_but

KEY = "words/main"
EXPORT = TableExport(
    name="rows", jobs="*", operator="keep", table="rows", target="memory://secrets-of-exports"
)
CONFIG = {
    "arroyo_windows": {"ops": {"arroyo_window": {"config": {"jobs": [KEY]}}}},
    "arroyo_fork": {"ops": {"arroyo_forked_state": {"config": {"source": KEY}}}},
}

# Their names say nothing of secrets: what is hidden is not hidden for the name of a variable.
VARIABLES = {
    "CANARY_ONE": CANARY,
    "CANARY_SENT": SENT,
    "CANARY_USER_INFO": f"https://user:{CANARY}@host/bucket",
    "CANARY_API": f"http://user:{CANARY}@127.0.0.1:9",
    "CANARY_DATABASE": f"/nowhere/state.sqlite?key={CANARY}",
    "CANARY_POSTGRES": f"postgresql://user:{CANARY}@127.0.0.1:9/arroyo",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, retries_at_once: None) -> None:
    monkeypatch.setattr(redaction, "_KNOWN", set())
    monkeypatch.setattr(obstore_options, "patience_of", lambda options, url: QUICK)
    monkeypatch.setattr(failures, "MAX_RETRIES", 1)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with echoing() as port:
        yield port


def _resource(situation: str, port: int) -> ArroyoStateStore:
    options = {
        "access_key_id": "somebody",
        "secret_access_key": dg.EnvVar("CANARY_ONE"),
        "session_token": dg.EnvVar("CANARY_SENT"),
        "region": "here",
    }
    shared: dict[str, Any] = {
        "arroyo_api_url": f"http://127.0.0.1:{port}",
        "arroyo_api_token": dg.EnvVar("CANARY_SENT"),
    }
    urls = {
        "dead": "s3::http://127.0.0.1:9/bucket/k",
        "echo": f"s3::http://127.0.0.1:{port}/bucket/k",
        "user-info": dg.EnvVar("CANARY_USER_INFO"),
    }
    if situation == "api":
        shared["arroyo_api_url"] = dg.EnvVar("CANARY_API")
    if situation == "database":
        shared["arroyo_database"] = dg.EnvVar("CANARY_DATABASE")
    if situation == "postgres":
        shared["arroyo_database"] = dg.EnvVar("CANARY_POSTGRES")
    remote = situation in ("dead", "echo")
    return ArroyoStateStore(
        checkpoint_url=urls.get(situation, "memory://secrets-of-dagster"),
        storage_options=options if remote else {},
        **shared,
    )


def _definitions(resource: ArroyoStateStore, *, listed: bool = False) -> dg.Definitions:
    """The definitions of the pipelines that a listing finds, or of those of an earlier one."""
    pipelines = PipelineList(
        "s3://of/the-list",
        (
            ListedPipeline(KEY, ("words", "main"), managed=True),
            ListedPipeline("words/other", ("words", "other"), managed=False),
        ),
    )
    return build_arroyo_definitions(
        resource,
        pipelines=pipelines if listed else None,
        mode="maintain",
        options=ArroyoOptions(
            runner=InProcessRunner(),
            dataflows=[DATAFLOW],
            window=MaintenanceWindow(jobs=[KEY], between="00:00-23:59"),
            fork=StateFork(nightly=ForkConfig(source=KEY), job="words/other"),
            exports=[EXPORT],
            maintenance=MaintenanceOptions(orphans=OrphansConfig(), dead_jobs=DeadJobsConfig()),
        ),
    )


SITUATIONS = ["works", "dead", "echo", "user-info", "api", "database", "postgres"]


@pytest.mark.parametrize("situation", all_but(SITUATIONS, ["dead", "user-info", "postgres"]))
def test_nothing_that_dagster_stores_repeats_a_secret(
    situation: str, echo: int, caplog: pytest.LogCaptureFixture
) -> None:
    run_word_job(MemoryStore("secrets-of-dagster"), rows=8, sinks=0, keep_epochs=None)
    defs = _definitions(_resource(situation, echo), listed=True)
    found = _definitions(_resource(situation, echo))
    instance = dg.DagsterInstance.ephemeral()
    jobs = [*defs.resolve_all_job_defs(), found.resolve_job_def("arroyo_fleet")]
    jobs = [job for job in jobs if not job.name.startswith("__")]
    for job in jobs:
        # A fork changes one pipeline.
        other = [dg.AssetKey(["arroyo", "words", "other", "forked_state"])]
        result = job.execute_in_process(
            instance=instance,
            asset_selection=other if job.name == "arroyo_fork" else None,
            run_config=CONFIG.get(job.name),
            raise_on_error=False,
        )
        for entry in instance.all_logs(result.run_id):
            assert_no_canary(f"{job.name}: {serialize_value(entry)} {entry.message}")
        run = instance.get_run_by_id(result.run_id)
        assert run is not None
        assert_no_canary(serialize_value(run))
    assert len(jobs) > 9
    assert_no_canary(caplog.text)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_sensor_and_no_schedule_repeats_a_secret(
    situation: str, echo: int, caplog: pytest.LogCaptureFixture
) -> None:
    run_word_job(MemoryStore("secrets-of-dagster"), rows=8, sinks=0, keep_epochs=None)
    defs = _definitions(_resource(situation, echo), listed=True)
    repository = defs.get_repository_def()
    instance = dg.DagsterInstance.ephemeral()
    for sensor in repository.sensor_defs:
        with dg.build_sensor_context(instance=instance, definitions=defs) as sensed:
            assert_no_canary(_told_by(lambda s=sensor, c=sensed: s.evaluate_tick(c)))
    for schedule in repository.schedule_defs:
        with dg.build_schedule_context(instance=instance, repository_def=repository) as due:
            assert_no_canary(_told_by(lambda s=schedule, c=due: s.evaluate_tick(c)))
    assert_no_canary(caplog.text)


def _told_by(tick: Any) -> str:
    """What a tick gives, or the error that Dagster would store for it."""
    import sys

    from dagster._utils.error import serializable_error_info_from_exc_info

    try:
        return repr(tick())
    except Exception:
        return serializable_error_info_from_exc_info(sys.exc_info()).to_string()


def test_the_text_of_what_holds_secrets_shows_none(echo: int) -> None:
    for one in (
        _resource("echo", echo),
        _resource("echo", echo).writable(),
        SparkSessionResource(conf={"fs.s3a.secret.key": CANARY}),
        ArroyoStateStore(checkpoint_url="s3://bucket/k", arroyo_api_token=CANARY),
        ArroyoStateComponent(
            checkpoint_url="s3://bucket/k", storage_options={"secret_access_key": CANARY}
        ),
    ):
        assert_no_canary(repr(one) + str(one))
