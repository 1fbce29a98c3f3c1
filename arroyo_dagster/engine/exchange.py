"""Exchange of rows between subtasks: to the owner of their key, in a repeatable order.

Chunks are Arrow IPC, so nanoseconds, u64 and nullability stay exact on the way through Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.engine.pipeline import Edge, OperatorNode, Pipeline, SourceNode
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.hashing.routing import key_hashes, subtasks_for_hashes
from arroyo_dagster.state.codec.schema import TIMESTAMP_TYPE, plain_rows_of

CHUNK_ROWS = 65_536
"""The maximum number of rows in one call of `process_batch`; the same in every runtime."""

WATERMARK = -1
"""In place of an edge index: the payload is a source's latest event time, empty without rows."""


@dataclass(frozen=True, slots=True)
class ExchangeChunk:
    """Rows sent to one subtask.

    Attributes:
        level: the level of the receiving operators.
        subtask: the receiving subtask.
        edge: the index of the edge in the pipeline, or `WATERMARK`.
        order: place among the chunks of one edge and subtask.
        payload: Arrow IPC, or for `WATERMARK` a source's name and event time. Within one process it
            is the table itself, with the codec `as_it_is`.
    """

    level: int
    subtask: int
    edge: int
    order: int
    payload: Any


def read_split(node: SourceNode, split: Any) -> Iterator[pa.RecordBatch]:
    """Read one split of a source, with event time added as `_timestamp`.

    Raises:
        InputError: the rows do not have the source's schema, or lack an event time.
    """
    for batch in node.source.read(split):
        yield with_event_time(node, batch)


def with_event_time(node: SourceNode, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add `_timestamp` to rows of a source. Errors as `read_split`."""
    if not batch.schema.equals(node.source.schema):
        raise InputError(
            "a source yields rows of another schema than it declares",
            operator=node.operator_id,
            expected=[f"{f.name}: {f.type}" for f in node.source.schema],
            found=[f"{f.name}: {f.type}" for f in batch.schema],
        )
    batch = plain_rows_of(batch)
    times = batch.column(batch.schema.get_field_index(node.timestamp))
    if times.null_count:
        raise InputError(
            f"{times.null_count} rows have no event time",
            operator=node.operator_id,
            column=node.timestamp,
            next_step="filter such rows in the source",
        )
    if times.type.tz is not None:
        times = times.cast(pa.timestamp(times.type.unit))
    return pa.RecordBatch.from_arrays(
        [*batch.columns, times.cast(TIMESTAMP_TYPE)], schema=node.schema
    )


def latest_micros(batches: Iterable[pa.RecordBatch]) -> int | None:
    """Return the latest `_timestamp`, rounded down to microseconds; None without rows."""
    latest = [
        pc.max(batch.column(batch.num_columns - 1)).value for batch in batches if batch.num_rows
    ]
    return max(latest) // 1000 if latest else None


def route(edge: Edge, rows: pa.Table, parallelism: int, *, stay: int) -> list[tuple[int, pa.Table]]:
    """Split rows by the receiving subtask, each part in the order of `rows`.

    Args:
        stay: the subtask that receives rows without keys, modulo the parallelism.
    """
    if not rows.num_rows:
        return []
    if edge.keys is None:
        return [(stay % parallelism, rows)]
    if parallelism == 1:
        return [(0, rows)]
    columns = [rows.column(key) for key in edge.keys]
    subtasks = subtasks_for_hashes(key_hashes(columns, rows=rows.num_rows), parallelism)
    order = np.argsort(subtasks, kind="stable")
    sorted_rows = rows.take(pa.array(order))
    bounds = np.searchsorted(subtasks[order], np.arange(parallelism + 1))
    return [
        (subtask, sorted_rows.slice(int(start), int(end - start)))
        for subtask, (start, end) in enumerate(pairwise(bounds))
        if end > start
    ]


def rechunk(tables: Sequence[pa.Table], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Cut the rows of tables into batches of `CHUNK_ROWS`, the last one of what is left."""
    batches: list[pa.RecordBatch] = []
    pieces: list[pa.RecordBatch] = []
    room = CHUNK_ROWS
    for table in tables:
        if not table.schema.equals(schema):
            raise FormatError("rows of one edge have different schemas", found=str(table.schema))
        for batch in table.to_batches():
            start = 0
            while start < batch.num_rows:
                piece = batch.slice(start, room)
                pieces.append(piece)
                start, room = start + piece.num_rows, room - piece.num_rows
                if not room:
                    batches.append(_one_batch(pieces))
                    pieces, room = [], CHUNK_ROWS
    if pieces:
        batches.append(_one_batch(pieces))
    return batches


def _one_batch(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)


def encode_table(rows: pa.Table) -> bytes:
    """Encode rows as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def decode_table(payload: bytes) -> pa.Table:
    """Decode the rows of an Arrow IPC stream."""
    return pa.ipc.open_stream(payload).read_all()


def as_it_is(rows: pa.Table) -> pa.Table:
    """Return the rows unchanged: the codec for chunks that stay in one process."""
    return rows


def source_chunks(
    pipeline: Pipeline,
    node: SourceNode,
    batches: Iterable[pa.RecordBatch],
    split: int,
    encode: Callable[[pa.Table], Any] = encode_table,
) -> Iterator[ExchangeChunk]:
    """Send the rows of one split to all operators that read them, and its event time to every
    subtask.

    Args:
        split: the place of the split in its epoch, which preserves the source's order.
        encode: makes the payload from rows.
    """
    parts = list(batches)
    latest = latest_micros(parts)
    rows = pa.Table.from_batches(parts, schema=node.schema)
    for edge in pipeline.edges_from(node.operator_id):
        level = pipeline.operators[edge.target].level
        for subtask, part in route(edge, rows, pipeline.parallelism, stay=split):
            yield ExchangeChunk(level, subtask, edge.index, split, encode(part))
    payload = b"" if latest is None else f"{latest}:{node.operator_id}".encode()
    for level in range(1, pipeline.levels + 1):
        for subtask in range(pipeline.parallelism):
            yield ExchangeChunk(level, subtask, WATERMARK, split, payload)


def every_watermark(pipeline: Pipeline) -> Iterator[ExchangeChunk]:
    """Yield what an epoch without splits sends: each subtask writes its checkpoint all the same."""
    for level in range(1, pipeline.levels + 1):
        for subtask in range(pipeline.parallelism):
            yield ExchangeChunk(level, subtask, WATERMARK, 0, b"")


def operator_chunks(
    pipeline: Pipeline,
    node: OperatorNode,
    edges: Sequence[Edge],
    batches: Sequence[pa.RecordBatch],
    subtask: int,
    encode: Callable[[pa.Table], Any] = encode_table,
) -> Iterator[ExchangeChunk]:
    """Send the output of one subtask, or its side output, to operators of later levels.

    Args:
        edges: the edges that carry it.
    """
    if not batches:
        return
    rows = pa.Table.from_batches(batches)
    for edge in edges:
        level = pipeline.operators[edge.target].level
        if level == node.level:
            continue  # chained: passed on within the same task
        for target, part in route(edge, rows, pipeline.parallelism, stay=subtask):
            yield ExchangeChunk(level, target, edge.index, subtask, encode(part))


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """The input of one subtask of one level in one epoch.

    Attributes:
        rows: by edge, in the order of the source.
        latest_micros: the latest event time of each source that had rows.
    """

    rows: Mapping[int, tuple[pa.Table, ...]]
    latest_micros: Mapping[str, int]


def arrived(
    chunks: Iterable[ExchangeChunk], decode: Callable[[Any], pa.Table] = decode_table
) -> ReceivedRows:
    """Sort the chunks of one subtask and one level by edge and order."""
    by_edge: dict[int, list[tuple[int, Any]]] = {}
    latest: dict[str, int] = {}
    for chunk in chunks:
        if chunk.edge == WATERMARK and chunk.payload:
            micros, _, name = chunk.payload.decode().partition(":")
            latest[name] = max(int(micros), latest.get(name, 0))
        elif chunk.edge != WATERMARK:
            by_edge.setdefault(chunk.edge, []).append((chunk.order, chunk.payload))
    rows = {
        edge: tuple(decode(payload) for _, payload in sorted(parts, key=lambda part: part[0]))
        for edge, parts in sorted(by_edge.items())
    }
    return ReceivedRows(rows, latest)
