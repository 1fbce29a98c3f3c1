"""Rows of Spark's streaming sources as records of topics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.dataflow.topics.rows import plain_rows

_BATCH_BITS, _PARTITION_BITS = 36, 24  # rows of a partition, partitions of a batch, batches
_RAW = (pa.types.is_binary, pa.types.is_string, pa.types.is_large_binary, pa.types.is_large_string)
_OF_KAFKA = frozenset({"key", VALUE, "partition", "offset", "timestamp"})


@dataclass(frozen=True, slots=True)
class TopicRecords:
    """Converts Spark's rows to records of a topic.

    Attributes:
        encode: returns the value of a row from its cells, as `plain_rows` returns them. It is not
            used if rows have a column `value` of text or bytes (`kafka`, `text`), which then is
            the value.
    """

    encode: Callable[[dict[str, Any]], bytes]

    def __call__(self, rows: pa.Table, batch: int, number: int) -> pa.Table:
        """Return the records of some rows, in their order.

        Args:
            rows: the rows.
            batch, number: their batch and partition in Spark, which determine the offsets of
                records from sources without offsets.
        """
        count, kafka = rows.num_rows, _OF_KAFKA <= set(rows.column_names)
        first = (batch << _BATCH_BITS) + (number << _PARTITION_BITS)
        columns: dict[str, Any] = {
            "key": rows.column("key") if kafka else pa.nulls(count, pa.binary()),
            VALUE: self._values(rows),
            "partition": rows.column("partition") if kafka else pa.array([number] * count),
            "offset": rows.column("offset") if kafka else pa.array(range(first, first + count)),
            "timestamp": _times(rows),
        }
        return pa.table([_as(columns[field.name], field) for field in RECORDS], RECORDS)

    def _values(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        names = rows.column_names
        if VALUE in names and any(is_raw(rows.column(VALUE).type) for is_raw in _RAW):
            return rows.column(VALUE)
        if set(names) == {"timestamp", VALUE}:  # `rate`
            rows = rows.select([VALUE])
        return pa.array([self.encode(row) for row in plain_rows(rows)], pa.binary())


def _times(rows: pa.Table) -> pa.ChunkedArray | pa.Array:
    """Return the timestamps of records; nulls if the source has none."""
    if "timestamp" in rows.column_names and pa.types.is_timestamp(
        rows.schema.field("timestamp").type
    ):
        return rows.column("timestamp")
    return pa.nulls(rows.num_rows, pa.timestamp("ms"))


def _as(values: pa.ChunkedArray | pa.Array, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    if pa.types.is_timestamp(field.type):
        # Spark's timestamps are in microseconds, those of records in milliseconds.
        return pc.floor_temporal(values, unit="millisecond").cast(field.type)
    return values if values.type.equals(field.type) else values.cast(field.type)
