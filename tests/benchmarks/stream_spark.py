"""The programs of Spark's Python state APIs, with Spark's defaults beside two shuffle partitions.

`python -m tests.benchmarks.stream_spark PEER WORK FOLDER OUTPUT SECONDS` prints the seconds of each
batch. Each key's rows of a batch are one pandas frame, as these APIs have it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StructField, StructType

from tests.benchmarks.streams import GAP_MILLIS, RETENTION_MILLIS, SESSIONS, TOTALS, Work

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_TOTALS_DDL = "key string, total long"
_SESSIONS_DDL = "key string, first long, last long, rows long, cents long"
_OPEN_DDL = "first long, last long, rows long, cents long"
_POLL_SECONDS = 0.2


def sessions_of(
    frames: Iterator[pd.DataFrame], opened: tuple[int, ...] | None
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the sessions that one key's rows end, and the one that goes on."""
    rows = pd.concat(frames).sort_values("at")
    millis = (rows["at"].astype("datetime64[us]").astype("int64") // 1000).tolist()
    ended: list[tuple[int, ...]] = []
    for at, cents in zip(millis, rows["cents"].tolist(), strict=True):
        if opened is not None and at - opened[1] <= GAP_MILLIS:
            opened = (opened[0], at, opened[2] + 1, opened[3] + cents)
            continue
        if opened is not None:
            ended.append(opened)
        opened = (at, at, 1, cents)
    assert opened is not None
    return ended, opened


def _frame(key: Any, sessions: list[tuple[int, ...]]) -> pd.DataFrame:
    return pd.DataFrame([(key[0], *one) for one in sessions], columns=SESSIONS.names)


class Total(StatefulProcessor):
    """The count or the sum of each key, by `transformWithStateInPandas`."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def init(self, handle: Any) -> None:
        schema = StructType([StructField("total", LongType())])
        ttl = RETENTION_MILLIS if self._work is Work.SUM else None
        self._total = handle.getValueState("total", schema, ttl)

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        known = self._total.get()
        total = 0 if known is None else known[0]
        for frame in rows:
            total += len(frame) if self._work is Work.COUNT else int(frame["cents"].sum())
        self._total.update((total,))
        yield pd.DataFrame([(key[0], total)], columns=TOTALS.names)

    def close(self) -> None:
        """Nothing to close."""


class Sessions(StatefulProcessor):
    """The sessions of each key, by `transformWithStateInPandas`."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        fields = [StructField(name, LongType()) for name in SESSIONS.names[1:]]
        self._open = handle.getValueState("open", StructType(fields))

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        ended, opened = sessions_of(rows, self._open.get())
        self._open.update(opened)
        self._handle.registerTimer(opened[1] + GAP_MILLIS)
        if ended:
            yield _frame(key, ended)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: Any,  # noqa: N803
        expiredTimerInfo: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        opened = self._open.get()
        # Of a session that went on, a later timer is registered.
        if opened is not None and opened[1] + GAP_MILLIS == expiredTimerInfo.getExpiryTimeInMs():
            self._open.clear()
            yield _frame(key, [tuple(opened)])

    def close(self) -> None:
        """Nothing to close."""


def transform_with_state(rows: DataFrame, work: Work) -> DataFrame:
    """Return the query of `transformWithStateInPandas`."""
    if work is Work.SESSIONS:
        return (
            rows.withWatermark("at", "0 seconds")
            .groupBy("key")
            .transformWithStateInPandas(Sessions(), _SESSIONS_DDL, "Append", "EventTime")
        )
    mode = "ProcessingTime" if work is Work.SUM else "None"
    return rows.groupBy("key").transformWithStateInPandas(Total(work), _TOTALS_DDL, "Update", mode)


def apply_with_state(rows: DataFrame, work: Work) -> DataFrame:
    """Return the query of `applyInPandasWithState`."""

    def total(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            state.remove()
            return
        found = state.get[0] if state.exists else 0
        for frame in frames:
            found += len(frame) if work is Work.COUNT else int(frame["cents"].sum())
        state.update((found,))
        if work is Work.SUM:
            state.setTimeoutDuration(RETENTION_MILLIS)
        yield pd.DataFrame([(key[0], found)], columns=TOTALS.names)

    def sessions(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            opened = state.get
            state.remove()
            yield _frame(key, [opened])
            return
        ended, opened = sessions_of(frames, state.get if state.exists else None)
        state.update(opened)
        state.setTimeoutTimestamp(opened[1] + GAP_MILLIS)
        if ended:
            yield _frame(key, ended)

    if work is Work.SESSIONS:
        grouped = rows.withWatermark("at", "0 seconds").groupBy("key")
        return grouped.applyInPandasWithState(
            sessions, _SESSIONS_DDL, _OPEN_DDL, "append", "EventTimeTimeout"
        )
    timeout = "ProcessingTimeTimeout" if work is Work.SUM else "NoTimeout"
    return rows.groupBy("key").applyInPandasWithState(
        total, _TOTALS_DDL, "total long", "update", timeout
    )


PEERS: dict[str, Callable[[DataFrame, Work], DataFrame]] = {
    "transformWithStateInPandas": transform_with_state,
    "applyInPandasWithState": apply_with_state,
}


def main(peer: str, work: Work, folder: Path, output: Path, seconds: float) -> None:
    """Run one query over the files of the stream, one a batch, until the time is over."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        .config("spark.sql.parquet.inferTimestampNTZ.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.numRecentProgressUpdates", "100000")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    parts = str(folder / "parts")
    stream = session.readStream.schema(session.read.parquet(parts).schema)
    rows = stream.option("maxFilesPerTrigger", 1).parquet(parts)

    def write(frame: DataFrame, batch: int) -> None:
        frame.write.parquet(str(output / f"{batch:05}"))

    until = time.monotonic() + seconds
    writer = PEERS[peer](rows, work).writeStream.foreachBatch(write)
    writer = writer.outputMode("append" if work is Work.SESSIONS else "update")
    log = str(output.with_name(f"{output.name}-log"))
    query = writer.option("checkpointLocation", log).trigger(availableNow=True).start()
    while query.isActive and time.monotonic() < until:
        query.awaitTermination(_POLL_SECONDS)
    stopped = query.isActive
    query.stop()
    if (failure := query.exception()) is not None:
        raise failure
    progress = [one for one in query.recentProgress if one["numInputRows"]]
    found = [one["durationMs"]["triggerExecution"] / 1e3 for one in progress]
    print(json.dumps({"batch_seconds": found, "batches": len(found), "stopped": stopped}))


if __name__ == "__main__":
    main(sys.argv[1], Work(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
