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
from arroyo_dagster.state.planning.health_checks.checks import JobHealth, judge_job, not_judged
from arroyo_dagster.state.planning.health_checks.facts import HealthFacts, TableAtEpoch
from arroyo_dagster.state.planning.verify.fleet import JobAge
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

EPOCHS = 200
"""How many epochs of a job show what is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOptions:
    """How the health of jobs is checked.

    Attributes:
        epochs: compare at most this many of the newest epochs of each job.
        earlier: as of `RefreshOptions`.
        on_progress: called after each job; for a single job, as `refresh` calls it.
        unreadable: why directories below the URL could not be listed, by path.
    """

    epochs: int = EPOCHS
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
    epochs, report = chosen.epochs, chosen.on_progress
    now_micros = wall_clock()
    summaries = concurrently(lambda paths: summarise_job(store, paths), jobs)
    ages = ages_of(store, summaries, directory)

    count = counter(report, "checked jobs", len(jobs), ProgressUnit.JOBS)

    def judge(job: tuple[JobSummary, JobAge]) -> JobHealth:
        summary, age = job
        refreshing = RefreshOptions(
            max_new_epochs=epochs,
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
        facts = _facts(history, summary, age, pins, epochs, now_micros)
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
    epochs_compared: int,
    now_micros: int,
) -> HealthFacts:
    epochs = _of_one_job(history.epochs)[-epochs_compared:]
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
