"""Maintenance of one job from several sides: it waits, or is skipped with the holder; it never
fails because of the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import dagster as dg
import pytest

from arroyo_dagster.orchestration import failures
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.orchestration.skips import SKIPPED_TAG
from arroyo_dagster.state.metadata import lease as leases
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease
from arroyo_dagster.state.metadata.lease_records import owner_here
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import EXPIRED_SECONDS, LEASE_SECONDS
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.storage.wrappers import Wrapper
from tests.jobs import run_word_job, word_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import JOB, KEY, PATHS, configured

T = TypeVar("T")
OPS = {
    "arroyo_compaction": ("arroyo_compacted_state", {"policy": "full", "wait_seconds": 0.0}),
    "arroyo_gc": ("arroyo_retained_epochs", {"keep_epochs": 3, "dry_run": False}),
}
ASSETS = {"arroyo_compaction": "compacted_state", "arroyo_gc": "retained_epochs"}


def paths_of(job: str) -> JobPaths:
    return word_job(None, **JOB, job=job).paths  # type: ignore[arg-type]


@pytest.fixture
def deployed(at_rest: Deployment) -> Deployment:
    return at_rest


def run(deployed: Deployment, job: str, **config: Any) -> Any:
    op, given = OPS[job]
    return deployed.run(job, KEY, run_config=configured(op, **{**given, **config}))


def logged(deployed: Deployment, result: Any) -> list[str]:
    return [entry.user_message for entry in deployed.instance.all_logs(result.run_id)]


@contextlib.contextmanager
def another_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is leased in the block, another process leases."""
    with monkeypatch.context() as other:
        other.setattr("arroyo_dagster.state.metadata.lease_records._PROCESS", "another")
        yield


@pytest.mark.parametrize("job", OPS)
def test_a_run_that_meets_a_lease_ends_as_skipped_and_names_the_holder(
    job: str, deployed: Deployment
) -> None:
    epochs = ParquetBackend(deployed.store, PATHS).epochs()
    with lease(deployed.store, PATHS, "arroyo-state compact"):
        result = run(deployed, job, lease_wait_seconds=0.0)
    assert result.success
    holder = owner_here("arroyo-state compact")
    tags = deployed.instance.get_run_by_id(result.run_id).tags  # type: ignore[union-attr]
    assert tags[SKIPPED_TAG].startswith(f"skipped: the job is leased by {holder} until ")
    (observed,) = result.get_asset_observation_events()
    facts = observed.asset_observation_data.asset_observation
    assert facts.asset_key == dg.AssetKey(["arroyo", ASSETS[job]])
    assert facts.partition == KEY
    assert facts.metadata["arroyo/lease_owner"].value == holder
    assert {"arroyo/lease_host", "arroyo/lease_pid", "arroyo/lease_until"} <= set(facts.metadata)
    made = {event.asset_key for event in result.get_asset_materialization_events()}
    assert dg.AssetKey(["arroyo", ASSETS[job]]) not in made
    assert ParquetBackend(deployed.store, PATHS).epochs() == epochs
    assert run(deployed, job).success
    assert ParquetBackend(deployed.store, PATHS).epochs() != epochs


class Releasing(Wrapper):
    """A store in which a holder releases its lease at the third look of another process."""

    release: Any
    looks = 0

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb == "list_dir" and path == PATHS.leases:
            self.looks += 1
            if self.looks == 3:
                self.release()
        return action()


def test_a_run_waits_for_a_lease_that_is_released_in_time(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.01)
    held = contextlib.ExitStack()
    held.enter_context(lease(deployed.store, PATHS, "arroyo-state gc"))
    store = deployed.wrap(Releasing)
    store.release = held.close
    result = run(deployed, "arroyo_compaction")
    assert result.success
    assert store.looks == 4  # the check of records looks once
    assert result.get_asset_materialization_events()
    lines = [one for one in logged(deployed, result) if "waiting up to 65 s" in one]
    assert len(lines) == 1
    assert "the job is leased by" in lines[0]


@pytest.mark.parametrize("job", OPS)
def test_the_run_after_a_killed_one_takes_its_lease_over_and_says_so(
    job: str, deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at = time.time() - LEASE_SECONDS - 2
    with another_process(monkeypatch), monkeypatch.context() as past:
        past.setattr(deployed.store, "_clock", lambda: int(killed_at * 1e6))
        killed = lease(deployed.store, PATHS, "dagster run 0815")
        killed.__enter__()  # and never released
    result = run(deployed, job)
    assert result.success
    assert result.get_asset_materialization_events()
    found = [one for one in logged(deployed, result) if "took over the lease of" in one]
    assert len(found) == 1
    assert "(dagster run 0815), which ended without releasing it" in found[0]


def test_a_run_whose_lease_was_taken_from_it_ends_as_skipped(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    class Hung(InProcessRunner):
        """Another process takes the lease while this one merges."""

        def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
            def take(outcome: Any, left: int) -> None:
                if not taken:
                    other = lease(deployed.store, PATHS, "other", LeaseOptions(take_over=True))
                    taken.append(other)
                    other.__enter__()

            changed = replace(options, on_merge=take)
            return super().run_compaction(store, paths, settings, changed)

    deployed.build(runner=Hung())
    result = run(deployed, "arroyo_compaction", lease_wait_seconds=0.0)
    assert result.success
    tags = deployed.instance.get_run_by_id(result.run_id).tags  # type: ignore[union-attr]
    assert tags[SKIPPED_TAG].startswith("skipped: the lease on the job was lost")
    taken[0].__exit__(None, None, None)


def test_retries_of_a_step_outlast_a_lease() -> None:
    waits = [failures.RETRY_SECONDS * 2**number * 0.9 for number in range(failures.MAX_RETRIES)]
    assert sum(waits) > EXPIRED_SECONDS


# ---- batches -------------------------------------------------------------------------------------


def fleet(deployed: Deployment, name: str, **config: Any) -> Any:
    job = f"arroyo_{name}_fleet"
    return deployed.run(job, run_config=configured(f"{job}_op", **config))


def rows_of(result: Any) -> dict[str, str]:
    [output] = [one for one in result.all_events if one.event_type_value == "STEP_OUTPUT"]
    table = output.step_output_data.metadata["jobs"]
    return {row.data["job"]: row.data["outcome"] for row in table.records}


def test_a_batch_serves_the_others_first_and_skips_what_stays_leased(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_word_job(deployed.store, **JOB, job="other", max_epochs=8)
    order: list[tuple[str, float]] = []

    class Noting(InProcessRunner):
        def run_compaction(self, store: Any, paths: Any, settings: Any, options: Any) -> Any:
            order.append((str(paths.job), options.lease_wait_seconds))
            return super().run_compaction(store, paths, settings, options)

    deployed.build(runner=Noting())
    with lease(deployed.store, PATHS, "arroyo-state compact"):
        result = fleet(
            deployed,
            "compaction",
            jobs=[KEY, str(paths_of("other").root)],
            settings={"policy": "full", "lease_wait_seconds": 0.001},
            parallel_jobs=1,
        )
    assert result.success
    assert order == [("main", 0.0), ("other", 0.0), ("main", 0.001)]
    rows = rows_of(result)
    assert rows[str(paths_of("other").root)] == "done"
    assert rows[KEY].startswith("skipped: the job is leased by ")
    tags = deployed.instance.get_run_by_id(result.run_id).tags  # type: ignore[union-attr]
    assert tags[SKIPPED_TAG] == "1 of 2 jobs"


def test_what_meets_a_compaction_of_its_job_neither_fails_nor_makes_it_fail(
    deployed: Deployment,
) -> None:
    """Every other schedule, an individual run and a check, in the middle of a compaction."""
    met: list[Any] = []
    settings = {"lease_wait_seconds": 0.0, "dry_run": False}

    class Crowded(InProcessRunner):
        def run_compaction(self, store: Any, paths: Any, settings_: Any, options: Any) -> Any:
            def crowd(outcome: Any, left: int) -> None:
                if met:
                    return
                met.append(None)
                met.extend(
                    [
                        run(deployed, "arroyo_gc", lease_wait_seconds=0.0),
                        fleet(deployed, "gc", jobs=[KEY], settings={"keep_epochs": 3, **settings}),
                        fleet(deployed, "collect_orphans", jobs=[KEY], settings=settings),
                        fleet(deployed, "refresh", jobs=[KEY]),
                        deployed.run("arroyo_fleet"),
                    ]
                )

            changed = replace(options, on_merge=crowd)
            return super().run_compaction(store, paths, settings_, changed)

    deployed.build(runner=Crowded())
    result = run(deployed, "arroyo_compaction")
    assert result.success
    assert result.get_asset_materialization_events()
    assert [one.success for one in met[1:]] == [True] * 5
    verdict = verify_job(deployed.store, PATHS, level=4).verdict
    assert verdict.passed, verdict.errors
