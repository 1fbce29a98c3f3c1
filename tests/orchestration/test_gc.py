"""Garbage collection as assets: what is planned, proved, approved, done, read back and shown."""

from __future__ import annotations

import re
from typing import Any

import pytest

from arroyo_dagster.orchestration.gc.assets import dead_jobs_backlog, orphans_backlog
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.storage.wrappers import WriteProtected
from tests.compat.arroyo import DATA
from tests.fleets import Written, legacy_job
from tests.gc_jobs import restorable, without_ours
from tests.jobs import listing
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import (
    KEY,
    PATHS,
    configured,
    event_metadata,
    failure,
    materialized,
    passed,
)

OPS = {
    "arroyo_gc": "arroyo_retained_epochs",
    "arroyo_collect_orphans": "arroyo_orphans",
    "arroyo_remove_dead_jobs": "arroyo_dead_jobs",
}


def run(deployed: Deployment, job: str, key: str = KEY, **config: Any) -> Any:
    return deployed.run(job, key, run_config=configured(OPS[job], **config))


def assets(result: Any) -> dict[str, dict[str, Any]]:
    """The metadata of each asset that was materialized."""
    return {event.asset_key.path[-1]: event_metadata(event) for event in materialized(result)}


def test_a_dry_run_shows_the_plan_and_read_only_credentials_are_enough(at_rest: Deployment) -> None:
    objects = listing(at_rest.store)
    at_rest.wrap(WriteProtected)
    result = run(at_rest, "arroyo_gc", keep_epochs=3)
    assert result.success
    assert passed(result) == {"referenced_set_proved": True, "files_exist": True}
    assert list(assets(result)) == ["retained_epochs_plan"]
    plan = assets(result)["retained_epochs_plan"]
    assert plan["epochs"] == "5 removed, 3 kept, from epoch 6 on"
    assert re.fullmatch(r"\d+ objects, [\d.]+ kB \([\d,]+ bytes\)", plan["would be deleted"])
    assert int(re.match(r"read (\d+) roots, 8 epochs, ", plan["proof"])[1]) > 16  # type: ignore[index]
    assert "what goes first" in plan
    refused = run(at_rest, "arroyo_gc", keep_epochs=3, dry_run=False)
    assert not refused.success
    assert "write-protected" in failure(refused).description
    assert listing(at_rest.store) == objects


def test_expired_epochs_go_are_read_back_and_journalled(at_rest: Deployment) -> None:
    result = run(at_rest, "arroyo_gc", keep_epochs=3, dry_run=False)
    assert result.success
    assert all(passed(result).values())
    found = assets(result)
    done, plan = found["retained_epochs"], found["retained_epochs_plan"]
    assert done["epochs"] == plan["epochs"] == "5 removed, 3 kept, from epoch 6 on"
    assert done["deleted"] == plan["would be deleted"]
    journal = found["gc_journal"]
    assert journal["deleted so far"].endswith(" in 1 run")
    assert journal["arroyo/newest_run"] == done["arroyo/journal"]
    restorable(at_rest.store, PATHS, 6, 7, 8)
    again = run(at_rest, "arroyo_gc", keep_epochs=3, dry_run=False)
    assert again.success
    assert assets(again) == {}


def test_what_needs_approval_waits_for_it_and_takes_no_other_plan(at_rest: Deployment) -> None:
    config: dict[str, Any] = {"keep_epochs": 3, "dry_run": False, "needs_approval": True}
    waiting = run(at_rest, "arroyo_gc", **config)
    assert waiting.success
    digest = assets(waiting)["retained_epochs_plan"]["arroyo/plan"]
    assert "retained_epochs" not in assets(waiting)
    other = run(at_rest, "arroyo_gc", **config, approved_plan="0" * 32)
    assert not other.success
    assert f"the current plan is {digest}" in failure(other).description
    assert len(ParquetBackend(at_rest.store, PATHS).epochs()) == 8
    assert run(at_rest, "arroyo_gc", **config, approved_plan=digest).success
    assert ParquetBackend(at_rest.store, PATHS).epochs() == [6, 7, 8]


def test_what_is_refused_fails_the_blocking_check_with_the_evidence(at_rest: Deployment) -> None:
    store = at_rest.store
    store.delete_many([ParquetBackend(store, PATHS).load_checkpoint_metadata(3).ref])  # type: ignore[arg-type]
    before = without_ours(store)
    result = run(at_rest, "arroyo_gc", keep_epochs=3, dry_run=False)
    assert not result.success
    assert passed(result) == {"referenced_set_proved": False}
    assert "has a record but no manifest" in failure(result).description
    assert without_ours(store) == before


def test_orphans_are_planned_with_why_the_rest_stays(at_rest: Deployment) -> None:
    result = run(at_rest, "arroyo_collect_orphans")
    assert result.success
    assert assets(result) == {}
    assert passed(result)["referenced_set_proved"]
    bad = run(at_rest, "arroyo_collect_orphans", older_than_days=0.001)
    assert "below an hour:" in failure(bad).description


def test_a_job_whose_pipeline_nobody_knows_to_be_gone_is_not_removed(at_rest: Deployment) -> None:
    before = without_ours(at_rest.store)
    result = run(at_rest, "arroyo_remove_dead_jobs", dry_run=False)
    assert not result.success
    assert passed(result) == {"referenced_set_proved": False}
    young = run(at_rest, "arroyo_remove_dead_jobs", dry_run=False, gone=True)
    assert "within the grace period" in failure(young).description
    assert without_ours(at_rest.store) == before


@pytest.mark.parametrize(
    ("job", "step"),
    [
        ("arroyo_gc", "`arroyo_api_url` or `arroyo_database`"),
        ("arroyo_collect_orphans", "`arroyo_api_url` or `arroyo_database`"),
        ("arroyo_remove_dead_jobs", "set `arroyo_database`"),
    ],
)
def test_a_job_of_arroyos_that_nobody_knows_fails_and_names_the_fields_that_are_missing(
    deployed: Deployment, job: str, step: str
) -> None:
    Written(deployed.store, legacy_job("j")).epochs(12)
    deployed.build(runner=InProcessRunner())
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["j"])
    result = run(deployed, job, "j", dry_run=False)
    assert not result.success
    assert assets(result) == {}
    assert passed(result) == {"referenced_set_proved": False}
    assert step in failure(result).description
    texts = [entry.message for entry in deployed.instance.all_logs(result.run_id)]
    (check,) = result.get_asset_check_evaluations()
    assert not [text for text in (*texts, check.description or "") if "--" in text]


def test_schedules_poll_only_where_collecting_is_allowed(at_rest: Deployment) -> None:
    Written(at_rest.store, legacy_job("j")).epochs(12)
    assert orphans_backlog(at_rest.resource) == {"j": 0, KEY: 1}
    assert dead_jobs_backlog(at_rest.resource) == {"j": 0, KEY: 0}
    database = type(at_rest.resource)(
        **{**dict(at_rest.resource), "arroyo_database": str(DATA / "state-legacy.sqlite")}
    )
    # The database knows none of the jobs of this URL: it may be another cluster's.
    assert dead_jobs_backlog(database) == {"j": 0, KEY: 0}
    Written(at_rest.store, legacy_job("job_d14OMmRXhf")).epochs(2)
    assert dead_jobs_backlog(database) == {"j": 1, KEY: 0, "job_d14OMmRXhf": 0}
