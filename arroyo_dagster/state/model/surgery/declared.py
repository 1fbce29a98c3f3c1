"""A bootstrap as a user declares it: events in a lake, and what each table holds of them.

Expressions are Spark SQL over the columns of the events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.surgery.edits import NewPosition

DELTA, ICEBERG = "delta", "iceberg"
"""The formats that are read without Spark's connectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """Stored events.

    Attributes:
        time: the event time, as the job's SQL has it.
        format: `delta` and `iceberg`, which this package reads, or any that Spark reads:
            `parquet`, `kafka`, `json`…
        path: where they are; None = `table`, or nowhere, as for Kafka.
        table: the name of a table of Spark's catalogue; of the format `iceberg` of `catalog`.
        catalog: of Iceberg, as pyiceberg's own configuration names it; None = `default`.
        version: of a Delta table, or the snapshot of an Iceberg table; None = the newest.
        options: of Spark's reader; of `delta` and `iceberg` those of the store's client.
        select: further columns, by name; None of these may be named as one that is stored.
        where: which events the job's SQL reads; None = all.
        operator: the source of the job that reads them; None = the only one.
        partition, offset: where an event lies in its source. With both, only events before the
            positions of that operator are read.
        until_micros: of a topic of Kafka: its positions are those of the first records at or after
            this time, by the records' own; None = they are given.
    """

    name: str
    time: str
    format: str | None = None
    path: str | None = None
    table: str | None = None
    catalog: str | None = None
    version: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    select: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    operator: str | None = None
    partition: str | None = None
    offset: str | None = None
    until_micros: int | None = None

    @property
    def in_lake(self) -> bool:
        """Whether they are in a table of Delta or Iceberg, which this package reads."""
        return self.format in (DELTA, ICEBERG)

    @property
    def expressions(self) -> tuple[str, ...]:
        """The SQL over its stored columns."""
        given = (self.time, *self.select.values(), self.where, self.partition, self.offset)
        return tuple(one for one in given if one is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTable:
    """What a table of the job holds of the events.

    Attributes:
        source: the name of the events.
        columns: the expression of each column that does not follow from its name.
        where: which events it takes; None = all.
        every_micros: the slide of a sliding window; None for any other table.
        distinct: of table `b`: by position in the SELECT, what an aggregate counts each value of.
    """

    operator: OperatorId
    table: TableName
    source: str
    columns: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    every_micros: int | None = None
    distinct: Mapping[int, str] = field(default_factory=dict)

    @property
    def expressions(self) -> tuple[str, ...]:
        """The SQL over the columns of its events."""
        given = (*self.columns.values(), *self.distinct.values(), self.where)
        return tuple(one for one in given if one is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredBootstrap:
    """A bootstrap of one job.

    Attributes:
        watermark_micros: event time at the cut; None = the newest event time less
            `lateness_micros`, of several sources that of the slowest.
        positions: where the sources of the job continue.
    """

    sources: tuple[EventSource, ...]
    tables: tuple[DeclaredTable, ...]
    watermark_micros: int | None = None
    lateness_micros: int = 0
    positions: tuple[tuple[OperatorId | None, NewPosition], ...] = ()

    @property
    def digest(self) -> str:
        """The identity to which a plan is bound: changes with all that is declared."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()

    def positions_of(self, source: EventSource) -> tuple[NewPosition, ...]:
        """Return the positions that cut the events of a source."""
        return tuple(
            position
            for operator, position in self.positions
            if operator is None or source.operator in (None, operator)
        )

    def source(self, name: str) -> EventSource:
        """Return the events of a name."""
        return next(one for one in self.sources if one.name == name)
