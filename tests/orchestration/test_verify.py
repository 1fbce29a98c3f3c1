"""The checks of pipelines: red where it broke, at once, once a day, and never only for a moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.orchestration import VerifyOptions
from arroyo_dagster.orchestration.verify.definitions import verify_cron
from arroyo_dagster.orchestration.verify.verdict import reported_epochs
from arroyo_dagster.state import Epoch, ParquetBackend
from arroyo_dagster.state.operations.catalog.health import JobReadings, read_figures
from arroyo_dagster.state.storage.wrappers import Wrapper
from tests.fleets import Written, protocol_job
from tests.jobs import run_word_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import JOB, KEY, PATHS, failure

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


def test_a_red_check_stays_when_the_sensor_reports_newer_epochs(at_rest: Deployment) -> None:
    """Dagster hides results that are older than their asset, unless both are of one run."""
    at_rest.tick()
    break_newest(at_rest)
    assert not at_rest.launch_due(SCHEDULE).success
    key = dg.AssetKey(["arroyo", "words", "main", "checkpoint"])
    at_rest.instance.report_runless_asset_event(dg.AssetMaterialization(key))
    storage = at_rest.instance.event_log_storage
    check = dg.AssetCheckKey(key, "restorable")
    (record,) = storage.get_latest_asset_check_execution_by_key([check]).values()
    (newest,) = at_rest.instance.fetch_materializations(key, limit=1).records
    assert record.run_id == newest.run_id == ""


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
