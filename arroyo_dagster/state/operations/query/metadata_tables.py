"""Metadata tables: what is known of jobs, epochs, files and deletions, as rows.

Each has the column `job` first, and exists below every job, `arroyo."pl_1/job_1".files`, and for
all jobs of the checkpoint URL, `arroyo.files`. Tables of an epoch show the newest visible one;
`arroyo."pl_1/job_1@12".files` shows another, `@all` every visible one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import written_epoch
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
)
from arroyo_dagster.state.operations.catalog.epoch_summaries import list_epochs
from arroyo_dagster.state.operations.catalog.jobs import (
    JobSummary,
    find_any_job,
    summarise_job,
    summarise_jobs,
)
from arroyo_dagster.state.operations.catalog.metadata_only import stored_sizes
from arroyo_dagster.state.operations.query.metadata_rows import (
    CommitRow,
    DataFileRow,
    FateRow,
    JobEpochRow,
    JobRow,
    JoinSideRow,
    JournalRow,
    KeyRangeRow,
    LeaseRow,
    OperatorRow,
    OrphanRow,
    PinRow,
    QuarantineRow,
    RowGroupRow,
    SessionRow,
    SourcePosition,
    TableRow,
    WatermarkRow,
    WindowRow,
    lazy_source,
    rows_frame,
    rows_schema,
    rows_table,
)
from arroyo_dagster.state.operations.query.names import QueryName, not_found
from arroyo_dagster.state.operations.query.state import (
    OnUnreadable,
    StateCatalog,
    StateEpoch,
    StateJob,
)
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from arroyo_dagster.state.operations.gc.fate import DirectoryFate
    from arroyo_dagster.state.operations.query.table import EpochTable


@dataclass(frozen=True, slots=True)
class MetadataTable:
    """A metadata table.

    Attributes:
        name: such as `files`.
        row: the class of its rows.
        of_job: returns the rows of a job; None = it is of an epoch.
        of_epoch: returns the rows of one epoch.
        of_path: returns the rows of an object, whose path stands in place of a job.
    """

    name: str
    row: type[Any]
    of_job: Callable[[StateJob], Iterable[Any]] | None = None
    of_epoch: Callable[[StateEpoch], Iterable[Any]] | None = None
    of_path: Callable[[ObjectStore, str], Iterable[Any]] | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return rows_schema(self.row)

    @property
    def description(self) -> str:
        """What one row is."""
        return (self.row.__doc__ or "").strip().partition("\n")[0]

    def rows(
        self,
        jobs: Sequence[StateJob],
        epoch: str | None = None,
        on_unreadable: OnUnreadable | None = None,
    ) -> Iterator[Any]:
        """Yield the rows of jobs, when all are read.

        Args:
            epoch: as `StateJob.epochs_named` takes it; has no effect on tables of jobs.
            on_unreadable: called with each job that is left out, and why; None = raise the error.

        Raises:
            NotFoundError: the one job that is named has no such epoch.
            FormatError: an object does not decode.
            StorageError: the store failed.
        """

        def of_job(job: StateJob) -> list[Any]:
            try:
                return list(self._of_job(job, epoch, on_unreadable is None and len(jobs) == 1))
            except ArroyoStateError as error:
                if on_unreadable is None:
                    raise
                on_unreadable(job.name, error)
                return []

        return (row for part in concurrently(of_job, jobs) for row in part)

    def _of_job(self, job: StateJob, epoch: str | None, alone: bool) -> Iterator[Any]:
        if self.of_job is not None:
            yield from self.of_job(job)
        elif self.of_epoch is not None:
            if not alone and not job.epochs():
                return  # of all jobs: one that has not begun has no row
            for rows in concurrently(self._rows_of, job.epochs_named(epoch)):
                yield from rows

    def _rows_of(self, epoch: StateEpoch) -> list[Any]:
        return [] if self.of_epoch is None else list(self.of_epoch(epoch))


_R = TypeVar("_R")


def _row_of(row: type[_R], source: object, **values: Any) -> _R:
    """Return a row of these values, and in the other columns the attributes of `source`.

    Without a source they are null.
    """
    names = [name for name in row._fields if name not in values]  # type: ignore[attr-defined]
    more = {name: None if source is None else getattr(source, name) for name in names}
    return row(**values, **more)


# ---- of jobs -------------------------------------------------------------------------------------


def _jobs(job: StateJob) -> Iterator[JobRow]:
    yield _job_row(summarise_job(job.catalog.store, job.paths))


def _job_row(summary: JobSummary) -> JobRow:
    newest = summary.newest
    return _row_of(
        JobRow,
        summary,
        job=str(summary.paths.root),
        pipeline=summary.paths.pipeline,
        name=summary.paths.job,
        layout=summary.paths.layout.value if summary.listed else None,
        state=None if newest is None else newest.state.value,
        finished_at_micros=None if newest is None else newest.finish_time_micros,
        problem=None if summary.problem is None else str(summary.problem),
    )


def _epochs(job: StateJob) -> Iterator[JobEpochRow]:
    for summary in list_epochs(job.catalog.store, job.paths):
        checkpoint = summary.checkpoint
        yield _row_of(
            JobEpochRow,
            summary,
            job=job.name,
            state=None if summary.state is None else summary.state.value,
            started_at_micros=None if checkpoint is None else checkpoint.start_time_micros,
            finished_at_micros=None if checkpoint is None else checkpoint.finish_time_micros,
            watermark_micros=None if checkpoint is None else job_watermark_micros(checkpoint),
            operators=None if checkpoint is None else len(checkpoint.operators),
            problem=None if summary.problem is None else str(summary.problem),
        )


def _pins(job: StateJob) -> Iterator[PinRow]:
    for pin in CheckpointTree(job.catalog.store, job.paths).job_pins().pins:
        yield _row_of(PinRow, pin, job=job.name)


def _leases(job: StateJob) -> Iterator[LeaseRow]:
    from arroyo_dagster.state.model.clock import wall_clock
    from arroyo_dagster.state.operations.catalog.leases import list_leases

    now = wall_clock()
    for lease in list_leases(job.catalog.store, [job.paths]):
        yield _row_of(
            LeaseRow,
            lease.record,
            job=job.name,
            kind=lease.kind,
            state=lease.state(now),
            age_seconds=lease.age_seconds(now),
            expires_in_seconds=lease.expires_in_seconds(now),
            problem=None if lease.problem is None else str(lease.problem),
        )


def _journal(job: StateJob) -> Iterator[JournalRow]:
    from arroyo_dagster.state.operations.gc.journal import read_journal

    for entry in read_journal(job.catalog.store, job.paths):
        yield _row_of(JournalRow, entry, job=job.name)


def _orphans(job: StateJob) -> Iterator[OrphanRow]:
    from arroyo_dagster.state.model.garbage import PlanKind
    from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc

    try:
        plan = plan_gc(job.catalog.store, job.paths, GcRequest(kind=PlanKind.ORPHANS))
    except ArroyoStateError as error:
        # That gc refuses is an answer: nothing is known to be an orphan.
        yield OrphanRow(job=job.name, path=None, size_bytes=None, problem=str(error))
        return
    for packed in (plan.data, plan.records, plan.metadata):
        for file in packed:
            yield OrphanRow(job=job.name, path=file.path, size_bytes=file.size_bytes, problem=None)


def _quarantine(job: StateJob) -> Iterator[QuarantineRow]:
    from arroyo_dagster.state.operations.gc.quarantine import list_quarantines

    for quarantine, moved in list_quarantines(job.catalog.store, job.paths):
        for copy in moved:
            moved_at = quarantine.moved_at_micros
            names = {"job": job.name, "quarantine": quarantine.name}
            yield _row_of(QuarantineRow, copy, moved_at_micros=moved_at, **names)


# ---- of epochs -----------------------------------------------------------------------------------


def _operators(epoch: StateEpoch) -> Iterator[OperatorRow]:
    for operator in epoch.operators:
        yield _row_of(
            OperatorRow,
            operator,
            job=epoch.job.name,
            epoch=epoch.number,
            tables=len(operator.tables),
            watermark_micros=operator.min_watermark_micros,
        )


def _sizes(epoch: StateEpoch) -> dict[StatePath, int]:
    return stored_sizes(epoch.job.catalog.store, epoch.checkpoint.paths)


def _tables(epoch: StateEpoch) -> Iterator[TableRow]:
    sizes = _sizes(epoch)
    for operator, name, config in epoch.listed_tables():
        files = operator.tables[name]
        expiring = config.config if isinstance(config.config, ExpiringTimeKeyConfig) else None
        yield TableRow(
            job=epoch.job.name,
            epoch=epoch.number,
            finished_at_micros=epoch.checkpoint.finish_time_micros,
            operator=operator.operator,
            table=name,
            name=str(QueryName(name, operator.operator, epoch.job.name)),
            kind=config.kind.label,
            description=config.config.description,
            owner=epoch.job.catalog.catalogue.owner_of(operator.operator, config),
            retention_micros=None if expiring is None else expiring.retention_micros,
            generational=None if expiring is None else expiring.generational,
            files=len(files.paths),
            size_bytes=sum(sizes.get(path, 0) for path in dict.fromkeys(files.paths)),
        )


def _files(epoch: StateEpoch) -> Iterator[DataFileRow]:
    sizes = _sizes(epoch)
    for operator, name, _ in epoch.listed_tables():
        files = operator.tables[name]
        listed = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
        for place, path in enumerate(files.paths):
            file = listed[place] if listed else None
            yield _row_of(
                DataFileRow,
                file,
                job=epoch.job.name,
                epoch=epoch.number,
                operator=operator.operator,
                table=name,
                place=place,
                path=path,
                size_bytes=sizes.get(path),
                written_epoch=written_epoch(path) if file is None else file.epoch,
            )


def _row_groups(epoch: StateEpoch) -> Iterator[RowGroupRow]:
    from arroyo_dagster.state.tables.data_files import open_data_file

    store = epoch.job.catalog.store
    files = [(table, path) for table in epoch.tables() for path in table.scan.paths]

    def groups(file: tuple[EpochTable, StatePath]) -> list[RowGroupRow]:
        table, path = file
        with closing(open_data_file(store, path)) as data:
            return [
                _row_of(
                    RowGroupRow,
                    group,
                    job=epoch.job.name,
                    epoch=epoch.number,
                    operator=table.scan.operator.operator,
                    table=table.scan.name,
                    path=path,
                    row_group=index,
                )
                for index, group in enumerate(data.group_sizes)
            ]

    for rows in concurrently(groups, files):
        yield from rows


def _watermarks(epoch: StateEpoch) -> Iterator[WatermarkRow]:
    finished = epoch.checkpoint.finish_time_micros
    for operator in epoch.operators:
        watermark = operator.min_watermark_micros
        yield _row_of(
            WatermarkRow,
            operator,
            job=epoch.job.name,
            epoch=epoch.number,
            finished_at_micros=finished,
            watermark_micros=watermark,
            lag_seconds=None if watermark is None else (finished - watermark) / 1e6,
        )


def _commits(epoch: StateEpoch) -> Iterator[CommitRow]:
    pending = epoch.checkpoint.state is CheckpointState.COMMITTING
    for operator in epoch.operators:
        for name, files in sorted(operator.tables.items()):
            if not isinstance(files, GlobalKeyedFiles):
                continue
            for subtask, data in sorted(files.commit_data_by_subtask.items()):
                yield CommitRow(
                    job=epoch.job.name,
                    epoch=epoch.number,
                    operator=operator.operator,
                    table=name,
                    subtask=subtask,
                    size_bytes=len(data),
                    pending=pending,
                )


def _key_ranges(epoch: StateEpoch) -> Iterator[KeyRangeRow]:
    from arroyo_dagster.state.operations.query.operator_state import estimate_restore

    for estimate in estimate_restore(epoch, epoch.job.catalog.parallelism):
        read = estimate.read
        yield _row_of(
            KeyRangeRow,
            read,
            job=epoch.job.name,
            epoch=epoch.number,
            min_routing_key=read.keys.start,
            max_routing_key=read.keys.end,
            files=len(read.files),
            rows=estimate.rows,
            memory_bytes=estimate.memory_bytes,
            seconds=estimate.seconds,
        )


def _offsets(epoch: StateEpoch) -> Iterable[SourcePosition]:
    from arroyo_dagster.state.operations.query.positions import source_positions

    return source_positions(epoch)


def _windows(epoch: StateEpoch) -> Iterable[WindowRow]:
    from arroyo_dagster.state.operations.query.operator_state import windows

    return windows(epoch)


def _sessions(epoch: StateEpoch) -> Iterable[SessionRow]:
    from arroyo_dagster.state.operations.query.operator_state import sessions

    return sessions(epoch)


def _join_sides(epoch: StateEpoch) -> Iterable[JoinSideRow]:
    from arroyo_dagster.state.operations.query.operator_state import join_sides

    return join_sides(epoch)


# ---- of an object --------------------------------------------------------------------------------


def _fate(store: ObjectStore, name: str) -> Iterator[FateRow]:
    from arroyo_dagster.state.model.garbage import PURGE_MICROS, PlanKind
    from arroyo_dagster.state.operations.gc.fate import (
        fate_of_directory,
        fate_of_object,
        job_of_object,
        path_of_object,
    )
    from arroyo_dagster.state.operations.gc.plan import GcRequest

    path = path_of_object(name, store.url, None)
    paths = job_of_object(store, path)
    if path.endswith("/"):
        yield from _directory_fate(fate_of_directory(store, paths, path))
        return
    fate = fate_of_object(store, paths, path, GcRequest(kind=PlanKind.ORPHANS))
    kept = fate.quarantine
    row = FateRow(
        path=fate.path,
        fate=fate.state.name.lower(),
        objects=1,
        size_bytes=None if fate.info is None else fate.info.size_bytes,
        quarantine=None if kept is None else kept.name,
        copy=None if fate.copy is None else fate.copy.copy,
        purgeable_from_micros=None if kept is None else kept.moved_at_micros + PURGE_MICROS,
        reason=None if fate.explained is None else fate.explained.reason.name.lower(),
        problem=_unreadable(fate.unreadable) or fate.unexplained,
    )
    purged = () if fate.purged is None else (fate.purged,)
    entries = [*(event.entry for event in fate.events), *purged]
    for entry in entries:
        columns = {
            name: getattr(entry, name) for name in ("outcome", "kind", "owner", "run", "plan")
        }
        size = entry.size_bytes if row.size_bytes is None else row.size_bytes
        time = entry.at_micros
        yield row._replace(size_bytes=size, first_at_micros=time, last_at_micros=time, **columns)
    if not entries:
        yield row


def _directory_fate(below: DirectoryFate) -> Iterator[FateRow]:
    row = FateRow(path=below.prefix, problem=_unreadable(below.unreadable))
    yield row._replace(fate="present", objects=below.present, size_bytes=below.present_bytes)
    for (outcome, kind), count in below.counts.items():
        yield row._replace(
            outcome=outcome,
            kind=kind,
            objects=count.objects,
            size_bytes=count.size_bytes,
            first_at_micros=count.first_micros,
            last_at_micros=count.last_micros,
        )


def _unreadable(paths: Sequence[StatePath]) -> str | None:
    if not paths:
        return None
    return f"the answer may be incomplete: {len(paths)} parts of the journal, {paths[0]} among them"


METADATA_TABLES = {
    table.name: table
    for table in (
        MetadataTable("jobs", JobRow, of_job=_jobs),
        MetadataTable("epochs", JobEpochRow, of_job=_epochs),
        MetadataTable("operators", OperatorRow, of_epoch=_operators),
        MetadataTable("tables", TableRow, of_epoch=_tables),
        MetadataTable("files", DataFileRow, of_epoch=_files),
        MetadataTable("row_groups", RowGroupRow, of_epoch=_row_groups),
        MetadataTable("offsets", SourcePosition, of_epoch=_offsets),
        MetadataTable("watermarks", WatermarkRow, of_epoch=_watermarks),
        MetadataTable("windows", WindowRow, of_epoch=_windows),
        MetadataTable("sessions", SessionRow, of_epoch=_sessions),
        MetadataTable("join_sides", JoinSideRow, of_epoch=_join_sides),
        MetadataTable("commits", CommitRow, of_epoch=_commits),
        MetadataTable("key_ranges", KeyRangeRow, of_epoch=_key_ranges),
        MetadataTable("pins", PinRow, of_job=_pins),
        MetadataTable("leases", LeaseRow, of_job=_leases),
        MetadataTable("journal", JournalRow, of_job=_journal),
        MetadataTable("orphans", OrphanRow, of_job=_orphans),
        MetadataTable("quarantine", QuarantineRow, of_job=_quarantine),
        MetadataTable("fate", FateRow, of_path=_fate),
    )
}
"""By name."""


@dataclass(frozen=True, slots=True)
class MetadataRows:
    """A metadata table of one job, or of all jobs; see `find_metadata`."""

    table: MetadataTable
    state: StateCatalog
    job: StateJob | None
    epoch: str | None
    on_unreadable: OnUnreadable | None
    path: str | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self.table.schema

    def read(self) -> pa.Table:
        """Read the rows; errors as `MetadataTable.rows`, and of all jobs as `StateCatalog.jobs`.

        Of all jobs, the table `jobs` has a row with a `problem` for each that cannot be read.
        """
        return rows_table(self.table.row, self._rows())

    def to_polars(self, name: str) -> pl.LazyFrame:
        """Return the rows as a lazy frame that reads them all when it is collected, as `read`.

        Args:
            name: for explanations.
        """

        def source(
            columns: list[str] | None,
            predicate: pl.Expr | None,
            rows: int | None,
            batch_rows: int | None,
        ) -> Iterator[pl.DataFrame]:
            frame = rows_frame(self.table.row, self._rows())
            frame = frame if predicate is None else frame.filter(predicate)
            yield frame.select(frame.columns if columns is None else columns).head(
                frame.height if rows is None else rows
            )

        kinds = rows_frame(self.table.row, ()).schema
        return lazy_source(source, kinds, name)

    def _rows(self) -> Iterable[Any]:
        if self.table.of_path is not None:
            if self.path is None:
                raise InputError(
                    f"the table {self.table.name} is of one object",
                    expected='its path in place of the job: "JOB/checkpoints/7/metadata".fate',
                    next_step="`arroyo-state sql @fate --param path=PATH`",
                )
            return self.table.of_path(self.state.store, self.path)
        if self.job is not None:
            return self.table.rows([self.job], self.epoch)
        if self.table.name == "jobs":
            return map(_job_row, summarise_jobs(self.state.store))
        jobs = self.state.readable_jobs(self.on_unreadable)
        return self.table.rows(jobs, self.epoch, self.on_unreadable)


def find_metadata(
    state: StateCatalog,
    name: QueryName,
    epoch: str | None = None,
    on_unreadable: OnUnreadable | None = None,
) -> MetadataRows:
    """Find a metadata table by its name; nothing of its rows is read.

    Args:
        epoch: of which epochs, unless the name says so.
        on_unreadable: of all jobs, called with those that are left out, and why; None = raise the
            error.

    Raises:
        NotFoundError: there is no such metadata table or job; names the nearest.
    """
    table = METADATA_TABLES.get(name.table)
    if table is None:
        error = not_found("metadata table", name.table, METADATA_TABLES)
        raise error if name.job is None else state.epoch(name.job).with_tables(error)
    if name.job is None:
        return MetadataRows(table, state, None, epoch, on_unreadable)
    if table.of_path is not None:
        return MetadataRows(table, state, None, None, None, name.job)
    if table.name == "journal":
        paths = find_any_job(state.store, name.job)
        return MetadataRows(table, state, StateJob(state, paths), None, on_unreadable)
    job, named = state.find(name.job)
    return MetadataRows(table, state, job, named or epoch, on_unreadable)
