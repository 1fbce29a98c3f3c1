"""What the commands of gc share: durations, and jobs of which only the journal is left."""

from __future__ import annotations

import re
import time

import click

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.storage.store import ObjectStore

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|d|w)[a-z]*\s*")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Duration(click.ParamType):  # type: ignore[type-arg] # generic in some releases only
    """A duration such as `3d`, `12 hours` or `90m`, in microseconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Convert a text to microseconds; a number is returned unchanged."""
        if isinstance(value, int):
            return value
        found = _DURATION.fullmatch(str(value).lower())
        if found is None:
            self.fail(f"{value!r} is not a duration; write it as 3d, 12h or 90m", param, ctx)
        return int(float(found[1]) * _SECONDS[found[2]] * 1_000_000)


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
    click.echo(
        f"the epoch is outside its job's retention: waiting {seconds:.0f} seconds for deletions "
        "in flight",
        err=True,
    )
    time.sleep(seconds)
