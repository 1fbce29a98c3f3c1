"""Exchange chunks as rows of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from arroyo_dagster.engine.exchange import ExchangeChunk

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
    """Yield the chunks of a batch. Payloads of rows are not copied: they are `pa.Buffer`."""
    columns = [batch.column(index).to_pylist() for index in range(4)]
    payloads = batch.column(4)
    for place, (level, subtask, edge, order) in enumerate(zip(*columns, strict=True)):
        payload = payloads[place].as_buffer() if edge >= 0 else payloads[place].as_py()
        yield ExchangeChunk(level, subtask, edge, order, payload)


class ChunkStream:
    """Batches of chunks of one schema, encoded as they come."""

    def __init__(self) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch."""
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._sink, batch.schema)
        self._writer.write_batch(batch)

    def close(self) -> pa.Buffer:
        """Return the Arrow IPC stream; there was at least one batch."""
        assert self._writer is not None
        self._writer.close()
        return self._sink.getvalue()


def decode_stream(data: bytearray | pa.Buffer) -> Iterator[ExchangeChunk]:
    """Yield the chunks of a `ChunkStream`."""
    for batch in pa.ipc.open_stream(pa.py_buffer(data)):
        yield from chunks_of(batch)
