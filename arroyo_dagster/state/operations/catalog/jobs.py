"""Jobs below a checkpoint URL, and the epochs of each.

This module writes nothing. Listings cover one level at a time, and the search for jobs stops above
the data files; many objects are read concurrently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.restorable import restore_or_roll_back
from arroyo_dagster.state.metadata.tree import CheckpointTree, as_checkpoint
from arroyo_dagster.state.model.checkpoints import RECORD_VERSION, Checkpoint, CheckpointState
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    StatePath,
    WorkerGeneration,
    path_error,
)
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs, stored_sizes
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.lineage import rolled_back
from arroyo_dagster.state.planning.restore.partially_collected import (
    Remains,
    lies_at_the_bucket_root,
    partially_collected,
)
from arroyo_dagster.state.planning.restore.reads import (
    Attempt,
    Level,
    check_root,
    choose_job,
    directories_to_list,
    job_watermark_micros,
    jobs_in,
    unfinished_attempts,
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
    loaded = _loaded(store, paths, epochs[-1])
    problem, newest = loaded.problem, loaded.checkpoint
    if newest is not None:
        problem = _damage(paths, newest, (), loaded.lost_operators) or version_error(newest)
    return JobSummary(
        paths=paths,
        epochs=len(epochs),
        newest_epoch=epochs[-1],
        newest=newest,
        problem=problem,
    )


def version_error(checkpoint: Checkpoint) -> FormatError | None:
    """Return the error for records of another version; None if they have this release's version."""
    if checkpoint.record_version == RECORD_VERSION:
        return None
    return FormatError(
        f"a record of the epoch is of version {checkpoint.record_version}: it was read as "
        f"version {RECORD_VERSION}, and this release does not continue its job",
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        path=checkpoint.ref,
        next_step="use a release of arroyo-dagster that knows this version",
    )


# ---- epochs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSummary:
    """One epoch, or one unfinished attempt at it.

    Attributes:
        state: None if its objects cannot be read.
        checkpoint: None if it is invisible or cannot be read.
        files, size_bytes: the data files it lists, which a restore reads.
        new_files, new_size_bytes: those that the visible epoch before it does not list; None where
            that epoch is unknown.
        missing: how many of the objects it lists do not exist.
        problem: why it cannot be read or restored; None for an epoch that expired in part.
    """

    epoch: Epoch
    worker_generation: WorkerGeneration | None
    state: CheckpointState | None
    checkpoint: Checkpoint | None = None
    files: int = 0
    size_bytes: int = 0
    new_files: int | None = None
    new_size_bytes: int | None = None
    missing: int = 0
    problem: ArroyoStateError | None = None


def list_epochs(
    store: ObjectStore,
    paths: JobPaths,
    limit: int | None = None,
    on_progress: OnProgress = no_progress,
) -> list[EpochSummary]:
    """Summarise the epochs of a job, oldest first, each with its state.

    Invisible, unclaimed and orphaned attempts are included, unless they are older than every epoch
    returned: expired epochs leave objects that look the same. An epoch that an expiry has removed
    in part is partially collected.

    Args:
        limit: return only this many of the newest visible epochs; None = all.
        on_progress: called after each visible epoch, by any thread, by one at a time.
    """
    epochs = CheckpointTree(store, paths).epochs()
    returned = epochs if limit is None else epochs[max(0, len(epochs) - limit) :]
    # One more than returned, to determine the new files of the oldest returned epoch.
    numbers = epochs[max(0, len(epochs) - len(returned) - 1) :]
    count = counter(on_progress, "read epochs", len(numbers), ProgressUnit.EPOCHS)

    def load(epoch: Epoch) -> _Loaded:
        entry = _loaded(store, paths, epoch)
        count()
        return entry

    entries = concurrently(load, numbers)
    loaded = [entry for entry in entries if not entry.vanished]
    rest = _unfinished(store, paths, [entry for entry in loaded if entry.epoch in returned])
    if len(returned) == len(epochs):
        rest += _without_record(store, paths, loaded)
    checkpoints = [entry.checkpoint for entry in (*loaded, *rest) if entry.checkpoint is not None]
    sizes = stored_sizes(store, {path for checkpoint in checkpoints for path in checkpoint.paths})
    by_number: dict[Epoch | None, _Loaded] = {entry.epoch: entry for entry in loaded}
    before: dict[Epoch, _Loaded] = {
        later.epoch: earlier for earlier, later in itertools.pairwise(loaded)
    }
    abandoned = _rolled_back(loaded)
    before |= {
        entry.epoch: by_number[to]
        for entry in loaded
        if entry.checkpoint and (to := entry.checkpoint.rolled_back_to) in by_number
    }
    lineage = [entry for entry in loaded if entry.epoch not in abandoned]
    states = dict.fromkeys(_collected(lineage, sizes), CheckpointState.PARTIALLY_COLLECTED)
    incomplete = {
        one.epoch for one in loaded if one.checkpoint and set(one.checkpoint.paths) - sizes.keys()
    }
    if incomplete:
        metadata_only = metadata_only_epochs(store, paths, incomplete)
        states |= dict.fromkeys(metadata_only, CheckpointState.METADATA_ONLY)
    states |= dict.fromkeys(abandoned, CheckpointState.ROLLED_BACK)
    summaries = [
        _summary(paths, entry, sizes, before.get(entry.epoch), states)
        for entry in (*loaded, *rest)
        if entry.epoch in returned or entry in rest
    ]
    return sorted(summaries, key=lambda summary: (summary.epoch, summary.worker_generation or 0))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The result of reading the metadata of one epoch."""

    epoch: Epoch
    state: CheckpointState | None = None
    checkpoint: Checkpoint | None = None
    problem: ArroyoStateError | None = None
    vanished: bool = False
    generation: WorkerGeneration | None = None
    lost: tuple[StatePath, ...] = ()

    @property
    def lost_operators(self) -> tuple[StatePath, ...]:
        """Missing metadata objects of operators, in the legacy layout."""
        return tuple(path for path in self.lost if path.name == "metadata")


def _loaded(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> _Loaded:
    try:
        checkpoint, lost = CheckpointTree(store, paths).load_remains(epoch)
    except StorageError as error:
        return _Loaded(epoch, problem=error)
    except ArroyoStateError as error:
        # An epoch that expired between listing and reading is not a problem of the job.
        return _Loaded(epoch, problem=error, vanished=store.head(paths.head(epoch)) is None)
    generation = checkpoint.worker_generation
    return _Loaded(epoch, checkpoint.state, checkpoint, generation=generation, lost=lost)


def _without_record(
    store: ObjectStore, paths: JobPaths, loaded: Sequence[_Loaded]
) -> list[_Loaded]:
    """Return epochs whose record an expiry has removed, but not yet their manifest."""
    if paths.layout is Layout.LEGACY or not loaded or loaded[0].checkpoint is None:
        return []
    try:
        chain = list(CheckpointTree(store, paths).load_chain(loaded[0].checkpoint))
    except ArroyoStateError as error:
        oldest = Epoch(max(0, loaded[0].epoch - 1))
        return [_Loaded(oldest, problem=error)]
    return [_Loaded(one.epoch, one.state, one, generation=one.worker_generation) for one in chain]


def _rolled_back(loaded: Sequence[_Loaded]) -> frozenset[Epoch]:
    """Return the epochs that rollbacks have abandoned."""
    if not loaded:
        return frozenset()
    restored = {
        entry.epoch: to
        for entry in loaded
        if entry.checkpoint and (to := entry.checkpoint.rolled_back_to) is not None
    }
    return rolled_back(loaded[-1].epoch, (entry.epoch for entry in loaded), restored)


def _collected(loaded: Sequence[_Loaded], sizes: Mapping[StatePath, int]) -> frozenset[Epoch]:
    """Return the epochs that an expiry has removed in part."""
    readable = [(entry.checkpoint, entry.lost) for entry in loaded if entry.checkpoint is not None]
    if not readable:
        return frozenset()
    newest = readable[-1][0]
    remains = [
        Remains(
            epoch=checkpoint.epoch,
            listed=frozenset(checkpoint.paths),
            lost=frozenset((*(p for p in checkpoint.paths if p not in sizes), *lost)),
        )
        for checkpoint, lost in readable
    ]
    return partially_collected(remains, newest)


def _unfinished(store: ObjectStore, paths: JobPaths, owners: Sequence[_Loaded]) -> list[_Loaded]:
    unreadable = {owner.epoch for owner in owners if owner.checkpoint is None}
    owning = [Attempt(one.epoch, one.generation) for one in owners if one.checkpoint is not None]
    directories = CheckpointTree(store, paths).directories()
    if paths.layout is Layout.LEGACY:
        # An older directory without metadata holds only files that newer epochs list.
        newest = max((owner.epoch for owner in owners), default=Epoch(0))
        epochs = [epoch for _, epoch in directories if epoch > newest]
        return [_Loaded(epoch, CheckpointState.INVISIBLE) for epoch in epochs]
    attempts = [
        Attempt(epoch, generation) for generation, epoch in directories if epoch not in unreadable
    ]
    return concurrently(
        lambda attempt: _attempted(store, paths, attempt), unfinished_attempts(attempts, owning)
    )


def _attempted(store: ObjectStore, paths: JobPaths, attempt: Attempt) -> _Loaded:
    from arroyo_dagster.state.codec import metadata  # loads protobuf

    assert attempt.worker_generation is not None
    ref = paths.manifest(attempt.worker_generation, attempt.epoch)
    try:
        manifest = _optional(store, ref, metadata.decode_manifest)
        path = paths.epoch_record(attempt.epoch)
        record = _optional(store, path, records.decode_epoch_record)
        state = recovery.checkpoint_state(ref, manifest, record, None).state
    except ArroyoStateError as error:
        return _Loaded(attempt.epoch, problem=error, generation=attempt.worker_generation)
    checkpoint = None if manifest is None else as_checkpoint(manifest, ref, state)
    return _Loaded(attempt.epoch, state, checkpoint, generation=attempt.worker_generation)


def _optional(store: ObjectStore, path: StatePath, decode: Callable[[bytes, str], _T]) -> _T | None:
    try:
        data = store.read(path)
    except NotFoundError:
        return None
    return decode(data, path)


def _summary(
    paths: JobPaths,
    one: _Loaded,
    sizes: Mapping[StatePath, int],
    before: _Loaded | None,
    states: Mapping[Epoch, CheckpointState],
) -> EpochSummary:
    checkpoint = one.checkpoint
    listed = dict.fromkeys(checkpoint.paths) if checkpoint else {}
    missing = [path for path in listed if path not in sizes]
    state, problem = one.state, one.problem
    special = states.get(one.epoch)
    owns = one.state is None or one.state.canonical
    if owns and (one.state is not None or special is CheckpointState.ROLLED_BACK):
        state = special or state
    expired = (CheckpointState.PARTIALLY_COLLECTED, CheckpointState.METADATA_ONLY)
    if state not in expired and checkpoint is not None:
        problem = problem or _damage(paths, checkpoint, missing, one.lost_operators)
        problem = problem or version_error(checkpoint)
    new: list[StatePath] | None = None
    if checkpoint is not None and one.state is not None and one.state.canonical:
        earlier = before.checkpoint if before is not None else None
        if earlier is not None or checkpoint.epoch == 1:
            earlier_paths = set(earlier.paths) if earlier is not None else set()
            new = [path for path in listed if path not in earlier_paths]
    return EpochSummary(
        epoch=one.epoch,
        worker_generation=one.generation,
        state=state,
        checkpoint=checkpoint,
        files=len(listed),
        size_bytes=sum(sizes.get(path, 0) for path in listed),
        new_files=None if new is None else len(new),
        new_size_bytes=None if new is None else sum(sizes.get(path, 0) for path in new),
        missing=len(missing) + len(one.lost_operators),
        problem=problem,
    )


def _damage(
    paths: JobPaths,
    checkpoint: Checkpoint,
    missing: Sequence[StatePath],
    lost: Sequence[StatePath],
) -> ArroyoStateError | None:
    facts: dict[str, Any] = {"job": paths.root, "epoch": checkpoint.epoch}
    if lost:
        return FormatError(
            f"the metadata of {len(lost)} operators is missing",
            path=lost[0],
            next_step=restore_or_roll_back(paths, checkpoint, "object"),
            **facts,
        )
    if missing:
        step = restore_or_roll_back(paths, checkpoint, "file")
        if lies_at_the_bucket_root(checkpoint, missing):
            step = (
                "all files of expiring tables are missing and no others: Arroyo before v0.12 "
                "wrote them without the prefix of the URL; check the root of the bucket"
            )
        listed = len(dict.fromkeys(checkpoint.paths))
        return FormatError(
            f"{len(missing)} of {listed} data files are missing",
            path=missing[0],
            next_step=step,
            **facts,
        )
    return None
