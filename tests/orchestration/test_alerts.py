"""Alerts on failed runs: the first line says which job and which object, without secrets."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from arroyo_dagster import (
    DagsterArroyoTranslator,
    MaintenanceFailure,
    arroyo_assets,
    build_arroyo_definitions,
    build_failure_hook,
    build_failure_sensor,
)
from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.orchestration.failures import as_failure
from tests.fleets import Written, protocol_job

ONE = protocol_job("orders")

pytestmark = pytest.mark.usefixtures("retries_at_once")


def _alerted(deployed: Any, result: Any, **options: Any) -> list[MaintenanceFailure]:
    """What the sensor of a deployment reports of a failed run."""
    sent: list[MaintenanceFailure] = []
    sensor = build_failure_sensor(sent.append, **options)
    run = deployed.instance.get_run_by_id(result.run_id)
    events = [event for event in result.all_events if event.is_run_failure]
    # What Dagster passes to the sensor; in process nothing polls the run's events.
    context = dg.build_run_status_sensor_context(
        sensor_name=sensor.name,
        dagster_instance=deployed.instance,
        dagster_run=run,
        dagster_event=events[-1],
    )
    sensor(context.for_run_failure())
    return sent


def test_a_failed_run_of_a_deployment_names_the_job_and_the_object(deployed: Any) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(2)
    deployed.store.put(ONE.current_generation, b"{")
    deployed.tick()
    deployed.instance.add_dynamic_partitions("arroyo_jobs", [ONE.root])
    result = deployed.run("arroyo_gc", ONE.root)
    assert not result.success
    (failure,) = _alerted(deployed, result)
    assert "\n" not in failure.title
    assert failure.title.startswith("arroyo_gc failed: orders/main: ")
    assert "orders/main/current-generation.json" in failure.title
    assert (failure.dagster_job, failure.job, failure.run_id) == (
        "arroyo_gc",
        "orders/main",
        result.run_id,
    )
    assert failure.path == "orders/main/current-generation.json"
    assert failure.step is not None


@pytest.mark.parametrize(("deployment", "count"), [(None, 1), ("blue", 1), ("green", 0)])
def test_a_sensor_reports_the_runs_of_its_deployment(
    deployed: Any, deployment: str | None, count: int
) -> None:
    result = _run(deployed, "arroyo_blue_gc", StorageError("down", path="a/b"))
    assert len(_alerted(deployed, result, deployment=deployment)) == count
    assert len(_alerted(deployed, result, deployment="green", also=["arroyo_blue_gc"])) == 1


def _run(deployed: Any, name: str, error: Exception, **options: Any) -> Any:
    """Run a job that fails with an error."""

    @dg.op(name=f"{name}_op")
    def fails() -> None:
        with as_failure():
            raise error

    @dg.job(name=name, **options)
    def job() -> None:
        fails()

    return job.execute_in_process(instance=deployed.instance, raise_on_error=False)


def test_an_error_that_was_retried_and_one_of_another_library_are_described(deployed: Any) -> None:
    retried = _run(deployed, "arroyo_gc", StorageError("the store is down", path="a/b"))
    (failure,) = _alerted(deployed, retried)
    assert "the store is down" in failure.title
    assert "Failure:" not in failure.title
    (failure,) = _alerted(deployed, _run(deployed, "arroyo_gc", ZeroDivisionError("by zero")))
    assert failure.title == "arroyo_gc failed: ZeroDivisionError: by zero"


def test_no_secret_is_sent(deployed: Any) -> None:
    error = FormatError("broken https://user:canary@host/x", path="a/b", next_step="keep it")
    (failure,) = _alerted(deployed, _run(deployed, "arroyo_gc", error))
    assert "canary" not in repr(failure)
    assert failure.description.endswith("Next: keep it")
    assert "keep it" not in failure.title


def test_a_run_whose_process_was_killed_is_reported_too(deployed: Any) -> None:
    job = deployed.defs.resolve_job_def("arroyo_sync_partitions")
    run = deployed.instance.create_run_for_job(job, tags={"dagster/partition": ONE.root})
    event = deployed.instance.report_run_failed(run, "the worker died")
    run = deployed.instance.get_run_by_id(run.run_id)
    sent: list[MaintenanceFailure] = []
    sensor = build_failure_sensor(sent.append)
    context = dg.build_run_status_sensor_context(
        sensor_name=sensor.name,
        dagster_instance=deployed.instance,
        dagster_run=run,
        dagster_event=event,
    )
    sensor(context.for_run_failure())
    assert [one.title for one in sent] == [
        "arroyo_sync_partitions failed: orders/main: the worker died"
    ]
    assert sent[0].step is None


def test_a_run_from_the_page_of_an_asset_belongs_to_its_deployment(deployed: Any) -> None:
    class Renamed(DagsterArroyoTranslator):
        def get_asset_spec(self, props: Any) -> dg.AssetSpec:
            return super().get_asset_spec(props).replace_attributes(key=["state", props.table])

    key = dg.AssetKey(["state", "compacted_state"])
    defs = build_arroyo_definitions(deployed.resource, translator=Renamed())
    job = defs.resolve_implicit_global_asset_job_def()
    run = deployed.instance.create_run_for_job(job, asset_selection=frozenset({key}))
    event = deployed.instance.report_run_failed(run, "failed")
    sent: list[MaintenanceFailure] = []
    for translator, count in ((Renamed(), 1), (None, 0)):
        sent.clear()
        sensor = build_failure_sensor(sent.append, translator=translator)
        context = dg.build_run_status_sensor_context(
            sensor_name=sensor.name,
            dagster_instance=deployed.instance,
            dagster_run=run,
            dagster_event=event,
        )
        sensor(context.for_run_failure())
        assert len(sent) == count


def test_sensors_of_two_deployments_have_different_names() -> None:
    names = {build_failure_sensor(print, deployment=one).name for one in (None, "blue")}
    assert names == {"arroyo_failure_sensor", "arroyo_blue_failure_sensor"}
    sensor = build_failure_sensor(print)
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED


def test_a_hook_reports_a_failed_step_of_a_job_of_the_user(deployed: Any) -> None:
    sent: list[MaintenanceFailure] = []

    @arroyo_assets([dg.AssetSpec("own")])
    def own() -> None:
        raise FormatError("not a manifest", path="orders/main/x", next_step="keep it")

    job = dg.define_asset_job("mine", selection=["own"], hooks={build_failure_hook(sent.append)})
    deployed.instance.add_dynamic_partitions("arroyo_jobs", [ONE.root])
    defs = dg.Definitions.merge(
        build_arroyo_definitions(deployed.resource), dg.Definitions(assets=[own], jobs=[job])
    )
    defs.resolve_job_def("mine").execute_in_process(
        instance=deployed.instance, partition_key=ONE.root, raise_on_error=False
    )
    (failure,) = sent
    assert failure.title == "mine failed: orders/main: orders/main/x: not a manifest"
    assert failure.description.endswith("Next: keep it")
    assert (failure.step, failure.job) == ("own", ONE.root)
