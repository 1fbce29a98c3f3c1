"""Tables of a stopped Arroyo job from DataFrames of a user: computed by Spark, written by its
workers.

Workers write Arrow rows with this package's Parquet writer: Spark's own loses nullability, unsigned
types and nanoseconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, InputError, ProtocolError
from arroyo_dagster.spark.columns import arrow_type
from arroyo_dagster.spark.jobs import fetch_rows, slots
from arroyo_dagster.spark.packing import user_code_by_value
from arroyo_dagster.spark.tasks import TASKS_PER_SLOT
from arroyo_dagster.spark.workers import DiskProbe, check_workers
from arroyo_dagster.state.codec.args_row import encode_argument
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.edits import NewPosition
from arroyo_dagster.state.model.tables import TimeFile
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.bootstrap import BootstrapJob
from arroyo_dagster.state.operations.surgery.computed_rows import (
    ComputedRows,
    RowFacts,
    TableTarget,
)
from arroyo_dagster.state.planning.compaction.rewrite import TableKey
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.user_modules import call_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ARGUMENT = "args_row"
_TIME_ZONE = "spark.sql.session.timeZone"
_UTC = ("UTC", "Etc/UTC", "GMT", "Z", "+00:00")
_DDL = "payload binary"
_SCHEMA = pa.schema([("payload", pa.binary())])
_BLOCK_BYTES = 64 << 20
_BlockResult = tuple[RowFacts, tuple[TimeFile, ...]]


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Tables of a stopped Arroyo job as DataFrames, as of one cut of its inputs.

        Bootstrap(
            tables={"tumbling_4.t": windows},
            watermark_micros=1_795_514_400_000_000,
            positions={"0": 120_000},
        )

    A frame is computed up to three times: cache it, or read it from a table. Workers hold 64 MiB of
    its rows at a time.

    Attributes:
        tables: the rows by OPERATOR.TABLE, as `arroyo-state show` names them; they replace those of
            the job. A frame has the columns of the table as `arroyo-state rows` prints them, in
            this order; for an aggregate `_generation` as well, which is the number of changes of
            the row. Tables that are not given start empty.
        watermark_micros: event time at the cut.
        positions: where the sources continue, by partition as for `arroyo-state edit offsets`;
            absolute. Below the name of an operator: of this source only.

    Raises:
        InputError: a value is of another type.
    """

    tables: Mapping[str, DataFrame]
    watermark_micros: int
    positions: Mapping[str, int | str | Mapping[str, int | str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dict(self._rows())
        tuple(_positions(self.positions))
        if not isinstance(self.watermark_micros, int) or isinstance(self.watermark_micros, bool):
            raise InputError(
                "watermark_micros: expected microseconds since 1970, a whole number",
                found=f"{self.watermark_micros!r:.80}",
            )

    def job(self, paths: JobPaths, directory: JobDirectory) -> BootstrapJob:
        """Return the bootstrap of a job, to be planned and run. Nothing is computed.

        Args:
            paths: the stopped job.
            directory: the source of its status.
        """
        return BootstrapJob(
            paths=paths,
            directory=directory,
            tables=dict(self._rows()),
            watermark_micros=self.watermark_micros,
            positions=tuple(_positions(self.positions)),
        )

    def _rows(self) -> Iterator[tuple[TableKey, ComputedRows]]:
        from pyspark.sql import DataFrame

        for name, frame in _mapping("tables", self.tables).items():
            operator, _, table = str(name).rpartition(".")
            if not operator or not table:
                raise InputError(
                    f"tables: {name!r} names no table",
                    next_step="give OPERATOR.TABLE, as `arroyo-state show` names them",
                )
            if not isinstance(frame, DataFrame):
                raise InputError(
                    f"tables: {name!r} is of type {type(frame).__name__}, not a DataFrame of Spark"
                )
            yield (OperatorId(operator), TableName(table)), RowsOnSpark(frame)


def _mapping(place: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: expected a dict", found=f"{value!r:.80}")
    return value


def _positions(value: Any) -> Iterator[tuple[OperatorId | None, NewPosition]]:
    for key, entry in _mapping("positions", value).items():
        below = entry if isinstance(entry, Mapping) else {key: entry}
        operator = OperatorId(str(key)) if isinstance(entry, Mapping) else None
        for partition, position in below.items():
            if isinstance(position, bool) or not isinstance(position, int | str) or position == "":
                raise InputError(
                    f"positions: expected a position of {partition!r}", found=f"{position!r:.80}"
                )
            yield operator, NewPosition(partition=str(partition), position=str(position))


@contextmanager
def computed_bootstrap(
    session: SparkSession, function: Callable[..., Any], name: str
) -> Iterator[Bootstrap]:
    """Call the function that computes the tables of a bootstrap.

    Rows that were computed once are kept in Spark until the end.

    Args:
        function: gets the session, and returns a `Bootstrap`.
        name: of the function, for messages.

    Raises:
        InputError: the function failed or returned something else; or the session does not take a
            time without a zone as Arroyo does.
    """
    zone = session.conf.get(_TIME_ZONE)
    if zone not in _UTC:
        raise InputError(
            f"the time zone of the Spark session is {zone}: times without a zone would be read in "
            "it, and Arroyo reads them in UTC",
            next_step=f"set {_TIME_ZONE}=UTC",
        )
    with user_code_by_value():
        bootstrap = call_function(function, name, session)
    if not isinstance(bootstrap, Bootstrap):
        raise InputError(
            f"the function returned {type(bootstrap).__name__}, not a Bootstrap",
            given=name,
            next_step="return Bootstrap(tables=…, watermark_micros=…, positions=…) of "
            "arroyo_dagster.spark.surgery.bootstrap",
        )
    with ExitStack() as kept:
        for frame in bootstrap.tables.values():
            kept.callback(frame.persist().unpersist)
        yield bootstrap


def encoded_arguments(frame: DataFrame) -> DataFrame:
    """Return rows of table `b` of an updating aggregate with the column `args_row` as Arroyo stores
    it: the value that the aggregate counts, of the type of the column in the job's SQL.

    Nothing is computed yet. Booleans, numbers, dates, timestamps, text and bytes are encoded; Spark
    has no unsigned numbers, so an argument that is one in the job cannot be given.
    """
    names, types = frame.columns, [field.dataType.simpleString() for field in frame.schema]
    index = names.index(ARGUMENT)
    types[index] = "binary"
    # Spark resolves the names of columns once more, where a dot means a field.
    numbered = few_tasks(frame).toDF(*(f"c{number}" for number in range(len(names))))
    schema = ", ".join(f"c{number} {kind}" for number, kind in enumerate(types))
    return numbered.mapInArrow(partial(_encode, index), schema).toDF(*names)


def _encode(at: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = batch.columns
        columns[at] = encode_argument(columns[at])
        yield pa.record_batch(columns, names=batch.schema.names)


@dataclass(frozen=True, slots=True)
class RowsOnSpark:
    """The rows of a DataFrame."""

    frame: DataFrame

    @property
    def schema(self) -> pa.Schema:
        """See `ComputedRows`."""
        return arrow_schema(self.frame)

    def facts(self, target: TableTarget) -> RowFacts:
        """See `ComputedRows`."""
        return sum((facts for facts, _ in self._parts(partial(_described, target))), RowFacts())

    def doubled(self, target: TableTarget) -> bool:
        """See `ComputedRows`."""
        names = [f"`{name.replace('`', '``')}`" for name in target.keys or ()]
        groups = self.frame.groupBy(*names).count()
        return bool(fetch_rows(self.frame.sparkSession, groups.where("count > 1").limit(1)))

    def write(self, target: TableTarget, store: ObjectStore) -> tuple[RowFacts, Sequence[TimeFile]]:
        """See `ComputedRows`."""
        probe = check_workers(self.frame.sparkSession, store)
        parts = self._parts(partial(_written, target, store, probe))
        files = [file for _, some in parts for file in some]
        # Tasks end in any order.
        ordered = sorted(files, key=lambda file: (file.min_routing_key, file.path))
        return sum((facts for facts, _ in parts), RowFacts()), ordered

    def _parts(self, work: Callable[[pa.Table], _BlockResult]) -> list[_BlockResult]:
        session, names = self.frame.sparkSession, self.frame.columns
        # Spark resolves the names of columns once more, where a dot means a field.
        numbered = few_tasks(self.frame).toDF(*(f"c{number}" for number in range(len(names))))
        results: list[_BlockResult] = []
        for row in fetch_rows(session, numbered.mapInArrow(_on_blocks(work, names), _DDL)):
            result = pickle.loads(row.payload)
            if isinstance(result, ArroyoStateError):
                raise result
            results.append(result)
        return results


def few_tasks(frame: DataFrame) -> DataFrame:
    """Return a frame for Python, where a task costs more than the rows of a small partition."""
    return frame.coalesce(slots(frame.sparkSession) * TASKS_PER_SLOT)


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """Return the columns of a frame as its rows get to Python; nothing is computed.

    Raises:
        InputError: a column has a type that only Spark has.
    """
    fields = []
    for column in frame.schema:
        try:
            fields.append(pa.field(column.name, arrow_type(column.dataType)))
        except InputError as error:
            raise InputError(
                f"column {column.name!r}: {error.message}", next_step=error.next_step
            ) from error
    return pa.schema(fields)


def _on_blocks(
    work: Callable[[pa.Table], _BlockResult], names: Sequence[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` that works on blocks of rows, with these columns."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in _blocks(batches):
            try:
                result: _BlockResult | ArroyoStateError = work(rows.rename_columns(names))
            except ArroyoStateError as error:
                result = error
            yield pa.record_batch([[pickle.dumps(result)]], schema=_SCHEMA)

    return run


def _blocks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        pending.append(batch)
        size += batch.nbytes
        if size >= _BLOCK_BYTES:
            yield pa.Table.from_batches(pending).combine_chunks()
            pending, size = [], 0
    if pending:
        yield pa.Table.from_batches(pending).combine_chunks()


def _described(target: TableTarget, rows: pa.Table) -> _BlockResult:
    return target.facts(target.stored(rows)), ()


def _written(
    target: TableTarget, store: ObjectStore, probe: DiskProbe | None, rows: pa.Table
) -> _BlockResult:
    if probe is not None:
        probe.check()
    stored = target.stored(rows)
    files = target.write(store, stored)
    if stored.num_rows and not files:
        raise ProtocolError("no subtask owns computed rows", operator=target.operator)
    return target.facts(stored), files
