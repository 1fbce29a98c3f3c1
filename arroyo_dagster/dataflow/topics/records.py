"""Records of a topic with their positions, as rows of `topic_schema()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from arroyo_dagster.dataflow.storage.boundary import topic_schema

RECORDS = topic_schema()
BATCH_RECORDS = 16_384
MAX_SPLITS = 8
"""The maximum number of splits, and so of parallel tasks, per file and epoch."""


@dataclass(frozen=True, slots=True)
class Found:
    """One record. `offset`: its position in its partition, as a byte, a row or a count."""

    offset: int
    value: bytes
    key: bytes | None = None
    time_millis: int | None = None


def record_batches(found: Iterable[Found], partition: int) -> Iterator[pa.RecordBatch]:
    """Yield records of one partition as rows of `RECORDS`, at most `BATCH_RECORDS` per batch."""
    rest = iter(found)
    while records := list(islice(rest, BATCH_RECORDS)):
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([record.key for record in records], pa.binary()),
                pa.array([record.value for record in records], pa.binary()),
                pa.array([partition] * len(records), pa.int32()),
                pa.array([record.offset for record in records], pa.int64()),
                pa.array([record.time_millis for record in records], pa.timestamp("ms")),
            ],
            schema=RECORDS,
        )


def text_batch(values: pa.Array, partition: int, first: int) -> pa.RecordBatch:
    """Return values as rows of `RECORDS`, without keys and timestamps.

    Args:
        values: text or bytes, without nulls.
        partition: their partition.
        first: the offset of the first value; the others follow by 1.
    """
    count = len(values)
    return pa.RecordBatch.from_arrays(
        [
            pa.nulls(count, pa.binary()),
            values.cast(pa.binary()),
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            pa.array(np.arange(first, first + count, dtype=np.int64)),
            pa.nulls(count, pa.timestamp("ms")),
        ],
        schema=RECORDS,
    )
