"""The checks of pipelines: red where it broke, at once, once a day, and never only for a moment.
A verdict stays when the sensor reports something newer. The requests are those of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.engine.in_process import run_pipeline
from arroyo_dagster.errors import StorageError
from arroyo_dagster.orchestration import PipelineList, VerifyOptions
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.verify.definitions import verify_cron
from arroyo_dagster.orchestration.verify.verdict import reported_epochs
from arroyo_dagster.state import Epoch, ParquetBackend
from arroyo_dagster.state.operations.catalog.health import JobReadings, read_figures
from arroyo_dagster.state.planning.polling import Requests
from arroyo_dagster.state.storage import open_store
from tests.documentation import PROJECT
from tests.fleets import Written, protocol_job
from tests.jobs import run_word_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.launching import InProcess, in_process
from tests.orchestration.results import JOB, KEY, PATHS, configured, failure
from tests.stores import Counting, Wrapper
from tests.word_services import random_words, words_services

VERIFY, SCHEDULE = "arroyo_verify", "arroyo_verify_schedule"


def break_newest(deployed: Deployment) -> str:
    """Delete a file that the newest epoch lists."""
    path = ParquetBackend(deployed.store, PATHS).load().paths[0]
    deployed.store.delete_many([path])
    return path


def requested(deployed: Deployment) -> list[str]:
    """The jobs that the schedule asks to verify."""
    requests = deployed.due(SCHEDULE).run_requests
    if not requests:
        return []
    return list(requests[0].run_config["ops"]["arroyo_verify_op"]["config"]["pipelines"])


def test_a_pipeline_is_verified_once_and_again_when_it_has_a_new_epoch(at_rest: Deployment) -> None:
    assert requested(at_rest) == [KEY]
    assert at_rest.launch_due(SCHEDULE).success
    for name in ("restorable", "healthy"):
        assert at_rest.check(KEY, name).passed
    assert requested(at_rest) == []
    run_word_job(at_rest.store, **JOB, max_epochs=2)
    assert requested(at_rest) == [KEY]


def test_a_file_deleted_below_an_idle_job_is_red_within_the_interval_of_the_schedule(
    at_rest: Deployment,
) -> None:
    assert at_rest.launch_due(SCHEDULE).success
    path = break_newest(at_rest)
    result = at_rest.launch_due(SCHEDULE)
    assert not result.success
    assert KEY in failure(result).description
    verdict = at_rest.check(KEY)
    assert verdict.is_error
    assert path in verdict.description
    # Nothing changed: one alarm, not one each tick; and the check stays red.
    assert requested(at_rest) == []
    assert at_rest.run(VERIFY).success
    assert at_rest.check(KEY).is_error


def test_a_broken_pipeline_alarms_again_after_a_day(at_rest: Deployment) -> None:
    break_newest(at_rest)
    at_rest.build(verify=VerifyOptions(audit_after=0.0))
    assert [at_rest.launch_due(SCHEDULE).success for _ in range(2)] == [False, False]


def test_one_healthy_pipeline_does_not_hide_a_sick_one_nor_the_sick_one_the_others(
    at_rest: Deployment,
) -> None:
    run_word_job(at_rest.store, **JOB, job="other", max_epochs=8)
    at_rest.build()
    break_newest(at_rest)
    result = at_rest.launch_due(SCHEDULE)
    assert not result.success
    assert "1 of 2 pipelines failed: words/main: " in failure(result).description
    assert at_rest.check("words/other").passed
    assert not at_rest.check(KEY).passed


class Touched(Wrapper):
    """A store in which one object has another etag than before."""

    path: str | None = None

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Any:
        for one in self.inner.list(prefix, start_after=start_after):
            yield replace(one, etag="other") if one.path == self.path else one


def test_an_object_that_changed_since_it_was_verified_is_an_error(at_rest: Deployment) -> None:
    store = at_rest.wrap(Touched)
    assert at_rest.launch_due(SCHEDULE).success
    store.path = ParquetBackend(at_rest.store, PATHS).load().paths[0]
    assert not at_rest.launch_due(SCHEDULE).success
    assert "has another size or etag" in at_rest.check(KEY).description


def test_a_pipeline_whose_lost_file_was_restored_is_green_and_audited(
    at_rest: Deployment,
) -> None:
    (path, *_) = ParquetBackend(at_rest.store, PATHS).load().paths
    data = at_rest.store.read(path)
    assert at_rest.run(VERIFY).success
    at_rest.store.delete_many([path])
    assert not at_rest.run(VERIFY).success
    at_rest.store.put(path, data)
    assert at_rest.run(VERIFY).success
    last = at_rest.check(KEY)
    assert last.passed, last.description
    assert last.metadata["arroyo/level"] == 4


class Unanswering(Wrapper):
    """A store that does not list one job."""

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Any:
        if prefix == "words/main":
            raise StorageError("the store does not answer", retryable=False)
        return self.inner.list(prefix, start_after=start_after)


@pytest.mark.usefixtures("retries_at_once")
def test_a_pipeline_that_cannot_be_read_fails_the_run_and_is_named(at_rest: Deployment) -> None:
    run_word_job(at_rest.store, **JOB, job="other", max_epochs=2)
    at_rest.build()
    at_rest.wrap(Unanswering)
    result = at_rest.run(VERIFY)
    assert not result.success
    assert "words/main: " in failure(result).description
    assert "the store does not answer" in failure(result).description
    assert at_rest.check("words/other")


def test_a_job_without_an_epoch_is_not_red(deployed: Deployment) -> None:
    Written(deployed.store, protocol_job("words"))
    deployed.build()
    assert deployed.run(VERIFY).success
    assert not deployed.check("words/main").is_error


def test_many_pipelines_are_verified_less_often() -> None:
    assert verify_cron(1) == verify_cron(100) == "*/15 * * * *"
    assert verify_cron(300) == "7 * * * *" or verify_cron(300).startswith("*/30")
    assert verify_cron(1000) == "7 */2 * * *"


def test_figures_of_epochs_that_are_gone_are_those_that_the_sensor_reported(
    at_rest: Deployment,
) -> None:
    at_rest.tick()
    key = dg.AssetKey(["arroyo", "words", "main", "checkpoint"])
    (figures,) = reported_epochs(at_rest.instance, key)
    (stored,) = read_figures(at_rest.store, PATHS, [Epoch(figures.epoch)], JobReadings())
    assert replace(figures, new_files=None, new_size_bytes=None) == replace(
        stored, new_files=None, new_size_bytes=None
    )
    assert figures.tables


DEFINITIONS = """
import dagster as dg
from arroyo_dagster import ArroyoOptions, SensorOptions, VerifyOptions, build_arroyo_definitions
from tests.word_services import words_dataflow

ours = build_arroyo_definitions(
    {url!r},
    running=True,
    options=ArroyoOptions(
        sensor=SensorOptions(interval_seconds=1),
        verify=VerifyOptions(audit_after=1e12),  # level 1: what the files hold is made up
        dataflows=[words_dataflow()],
    ),
)
defs = dg.Definitions.merge(ours, dg.Definitions(executor=dg.in_process_executor))
"""
COUNTS = ["sdf", "tests", "words", "state", "count", "counts"]
ORDERS = ["arroyo", "orders", "main", "checkpoint"]
SDF_CHECKS = ("keys_unique", "not_stale", "restorable", "ttl_effective")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[InProcess]:
    store = open_store(str(tmp_path / "checkpoints"))
    Written(store, protocol_job("orders")).epochs(1)
    _count(tmp_path, 60)
    text = DEFINITIONS.format(url=str(tmp_path / "checkpoints"))
    with in_process(tmp_path, text) as found:
        found.tick()
        yield found


def _count(folder: Path, rows: int) -> None:
    store = open_store(str(folder / "checkpoints"))
    (count, *_) = words_services(store, random_words(rows, 1), per_epoch=60)
    run_pipeline(count, store)


def test_verdicts_on_states_stay_with_newer_epochs_of_their_owner(server: InProcess) -> None:
    green = dict.fromkeys(SDF_CHECKS, ("SUCCEEDED", "WARN"))
    server.launch("sdf_tests_words", {})
    reported, shown = server.checks(COUNTS)
    assert shown == green
    _count(server.folder, 180)
    server.tick()
    newer, still = server.checks(COUNTS)
    assert newer > reported
    assert still == green


def test_verdicts_on_a_state_that_their_run_materialized_stay(server: InProcess) -> None:
    _count(server.folder, 180)
    run = server.launch("sdf_tests_words", {})
    _, shown = server.checks(COUNTS)
    assert {status for status, _ in shown.values()} == {"SUCCEEDED"}
    made = server.instance.get_latest_materialization_event(dg.AssetKey(COUNTS))
    assert made is not None
    assert made.run_id == run
    server.tick()
    _count(server.folder, 240)
    server.tick()
    assert server.checks(COUNTS)[1] == shown


def test_verdicts_of_checks_that_a_user_executed_stay(server: InProcess) -> None:
    checks = [(ORDERS, name) for name in ("restorable", "healthy")]
    server.launch("__ASSET_JOB", {}, checks=checks)
    reported, shown = server.checks(ORDERS)
    assert shown == {"restorable": ("SUCCEEDED", "ERROR"), "healthy": ("SUCCEEDED", "WARN")}
    Written(open_store(str(server.folder / "checkpoints")), protocol_job("orders")).epochs(2)
    server.tick()
    newer, still = server.checks(ORDERS)
    assert newer > reported
    assert still == shown


PER_PIPELINE = {
    "verify": Requests(1, 0),
    "fleet": Requests(3, 2),
    "compaction": Requests(2, 2),
    "gc": Requests(1, 0),
}
"""The requests of a schedule for each pipeline, as the page on sizing shows them."""
DUE = Requests(14, 41)
"""At most those of a run of `arroyo_verify` for each pipeline that is due, with four epochs."""
PIPELINES = 4


def _made(counting: Counting) -> Requests:
    lists = counting.calls["list"] + counting.calls["list_dir"]
    return Requests(lists, counting.calls.total() - lists)


def _check(made: Requests, shown: Requests, row: str) -> None:
    # Besides those of each pipeline, a run lists the root some times.
    assert made.lists <= shown.lists * PIPELINES + 4, made
    assert made.gets <= shown.gets * PIPELINES + 1, made
    assert row in (PROJECT / "docs" / "operate" / "sizing.md").read_text()


@pytest.fixture
def jobs(deployed: Deployment) -> list[Written]:
    """Four pipelines with three epochs, which were verified, and reported."""
    jobs = [Written(deployed.store, protocol_job(f"p{at}")) for at in range(PIPELINES)]
    for job in jobs:
        job.epochs(3)
    roots = {str(job.paths.root): job.paths.root.split("/") for job in jobs}
    managed = [ListedPipeline(root, tuple(key), managed=True) for root, key in roots.items()]
    listed = PipelineList(
        deployed.store.url, tuple(managed), {one.root: one.key for one in managed}
    )
    # At level 1: what the files hold is made up.
    deployed.build(pipelines=listed, verify=VerifyOptions(audit_after=1e12))
    deployed.tick()
    assert deployed.run("arroyo_verify").success
    return jobs


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("name", PER_PIPELINE)
def test_a_schedule_makes_the_requests_that_the_page_shows(deployed: Deployment, name: str) -> None:
    counting = deployed.wrap(Counting)
    schedule = f"arroyo_{name}_schedule"
    if name == "fleet":
        deployed.run("arroyo_fleet")
    else:
        deployed.due(schedule)
    shown = PER_PIPELINE[name]
    made = _made(counting)
    assert (made.lists // PIPELINES, made.gets // PIPELINES) == (shown.lists, shown.gets)
    _check(made, shown, f"| `{schedule}` | {shown.lists} | {shown.gets} |")


def test_a_run_makes_the_requests_that_the_page_shows_for_what_is_due(
    deployed: Deployment, jobs: list[Written]
) -> None:
    for job in jobs:
        job.epochs(1)
    counting = deployed.wrap(Counting)
    config = {"pipelines": [str(job.paths.root) for job in jobs]}
    run = deployed.run("arroyo_verify", run_config=configured("arroyo_verify_op", **config))
    assert run.success
    row = "| a run of `arroyo_verify`, for a pipeline with four epochs that is due | "
    _check(_made(counting), DUE, f"{row}{DUE.lists} | {DUE.gets} |")
