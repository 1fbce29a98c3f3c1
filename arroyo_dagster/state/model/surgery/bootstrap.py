"""The request to write tables of a stopped job from rows that were computed elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.state.model.compaction import RowsDigest
from arroyo_dagster.state.model.ids import OperatorId, TableName


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapTable:
    """The rows of one table.

    Attributes:
        digest: of the rows as they are stored.
        expired: how many of them are older than the retention at the new watermark.
        oldest_nanos: the event time of the oldest; None = there is none.
    """

    operator: OperatorId
    table: TableName
    digest: RowsDigest
    expired: int = 0
    oldest_nanos: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRequest:
    """Write tables of a job from computed rows, as of one cut.

    Attributes:
        watermark_micros: event time at the cut.
        positions: where sources continue: partitions and absolute positions.
    """

    tables: tuple[BootstrapTable, ...]
    watermark_micros: int
    positions: tuple[tuple[OperatorId | None, str, str], ...] = ()

    name = "bootstrap"
