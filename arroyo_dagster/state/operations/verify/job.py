"""Verify whether a job can be restored from an epoch: read all facts, apply all rules.

This module writes nothing. It reads files one by one, a few thousand rows at a time: memory depends
on the number of files, never on their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.own_records import read_records
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.verify import HISTORY, MAX_LEVEL, VerifySettings
from arroyo_dagster.state.operations.catalog.footers import expired_meanwhile
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.catalog.query import chosen_epoch
from arroyo_dagster.state.operations.engines import HERE, ItemRunner
from arroyo_dagster.state.operations.gc.journal_check import NEWEST, check_journal
from arroyo_dagster.state.operations.verify.data import DataFindings, data_findings
from arroyo_dagster.state.operations.verify.metadata import JobMetadata, read_job_metadata
from arroyo_dagster.state.operations.verify.rows import CheckDepth
from arroyo_dagster.state.planning.engines import EngineChoice
from arroyo_dagster.state.planning.verify.findings import Finding, Verdict, either, error
from arroyo_dagster.state.planning.verify.restore import SubtaskRestore
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import Catalogue, default_catalogue

__all__ = ["HISTORY", "MAX_LEVEL", "JobVerdict", "verify_job"]

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """Whether a job can be restored from an epoch.

    Attributes:
        level: the level of the verification, as of `verify_job`.
        parallelism: of the simulated restore; None = each operator's own.
        verdict: `inspected` counts data files and metadata objects.
        restore: what each subtask opens and keeps; empty below level 4.
        epochs: the consecutive epochs that were compared, ascending.
        engines: which engine ran each step, if there was a choice.
    """

    paths: JobPaths
    epoch: Epoch
    level: int
    parallelism: int | None
    verdict: Verdict
    restore: tuple[SubtaskRestore, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    engines: tuple[EngineChoice, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no finding is an error."""
        return self.verdict.passed


def verify_job(
    store: ObjectStore,
    paths: JobPaths,
    epoch: int | None = None,
    *,
    level: int = MAX_LEVEL,
    parallelism: int | None = None,
    history: int = HISTORY,
    catalogue: Catalogue | None = None,
    on_progress: OnProgress = no_progress,
    items: ItemRunner = HERE,
) -> JobVerdict:
    """Determine whether a job can be restored from an epoch, and report every finding.

    Metadata is checked in full at every level: ownership, chain of parents, commit, fence, what the
    next start would restore, and how the lists of files change from epoch to epoch.

    Args:
        epoch: None = the newest visible epoch.
        level, parallelism, history: see `VerifySettings`.
        catalogue: decodes entries whose types the job did not store; None = the tables registered
            in this process.
        on_progress: called after each file that was read.
        items: reads the files; in this process, or on Spark.

    Raises:
        InputError: the level, the history or the parallelism is out of range.
        NotFoundError: the job has no such epoch, or none at all.
        ConflictError: epochs expire faster than they can be read.
        StorageError: the store failed.
    """
    settings = VerifySettings(level=level, parallelism=parallelism, history=history)
    look = CheckDepth(
        level=settings.level,
        parallelism=settings.parallelism,
        catalogue=catalogue or default_catalogue(),
    )
    for _ in range(_ATTEMPTS):
        epochs = ParquetBackend(store, paths).epochs()
        number = chosen_epoch(store, paths, epochs, epoch)
        if number != epochs[-1] and (needed_by := metadata_only_epochs(store, paths, {number})):
            return _metadata_only(paths, number, needed_by[number], look)
        metadata = read_job_metadata(store, paths, epochs, number, settings.history)
        findings = [
            *_records(store, paths, metadata, whole=level == MAX_LEVEL),
            *check_journal(store, paths, None if level == MAX_LEVEL else NEWEST),
        ]
        verdict = _judge(store, paths, metadata, look, on_progress, items, findings)
        # Objects that an expiry deletes meanwhile are not damage.
        if verdict.passed or set(epochs) <= set(ParquetBackend(store, paths).epochs()):
            return verdict
    raise expired_meanwhile(store, paths, "try again with a lower level, or keep more epochs")


def _records(
    store: ObjectStore, paths: JobPaths, found: JobMetadata, *, whole: bool
) -> Iterator[Finding]:
    """Find records of this package that this release does not read."""
    records = read_records(store, paths, whole=whole)
    managed = found.checkpoint is None or found.checkpoint.progress is not None
    for path, problem in records.unreadable.items():
        blocks_start = managed and path not in records.beside
        step = str(problem.next_step)
        yield either(blocks_start, "record-unreadable", path, problem.message, step)


def _metadata_only(paths: JobPaths, epoch: Epoch, by: Epoch, look: CheckDepth) -> JobVerdict:
    finding = error(
        "metadata-only",
        paths.epoch_record(epoch),
        f"epoch {epoch} expired: its metadata stays for epoch {by}, its data is deleted",
        f"choose another epoch: `arroyo-state epochs {paths.root}` lists them",
    )
    return JobVerdict(
        paths=paths,
        epoch=epoch,
        level=look.level,
        parallelism=look.parallelism,
        verdict=Verdict(findings=(finding,), inspected=1),
        epochs=(epoch,),
    )


def _judge(
    store: ObjectStore,
    paths: JobPaths,
    found: JobMetadata,
    look: CheckDepth,
    on_progress: OnProgress,
    items: ItemRunner,
    ours: Sequence[Finding],
) -> JobVerdict:
    data = DataFindings()
    if found.checkpoint is not None:
        data = data_findings(store, paths, found, look, on_progress, items)
    return JobVerdict(
        paths=paths,
        epoch=found.epoch,
        level=look.level,
        parallelism=look.parallelism,
        verdict=Verdict(
            findings=(*found.findings, *data.findings, *ours),
            inspected=found.objects + data.inspected,
        ),
        restore=data.restore,
        epochs=tuple(checkpoint.epoch for checkpoint in found.history),
    )
