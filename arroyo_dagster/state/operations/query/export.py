"""Export a table to Parquet files: one epoch, or epoch after epoch, each exactly once.

An epoch is a folder, `epoch=12/part-00000.parquet`, as Hive names partitions. The object
`epoch=12/_SUCCESS` is written last: with it the export of the epoch is complete, and is not
repeated. What an interrupted export left is written again under the same names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.operations.query.diff import TableDiff, diff_epochs
from arroyo_dagster.state.operations.query.state import StateJob
from arroyo_dagster.state.operations.query.table import EpochTable
from arroyo_dagster.state.storage.store import ObjectStore

SUCCESS = "_SUCCESS"
_PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedEpoch:
    """The export of one epoch.

    Attributes:
        files, rows, size_bytes: what it has.
        new: whether it was written now; else an earlier call had.
    """

    epoch: Epoch
    files: int
    rows: int
    size_bytes: int
    new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetTarget:
    """A folder of a store that takes exported epochs.

    Attributes:
        store: the store; its root is the folder.
        types: how columns that readers may not have are represented; None = as they are.
    """

    store: ObjectStore
    types: TypeOptions | None = None

    def exported(self, epoch: Epoch, source: str) -> ExportedEpoch | None:
        """Return the export of an epoch; None = there is none, or it is not complete.

        Args:
            source: what is exported: job, operator and table.

        Raises:
            ConflictError: the folder has the epoch of another source.
        """
        path = _folder(epoch) / SUCCESS
        if self.store.head(path) is None:
            return None
        found = json.loads(self.store.read(path))
        if found["source"] != source:
            raise ConflictError(
                f"the folder has this epoch of {found['source']}",
                url=self.store.url,
                path=path,
                source=source,
                next_step="export each table to a folder of its own",
            )
        sizes = {name: found[name] for name in ("files", "rows", "size_bytes")}
        return ExportedEpoch(epoch=epoch, new=False, **sizes)

    def write(
        self, epoch: Epoch, source: str, rows: Iterable[pa.Table], schema: pa.Schema
    ) -> ExportedEpoch:
        """Write the rows of an epoch that is not exported; errors as `exported`."""
        types = self.types
        columns = schema if types is None else types.schema_of(schema)
        files = count = size = 0
        for part, data in _parts(rows if types is None else map(types.convert, rows), columns):
            self.store.put(_folder(epoch) / f"part-{files:05}.parquet", data)
            files, count, size = files + 1, count + part, size + len(data)
        done = {"source": source, "files": files, "rows": count, "size_bytes": size}
        if not self.store.create(_folder(epoch) / SUCCESS, json.dumps(done).encode()):
            self.exported(epoch, source)  # another process was faster: with the same rows, if any
        return ExportedEpoch(epoch=epoch, files=files, rows=count, size_bytes=size, new=True)


def _folder(epoch: Epoch) -> StatePath:
    return StatePath(f"epoch={epoch}")


def _parts(rows: Iterable[pa.Table], schema: pa.Schema) -> Iterator[tuple[int, bytes]]:
    """Yield the number of rows and the bytes of each file; without rows there is one file."""
    sink, count, files = BytesIO(), 0, 0
    writer = pq.ParquetWriter(sink, schema, compression="zstd")
    for table in rows:
        if not table.num_rows:
            continue
        writer.write_table(table.cast(schema) if table.schema != schema else table)
        count += table.num_rows
        if sink.tell() >= _PART_BYTES:
            writer.close()
            yield count, sink.getvalue()
            files += 1
            sink, count = BytesIO(), 0
            writer = pq.ParquetWriter(sink, schema, compression="zstd")
    writer.close()
    if count or not files:
        yield count, sink.getvalue()


# ---- what is exported ----------------------------------------------------------------------------


def export_epochs(
    job: StateJob,
    operator: str,
    table: str,
    target: ParquetTarget,
    epochs: Iterable[Epoch],
) -> Iterator[ExportedEpoch]:
    """Export a table at some epochs, in this order; yield each as it is complete.

    Raises:
        NotFoundError: an epoch is not there any more, or has no such table.
        ConflictError: the target has one of the epochs of another table.
        FormatError, StorageError: as reading and writing.
    """
    source = f"{job.name} {operator} {table}"
    for epoch in epochs:
        found = target.exported(epoch, source)
        if found is None:
            at = job.epoch(epoch).table(operator, table)
            found = target.write(epoch, source, _all_rows(at), at.schema)
        yield found


def _all_rows(table: EpochTable) -> Iterator[pa.Table]:
    for split in table.splits(1):
        yield from table.read(split)


def export_changes(
    job: StateJob,
    operator: str,
    table: str,
    target: ParquetTarget,
    first: Epoch,
    last: Epoch | None = None,
) -> Iterator[ExportedEpoch]:
    """Export what changed from each visible epoch to the next, as `change_feed` yields it.

    The rows of an epoch have the additional column `_change`; see `Change`. Errors as of
    `change_feed` and `export_epochs`.
    """
    source = f"{job.name} {operator} {table} changes"
    for before, epoch in _pairs(job, first, last):
        found = target.exported(epoch, source)
        if found is None:
            changes = _changes(job, operator, table, before, epoch).diff.changes
            found = target.write(epoch, source, [changes], changes.schema)
        yield found


# ---- changes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChanges:
    """The changes of a table from one visible epoch to the next."""

    before: Epoch
    epoch: Epoch
    diff: TableDiff


def change_feed(
    job: StateJob, operator: str, table: str, first: Epoch, last: Epoch | None = None
) -> Iterator[EpochChanges]:
    """Yield what changed in a table from each visible epoch to the next.

    Args:
        first: the epoch before the first changes.
        last: the epoch of the last ones; None = the newest visible one.

    Raises:
        NotFoundError: no such epoch or table; or an epoch was collected meanwhile.
        InputError: the columns of the table changed in between.
    """
    for before, epoch in _pairs(job, first, last):
        yield _changes(job, operator, table, before, epoch)


def _pairs(job: StateJob, first: Epoch, last: Epoch | None) -> Iterator[tuple[Epoch, Epoch]]:
    job.epoch(first)  # raises if it is not there
    numbers = [one for one in job.epochs() if one >= first and (last is None or one <= last)]
    yield from itertools.pairwise(numbers)


def _changes(job: StateJob, operator: str, table: str, before: Epoch, epoch: Epoch) -> EpochChanges:
    (diff,) = diff_epochs(job.epoch(before), job.epoch(epoch), operator, table)
    return EpochChanges(before=before, epoch=epoch, diff=diff)
