"""The asset `audit`: what one run finds, what the next one compares, and which jobs come first."""

from __future__ import annotations

from typing import Any

import dagster as dg

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.planning.rules import AUDIT_RULES, RECENCY
from tests.fleets import Written, protocol_job
from tests.jobs import listing, run_word_job
from tests.orchestration.results import checks

PATHS = protocol_job("words")


def run(deployed: Any) -> dict[str, Any]:
    result = deployed.run("arroyo_audit")
    assert result.success
    return checks(result)


def words(deployed: Any) -> None:
    run_word_job(deployed.store, rows=40, rows_per_epoch=10, sinks=0, keep_epochs=None)


def failed(found: dict[str, Any]) -> set[str]:
    return {name for name, one in found.items() if not one.passed}


def only_of(deployed: Any, epoch_at: int, other: int) -> StatePath:
    """A file that one epoch lists and another does not."""
    backend = ParquetBackend(deployed.store, PATHS)
    epochs = backend.epochs()
    files = [set(backend.load_checkpoint_metadata(epochs[at]).paths) for at in (epoch_at, other)]
    return sorted(files[0] - files[1])[0]


def test_a_whole_job_passes_every_check_and_its_store_is_not_written_to(deployed: Any) -> None:
    words(deployed)
    before = listing(deployed.store)
    found = run(deployed)
    assert found.keys() == {rule.name for rule in AUDIT_RULES}
    assert failed(found) == set()
    assert "1 job, all passed" in found["restore_dry_run"].description
    assert failed(run(deployed)) == set(), "the second audit compares the files of the first"
    assert listing(deployed.store) == before


def test_a_lost_file_of_an_older_epoch_is_a_warning_and_of_the_newest_an_error(
    deployed: Any,
) -> None:
    words(deployed)
    deployed.store.delete_many([only_of(deployed, 0, -1)])
    found = run(deployed)
    assert "older_epochs_complete" in failed(found)
    assert found["older_epochs_complete"].severity is dg.AssetCheckSeverity.WARN
    assert "older-epoch-incomplete" in found["older_epochs_complete"].description
    assert found["restore_dry_run"].passed
    deployed.store.delete_many([only_of(deployed, -1, 0)])
    found = run(deployed)
    assert not found["restore_dry_run"].passed
    assert found["restore_dry_run"].severity is dg.AssetCheckSeverity.ERROR


def test_a_job_that_was_never_audited_is_not_passed_as_recent(deployed: Any) -> None:
    words(deployed)
    key = dg.AssetCheckKey(dg.AssetKey(["arroyo", "audit"]), RECENCY)
    job = deployed.defs.resolve_implicit_global_asset_job_def()
    alone = job.get_subset(asset_selection=set(), asset_check_selection={key})
    (found,) = alone.execute_in_process(instance=deployed.instance).get_asset_check_evaluations()
    assert not found.passed
    assert "never-audited" in found.description


def test_the_budget_ends_a_run_and_the_next_begins_with_those_that_wait(deployed: Any) -> None:
    words(deployed)
    Written(deployed.store, protocol_job("others")).epochs(2)
    deployed.build(audit=AuditSettings(budget_micros=1))
    for left in (1, 0):
        found = run(deployed)[RECENCY]
        assert found.metadata["arroyo/jobs_passed"].value == 2 - left
