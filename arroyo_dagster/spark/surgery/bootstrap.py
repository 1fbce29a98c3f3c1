"""Tables of a stopped Arroyo job from DataFrames: computed by Spark, written by its workers.

Workers write Arrow rows with this package's Parquet writer: Spark's own loses nullability, unsigned
types and nanoseconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, InputError, ProtocolError
from arroyo_dagster.spark.connectors.columns import arrow_type
from arroyo_dagster.spark.jobs import fetch_rows, slots
from arroyo_dagster.spark.tasks import TASKS_PER_SLOT
from arroyo_dagster.spark.workers import DiskProbe, check_workers
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.bootstrap import EventFacts
from arroyo_dagster.state.model.surgery.edits import NewPosition
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
from arroyo_dagster.state.model.tables import TimeFile
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.bootstrap import BootstrapJob
from arroyo_dagster.state.operations.surgery.computed_rows import (
    ComputedRows,
    RowFacts,
    TableTarget,
)
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.window import PlannableEdit
from arroyo_dagster.state.planning.compaction.rewrite import TableKey
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DDL = "payload binary"
_SCHEMA = pa.schema([("payload", pa.binary())])
_BLOCK_BYTES = 64 << 20
_BlockResult = tuple[RowFacts, tuple[TimeFile, ...]]


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Fill a stopped Arroyo job with tables that Spark computes, as of one cut of its inputs.

        bootstrap = Bootstrap(store=store, job=paths, directory=directory, watermark_micros=cut)
        bootstrap = bootstrap.table("tumbling_4", "t", windows).position("0", "120000")
        plan = bootstrap.plan()
        bootstrap.run(plan)

    A frame is computed twice for the plan, and once for its execution: cache it, or read it from a
    table. Workers hold 64 MiB of its rows at a time.

    Attributes:
        job: the stopped job.
        directory: the source of its status.
        watermark_micros: event time at the cut.
        tables, positions: see `table` and `position`.
        declaration: the digest of the document that declares the tables, to which a plan is bound;
            empty = there is none.
        events: what is known of the stored events.
    """

    store: ObjectStore
    job: JobPaths
    directory: JobDirectory
    watermark_micros: int
    tables: Mapping[TableKey, ComputedRows] = field(default_factory=dict)
    positions: tuple[tuple[OperatorId | None, NewPosition], ...] = ()
    declaration: str = ""
    events: EventFacts = field(default_factory=EventFacts)

    def table(self, operator: str, name: str, frame: DataFrame) -> Bootstrap:
        """Return a bootstrap in which the rows of a frame replace those of a table.

        Args:
            operator, name: as `arroyo-state show` names them.
            frame: the columns of the table as `arroyo-state rows` prints them, in this order; for
                an aggregate `_generation` as well, which is the number of changes of the row.
        """
        key = OperatorId(operator), TableName(name)
        return replace(self, tables={**self.tables, key: RowsOnSpark(frame)})

    def position(self, partition: str, position: str, *, operator: str | None = None) -> Bootstrap:
        """Return a bootstrap in which a partition of a source continues at a position.

        Args:
            partition, position: as for `arroyo-state edit offsets`; the position is absolute.
            operator: the source; None = all that have the partition.
        """
        named = None if operator is None else OperatorId(operator)
        new = NewPosition(partition=partition, position=position)
        return replace(self, positions=(*self.positions, (named, new)))

    def plan(self) -> EditPlan:
        """Compute the tables and plan to write them. Writes nothing: the dry run.

        Raises:
            ArroyoStateError: as `BootstrapJob.plan`.
        """
        return self._job().plan(self.store)

    def run(self, plan: EditPlan | None = None, options: EditOptions | None = None) -> EditOutcome:
        """Write the tables in place. `arroyo-state edit undo` undoes it until the job is started.

        Args:
            plan: the plan that a person has reviewed. None = make one; `options.approved` is then
                the digest of the one that was approved in another process.

        Raises:
            ArroyoStateError: as `BootstrapJob.run`.
        """
        chosen = options or EditOptions(owner="bootstrap on Spark")
        return self._job().run(self.store, chosen, plan=plan)

    def edit(self) -> PlannableEdit:
        """Return this bootstrap as an edit that is planned and executed later, or in a window."""

        def at(store: ObjectStore, directory: JobDirectory) -> Bootstrap:
            return replace(self, store=store, directory=directory)

        return PlannableEdit(
            self.job,
            plan=lambda store, directory: at(store, directory).plan(),
            run=lambda store, directory, options: at(store, directory).run(None, options),
        )

    def _job(self) -> BootstrapJob:
        return BootstrapJob(
            paths=self.job,
            directory=self.directory,
            tables=self.tables,
            watermark_micros=self.watermark_micros,
            positions=self.positions,
            declaration=self.declaration,
            events=self.events,
        )


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
        return sum((one for one, _ in self._parts(partial(_described, target))), RowFacts())

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
        ordered = sorted(files, key=lambda one: (one.min_routing_key, one.path))
        return sum((one for one, _ in parts), RowFacts()), ordered

    def _parts(self, work: Callable[[pa.Table], _BlockResult]) -> list[_BlockResult]:
        session, names = self.frame.sparkSession, self.frame.columns
        # Spark resolves the names of columns once more, where a dot means a field.
        numbered = few_tasks(self.frame).toDF(*(f"c{at}" for at in range(len(names))))
        found: list[_BlockResult] = []
        for one in fetch_rows(session, numbered.mapInArrow(_on_blocks(work, names), _DDL)):
            result = pickle.loads(one.payload)
            if isinstance(result, ArroyoStateError):
                raise result
            found.append(result)
        return found


def few_tasks(frame: DataFrame) -> DataFrame:
    """Return a frame for Python, where a task costs more than the rows of a small partition."""
    return frame.coalesce(slots(frame.sparkSession) * TASKS_PER_SLOT)


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """Return the columns of a frame as its rows get to Python; nothing is computed.

    Raises:
        InputError: a column has a type that only Spark has.
    """
    fields = []
    for one in frame.schema:
        try:
            fields.append(pa.field(one.name, arrow_type(one.dataType)))
        except InputError as error:
            raise InputError(
                f"column {one.name!r}: {error.message}", next_step=error.next_step
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
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= _BLOCK_BYTES:
            yield pa.Table.from_batches(held).combine_chunks()
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


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
