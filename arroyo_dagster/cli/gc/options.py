"""What the commands of gc share: jobs of which only the journal is left, and waiting."""

from __future__ import annotations

import time

from arroyo_dagster.cli.rendering import print_beside_progress
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.storage.store import ObjectStore


def find_any_job(store: ObjectStore, name: str) -> JobPaths:
    """A job by its name; also one that was removed, and of which the journal is left."""
    try:
        return find_job(store, name)
    except NotFoundError:
        pipeline, _, job = name.rpartition("/")
        paths = JobPaths(JobId(job), PipelineId(pipeline) if pipeline else None)
        if not store.list_dir(paths.maintenance).prefixes:
            raise
        return paths


def wait_for_deletions(seconds: float) -> None:
    print_beside_progress(
        f"the epoch is outside its job's retention: waiting {seconds:.0f} seconds for deletions "
        "in flight"
    )
    time.sleep(seconds)
