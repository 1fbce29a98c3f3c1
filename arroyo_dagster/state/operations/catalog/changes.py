"""What is new over all jobs below a checkpoint URL. Nothing here writes.

A look costs one listing of the root, at most one more for each known job, and for what is new as
much as there is of it: the directories of pipelines are listed, so that new jobs are found at once,
and a known job is asked by three small requests whether it may have a newer epoch. No data file is
ever listed, and no metadata is read twice: jobs that the deadline or the number of epochs asked for
leaves out are not read, and come first the next time.
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
# Names of records are seven digits or more, so their order is that of numbers only within a length.
_FAR_AHEAD = 1_000_000
_STEPS = 16


class NothingLeft(StorageError):
    """The root holds none of the jobs that were known."""


# ---- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobPosition:
    """How far a job was looked at.

    Attributes:
        worker_generation: the newest that was started; None in the legacy layout.
        epoch: the newest whose news was told, or that was found unreadable; 0 = none yet.
    """

    worker_generation: WorkerGeneration | None
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCursor:
    """What to keep between two looks.

    Attributes:
        positions: by job.
        start_from: the root of the job to begin with; None = at the first.
    """

    positions: Mapping[JobPaths, JobPosition] = field(default_factory=dict)
    start_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChanges:
    """What is new about one job.

    Attributes:
        checkpoints: newly ready epochs, oldest first.
        before: the epoch before the first of them; None if it is gone, or cannot be read, or if
            the job is seen for the first time.
        passed_over: how many older new epochs are not told of one by one.
        problems: why the job, or an epoch of it, cannot be read.
        positions: how far it was read now; None if it could not be read and is not known.
        appeared: whether nothing was known of it.
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
    """The outcome of one look.

    Attributes:
        jobs: those with something to tell, in the order they were looked at.
        vanished: known jobs that are certainly gone.
        left: how many jobs were not looked at: the deadline, or the most epochs, came first.
        known: how many jobs there are, as far as one knows.
        problems: directories that could not be listed; what is below is as it was.
        cursor: what to keep.
    """

    jobs: tuple[JobChanges, ...] = ()
    vanished: tuple[JobPaths, ...] = ()
    left: int = 0
    known: int = 0
    problems: tuple[ArroyoStateError, ...] = ()
    cursor: FleetCursor


# ---- the look ------------------------------------------------------------------------------------


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
    """Look for what is new since `cursor`.

    Only ready epochs are news; one that is still committing is looked at again the next time. Of a
    job seen for the first time only the newest ready epoch is news. An unreadable epoch is told
    once, and later ones go on; an unreadable job does not stop the others.

    Args:
        deadline: on `clock`; nothing is begun after it. None = none.
        newest: how many new epochs of a job are read at most.
        most: no further job is looked at once this many new epochs were found; those that are being
            looked at then (up to 16) still count. None = all jobs.
        layout: look at jobs of this layout only.

    Raises:
        NotFoundError: the root does not exist.
        InputError: the root holds something, none of it a job.
        NothingLeft: the root holds none of the jobs known: they are not taken for vanished, and the
            cursor stays as it is.
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
    """When a look ends before it has looked at all jobs."""

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
        """Whether as many new epochs were found as were asked for."""
        return self._most is not None and self._epochs >= self._most

    def counted(self, answer: JobChanges | _Gone) -> JobChanges | _Gone:
        """The answer, its new epochs counted."""
        if isinstance(answer, JobChanges):
            with self._lock:
                self._epochs += len(answer.checkpoints)
        return answer


def _from(jobs: Sequence[JobPaths], start: str | None) -> list[JobPaths]:
    """All of them, beginning with the one that comes first at or after `start`."""
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
    """The jobs there are, or may be; the levels listed; what could not be listed."""

    jobs: set[JobPaths]
    levels: Mapping[str, Level]
    problems: list[ArroyoStateError]


def _find_jobs(
    store: ObjectStore, known: Mapping[JobPaths, JobPosition], late: _Limits
) -> _ListedJobs:
    levels: dict[str, Level] = {"": list_level(store, "")}
    # What a listing of a known job's own directory would say, without listing it.
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
    """Whether a known job is still there, or nobody could tell."""
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
    """There is nothing left of the job."""


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
        # Nothing of it is taken for seen, so it is looked at again.
        return JobChanges(paths=paths, positions=positions, problems=(error,))


@dataclass(frozen=True, slots=True)
class _New:
    """The numbers of epochs to read, ascending, and what was seen of the job before.

    Attributes:
        first: whether the job is seen for the first time: only its newest epoch is news.
    """

    epochs: tuple[Epoch, ...]
    positions: JobPosition
    first: bool = False


def _new_legacy(
    store: ObjectStore, paths: JobPaths, positions: JobPosition | None, levels: Mapping[str, Level]
) -> _New | _Gone:
    level = levels.get(str(paths.checkpoints()))
    if level is None:  # its listing failed, as was told
        return _New((), positions or JobPosition(None, _NO_EPOCH))
    found = map(parse_checkpoint_dir, level.directories)
    numbers = sorted(number for number in found if number is not None)
    if not numbers:
        return _Gone()
    if positions is not None and numbers[-1] < positions.epoch:
        positions = None  # another job of this name has begun anew
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
    # Numbers are taken without gaps, each by creating its manifest; the fence may lag behind.
    while store.head(paths.generation_manifest(WorkerGeneration(generation + 1))) is not None:
        generation = WorkerGeneration(generation + 1)
    return generation


def _epochs_after(
    store: ObjectStore, paths: JobPaths, positions: JobPosition, *, started: bool
) -> tuple[Epoch, ...] | None:
    """The epochs after the one seen; None: this is another job, begun anew.

    The records of the next numbers say so. Where they have expired already, what the newest worker
    generation refers to does: it writes that before every record. Epochs are listed only if that
    leads further than what was seen.
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
    # It is written before its record is, so the one before it counts as well.
    near = [Epoch(hint.epoch - back) for back in (0, 1) if hint.epoch - back > positions.epoch]
    if any(store.head(paths.epoch_record(epoch)) is not None for epoch in near):
        return _listed_after(store, paths, positions.epoch)
    return next_ones


def _consecutive_after(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> tuple[Epoch, ...]:
    """The numbers right after `epoch` that have a record, up to a gap; without a listing."""
    found: list[Epoch] = []
    while len(found) < _STEPS:
        following = Epoch(epoch + len(found) + 1)
        if store.head(paths.epoch_record(following)) is None:
            break
        found.append(following)
    return tuple(found)


def _listed_after(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> tuple[Epoch, ...]:
    """The epochs after `epoch` that have a record; one listing, of these alone."""
    same_length = len(f"{epoch:07}") == len(f"{epoch + _FAR_AHEAD:07}")
    after = paths.epoch_record(epoch) if epoch and same_length else None
    listed = store.list(paths.epochs, start_after=after)
    found = (parse_epoch_record(info.path.name) for info in listed)
    return tuple(sorted(number for number in found if number is not None and number > epoch))


# ---- its epochs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vanished:
    """The epoch expired between being listed and being read, or is not there yet."""


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
            break  # committing: nothing after it can be ready, and it is looked at again
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
    """Whether a rollback published a checkpoint and left an epoch behind."""
    restored = checkpoint.rolled_back_to
    return restored is not None and restored < epoch < checkpoint.epoch


def _first_epoch(store: ObjectStore, paths: JobPaths, new: _New) -> JobChanges:
    """Only the newest ready epoch; those that are newer and unreadable are told."""
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
    # A directory of the legacy layout says nothing yet: its metadata is written last.
    if paths.layout is Layout.LEGACY and store.head(root) is None:
        return _Vanished()
    try:
        return ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    except StorageError:
        raise
    except ArroyoStateError as error:
        return _Vanished() if store.head(root) is None else error
