"""Changes over all jobs below a checkpoint URL. This module writes nothing.

A poll costs one listing of the root, at most one more listing per known job, and the reads of what
is new. It lists the directories of pipelines, so new jobs are found at once. Three small requests
determine whether a known job may have a newer epoch. Data files are never listed, and no metadata
is read twice. Jobs that the deadline or the maximum number of epochs leaves out are not read; the
next poll begins with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from arroyo_dagster.errors import ArroyoStateError, NotFoundError, StorageError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.ids import Epoch, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    CURRENT_GENERATION,
    JobPaths,
    Layout,
    parse_checkpoint_dir,
    parse_epoch_record,
    parse_manifest_path,
)
from arroyo_dagster.state.operations.catalog.jobs import list_level, newest_generation
from arroyo_dagster.state.planning.restore.reads import (
    Level,
    check_root,
    directories_to_list,
    jobs_in,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

NEWEST_EPOCHS = 10
_NO_EPOCH = Epoch(0)
# Names of records have seven digits or more: they sort by number only among names of equal length.
_FAR_AHEAD = 1_000_000
_STEPS = 16


class NothingLeft(StorageError):
    """The root contains none of the known jobs."""


# ---- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobPosition:
    """The position up to which a job's epochs were polled.

    Attributes:
        worker_generation: the newest that was started; None in the legacy layout.
        epoch: the newest epoch that was reported or found unreadable; 0 = none yet.
    """

    worker_generation: WorkerGeneration | None
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCursor:
    """The state to keep between two polls.

    Attributes:
        positions: by job.
        start_from: the root of the job to begin with; None = the first one.
    """

    positions: Mapping[JobPaths, JobPosition] = field(default_factory=dict)
    start_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChanges:
    """The changes of one job.

    Attributes:
        positions: the position reached now; None if the job could not be read and had no position.
        checkpoints: newly ready epochs, oldest first.
        before: the epoch before those read now; None if it is gone or unreadable, if `checkpoints`
            is empty, or if the job is new.
        passed_over: how many older new epochs are not reported one by one.
        problems: why the job, or an epoch of it, cannot be read.
        appeared: whether the job is new.
    """

    paths: JobPaths
    positions: JobPosition | None
    checkpoints: tuple[Checkpoint, ...] = ()
    before: Checkpoint | None = None
    passed_over: int = 0
    problems: tuple[ArroyoStateError, ...] = ()
    appeared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChanges:
    """The outcome of one poll.

    Attributes:
        jobs: those with something to report, in the order of the poll.
        vanished: known jobs that are certainly gone.
        left: how many jobs were not polled because the deadline or the maximum of epochs was
            reached.
        known: how many jobs have a position or were left for the next poll.
        problems: directories that could not be listed; the jobs below keep their positions.
        cursor: the state to keep.
    """

    jobs: tuple[JobChanges, ...] = ()
    vanished: tuple[JobPaths, ...] = ()
    left: int = 0
    known: int = 0
    problems: tuple[ArroyoStateError, ...] = ()
    cursor: FleetCursor


# ---- the poll ------------------------------------------------------------------------------------


def poll_fleet(
    store: ObjectStore,
    cursor: FleetCursor,
    *,
    deadline: float | None = None,
    newest: int = NEWEST_EPOCHS,
    most: int | None = None,
    layout: Layout | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FleetChanges:
    """Return the changes since `cursor`.

    Only ready epochs are reported; an epoch that is still committing is read again by the next
    poll. Of a new job only the newest ready epoch is reported. An unreadable epoch is reported
    once, and later epochs are still reported; an unreadable job does not stop the others.

    Args:
        deadline: in seconds by `clock`; nothing is started after it. None = no deadline.
        newest: read at most this many new epochs of a job.
        most: start no further job once this many new epochs were found; jobs in progress (up to 16)
            still count. None = all jobs.
        layout: poll only jobs of this layout.

    Raises:
        NotFoundError: the root does not exist.
        InputError: the root is not empty, but contains no job.
        NothingLeft: the root contains none of the known jobs; they are not reported as vanished,
            and the cursor stays valid.
        StorageError: the root cannot be listed.
    """
    known = {
        paths: positions for paths, positions in cursor.positions.items() if _wanted(paths, layout)
    }
    late = _Limits(deadline, clock, most)
    found = _find_jobs(store, known, late)
    jobs = sorted((paths for paths in found.jobs if _wanted(paths, layout)), key=_root)
    _refuse_an_empty_root(store, known, jobs, found)
    order = _from(jobs, cursor.start_from)

    def answer(paths: JobPaths) -> JobChanges | _Gone | None:
        if late.passed or late.full:
            return None
        return late.counted(_poll_job(store, paths, known.get(paths), found.levels, newest))

    answers = concurrently(answer, order)
    return _changes(known, found, list(zip(order, answers, strict=True)))


def _wanted(paths: JobPaths, layout: Layout | None) -> bool:
    return layout is None or paths.layout is layout


def _root(paths: JobPaths) -> str:
    return paths.root


class _Limits:
    """The limits that may end a poll before all jobs were polled."""

    def __init__(self, at: float | None, clock: Callable[[], float], most: int | None) -> None:
        self._at = at
        self._clock = clock
        self._most = most
        self._epochs = 0
        self._lock = threading.Lock()

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self._at is not None and self._clock() > self._at

    @property
    def full(self) -> bool:
        """Whether as many new epochs were found as requested."""
        return self._most is not None and self._epochs >= self._most

    def counted(self, answer: JobChanges | _Gone) -> JobChanges | _Gone:
        """Return the answer after counting its new epochs."""
        if isinstance(answer, JobChanges):
            with self._lock:
                self._epochs += len(answer.checkpoints)
        return answer


def _from(jobs: Sequence[JobPaths], start: str | None) -> list[JobPaths]:
    """Return all jobs, beginning with the first one at or after `start`."""
    return sorted(jobs, key=lambda paths: (start is not None and paths.root < start, paths.root))


def _changes(
    known: Mapping[JobPaths, JobPosition],
    found: _ListedJobs,
    answers: Sequence[tuple[JobPaths, JobChanges | _Gone | None]],
) -> FleetChanges:
    reported = [answer for _, answer in answers if isinstance(answer, JobChanges)]
    left = [paths for paths, answer in answers if answer is None]
    gone = [paths for paths, answer in answers if isinstance(answer, _Gone)]
    vanished = sorted({*gone, *(known.keys() - found.jobs)} & known.keys(), key=_root)
    positions = {paths: one for paths, one in known.items() if paths not in vanished}
    positions |= {
        changes.paths: changes.positions for changes in reported if changes.positions is not None
    }
    return FleetChanges(
        jobs=tuple(one for one in reported if one.checkpoints or one.problems or one.appeared),
        vanished=tuple(vanished),
        left=len(left),
        known=len(positions.keys() | set(left)),
        problems=tuple(found.problems),
        cursor=FleetCursor(positions=positions, start_from=left[0].root if left else None),
    )


# ---- which jobs there are ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ListedJobs:
    """The jobs that exist or may exist; the levels listed; the errors of failed listings."""

    jobs: set[JobPaths]
    levels: Mapping[str, Level]
    problems: list[ArroyoStateError]


def _find_jobs(
    store: ObjectStore, known: Mapping[JobPaths, JobPosition], late: _Limits
) -> _ListedJobs:
    levels: dict[str, Level] = {"": list_level(store, "")}
    # The result that a listing of a known job's directory would have, assumed instead of listed.
    assumed = {str(paths.root): _assumed(paths) for paths in known}
    pipelines = {str(paths.pipeline) for paths in known}
    assumed = {path: level for path, level in assumed.items() if path not in pipelines}
    unknown: set[str] = set()
    problems: list[ArroyoStateError] = []
    while wanted := directories_to_list({**assumed, **dict.fromkeys(unknown, Level()), **levels}):
        for path, answer in zip(wanted, _list_all(store, wanted, late), strict=True):
            if isinstance(answer, Level):
                levels[path] = answer
            else:
                unknown.add(path)
                problems.extend([answer] if answer is not None else [])
    jobs = set(jobs_in(levels)) | {paths for paths in known if _may_be(paths, levels, unknown)}
    return _ListedJobs(jobs, levels, problems)


def _assumed(paths: JobPaths) -> Level:
    if paths.layout is Layout.LEGACY:
        return Level(directories=frozenset({"checkpoints"}))
    return Level(objects=frozenset({CURRENT_GENERATION}))


def _list_all(
    store: ObjectStore, paths: Iterable[str], late: _Limits
) -> list[Level | ArroyoStateError | None]:
    def one(path: str) -> Level | ArroyoStateError | None:
        if late.passed:
            return None
        try:
            return list_level(store, path)
        except ArroyoStateError as error:
            return error

    return concurrently(one, paths)


def _may_be(paths: JobPaths, levels: Mapping[str, Level], unknown: set[str]) -> bool:
    """Whether a known job still exists, or could not be listed."""
    if paths.layout is Layout.LEGACY:
        return str(paths.checkpoints()) in unknown
    pipeline = str(paths.pipeline)
    return pipeline in unknown or paths.job in levels.get(pipeline, Level()).directories


def _refuse_an_empty_root(
    store: ObjectStore,
    known: Mapping[JobPaths, JobPosition],
    jobs: Sequence[JobPaths],
    found: _ListedJobs,
) -> None:
    if jobs or found.problems:
        return
    if known:
        raise NothingLeft(
            f"all {len(known)} known jobs are missing from the listing, which indicates a "
            "failure of the store or a wrong URL",
            url=store.url,
            next_step="check the URL and the store; if the jobs are really gone, acknowledge "
            "each of them with the job arroyo_forget_job",
        )
    check_root(found.levels, jobs_in(found.levels), store.url)


# ---- one job -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gone:
    """The job has no objects left."""


def _poll_job(
    store: ObjectStore,
    paths: JobPaths,
    positions: JobPosition | None,
    levels: Mapping[str, Level],
    newest: int,
) -> JobChanges | _Gone:
    try:
        if paths.layout is Layout.LEGACY:
            new = _new_legacy(store, paths, positions, levels)
        else:
            new = _new_protocol(store, paths, positions)
        if isinstance(new, _Gone):
            return new
        return _new_epochs(store, paths, new, newest)
    except ArroyoStateError as error:
        # The position stays unchanged, so the next poll reads the job again.
        return JobChanges(paths=paths, positions=positions, problems=(error,))


@dataclass(frozen=True, slots=True)
class _New:
    """The numbers of epochs to read, ascending, and the job's position before.

    Attributes:
        first: whether the job is new: only its newest epoch is reported.
    """

    epochs: tuple[Epoch, ...]
    positions: JobPosition
    first: bool = False


def _new_legacy(
    store: ObjectStore, paths: JobPaths, positions: JobPosition | None, levels: Mapping[str, Level]
) -> _New | _Gone:
    level = levels.get(str(paths.checkpoints()))
    if level is None:  # its listing failed and was reported
        return _New((), positions or JobPosition(None, _NO_EPOCH))
    found = map(parse_checkpoint_dir, level.directories)
    numbers = sorted(number for number in found if number is not None)
    if not numbers:
        return _Gone()
    if positions is not None and numbers[-1] < positions.epoch:
        positions = None  # a new job uses this name
    first = positions is None
    positions = positions or JobPosition(None, _NO_EPOCH)
    return _New(tuple(number for number in numbers if number > positions.epoch), positions, first)


def _new_protocol(
    store: ObjectStore, paths: JobPaths, positions: JobPosition | None
) -> _New | _Gone:
    if positions is not None and positions.worker_generation is not None:
        start = positions.worker_generation
        generation = _newest_started(store, paths, start)
        started = generation > start
        found = _epochs_after(
            store, paths, JobPosition(generation, positions.epoch), started=started
        )
        if found is not None:
            return _New(found, JobPosition(generation, positions.epoch))
    fence = newest_generation(store, paths)
    if fence is None:
        return _Gone()
    generation = _newest_started(store, paths, fence)
    return _New(
        _listed_after(store, paths, _NO_EPOCH), JobPosition(generation, _NO_EPOCH), first=True
    )


def _newest_started(
    store: ObjectStore, paths: JobPaths, generation: WorkerGeneration
) -> WorkerGeneration:
    # Numbers are assigned without gaps, each by creating its manifest; the fence may lag behind.
    while store.head(paths.generation_manifest(WorkerGeneration(generation + 1))) is not None:
        generation = WorkerGeneration(generation + 1)
    return generation


def _epochs_after(
    store: ObjectStore, paths: JobPaths, positions: JobPosition, *, started: bool
) -> tuple[Epoch, ...] | None:
    """Return the epochs after the known one; None if a new job uses this name.

    The records of the next numbers show them. If these have expired already, the reference in the
    newest worker generation's manifest shows them: it is written before every record. Epochs are
    listed only if that reference is newer than the known epoch.
    """
    next_ones = _consecutive_after(store, paths, positions.epoch)
    if next_ones and len(next_ones) < _STEPS:
        return next_ones
    assert positions.worker_generation is not None
    path = paths.generation_manifest(positions.worker_generation)
    try:
        manifest = records.decode_generation_manifest(store.read(path), path)
    except NotFoundError:
        return None
    hint = parse_manifest_path(manifest.latest_ref or manifest.base_ref or "")
    if hint is None:
        return _listed_after(store, paths, positions.epoch) if started or next_ones else ()
    if hint.epoch < positions.epoch and store.head(paths.epoch_record(positions.epoch)) is None:
        return None
    # The reference is written before its record, so the epoch before it counts as well.
    near = [Epoch(hint.epoch - back) for back in (0, 1) if hint.epoch - back > positions.epoch]
    if any(store.head(paths.epoch_record(epoch)) is not None for epoch in near):
        return _listed_after(store, paths, positions.epoch)
    return next_ones


def _consecutive_after(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> tuple[Epoch, ...]:
    """Return the numbers right after `epoch` that have a record, up to a gap; without a listing."""
    found: list[Epoch] = []
    while len(found) < _STEPS:
        following = Epoch(epoch + len(found) + 1)
        if store.head(paths.epoch_record(following)) is None:
            break
        found.append(following)
    return tuple(found)


def _listed_after(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> tuple[Epoch, ...]:
    """Return the epochs after `epoch` that have a record, with one listing that starts there."""
    same_length = len(f"{epoch:07}") == len(f"{epoch + _FAR_AHEAD:07}")
    after = paths.epoch_record(epoch) if epoch and same_length else None
    listed = store.list(paths.epochs, start_after=after)
    found = (parse_epoch_record(info.path.name) for info in listed)
    return tuple(sorted(number for number in found if number is not None and number > epoch))


# ---- its epochs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vanished:
    """The epoch expired between listing and reading, or does not exist yet."""


def _new_epochs(store: ObjectStore, paths: JobPaths, new: _New, newest: int) -> JobChanges:
    if new.first:
        return _first_epoch(store, paths, new)
    read = new.epochs[-newest:]
    answers = concurrently(lambda epoch: _read_epoch(store, paths, epoch), read)
    checkpoints: list[Checkpoint] = []
    problems: list[ArroyoStateError] = []
    passed_over = len(new.epochs) - len(read)
    reached = new.epochs[passed_over - 1] if passed_over else new.positions.epoch
    later = [answer for answer in answers if isinstance(answer, Checkpoint)]
    for epoch, answer in zip(read, answers, strict=True):
        if isinstance(answer, Checkpoint) and answer.state is not CheckpointState.READY:
            if any(_went_behind(one, epoch) for one in later):
                continue  # its commit is never finished
            break  # committing: no later epoch can be ready; the next poll reads it again
        if isinstance(answer, _Vanished):
            continue
        reached = epoch
        if isinstance(answer, Checkpoint):
            checkpoints.append(answer)
        else:
            problems.append(answer)
    before = new.epochs[passed_over - 1] if passed_over else new.positions.epoch
    return JobChanges(
        paths=paths,
        positions=replace(new.positions, epoch=reached),
        checkpoints=tuple(checkpoints),
        before=_before(store, paths, before) if checkpoints else None,
        passed_over=passed_over if checkpoints else 0,
        problems=tuple(problems),
    )


def _went_behind(checkpoint: Checkpoint, epoch: Epoch) -> bool:
    """Whether a rollback published `checkpoint` and abandoned `epoch`."""
    restored = checkpoint.rolled_back_to
    return restored is not None and restored < epoch < checkpoint.epoch


def _first_epoch(store: ObjectStore, paths: JobPaths, new: _New) -> JobChanges:
    """Report only the newest ready epoch, and newer ones that are unreadable."""
    unreadable: dict[Epoch, ArroyoStateError] = {}
    reported: Checkpoint | None = None
    for number in reversed(new.epochs):
        answer = _read_epoch(store, paths, number)
        if isinstance(answer, Checkpoint) and answer.state is CheckpointState.READY:
            reported = answer
            break
        if isinstance(answer, ArroyoStateError):
            unreadable[number] = answer
        if len(unreadable) == NEWEST_EPOCHS:
            break
    ready = None if reported is None else reported.epoch
    reached = max(filter(None, [ready, *unreadable]), default=_NO_EPOCH)
    return JobChanges(
        paths=paths,
        positions=replace(new.positions, epoch=reached),
        checkpoints=() if reported is None else (reported,),
        problems=tuple(unreadable.values()),
        appeared=True,
    )


def _before(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> Checkpoint | None:
    if epoch <= _NO_EPOCH:
        return None
    answer = _read_epoch(store, paths, epoch)
    return answer if isinstance(answer, Checkpoint) else None


def _read_epoch(
    store: ObjectStore, paths: JobPaths, epoch: Epoch
) -> Checkpoint | ArroyoStateError | _Vanished:
    root = (
        paths.legacy_metadata(epoch) if paths.layout is Layout.LEGACY else paths.epoch_record(epoch)
    )
    # A directory of the legacy layout does not make an epoch: its metadata is written last.
    if paths.layout is Layout.LEGACY and store.head(root) is None:
        return _Vanished()
    try:
        return ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    except StorageError:
        raise
    except ArroyoStateError as error:
        return _Vanished() if store.head(root) is None else error
