"""What views and the runtime send to the TableManager of a subtask.

Each message is a variant of `StateMessage`, each change of a table one of `TableData`; the variants
are attributes of these two, as in Arroyo: `StateMessage.Checkpoint`, `TableData.KeyedData`.

Source: crates/arroyo-state/src/lib.rs, `StateMessage`, `TableData`, `CheckpointMessage`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.tables import TableFiles


class TableData:
    """What changes in a table: `RecordBatch`, `CommitData` or `KeyedData`.

    `TableData(table, data)` is the old name of `StateMessage.TableData`, until release 0.3.
    """

    __slots__ = ()

    RecordBatch: ClassVar[type[_RecordBatch]]
    CommitData: ClassVar[type[_CommitData]]
    KeyedData: ClassVar[type[_KeyedData]]

    def __new__(cls, *args: Any, **values: Any) -> Any:
        if cls is not TableData:
            return super().__new__(cls)
        warnings.warn(
            "TableData(table, data) is StateMessage.TableData now; it goes with release 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return TableChange(*args, **values)


@dataclass(frozen=True, slots=True)
class RecordBatch(TableData):
    """Rows of an expiring table: its memory schema, and what each row does.

    `operation` is encoded already: one for every row of the batch, or one for each.

    Differs: in Arroyo each row is inserted.
    """

    rows: pa.RecordBatch
    operation: bytes | Sequence[bytes]


@dataclass(frozen=True, slots=True)
class CommitData(TableData):
    """What the second phase of a commit needs to know; at most once an epoch."""

    data: bytes


@dataclass(frozen=True, slots=True)
class KeyedData(TableData):
    """Pairs of a global keyed table, encoded; None in place of a value removes the key.

    They are read once.

    Differs: in Arroyo one pair a message, and no removals.
    """

    pairs: Iterable[tuple[bytes, bytes | None]]


class StateMessage:
    """What a TableManager takes: `Checkpoint`, `Compaction` or `TableData`."""

    __slots__ = ()

    Checkpoint: ClassVar[type[CheckpointMessage]]
    Compaction: ClassVar[type[_Compaction]]
    TableData: ClassVar[type[TableChange]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMessage(StateMessage):
    """The barrier: write what has changed since the last one.

    Attributes:
        min_epoch: the oldest epoch still kept; bookkeeping of older ones may go, rows never.
        timestamp_micros: when the checkpoint began, in microseconds since 1970.
        watermark_micros: event time reached; None if the subtask has seen none.
        then_stop: nothing follows this checkpoint.
    """

    epoch: Epoch
    min_epoch: Epoch
    timestamp_micros: int
    watermark_micros: int | None
    then_stop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction(StateMessage):
    """Files that have been merged, before an epoch lists them.

    Attributes:
        tables: by table the checkpoint metadata of the merged files.
        inputs: by table the files that these hold the rows of, in their place.

    Differs: in Arroyo the metadata is the whole new list of each table. From that alone a
    subtask that holds an older epoch would take files it never read for known.
    """

    tables: Mapping[TableName, TableFiles]
    inputs: Mapping[TableName, tuple[StatePath, ...]]


@dataclass(frozen=True, slots=True)
class TableChange(StateMessage):
    """A change of one table, kept until the next barrier: `StateMessage.TableData`."""

    table: TableName
    data: TableData


# Within the classes above these names are those of their attributes.
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
