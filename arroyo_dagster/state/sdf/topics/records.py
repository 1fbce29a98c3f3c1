"""Records of a topic where they were found, as rows of `topic_schema()`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from arroyo_dagster.state.sdf.boundary import topic_schema

RECORDS = topic_schema()
BATCH_RECORDS = 16_384


@dataclass(frozen=True, slots=True)
class Found:
    """One record where it was found. `offset`: a byte, a row or a count within its partition."""

    offset: int
    value: bytes
    key: bytes | None = None
    time_millis: int | None = None


def now_millis() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


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
