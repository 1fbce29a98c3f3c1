"""What the tables of Arroyo's windows and joins hold: by window, by session, by side; and what a
restore of an epoch would cost: seconds, rows and memory as estimates, files and bytes exactly. Of
data files only the footers are read.

Source: docs/spec/arroyo-state.md, 5.6; session_aggregating_window.rs, `ActiveSession`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import polars as pl

from arroyo_dagster.state.codec.plain import plain_rows
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.tables import (
    TIMESTAMP_COLUMN,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.metadata_only import stored_sizes
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from arroyo_dagster.state.operations.query.global_scan import VALUE
from arroyo_dagster.state.operations.query.metadata_rows import JoinSideRow, SessionRow, WindowRow
from arroyo_dagster.state.operations.query.state import StateEpoch
from arroyo_dagster.state.operations.query.table import EpochTable
from arroyo_dagster.state.planning.restore.reads import TableRead, restore_plan
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.data_files import open_data_file

_WINDOWS = {"tumbling_intermediate": "tumbling", "Sliding_intermediate": "sliding"}
_SIDES = {"left join data": "left", "right join data": "right"}
_SESSION, _STARTS = "session", "e"
_GAPS = 100
"""A session window keeps rows for so many gaps."""


def windows(epoch: StateEpoch) -> Iterator[WindowRow]:
    """Yield the open windows of all operators at an epoch, oldest first of each."""
    for table, config in _described(epoch, _WINDOWS):
        frame, keys = _frame(table)
        counts = pl.struct(keys).n_unique() if keys else pl.lit(1, pl.UInt32)
        bins = frame.group_by(TIMESTAMP_COLUMN).agg(counts.alias("k"), pl.len().alias("n"))
        for start, distinct, rows in bins.sort(TIMESTAMP_COLUMN).iter_rows():
            yield WindowRow(
                job=epoch.job.name,
                epoch=epoch.number,
                operator=str(table.name.operator),
                kind=_WINDOWS[config.description],
                starts_at_micros=start,
                ends_at_micros=start + config.retention_micros,
                keys=distinct,
                rows=rows,
            )


def sessions(epoch: StateEpoch) -> Iterator[SessionRow]:
    """Yield the open sessions of all operators at an epoch, oldest first of each.

    They are those that a restore rebuilds: of rows since the earliest start that a subtask stored,
    without sessions that the watermark has closed.
    """
    for table, config in _described(epoch, {_SESSION: _SESSION}):
        operator, gap = str(table.name.operator), config.retention_micros // _GAPS
        starts = epoch.table(operator, _STARTS).to_arrow([VALUE])
        first = pl.DataFrame(starts)[VALUE].dt.timestamp("us").min()
        if first is None:
            continue
        frame, keys = _frame(table)
        watermark = table.scan.operator.min_watermark_micros
        rows = frame.filter(pl.col(TIMESTAMP_COLUMN) >= first).sort(*keys, TIMESTAMP_COLUMN)
        since = pl.col(TIMESTAMP_COLUMN) - pl.col(TIMESTAMP_COLUMN).shift(1)
        begins = (since.over(keys) if keys else since).fill_null(gap) >= gap
        grouped = (
            rows.with_columns(begins.cum_sum().alias("_session"))
            .group_by("_session", maintain_order=True)
            .agg(
                *(pl.col(key).first() for key in keys),
                pl.col(TIMESTAMP_COLUMN).min().alias("_first"),
                pl.col(TIMESTAMP_COLUMN).max().alias("_last"),
                pl.len().alias("_rows"),
            )
        )
        if watermark is not None:
            grouped = grouped.filter(pl.col("_last") + gap >= watermark)
        grouped = grouped.sort("_first", maintain_order=True)
        names = plain_rows(grouped.select(keys).to_arrow()) if keys else [{}] * grouped.height
        times = grouped.select("_first", "_last", "_rows").iter_rows()
        for key, (start, last, count) in zip(names, times, strict=True):
            yield SessionRow(
                job=epoch.job.name,
                epoch=epoch.number,
                operator=operator,
                key=json.dumps(key, ensure_ascii=False),
                starts_at_micros=start,
                last_row_at_micros=last,
                closes_at_micros=last + gap,
                rows=count,
            )


def join_sides(epoch: StateEpoch) -> Iterator[JoinSideRow]:
    """Yield both sides of all joins at an epoch."""
    for table, config in _described(epoch, _SIDES):
        frame, keys = _frame(table)
        times = frame[TIMESTAMP_COLUMN]
        yield JoinSideRow(
            job=epoch.job.name,
            epoch=epoch.number,
            operator=str(table.name.operator),
            side=_SIDES[config.description],
            keys=frame.select(keys).n_unique() if keys else min(1, frame.height),
            rows=frame.height,
            first_row_at_micros=times.min(),  # type: ignore[arg-type] # it is of whole numbers
            last_row_at_micros=times.max(),  # type: ignore[arg-type]
        )


def _described(
    epoch: StateEpoch, descriptions: dict[str, str]
) -> Iterator[tuple[EpochTable, ExpiringTimeKeyConfig]]:
    """Yield the tables of Arroyo's operators with one of some descriptions."""
    if epoch.checkpoint.progress is not None:
        return  # a managed job: its operators are not Arroyo's
    for table in epoch.tables():
        config = table.scan.operator.configs[table.scan.name].config
        if isinstance(config, ExpiringTimeKeyConfig) and config.description in descriptions:
            yield table, config


def _frame(table: EpochTable) -> tuple[pl.DataFrame, list[str]]:
    """Return the routing columns and event times, in microseconds, of the rows of a table."""
    scan, names = table.scan, table.schema.names
    assert isinstance(scan, ExpiringScan)
    keys = [names[index] for index in scan.routing_columns]
    frame = pl.DataFrame(table.to_arrow([*keys, TIMESTAMP_COLUMN]))
    time = pl.col(TIMESTAMP_COLUMN).dt.timestamp("us")
    return frame.with_columns(time), keys


# ---- what a restore would cost, also at another parallelism --------------------------------------

FILE_SECONDS, MANAGED_FILE_SECONDS, BYTES_A_SECOND = 0.060, 0.003, 30_000_000
"""To open a file of an Arroyo job, which reads one after the other, and of a managed job, which
opens many at once; and what a subtask reads and decodes. `docs/operate/sizing.md` says which were
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEstimate:
    """What one subtask reads of one table in a restore.

    Attributes:
        rows: that it keeps, about.
        memory_bytes: the decoded size of these rows, about.
        seconds: to open and read the files.
    """

    read: TableRead
    rows: int
    memory_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _File:
    rows: int
    decoded_bytes: int


def estimate_restore(epoch: StateEpoch, parallelism: int | None = None) -> Iterator[ReadEstimate]:
    """Estimate what a restore of an epoch reads: by operator, table and subtask.

    Args:
        parallelism: of the restored job; None = each operator's own.

    Raises:
        InputError: the parallelism is out of its range.
        FormatError, NotFoundError: a file is broken or missing.
    """
    store, checkpoint = epoch.job.catalog.store, epoch.checkpoint
    plan = restore_plan(checkpoint, parallelism, sizes=stored_sizes(store, checkpoint.paths))
    files, bounds = _footers(store, plan.files), _bounds(checkpoint)
    file_seconds = MANAGED_FILE_SECONDS if checkpoint.progress is not None else FILE_SECONDS
    for read in plan.reads:
        shares = [(files[path], _share(read, bounds.get(path))) for path in read.files]
        yield ReadEstimate(
            read=read,
            rows=round(sum(share * file.rows for file, share in shares)),
            memory_bytes=round(sum(share * file.decoded_bytes for file, share in shares)),
            seconds=len(read.files) * file_seconds + read.size_bytes / BYTES_A_SECOND,
        )


def _footers(store: ObjectStore, paths: tuple[StatePath, ...]) -> dict[StatePath, _File]:
    def read(path: StatePath) -> _File:
        with closing(open_data_file(store, path)) as data:
            return _File(sum(data.footer.rows), sum(data.footer.encoded_bytes))

    return dict(zip(paths, concurrently(read, paths), strict=True))


def _bounds(checkpoint: Checkpoint) -> dict[StatePath, TimeFile]:
    return {
        file.path: file
        for operator in checkpoint.operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for file in files.files
    }


def _share(read: TableRead, file: TimeFile | None) -> float:
    """Return the share of a file's rows that a subtask keeps: keys are hashes, so they are spread
    evenly over the range of a file.
    """
    if file is None or read.keys.covers(file.min_routing_key, file.max_routing_key):
        return 1.0
    low = max(read.keys.start, file.min_routing_key)
    high = min(read.keys.end, file.max_routing_key)
    return (high - low + 1) / (file.max_routing_key - file.min_routing_key + 1)
