"""A folder of Parquet files as the target of exports.

An epoch is a folder, `epoch=12/part-00000.parquet`, as Hive names partitions. The object
`epoch=12/_SUCCESS` is written last: with it the export of the epoch is complete, and is not
repeated. What an interrupted export left is written again under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.codec.derived import decode, encode
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.operations.export.targets import (
    ExportedEpoch,
    ExportTarget,
    ExportUnit,
    check_names,
    other_source,
    other_state,
)
from arroyo_dagster.state.storage.store import ObjectStore

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
