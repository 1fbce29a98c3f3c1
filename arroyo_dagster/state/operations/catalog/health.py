"""Apply the health checks to jobs. This module writes nothing."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError, StorageError
from arroyo_dagster.state.codec.parquet import decoding, open_pages
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.health import EpochFigures, HealthLimits
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths, is_data_file
from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit, no_progress
from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN, ExpiringTimeKeyConfig
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.operations.catalog.footers import Footers, answers_about, job_age
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import summarise_job
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.gc.journal_check import NEWEST, check_journal
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.verify.job import JobVerdict, verify_job
from arroyo_dagster.state.planning.health_checks.facts import (
    HealthFacts,
    epoch_figures,
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
from arroyo_dagster.state.planning.verify.audit import (
    AuditFacts,
    KeyCounts,
    ListedObject,
    audit_findings,
    hot_key_finding,
)
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict, error
from arroyo_dagster.state.planning.verify.fleet import CheckedJob, JobAge
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
        read, own, recorded = _read_epochs(
            store, paths, present, checkpoint, history, given.on_progress
        )
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


def _read_epochs(
    store: ObjectStore,
    paths: JobPaths,
    present: Sequence[Epoch],
    checkpoint: Checkpoint | None,
    history: Sequence[EpochFigures],
    on_progress: OnProgress,
) -> tuple[dict[Epoch, Checkpoint | ArroyoStateError], Sequence[EpochFigures], set[int]]:
    """Return the epochs that are read, the history of this job, and the epochs it suffices for."""
    head: dict[Epoch, Checkpoint | ArroyoStateError]
    head = {} if checkpoint is None else {checkpoint.epoch: checkpoint}
    # The newest epoch that both know says whether the history is of this job.
    shared = sorted({epoch.epoch for epoch in history}.intersection(present))
    few = {*present[-2:-1], *map(Epoch, shared[-1:])} - head.keys()
    read = read_epochs(store, paths, few) | head
    own = history_of(history, _finished(read))
    if suffices(own):
        return read, own, {epoch.epoch for epoch in own} - head.keys()
    read = read_epochs(store, paths, epochs_to_read(present)[:-1], on_progress) | head
    return read, history_of(history, _finished(read)), set()


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


# ---- audit ---------------------------------------------------------------------------------------
# Audit a job: verify its newest epoch, and compare its other epochs with one listing. This module
# writes nothing.

MAX_EPOCHS = 1_000
"""How many of the newest epochs of a job are compared."""

_FINDINGS_PER_CODE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRun:
    """What one audit of many jobs did.

    Attributes:
        done: the audited jobs.
        left: the jobs that the budget did not reach.
        failed: the jobs that a store failed for, with the error.
    """

    done: tuple[CheckedJob, ...] = ()
    left: tuple[JobPaths, ...] = ()
    failed: Mapping[JobPaths, ArroyoStateError]


def audit_jobs(
    store: ObjectStore,
    jobs: Sequence[JobPaths],
    settings: AuditSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    on_progress: OnProgress = no_progress,
) -> AuditRun:
    """Audit jobs within the budget, in their order.

    A job that cannot be audited does not stop the others.

    Args:
        clock: in seconds.
        on_progress: called after each file that was read, with the job in the step.
    """
    ends = clock() + settings.budget_micros / 1e6
    done: list[CheckedJob] = []
    failed: dict[JobPaths, ArroyoStateError] = {}
    for place, paths in enumerate(jobs):
        if place and clock() >= ends:
            return AuditRun(done=tuple(done), left=tuple(jobs[place:]), failed=failed)
        try:
            done.append(audit_job(store, paths, settings, on_progress))
        except ArroyoStateError as problem:
            failed[paths] = problem
    return AuditRun(done=tuple(done), failed=failed)


def audit_job(
    store: ObjectStore,
    paths: JobPaths,
    settings: AuditSettings,
    on_progress: OnProgress = no_progress,
) -> CheckedJob:
    """Audit one job, and return the findings, at most 5 of each code.

    Raises:
        ConflictError: epochs expire faster than they can be read.
        StorageError: a store failed.
    """

    def report(progress: Progress) -> None:
        on_progress(replace(progress, step=f"{paths.root}: {progress.step}"))

    silent = on_progress is no_progress
    reports = no_progress if silent else report
    epoch, inspected, findings = _verified(store, paths, settings, reports)
    facts = _facts(store, paths, reports)
    findings += list(audit_findings(facts, settings))
    return CheckedJob(
        job=paths.root,
        at_micros=facts.now_micros,
        epoch=epoch,
        level=settings.level,
        verdict=Verdict(findings=tuple(_some_of_each_code(findings)), inspected=inspected),
    )


def _verified(
    store: ObjectStore, paths: JobPaths, settings: AuditSettings, on_progress: OnProgress
) -> tuple[Epoch | None, int, list[Finding]]:
    """Return the newest epoch, how many objects were inspected, and what was found."""
    if not ParquetBackend(store, paths).epochs():
        return None, 0, []
    try:
        job_verdict = verify_job(store, paths, level=settings.level, on_progress=on_progress)
        findings = list(job_verdict.verdict.findings)
        if settings.level:
            findings += _hot_keys(store, paths, job_verdict, settings)
    except (FormatError, NotFoundError) as problem:
        step = "verify the job: `arroyo-state verify` says what is damaged, and where to go back to"
        return None, 1, [error("epoch-not-verified", paths.root, problem.message, step)]
    return job_verdict.epoch, job_verdict.verdict.inspected, findings


def _hot_keys(
    store: ObjectStore, paths: JobPaths, found: JobVerdict, settings: AuditSettings
) -> list[Finding]:
    try:
        return list(hot_keys(store, paths, found.epoch, settings))
    except (FormatError, NotFoundError):
        if found.passed:
            raise
        return []  # the verification says which file does not decode


def _facts(store: ObjectStore, paths: JobPaths, on_progress: OnProgress) -> AuditFacts:
    """Read the epochs first: what is written between the two is in the listing only."""
    backend = ParquetBackend(store, paths)
    numbers = backend.epochs()
    read = read_epochs(store, paths, numbers[-MAX_EPOCHS:], on_progress)
    listing = {
        info.path: ListedObject(info.size_bytes, info.modified_micros)
        for info in store.list(paths.root)
        if info.addressable
    }
    try:
        pinned = backend.job_pins().pinned
    except FormatError:
        pinned = frozenset()  # `health` reports it
    return AuditFacts(
        paths=paths,
        epochs=[answer for answer in read.values() if isinstance(answer, Checkpoint)],
        problems={
            epoch: str(one) for epoch, one in read.items() if not isinstance(one, Checkpoint)
        },
        complete=len(numbers) <= MAX_EPOCHS,
        listing=listing,
        pinned=pinned,
        now_micros=wall_clock(),
    )


def _some_of_each_code(findings: Iterable[Finding]) -> Iterator[Finding]:
    counts: dict[tuple[str, Severity], int] = {}
    for finding in findings:
        kind = (finding.code, finding.severity)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _FINDINGS_PER_CODE:
            yield finding


# ---- hot keys ------------------------------------------------------------------------------------
# Find routing keys that have a large share of a table's rows. Reads one column of each file.

_ROWS_AT_ONCE = 1 << 16
_KEYS_KEPT = 100_000
_RARE = 10_000

_Numbers = npt.NDArray[np.uint64]


def hot_keys(
    store: ObjectStore, paths: JobPaths, epoch: Epoch, settings: AuditSettings
) -> Iterator[Finding]:
    """Yield a finding for each table of an epoch with a hot key.

    Global tables and tables without keys have none. Files that expire meanwhile are left out.

    Raises:
        FormatError: a file does not decode.
        StorageError: the store failed.
    """
    checkpoint = ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    for operator in checkpoint.operators:
        for name, listed in operator.tables.items():
            config = operator.configs[name].config
            if isinstance(config, ExpiringTimeKeyConfig) and config.schema.hashed_indices:
                counts = _count(store, list(dict.fromkeys(listed.paths)))
                table = f"{operator.operator}.{name}"
                finding = hot_key_finding(paths.root, table, counts, settings)
                if finding is not None:
                    yield finding


def _count(store: ObjectStore, files: Sequence[StatePath]) -> KeyCounts:
    """Count the rows of each key.

    Keys that are rare so far are dropped beyond 100,000, so memory is bounded. A key with a large
    share of the rows is never rare.
    """
    rows = most_keys = 0
    keys, counts = np.empty(0, np.uint64), np.empty(0, np.uint64)
    for path in files:
        for hashes in _hashes(store, path):
            rows += len(hashes)
            new, amounts = np.unique(hashes, return_counts=True)
            keys, place = np.unique(np.concatenate([keys, new]), return_inverse=True)
            together = np.concatenate([counts, amounts.astype(np.uint64)])
            counts = np.bincount(place, weights=together).astype(np.uint64)
            most_keys = max(most_keys, len(keys))
            if len(keys) > _KEYS_KEPT:
                kept = counts * _RARE >= rows
                keys, counts = keys[kept], counts[kept]
    return KeyCounts(rows=rows, keys=most_keys, most=int(counts.max(initial=0)))


def _hashes(store: ObjectStore, path: StatePath) -> Iterator[_Numbers]:
    try:
        source = store.open_input(path)
    except NotFoundError:
        return
    with source, decoding(path):
        file = open_pages(source)
        if KEY_HASH_COLUMN not in file.schema_arrow.names:
            return
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[KEY_HASH_COLUMN]):
            yield batch.column(0).to_numpy(zero_copy_only=False)


# ---- the metadata of several epochs of a job, and their numbers ----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReadings:
    """What was read of a job already, and who hears of what is read now.

    Attributes:
        footers: a cache; share one with what reads the same files, for example a verification.
        objects: every object of the job; None = not listed yet.
        on_progress: called after each epoch and each footer that is read.
    """

    footers: Footers = field(default_factory=Footers)
    objects: Mapping[StatePath, ObjectInfo] | None = None
    on_progress: OnProgress = no_progress


def read_epochs(
    store: ObjectStore,
    paths: JobPaths,
    epochs: Collection[Epoch],
    on_progress: OnProgress = no_progress,
) -> dict[Epoch, Checkpoint | ArroyoStateError]:
    """Return the metadata of epochs, ascending, or why one cannot be read.

    Epochs that expired meanwhile are left out. Those of which only the metadata is left list no
    files.

    Raises:
        StorageError: the store failed.
    """
    count = counter(on_progress, "read epochs", len(epochs), ProgressUnit.EPOCHS)

    def load(epoch: Epoch) -> Checkpoint | ArroyoStateError | None:
        answer = _load(store, paths, epoch)
        count()
        return answer

    numbers = sorted(epochs)
    answers = zip(numbers, concurrently(load, numbers), strict=True)
    read = {epoch: answer for epoch, answer in answers if answer is not None}
    metadata_only = metadata_only_epochs(store, paths, numbers) if len(numbers) > 1 else {}
    return {
        epoch: _without_files(answer)
        if epoch in metadata_only and isinstance(answer, Checkpoint)
        else answer
        for epoch, answer in read.items()
    }


def _load(
    store: ObjectStore, paths: JobPaths, epoch: Epoch
) -> Checkpoint | ArroyoStateError | None:
    """Read one epoch; None if it expired meanwhile."""
    try:
        return ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    except StorageError:
        raise
    except ArroyoStateError as error:
        return None if store.head(paths.head(epoch)) is None else error


def _without_files(checkpoint: Checkpoint) -> Checkpoint:
    operators = tuple(replace(operator, tables={}) for operator in checkpoint.operators)
    return replace(checkpoint, state=CheckpointState.METADATA_ONLY, operators=operators)


def read_figures(
    store: ObjectStore, paths: JobPaths, epochs: Collection[int], readings: JobReadings
) -> list[EpochFigures]:
    """Return the numbers of epochs, ascending; those that cannot be read are left out.

    What is new in an epoch is known if the epoch before it is one of them, or if it is the first.

    Raises:
        StorageError: the store failed.
    """
    read = read_epochs(store, paths, [Epoch(number) for number in epochs], readings.on_progress)
    return figures_of(store, read.values(), readings)


def figures_of(
    store: ObjectStore,
    read: Collection[Checkpoint | ArroyoStateError],
    readings: JobReadings,
    known: Collection[int] = (),
) -> list[EpochFigures]:
    """Return the numbers of epochs that `read_epochs` has read; as `read_figures`.

    Args:
        known: epochs whose numbers are not asked for; no footer of theirs is read.
    """
    checkpoints = [
        answer
        for answer in read
        if isinstance(answer, Checkpoint) and answer.state is not CheckpointState.METADATA_ONLY
    ]
    new = [checkpoint for checkpoint in checkpoints if checkpoint.epoch not in known]
    listed = {path for checkpoint in new for path in checkpoint.paths}
    footers = readings.footers.read(store, listed, on_progress=readings.on_progress)
    before = {checkpoint.epoch + 1: frozenset(checkpoint.paths) for checkpoint in checkpoints}
    return [epoch_figures(checkpoint, before.get(checkpoint.epoch), footers) for checkpoint in new]
