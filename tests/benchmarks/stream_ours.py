"""The programs of this package: keyed state by columns, on Spark.

`python -m tests.benchmarks.stream_ours WORK FOLDER OUTPUT SECONDS BATCH` prints the seconds of each
epoch.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    ParquetReplay,
    ParquetSink,
    Pipeline,
    keyed_state,
    keyed_timers,
)
from arroyo_dagster.spark.engine.pipeline import SparkRun
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state import TableConfig, open_store
from tests.benchmarks.streams import (
    GAP_MILLIS,
    RETENTION_MILLIS,
    SESSIONS,
    TOTALS,
    Work,
    sessions_in,
)

_GAP = pa.scalar(GAP_MILLIS, pa.int64())
_NANOS_PER_MILLI = 1_000_000


class Totals(Operator):
    """The count or the sum of each key."""

    output_schema = TOTALS

    def __init__(self, work: Work) -> None:
        self._aggregate = "count" if work is Work.COUNT else "sum"
        self._ttl = dt.timedelta(milliseconds=RETENTION_MILLIS) if work is Work.SUM else None

    def tables(self) -> Sequence[TableConfig]:
        return [keyed_state("totals", key=str, value=int, ttl=self._ttl)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.totals = ctx.value_state("totals")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        rows = pa.table({"key": batch["key"], "cents": batch["cents"]})
        found = rows.group_by("key").aggregate([("cents", self._aggregate)]).combine_chunks()
        before = self.totals.get_many(found["key"]).fill_null(0)
        totals = pc.add(before, found.column(1).combine_chunks())
        self.totals.put_many(found["key"], totals)
        collector.collect(pa.table([found["key"], totals], schema=TOTALS))


class Sessions(Operator):
    """The sessions of each key, put out when they have ended."""

    output_schema = SESSIONS

    def tables(self) -> Sequence[TableConfig]:
        open_sessions = pa.schema([SESSIONS.field(name) for name in SESSIONS.names[1:]])
        return [keyed_state("open", key=str, value=open_sessions), keyed_timers("ends", key=str)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.open = ctx.value_state("open")
        self.ends = ctx.timers("ends")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        millis = pc.divide(batch["_timestamp"].cast(pa.int64()), _NANOS_PER_MILLI)
        found = sessions_in(batch["key"], millis, batch["cents"])
        keys = found["key"].combine_chunks()
        places = pc.index_in(keys, value_set=pc.unique(keys))
        changes = pc.not_equal(places[1:], places[:-1])
        firsts = pa.concat_arrays([pa.array([True]), changes]) if len(keys) else changes
        lasts = pa.concat_arrays([changes, pa.array([True])]) if len(keys) else changes
        opened = self.open.get_many(keys)
        before = pa.Table.from_arrays([keys, *opened.flatten()], schema=SESSIONS)
        known = pc.and_(opened.is_valid(), firsts)
        near = pc.less_equal(pc.subtract(found["first"], before["last"]), _GAP)
        goes_on = pc.and_(known, pc.fill_null(near, False))
        joined = {
            "first": before["first"],
            "rows": pc.add(found["rows"], before["rows"]),
            "cents": pc.add(found["cents"], before["cents"]),
        }
        for name, column in joined.items():
            place = SESSIONS.get_field_index(name)
            kept = pc.if_else(goes_on, column, found[name])
            found = found.set_column(place, SESSIONS.field(name), kept)
        collector.collect(before.filter(pc.and_not(known, goes_on)))
        collector.collect(found.filter(pc.invert(lasts)))
        latest = found.filter(lasts)
        self.open.put_many(latest["key"], latest.drop_columns("key"))
        self.ends.register_many(latest["key"], _times(pc.add(latest["last"], _GAP)))

    def on_timers(
        self, name: str, timers: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        opened = self.open.get_many(timers["key"])
        sessions = pa.Table.from_arrays([timers["key"], *opened.flatten()], schema=SESSIONS)
        # Of a session that went on, a later timer is registered.
        ended = pc.equal(_times(pc.add(sessions["last"], _GAP)), timers["at"])
        sessions = sessions.filter(pc.fill_null(ended, False))
        collector.collect(sessions)
        self.open.remove_many(sessions["key"])


def _times(millis: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    return pc.multiply(millis, _NANOS_PER_MILLI).cast(pa.timestamp("ns"))


def pipeline(folder: Path, output: Path, work: Work, batch: int) -> Pipeline:
    """Return the pipeline that reads `all.parquet` of the folder and writes to `output`."""
    found = Pipeline(work.value, parallelism=2)
    source = ParquetReplay(str(folder / "all.parquet"), rows_per_epoch=batch, splits=2)
    operator = Sessions() if work is Work.SESSIONS else Totals(work)
    rows = found.source("rows", source, timestamp="at").key_by("key").apply("keyed", operator)
    rows.sink("out", ParquetSink(str(output)))
    return found


def main(work: Work, folder: Path, output: Path, seconds: float, batch: int) -> None:
    """Run the pipeline on Spark as users get it, and print the seconds of each epoch."""
    marks: list[float] = []
    found = pipeline(folder, output, work, batch)
    store = open_store(f"file://{output.with_name(f'{output.name}-state')}")
    session = open_session(SparkSettings(master="local[2]")).session
    until = time.perf_counter() + seconds
    run = SparkRun.start(found, store, session)
    with contextlib.closing(run.job):
        while not run.exhausted and time.perf_counter() < until:
            marks.append(time.perf_counter())
            run.step()
    steps = [after - before for before, after in pairwise([*marks, time.perf_counter()])]
    print(json.dumps({"batch_seconds": steps, "batches": len(steps), "stopped": not run.exhausted}))


if __name__ == "__main__":
    main(
        Work(sys.argv[1]),
        Path(sys.argv[2]),
        Path(sys.argv[3]),
        float(sys.argv[4]),
        int(sys.argv[5]),
    )
