"""Compaction and expiry as assets: what is shown, what stops a run, what waits, and for whom."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import dagster as dg
import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.orchestration import (
    CompactionConfig,
    DeadJobsConfig,
    GcConfig,
    InProcessRunner,
    MaintenanceOptions,
    MaintenanceRunner,
    OrphansConfig,
)
from arroyo_dagster.state import ParquetBackend, WriteProtected, run_compaction
from arroyo_dagster.state.metadata import lease as leases
from arroyo_dagster.state.model.leases import LEASE_SECONDS
from arroyo_dagster.state.operations.compaction.execute import merge_here
from tests.faulty_stores import once_before
from tests.fleets import Written, legacy_job
from tests.formats import RowsDigest, is_compacted
from tests.gc_jobs import restorable, without_ours
from tests.internals import LeaseOptions, lease
from tests.jobs import listing, run_word_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import (
    COMPACT,
    COMPACTED,
    JOB,
    KEY,
    PATHS,
    RETAINED,
    configured,
    event_metadata,
    failure,
    loaded,
    logged,
    materialized,
    observed,
)

T = TypeVar("T")
OTHER = "words/other"
OPS = {
    "arroyo_compaction": ("arroyo_compacted_state", {"policy": "full"}, COMPACTED),
    "arroyo_gc": ("arroyo_retained_epochs", {"keep_epochs": 3, "dry_run": False}, RETAINED),
}


def compacted(deployed: Deployment, config: Any = COMPACT) -> Any:
    return deployed.run("arroyo_compaction", run_config=config)


def expired(deployed: Deployment, **config: Any) -> Any:
    given = configured("arroyo_retained_epochs", keep_epochs=3, **config)
    return deployed.run("arroyo_gc", run_config=given)


# ---- compaction ----------------------------------------------------------------------------------


def test_a_job_at_rest_is_compacted_and_a_second_run_materialises_nothing(
    at_rest: Deployment,
) -> None:
    before = loaded(at_rest.store)
    result = compacted(at_rest)
    assert result.success
    (event,) = materialized(result)
    facts = event_metadata(event)
    assert event.asset_key == dg.AssetKey(["arroyo", *COMPACTED.split("/")])
    assert facts["arroyo/taken_over_at_epoch"] == 9
    before_files, after_files = map(int, facts["files"].split(" → "))
    assert before_files > after_files
    assert facts["forecast"].startswith(f"{after_files} files, ")
    assert loaded(at_rest.store) == before
    objects = listing(at_rest.store)
    again = compacted(at_rest)
    assert again.success
    assert not materialized(again)
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


def test_a_merge_that_is_not_proven_fails_the_run_and_publishes_nothing(
    at_rest: Deployment,
) -> None:
    epochs = ParquetBackend(at_rest.store, PATHS).epochs()
    at_rest.build(runner=Lossy())
    result = compacted(at_rest)
    assert not result.success
    assert not materialized(result)
    for text in ("would not restore the rows of the files they replace,", KEY, "Next:"):
        assert text in failure(result).description
    assert ParquetBackend(at_rest.store, PATHS).epochs() == epochs
    (note,) = observed(result)
    assert "would not restore" in note.metadata["arroyo/failed"].value


class FailingFor(InProcessRunner):
    """A store that does not answer now, for one of the jobs."""

    job: str
    retryable: bool = False

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        if paths.job == self.job:
            _TRIED.append(paths.job)
            raise StorageError("the store does not answer", retryable=self.retryable)
        return super().run_compaction(store, paths, settings, options)


_TRIED: list[str] = []


@pytest.mark.usefixtures("retries_at_once")
@pytest.mark.parametrize("retryable", [True, False])
def test_one_run_serves_all_tries_what_may_heal_once_more_and_names_what_failed(
    at_rest: Deployment, retryable: bool
) -> None:
    run_word_job(at_rest.store, **JOB, job="other", max_epochs=8)
    _TRIED.clear()
    at_rest.build(runner=FailingFor(job="main", retryable=retryable))
    failed = compacted(at_rest)
    assert not failed.success
    assert len(_TRIED) == (2 if retryable else 1)
    assert [one.asset_key.path[2] for one in materialized(failed)] == ["other"]
    description = failure(failed).description
    assert description.startswith("1 of 2 pipelines failed: words/main: ")
    assert "the store does not answer" in description
    at_rest.build(runner=InProcessRunner())
    healed = compacted(at_rest)
    assert healed.success
    assert [one.asset_key.path[2] for one in materialized(healed)] == ["main"]


def test_a_run_takes_the_pipelines_that_are_selected(at_rest: Deployment) -> None:
    run_word_job(at_rest.store, **JOB, job="other", max_epochs=8)
    at_rest.build()
    result = at_rest.run("arroyo_compaction", f"{OTHER}/compacted_state", run_config=COMPACT)
    assert [one.asset_key.path[2] for one in materialized(result)] == ["other"]


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


def test_a_budget_of_minutes_leaves_the_rest_for_the_next_run(at_rest: Deployment) -> None:
    for number in range(4):
        run_word_job(at_rest.store, **JOB, job=f"job_{number}", max_epochs=2)
    at_rest.build()
    config = configured(
        "arroyo_compacted_state", policy="full", budget_minutes=1e-9, parallel_jobs=1
    )
    result = compacted(at_rest, config)
    assert result.success
    assert not materialized(result)
    assert any(
        "5 pipelines are left for the next run" in one for one in logged(at_rest.instance, result)
    )


# ---- expiry --------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_plan_and_read_only_credentials_are_enough(at_rest: Deployment) -> None:
    objects = listing(at_rest.store)
    at_rest.wrap(WriteProtected)
    result = expired(at_rest)
    assert result.success
    assert not materialized(result)
    (plan,) = map(event_metadata, observed(result))
    assert plan["epochs"] == "5 removed, 3 kept, from epoch 6 on"
    assert re.fullmatch(r"\d+ objects, [\d.]+ kB \([\d,]+ bytes\)", plan["would be deleted"])
    assert int(re.match(r"read (\d+) roots, 8 epochs, ", plan["proof"])[1]) > 16  # type: ignore[index]
    refused = expired(at_rest, dry_run=False)
    assert not refused.success
    assert "write-protected" in failure(refused).description
    assert listing(at_rest.store) == objects


def test_expired_epochs_go_and_the_newest_is_checked(at_rest: Deployment) -> None:
    result = expired(at_rest, dry_run=False)
    assert result.success
    (done,) = map(event_metadata, materialized(result))
    assert done["epochs"] == "5 removed, 3 kept, from epoch 6 on"
    assert done["arroyo/journal"]
    restorable(at_rest.store, PATHS, 6, 7, 8)
    again = expired(at_rest, dry_run=False)
    assert again.success
    assert not materialized(again)


def test_what_needs_approval_waits_for_it_and_takes_no_other_plan(at_rest: Deployment) -> None:
    config: dict[str, Any] = {"dry_run": False, "needs_approval": True}
    waiting = expired(at_rest, **config)
    assert waiting.success
    (plan,) = map(event_metadata, observed(waiting))
    digest = plan["arroyo/plan"]
    other = expired(at_rest, **config, approved_plan="0" * 32)
    assert not other.success
    assert f"the current plan is {digest}" in failure(other).description
    assert len(ParquetBackend(at_rest.store, PATHS).epochs()) == 8
    assert expired(at_rest, **config, approved_plan=digest).success
    assert ParquetBackend(at_rest.store, PATHS).epochs() == [6, 7, 8]


def test_what_is_refused_fails_the_run_with_the_evidence(at_rest: Deployment) -> None:
    store = at_rest.store
    store.delete_many([ParquetBackend(store, PATHS).load_checkpoint_metadata(3).ref])  # type: ignore[arg-type]
    before = without_ours(store)
    result = expired(at_rest, dry_run=False)
    assert not result.success
    assert "has a record but no manifest" in failure(result).description
    assert without_ours(store) == before


class Half(InProcessRunner):
    """Says less than it was to delete."""

    def run_gc(self, store: Any, paths: Any, request: Any, options: Any, *, plan: Any) -> Any:
        outcome = super().run_gc(store, paths, request, options, plan=plan)
        return replace(outcome, deleted=outcome.deleted - 1)


def test_objects_that_are_still_there_fail_the_run(at_rest: Deployment) -> None:
    at_rest.build(runner=Half())
    result = expired(at_rest, dry_run=False)
    assert not result.success
    assert "the store still has the others" in failure(result).description
    assert materialized(result)  # what was deleted is on record all the same


def test_epochs_of_arroyo_are_no_asset_and_its_files_only_where_they_may_be_merged(
    deployed: Deployment,
) -> None:
    Written(deployed.store, legacy_job("j")).epochs(3)
    deployed.build()
    tables = {key.path[-1] for key in deployed.repository.asset_graph.get_all_asset_keys()}
    assert tables == {"checkpoint", "fleet"}


# ---- the whole root ------------------------------------------------------------------------------


def root_gc(deployed: Deployment, table: str, **config: Any) -> Any:
    options = {"orphans": OrphansConfig(), "dead_jobs": DeadJobsConfig()}
    deployed.build(maintenance=MaintenanceOptions(**options))
    run_config = configured(f"arroyo_{table}", **config)
    return deployed.run(f"arroyo_{table}_gc", run_config=run_config)


def test_orphans_of_all_jobs_that_allow_it_are_looked_for_in_one_run(at_rest: Deployment) -> None:
    Written(at_rest.store, legacy_job("j")).epochs(12)
    result = root_gc(at_rest, "orphans", dry_run=False)
    assert result.success
    (note,) = map(event_metadata, observed(result))
    assert {row.data["job"] for row in observed(result)[0].metadata["jobs"].records} == {"j"}
    assert note
    bad = root_gc(at_rest, "orphans", older_than_days=0.001)
    assert "below an hour:" in failure(bad).description


def test_a_job_is_removed_only_where_somebody_says_that_it_is_gone(at_rest: Deployment) -> None:
    before = without_ours(at_rest.store)
    assert root_gc(at_rest, "dead_jobs", dry_run=False).success
    young = root_gc(at_rest, "dead_jobs", dry_run=False, gone=[KEY])
    assert "within the grace period" in failure(young).description
    assert without_ours(at_rest.store) == before


# ---- leases --------------------------------------------------------------------------------------


def run(deployed: Deployment, job: str, **config: Any) -> Any:
    op, given, _ = OPS[job]
    return deployed.run(job, run_config=configured(op, **{**given, **config}))


@contextlib.contextmanager
def another_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is leased in the block, another process leases."""
    with monkeypatch.context() as other:
        other.setattr("arroyo_dagster.state.metadata.lease_records._PROCESS", "another")
        yield


@pytest.mark.parametrize("job", OPS)
def test_a_pipeline_that_is_leased_waits_and_names_the_holder(
    job: str, at_rest: Deployment
) -> None:
    epochs = ParquetBackend(at_rest.store, PATHS).epochs()
    with lease(at_rest.store, PATHS, "arroyo-state compact"):
        result = run(at_rest, job, lease_wait_seconds=0.0)
    assert result.success
    (note,) = observed(result)
    assert note.asset_key == dg.AssetKey(["arroyo", *OPS[job][2].split("/")])
    holder = f"{platform.node()}/{os.getpid()} (arroyo-state compact)"
    assert f"the job is leased by {holder} until " in note.metadata["arroyo/waiting"].value
    assert not materialized(result)
    assert ParquetBackend(at_rest.store, PATHS).epochs() == epochs
    assert run(at_rest, job).success
    assert ParquetBackend(at_rest.store, PATHS).epochs() != epochs


def test_a_run_waits_at_its_end_for_a_lease_that_is_released_in_time(
    at_rest: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.01)
    held = contextlib.ExitStack()
    held.enter_context(lease(at_rest.store, PATHS, "arroyo-state gc"))
    look = ("list_dir", PATHS.leases)
    at_rest.wrap(
        lambda store: once_before(
            store, lambda verb, path: (verb, path) == look, held.close, number=5
        )
    )
    result = run(at_rest, "arroyo_compaction")
    assert result.success
    assert materialized(result)
    lines = [one for one in logged(at_rest.instance, result) if "waiting up to 65 s" in one]
    assert len(lines) == 1
    assert "the job is leased by" in lines[0]


@pytest.mark.parametrize("job", OPS)
def test_the_run_after_a_killed_one_takes_its_lease_over_and_says_so(
    job: str, at_rest: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at = time.time() - LEASE_SECONDS - 2
    with another_process(monkeypatch), monkeypatch.context() as past:
        past.setattr(at_rest.store, "_clock", lambda: int(killed_at * 1e6))
        killed = lease(at_rest.store, PATHS, "dagster run 0815")
        killed.__enter__()  # and never released
    result = run(at_rest, job)
    assert result.success
    assert materialized(result)
    found = [one for one in logged(at_rest.instance, result) if "took over the lease of" in one]
    assert len(found) == 1
    assert "(dagster run 0815), which ended without releasing it" in found[0]


def test_a_run_whose_lease_was_taken_from_it_waits(at_rest: Deployment) -> None:
    taken: list[Any] = []

    class Hung(InProcessRunner):
        """Another process takes the lease while this one merges."""

        def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
            def take(outcome: Any, left: int) -> None:
                if not taken:
                    other = lease(at_rest.store, PATHS, "other", LeaseOptions(take_over=True))
                    taken.append(other)
                    other.__enter__()

            changed = replace(options, on_merge=take)
            return super().run_compaction(store, paths, settings, changed)

    at_rest.build(runner=Hung())
    result = run(at_rest, "arroyo_compaction", lease_wait_seconds=0.0)
    assert result.success
    assert observed(result)
    assert "waiting, because " in observed(result)[0].description
    taken[0].__exit__(None, None, None)


def test_the_others_are_served_first_and_what_stays_leased_is_waited_for_once(
    at_rest: Deployment,
) -> None:
    run_word_job(at_rest.store, **JOB, job="other", max_epochs=8)
    order: list[tuple[str, float]] = []

    class Noting(InProcessRunner):
        def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
            order.append((str(paths.job), options.lease_wait_seconds))
            return super().run_compaction(store, paths, settings, options)

    at_rest.build(runner=Noting())
    with lease(at_rest.store, PATHS, "arroyo-state compact"):
        result = run(at_rest, "arroyo_compaction", lease_wait_seconds=0.001, parallel_jobs=1)
    assert result.success
    assert order == [("main", 0.0), ("other", 0.0), ("main", 0.001)]


# ---- when ----------------------------------------------------------------------------------------


def test_schedules_ask_the_store_and_run_where_there_is_enough(at_rest: Deployment) -> None:
    options = MaintenanceOptions(
        min_backlog=8,
        compaction=CompactionConfig(policy="full"),
        gc=GcConfig(keep_epochs=3, dry_run=False),
    )
    at_rest.build(maintenance=options)
    for name in ("compaction", "gc"):
        done = at_rest.launch_due(f"arroyo_{name}_schedule")
        assert [one.asset_key.path[1:3] for one in materialized(done)] == [["words", "main"]]
        after = at_rest.due(f"arroyo_{name}_schedule")
        assert not after.run_requests
        assert "nothing due" in str(after.skip_message)
    assert any(map(is_compacted, ParquetBackend(at_rest.store, PATHS).load().paths))


def test_a_schedule_requests_nothing_while_a_run_is_unfinished(at_rest: Deployment) -> None:
    at_rest.build(maintenance=MaintenanceOptions(min_backlog=8))
    schedule = "arroyo_compaction_schedule"
    (request,) = at_rest.due(schedule).run_requests
    job = at_rest.defs.resolve_job_def("arroyo_compaction")
    made = at_rest.instance.create_run_for_job(job, run_config=request.run_config)
    assert f"run {made.run_id[:8]} is not_started" in str(at_rest.due(schedule).skip_message)
    at_rest.instance.delete_run(made.run_id)
    assert at_rest.due(schedule).run_requests


@pytest.mark.usefixtures("retries_at_once")
def test_what_failed_is_not_due_again_before_a_day(at_rest: Deployment) -> None:
    at_rest.build(maintenance=MaintenanceOptions(min_backlog=8), runner=FailingFor(job="main"))
    schedule = "arroyo_compaction_schedule"
    assert not at_rest.launch_due(schedule).success
    assert not at_rest.due(schedule).run_requests


def test_no_step_has_a_retry_policy(at_rest: Deployment) -> None:
    jobs = at_rest.defs.resolve_all_job_defs()
    nodes = [node for job in jobs for node in job.nodes_in_topological_order]
    assert nodes
    assert not [node.name for node in nodes if node.definition.retry_policy is not None]


class NothingRuns(MaintenanceRunner):
    """Neither compacts nor deletes."""

    def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
        raise AssertionError


def test_a_mistake_in_a_runner_stops_no_other_pipeline_and_is_named(at_rest: Deployment) -> None:
    at_rest.build(runner=NothingRuns())
    result = compacted(at_rest)
    assert not result.success
    assert KEY in failure(result).description
