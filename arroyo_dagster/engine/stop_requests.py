"""Requests to stop a run with a last checkpoint: one object below the job, which the run reads."""

from __future__ import annotations

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec import derived, records
from arroyo_dagster.state.metadata.lease import newest_token
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.storage.store import ObjectStore


def requested_stop(store: ObjectStore, paths: JobPaths) -> int | None:
    """Return the number of the run that is requested to stop; None without a request."""
    try:
        data = store.read(paths.stop_request)
    except NotFoundError:
        return None
    return records.decode_stop_request(data, paths.stop_request).generation


def request_stop(store: ObjectStore, paths: JobPaths, now_micros: int) -> int:
    """Request the newest run of a job to stop with a checkpoint, and return its number.

    Raises:
        NotFoundError: the job was never started.
    """
    number = _newest_run(store, paths)
    if not number:
        raise NotFoundError(
            "the job has never been started",
            job=paths.root,
            url=store.url,
            next_step="list jobs with `arroyo-state jobs`",
        )
    store.put(paths.stop_request, derived.encode(records.StopRequest(number, now_micros)))
    return number


def _newest_run(store: ObjectStore, paths: JobPaths) -> int:
    """Return the worker generation of the newest run, or the token of its lease; 0 = none."""
    if paths.layout is Layout.LEGACY:
        return newest_token(store, paths.writers)
    try:
        data = store.read(paths.current_generation)
    except NotFoundError:
        return 0
    return records.decode_current_generation(data, paths.current_generation).worker_generation
