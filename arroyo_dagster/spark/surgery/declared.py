"""A bootstrap from its declaration: Spark reads the events and computes each table of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.surgery.analysis import computed, refusals
from arroyo_dagster.spark.surgery.bootstrap import Bootstrap, arrow_schema, few_tasks
from arroyo_dagster.spark.surgery.events import check_time_zone, newest_micros, read_events
from arroyo_dagster.spark.surgery.kafka import cut_topics
from arroyo_dagster.spark.surgery.lakes import check_readable, lake_frame, lake_snapshot
from arroyo_dagster.state.codec.args_row import encode_argument
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.codec.schema import memory_schema
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.bootstrap import EventFacts
from arroyo_dagster.state.model.surgery.declared import (
    DeclaredBootstrap,
    DeclaredTable,
    EventSource,
)
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.bootstrap import computed_config
from arroyo_dagster.state.operations.surgery.column_types import column_errors
from arroyo_dagster.state.operations.surgery.declared_checks import contradictions
from arroyo_dagster.state.planning.surgery.declared_columns import TableQuery, table_query
from arroyo_dagster.state.planning.surgery.documents import raise_together
from arroyo_dagster.state.runtime.lakes.snapshot import LakeSnapshot
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ARGUMENT = "args_row"


@contextmanager
def declared_bootstrap(
    session: SparkSession,
    store: ObjectStore,
    job: JobPaths,
    directory: JobDirectory,
    declared: DeclaredBootstrap,
) -> Iterator[Bootstrap]:
    """Open a bootstrap whose tables are computed from declared events.

    Nothing is computed yet, but for the watermark if it follows from the events. Rows that were
    computed once are kept in Spark until the end.

    Raises:
        InputError: the declaration does not fit the events or the job: a source cannot be read, an
            expression is wrong, a table or column does not exist, or a column has another type than
            in the job. Names all places. Or the time zone of the session is not UTC.
        NotFoundError, FormatError: the job has no checkpoint, or one that cannot be read.
    """
    check_time_zone(session)
    checkpoint = ParquetBackend(store, job).load()
    document = declared
    declared, known = cut_topics(session, declared)
    errors: list[InputError] = []
    events = _Events(session, declared)
    for source in declared.sources:
        with _noted(errors):
            events.open(source)
    tables = [
        _ComputedTable(declared.source(one.source), one, checkpoint, events.frames[one.source])
        for one in declared.tables
        if one.source in events.frames
    ]
    for table in tables:
        with _noted(errors):
            errors.extend(table.errors(store))
    raise_together("the declaration", errors)
    watermark = declared.watermark_micros
    if watermark is None:
        times = {one.name: events.narrow(one, one.expressions) for one in declared.sources}
        watermark = newest_micros(declared, times) - declared.lateness_micros
        known += EventFacts(unknown=tuple(_ahead(watermark, wall_clock())))
    tables = [replace(one, events=events.narrow(one.source, one.expressions())) for one in tables]
    found = Bootstrap(
        store=store,
        job=job,
        directory=directory,
        watermark_micros=watermark,
        positions=declared.positions,
        declaration=document.digest,
        events=known + events.facts,
    )
    with ExitStack() as kept:
        for table in tables:
            frame = table.frame(watermark).persist()
            kept.callback(frame.unpersist)
            found = found.table(table.declared.operator, table.declared.table, frame)
        yield found


def _ahead(watermark_micros: int, now_micros: int) -> Iterator[str]:
    """Yield what a watermark that follows from event times says about them: one wrong time closes
    every window.
    """
    if watermark_micros > now_micros:
        yield (
            f"whether the event times are right: the watermark that follows from them, "
            f"{iso_micros(watermark_micros)}, lies ahead of this machine's clock; `watermark` or "
            "`where` leaves wrong ones out"
        )


@dataclass(frozen=True, slots=True)
class _Events:
    """The stored events of a declaration.

    Attributes:
        frames: those of each source, before the cut.
        lakes: the version of each table of Delta or Iceberg.
    """

    session: SparkSession
    declared: DeclaredBootstrap
    frames: dict[str, DataFrame] = field(default_factory=dict)
    lakes: dict[str, LakeSnapshot] = field(default_factory=dict)

    def open(self, source: EventSource) -> None:
        """Add a source; nothing is read but metadata.

        Raises:
            InputError, NotFoundError, StorageError: as `read_events` and `lake_snapshot`.
        """
        stored = None
        if source.in_lake:
            lake = self.lakes[source.name] = lake_snapshot(source)
            given = (one for one in self.declared.tables if one.source == source.name)
            sql = [*source.expressions, *(text for one in given for text in one.expressions)]
            check_readable(lake, sql, f"the events {source.name!r}")
            stored = lake_frame(self.session, lake)
        self.frames[source.name] = read_events(self.session, source, self.declared, stored)

    def narrow(self, source: EventSource, used_in: Sequence[str]) -> DataFrame:
        """Return events without the columns that are not used, where Spark would read them."""
        if source.name not in self.lakes:
            return self.frames[source.name]
        stored = lake_frame(self.session, self.lakes[source.name], used_in)
        return read_events(self.session, source, self.declared, stored)

    def _version(self, source: EventSource) -> str:
        lake = self.lakes[source.name]
        newest = source.version is None and lake.pin is not None
        kept = f"; the newest, `{lake.pin}` keeps to it" if newest else ""
        return f"{source.name}: {lake.summary}{kept}"

    @property
    def facts(self) -> EventFacts:
        return EventFacts(
            versions=tuple(self._version(one) for one in self.declared.sources if one.in_lake),
            unknown=(
                *(text for one in self.lakes.values() for text in one.unknown),
                *(
                    f"{one.name}: whether they end at the positions; records behind them that the "
                    "rows contain count twice"
                    for one in self.declared.sources
                    if one.partition is None and self.declared.positions_of(one)
                ),
            ),
        )


@contextmanager
def _noted(errors: list[InputError]) -> Iterator[None]:
    """Go on after an error, which is raised later, with others."""
    try:
        yield
    except InputError as error:
        errors.append(error)


@dataclass(frozen=True, slots=True)
class _ComputedTable:
    source: EventSource
    declared: DeclaredTable
    checkpoint: Checkpoint
    events: DataFrame

    @property
    def place(self) -> str:
        return f"tables.{self.declared.operator}.{self.declared.table}"

    def errors(self, store: ObjectStore) -> Iterator[InputError]:
        """Yield what does not fit the events or the job; nothing is computed.

        Raises:
            InputError: the job has no such table, or its columns do not follow from the events.
        """
        config = computed_config(self.checkpoint, (self.declared.operator, self.declared.table))
        # The watermark decides which rows there are, not which columns.
        queries = self._queries(0)
        refused = [
            one for place, query in queries.items() for one in refusals(self.events, query, place)
        ]
        if refused:
            yield from refused
            return
        arguments = {
            number: arrow_schema(computed(self.events, query, place)).field(ARGUMENT).type
            for number, (place, query) in zip(
                sorted(self.declared.distinct), queries.items(), strict=False
            )
        }
        found = list(contradictions(store, self.checkpoint, self.declared, arguments))
        yield from found
        if not found:
            columns = arrow_schema(self.frame(0))
            yield from column_errors(self.place, columns, memory_schema(config))

    def expressions(self) -> list[str]:
        """Return the SQL that reads the events."""
        queries = self._queries(0).values()
        own = [sql for one in queries for sql in one.expressions]
        return [*self.source.expressions, *own]

    def frame(self, watermark_micros: int) -> DataFrame:
        """Return the rows of the table."""
        frames = [
            computed(self.events, query, place)
            for place, query in self._queries(watermark_micros).items()
        ]
        if not self.declared.distinct:
            return frames[0]
        return reduce(lambda one, other: one.unionByName(other), map(_encoded, frames))

    def _queries(self, watermark_micros: int) -> Mapping[str, TableQuery]:
        """Return the queries whose rows the table has together, by their place."""
        config = computed_config(self.checkpoint, (self.declared.operator, self.declared.table))
        known = frozenset(self.events.columns)
        query = table_query(self.declared, config, self.source, known, watermark_micros)
        if not self.declared.distinct:
            return {self.place: query}
        return {
            f"{self.place}.distinct.{number}": _tuples(query, number, argument, watermark_micros)
            for number, argument in sorted(self.declared.distinct.items())
        }


def _tuples(query: TableQuery, number: int, argument: str, watermark_micros: int) -> TableQuery:
    """Return the query of table `b` of one aggregate: each value that it counts, once."""
    columns = (
        *query.columns,
        ("accumulator", str(number)),
        (ARGUMENT, argument),
        ("count", "count(*)"),
        ("_timestamp", f"timestamp_micros({watermark_micros})"),
        ("_generation", "count(*)"),
    )
    return replace(query, columns=columns, group_by=(*query.group_by, argument))


def _encoded(frame: DataFrame) -> DataFrame:
    """Return rows of table `b` with the argument as the engine stores it."""
    names, types = frame.columns, [field.dataType.simpleString() for field in frame.schema]
    at = names.index(ARGUMENT)
    types[at] = "binary"
    # Spark resolves the names of columns once more, where a dot means a field.
    numbered = few_tasks(frame).toDF(*(f"c{number}" for number in range(len(names))))
    schema = ", ".join(f"c{number} {kind}" for number, kind in enumerate(types))
    return numbered.mapInArrow(partial(_encode, at), schema).toDF(*names)


def _encode(at: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = batch.columns
        columns[at] = encode_argument(columns[at])
        yield pa.record_batch(columns, names=batch.schema.names)
