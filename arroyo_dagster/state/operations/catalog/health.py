"""Apply the health checks to jobs. This module writes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.health import EpochFigures, HealthLimits
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths, is_data_file
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.operations.catalog.epochs import JobReadings, figures_of, read_epochs
from arroyo_dagster.state.operations.catalog.footers import answers_about, job_age
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import summarise_job
from arroyo_dagster.state.operations.gc.journal_check import NEWEST, check_journal
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.verify.audit import audit_jobs
from arroyo_dagster.state.planning.health_checks.facts import (
    HealthFacts,
    epochs_to_read,
    files_of,
    history_of,
    known_epochs,
    suffices,
)
from arroyo_dagster.state.planning.rules import (
    JobHealth,
    judge_job,
    judge_verified,
    not_reached,
    unreadable_job,
)
from arroyo_dagster.state.planning.verify.fleet import JobAge
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore


def job_health(
    store: ObjectStore,
    paths: JobPaths,
    facts: JobAnswer | None,
    limits: HealthLimits,
    *,
    history: Sequence[EpochFigures] = (),
    now_micros: int,
    readings: JobReadings | None = None,
) -> JobHealth:
    """Apply the rules that metadata and footers suffice for to one job.

    What is usual shows in the epochs of the store and of the history; of an epoch in both, the
    store's numbers count. If the history suffices, only the newest epochs are read, three
    at most.

    Args:
        facts: what the sources of the job's status answer; None = they are not asked.
        history: numbers of earlier epochs, in any order, for example of expired ones.
        now_micros: the time of the check, since 1970 in UTC.

    Returns:
        The result; if the job cannot be read, with the finding `health-unknown`.
    """
    given = readings or JobReadings()
    summary = summarise_job(store, paths)
    age = job_age(store, summary, facts)
    try:
        backend = ParquetBackend(store, paths)
        checkpoint, newest = summary.newest, summary.newest_epoch or 0
        pins = backend.job_pins()
        present = [epoch for epoch in backend.epochs() if epoch <= newest]
        moved = list_quarantines(store, paths) if pins.quarantines else []
        journal = check_journal(store, paths, NEWEST)
        head: dict[Epoch, Checkpoint | ArroyoStateError]
        head = {} if checkpoint is None else {checkpoint.epoch: checkpoint}
        # The newest epoch that both know says whether the history is of this job.
        shared = sorted({epoch.epoch for epoch in history}.intersection(present))
        few = {*present[-2:-1], *map(Epoch, shared[-1:])} - head.keys()
        read = read_epochs(store, paths, few) | head
        own = history_of(history, _finished(read))
        if suffices(own):
            recorded = {epoch.epoch for epoch in own} - head.keys()
        else:
            read = read_epochs(store, paths, epochs_to_read(present)[:-1], given.on_progress) | head
            own, recorded = history_of(history, _finished(read)), set()
        stored = figures_of(store, read.values(), given, known=recorded)
        footers = given.footers.read(store, checkpoint.paths if checkpoint else ())
        objects = given.objects
        if objects is None:
            objects = {info.path: info for info in store.list(paths.root)} if present else {}
        kept = set(_beside_pins(present, pins.pinned)) - read.keys()
        read |= read_epochs(store, paths, kept)
    except ArroyoStateError as error:
        return unreadable_job(age, now_micros, error.message)
    judged = HealthFacts(
        age=age,
        now_micros=now_micros,
        epochs=known_epochs(stored, own),
        present=present,
        files=list(files_of(checkpoint, footers)) if checkpoint else (),
        checkpoint=checkpoint,
        pins=pins,
        stored_bytes=sum(info.size_bytes for path, info in objects.items() if is_data_file(path)),
        pinned_bytes=_pinned_bytes(read, pins.pinned, objects),
        quarantined_bytes=sum(copy.size_bytes for _, copies in moved for copy in copies),
        journal=journal,
    )
    return judge_job(judged, limits)


def _finished(read: Mapping[Epoch, Checkpoint | ArroyoStateError]) -> dict[Epoch, int]:
    return {
        epoch: one.finish_time_micros for epoch, one in read.items() if isinstance(one, Checkpoint)
    }


def _beside_pins(present: Sequence[Epoch], pinned: frozenset[Epoch]) -> list[Epoch]:
    """Return the pinned epochs with those before and after each that are not pinned.

    An epoch lists a file until it is merged or expires, so one of these lists it if any epoch does.
    """
    if not pinned:
        return []
    others = [epoch for epoch in present if epoch not in pinned]
    places = {bisect_left(others, epoch) for epoch in present if epoch in pinned}
    beside = {others[at] for place in places for at in (place - 1, place) if 0 <= at < len(others)}
    return sorted(beside | (pinned & set(present)))


def _pinned_bytes(
    read: Mapping[Epoch, Checkpoint | ArroyoStateError],
    pinned: frozenset[Epoch],
    objects: Mapping[StatePath, ObjectInfo],
) -> int:
    """Return the size of the files that only pinned epochs list."""
    listed: dict[bool, set[StatePath]] = {True: set(), False: set()}
    for epoch, checkpoint in read.items():
        if isinstance(checkpoint, Checkpoint):
            listed[epoch in pinned].update(checkpoint.paths)
    only = listed[True] - listed[False]
    return sum(objects[path].size_bytes for path in only if path in objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOptions:
    """How the health of jobs is checked.

    Attributes:
        depth: also verify each job within a budget; None = only metadata and footers are read.
        history: of jobs, as `job_health` takes it.
        unreadable: why directories below the URL could not be listed, by path.
        on_progress: called after each job; for a single job, as in `JobReadings`.
    """

    depth: AuditSettings | None = None
    history: Mapping[JobPaths, Sequence[EpochFigures]] = field(default_factory=dict)
    unreadable: Mapping[str, ArroyoStateError] = field(default_factory=dict)
    on_progress: OnProgress = no_progress


def check_health(
    store: ObjectStore,
    jobs: Sequence[JobPaths],
    directory: JobDirectory,
    limits: HealthLimits,
    options: HealthOptions | None = None,
) -> list[JobHealth]:
    """Apply the health checks to jobs, in their order.

    A job that cannot be judged is a finding, hides no other, and so does a directory that cannot be
    listed; these come last. A job that the budget of a verification does not reach is a finding.
    """
    settings = options or HealthOptions()
    now_micros = wall_clock()
    reports = settings.on_progress if len(jobs) == 1 else no_progress
    count = counter(settings.on_progress, "checked jobs", len(jobs), ProgressUnit.JOBS)

    def judge(job: tuple[JobPaths, JobAnswer | None]) -> JobHealth:
        paths, answer = job
        try:
            return job_health(
                store,
                paths,
                answer,
                limits,
                history=settings.history.get(paths, ()),
                now_micros=now_micros,
                readings=JobReadings(on_progress=reports),
            )
        finally:
            count()

    answers = answers_about(jobs, directory)
    checked = concurrently(judge, list(zip(jobs, answers, strict=True)))
    if settings.depth is not None:
        checked = _with_verified(store, jobs, checked, settings.depth, settings.on_progress)
    hidden = [
        unreadable_job(JobAge(job=path), now_micros, error.message)
        for path, error in settings.unreadable.items()
    ]
    return [*checked, *hidden]


def _with_verified(
    store: ObjectStore,
    jobs: Sequence[JobPaths],
    checked: Sequence[JobHealth],
    depth: AuditSettings,
    on_progress: OnProgress,
) -> list[JobHealth]:
    """Return the health of jobs with what a verification of as many as possible says of them."""
    run = audit_jobs(store, jobs, depth, on_progress=on_progress)
    verified = {audited.job: judge_verified(audited) for audited in run.done}
    now_micros = wall_clock()

    def whole(paths: JobPaths, health: JobHealth) -> JobHealth:
        if paths in run.failed:
            if any(verdict.errors for verdict in health.verdicts.values()):
                return health
            problem = run.failed[paths].message
            return health.with_verified(unreadable_job(JobAge(job=paths.root), now_micros, problem))
        return health.with_verified(verified.get(paths.root) or not_reached(paths.root, now_micros))

    return [whole(paths, health) for paths, health in zip(jobs, checked, strict=True)]
