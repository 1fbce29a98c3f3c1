"""Compaction and expiry as assets: what is shown, what stops a run, what a second run does."""

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.gc.assets import GcConfig
from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import InProcessRunner, MaintenanceRunner
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.compaction import RowsDigest
from arroyo_dagster.state.model.layout import is_compacted
from arroyo_dagster.state.operations.compaction.execute import merge_here
from arroyo_dagster.state.operations.compaction.job import run_compaction
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.jobs import listing, run_word_job, state_of, word_job

JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
    "sinks": 0,
}
PATHS = word_job(None, **JOB).paths  # type: ignore[arg-type]
KEY = PATHS.root
FULL = {"ops": {"arroyo_compacted_state": {"config": {"policy": "full", "wait_seconds": 0.0}}}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://maintenance-{tmp_path.name}"


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, **JOB, max_epochs=8)
    return found


@pytest.fixture
def instance(instance: dg.DagsterInstance) -> dg.DagsterInstance:
    instance.add_dynamic_partitions("arroyo_jobs", [KEY])
    return instance


def resource(url: str, tmp_path: Path) -> ArroyoStateStore:
    return ArroyoStateStore(checkpoint_url=url, catalogue_url=str(tmp_path / "catalogue"))


def definitions(url: str, tmp_path: Path, **options: Any) -> dg.Definitions:
    options.setdefault("runner", InProcessRunner())
    return build_arroyo_definitions(resource(url, tmp_path), **options)


def run(
    defs: dg.Definitions, job: str, instance: dg.DagsterInstance, config: Any = None
) -> dg.ExecuteInProcessResult:
    return defs.resolve_job_def(job).execute_in_process(
        instance=instance, partition_key=KEY, run_config=config, raise_on_error=False
    )


def checks_of(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {one.check_name: one.passed for one in result.get_asset_check_evaluations()}


def first_line(result: dg.ExecuteInProcessResult) -> str:
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert failed.step_failure_data.user_failure_data is not None
    return str(failed.step_failure_data.user_failure_data.description)


def test_a_job_at_rest_is_compacted_and_a_second_run_materialises_nothing(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    defs = definitions(url, tmp_path)
    before = state_of(store, word_job(store, **JOB))
    result = run(defs, "arroyo_compaction", instance, FULL)
    assert result.success
    assert checks_of(result) == {"row_parity": True, "restorable": True, "effective": True}
    (event,) = result.get_asset_materialization_events()
    shown = {name: one.value for name, one in event.materialization.metadata.items()}
    assert event.partition == KEY
    assert shown["arroyo/taken_over_at_epoch"] == 9
    before_files, after_files = map(int, shown["files"].split(" → "))
    assert before_files > after_files
    assert shown["forecast"].startswith(f"{after_files} files, ")
    assert "merges" in shown
    before.pop("")
    after = state_of(store, word_job(store, **JOB))
    after.pop("")
    assert after == before
    objects = listing(store)
    again = run(defs, "arroyo_compaction", instance, FULL)
    assert again.success
    assert not again.get_asset_materialization_events()
    assert checks_of(again) == {"restorable": True}  # nothing was merged: no pass over nothing
    assert listing(store) == objects


def test_a_dry_run_changes_and_materialises_nothing(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    objects = listing(store)
    defs = definitions(url, tmp_path)
    config = {"ops": {"arroyo_compacted_state": {"config": {"policy": "full", "dry_run": True}}}}
    result = run(defs, "arroyo_compaction", instance, config)
    assert result.success
    assert not result.get_asset_materialization_events()
    assert listing(store) == objects


class Lossy(InProcessRunner):
    """Loses a row on the way."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        def lose(held: Any, tasks: Any, on_bytes: Any) -> Any:
            for outcome in merge_here(held, tasks):
                yield replace(outcome, after=RowsDigest(outcome.after.rows - 1, 5))

        return run_compaction(store, paths, settings, replace(options, run=lose))


def test_a_merge_that_loses_a_row_fails_the_check_and_the_run_and_publishes_nothing(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    epochs = ParquetBackend(store, PATHS).epochs()
    defs = definitions(url, tmp_path, runner=Lossy())
    result = run(defs, "arroyo_compaction", instance, FULL)
    assert not result.success
    assert checks_of(result) == {"row_parity": False}
    assert not result.get_asset_materialization_events()
    assert "would not restore the rows of the files they replace," in first_line(result)
    assert "words/main" in first_line(result)
    assert "Next:" in first_line(result)
    assert ParquetBackend(store, PATHS).epochs() == epochs


def test_a_failed_runs_first_line_says_what_happened_to_what_and_what_to_do(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    gone = ParquetBackend(store, PATHS).load().paths[0]
    store.delete_many([gone])
    result = run(definitions(url, tmp_path), "arroyo_compaction", instance, FULL)
    assert not result.success
    line = first_line(result)
    assert "data files are missing" in line
    assert gone in line
    assert "Next: restore the file" in line


class Failing(MaintenanceRunner):
    """A store that does not answer now."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        raise StorageError("the store does not answer", url=store.url)

    def run_gc(self, store: Any, paths: Any, request: Any, options: Any, *, plan: Any) -> Any:
        raise StorageError("the store does not answer", url=store.url, retryable=False)


def test_what_does_not_heal_is_not_tried_again(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    defs = definitions(url, tmp_path, runner=Failing())
    config = {"ops": {"arroyo_retained_epochs": {"config": {"keep_epochs": 3, "dry_run": False}}}}
    result = run(defs, "arroyo_gc", instance, config)
    assert not [event for event in result.all_events if event.is_step_up_for_retry]
    assert "does not answer" in first_line(result)


@pytest.mark.usefixtures("retries_at_once")
def test_what_may_heal_is_tried_twice_more_and_then_says_why_it_failed(
    url: str,
    store: ObjectStore,
    instance: dg.DagsterInstance,
    tmp_path: Path,
) -> None:
    defs = definitions(url, tmp_path, runner=Failing())
    result = run(defs, "arroyo_compaction", instance, FULL)
    assert not result.success
    retries = [event for event in result.all_events if event.is_step_up_for_retry]
    assert len(retries) == 2
    assert "the store does not answer" in retries[0].step_retry_data.error.to_string()
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    shown = failed.step_failure_data.user_failure_data
    assert "the store does not answer" in first_line(result)
    assert shown.metadata["arroyo/url"].value == url
    assert "Exceeded max_retries of 2" in failed.step_failure_data.error.message
    assert "the store does not answer" in failed.step_failure_data.error_display_string


class Healing(InProcessRunner):
    """A store that does not answer at first."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        if not _HEALED:
            _HEALED.append(True)
            raise StorageError("the store does not answer", url=store.url)
        return super().run_compaction(store, paths, settings, options)


_HEALED: list[bool] = []


@pytest.mark.usefixtures("retries_at_once")
def test_what_heals_is_done_by_the_second_attempt(
    url: str,
    store: ObjectStore,
    instance: dg.DagsterInstance,
    tmp_path: Path,
) -> None:
    _HEALED.clear()
    result = run(definitions(url, tmp_path, runner=Healing()), "arroyo_compaction", instance, FULL)
    assert result.success
    assert len(result.get_asset_materialization_events()) == 1
    assert sum(event.is_step_up_for_retry for event in result.all_events) == 1


def test_no_step_has_a_retry_policy(url: str, tmp_path: Path) -> None:
    jobs = definitions(url, tmp_path).resolve_all_job_defs()
    nodes = [node for job in jobs for node in job.nodes_in_topological_order]
    assert nodes
    assert not [node.name for node in nodes if node.definition.retry_policy is not None]


def test_a_compaction_that_waits_to_be_taken_over_is_told_of(
    url: str, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    run_word_job(open_store(url), **JOB, max_epochs=8)
    ParquetBackend(open_store(url), PATHS).start()  # as a run does that has written nothing yet
    defs = definitions(url, tmp_path)
    assert run(defs, "arroyo_compaction", instance, FULL).success
    again = run(defs, "arroyo_compaction", instance, FULL)
    logs = [entry.user_message for entry in instance.all_logs(again.run_id)]
    (line,) = [line for line in logs if line.startswith("nothing")]
    assert "1 compactions wait until the job adopts them" in line
    assert "compactions/" in line
    assert "one file or none" not in line


def test_schedules_ask_the_store_and_run_where_there_is_enough(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    options = MaintenanceOptions(
        min_backlog=8,
        compaction=CompactionConfig(policy="full", wait_seconds=0.0),
        gc=GcConfig(keep_epochs=3, dry_run=False),
    )
    defs = definitions(url, tmp_path, maintenance=options)
    at = dt.datetime(2026, 1, 1, 5, 17, tzinfo=dt.UTC)

    def tick(name: str) -> Any:
        with (
            dg.build_schedule_context(
                instance=instance,
                scheduled_execution_time=at,
                repository_def=defs.get_repository_def(),
                resources={"arroyo_store": resource(url, tmp_path)},
            ) as context,
            dg.partition_loading_context(dynamic_partitions_store=instance),
        ):
            return defs.resolve_schedule_def(name).evaluate_tick(context)

    for name in ("refresh", "compaction", "gc"):
        (request,) = tick(f"arroyo_{name}_schedule").run_requests
        assert request.run_key is None
        assert request.run_config["ops"][f"arroyo_{name}_fleet_op"]["config"]["jobs"] == [KEY]
        done = defs.resolve_job_def(f"arroyo_{name}_fleet").execute_in_process(
            instance=instance, run_config=request.run_config
        )
        assert {one.partition for one in done.get_asset_materialization_events()} == {KEY}
        after = tick(f"arroyo_{name}_schedule")
        assert not after.run_requests
        assert "nothing due" in str(after.skip_message)
    assert any(map(is_compacted, ParquetBackend(store, PATHS).load().paths))


def test_a_compaction_shows_its_forecast_beside_the_outcome_and_its_progress(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    result = run(definitions(url, tmp_path), "arroyo_compaction", instance, FULL)
    (event,) = result.get_asset_materialization_events()
    shown = {name: one.value for name, one in event.materialization.metadata.items()}
    opened, after = map(int, shown["files opened by a subtask"].split(" → "))
    assert after < opened
    assert shown["forecast"].endswith(
        f", {after} opened by a subtask; the outcome differs by +0.0% in size"
    )
    assert list(shown)[:5] == ["files", "size", "rows", "files opened by a subtask", "forecast"]
    logs = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert any(line.startswith("merge: 100%, ") for line in logs)


class Idle(InProcessRunner):
    """Forecasts too much."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        outcome = super().run_compaction(store, paths, settings, options)
        few = replace(outcome.plan.after, files=1)
        return replace(outcome, plan=replace(outcome.plan, after=few))


def test_less_than_was_forecast_is_a_warning_that_stops_nothing(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    result = run(definitions(url, tmp_path, runner=Idle()), "arroyo_compaction", instance, FULL)
    assert result.success
    assert not checks_of(result)["effective"]


def test_budgets_and_policies_are_configuration_and_a_wrong_one_is_told(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    defs = definitions(url, tmp_path)
    config: dict[str, Any] = {"policy": "levels", "level_files": 2, "max_tables": 1}
    ops = {"ops": {"arroyo_compacted_state": {"config": config}}}
    result = run(defs, "arroyo_compaction", instance, ops)
    (event,) = result.get_asset_materialization_events()
    left: Any = event.materialization.metadata["left out"]
    assert any("over the budget of 1 tables" in record.data["why"] for record in left.records)
    config["sort"] = "sideways"
    with pytest.raises(dg.DagsterInvalidConfigError, match="'replay', 'time', 'key'"):
        run(defs, "arroyo_compaction", instance, ops)


def test_the_sensor_asks_once_for_an_epoch_of_a_job_with_enough_to_do(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    quiet = definitions(url, tmp_path)
    assert "arroyo_compaction_sensor" not in {one.name for one in quiet.sensors or ()}
    options = MaintenanceOptions(min_backlog=8, compaction=CompactionConfig(policy="full"))
    defs = definitions(url, tmp_path, maintenance=options, compaction_sensor=True)

    def tick() -> Any:
        with (
            dg.build_sensor_context(
                instance=instance,
                repository_def=defs.get_repository_def(),
                resources={"arroyo_store": resource(url, tmp_path)},
            ) as context,
            dg.partition_loading_context(dynamic_partitions_store=instance),
        ):
            return defs.resolve_sensor_def("arroyo_compaction_sensor").evaluate_tick(context)

    (request,) = tick().run_requests
    job = defs.resolve_job_def("arroyo_compaction_fleet")
    made = instance.create_run_for_job(job, run_config=request.run_config, tags=request.tags)
    assert f"run {made.run_id[:8]} is not_started" in str(tick().skip_message)
    instance.delete_run(made.run_id)
    assert job.execute_in_process(instance=instance, run_config=request.run_config).success
    assert "nothing due" in str(tick().skip_message)


class FailingFor(InProcessRunner):
    """Cannot compact one of the jobs, which nothing heals."""

    job: str

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        if paths.job == self.job:
            raise StorageError("the store does not answer", retryable=False)
        return super().run_compaction(store, paths, settings, options)


def test_one_run_over_many_jobs_goes_on_where_one_fails_and_repeats_only_that(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    run_word_job(store, **JOB, job="other", max_epochs=8)
    options = MaintenanceOptions(min_backlog=8)
    config = {"ops": {"arroyo_compaction_fleet_op": {"config": {"settings": {"policy": "full"}}}}}

    def fleet(runner: MaintenanceRunner) -> dg.ExecuteInProcessResult:
        defs = definitions(url, tmp_path, runner=runner, maintenance=options)
        job = defs.resolve_job_def("arroyo_compaction_fleet")
        return job.execute_in_process(instance=instance, run_config=config, raise_on_error=False)

    failed = fleet(FailingFor(job="main"))
    assert not failed.success
    done = [one.partition for one in failed.get_asset_materialization_events()]
    assert done == ["words/other"]
    healed = fleet(InProcessRunner())
    assert healed.success
    assert [one.partition for one in healed.get_asset_materialization_events()] == [KEY]
