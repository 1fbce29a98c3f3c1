"""Limits of the documented dagster.yaml, as Dagster applies them: one run of a job at a time, and a
maximum for the whole instance however many jobs are due.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from arroyo_dagster.orchestration.schedules import MAINTENANCE_TAG
from dagster._utils.tags import TagConcurrencyLimitsCounter

from arroyo_dagster.orchestration.compaction.maintenance_window import MaintenanceWindow
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions

DEPLOYMENT = Path(__file__).parents[2] / "docs" / "operate" / "deployment.md"
BLOCK = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", DEPLOYMENT.read_text(), re.DOTALL)[0])
LIMITS = BLOCK["concurrency"]["runs"]["tag_concurrency_limits"]
PER_JOB = ("arroyo_compaction", "arroyo_gc", "arroyo_collect_orphans", "arroyo_remove_dead_jobs")
BATCHES = tuple(f"{name}_fleet" for name in PER_JOB)


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    window = MaintenanceWindow(jobs=["payments/job"], between="02:00-04:00")
    return build_arroyo_definitions("memory://limits", window=window)


def tags_of(defs: dg.Definitions, name: str, key: str | None) -> Mapping[str, str]:
    job = defs.resolve_job_def(name)
    if key is None:
        return job.run_tags
    tags = job.partitioned_config.get_tags_for_partition_key(key) if job.partitioned_config else {}
    return {**job.run_tags, **tags}


def dequeued(limits: list[Any], queued: list[Mapping[str, str]]) -> list[int]:
    """Which of the queued runs Dagster starts together."""
    counter, found = TagConcurrencyLimitsCounter(limits, []), []
    for number, tags in enumerate(queued):
        run = dg.DagsterRun(job_name="j", tags=dict(tags))
        if not counter.is_blocked(run):
            counter.update_counters_with_launched_item(run)
            found.append(number)
    return found


def queue_of(defs: dg.Definitions, runs: list[tuple[str, str | None]]) -> list[Mapping[str, str]]:
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("arroyo_jobs", sorted({key for _, key in runs if key}))
        with dg.partition_loading_context(dynamic_partitions_store=instance):
            return [tags_of(defs, name, key) for name, key in runs]


def test_two_runs_of_one_job_do_not_run_together_whatever_they_do(defs: dg.Definitions) -> None:
    runs: list[tuple[str, str | None]] = [(name, "payments/job") for name in PER_JOB]
    runs.append(("arroyo_compaction", "payments/other"))
    assert dequeued(LIMITS, queue_of(defs, runs)) == [0, 4]


def test_500_jobs_that_are_due_at_once_stay_within_the_limit_of_the_instance(
    defs: dg.Definitions,
) -> None:
    single: list[tuple[str, str | None]] = [
        (PER_JOB[number % len(PER_JOB)], f"p/{number}") for number in range(500)
    ]
    runs = [*((name, None) for name in BATCHES), ("arroyo_maintenance_window", None), *single]
    [limit] = [one["limit"] for one in LIMITS if one["key"] == MAINTENANCE_TAG]
    assert len(dequeued(LIMITS, queue_of(defs, runs))) == limit == 4
