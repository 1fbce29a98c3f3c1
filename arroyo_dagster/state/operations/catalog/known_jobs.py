"""Which jobs were ever seen, kept in the catalogue, so that a job that vanishes is noticed.

A job is known by its rows in the catalogue of epochs, or by an object of its own here. It stays
known until somebody acknowledges that it is gone (`forget`).
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
    """Where the object of a job lies in a table of the catalogue."""
    return StatePath(f"{table}/{paths.layout.value}/{paths.root}.json")


# ---- what is known -------------------------------------------------------------------------------


def known_jobs(catalogue: ObjectStore) -> set[JobPaths]:
    """Every job that was ever catalogued or remembered, acknowledged or not."""
    return _listed(catalogue, KNOWN) | _listed(catalogue, EPOCH_CATALOG)


def forgotten(catalogue: ObjectStore) -> set[JobPaths]:
    """The jobs of which somebody acknowledged that they are gone."""
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
    """Keep that these jobs were seen.

    Args:
        jobs: each with the newest epoch that is known of it, None if none is.
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
    """The newest epoch of a job that the catalogue ever knew of; None if it knows of none."""
    return max((*_catalogued(catalogue, paths), *_remembered(catalogue, paths)), default=None)


def _catalogued(catalogue: ObjectStore, paths: JobPaths) -> list[int]:
    try:
        return [row.epoch for row in read_history(catalogue, paths).epochs]
    except FormatError:  # what is wrong with it is told where it is refreshed
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
    """Those of the jobs that a collection of dead jobs removed, as their journal says."""

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
    """Those of the jobs that may be gone: somebody said so, or removed them as dead."""
    said = forgotten(catalogue).intersection(jobs)
    return said | removed_on_purpose(store, set(jobs) - said)


def find_known_job(catalogue: ObjectStore, name: str) -> JobPaths:
    """Find a job that the catalogue knows, by `job` or `pipeline/job`.

    Raises:
        NotFoundError: it knows no such job; says which it knows.
        InputError: several pipelines have such a job.
    """
    known = sorted(known_jobs(catalogue), key=lambda paths: paths.root)
    return choose_job(name, known, catalogue.url)


def forget(catalogue: ObjectStore, paths: JobPaths, *, owner: str, now_micros: int) -> int | None:
    """Acknowledge that a job is gone; until it comes back, nobody is told that it vanished.

    Returns:
        The last epoch that was known of it.
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
    """Refuse to acknowledge that a job is gone while it is there.

    Raises:
        InputError: it is there.
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
    """Drop the acknowledgements of jobs that are there again.

    Raises:
        ConflictError: one of them could not be dropped.
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
