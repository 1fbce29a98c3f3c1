"""What the tables of Arroyo's windows and joins hold: by window, by session, by side.

Source: docs/spec/arroyo-state.md, 5.6; session_aggregating_window.rs, `ActiveSession`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import polars as pl

from arroyo_dagster.state.codec.plain import plain_rows
from arroyo_dagster.state.model.tables import TIMESTAMP_COLUMN, ExpiringTimeKeyConfig
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from arroyo_dagster.state.operations.query.global_scan import VALUE
from arroyo_dagster.state.operations.query.metadata_rows import JoinSideRow, SessionRow, WindowRow
from arroyo_dagster.state.operations.query.state import StateEpoch
from arroyo_dagster.state.operations.query.table import EpochTable

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
