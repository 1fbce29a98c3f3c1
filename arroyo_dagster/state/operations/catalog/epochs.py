"""The catalogue: facts about every epoch of a job, kept as Parquet in a store of its own.

It has two tables with one object per job each. `epoch_catalog` has a row for each epoch, also after
the epoch expired. `operator_metadata` has a row for each file that a table of an epoch lists, as
long as the epoch exists. A refresh reads only epochs that are not catalogued yet, and no footer
twice.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError, StorageError
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.catalog import EpochRow, FileRow
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout, parse_epoch_record
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, TableFiles
from arroyo_dagster.state.operations.catalog.footers import read_stored_file
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.restore.lineage import rolled_back
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros, ordered_operators
from arroyo_dagster.state.planning.verify.checks import StoredFile, figures
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

EPOCH_CATALOG = "epoch_catalog"
OPERATOR_METADATA = "operator_metadata"
MAX_NEW_EPOCHS = 1_000
MAX_EXPIRED_EPOCHS = 100_000
UNREADABLE = "unreadable"

_INT64_MAX = 2**63 - 1
_Row = TypeVar("_Row", EpochRow, FileRow)


# ---- rows ----------------------------------------------------------------------------------------


DESCRIPTIONS = {
    "worker_generation": "the run that wrote it; null in the legacy layout",
    "state": "ready, committing, rolled back or unreadable",
    "started_micros": "since 1970, UTC",
    "finished_micros": "since 1970, UTC",
    "watermark_micros": "event time that all operators have reached",
    "new_files": "listed by this epoch and not by the previous one",
    "size_bytes": "as stored",
    "rows": "as stored, removals included",
    "present": "false once it expired",
    "recorded_micros": "when what makes it exist was written, by the store's clock",
    "rolled_back_to": "the epoch whose content it holds, if a rollback published it",
    "place": "in replay order, from 0",
    "compaction_generation": "how often it was merged; null for global keyed tables",
}
"""Meanings of columns whose names do not say them."""


def _schema(row: type[EpochRow] | type[FileRow]) -> pa.Schema:
    types = {"str": pa.string(), "int": pa.int64(), "bool": pa.bool_()}
    return pa.schema(
        pa.field(
            field.name,
            pa.uint64()
            if field.name.endswith("routing_key")
            else types[str(field.type).partition(" ")[0]],
            nullable=str(field.type).endswith("None"),
        )
        for field in fields(row)
    )


EPOCH_SCHEMA = _schema(EpochRow)
FILE_SCHEMA = _schema(FileRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """The catalogue's rows of one job, epochs in ascending order.

    Attributes:
        epochs: if a new job began under the same name, an epoch number may occur twice.
        files: of the epochs that are present.
    """

    paths: JobPaths
    epochs: tuple[EpochRow, ...] = ()
    files: tuple[FileRow, ...] = ()

    @property
    def present(self) -> tuple[EpochRow, ...]:
        return tuple(row for row in self.epochs if row.present)

    @property
    def newest(self) -> EpochRow | None:
        """The newest epoch that is present and can be read."""
        readable = (row for row in reversed(self.epochs) if row.present and row.problem is None)
        return next(readable, None)

    def files_of(self, epoch: int) -> tuple[FileRow, ...]:
        """Return the file rows of one epoch."""
        return tuple(row for row in self.files if row.epoch == epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """The outcome of a refresh of one job's catalogue.

    Attributes:
        added: how many epochs were read for the first time.
        expired: how many epochs were present before and no longer exist.
        left: how many epochs were not read because the limit was reached.
        problems: errors of the epochs read now that cannot be read.
    """

    history: JobHistory
    added: int = 0
    expired: int = 0
    left: int = 0
    problems: tuple[ArroyoStateError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierCatalogue:
    """A catalogue of an older release, which does not name its checkpoint URL.

    Attributes:
        alone: whether no other checkpoint URL has a catalogue beside it.
    """

    store: ObjectStore
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshOptions:
    """How a refresh of one job's catalogue is carried out.

    Attributes:
        max_new_epochs: read at most this many epochs, the newest.
        max_expired_epochs: keep at most this many rows of expired epochs, the newest.
        earlier: a catalogue from which the rows of a job that is not catalogued yet may be copied.
        newest: the newest epoch, if it was just read; it is not read again.
        on_progress: called after each epoch and each footer that was read.
    """

    max_new_epochs: int = MAX_NEW_EPOCHS
    max_expired_epochs: int = MAX_EXPIRED_EPOCHS
    earlier: EarlierCatalogue | None = None
    newest: Checkpoint | None = None
    on_progress: OnProgress = no_progress


# ---- the store of the catalogue ------------------------------------------------------------------


def catalogue_path(table: str, paths: JobPaths) -> StatePath:
    """Return the path of a job's rows. The layout comes first, so that no two jobs share a path."""
    return StatePath(f"{table}/{paths.layout.value}/{paths.root}.parquet")


def read_history(catalogue: ObjectStore, paths: JobPaths) -> JobHistory:
    """Read the catalogue's rows of a job; empty for a job that was never catalogued.

    Raises:
        FormatError: an object of the catalogue does not decode.
    """
    epochs = _read_rows(catalogue, catalogue_path(EPOCH_CATALOG, paths), EpochRow)
    files = _read_rows(catalogue, catalogue_path(OPERATOR_METADATA, paths), FileRow)
    return JobHistory(paths=paths, epochs=epochs, files=files)


def newest_rows(catalogue: ObjectStore, jobs: Iterable[JobPaths]) -> dict[str, EpochRow]:
    """Return each catalogued job's newest readable epoch that is present, by the job's root."""
    listed = list(jobs)
    epochs = catalogued_epochs(catalogue, listed)
    found = {
        paths.root: JobHistory(paths=paths, epochs=epochs[paths.root]).newest for paths in listed
    }
    return {str(root): row for root, row in found.items() if row is not None}


def catalogued_epochs(
    catalogue: ObjectStore, jobs: Sequence[JobPaths]
) -> dict[StatePath, tuple[EpochRow, ...]]:
    """Return the catalogued epochs of each job, ascending, by the job's root."""
    found = concurrently(
        lambda paths: _read_rows(catalogue, catalogue_path(EPOCH_CATALOG, paths), EpochRow), jobs
    )
    return {paths.root: rows for paths, rows in zip(jobs, found, strict=True)}


def not_catalogued(
    store: ObjectStore, catalogue: ObjectStore, jobs: Sequence[JobPaths]
) -> dict[str, int]:
    """Return how many epochs of each job are newer than the newest in the catalogue, by the job's
    root.

    This costs one listing per job; jobs that cannot be listed are left out.
    """
    known = newest_rows(catalogue, jobs)

    def newer(paths: JobPaths) -> int | None:
        newest = known.get(paths.root)
        try:
            epochs = ParquetBackend(store, paths).epochs()
        except ArroyoStateError:
            return None
        return sum(newest is None or epoch > newest.epoch for epoch in epochs)

    counts = zip((paths.root for paths in jobs), concurrently(newer, jobs), strict=True)
    return {root: count for root, count in counts if count is not None}


def _read_rows(catalogue: ObjectStore, path: StatePath, row: type[_Row]) -> tuple[_Row, ...]:
    try:
        data = catalogue.read(path)
    except NotFoundError:
        return ()
    names = {field.name for field in fields(row)}
    table, _ = decode_file(data, path)
    # A later release may have written more columns, an older one fewer.
    known = table.select([name for name in table.column_names if name in names])
    return tuple(row(**found) for found in known.to_pylist())


def _write(catalogue: ObjectStore, history: JobHistory) -> None:
    # Files first: an epoch counts as catalogued by its row, so an interrupted write is repeated.
    for table, rows, schema in (
        (OPERATOR_METADATA, history.files, FILE_SCHEMA),
        (EPOCH_CATALOG, history.epochs, EPOCH_SCHEMA),
    ):
        data = encode_rows(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema))
        catalogue.put(catalogue_path(table, history.paths), data)


# ---- refresh -------------------------------------------------------------------------------------


def refresh(
    store: ObjectStore,
    catalogue: ObjectStore,
    paths: JobPaths,
    options: RefreshOptions | None = None,
) -> Refreshed:
    """Catalogue the epochs of a job that are not catalogued yet, and mark expired epochs.

    The newest epoch is always read again: a compaction may have rewritten it while the job is at
    rest.

    Args:
        store: of the job; never written to.

    Raises:
        StorageError: a store failed; the catalogue is unchanged, or true for every epoch it names.
    """
    chosen = options or RefreshOptions()
    old = stored = read_history(catalogue, paths)
    listed = _recorded(store, paths)
    if not stored.epochs and chosen.earlier is not None:
        old = _taken_over(chosen.earlier, paths, listed)
    if _began_anew(old, listed):
        old = replace(old, epochs=tuple(replace(r, present=False) for r in old.epochs), files=())
    held = metadata_only_epochs(store, paths) if len(listed) > 1 else {}
    wanted = _to_read(old, listed, held)
    epochs = wanted[max(0, len(wanted) - chosen.max_new_epochs) :]
    count = counter(chosen.on_progress, "read epochs", len(epochs), ProgressUnit.EPOCHS)

    def load(epoch: Epoch) -> Checkpoint | ArroyoStateError | None:
        newest = chosen.newest
        answer = newest if newest and newest.epoch == epoch else _load(store, paths, epoch)
        count()
        return answer

    answers = concurrently(load, epochs)
    loaded = {
        epoch: _without_files(answer) if epoch in held else answer
        for epoch, answer in zip(epochs, answers, strict=True)
        if answer is not None
    }
    checkpoints = [one for one in loaded.values() if isinstance(one, Checkpoint)]
    known = _known_footers(store, old, checkpoints, chosen.on_progress)
    history = _merged(old, listed, loaded, known, chosen.max_expired_epochs)
    if history != stored:
        _write(catalogue, history)
    catalogued = {row.epoch for row in old.present}
    return Refreshed(
        history=history,
        added=len(loaded.keys() - catalogued),
        expired=len(catalogued - listed.keys()),
        left=len(wanted) - len(epochs),
        problems=tuple(one for one in loaded.values() if isinstance(one, ArroyoStateError)),
    )


def _taken_over(
    earlier: EarlierCatalogue, paths: JobPaths, listed: Mapping[Epoch, int | None]
) -> JobHistory:
    """Return an earlier catalogue's rows of a job, if they prove to be of this job.

    Two checkpoint URLs may have written to that catalogue in turn, so the rows of each job must
    prove that they match: every epoch that is in both was recorded at the same microsecond. If no
    epoch is in both any more, the rows are accepted only if they end before the existing epochs and
    no other checkpoint URL has a catalogue there.
    """
    nothing = JobHistory(paths=paths)
    try:
        found = read_history(earlier.store, paths)
    except FormatError:
        return nothing  # the existing epochs are read again
    known = {Epoch(row.epoch): row.recorded_micros for row in found.present}
    both = known.keys() & listed.keys()
    if both:
        same = all(known[epoch] == listed[epoch] is not None for epoch in both)
        return found if same else nothing
    continues = bool(known and listed) and max(known) < min(listed)
    return found if earlier.alone and continues else nothing


def _recorded(store: ObjectStore, paths: JobPaths) -> dict[Epoch, int | None]:
    """Return the existing epochs, and when the object that makes each exist was written."""
    if paths.layout is Layout.PROTOCOL:
        found = store.list_dir(paths.epochs).objects
        numbers = [(parse_epoch_record(info.path.name), info.modified_micros) for info in found]
    else:
        dirs = ParquetBackend(store, paths).checkpoint_dirs()
        heads = concurrently(lambda epoch: store.head(paths.legacy_metadata(epoch)), dirs)
        numbers = [
            (epoch, head.modified_micros)
            for epoch, head in zip(dirs, heads, strict=True)
            if head is not None
        ]
    return {epoch: micros for epoch, micros in sorted(numbers) if epoch is not None}


def _began_anew(old: JobHistory, listed: Mapping[Epoch, int | None]) -> bool:
    """Whether a catalogued epoch number was written again: a new job uses the name."""
    return any(
        listed.get(Epoch(row.epoch), row.recorded_micros) != row.recorded_micros
        for row in old.present
    )


def _without_files(answer: Checkpoint | ArroyoStateError) -> Checkpoint | ArroyoStateError:
    """Return an epoch of which only the metadata is left."""
    if not isinstance(answer, Checkpoint):
        return answer
    operators = tuple(replace(one, tables={}) for one in answer.operators)
    return replace(answer, state=CheckpointState.METADATA_ONLY, operators=operators)


def _to_read(
    old: JobHistory, listed: Mapping[Epoch, int | None], held: Container[Epoch]
) -> list[Epoch]:
    states = (CheckpointState.READY.value, CheckpointState.ROLLED_BACK.value, UNREADABLE)
    settled = {row.epoch for row in old.present if row.state in states}
    newest = max(listed, default=None)
    return [epoch for epoch in listed if epoch not in settled or epoch == newest or epoch in held]


def _load(
    store: ObjectStore, paths: JobPaths, epoch: Epoch
) -> Checkpoint | ArroyoStateError | None:
    """Read one epoch; None if it expired meanwhile."""
    legacy = paths.layout is Layout.LEGACY
    root = paths.legacy_metadata(epoch) if legacy else paths.epoch_record(epoch)
    try:
        return ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    except StorageError:
        raise
    except ArroyoStateError as error:
        return None if store.head(root) is None else error


def _merged(
    old: JobHistory,
    listed: Mapping[Epoch, int | None],
    loaded: Mapping[Epoch, Checkpoint | ArroyoStateError],
    known: _Known,
    max_expired: int,
) -> JobHistory:
    files = [row for row in old.files if row.epoch in listed and row.epoch not in loaded]
    for checkpoint in loaded.values():
        if isinstance(checkpoint, Checkpoint):
            files.extend(_file_rows(old.paths, checkpoint, known))
    paths_of: dict[int, set[str]] = {row.epoch: set() for row in old.present}
    for row in files:
        paths_of.setdefault(row.epoch, set()).add(row.path)
    fresh = [
        _epoch_row(old.paths, epoch, answer, _earlier(epoch, listed, paths_of), known, recorded)
        for epoch, answer in loaded.items()
        for recorded in (listed[epoch],)
    ]
    return JobHistory(
        paths=old.paths,
        epochs=_with_rolled_back(_merged_rows(old.epochs, fresh, listed, max_expired)),
        files=tuple(sorted(files, key=lambda row: row.epoch)),
    )


def _merged_rows(
    old: Sequence[EpochRow],
    fresh: Sequence[EpochRow],
    listed: Collection[int],
    max_expired: int,
) -> tuple[EpochRow, ...]:
    read = {row.epoch for row in fresh}
    same = {_identity(row) for row in fresh}
    kept = [
        replace(row, present=row.present and row.epoch in listed)
        for row in old
        if not (row.present and row.epoch in read) and _identity(row) not in same
    ]
    expired = [row for row in kept if not row.present]
    rows = [*expired[max(0, len(expired) - max_expired) :], *(r for r in kept if r.present), *fresh]
    # Expired rows first: where a number occurs twice, the existing job is the later one.
    return tuple(sorted(rows, key=lambda row: (row.epoch, row.present)))


def _with_rolled_back(rows: tuple[EpochRow, ...]) -> tuple[EpochRow, ...]:
    """Mark the epochs that rollbacks have abandoned, and unmark all others."""
    present = [row for row in rows if row.present and row.state != UNREADABLE]
    if not present:
        return rows
    restored = {
        Epoch(row.epoch): Epoch(row.rolled_back_to)
        for row in present
        if row.rolled_back_to is not None
    }
    numbers = [Epoch(row.epoch) for row in present]
    left = rolled_back(max(numbers), numbers, restored)
    was, ready = CheckpointState.ROLLED_BACK.value, CheckpointState.READY.value
    return tuple(
        replace(row, state=was if row.epoch in left else ready)
        if row.present
        and row.state in (was, ready, CheckpointState.COMMITTING.value)
        and (row.epoch in left or row.state == was)
        else row
        for row in rows
    )


def _identity(row: EpochRow) -> tuple[int, int | None, int | None]:
    return row.epoch, row.worker_generation, row.started_micros


def _earlier(
    epoch: Epoch, listed: Iterable[Epoch], paths_of: Mapping[int, Collection[str]]
) -> Collection[str] | None:
    """Return the files of the epoch before this one; None if that epoch is not catalogued."""
    earlier = max((number for number in listed if number < epoch), default=None)
    return None if earlier is None else paths_of.get(earlier)


@dataclass(frozen=True, slots=True)
class _Known:
    """Facts about existing data files: their footers, and their columns as text."""

    files: Mapping[StatePath, StoredFile]
    columns: Mapping[StatePath, str | None]


def _known_footers(
    store: ObjectStore,
    old: JobHistory,
    checkpoints: Iterable[Checkpoint],
    on_progress: OnProgress,
) -> _Known:
    """Return facts about every file of the checkpoints, from the old catalogue where possible."""
    files = {
        StatePath(row.path): StoredFile(size_bytes=row.size_bytes, rows=row.rows)
        for row in old.files
        if row.size_bytes is not None and row.rows is not None
    }
    columns = {StatePath(row.path): row.columns for row in old.files}
    wanted = {path for one in checkpoints for path in one.paths} - files.keys()
    count = counter(on_progress, "read footers", len(wanted), ProgressUnit.FILES)

    def read_file(path: StatePath) -> StoredFile | None:
        found = read_stored_file(store, path)
        count()
        return found

    answers = zip(paths := sorted(wanted), concurrently(read_file, paths), strict=True)
    read = {path: found for path, found in answers if found is not None}
    texts = {path: ", ".join(map(str, one.columns)) for path, one in read.items()}
    return _Known(files | read, columns | texts)


def _epoch_row(
    paths: JobPaths,
    epoch: Epoch,
    answer: Checkpoint | ArroyoStateError,
    earlier: Collection[str] | None,
    known: _Known,
    recorded_micros: int | None,
) -> EpochRow:
    row = EpochRow(
        job=paths.job,
        pipeline=paths.pipeline,
        epoch=epoch,
        state=UNREADABLE,
        recorded_micros=recorded_micros,
    )
    if not isinstance(answer, Checkpoint):
        return replace(row, problem=str(answer))
    return replace(
        row,
        worker_generation=_int64(answer.worker_generation),
        state=answer.state.value,
        started_micros=_int64(answer.start_time_micros),
        finished_micros=_int64(answer.finish_time_micros),
        duration_micros=_int64(answer.finish_time_micros - answer.start_time_micros),
        watermark_micros=_int64(job_watermark_micros(answer)),
        operators=len(answer.operators),
        min_epoch=_int64(answer.min_epoch),
        final=answer.progress is not None and answer.progress.final,
        ref=answer.ref,
        rolled_back_to=answer.rolled_back_to,
        **asdict(figures(answer, earlier, known.files)),
    )


def _int64(number: int | None) -> int | None:
    # Arroyo's numbers are unsigned; no time and no count reaches 2**63.
    return None if number is None else min(number, _INT64_MAX)


def _file_rows(paths: JobPaths, checkpoint: Checkpoint, known: _Known) -> list[FileRow]:
    return [
        replace(
            row,
            job=paths.job,
            pipeline=paths.pipeline,
            worker_generation=checkpoint.worker_generation,
            epoch=checkpoint.epoch,
        )
        for operator in ordered_operators(checkpoint)
        for table, files in sorted(operator.tables.items())
        for row in _table_rows(operator, table, files, known)
    ]


def _table_rows(
    operator: OperatorCheckpoint, table: str, files: TableFiles, known: _Known
) -> list[FileRow]:
    rows = [
        FileRow(
            job=operator.job,
            epoch=operator.epoch,
            operator=operator.operator,
            parallelism=min(operator.parallelism, _INT64_MAX),
            table=table,
            table_kind=files.kind.label,
            place=place,
            path=path,
            **_facts(path, known),
        )
        for place, path in enumerate(files.paths)
    ]
    if not isinstance(files, ExpiringTimeKeyFiles):
        return rows
    return [
        replace(
            row,
            written_epoch=file.epoch,
            min_routing_key=file.min_routing_key,
            max_routing_key=file.max_routing_key,
            max_timestamp_micros=_int64(file.max_timestamp_micros),
            compaction_generation=_int64(file.compaction_generation),
        )
        for row, file in zip(rows, files.files, strict=True)
    ]


def _facts(path: StatePath, known: _Known) -> dict[str, Any]:
    stored = known.files.get(path)
    if stored is None:
        return {"problem": "the file is missing"}
    if stored.problem is not None:
        return {"size_bytes": stored.size_bytes, "problem": stored.problem}
    columns = known.columns.get(path)
    return {"size_bytes": stored.size_bytes, "rows": stored.rows, "columns": columns}
