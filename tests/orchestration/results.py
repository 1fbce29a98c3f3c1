"""What a run of Dagster's definitions shows, and the job at rest that most tests maintain."""

from __future__ import annotations

from typing import Any

from arroyo_dagster.state import ObjectStore, verify_job
from tests.internals import lease
from tests.jobs import state_of, word_job

JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
    "sinks": 0,
    "parallelism": 1,
}
"""A job of twelve epochs that leaves its small files to a compaction."""
PATHS = word_job(None, **JOB).paths  # type: ignore[arg-type]
KEY = str(PATHS.root)


def configured(op: str, **config: Any) -> dict[str, Any]:
    """The configuration of a run of one op."""
    return {"ops": {op: {"config": config}}}


COMPACT = configured("arroyo_compacted_state", policy="full")
GC = configured("arroyo_retained_epochs", keep_epochs=3, dry_run=False)
COMPACTED, RETAINED = f"{KEY}/compacted_state", f"{KEY}/retained_epochs"


def keys(defs: Any) -> set[str]:
    """The keys of all assets of some definitions."""
    return {key.to_user_string() for key in defs.resolve_all_asset_keys()}


def loaded(store: ObjectStore, **job: Any) -> dict[str, Any]:
    """What a restore of the job loads, without the number of the epoch."""
    found = dict(state_of(store, word_job(store, **JOB, **job)))
    found.pop("")
    return found


def assert_free_and_clean(store: ObjectStore, *jobs: Any) -> None:
    """Assert that nobody leases these jobs, and that they are restorable."""
    for paths in jobs or (PATHS,):
        with lease(store, paths, "the test"):
            pass
        verdict = verify_job(store, paths, level=4).verdict
        assert verdict.passed, verdict.errors


def checks(result: Any) -> dict[str, Any]:
    """The evaluation of each check, by its name."""
    return {one.check_name: one for one in result.get_asset_check_evaluations()}


def passed(result: Any) -> dict[str, bool]:
    """Whether each check passed, by its name."""
    return {name: one.passed for name, one in checks(result).items()}


def materialized(result: Any) -> list[Any]:
    """The materializations of a run, in order."""
    events = result.get_asset_materialization_events()
    return [event.step_materialization_data.materialization for event in events]


def event_metadata(event: Any) -> dict[str, Any]:
    """The values of an event's metadata, by name."""
    return {name: one.value for name, one in event.metadata.items()}


def failure(result: Any) -> Any:
    """What the only failed step of a run says: a description, and metadata."""
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert failed.step_failure_data.user_failure_data is not None
    return failed.step_failure_data.user_failure_data


def observed(result: Any) -> list[Any]:
    """The observations of a run, in order."""
    events = result.get_asset_observation_events()
    return [event.asset_observation_data.asset_observation for event in events]


def logged(instance: Any, result: Any) -> list[str]:
    """The lines of the log of a run."""
    return [entry.user_message for entry in instance.all_logs(result.run_id)]
