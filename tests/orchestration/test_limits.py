"""Limits of the documented dagster.yaml, as Dagster applies them: a maximum for the whole instance,
however many deployments have something due; and nothing of ours is retried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from dagster._utils.tags import TagConcurrencyLimitsCounter

from arroyo_dagster.orchestration import (
    ArroyoOptions,
    MaintenanceWindow,
    PipelineList,
    build_arroyo_definitions,
)
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.requests import MAINTENANCE_TAG

DEPLOYMENT = Path(__file__).parents[2] / "docs" / "operate" / "deployment.md"
BLOCK = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", DEPLOYMENT.read_text(), re.DOTALL)[0])
LIMITS = BLOCK["concurrency"]["runs"]["tag_concurrency_limits"]
CHANGING = ("compaction", "gc", "windows")
OTHERS = ("verify", "fleet")


def tags_of(deployment: str, *jobs: str) -> list[Mapping[str, str]]:
    """The tags of runs of these jobs of a deployment."""
    pipeline = ListedPipeline("p/main", ("p", "main"), managed=True)
    listed = PipelineList("memory://limits", (pipeline,), {pipeline.root: pipeline.key})
    window = MaintenanceWindow(jobs=["payments/job"], between="02:00-04:00")
    defs = build_arroyo_definitions(
        "memory://limits",
        pipelines=listed,
        mode="maintain",
        deployment=deployment,
        options=ArroyoOptions(window=window),
    )
    return [defs.resolve_job_def(f"arroyo_{deployment}_{name}").run_tags for name in jobs]


def dequeued(limits: list[Any], queued: list[Mapping[str, str]]) -> list[int]:
    """Which of the queued runs Dagster starts together."""
    counter, found = TagConcurrencyLimitsCounter(limits, []), []
    for number, tags in enumerate(queued):
        run = dg.DagsterRun(job_name="j", tags=dict(tags))
        if not counter.is_blocked(run):
            counter.update_counters_with_launched_item(run)
            found.append(number)
    return found


def test_deployments_stay_within_the_limit_of_the_instance_for_runs_that_change_state() -> None:
    queued = [tags for name in ("a", "b") for tags in tags_of(name, *CHANGING)]
    [limit] = [one["limit"] for one in LIMITS if one["key"] == MAINTENANCE_TAG]
    assert len(dequeued(LIMITS, queued)) == limit == 4
    assert {tags[MAINTENANCE_TAG] for tags in queued} == {"a", "b"}
    looking = tags_of("a", *OTHERS)
    assert len(dequeued(LIMITS, [*queued, *looking])) == limit + len(looking)


def test_no_run_is_retried() -> None:
    for tags in tags_of("a", *CHANGING, *OTHERS):
        assert tags["dagster/max_retries"] == "0"
