"""Read what all prefixes below a checkpoint URL store: which are abandoned.

Every object is listed once, within a budget of time. Writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.garbage import GRACE_MICROS, EpochRoot, PlanKind
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind, StoredObject, object_name
from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import list_prefixes
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.gc.roots import newest_root
from arroyo_dagster.state.operations.progress import timed
from arroyo_dagster.state.planning.fleet.abandoned import (
    PrefixVerdict,
    Usage,
    judge_job,
    judge_prefix,
    largest_first,
)
from arroyo_dagster.state.planning.fleet.usage import (
    PrefixUsage,
    kind_of,
    prefixes_without_job,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

BUDGET_SECONDS = 600.0
_OBJECTS_BETWEEN_CLOCKS = 1000


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Ends work after a time.

    Attributes:
        ends: by the clock, in seconds.
    """

    ends: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> TimeBudget:
        """Return a budget that begins now."""
        return cls(clock() + seconds, clock)

    def is_spent(self) -> bool:
        """Return whether nothing more is to be begun."""
        return self.clock() >= self.ends


def prefix_usage(
    store: ObjectStore, path: StatePath, job: JobPaths | None, budget: TimeBudget
) -> PrefixUsage:
    """List a prefix, until the budget is spent.

    Raises:
        StorageError: the store failed.
    """
    objects = size_bytes = foreign = maintenance = 0
    last_write, complete = None, True
    if budget.is_spent():
        return PrefixUsage(path=path, job=job, complete=False)
    for info in store.list(path):
        objects += 1
        if objects % _OBJECTS_BETWEEN_CLOCKS == 0 and budget.is_spent():
            complete = False
            break
        size_bytes += info.size_bytes
        last_write = max(last_write or 0, info.modified_micros or 0) or None
        kind = kind_of(info.path, job) if info.addressable else ObjectKind.FOREIGN
        foreign += kind is ObjectKind.FOREIGN
        maintenance += kind is ObjectKind.MAINTENANCE
    return PrefixUsage(
        path=path,
        job=job,
        objects=objects,
        size_bytes=size_bytes,
        last_write_micros=last_write,
        foreign=foreign,
        maintenance=maintenance,
        complete=complete,
    )


# ---- abandoned prefixes --------------------------------------------------------------------------


def find_abandoned(
    store: ObjectStore,
    directory: JobDirectory,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    on_progress: OnProgress = no_progress,
) -> list[PrefixVerdict]:
    """Judge every prefix below the URL, and find the objects of living jobs that no epoch lists.

    The proofs are those of gc, which judges again before it deletes. What cannot be proved is not
    judged, and the verdict says why. After the budget, nothing more is listed.

    Raises:
        NotFoundError: the root does not exist.
        StorageError: the root cannot be listed.
    """
    budget = TimeBudget.of(budget_seconds, clock)
    listing = list_prefixes(store)
    jobs = listing.jobs
    answers = directory.look_up(jobs)
    others = [
        path
        for path in prefixes_without_job(listing.levels, jobs)
        if path not in listing.unreadable
    ]
    report = timed(on_progress)
    found = [_not_listed(StatePath(path), error) for path, error in listing.unreadable.items()]
    for at, (paths, answer) in enumerate(zip(jobs, answers, strict=True)):
        report(
            Progress(
                step="listed prefixes",
                done=at,
                total=len(jobs) + len(others),
                unit=ProgressUnit.PREFIXES,
            )
        )
        try:
            found += _judged(store, paths, answer, answers, directory, budget)
        except StorageError as error:
            found.append(_not_listed(paths.root, error))

    def judged(path: StatePath) -> PrefixVerdict:
        try:
            usage = prefix_usage(store, path, None, budget)
        except StorageError as error:
            return _not_listed(path, error)
        return judge_prefix(usage, now_micros=wall_clock(), grace_micros=GRACE_MICROS)

    return largest_first([*found, *concurrently(judged, others)])


def _not_listed(path: StatePath, error: ArroyoStateError) -> PrefixVerdict:
    return PrefixVerdict(
        path=path,
        usage=Usage.NOT_JUDGED,
        why=f"it cannot be read ({error.message})",
        complete=False,
        next_step=error.next_step,
        problem=error,
    )


def _judged(
    store: ObjectStore,
    paths: JobPaths,
    answer: JobAnswer,
    answers: Sequence[JobAnswer],
    directory: JobDirectory,
    budget: TimeBudget,
) -> list[PrefixVerdict]:
    """Judge a job. One that may be gone is listed; what a living one does not need, gc plans."""
    head, problem = _newest(store, paths)
    managed = head is not None and head.managed
    others = [one for one in answers if one.paths != paths]
    judge = partial(judge_job, answer=answer, others=others, managed=managed, problem=problem)
    verdict = judge(PrefixUsage(path=paths.root, job=paths))
    lives = verdict.usage is Usage.IN_USE or (managed and verdict.usage is Usage.NOT_JUDGED)
    if head is None or not lives:
        return [judge(prefix_usage(store, paths.root, paths, budget))]
    verdict = replace(
        verdict,
        size_bytes=None,
        objects=None,
        last_write_micros=head.finish_time_micros or None,
        complete=not budget.is_spent(),
    )
    return [verdict, *(() if budget.is_spent() else _unneeded(store, paths, directory))]


def _newest(
    store: ObjectStore, paths: JobPaths
) -> tuple[EpochRoot | None, ArroyoStateError | None]:
    """Return the newest epoch of a job, and why it cannot be read."""
    try:
        return newest_root(store, paths), None
    except StorageError:
        raise
    except ArroyoStateError as error:
        return None, error


def _unneeded(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> list[PrefixVerdict]:
    """Return what gc would delete of a living job as orphans, by worker generation."""
    request = GcRequest(kind=PlanKind.ORPHANS, directory=directory)
    try:
        plan = plan_gc(store, paths, request)
    except StorageError:
        raise
    except ArroyoStateError as error:
        why = f"its orphans: {error.message.removeprefix('gc refused: ')}"
        usage = Usage.NOT_JUDGED
        return [PrefixVerdict(path=paths.root, usage=usage, why=why, next_step=error.next_step)]
    by_prefix: dict[StatePath, list[StoredObject]] = {}
    for step in (plan.data, plan.records, plan.metadata):
        for one in step:
            generation = object_name(paths, one.path).worker_generation
            at = paths.root if generation is None else paths.generation(generation)
            by_prefix.setdefault(at, []).append(one)
    return [_orphans(paths, at, its) for at, its in by_prefix.items()]


def _orphans(paths: JobPaths, at: StatePath, objects: Sequence[StoredObject]) -> PrefixVerdict:
    return PrefixVerdict(
        path=at,
        usage=Usage.ABANDONED,
        why="objects that no epoch of the job lists",
        size_bytes=sum(one.size_bytes or 0 for one in objects),
        objects=len(objects),
        last_write_micros=max((one.modified_micros or 0 for one in objects), default=0) or None,
        next_step=f"arroyo-state gc plan orphans {paths.root}, with the same sources of status",
    )
