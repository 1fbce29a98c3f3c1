"""Messages that views and the runtime send to the TableManager of a subtask.

Each message is a variant of `StateMessage`, each change of a table one of `TableData`. As in
Arroyo, the variants are attributes of these two: `StateMessage.Checkpoint`, `TableData.KeyedData`.

Source: crates/arroyo-state/src/lib.rs, `StateMessage`, `TableData`, `CheckpointMessage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.tables import TableFiles


class TableData:
    """A change of a table: `RecordBatch`, `CommitData` or `KeyedData`."""

    __slots__ = ()

    RecordBatch: ClassVar[type[_RecordBatch]]
    CommitData: ClassVar[type[_CommitData]]
    KeyedData: ClassVar[type[_KeyedData]]


@dataclass(frozen=True, slots=True)
class RecordBatch(TableData):
    """Rows of an expiring table in its memory schema, with the operation of each row.

    `operation` is already encoded: one for all rows of the batch, or one for each row (in a list,
    or in a binary array).

    Differs: in Arroyo each row is inserted.
    """

    rows: pa.RecordBatch
    operation: bytes | Sequence[bytes] | pa.BinaryArray


@dataclass(frozen=True, slots=True)
class CommitData(TableData):
    """Data for the second phase of a commit; at most once per epoch."""

    data: bytes


@dataclass(frozen=True, slots=True)
class KeyedData(TableData):
    """Pairs of a global keyed table, encoded; None in place of a value removes the key.

    The pairs are iterated once.

    Differs: in Arroyo a message has one pair, and there are no removals.
    """

    pairs: Iterable[tuple[bytes, bytes | None]]


class StateMessage:
    """A message to a TableManager: `Checkpoint`, `Compaction` or `TableData`."""

    __slots__ = ()

    Checkpoint: ClassVar[type[CheckpointMessage]]
    Compaction: ClassVar[type[_Compaction]]
    TableData: ClassVar[type[TableChange]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMessage(StateMessage):
    """The barrier: write the changes since the last one.

    Attributes:
        min_epoch: the oldest epoch still kept; bookkeeping of older ones may be dropped, rows
            never.
        timestamp_micros: when the checkpoint began, in microseconds since 1970.
        watermark_micros: event time reached; None if the subtask has no watermark yet.
        then_stop: no further checkpoint follows.
    """

    epoch: Epoch
    min_epoch: Epoch
    timestamp_micros: int
    watermark_micros: int | None
    then_stop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction(StateMessage):
    """Files that have been merged, announced before an epoch lists them.

    Attributes:
        tables: by table, the checkpoint metadata of the merged files.
        inputs: by table, the files whose rows the merged files hold.

    Differs: in Arroyo the metadata is the whole new list of each table. From that alone, a subtask
    with an older epoch would assume that it has read files that it never read.
    """

    tables: Mapping[TableName, TableFiles]
    inputs: Mapping[TableName, tuple[StatePath, ...]]


@dataclass(frozen=True, slots=True)
class TableChange(StateMessage):
    """A change of one table, kept until the next barrier: `StateMessage.TableData`."""

    table: TableName
    data: TableData


# Within the classes above, these names refer to the class attributes.
_RecordBatch = RecordBatch
_CommitData = CommitData
_KeyedData = KeyedData
_Compaction = Compaction

TableData.RecordBatch = RecordBatch
TableData.CommitData = CommitData
TableData.KeyedData = KeyedData
StateMessage.Checkpoint = CheckpointMessage
StateMessage.Compaction = Compaction
StateMessage.TableData = TableChange
