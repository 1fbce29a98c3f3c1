"""Masks the private columns of a state before a view, SQL or a sample sees it."""

from __future__ import annotations

import polars as pl

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef
from arroyo_dagster.dataflow.storage.columns import KEY, UPDATED_AT, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.views.snapshots import Where
from arroyo_dagster.state.model.ids import JobId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.privacy import PRIVATE, PrivateColumns, TableMask

_ENGINE = frozenset({WINDOW_START, WINDOW_END, UPDATED_AT})
"""Columns of the engine, without which rows could not expire."""


def mask_of(private: PrivateColumns, dataflow: Dataflow, state: StateDef) -> TableMask:
    """Return what is private of a state."""
    paths = JobPaths(JobId(state.owner), dataflow.pipeline)
    where = Where.of(state, live=True)
    return private.table(paths, where.operator, where.table)


def private_columns(frame: pl.DataFrame, mask: TableMask) -> list[str]:
    """Return the private columns of a frame of `SnapshotReader`."""
    return [name for name in frame.columns if name not in _ENGINE and mask.hides_leaf((name,))]


def mask_frame(frame: pl.DataFrame, mask: TableMask) -> pl.DataFrame:
    """Mask the private columns of a frame of `SnapshotReader`.

    Texts become `(private)`, private keys digests, other values null: columns keep their types.
    Rows stay sorted by window and key.
    """
    private = private_columns(frame, mask)
    texts = {name: PRIVATE if frame.schema[name] == pl.String else None for name in private}
    frame = frame.with_columns(
        pl.lit(text, frame.schema[name]).alias(name) for name, text in texts.items() if name != KEY
    )
    if KEY not in private:
        return frame
    digests = pl.Series(KEY, [mask.digest(key) for key in frame[KEY]], pl.String)
    names = [name for name in (WINDOW_START, WINDOW_END, KEY) if name in frame.columns]
    return frame.with_columns(digests).sort(names)
