"""Audit a job: verify its newest epoch, and compare its other epochs with one listing.

Writes to the catalogue only: the findings, and what the data files look like, which the next audit
compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, Progress, no_progress
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.operations.catalog.epochs import EarlierCatalogue, RefreshOptions, refresh
from arroyo_dagster.state.operations.catalog.verdicts import read_verdicts, write_verdict
from arroyo_dagster.state.operations.verify.hot_keys import hot_keys
from arroyo_dagster.state.operations.verify.job import JobVerdict, verify_job
from arroyo_dagster.state.planning.verify.audit import AuditFacts, ListedObject, audit_findings
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict, error
from arroyo_dagster.state.planning.verify.fleet import CheckedJob
from arroyo_dagster.state.storage.store import ObjectStore

KIND = "audit"
"""The name of the stored verdict."""

_FINDINGS_PER_CODE = 5
_FILES = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("modified_micros", pa.int64()),
        pa.field("etag", pa.string()),
    ]
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """How an audit of many jobs is carried out.

    Attributes:
        earlier: as of `RefreshOptions`.
        clock: seconds.
        on_job: called after each job.
        on_progress: called after each file that was read, with the job in the step.
    """

    earlier: EarlierCatalogue | None = None
    clock: Callable[[], float] = time.monotonic
    on_job: Callable[[CheckedJob], None] = lambda audited: None
    on_progress: OnProgress = no_progress


def audit_jobs(
    store: ObjectStore,
    catalogue: ObjectStore,
    jobs: Sequence[JobPaths],
    settings: AuditSettings,
    options: AuditOptions | None = None,
) -> AuditRun:
    """Audit jobs within the budget, those first that no audit reached for the longest time.

    A job that cannot be audited does not stop the others.
    """
    chosen = options or AuditOptions()
    ends = chosen.clock() + settings.budget_micros / 1e6
    last = last_audits(catalogue, jobs)
    waiting = sorted(jobs, key=lambda one: (_last_at(last.get(one.root)), one.root))
    done: list[CheckedJob] = []
    failed: dict[JobPaths, ArroyoStateError] = {}
    for at, paths in enumerate(waiting):
        if at and chosen.clock() >= ends:
            return AuditRun(done=tuple(done), left=tuple(waiting[at:]), failed=failed)
        try:
            done.append(audit_job(store, catalogue, paths, settings, chosen))
            chosen.on_job(done[-1])
        except ArroyoStateError as problem:
            failed[paths] = problem
    return AuditRun(done=tuple(done), failed=failed)


def _last_at(audited: CheckedJob | None) -> int:
    return -1 if audited is None else audited.at_micros


def last_audits(catalogue: ObjectStore, jobs: Iterable[JobPaths]) -> dict[str, CheckedJob]:
    """Return the last audit of each job that was ever audited, by the job's root."""
    return {one.job: one for one in read_verdicts(catalogue, KIND, jobs).values()}


def audit_job(
    store: ObjectStore,
    catalogue: ObjectStore,
    paths: JobPaths,
    settings: AuditSettings,
    options: AuditOptions | None = None,
) -> CheckedJob:
    """Audit one job, and store the findings, at most 5 of each code.

    Raises:
        ConflictError: epochs expire faster than they can be read.
        StorageError: a store failed.
    """
    chosen = options or AuditOptions()

    def report(progress: Progress) -> None:
        chosen.on_progress(replace(progress, step=f"{paths.root}: {progress.step}"))

    silent = chosen.on_progress is no_progress
    on_progress = no_progress if silent else report
    epoch, inspected, findings = _verified(store, paths, settings, on_progress)
    refreshing = RefreshOptions(earlier=chosen.earlier, on_progress=on_progress)
    facts = _facts(store, catalogue, paths, refreshing)
    findings += list(audit_findings(facts, settings))
    audited = CheckedJob(
        job=paths.root,
        at_micros=facts.now_micros,
        epoch=epoch,
        level=settings.level,
        verdict=Verdict(findings=tuple(_some_of_each_code(findings)), inspected=inspected),
    )
    _remember_files(catalogue, facts)
    write_verdict(catalogue, KIND, paths, audited)
    return audited


def _verified(
    store: ObjectStore, paths: JobPaths, settings: AuditSettings, on_progress: OnProgress
) -> tuple[Epoch | None, int, list[Finding]]:
    """Return the newest epoch, how many objects were inspected, and what was found."""
    if not ParquetBackend(store, paths).epochs():
        return None, 0, []
    try:
        found = verify_job(store, paths, level=settings.level, on_progress=on_progress)
        findings = list(found.verdict.findings)
        if settings.level:
            findings += _hot_keys(store, paths, found, settings)
    except (FormatError, NotFoundError) as problem:
        step = "verify the job: `arroyo-state verify` says what is damaged, and where to go back to"
        return None, 1, [error("epoch-not-verified", paths.root, problem.message, step)]
    return found.epoch, found.verdict.inspected, findings


def _hot_keys(
    store: ObjectStore, paths: JobPaths, found: JobVerdict, settings: AuditSettings
) -> list[Finding]:
    try:
        return list(hot_keys(store, paths, found.epoch, settings))
    except (FormatError, NotFoundError):
        if found.passed:
            raise
        return []  # the verification says which file does not decode


def _facts(
    store: ObjectStore,
    catalogue: ObjectStore,
    paths: JobPaths,
    refreshing: RefreshOptions,
) -> AuditFacts:
    """Read the catalogue first: what is written between the two is in the listing only."""
    refreshed = refresh(store, catalogue, paths, refreshing)
    history = refreshed.history
    listing = {
        info.path: ListedObject(info.size_bytes, info.modified_micros, info.etag)
        for info in store.list(paths.root)
        if info.addressable
    }
    try:
        pinned = ParquetBackend(store, paths).job_pins().pinned
    except FormatError:
        pinned = frozenset()  # `health` reports it
    return AuditFacts(
        paths=paths,
        epochs=history.present,
        files=history.files,
        complete=not refreshed.left,
        listing=listing,
        before=_files_before(catalogue, paths),
        pinned=frozenset(pinned),
        now_micros=wall_clock(),
    )


def _some_of_each_code(findings: Iterable[Finding]) -> Iterator[Finding]:
    counts: dict[tuple[str, Severity], int] = {}
    for one in findings:
        kind = (one.code, one.severity)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _FINDINGS_PER_CODE:
            yield one


# ---- the files at the last audit -----------------------------------------------------------------


def _files_path(paths: JobPaths) -> StatePath:
    return StatePath(f"audited_files/{paths.layout.value}/{paths.root}.parquet")


def _files_before(catalogue: ObjectStore, paths: JobPaths) -> dict[StatePath, ListedObject]:
    """Return the data files as the last audit listed them; empty if that is unknown."""
    path = _files_path(paths)
    try:
        table, _ = decode_file(catalogue.read(path), path)
    except (NotFoundError, FormatError):
        return {}
    columns = [table.column(name).to_pylist() for name in _FILES.names]
    return {
        StatePath(name): ListedObject(size, modified, etag)
        for name, size, modified, etag in zip(*columns, strict=True)
    }


def _remember_files(catalogue: ObjectStore, facts: AuditFacts) -> None:
    listed = sorted({row.path for row in facts.files} & facts.listing.keys())
    objects = [facts.listing[StatePath(path)] for path in listed]
    columns = {
        "path": listed,
        "size_bytes": [one.size_bytes for one in objects],
        "modified_micros": [one.modified_micros for one in objects],
        "etag": [one.etag for one in objects],
    }
    data = encode_rows(pa.Table.from_pydict(columns, schema=_FILES))
    catalogue.put(_files_path(facts.paths), data)
