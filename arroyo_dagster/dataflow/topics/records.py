"""Records of a topic where they were found, as rows of `topic_schema()`."""

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
"""Into how many parts, read by as many tasks, the records of one file in one epoch are cut."""


@dataclass(frozen=True, slots=True)
class Found:
    """One record where it was found. `offset`: a byte, a row or a count within its partition."""

    offset: int
    value: bytes
    key: bytes | None = None
    time_millis: int | None = None


def record_batches(found: Iterable[Found], partition: int) -> Iterator[pa.RecordBatch]:
    """Records of one partition as rows of `RECORDS`, some a batch."""
    rest = iter(found)
    while some := list(islice(rest, BATCH_RECORDS)):
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([one.key for one in some], pa.binary()),
                pa.array([one.value for one in some], pa.binary()),
                pa.array([partition] * len(some), pa.int32()),
                pa.array([one.offset for one in some], pa.int64()),
                pa.array([one.time_millis for one in some], pa.timestamp("ms")),
            ],
            schema=RECORDS,
        )


def text_batch(values: pa.Array, partition: int, first: int) -> pa.RecordBatch:
    """Records that are their values and nothing else, as rows of `RECORDS`.

    Args:
        values: text or bytes, without nulls.
        first: the offset of the first; they count up from there.
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
