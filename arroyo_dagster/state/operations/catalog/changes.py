"""Changes over all jobs below a checkpoint URL. This module writes nothing.

A poll costs one listing of the root, two small requests per known job, and the reads of what is
new. A new pipeline, or a new job of the legacy layout, is found at once. The directories of known
ones are listed in turn, some with each poll: that finds a new job of a known pipeline. Data files
are never listed, and no metadata is read twice. Jobs that the deadline or the maximum number of
epochs leaves out are not read; the next poll begins with them.

Only reads of its own objects show that a known job is gone: a listing may lag behind.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state.model.layout import CURRENT_GENERATION, JobPaths, Layout
from arroyo_dagster.state.operations.catalog.job_changes import (
    NEWEST_EPOCHS,
    Gone,
    JobChanges,
    JobPosition,
    poll_job,
)
from arroyo_dagster.state.operations.catalog.jobs import list_level, unlisted
from arroyo_dagster.state.planning.restore.reads import (
    Level,
    check_root,
    directories_to_list,
    jobs_in,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


class NothingLeft(StorageError):
    """The root contains none of the known jobs."""


# ---- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCursor:
    """The state to keep between two polls.

    Attributes:
        positions: by job.
        unread: jobs that were found, but not read yet.
        start_from: the root of the job to begin with; None = the first one.
        listed_to: the directory of the root after which the next ones are listed in turn; None =
            begin with the first one.
    """

    positions: Mapping[JobPaths, JobPosition] = field(default_factory=dict)
    unread: frozenset[JobPaths] = frozenset()
    start_from: str | None = None
    listed_to: str | None = None


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
        unlisted: directories that may be of jobs and are left out: no store can write their names.
        cursor: the state to keep.
    """

    jobs: tuple[JobChanges, ...] = ()
    vanished: tuple[JobPaths, ...] = ()
    left: int = 0
    known: int = 0
    problems: tuple[ArroyoStateError, ...] = ()
    unlisted: tuple[str, ...] = ()
    cursor: FleetCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class PollOptions:
    """How much one poll does.

    Attributes:
        newest: read at most this many new epochs of a job.
        most: read at most this many new epochs, but at least those of one job. None = all.
        layout: poll only jobs of this layout; None = of both.
        sweep: list each known directory once in so many polls.
    """

    newest: int = NEWEST_EPOCHS
    most: int | None = None
    layout: Layout | None = None
    sweep: int = 1


# ---- the poll ------------------------------------------------------------------------------------


def poll_fleet(
    store: ObjectStore,
    cursor: FleetCursor,
    options: PollOptions | None = None,
    *,
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FleetChanges:
    """Return the changes since `cursor`.

    Only ready epochs are reported; an epoch that is still committing is read again by the next
    poll. Of a new job only the newest ready epoch is reported. An unreadable epoch is reported
    once, and later epochs are still reported; an unreadable job does not stop the others.

    Args:
        deadline: in seconds by `clock`; nothing is started after it. None = no deadline.

    Raises:
        NotFoundError: the root does not exist.
        InputError: the root is not empty, but contains no job.
        NothingLeft: the root contains none of the known jobs; they are not reported as vanished,
            and the cursor stays valid.
        StorageError: the root cannot be listed.
    """
    poll = options or PollOptions()
    layout, sweep = poll.layout, poll.sweep
    known = {paths: one for paths, one in cursor.positions.items() if _wanted(paths, layout)}
    unread = {paths for paths in cursor.unread if _wanted(paths, layout)}
    late = _Limits(deadline, clock, poll.most)
    # A first import of several polls has just listed every directory.
    importing = bool(unread) and sweep > 1
    names = () if importing else {_first(paths) for paths in (*known, *unread)}
    turn = _turn(names, cursor.listed_to, sweep)
    listed = _find_jobs(store, {*known, *unread}, turn, late)
    _refuse_an_empty_root(store, known, listed)
    jobs = sorted((paths for paths in listed.jobs if _wanted(paths, layout)), key=_root)
    order = _from(jobs, cursor.start_from)

    def answer(paths: JobPaths) -> JobChanges | Gone | None:
        if late.passed or late.full:
            return None
        level = listed.levels.get(str(paths.checkpoints()))
        return poll_job(
            store, paths, known.get(paths), level=level, newest=poll.newest, reserve=late.reserve
        )

    answers = dict(zip(order, concurrently(answer, order), strict=True))
    if known and all(isinstance(result, Gone) for result in answers.values()):
        raise _nothing_left(store, known)
    changes = _changes(known, listed, answers)
    if importing:
        listed_to = cursor.listed_to
    else:
        listed_to = _listed_to(turn, listed.late) if sweep > 1 else None
    return replace(changes, cursor=replace(changes.cursor, listed_to=listed_to))


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
        """Whether as many new epochs are read as requested."""
        return self._most is not None and self._epochs >= self._most

    def reserve(self, epochs: int) -> bool:
        """Whether a job may read so many new epochs; then they count.

        The first job always may, so that each poll makes progress.
        """
        with self._lock:
            fits = self._most is None or self._epochs + epochs <= self._most
            if fits or not self._epochs:
                self._epochs += epochs
                return True
            return False


def _from(jobs: Sequence[JobPaths], start: str | None) -> list[JobPaths]:
    """Return all jobs, beginning with the first one at or after `start`."""
    return sorted(jobs, key=lambda paths: (start is not None and paths.root < start, paths.root))


def _changes(
    known: Mapping[JobPaths, JobPosition],
    found: _ListedJobs,
    answers: Mapping[JobPaths, JobChanges | Gone | None],
) -> FleetChanges:
    reported = [answer for answer in answers.values() if isinstance(answer, JobChanges)]
    unanswered = [paths for paths, answer in answers.items() if answer is None]
    gone = {paths for paths, answer in answers.items() if isinstance(answer, Gone)}
    positions = {paths: position for paths, position in known.items() if paths not in gone}
    positions |= {
        changes.paths: changes.positions for changes in reported if changes.positions is not None
    }
    return FleetChanges(
        jobs=tuple(job for job in reported if job.checkpoints or job.problems or job.appeared),
        vanished=tuple(sorted(gone & known.keys(), key=_root)),
        left=len(unanswered),
        known=len(positions.keys() | set(unanswered)),
        problems=tuple(found.problems),
        unlisted=tuple(unlisted(found.levels)),
        cursor=FleetCursor(
            positions=positions,
            unread=frozenset(unanswered) - positions.keys(),
            start_from=unanswered[0].root if unanswered else None,
        ),
    )


# ---- which jobs there are ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ListedJobs:
    """Which jobs to poll.

    Attributes:
        jobs: those that were listed, and all that were known before.
        listed: whether a listing shows any job, or could not be made.
        levels: the levels listed.
        late: directories that the deadline left out.
        problems: the errors of failed listings.
    """

    jobs: set[JobPaths]
    listed: bool
    levels: Mapping[str, Level]
    late: set[str]
    problems: list[ArroyoStateError]


def _find_jobs(
    store: ObjectStore, known: set[JobPaths], turn: Sequence[str], late: _Limits
) -> _ListedJobs:
    levels: dict[str, Level] = {"": list_level(store, "")}
    assumed = _assumed(known, set(turn))
    unknown: dict[str, ArroyoStateError | None] = {}
    while prefixes := directories_to_list({**assumed, **dict.fromkeys(unknown, Level()), **levels}):
        for path, answer in zip(prefixes, _list_all(store, prefixes, late), strict=True):
            if isinstance(answer, Level):
                levels[path] = answer
            else:
                unknown[path] = answer
    problems = [error for error in unknown.values() if error is not None]
    skipped = {path for path, error in unknown.items() if error is None}
    new = jobs_in(levels)
    listed = bool(new or unknown) or any(_may_be(paths, levels) for paths in known)
    return _ListedJobs(known.union(new), listed, levels, skipped, problems)


def _assumed(known: Iterable[JobPaths], turn: Container[str]) -> dict[str, Level]:
    """Return the levels of known jobs that are not listed, as a listing would show them."""
    names: dict[str, set[str]] = {}
    assumed: dict[str, Level] = {}
    for paths in known:
        legacy = paths.layout is Layout.LEGACY
        if not legacy:
            assumed[str(paths.root)] = Level(objects=frozenset({CURRENT_GENERATION}))
        elif _first(paths) not in turn:
            assumed[str(paths.checkpoints())] = Level()
        names.setdefault(_first(paths), set()).add("checkpoints" if legacy else paths.job)
    pipelines = {str(paths.pipeline) for paths in known}
    for first, below in names.items():
        # In its turn a pipeline is listed, and of a job of the legacy layout its `checkpoints`.
        if first not in turn or first not in pipelines:
            assumed[first] = Level(directories=frozenset(below))
    return assumed


def _first(paths: JobPaths) -> str:
    """Return the name of the directory below the root that a job lies in."""
    return str(paths.pipeline or paths.job)


def _turn(names: Iterable[str], listed_to: str | None, sweep: int) -> list[str]:
    """Return the directories whose turn it is to be listed, in order."""
    ordered = sorted(names, key=lambda name: (listed_to is not None and name <= listed_to, name))
    return ordered[: -(-len(ordered) // sweep)]


def _listed_to(turn: Sequence[str], late: Iterable[str]) -> str | None:
    """Return the last directory of a turn before those that the deadline left out.

    One that could not be listed waits for its next turn: otherwise it would stop all others.
    """
    skipped = {path.partition("/")[0] for path in late}
    done = list(itertools.takewhile(lambda name: name not in skipped, turn))
    return done[-1] if done else None


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


def _may_be(paths: JobPaths, levels: Mapping[str, Level]) -> bool:
    """Whether the listings that were made show a known job, or show nothing about it."""
    if _first(paths) not in levels[""].directories:
        return False
    if paths.layout is Layout.LEGACY:
        checkpoints = str(paths.checkpoints())
        return checkpoints not in levels or paths in jobs_in({checkpoints: levels[checkpoints]})
    pipeline = levels.get(str(paths.pipeline))
    return pipeline is None or paths.job in pipeline.directories


def _refuse_an_empty_root(
    store: ObjectStore, known: Mapping[JobPaths, JobPosition], found: _ListedJobs
) -> None:
    if found.listed:
        return
    if known:
        raise _nothing_left(store, known)
    check_root(found.levels, jobs_in(found.levels), store.url)


def _nothing_left(store: ObjectStore, known: Sized) -> NothingLeft:
    return NothingLeft(
        f"all {len(known)} known jobs are missing from the store, which indicates a failure of "
        "the store or a wrong URL",
        url=store.url,
        next_step="check the URL and the store; if the jobs were deleted on purpose, name each of "
        "them as gone",
    )
