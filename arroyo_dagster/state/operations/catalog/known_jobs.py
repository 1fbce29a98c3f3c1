"""Jobs that were ever listed, kept in the catalogue so that a job that vanishes is noticed.

A job is known by its rows in the catalogue of epochs, or by an object of its own here. It stays
known until a user acknowledges that it is gone (`forget`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from arroyo_dagster.errors import ConflictError, FormatError, InputError, NotFoundError
from arroyo_dagster.state.codec.records import OWN_VERSION, encode_json, known_fields
from arroyo_dagster.state.model.garbage import PlanKind
from arroyo_dagster.state.model.ids import JobId, PipelineId, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.operations.catalog.epochs import EPOCH_CATALOG, read_history
from arroyo_dagster.state.operations.catalog.jobs import job_is_there
from arroyo_dagster.state.operations.gc.journal import list_runs
from arroyo_dagster.state.planning.restore.reads import choose_job
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

VERSION = 1
KNOWN = "known_jobs"
FORGOTTEN = "forgotten_jobs"


def job_path(table: str, paths: JobPaths) -> StatePath:
    """Return the path of a job's object in a table of the catalogue."""
    return StatePath(f"{table}/{paths.layout.value}/{paths.root}.json")


# ---- what is known -------------------------------------------------------------------------------


def known_jobs(catalogue: ObjectStore) -> set[JobPaths]:
    """Return every job that was ever catalogued or remembered, acknowledged or not."""
    return _listed(catalogue, KNOWN) | _listed(catalogue, EPOCH_CATALOG)


def forgotten(catalogue: ObjectStore) -> set[JobPaths]:
    """Return the jobs that a user has acknowledged as gone."""
    return _listed(catalogue, FORGOTTEN)


def _listed(catalogue: ObjectStore, table: str) -> set[JobPaths]:
    try:
        listed = [info.path for info in catalogue.list(table) if info.addressable]
    except NotFoundError:  # nothing was catalogued yet
        return set()
    found = (_job_at(path) for path in listed)
    return {paths for paths in found if paths is not None}


def _job_at(path: StatePath) -> JobPaths | None:
    _, layout, *names = path.rpartition(".")[0].split("/")
    if layout == Layout.LEGACY.value and len(names) == 1:
        return JobPaths(JobId(names[0]))
    if layout == Layout.PROTOCOL.value and len(names) == 2:
        return JobPaths(JobId(names[1]), PipelineId(names[0]))
    return None


def remember(
    catalogue: ObjectStore, jobs: Iterable[tuple[JobPaths, int | None]], now_micros: int
) -> None:
    """Record that these jobs exist.

    Args:
        jobs: each with its newest known epoch; None if none is known.
    """
    concurrently(
        lambda one: catalogue.put(
            job_path(KNOWN, one[0]),
            encode_json(
                {
                    "version": OWN_VERSION,
                    "job": one[0].root,
                    "epoch": one[1],
                    "seen_at_micros": now_micros,
                }
            ),
        ),
        list(jobs),
    )


def last_epoch(catalogue: ObjectStore, paths: JobPaths) -> int | None:
    """Return the newest epoch of a job that the catalogue ever recorded; None if there is none."""
    return max((*_catalogued(catalogue, paths), *_remembered(catalogue, paths)), default=None)


def _catalogued(catalogue: ObjectStore, paths: JobPaths) -> list[int]:
    try:
        return [row.epoch for row in read_history(catalogue, paths).epochs]
    except FormatError:  # the refresh of the catalogue reports it
        return []


def _remembered(catalogue: ObjectStore, paths: JobPaths) -> list[int]:
    path = job_path(KNOWN, paths)
    try:
        with known_fields(catalogue.read(path), path) as fields:
            epoch = fields.optional_number("epoch")
    except (NotFoundError, FormatError):
        return []
    return [] if epoch is None else [epoch]


# ---- jobs that are gone --------------------------------------------------------------------------


def removed_on_purpose(store: ObjectStore, jobs: Collection[JobPaths]) -> set[JobPaths]:
    """Return those of the jobs that a gc of dead jobs removed, according to their journals."""

    def one(paths: JobPaths) -> bool:
        try:
            runs = list_runs(store, paths)
        except (NotFoundError, FormatError):
            return False
        return bool(runs) and runs[-1].ended and runs[-1].kind == PlanKind.DEAD_JOB.value

    listed = list(jobs)
    answers = zip(listed, concurrently(one, listed), strict=True)
    return {paths for paths, removed in answers if removed}


def acknowledged(
    store: ObjectStore, catalogue: ObjectStore, jobs: Collection[JobPaths]
) -> set[JobPaths]:
    """Return the jobs that are expected to be gone: acknowledged, or deleted as dead jobs."""
    said = forgotten(catalogue).intersection(jobs)
    return said | removed_on_purpose(store, set(jobs) - said)


def find_known_job(catalogue: ObjectStore, name: str) -> JobPaths:
    """Find a job in the catalogue by `job` or `pipeline/job`.

    Raises:
        NotFoundError: the catalogue has no such job; lists those it has.
        InputError: several pipelines have such a job.
    """
    known = sorted(known_jobs(catalogue), key=lambda paths: paths.root)
    return choose_job(name, known, catalogue.url)


def forget(catalogue: ObjectStore, paths: JobPaths, *, owner: str, now_micros: int) -> int | None:
    """Acknowledge that a job is gone; it is not reported as vanished until it reappears.

    Returns:
        The last known epoch of the job; None if none is known.
    """
    epoch = last_epoch(catalogue, paths)
    document = {
        "version": OWN_VERSION,
        "job": paths.root,
        "epoch": epoch,
        "forgotten_at_micros": now_micros,
        "owner": owner,
    }
    catalogue.put(job_path(FORGOTTEN, paths), encode_json(document))
    return epoch


def check_gone(store: ObjectStore, paths: JobPaths) -> None:
    """Refuse to acknowledge that a job is gone while it exists.

    Raises:
        InputError: the job exists.
    """
    try:
        there = job_is_there(store, paths)
    except NotFoundError:
        return
    if there:
        raise InputError(
            "the job exists: there is nothing to forget",
            job=paths.root,
            url=store.url,
            next_step="forget a job once its objects are gone",
        )


def take_back(catalogue: ObjectStore, jobs: Collection[JobPaths]) -> None:
    """Delete the acknowledgements of jobs that exist again.

    Raises:
        ConflictError: an acknowledgement could not be deleted.
    """
    if not jobs:
        return
    outcome = catalogue.delete_many([job_path(FORGOTTEN, paths) for paths in jobs])
    for path, reason in outcome.failed.items():
        raise ConflictError(
            f"an acknowledgement could not be deleted: {reason}",
            path=path,
            url=catalogue.url,
            retryable=True,
            next_step="try again; the job exists, but would not be reported if it vanished",
        )
