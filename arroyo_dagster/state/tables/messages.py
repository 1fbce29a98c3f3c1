"""What views and the runtime send to the TableManager of a subtask.

Source: crates/arroyo-state/src/lib.rs, `StateMessage`, `TableData`, `CheckpointMessage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName


@dataclass(frozen=True, slots=True)
class KeyedData:
    """Pairs of a global keyed table, encoded; None in place of a value removes the key.

    They are read once.
    """

    pairs: Iterable[tuple[bytes, bytes | None]]


@dataclass(frozen=True, slots=True)
class RowData:
    """Rows of an expiring table: its memory schema, and what each row does.

    `operation` is encoded already: one for every row of the batch, or one for each.
    """

    rows: pa.RecordBatch
    operation: bytes | Sequence[bytes]


@dataclass(frozen=True, slots=True)
class CommitData:
    """What the second phase of a commit needs to know; at most once an epoch."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TableData:
    """A change of one table, kept until the next barrier."""

    table: TableName
    data: KeyedData | RowData | CommitData


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMessage:
    """The barrier: write what has changed since the last one.

    Attributes:
        min_epoch: the oldest epoch still kept; bookkeeping of older ones may go, rows never.
        watermark_micros: event time reached; None if the subtask has seen none.
        then_stop: nothing follows this checkpoint.
    """

    epoch: Epoch
    min_epoch: Epoch
    watermark_micros: int | None
    then_stop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedData:
    """Files that have been merged: `outputs` hold what `inputs` held, in their place."""

    table: TableName
    inputs: tuple[StatePath, ...]
    outputs: tuple[StatePath, ...]


StateMessage = TableData | CheckpointMessage | CompactedData
