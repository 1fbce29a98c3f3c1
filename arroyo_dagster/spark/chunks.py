"""Exchange chunks as rows of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from arroyo_dagster.state.runtime.exchange import ExchangeChunk

CHUNK_DDL = "level int, subtask int, edge int, ord bigint, payload binary"
CHUNK_SCHEMA = pa.schema(
    [
        ("level", pa.int32()),
        ("subtask", pa.int32()),
        ("edge", pa.int32()),
        ("ord", pa.int64()),
        ("payload", pa.binary()),
    ]
)
REPORT = -2
"""Instead of an edge: the payload is a pickled `TaskReport`."""

FAILURE = -3
"""Instead of an edge: the payload is a pickled `ArroyoStateError` that is not retryable."""

PLACE = -4
"""Instead of an edge: the payload is a pickled `Placed`."""

_ROWS_PER_BATCH = 64


def chunk_batches(chunks: Iterable[ExchangeChunk]) -> Iterator[pa.RecordBatch]:
    """Yield chunks as Arrow batches of at most `_ROWS_PER_BATCH` rows."""
    waiting: list[ExchangeChunk] = []
    for chunk in chunks:
        waiting.append(chunk)
        if len(waiting) == _ROWS_PER_BATCH:
            yield _batch(waiting)
            waiting = []
    if waiting:
        yield _batch(waiting)


def _batch(chunks: list[ExchangeChunk]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([chunk.level for chunk in chunks], pa.int32()),
            pa.array([chunk.subtask for chunk in chunks], pa.int32()),
            pa.array([chunk.edge for chunk in chunks], pa.int32()),
            pa.array([chunk.order for chunk in chunks], pa.int64()),
            pa.array([chunk.payload for chunk in chunks], pa.binary()),
        ],
        schema=CHUNK_SCHEMA,
    )


def chunks_of(batch: pa.RecordBatch) -> Iterator[ExchangeChunk]:
    """Yield the chunks of a batch."""
    columns = [batch.column(index).to_pylist() for index in range(batch.num_columns)]
    for level, subtask, edge, order, payload in zip(*columns, strict=True):
        yield ExchangeChunk(level, subtask, edge, order, payload)
