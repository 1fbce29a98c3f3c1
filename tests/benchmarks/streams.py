"""The stream that this package and its peers process: orders of customers, in time order.

Every program reads the same Parquet files, one for each batch, and writes what it puts out as
Parquet. `result_of` brings the output of all of them into one form, `expected` computes it anew.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

GAP_MILLIS = 1_800_055
"""When a session ends after its last row. Times are multiples of 10 ms, so never exactly then."""

SPAN_MILLIS = 10**8
"""From the first row to the last, however many there are: a key has a row every 1,000 s."""

ROWS_PER_KEY = 100
RETENTION_MILLIS = 3_600_000

ROWS = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("cents", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us"), nullable=False),
    ]
)


class Work(Enum):
    """What a program does with the stream."""

    COUNT = "count"
    SUM = "sum"
    SESSIONS = "sessions"


TOTALS = pa.schema([("key", pa.string()), ("total", pa.int64())])
"""Put out for each key of a batch: its count or its sum up to then."""

SESSIONS = pa.schema(
    [
        ("key", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("rows", pa.int64()),
        ("cents", pa.int64()),
    ]
)
"""Put out for each session that has ended; times in milliseconds."""


def schema_of(work: Work) -> pa.Schema:
    """Return the columns of the output."""
    return SESSIONS if work is Work.SESSIONS else TOTALS


def write_stream(folder: Path, rows: int, batch: int) -> None:
    """Write the files of the stream, one for each batch, and all rows as one file, `all.parquet`.

    The file of all rows has one row group for each batch.
    """
    parts = folder / "parts"
    parts.mkdir(parents=True)
    chance = np.random.default_rng(rows)
    names = pa.array([f"customer-{number:06}" for number in range(rows // ROWS_PER_KEY)])
    with pq.ParquetWriter(folder / "all.parquet", ROWS) as whole:
        for first in range(0, rows, batch):
            numbers = np.arange(first, min(rows, first + batch))
            table = pa.Table.from_arrays(
                [
                    names.take(pa.array(chance.integers(0, len(names), len(numbers)))),
                    pa.array(chance.integers(1, 10_000, len(numbers))),
                    pa.array((numbers + 1) * (SPAN_MILLIS // rows) * 1000, pa.timestamp("us")),
                ],
                schema=ROWS,
            )
            whole.write_table(table, row_group_size=batch)
            # Spark reads the oldest file first, and names decide between equal times.
            pq.write_table(table, parts / f"{first // batch:05}.parquet", row_group_size=batch)


def sessions_in(keys: Any, millis: Any, cents: Any) -> pa.Table:
    """Return the sessions in rows of time order, by key and time, as if nothing was before."""
    rows = pa.table({"key": keys, "at": millis, "cents": cents})
    codes = pc.dictionary_encode(rows["key"]).combine_chunks().indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    codes, times = codes[order], rows["at"].to_numpy()[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (codes[1:] != codes[:-1]) | (np.diff(times) > GAP_MILLIS)
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(order)) - 1
    sums = np.add.reduceat(rows["cents"].to_numpy()[order], starts) if len(starts) else starts
    return pa.Table.from_arrays(
        [
            rows["key"].take(pa.array(order[starts])),
            pa.array(times[starts]),
            pa.array(times[ends]),
            pa.array(ends - starts + 1),
            pa.array(sums, pa.int64()),
        ],
        schema=SESSIONS,
    )


def expected(folder: Path, work: Work, batches: int) -> pa.Table:
    """Compute the result of the first batches without any of the programs."""
    with pq.ParquetFile(folder / "all.parquet") as file:
        rows = file.read_row_groups(list(range(batches)))
    if work is not Work.SESSIONS:
        what = ("cents", "count" if work is Work.COUNT else "sum")
        return _sorted(rows.group_by("key").aggregate([what]).rename_columns(TOTALS.names))
    millis = pc.divide(rows["at"].cast(pa.int64()), 1000)
    return _ended(sessions_in(rows["key"], millis, rows["cents"]), pc.max(millis).as_py())


def result_of(written: pa.Table, work: Work, end_millis: int) -> pa.Table:
    """Return the result when a time is reached, from everything that a program has put out."""
    if work is Work.SESSIONS:
        return _ended(written.select(SESSIONS.names), end_millis)
    # Both totals only ever grow.
    totals = written.group_by("key").aggregate([("total", "max")])
    return _sorted(totals.rename_columns(TOTALS.names))


def _ended(sessions: pa.Table, end_millis: int) -> pa.Table:
    """Leave out the sessions that may go on: some programs put them out at the end."""
    return _sorted(sessions.filter(pc.less(pc.add(sessions["last"], GAP_MILLIS), end_millis)))


def _sorted(table: pa.Table) -> pa.Table:
    columns = [column.cast(pa.string() if i == 0 else pa.int64()) for i, column in enumerate(table)]
    plain = pa.table(columns, names=table.column_names)
    return plain.sort_by([(name, "ascending") for name in plain.column_names])


def digest(table: pa.Table) -> str:
    """Return a digest of rows, so that results of processes can be compared."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return f"{table.num_rows} rows, {hashlib.sha256(sink.getvalue()).hexdigest()[:16]}"
