"""Jobs below a checkpoint URL, and prefixes that no job uses; `epoch_summaries` has the epochs.

This module writes nothing. Listings cover one level at a time, and the search for jobs stops above
the data files; many objects are read concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from arroyo_dagster.errors import (
    ArroyoStateError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    StatePath,
    path_error,
)
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import ObjectKind
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.catalog.epoch_summaries import (
    damage_of,
    load_epoch,
    version_error,
)
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.abandoned import (
    CHECK_FIRST,
    REMAINS,
    AbandonedPrefix,
    kind_of_remains,
    prefixes_without_job,
    removal_command,
    why_abandoned,
)
from arroyo_dagster.state.planning.restore.reads import (
    Level,
    check_root,
    choose_job,
    directories_to_list,
    job_watermark_micros,
    jobs_in,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.names import StoredName
from arroyo_dagster.state.storage.store import ObjectStore

_T = TypeVar("_T")


# ---- jobs ----------------------------------------------------------------------------------------


def list_jobs(
    store: ObjectStore, on_unlisted: Callable[[Sequence[str]], None] = lambda paths: None
) -> list[JobPaths]:
    """Return the jobs below the URL of a store, in both layouts, ordered by path.

    Args:
        on_unlisted: called with the directories that may be of jobs and are left out, because no
            store can write their names, if there are any.

    Raises:
        NotFoundError: the root does not exist.
        InputError: the root is not empty, but contains no job.
    """
    levels = list_levels(store)
    jobs = jobs_in(levels)
    check_root(levels, jobs, store.url)
    if left_out := unlisted(levels):
        on_unlisted(left_out)
    return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobListing:
    """What the listings below a URL show, of which some may have failed.

    Attributes:
        levels: of the root and the directories that were listed, by path.
        unreadable: why a directory could not be listed, by path; it may hold jobs.
        jobs: the jobs of the other directories, ordered by path.
    """

    levels: Mapping[str, Level]
    unreadable: Mapping[str, ArroyoStateError]
    jobs: Sequence[JobPaths]

    def hides(self, paths: JobPaths) -> bool:
        """Whether a job may lie in a directory that could not be listed."""
        return any(f"{paths.root}/".startswith(f"{path}/") for path in self.unreadable)


def list_readable_jobs(store: ObjectStore) -> JobListing:
    """List the jobs below the URL of a store; a directory that cannot be listed hides no other.

    Raises:
        NotFoundError: the root does not exist.
        InputError: the root is not empty, but contains no job.
        StorageError: the root cannot be listed.
    """
    listing = list_prefixes(store)
    if not listing.unreadable:
        check_root(listing.levels, listing.jobs, store.url)
    return listing


def list_prefixes(store: ObjectStore) -> JobListing:
    """List the levels as `list_readable_jobs`; the root need not contain a job."""
    failed: dict[str, ArroyoStateError] = {}
    levels = list_levels(store, failed)
    jobs = jobs_in(levels)
    unreadable = {path.removesuffix("/checkpoints"): error for path, error in failed.items()}
    return JobListing(levels=levels, unreadable=unreadable, jobs=jobs)


def unlisted(levels: Mapping[str, Level]) -> list[str]:
    """Return the directories that may be of jobs and that no store can write, ordered by path."""
    pairs = ((path, name) for path, level in levels.items() for name in level.unusable)
    return sorted(f"{path}/{name}".lstrip("/") for path, name in pairs)


def list_levels(
    store: ObjectStore, failed: dict[str, ArroyoStateError] | None = None
) -> dict[str, Level]:
    """List the root and the two levels below it, by path; data files are in none of them.

    Args:
        failed: receives the error of each directory below the root that cannot be listed; None =
            raise the first.

    Raises:
        NotFoundError: the root does not exist.
        StorageError: a directory cannot be listed.
    """

    def listed(path: str) -> Level | ArroyoStateError:
        try:
            return list_level(store, path)
        except ArroyoStateError as error:
            if failed is None or not path:
                raise
            return error

    levels: dict[str, Level] = {}
    while directories := directories_to_list({**levels, **dict.fromkeys(failed or (), Level())}):
        for path, level in zip(directories, concurrently(listed, directories), strict=True):
            if isinstance(level, Level):
                levels[path] = level
            elif failed is not None:
                failed[path] = level
    return levels


def list_level(store: ObjectStore, path: str) -> Level:
    """List one directory ("" for the root) for `planning.restore.reads.jobs_in`."""
    listing = store.list_dir(path)
    # A name without a raw path cannot be a job, but it shows that the directory is not empty.
    objects = {info.path.name for info in listing.objects}
    foreign = {below.name for below in listing.prefixes if isinstance(below, StoredName)}
    directories = {below.name for below in listing.prefixes if not isinstance(below, StoredName)}
    return Level(frozenset(objects | foreign), frozenset(directories), frozenset(foreign))


def find_job(store: ObjectStore, name: str) -> JobPaths:
    """Find a job by `job`, or by `pipeline/job` where several pipelines have a job of that name.

    Raises:
        NotFoundError: no such job; lists the existing jobs.
        InputError: the name is ambiguous, or not a valid name.
        StorageError: a directory cannot be listed, so the name alone may be ambiguous.
    """
    problem = path_error(name)
    if problem is not None:
        raise InputError(
            f"not the name of a job: {problem}",
            job=name,
            next_step="name it as job, or as pipeline/job",
        )
    path = StatePath(name)
    # A full path needs one listing, however many jobs there are.
    paths = paths_of(path)
    if job_is_there(store, paths):
        return paths
    listing = list_readable_jobs(store)
    for error in listing.unreadable.values():
        raise StorageError(
            f"whether one job has this name is not known: {error.message}",
            retryable=error.retryable,
            next_step="name it as pipeline/job",
            **(error.facts | {"job": name}),
        ) from error
    return choose_job(name, listing.jobs, store.url)


def find_any_job(store: ObjectStore, name: str) -> JobPaths:
    """Find a job as `find_job`; also one that was removed, and of which the journal is left."""
    try:
        return find_job(store, name)
    except NotFoundError:
        paths = paths_of(StatePath(name))
        if not store.list_dir(paths.maintenance).prefixes:
            raise
        return paths


def jobs_or_all(
    store: ObjectStore, names: Sequence[str]
) -> tuple[Sequence[JobPaths], Mapping[str, ArroyoStateError]]:
    """Return the named jobs, or all if none is named, and why directories cannot be listed.

    Errors as `find_job` and `list_readable_jobs`.
    """
    if names:
        return [find_job(store, name) for name in names], {}
    listing = list_readable_jobs(store)
    return listing.jobs, listing.unreadable


def job_is_there(store: ObjectStore, paths: JobPaths) -> bool:
    """Whether a job exists, by one listing.

    Raises:
        NotFoundError: the root itself does not exist.
    """
    legacy = paths.layout is Layout.LEGACY
    directory = str(paths.checkpoints()) if legacy else str(paths.root)
    return paths in jobs_in({directory: list_level(store, directory)})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job, summarised by its newest epoch.

    Attributes:
        paths: of a directory that cannot be listed, as if it were a job.
        listed: whether its directory could be listed; otherwise it may hold several jobs.
        epochs: the number of visible epochs; None if they cannot be listed.
        newest_epoch: None if there is none.
        newest: the metadata of the newest epoch; None if there is none or it cannot be read.
        problem: why it cannot be read or restored.
    """

    paths: JobPaths
    epochs: int | None
    listed: bool = True
    newest_epoch: Epoch | None = None
    newest: Checkpoint | None = None
    problem: ArroyoStateError | None = None

    @property
    def watermark_micros(self) -> int | None:
        """Event time reached by all operators that have a watermark."""
        return None if self.newest is None else job_watermark_micros(self.newest)


def summarise_jobs(
    store: ObjectStore,
    on_progress: OnProgress = no_progress,
    on_unlisted: Callable[[Sequence[str]], None] = lambda paths: None,
) -> list[JobSummary]:
    """Summarise every job below the URL by its newest epoch, ordered by path.

    A job that cannot be read, and a directory that cannot be listed, has a `problem`. Errors as
    `list_readable_jobs`.

    Args:
        on_progress: called after each job, by any thread, by one at a time.
        on_unlisted: as of `list_jobs`.
    """
    listing = list_readable_jobs(store)
    if left_out := unlisted(listing.levels):
        on_unlisted(left_out)
    return summarise_listing(store, listing, on_progress)


def summarise_listing(
    store: ObjectStore, listing: JobListing, on_progress: OnProgress = no_progress
) -> list[JobSummary]:
    """Summarise the jobs of a listing as `summarise_jobs` does."""
    count = counter(on_progress, "read jobs", len(listing.jobs), ProgressUnit.JOBS)

    def summarise(paths: JobPaths) -> JobSummary:
        summary = summarise_job(store, paths)
        count()
        return summary

    summaries = [*concurrently(summarise, listing.jobs), *unreadable_jobs(listing)]
    return sorted(summaries, key=lambda job: job.paths.root)


def unreadable_jobs(listing: JobListing) -> list[JobSummary]:
    """Return a summary with a `problem` for each directory that could not be listed."""
    return [
        JobSummary(paths=paths_of(path), listed=False, epochs=None, problem=error)
        for path, error in listing.unreadable.items()
    ]


def paths_of(root: str) -> JobPaths:
    """Return the paths of the job at `job` or `pipeline/job`."""
    pipeline, _, job = root.rpartition("/")
    return JobPaths(JobId(job), PipelineId(pipeline) if pipeline else None)


def summarise_job(store: ObjectStore, paths: JobPaths) -> JobSummary:
    """Summarise one job by its newest epoch.

    A broken epoch and an error of the store are a `problem` of the job, which stops no other.
    """
    try:
        epochs = CheckpointTree(store, paths).epochs()
    except ArroyoStateError as error:
        return JobSummary(paths=paths, epochs=None, problem=error)
    if not epochs:
        return JobSummary(paths=paths, epochs=0)
    loaded = load_epoch(store, paths, epochs[-1])
    problem, newest = loaded.problem, loaded.checkpoint
    if newest is not None:
        problem = damage_of(paths, newest, (), loaded.lost_operators) or version_error(newest)
    return JobSummary(
        paths=paths,
        epochs=len(epochs),
        newest_epoch=epochs[-1],
        newest=newest,
        problem=problem,
    )


# ---- prefixes below a checkpoint URL that no job uses --------------------------------------------


def find_abandoned(
    store: ObjectStore,
    listing: JobListing,
    summaries: Sequence[JobSummary],
    answers: Sequence[JobAnswer],
    on_progress: OnProgress = no_progress,
) -> tuple[dict[str, AbandonedPrefix], list[StorageError]]:
    """Return the dead jobs and the remains of jobs by path, and why prefixes cannot be listed.

    The proofs are those of gc, which judges again before it deletes. A living job is not listed,
    nor more of a directory than the first name that neither Arroyo nor this package creates.

    Args:
        summaries: the jobs of the listing; `answers` the status of each.
    """
    dead: dict[StatePath, tuple[str, str]] = {}
    for job, answer in zip(summaries, answers, strict=True):
        if job.listed and (proof := _why_dead(store, job, answer, answers)) is not None:
            dead[job.paths.root] = proof
    others_below = prefixes_without_job(listing.levels, listing.jobs)
    unowned = [path for path in others_below if path not in listing.unreadable]
    count = counter(on_progress, "listed prefixes", len(dead) + len(unowned), ProgressUnit.PREFIXES)

    def judge(path: StatePath) -> AbandonedPrefix | StorageError | None:
        try:
            return _judge(store, path, dead.get(path))
        except StorageError as error:
            return error
        finally:
            count()

    judged = list(concurrently(judge, [*dead, *unowned]))
    return (
        {prefix.path: prefix for prefix in judged if isinstance(prefix, AbandonedPrefix)},
        [error for error in judged if isinstance(error, StorageError)],
    )


def _why_dead(
    store: ObjectStore, job: JobSummary, answer: JobAnswer, answers: Sequence[JobAnswer]
) -> tuple[str, str] | None:
    """Return the proof that a job is dead, and the command; None without a source of status."""
    if not answer.answers and answer.facts.condition is not JobCondition.GONE:
        return None
    others = [other for other in answers if other.paths != job.paths]
    managed = job.newest is not None and job.newest.progress is not None
    why = why_abandoned(job.paths, answer, others, managed=managed)
    if why is None:
        return None
    from arroyo_dagster.state.operations.gc.roots import newest_root

    readable = True
    try:
        newest_root(store, job.paths)
    except ArroyoStateError:
        readable = False
    return why, removal_command(job.paths, readable=readable)


def _judge(
    store: ObjectStore, path: StatePath, proof: tuple[str, str] | None
) -> AbandonedPrefix | None:
    """Add up a dead job, of which there is a proof, or judge a directory that is no job.

    The latter is judged by the names and times of its objects. What was written within the grace
    period may belong to a job that starts now. Objects that only this package keeps are the records
    of a removed job, for example its journal.
    """
    from arroyo_dagster.state.model.garbage import GRACE_MICROS

    objects = size_bytes = last_write = 0
    only_ours, grace = True, wall_clock() - GRACE_MICROS
    for info in store.list(path):
        modified = info.modified_micros or 0
        if proof is None:
            kind = kind_of_remains(info.path) if info.addressable else ObjectKind.FOREIGN
            if kind is ObjectKind.FOREIGN or not 0 < modified <= grace:
                return None
            only_ours &= kind is ObjectKind.MAINTENANCE
        objects += 1
        size_bytes += info.size_bytes
        last_write = max(last_write, modified)
    if proof is None and only_ours:
        return None
    why, next_step = proof or (REMAINS, CHECK_FIRST)
    return AbandonedPrefix(
        path=path,
        why=why,
        next_step=next_step,
        objects=objects,
        size_bytes=size_bytes,
        last_write_micros=last_write or None,
    )
