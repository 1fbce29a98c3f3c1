"""A bootstrap from its declaration: Spark reads the events and computes each table of the job."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.surgery.bootstrap import Bootstrap
from arroyo_dagster.state.codec.args_row import encode_argument
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.declared import (
    DeclaredBootstrap,
    DeclaredTable,
    EventSource,
)
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.bootstrap import computed_config
from arroyo_dagster.state.planning.surgery.declared_columns import TableQuery, table_query
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
        InputError: a source cannot be read, an expression is wrong, a column does not follow from
            its name, or the job has no such table; names the place in the declaration.
        NotFoundError, FormatError: the job has no checkpoint, or one that cannot be read.
    """
    checkpoint = ParquetBackend(store, job).load()
    events = {one.name: _events(session, one, declared) for one in declared.sources}
    watermark = declared.watermark_micros
    if watermark is None:
        watermark = _newest(declared, events) - declared.lateness_micros
    found = Bootstrap(
        store=store,
        job=job,
        directory=directory,
        watermark_micros=watermark,
        positions=declared.positions,
        declaration=declared.digest,
    )
    with ExitStack() as kept:
        for table in declared.tables:
            work = _Computed(declared.source(table.source), table, checkpoint, watermark)
            frame = work.frame(events[table.source]).persist()
            kept.callback(frame.unpersist)
            found = found.table(table.operator, table.table, frame)
        yield found


# ---- events --------------------------------------------------------------------------------------


def _events(session: SparkSession, source: EventSource, declared: DeclaredBootstrap) -> DataFrame:
    """Return the events of a source before the cut, with the selected columns."""
    with _analyzed(f"the events {source.name!r}"):
        if source.table is not None:
            frame = session.table(source.table)
        else:
            reader = session.read.format(str(source.format)).options(**source.options)
            frame = reader.load() if source.path is None else reader.load(source.path)
        for name, expression in source.select.items():
            frame = frame.selectExpr("*", f"{expression} as `{name}`")
        if source.where is not None:
            frame = frame.where(source.where)
        if source.partition is not None:
            frame = frame.where(_before(source, declared))
        frame.selectExpr(source.time)
    return frame


def _before(source: EventSource, declared: DeclaredBootstrap) -> str:
    """Return the SQL of the events before the positions of the cut."""
    cases = []
    for operator, new in declared.positions:
        if operator is not None and source.operator not in (None, operator):
            continue
        if not new.position.isdecimal():
            raise InputError(
                f"positions.{new.partition}: the events are cut at a number, not at "
                f"{new.position!r}",
                next_step="cut them with `where`, and leave out `partition` and `offset`",
            )
        partition = new.partition.replace("\\", "\\\\").replace("'", "\\'")
        cases.append(
            f"when cast({source.partition} as string) = '{partition}' "
            f"then {source.offset} < {new.position}"
        )
    if not cases:
        raise InputError(
            f"the events {source.name!r} are cut at positions, and there are none",
            next_step="give `positions`, or leave out `partition` and `offset`",
        )
    return f"case {' '.join(cases)} else false end"


def _newest(declared: DeclaredBootstrap, events: Mapping[str, DataFrame]) -> int:
    """Return the newest event time of the slowest source, in microseconds."""
    found = []
    for source in declared.sources:
        with _analyzed(f"the events {source.name!r}"):
            newest = events[source.name].selectExpr(f"unix_micros(max({source.time})) as newest")
            (row,) = newest.collect()
        if row.newest is None:
            raise InputError(
                f"the events {source.name!r} have no event time before the cut",
                next_step="give `watermark`, or other positions",
            )
        found.append(int(row.newest))
    return min(found)


# ---- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Computed:
    source: EventSource
    table: DeclaredTable
    checkpoint: Checkpoint
    watermark_micros: int

    @property
    def place(self) -> str:
        return f"tables.{self.table.operator}.{self.table.table}"

    def frame(self, events: DataFrame) -> DataFrame:
        """Return the rows of the table."""
        config = computed_config(self.checkpoint, (self.table.operator, self.table.table))
        query = table_query(
            self.table, config, self.source, frozenset(events.columns), self.watermark_micros
        )
        with _analyzed(self.place):
            if not self.table.distinct:
                return _computed(events, query)
            parts = [self._tuples(events, query, at) for at in sorted(self.table.distinct)]
            return reduce(lambda one, other: one.unionByName(other), parts)

    def _tuples(self, events: DataFrame, query: TableQuery, number: int) -> DataFrame:
        """Return the rows of table `b` of one aggregate: each value that it counts, once."""
        argument = self.table.distinct[number]
        counted = TableQuery(
            columns=(
                *query.columns,
                ("accumulator", str(number)),
                (ARGUMENT, argument),
                ("count", "count(*)"),
                ("_timestamp", f"timestamp_micros({self.watermark_micros})"),
                ("_generation", "count(*)"),
            ),
            group_by=(*query.group_by, argument),
            where=query.where,
        )
        return _encoded(_computed(events, counted))


def _computed(events: DataFrame, query: TableQuery) -> DataFrame:
    view = f"arroyo_events_{uuid.uuid4().hex}"
    events.createOrReplaceTempView(view)
    session = events.sparkSession
    try:
        return session.sql(query.text(view))
    finally:
        session.catalog.dropTempView(view)


def _encoded(frame: DataFrame) -> DataFrame:
    """Return rows of table `b` with the argument as the engine stores it."""
    names, types = frame.columns, [field.dataType.simpleString() for field in frame.schema]
    at = names.index(ARGUMENT)
    types[at] = "binary"
    # Spark resolves the names of columns once more, where a dot means a field.
    numbered = frame.toDF(*(f"c{number}" for number in range(len(names))))
    schema = ", ".join(f"c{number} {kind}" for number, kind in enumerate(types))
    return numbered.mapInArrow(partial(_encode, at), schema).toDF(*names)


def _encode(at: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = batch.columns
        columns[at] = encode_argument(columns[at])
        yield pa.record_batch(columns, names=batch.schema.names)


# ---- what is wrong -------------------------------------------------------------------------------


@contextmanager
def _analyzed(place: str) -> Iterator[None]:
    """Name the place in the declaration of what Spark refuses.

    Raises:
        InputError: Spark refuses it.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        absent = next((one for one in lines if "DATA_SOURCE_NOT_FOUND" in one), None)
        if absent is not None:
            raise InputError(
                f"{place}: this Spark cannot read the format: {absent.partition('] ')[2]:.200}",
                next_step="name its package with --spark --packages",
            ) from error
        if not isinstance(error, AnalysisException):
            raise
        raise InputError(f"{place}: Spark refuses it: {lines[0]:.400}") from error
