"""Read the facts that the checks of `planning/verify/checks.py` need. This module writes nothing.

Of data files it reads only the footers.
"""

from __future__ import annotations

import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.codec.parquet import read_facts
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN, TIMESTAMP_COLUMN
from arroyo_dagster.state.operations.catalog.jobs import JobSummary, job_is_there, summarise_job
from arroyo_dagster.state.operations.catalog.metadata_only import stored_sizes
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.restore.reads import is_at_rest, restore_plan
from arroyo_dagster.state.planning.verify.checks import (
    Columns,
    OperatorTable,
    StoredFile,
    files_exist,
    restorable,
)
from arroyo_dagster.state.planning.verify.findings import Verdict, error, unreadable, warning
from arroyo_dagster.state.planning.verify.fleet import JobAge
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.forms import columns_of, stored_form, table_forms

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory

_REMEMBERED_FILES = 100_000
_ATTEMPTS = 3


# ---- footers -------------------------------------------------------------------------------------


def read_stored_file(store: ObjectStore, path: StatePath) -> StoredFile | None:
    """Read the footer of a data file; None if the file does not exist.

    A file that is not Parquet is a `problem`, not an error.
    """
    try:
        with store.open_input(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            try:
                facts = read_facts(file, path, bounds=True)
                keys = facts.bounds.get(KEY_HASH_COLUMN)
                times = facts.bounds.get(TIMESTAMP_COLUMN)
                return StoredFile(
                    size_bytes=size,
                    rows=facts.rows,
                    columns=columns_of(facts.schema),
                    min_routing_key=None if keys is None else keys[0],
                    max_routing_key=None if keys is None else keys[1],
                    max_timestamp_micros=None if times is None else times[1] // 1000,
                    schema_json=stored_form(facts.schema),
                )
            except FormatError as error:
                return StoredFile(size_bytes=size, problem=error.message)
    except NotFoundError:
        return None


class Footers:
    """A cache of data files' footers; safe for use by several threads.

    Data files never change once an epoch lists them, so a cached footer stays valid. Files that
    cannot be read are not cached.

    Args:
        remembered: the maximum number of files; the least recently used is evicted.
    """

    def __init__(self, remembered: int = _REMEMBERED_FILES) -> None:
        self._remembered = remembered
        self._known: OrderedDict[tuple[str, StatePath], StoredFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self,
        store: ObjectStore,
        paths: Iterable[StatePath],
        *,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_progress: OnProgress = no_progress,
    ) -> dict[StatePath, StoredFile]:
        """Return the footers of the files that exist; once the deadline has passed, only cached
        ones.

        Args:
            deadline: in seconds by `clock`; None = no deadline.
            on_progress: called after each footer.
        """
        unique = list(dict.fromkeys(paths))
        count = counter(on_progress, "read footers", len(unique), ProgressUnit.FILES)

        def one(path: StatePath) -> StoredFile | None:
            file = self._recalled(store.url, path)
            if file is None and (deadline is None or clock() <= deadline):
                file = self._kept(store.url, path, read_stored_file(store, path))
            count()
            return file

        files = concurrently(one, unique)
        return {path: file for path, file in zip(unique, files, strict=True) if file is not None}

    def _recalled(self, url: str, path: StatePath) -> StoredFile | None:
        with self._lock:
            file = self._known.get((url, path))
            if file is not None:
                self._known.move_to_end((url, path))
            return file

    def _kept(self, url: str, path: StatePath, file: StoredFile | None) -> StoredFile | None:
        if file is not None and file.problem is None:
            with self._lock:
                self._known[url, path] = file
                while len(self._known) > self._remembered:
                    self._known.popitem(last=False)
        return file


# ---- checks --------------------------------------------------------------------------------------


def check_newest(
    store: ObjectStore, paths: JobPaths, check: Callable[[ObjectStore, Checkpoint], Verdict]
) -> Verdict:
    """Return the verdict of `check` on the newest epoch of a job; errors as `newest_verdict`."""
    return newest_verdict(store, paths, check)[1]


def newest_verdict(
    store: ObjectStore, paths: JobPaths, check: Callable[[ObjectStore, Checkpoint], Verdict]
) -> tuple[Epoch | None, Verdict]:
    """Return the newest epoch of a job, and the verdict of `check` on it.

    A missing job is a finding of severity error, a job without an epoch a warning; both count as
    not inspected. An epoch that expires during the check is not a finding: the check is repeated on
    the epoch that is then the newest.

    Raises:
        ConflictError: every checked epoch expired meanwhile.
        NotFoundError: the root does not exist.
        StorageError: the store failed.
    """
    backend = ParquetBackend(store, paths)
    for _ in range(_ATTEMPTS):
        epochs = backend.epochs()
        if not epochs:
            return None, _nothing_to_check(store, paths)
        root = paths.head(epochs[-1])
        try:
            verdict = check(store, backend.load_checkpoint_metadata(epochs[-1]))
            # An epoch without files counts as inspected, because its metadata was read.
            verdict = replace(verdict, inspected=max(1, verdict.inspected))
        except StorageError:
            raise
        except ArroyoStateError as error:
            verdict = unreadable(root, str(error))
        if verdict.passed or store.head(root) is not None:
            return epochs[-1], verdict
    raise expired_meanwhile(store, paths, "try again, or keep more epochs")


def _nothing_to_check(store: ObjectStore, paths: JobPaths) -> Verdict:
    if job_is_there(store, paths):
        step = "wait for its first checkpoint, or check its logs"
        finding = warning("no-epoch", paths.root, "has no epoch yet: nothing was checked", step)
    else:
        finding = error(
            "job-missing",
            paths.root,
            "there is no such job below the checkpoint URL: nothing was checked",
            "restore its objects, or name another job: `arroyo-state jobs` lists them",
        )
    return Verdict(findings=(finding,), inspected=0)


def expired_meanwhile(store: ObjectStore, paths: JobPaths, next_step: str) -> ConflictError:
    """Return the error for a job whose epochs expire faster than they can be read."""
    return ConflictError(
        "epochs of this job expire faster than they can be read",
        job=paths.root,
        url=store.url,
        retryable=True,
        next_step=next_step,
    )


def check_files_exist(store: ObjectStore, checkpoint: Checkpoint) -> Verdict:
    """Run `planning.verify.checks.files_exist` on one epoch, with one listing per directory."""
    return files_exist(checkpoint, stored_sizes(store, set(checkpoint.paths)))


def check_restorable(store: ObjectStore, checkpoint: Checkpoint) -> Verdict:
    """Run `planning.verify.checks.restorable` on one epoch; reads the footers a restore opens."""
    plan = restore_plan(checkpoint)
    files = Footers().read(store, plan.files)
    return restorable(checkpoint, plan, files, expected_columns(checkpoint))


def expected_columns(checkpoint: Checkpoint) -> Mapping[OperatorTable, tuple[Columns, ...]]:
    """Return the forms that the files of each table of a checkpoint may have."""
    return {
        (operator.operator, name): table_forms(config)
        for operator in checkpoint.operators
        for name, config in operator.configs.items()
    }


# ---- all jobs ------------------------------------------------------------------------------------


def job_ages(
    store: ObjectStore, jobs: Iterable[JobPaths], directory: JobDirectory | None = None
) -> list[JobAge]:
    """Return the age and condition of each job by its newest epoch, as `every_job_recent` needs it.

    A job that cannot be read has a `problem`.

    Args:
        directory: the source of the jobs' conditions; None = conditions stay unknown.
    """
    listed = list(jobs)
    pairs = zip(listed, answers_about(listed, directory), strict=True)
    return concurrently(lambda pair: job_age(store, summarise_job(store, pair[0]), pair[1]), pairs)


def answers_about(
    jobs: Sequence[JobPaths], directory: JobDirectory | None
) -> Sequence[JobAnswer | None]:
    """Return what the sources of a directory answer about each job; None without a source."""
    if directory is None or not directory.sources:
        return [None] * len(jobs)
    return directory.look_up(jobs)


def job_age(store: ObjectStore, job: JobSummary, answer: JobAnswer | None) -> JobAge:
    """Return the age of a summarised job, and its condition by an answer about it."""
    newest = job.newest
    final = newest is not None and newest.progress is not None and newest.progress.final
    problem = job.problem
    try:
        # Whether it was restarted since costs one more read, needed only for a job that stopped.
        generation = CheckpointTree(store, job.paths).fence() if final else None
    except ArroyoStateError as error:
        generation, problem = None, problem or error
    age = JobAge(
        job=job.paths.root,
        epoch=job.newest_epoch,
        epochs=job.epochs or 0,
        files=0 if newest is None else len(dict.fromkeys(newest.paths)),
        finished_micros=None if newest is None else newest.finish_time_micros,
        at_rest=newest is not None and is_at_rest(newest, generation),
        problem=None if problem is None else str(problem),
    )
    if answer is None:
        return age
    facts = answer.facts
    source = facts.source if answer.reason is None else answer.reason
    return replace(age, condition=facts.condition, source=source, failure=facts.failure)
