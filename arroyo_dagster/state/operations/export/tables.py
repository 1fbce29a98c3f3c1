"""Tables that are exported again and again: open the target, find what is due, export it."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.errors import ConflictError, InputError, NotFoundError
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.codec.derived import decode, encode
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.operations.export.delta_table import DeltaLakeTable
from arroyo_dagster.state.operations.export.epochs import export_changes, export_epochs, unit_of
from arroyo_dagster.state.operations.export.iceberg_table import IcebergLakeTable
from arroyo_dagster.state.operations.export.lake_table import (
    COMMIT_ATTEMPTS,
    TABLE_TYPES,
    AddedFile,
    CommitToken,
    LakeTable,
    OpenTable,
    OvertakenError,
)
from arroyo_dagster.state.operations.export.targets import (
    ExportedEpoch,
    ExportTarget,
    ExportUnit,
    check_names,
    other_source,
    other_state,
)
from arroyo_dagster.state.operations.query.state import StateJob
from arroyo_dagster.state.planning.exports import CHANGES, EVERY, TableExport, TargetOptions
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore


def open_target(target: str, to: TargetOptions, state_url: str) -> ExportTarget:
    """Open the target of an export; nothing is written yet.

    Args:
        target: a folder, a URL, or `namespace.table` of Iceberg.
        state_url: the checkpoint URL, which is refused as a target.

    Raises:
        InputError: not a target, or the checkpoint URL; or a package is not installed.
    """
    if to.format == "iceberg":
        return IcebergTarget(
            table=target,
            catalog=to.catalog,
            options=to.options,
            types=_types(to, TABLE_TYPES),
            epoch_column=to.epoch_column,
        )
    url = target if "://" in target else f"file://{Path(target).absolute()}"
    store = open_store(url, options=to.options)
    if store.url.rstrip("/") == state_url.rstrip("/"):
        raise InputError(
            "the target is the checkpoint URL itself",
            target=target,
            next_step="export to another folder",
        )
    if to.format == "delta":
        types = _types(to, TABLE_TYPES)
        return DeltaTarget(url=url, options=to.options, types=types, epoch_column=to.epoch_column)
    plain = to.nanos is None and to.unsigned is None
    return ParquetTarget(store=store, types=None if plain else _types(to, TypeOptions()))


def _types(to: TargetOptions, types: TypeOptions) -> TypeOptions:
    return replace(types, nanos=to.nanos or types.nanos, unsigned=to.unsigned or types.unsigned)


def run_export(export: TableExport, job: StateJob) -> Iterator[ExportedEpoch]:
    """Export what a job has of a table and the target has not; yield each epoch as it is complete.

    Raises:
        NotFoundError: the job has no such operator or table, or an epoch was collected meanwhile.
        InputError, ConflictError, StorageError: as of the target.
    """
    target = _target(export, job)
    numbers = job.epochs()
    if export.epochs == CHANGES:
        if numbers:
            yield from export_changes(job, export.operator, export.table, target, numbers[0])
        return
    epochs = numbers if export.epochs == EVERY else numbers[-1:]
    yield from export_epochs(job, export.operator, export.table, target, epochs)


def export_is_due(export: TableExport, job: StateJob) -> bool:
    """Return whether the target lacks the newest epoch of a job; errors as of `run_export`."""
    numbers = job.epochs()
    if not numbers or (export.epochs == CHANGES and len(numbers) < 2):
        return False
    changes = export.epochs == CHANGES
    unit = unit_of(job.epoch(numbers[-1]), export.operator, export.table, changes=changes)
    return _target(export, job).exported(unit) is None


def _target(export: TableExport, job: StateJob) -> ExportTarget:
    return open_target(export.target_of(job.paths), export.to, job.catalog.store.url)


# ---- lake ----------------------------------------------------------------------------------------
# Tables of Delta and Iceberg as targets of exports: an epoch is a partition, added by one commit.
#
# The table has the columns of the rows and `epoch`, by which it is partitioned. The commit that
# adds the files of an epoch also writes who exported and the newest epoch: application transactions
# in Delta, a property of the table and of the snapshot in Iceberg. Two exports of one table
# therefore conflict, and the later finds the epoch of the other. Files of an export that was killed
# before its commit are in no table; `VACUUM` and the removal of orphan files delete them.
#
# Later epochs may have other columns: new ones are added to the table, missing ones are null. The
# type of a column may become narrower, never another one.

SOURCE = "arroyo.export"
"""The property of a table that names what is exported to it."""
_WIDER: Mapping[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64()),
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
}


class LakeTarget(ExportTarget):
    """A table of a table format that takes exported epochs; see the module."""

    options: Mapping[str, Any]
    types: TypeOptions
    epoch_column: str

    @property
    @abstractmethod
    def lake(self) -> LakeTable:
        """Return the table; it may not exist yet."""

    def exported(self, unit: ExportUnit) -> ExportedEpoch | None:
        """Return the export of an epoch; see `ExportTarget.exported`."""
        table = self.lake.open()
        return None if table is None else self._exported(table, unit)

    def newest(self, source: str) -> Epoch | None:
        """Return the newest epoch, by the token of the last commit."""
        table = self.lake.open()
        token = None if table is None else table.token(_writer(source))
        return None if token is None else Epoch(token.epoch)

    def _exported(self, table: OpenTable, unit: ExportUnit) -> ExportedEpoch | None:
        self._check_table(table, unit)
        newest = table.token(_writer(unit.source))
        if newest is not None:
            replaced = (
                unit.epoch == newest.epoch and unit.finished_at_micros != newest.finished_at_micros
            )
            # An epoch before the newest one that was finished after it: the numbers began anew.
            renewed = (
                unit.epoch < newest.epoch and unit.finished_at_micros > newest.finished_at_micros
            )
            if replaced or renewed:
                raise other_state(self.lake.name, unit)
        files, rows, size = table.partition_files(self.epoch_column, unit.epoch)
        if not files and (newest is None or unit.epoch != newest.epoch):
            return None
        return ExportedEpoch(epoch=unit.epoch, files=files, rows=rows, size_bytes=size, new=False)

    def _check_table(self, table: OpenTable, unit: ExportUnit) -> None:
        """Refuse a table that is not an export of the source."""
        source = table.properties.get(SOURCE)
        if source is None:
            raise InputError(
                "the table was not created by an export",
                table=self.lake.name,
                next_step="export to a table that does not exist yet; or set the property "
                f"{SOURCE} of an empty one, partitioned by {self.epoch_column}, to {unit.source!r}",
            )
        if source != unit.source:
            raise other_source(self.lake.name, unit, source)
        if list(table.partitioned_by) != [self.epoch_column]:
            raise InputError(
                f"the table is not partitioned by {self.epoch_column}",
                table=self.lake.name,
                partitioned_by=", ".join(table.partitioned_by),
            )
        table.check_writable()

    def write(self, unit: ExportUnit, rows: Iterable[pa.Table], schema: pa.Schema) -> ExportedEpoch:
        """Write the files of an epoch, then add them in one commit; see `ExportTarget.write`."""
        check_names(
            schema,
            self.epoch_column,
            self.lake.name,
            "choose another name for the column of epochs, by epoch_column or --epoch-column",
        )
        columns = self.types.schema_of(schema)
        table = self.lake.open()
        names = [] if table is None else table.columns.names
        self.lake.check_names(list(dict.fromkeys([*names, *columns.names])))
        if table is None:
            nullable = [column.with_nullable(True) for column in columns]
            epoch = pa.field(self.epoch_column, pa.int64())
            table = self.lake.create(
                pa.schema([epoch, *nullable]), [self.epoch_column], {SOURCE: unit.source}
            )
        self._check_table(table, unit)
        fitted = _fitted(columns, self._of_rows(table), self.lake.name)
        files = self._write_files(table, unit, map(self.types.convert, rows), fitted)
        return self._commit(unit, files, columns)

    def _of_rows(self, table: OpenTable) -> pa.Schema:
        """Return the columns of a table but the epoch, in the types of table formats."""
        return TABLE_TYPES.schema_of(
            pa.schema([column for column in table.columns if column.name != self.epoch_column])
        )

    def _write_files(
        self, table: OpenTable, unit: ExportUnit, rows: Iterator[pa.Table], columns: pa.Schema
    ) -> list[AddedFile]:
        """Write data files under names that no other attempt uses."""
        store = open_store(table.files_url, options=self.options)
        attempt = uuid.uuid4().hex[:16]
        files: list[AddedFile] = []
        kept = self._file_columns(columns)
        widened = (part.cast(columns) for part in rows)
        full = (self._file_rows(part, unit, kept) for part in widened)
        for count, data in parts(full, kept, empty=False):
            name = f"{self.epoch_column}={unit.epoch}/part-{len(files):05}-{attempt}.parquet"
            store.put(StatePath(name), data)
            partition = {self.epoch_column: str(unit.epoch)}
            files.append(AddedFile(StatePath(name), len(data), count, partition))
        return files

    def _file_columns(self, columns: pa.Schema) -> pa.Schema:
        """Return the columns that data files hold."""
        return columns

    def _file_rows(self, rows: pa.Table, unit: ExportUnit, columns: pa.Schema) -> pa.Table:
        return rows

    def _token(self, table: OpenTable, unit: ExportUnit) -> tuple[CommitToken, bool]:
        """Return the token of a commit, and whether it is another than the table has.

        An epoch that is older than the newest one leaves the token as it is. It is written all the
        same: by it, a table format tells that two commits conflict.
        """
        newest = table.token(_writer(unit.source))
        if newest is not None and unit.epoch < newest.epoch:
            return newest, False
        writer, epoch = _writer(unit.source), int(unit.epoch)
        return CommitToken(writer, epoch, unit.finished_at_micros), True

    def _commit(
        self, unit: ExportUnit, files: Sequence[AddedFile], columns: pa.Schema
    ) -> ExportedEpoch:
        failed: BaseException | None = None
        for _ in range(COMMIT_ATTEMPTS):
            table = self.lake.open()
            if table is None:
                raise ConflictError("the table was removed meanwhile", table=self.lake.name)
            exported = self._exported(table, unit)
            if exported is not None:
                return exported  # another process was faster; its commit has the same rows
            token, changed = self._token(table, unit)
            present = self._of_rows(table)
            _fitted(columns, present, self.lake.name)
            added = [col.with_nullable(True) for col in columns if col.name not in present.names]
            try:
                if files or changed:
                    table.append(files, token, int(unit.epoch), added)
            except OvertakenError as error:
                failed = error.__cause__
            else:
                return ExportedEpoch(
                    epoch=unit.epoch,
                    files=len(files),
                    rows=sum(file.rows for file in files),
                    size_bytes=sum(file.size_bytes for file in files),
                    new=bool(files) or changed,
                )
        raise ConflictError(
            f"other writers committed to the table during {COMMIT_ATTEMPTS} attempts",
            table=self.lake.name,
            epoch=unit.epoch,
            retryable=True,
            next_step="run it again",
        ) from failed


@dataclass(frozen=True, kw_only=True)
class DeltaTarget(LakeTarget):
    """A Delta table that takes exported epochs; needs `arroyo-dagster[delta]`.

    Attributes:
        url: the table; any URL that the checkpoint URL may have.
        options: of the store's client, as `open_store` and deltalake take them.
        types: how types that Delta does not have are represented.
        epoch_column: the column with the number of the epoch.

    Raises:
        InputError: the package is not installed.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    types: TypeOptions = TABLE_TYPES
    epoch_column: str = "epoch"

    @property
    def lake(self) -> LakeTable:
        """The table."""
        return DeltaLakeTable(self.url, self.options)


@dataclass(frozen=True, kw_only=True)
class IcebergTarget(LakeTarget):
    """An Iceberg table that takes exported epochs; needs `arroyo-dagster[iceberg]`.

    Attributes:
        table: `namespace.table`; both are created if they do not exist.
        catalog: the properties of pyiceberg's catalog, such as `type`, `uri` and `name`.
        options: of the store at the table's location, as `open_store` takes them.
        types: how types that Iceberg does not have are represented.
        epoch_column: the column with the number of the epoch.

    Raises:
        InputError: the package is not installed.
    """

    table: str
    catalog: Mapping[str, str] = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    types: TypeOptions = TABLE_TYPES
    epoch_column: str = "epoch"

    @property
    def lake(self) -> LakeTable:
        """The table."""
        return IcebergLakeTable(self.table, self.catalog)

    def _file_columns(self, columns: pa.Schema) -> pa.Schema:
        # Iceberg takes partitions from the statistics of files.
        return pa.schema([pa.field(self.epoch_column, pa.int64()), *columns])

    def _file_rows(self, rows: pa.Table, unit: ExportUnit, columns: pa.Schema) -> pa.Table:
        epochs = pa.repeat(pa.scalar(int(unit.epoch), pa.int64()), rows.num_rows)
        return rows.add_column(0, columns.field(0), epochs)


def _writer(source: str) -> str:
    return f"export {source}"


def _fitted(rows: pa.Schema, table: pa.Schema, name: str) -> pa.Schema:
    """Return the columns of rows, in the types that a table has for them.

    Raises:
        InputError: a column has another type in the table, which does not hold its values; or the
            table requires a column that the rows do not have.
    """
    for column in table:
        if not column.nullable and column.name not in rows.names:
            raise InputError(
                f"{column.name} is required in the table, and not in this epoch",
                table=name,
                column=column.name,
                next_step="export the epochs from this one on to another table",
            )
    fitted = []
    for column in rows:
        index = table.get_field_index(column.name)
        kind = column.type if index < 0 else table.field(index).type
        if kind != column.type and kind not in _WIDER.get(column.type, ()):
            raise InputError(
                f"the type of a column has changed: {column.name} is {column.type} in this epoch, "
                f"{kind} in the table",
                table=name,
                column=column.name,
                next_step="export the epochs from this one on to another table",
            )
        fitted.append(pa.field(column.name, kind))
    return pa.schema(fitted)


# ---- a folder of Parquet files as the target of exports ------------------------------------------
# An epoch is a folder, `epoch=12/part-00000.parquet`, as Hive names partitions. The object
# `epoch=12/_SUCCESS` is written last: with it the export of the epoch is complete, and is not
# repeated. What an interrupted export left is written again under the same names.

PARTITION = "epoch"
SUCCESS = "_SUCCESS"
PART_BYTES = 64 << 20
"""The size from which an export begins another file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Success:
    """What `_SUCCESS` says of a complete export."""

    unit: ExportUnit
    exported: ExportedEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetTarget(ExportTarget):
    """A folder of a store that takes exported epochs.

    Attributes:
        store: the store; its root is the folder.
        types: how columns that readers may not have are represented; None = as they are.
    """

    store: ObjectStore
    types: TypeOptions | None = None

    def exported(self, unit: ExportUnit) -> ExportedEpoch | None:
        """Return the export of an epoch, by its `_SUCCESS`; see `ExportTarget.exported`."""
        path = _folder(unit.epoch) / SUCCESS
        if self.store.head(path) is None:
            return None
        done = decode(_Success, self.store.read(path), path)
        if done.unit.source != unit.source:
            raise other_source(self.store.url, unit, done.unit.source)
        if done.unit != unit:
            raise other_state(self.store.url, unit)
        return replace(done.exported, new=False)

    def newest(self, source: str) -> Epoch | None:
        """Return the newest complete epoch: one LIST of the folder, and one HEAD."""
        try:
            folders = self.store.list_dir().prefixes
        except NotFoundError:
            return None
        numbers = sorted(parse_number(name.removeprefix(f"{PARTITION}=")) or 0 for name in folders)
        complete = (
            Epoch(number)
            for number in reversed(numbers)
            if number and self.store.head(_folder(Epoch(number)) / SUCCESS) is not None
        )
        return next(complete, None)

    def write(self, unit: ExportUnit, rows: Iterable[pa.Table], schema: pa.Schema) -> ExportedEpoch:
        """Write the files of an epoch, then its `_SUCCESS`; see `ExportTarget.write`.

        Raises:
            InputError: the folder is a Delta table, which would not know of the files; or the rows
                have a column that is named like the partition.
        """
        check_names(
            schema,
            PARTITION,
            self.store.url,
            "export it with --format delta or iceberg and --epoch-column NAME; nothing was written",
        )
        self._check_folder()
        types = self.types
        columns = schema if types is None else types.schema_of(schema)
        files = count = size = 0
        for part, data in parts(rows if types is None else map(types.convert, rows), columns):
            self.store.put(_folder(unit.epoch) / f"part-{files:05}.parquet", data)
            files, count, size = files + 1, count + part, size + len(data)
        done = ExportedEpoch(epoch=unit.epoch, files=files, rows=count, size_bytes=size, new=True)
        success = encode(_Success(unit=unit, exported=done))
        if not self.store.create(_folder(unit.epoch) / SUCCESS, success):
            self.exported(unit)  # another process was faster: with the same rows, if any
        return done

    def _check_folder(self) -> None:
        try:
            below = {path.name for path in self.store.list_dir().prefixes}
        except NotFoundError:
            return
        if "_delta_log" in below:
            raise InputError(
                "the folder is a Delta table, and the export writes Parquet files",
                url=self.store.url,
                next_step="choose the format delta (--format delta), or another folder; nothing "
                "was written",
            )


def _folder(epoch: Epoch) -> StatePath:
    return StatePath(f"{PARTITION}={epoch}")


def parts(
    rows: Iterable[pa.Table], schema: pa.Schema, *, empty: bool = True
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of rows and the bytes of Parquet files; one file at a time is in memory.

    Args:
        empty: yield one file if there are no rows.
    """
    sink, count, files = BytesIO(), 0, 0
    writer = pq.ParquetWriter(sink, schema, compression="zstd")
    for table in rows:
        if not table.num_rows:
            continue
        writer.write_table(table.cast(schema) if table.schema != schema else table)
        count += table.num_rows
        if sink.tell() >= PART_BYTES:
            writer.close()
            yield count, sink.getvalue()
            files += 1
            sink, count = BytesIO(), 0
            writer = pq.ParquetWriter(sink, schema, compression="zstd")
    writer.close()
    if count or (empty and not files):
        yield count, sink.getvalue()
