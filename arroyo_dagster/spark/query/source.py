"""The data source `arroyo` of Spark: any table of any job at any epoch, as Arrow batches.

```python
from arroyo_dagster.spark.query.source import register_source

register_source(spark)
orders = spark.read.format("arroyo").load('s3://bucket/arroyo', table='"shop/main".join_2."left"')
```

| Option | Meaning |
|---|---|
| `path` | the checkpoint URL |
| `table` | the name of a table, as in SQL; a metadata table, too |
| `epoch`, `at` | an epoch by its number, `latest`, or a time; default: the newest visible one |
| `raw` | `true`: every stored row, with the file that holds it |
| `changes` | `true`: what changed from epoch to epoch, also as a stream; see `TableChanges` |
| `partitions` | into how many partitions a table is divided; default: 8 |
| `unsigned`, `nanos` | see `TypeOptions` |
| `store.NAME` | an option of the store's client |

Columns are those of the schema that is asked for: Spark prunes none for sources in Python. Filters
choose files and row groups; Spark evaluates them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.spark.query.frames import spark_schema
from arroyo_dagster.spark.versions import DATA_SOURCES, require_pyspark
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.operations.query.diff import CHANGE, Change, diff_tables
from arroyo_dagster.state.operations.query.metadata_tables import find_metadata
from arroyo_dagster.state.operations.query.names import not_found, parse_name
from arroyo_dagster.state.operations.query.scans import WRITTEN_EPOCH, ScanRequest
from arroyo_dagster.state.operations.query.state import StateCatalog, StateJob, open_state
from arroyo_dagster.state.operations.query.table import EpochTable
from arroyo_dagster.state.tables.comparisons import ColumnFilter, Comparison, bind

require_pyspark("the data source `arroyo`", DATA_SOURCES)

from pyspark.sql.datasource import (  # noqa: E402, TID253 - the classes below extend these
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

FORMAT = "arroyo"
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"
_PARTITIONS = 8
_STORE = "store."
_KNOWN = ("path", "table", "epoch", "at", "raw", "changes", "partitions", "unsigned", "nanos")
_RELATIONS = {
    "EqualTo": "=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "In": "in",
    "IsNull": "is null",
    "IsNotNull": "is not null",
}
"""By the name of a filter's class. Spark pushes filters down from 4.1 on."""


def register_source(session: SparkSession) -> None:
    """Make the format `arroyo` known to a session, and let it push filters down."""
    session.dataSource.register(ArroyoSource)
    session.conf.set(PUSH_DOWN, "true")


class ArroyoSource(DataSource):
    """The data source; see the module."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return all columns; errors as `SourceOptions.of` and reading the metadata."""
        options = SourceOptions.of(self.options)
        return spark_schema(options.types.schema_of(options.schema))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the columns of a schema."""
        options = SourceOptions.of(self.options)
        asked = _asked(schema)
        if options.changes:
            return ChangesReader(options.table_changes(), asked)
        return SourceReader(options.rows(), options.types, options.partitions, asked)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - as above
        """Return a reader of the changes of a table.

        Raises:
            InputError: the option `changes` is not set; errors as of `reader`.
        """
        options = SourceOptions.of(self.options)
        if not options.changes:
            raise InputError(
                "a stream reads the changes of a table",
                table=options.table,
                next_step="set the option changes=true; the rows have _change and _epoch then",
            )
        return ChangesStream(options.table_changes(), _asked(schema))


def _asked(schema: StructType) -> dict[str, bool]:
    return {field.name: field.nullable for field in schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a read, checked."""

    url: str
    table: str
    epoch: str | None
    raw: bool
    changes: bool
    partitions: int
    types: TypeOptions
    store: Mapping[str, str]

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SourceOptions:
        """Check the options of a read.

        Raises:
            InputError: one is missing, unknown or wrong.
        """
        options = {name.lower(): value for name, value in given.items()}
        store = {
            name[len(_STORE) :]: value for name, value in options.items() if name.startswith(_STORE)
        }
        for name in options:
            if name not in _KNOWN and not name.startswith(_STORE):
                raise not_found("option", name, _KNOWN)
        for name, meaning in (("path", "the checkpoint URL"), ("table", "the name of a table")):
            if not options.get(name):
                raise InputError(f"the option {name} is missing: {meaning}", format=FORMAT)
        epoch, moment = options.get("epoch"), options.get("at")
        if epoch and moment:
            raise InputError("give one of the options epoch and at", epoch=epoch, at=moment)
        return cls(
            url=options["path"],
            table=options["table"],
            epoch=epoch or moment,
            raw=_flag("raw", options.get("raw", "false")),
            changes=_flag("changes", options.get("changes", "false")),
            partitions=_count("partitions", options.get("partitions", str(_PARTITIONS))),
            types=TypeOptions(options.get("unsigned", "decimal"), options.get("nanos", "exact")),
            store=store,
        )

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the table; errors as `rows`."""
        if self.changes:
            return self.table_changes().schema
        name = parse_name(self.table)
        if name.operator is None:
            return find_metadata(open_state(self.url, options=self.store or None), name).schema
        return self.rows().schema

    def table_changes(self) -> TableChanges:
        """Return the changes of the table.

        Raises:
            InputError: the name or another option does not go with changes.
        """
        name = parse_name(self.table)
        for option, conflicts in (("raw", self.raw), ("a metadata table", name.operator is None)):
            if conflicts:
                raise InputError(f"changes do not go with {option}", table=self.table)
        state = open_state(self.url, options=self.store or None)
        table = state.table(name)
        if "@" in (name.job or "") and not str(table.name.job).endswith(name.job or ""):
            raise InputError(
                "changes are those of many epochs, and the name has one",
                table=self.table,
                next_step="give the epoch before the first changes as the option epoch",
            )
        first = None if self.epoch is None else Epoch(_count("epoch", self.epoch))
        return TableChanges(state, table, first, self.types, self.partitions)

    def rows(self) -> EpochTable | pa.Table:
        """Return the table, or the rows of a metadata table.

        Raises:
            NotFoundError, InputError, FormatError: as `StateCatalog.table`.
        """
        state, name = open_state(self.url, options=self.store or None), parse_name(self.table)
        if name.operator is None:
            return find_metadata(state, name, self.epoch).read()
        if self.epoch is not None and name.job is not None:
            name = replace(name, job=f"{name.job}@{self.epoch}")
        table = state.table(name)
        return table.raw() if self.raw else table


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InputError(f"not a value of the option {name}: {value!r}", expected="true, false")
    return value.lower() == "true"


def _count(name: str, value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise InputError(f"not a value of the option {name}: {value!r}", expected="1 or more")
    return int(value)


class Part(InputPartition):
    """One part of a table."""

    def __init__(self, request: ScanRequest | None) -> None:
        super().__init__(None)
        self.request = request


class SourceReader(DataSourceReader):
    """Reads a table in parts.

    Args:
        rows: the table, or the rows of a metadata table.
        partitions: into how many parts a table is divided.
        columns: the columns to read, in their order, and whether Spark takes them as nullable.
    """

    def __init__(
        self,
        rows: EpochTable | pa.Table,
        types: TypeOptions,
        partitions: int,
        columns: Mapping[str, bool],
    ) -> None:
        self._rows = rows
        self._partitions = partitions
        self._columns = AskedColumns(rows.schema, types, columns)
        self._filters: tuple[ColumnFilter, ...] = ()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take what can choose files and row groups; Spark evaluates all filters again."""
        if isinstance(self._rows, EpochTable) and not self._rows.mask:
            schema = self._rows.schema
            bound = (_bound(condition, schema) for condition in filters)
            self._filters = tuple(condition for condition in bound if condition is not None)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Return the parts; a metadata table is one."""
        if not isinstance(self._rows, EpochTable):
            return [Part(None)]
        return [Part(request) for request in self._rows.splits(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part."""
        assert isinstance(partition, Part)
        if not isinstance(self._rows, EpochTable):
            yield from self._columns.batches(self._rows.select(list(self._columns.places)))
            return
        assert partition.request is not None
        request = replace(partition.request, columns=self._columns.places, filters=self._filters)
        for rows in self._rows.read(request):
            yield from self._columns.batches(rows)


def _bound(one: Filter, schema: pa.Schema) -> ColumnFilter | None:
    relation, fields = _RELATIONS.get(type(one).__name__), vars(one)
    if relation is None or len(fields["attribute"]) != 1:
        return None
    (name,) = fields["attribute"]
    if name not in schema.names:
        return None
    value = fields.get("value")
    values = tuple(map(_plain, value)) if relation == "in" and value else _plain(value)
    return bind(Comparison.of(name, relation, values), schema, schema.names.index(name))


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    return bytes(value) if isinstance(value, bytearray) else value


# ---- changes -------------------------------------------------------------------------------------
# The changes of a table, epoch by epoch, as a stream of Spark: a source with `changes=true`.
#
# ```python
# changes = (
#     spark.readStream.format("arroyo")
#     .options(table='"shop/main".join_2."left"', changes="true")
#     .load("s3://bucket/arroyo")
# )
# ```
#
# The rows have two more columns: `_change`, as of `Change`, and `_epoch`, in which they changed.
# The first batch holds all rows of the newest epoch as inserted; with the option `epoch`, the
# changes behind that epoch. Each batch ends at the newest visible epoch.

EPOCH = WRITTEN_EPOCH
_NOTHING = Epoch(0)
"""The epoch before the first one: it has no rows."""


@dataclass(frozen=True)
class TableChanges:
    """The changes of one table of a job.

    Attributes:
        newest_table: the table at the epoch that was the newest when the read was planned.
        first: the epoch before the first changes; None = none: all rows of the newest epoch are
            inserted.
        partitions: into how many partitions those rows are divided.
    """

    state: StateCatalog
    newest_table: EpochTable
    first: Epoch | None
    types: TypeOptions
    partitions: int

    @property
    def job(self) -> StateJob:
        """The job."""
        return StateJob(self.state, self.newest_table.paths)

    def table(self, epoch: Epoch) -> EpochTable:
        """Return the table at an epoch.

        Raises:
            NotFoundError: the epoch was collected, or has no such table.
        """
        name = self.newest_table.name
        assert name.operator is not None
        try:
            state_epoch = self.job.epoch(epoch)
        except NotFoundError as error:
            error.next_step = (
                "pin the epochs that a stream has not read yet, or begin anew: with another "
                "checkpoint location, which reads the newest epoch whole"
            )
            raise
        return state_epoch.table(name.operator, name.table)

    def newest(self) -> Epoch:
        """Return the newest visible epoch; 0 = there is none."""
        return max(self.job.epochs(), default=_NOTHING)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the newest epoch, and `_change` and `_epoch`."""
        columns = self.newest_table.schema
        for name in (CHANGE, EPOCH):
            if name in columns.names:
                raise InputError(
                    f"the table has a column {name} of its own", table=str(self.newest_table.name)
                )
        return columns.append(pa.field(CHANGE, pa.string(), nullable=False)).append(
            pa.field(EPOCH, pa.int64(), nullable=False)
        )

    def steps(self, after: Epoch, until: Epoch) -> list[EpochStep]:
        """Return the steps from epoch to epoch that lead from one to another."""
        if after == until:
            return []
        if after == _NOTHING:
            requests = self.table(until).splits(self.partitions)
            return [EpochStep(_NOTHING, until, request) for request in requests]
        numbers = [number for number in self.job.epochs() if after < number < until]
        return [EpochStep(*pair) for pair in pairwise([after, *numbers, until])]

    def rows(self, step: EpochStep) -> Iterator[pa.Table]:
        """Yield the changes of a step, with all columns.

        Raises:
            NotFoundError: an epoch was collected.
            InputError: the columns of the table changed.
        """
        after = self.table(step.after)
        if step.request is None:
            changes = diff_tables(self.table(step.before), after).changes
            yield changes.append_column(EPOCH, pa.repeat(int(step.after), changes.num_rows))
            return
        for rows in after.read(step.request):
            kind = pa.repeat(Change.INSERTED.value, rows.num_rows)
            with_kind = rows.append_column(CHANGE, kind)
            yield with_kind.append_column(EPOCH, pa.repeat(int(step.after), rows.num_rows))


class EpochStep(InputPartition):
    """From one epoch to the next; with a request, a share of the rows of the second."""

    def __init__(self, before: Epoch, after: Epoch, request: ScanRequest | None = None) -> None:
        super().__init__(None)
        self.before = before
        self.after = after
        self.request = request


class _StepReader:
    """Reads the steps of a table's changes."""

    def __init__(self, changes: TableChanges, asked: Mapping[str, bool]) -> None:
        self._changes = changes
        self._columns = AskedColumns(changes.schema, changes.types, asked)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a step."""
        assert isinstance(partition, EpochStep)
        for rows in self._changes.rows(partition):
            yield from self._columns.batches(rows.select(list(self._columns.places)))


class ChangesReader(_StepReader, DataSourceReader):
    """Reads the changes up to the newest epoch once."""

    def partitions(self) -> Sequence[InputPartition]:
        """Return the steps."""
        changes = self._changes
        return changes.steps(changes.first or _NOTHING, changes.newest())


class ChangesStream(_StepReader, DataSourceStreamReader):
    """Reads changes as epochs come. An offset is the last epoch that was read: `{"epoch": 12}`."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return where a new query begins."""
        return {"epoch": int(self._changes.first or _NOTHING)}

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, int] | None = None, limit: Any = None
    ) -> dict[str, int]:
        """Return the newest visible epoch: a batch reads all epochs that are there.

        Args:
            start: where the batch begins; None = Spark is older than 4.2, and does not say.
        """
        begin = self.initialOffset() if start is None else start
        return {"epoch": max(begin["epoch"], int(self._changes.newest()))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return the steps between two offsets."""
        return self._changes.steps(Epoch(start["epoch"]), Epoch(end["epoch"]))


# ---- columns -------------------------------------------------------------------------------------
# The columns that Spark asks a source for, with the types and the nullability that it expects.


class AskedColumns:
    """Some columns of a schema, in the order asked for.

    Args:
        asked: the names of the columns, and whether Spark takes them for nullable.

    Attributes:
        places: their indices in the schema.

    Raises:
        NotFoundError: no such column.
    """

    def __init__(self, schema: pa.Schema, types: TypeOptions, asked: Mapping[str, bool]) -> None:
        for name in asked:
            if name not in schema.names:
                raise not_found("column", name, schema.names)
        self.places = tuple(schema.names.index(name) for name in asked)
        fields = [schema.field(name).with_nullable(nullable) for name, nullable in asked.items()]
        self._types = types
        self._schema = types.schema_of(pa.schema(fields))

    def batches(self, rows: pa.Table) -> list[pa.RecordBatch]:
        """Return rows of these columns as Spark expects them."""
        columns = self._types.convert(rows).columns
        batches: list[pa.RecordBatch] = pa.Table.from_arrays(
            columns, schema=self._schema
        ).to_batches()
        return batches
