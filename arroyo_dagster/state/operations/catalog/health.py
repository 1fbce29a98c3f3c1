"""Apply the health checks to jobs, with facts from the store and from the catalogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.catalog import EpochRow, FileRow
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.garbage import JobPins
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.operations.catalog.epochs import (
    EarlierCatalogue,
    JobHistory,
    RefreshOptions,
    refresh,
)
from arroyo_dagster.state.operations.catalog.footers import ages_of
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import JobSummary, summarise_job
from arroyo_dagster.state.operations.gc.journal_check import NEWEST, check_journal
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.verify.audit import AuditOptions, audit_jobs, last_audits
from arroyo_dagster.state.planning.health_checks.facts import HealthFacts, TableAtEpoch
from arroyo_dagster.state.planning.rules import JobHealth, judge_audit, judge_job, not_judged
from arroyo_dagster.state.planning.verify.fleet import JobAge
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

EPOCHS = 200
"""How many of the newest epochs of a job show what is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOptions:
    """How the health of jobs is checked.

    Attributes:
        earlier: as of `RefreshOptions`.
        on_progress: called after each job; for a single job, as `refresh` calls it.
        unreadable: why directories below the URL could not be listed, by path.
    """

    earlier: EarlierCatalogue | None = None
    on_progress: OnProgress = no_progress
    unreadable: Mapping[str, ArroyoStateError] = field(default_factory=dict)


def check_health(
    store: ObjectStore,
    catalogue: ObjectStore,
    jobs: Sequence[JobPaths],
    directory: JobDirectory,
    limits: HealthLimits,
    options: HealthOptions | None = None,
) -> list[JobHealth]:
    """Bring the catalogue of jobs up to date, and apply all health checks to them.

    A job that cannot be judged is a finding, and so is a directory that cannot be listed.
    """
    chosen = options or HealthOptions()
    report = chosen.on_progress
    now_micros = wall_clock()
    summaries = concurrently(lambda paths: summarise_job(store, paths), jobs)
    ages = ages_of(store, summaries, directory)

    count = counter(report, "checked jobs", len(jobs), ProgressUnit.JOBS)

    def judge(job: tuple[JobSummary, JobAge]) -> JobHealth:
        summary, age = job
        refreshing = RefreshOptions(
            max_new_epochs=EPOCHS,
            earlier=chosen.earlier,
            newest=summary.newest if summary.problem is None else None,
            on_progress=report if len(jobs) == 1 else no_progress,
        )
        try:
            history = refresh(store, catalogue, summary.paths, refreshing).history
            pins = ParquetBackend(store, summary.paths).job_pins()
            moved = list_quarantines(store, summary.paths) if pins.quarantines else []
            journal = check_journal(store, summary.paths, NEWEST)
        except ArroyoStateError as error:
            return not_judged(age, now_micros, error.message)
        finally:
            count()
        facts = _facts(history, summary, age, pins, now_micros)
        quarantined = sum(copy.size_bytes for _, copies in moved for copy in copies)
        facts = replace(facts, quarantined_bytes=quarantined, journal=journal)
        return judge_job(facts, limits)

    hidden = [
        not_judged(JobAge(job=path), now_micros, error.message)
        for path, error in chosen.unreadable.items()
    ]
    return [*concurrently(judge, list(zip(summaries, ages, strict=True))), *hidden]


def _facts(
    history: JobHistory,
    summary: JobSummary,
    age: JobAge,
    pins: JobPins,
    now_micros: int,
) -> HealthFacts:
    epochs = _of_one_job(history.epochs)[-EPOCHS:]
    kept = {row.epoch for row in epochs if row.present}
    files = [row for row in history.files if row.epoch in kept]
    newest = max((row.epoch for row in files), default=None)
    sizes = {row.path: row.size_bytes or 0 for row in files}
    unpinned = {row.path for row in files if row.epoch not in pins.pinned}
    return HealthFacts(
        age=age,
        now_micros=now_micros,
        epochs=epochs,
        tables=_tables(files),
        files=[row for row in files if row.epoch == newest],
        checkpoint=summary.newest,
        pins=pins,
        stored_bytes=sum(sizes.values()),
        pinned_bytes=sum(size for path, size in sizes.items() if path not in unpinned),
    )


def _of_one_job(epochs: Sequence[EpochRow]) -> Sequence[EpochRow]:
    """Return the epochs since a new job began under the name."""
    start = next(
        (at for at in range(len(epochs) - 1, 0, -1) if epochs[at].epoch <= epochs[at - 1].epoch), 0
    )
    return epochs[start:]


def _tables(files: Sequence[FileRow]) -> list[TableAtEpoch]:
    def key(row: FileRow) -> tuple[int, str, str]:
        return row.epoch, row.operator, row.table

    found = []
    for (epoch, operator, table), group in groupby(sorted(files, key=key), key):
        rows = list(group)
        counts = [row.rows for row in rows if row.rows is not None]
        found.append(
            TableAtEpoch(
                epoch=epoch,
                operator=operator,
                table=table,
                files=len(rows),
                size_bytes=sum(row.size_bytes or 0 for row in rows),
                rows=sum(counts) if len(counts) == len(rows) else None,
            )
        )
    return found


def check_health_in_depth(
    store: ObjectStore,
    catalogue: ObjectStore,
    jobs: Sequence[JobPaths],
    directory: JobDirectory,
    limits: HealthLimits,
    depth: AuditSettings,
    options: HealthOptions | None = None,
) -> tuple[list[JobHealth], int]:
    """Apply all rules to jobs: `check_health`, and an audit of as many as the budget allows.

    Returns:
        The results, and the number of jobs that the budget did not reach.
    """
    chosen = options or HealthOptions()
    found = check_health(store, catalogue, jobs, directory, limits, chosen)
    auditing = AuditOptions(earlier=chosen.earlier, on_progress=chosen.on_progress)
    run = audit_jobs(store, catalogue, jobs, depth, auditing)
    failed: dict[str, ArroyoStateError] = {one.root: error for one, error in run.failed.items()}
    roots = {str(paths.root) for paths in jobs}
    audited, now_micros = last_audits(catalogue, jobs), wall_clock()

    def whole(health: JobHealth) -> JobHealth:
        error = failed.get(health.job)
        if error is None and health.job in roots:
            last = audited.get(health.job)
            deep = judge_audit(health.job, last, now_micros, depth.recent_micros)
        elif error is None or any(one and one.errors for one in health.verdicts.values()):
            return health
        else:
            deep = not_judged(JobAge(job=health.job), now_micros, error.message)
        return replace(health, verdicts={**health.verdicts, **deep.verdicts})

    return [whole(one) for one in found], len(run.left)
