"""Compaction and expiry as assets: what is shown, what stops a run, what a second run does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.gc.assets import GcConfig
from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
from arroyo_dagster.orchestration.runners import InProcessRunner, MaintenanceRunner
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.compaction import RowsDigest
from arroyo_dagster.state.model.layout import is_compacted
from arroyo_dagster.state.operations.compaction.execute import merge_here
from arroyo_dagster.state.operations.compaction.job import run_compaction
from tests.jobs import listing, run_word_job, state_of, word_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import (
    COMPACT,
    JOB,
    KEY,
    PATHS,
    configured,
    event_metadata,
    failure,
    materialized,
    passed,
)


def compacted(deployed: Deployment, config: Any = COMPACT) -> Any:
    return deployed.run("arroyo_compaction", KEY, run_config=config)


def rows(deployed: Deployment) -> dict[str, Any]:
    """What a restore loads, without the number of the epoch."""
    found = dict(state_of(deployed.store, word_job(deployed.store, **JOB)))
    found.pop("")
    return found


def test_a_job_at_rest_is_compacted_and_a_second_run_materialises_nothing(
    at_rest: Deployment,
) -> None:
    before = rows(at_rest)
    result = compacted(at_rest)
    assert result.success
    assert passed(result) == {"row_parity": True, "restorable": True, "effective": True}
    (event,) = materialized(result)
    facts = event_metadata(event)
    assert event.partition == KEY
    assert facts["arroyo/taken_over_at_epoch"] == 9
    before_files, after_files = map(int, facts["files"].split(" → "))
    assert before_files > after_files
    assert facts["forecast"].startswith(f"{after_files} files, ")
    assert "merges" in facts
    assert rows(at_rest) == before
    objects = listing(at_rest.store)
    again = compacted(at_rest)
    assert again.success
    assert not materialized(again)
    assert passed(again) == {"restorable": True}  # nothing was merged: no pass over nothing
    assert listing(at_rest.store) == objects


def test_a_dry_run_changes_and_materialises_nothing(at_rest: Deployment) -> None:
    objects = listing(at_rest.store)
    config = configured("arroyo_compacted_state", policy="full", dry_run=True)
    result = compacted(at_rest, config)
    assert result.success
    assert not materialized(result)
    assert listing(at_rest.store) == objects


class Lossy(InProcessRunner):
    """Loses a row on the way."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        def lose(held: Any, tasks: Any, on_bytes: Any) -> Any:
            for outcome in merge_here(held, tasks):
                yield replace(outcome, after=RowsDigest(outcome.after.rows - 1, 5))

        return run_compaction(store, paths, settings, replace(options, run=lose))


def test_a_merge_that_loses_a_row_fails_the_check_and_the_run_and_publishes_nothing(
    at_rest: Deployment,
) -> None:
    epochs = ParquetBackend(at_rest.store, PATHS).epochs()
    at_rest.build(runner=Lossy())
    result = compacted(at_rest)
    assert not result.success
    assert passed(result) == {"row_parity": False}
    assert not materialized(result)
    for text in ("would not restore the rows of the files they replace,", KEY, "Next:"):
        assert text in failure(result).description
    assert ParquetBackend(at_rest.store, PATHS).epochs() == epochs


class Failing(MaintenanceRunner):
    """A store that does not answer now."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        raise StorageError("the store does not answer", url=store.url)

    def run_gc(self, store: Any, paths: Any, request: Any, options: Any, *, plan: Any) -> Any:
        raise NotImplementedError


@pytest.mark.usefixtures("retries_at_once")
def test_what_may_heal_is_tried_twice_more_and_then_says_why_it_failed(at_rest: Deployment) -> None:
    at_rest.build(runner=Failing())
    result = compacted(at_rest)
    assert not result.success
    retries = [event for event in result.all_events if event.is_step_up_for_retry]
    assert len(retries) == 2
    assert "the store does not answer" in retries[0].step_retry_data.error.to_string()
    assert "the store does not answer" in failure(result).description
    assert failure(result).metadata["arroyo/url"].value == at_rest.store.url


def test_no_step_has_a_retry_policy(deployed: Deployment) -> None:
    jobs = deployed.defs.resolve_all_job_defs()
    nodes = [node for job in jobs for node in job.nodes_in_topological_order]
    assert nodes
    assert not [node.name for node in nodes if node.definition.retry_policy is not None]


def test_schedules_ask_the_store_and_run_where_there_is_enough(at_rest: Deployment) -> None:
    options = MaintenanceOptions(
        min_backlog=8,
        compaction=CompactionConfig(policy="full", wait_seconds=0.0),
        gc=GcConfig(keep_epochs=3, dry_run=False),
    )
    at_rest.build(runner=InProcessRunner(), maintenance=options)
    for name in ("refresh", "compaction", "gc"):
        (request,) = at_rest.due(f"arroyo_{name}_schedule").run_requests
        assert request.run_key is None
        assert request.run_config["ops"][f"arroyo_{name}_fleet_op"]["config"]["jobs"] == [KEY]
        done = at_rest.run(f"arroyo_{name}_fleet", run_config=request.run_config)
        assert {one.partition for one in materialized(done)} == {KEY}
        after = at_rest.due(f"arroyo_{name}_schedule")
        assert not after.run_requests
        assert "nothing due" in str(after.skip_message)
    assert any(map(is_compacted, ParquetBackend(at_rest.store, PATHS).load().paths))


def test_budgets_and_policies_are_configuration_and_a_wrong_one_is_told(
    at_rest: Deployment,
) -> None:
    config: dict[str, Any] = {"policy": "levels", "level_files": 2, "max_tables": 1}
    (event,) = materialized(compacted(at_rest, configured("arroyo_compacted_state", **config)))
    left = event.metadata["left out"].records
    assert any("over the budget of 1 tables" in record.data["why"] for record in left)
    config["sort"] = "sideways"
    with pytest.raises(dg.DagsterInvalidConfigError, match="'replay', 'time', 'key'"):
        compacted(at_rest, configured("arroyo_compacted_state", **config))


def test_the_sensor_asks_once_for_an_epoch_of_a_job_with_enough_to_do(at_rest: Deployment) -> None:
    assert "arroyo_compaction_sensor" not in {one.name for one in at_rest.defs.sensors or ()}
    options = MaintenanceOptions(min_backlog=8, compaction=CompactionConfig(policy="full"))
    at_rest.build(runner=InProcessRunner(), maintenance=options, compaction_sensor=True)

    def tick() -> Any:
        with (
            dg.build_sensor_context(
                instance=at_rest.instance,
                repository_def=at_rest.defs.get_repository_def(),
                resources={"arroyo_store": at_rest.resource},
            ) as context,
            dg.partition_loading_context(dynamic_partitions_store=at_rest.instance),
        ):
            sensor = at_rest.defs.resolve_sensor_def("arroyo_compaction_sensor")
            return sensor.evaluate_tick(context)

    (request,) = tick().run_requests
    job = at_rest.defs.resolve_job_def("arroyo_compaction_fleet")
    made = at_rest.instance.create_run_for_job(
        job, run_config=request.run_config, tags=request.tags
    )
    assert f"run {made.run_id[:8]} is not_started" in str(tick().skip_message)
    at_rest.instance.delete_run(made.run_id)
    assert at_rest.run("arroyo_compaction_fleet", run_config=request.run_config).success
    assert "nothing due" in str(tick().skip_message)


class FailingFor(InProcessRunner):
    """Cannot compact one of the jobs, which nothing heals."""

    job: str

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        if paths.job == self.job:
            raise StorageError("the store does not answer", retryable=False)
        return super().run_compaction(store, paths, settings, options)


def test_one_run_over_many_jobs_goes_on_where_one_fails_and_repeats_only_that(
    at_rest: Deployment,
) -> None:
    run_word_job(at_rest.store, **JOB, job="other", max_epochs=8)
    config = configured("arroyo_compaction_fleet_op", settings={"policy": "full"})

    def fleet(runner: MaintenanceRunner) -> Any:
        at_rest.build(runner=runner, maintenance=MaintenanceOptions(min_backlog=8))
        return at_rest.run("arroyo_compaction_fleet", run_config=config)

    failed = fleet(FailingFor(job="main"))
    assert not failed.success
    assert [one.partition for one in materialized(failed)] == ["words/other"]
    healed = fleet(InProcessRunner())
    assert healed.success
    assert [one.partition for one in materialized(healed)] == [KEY]
