"""The rows of metadata tables, one class per table, and their form in Arrow and Polars."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

Micros = Annotated[int, "a point in time"]
DurationMicros = Annotated[int, "a duration"]

_UNSIGNED = ("min_routing_key", "max_routing_key")
_MAX_MICROS = 2**63 - 1


class JobRow(NamedTuple):
    """A job, by its newest epoch."""

    job: str
    pipeline: str | None
    name: str
    layout: str | None
    epochs: int | None
    newest_epoch: int | None
    state: str | None
    finished_at_micros: Micros | None
    watermark_micros: Micros | None
    problem: str | None


class JobEpochRow(NamedTuple):
    """An epoch, or an unfinished attempt at it; see `EpochSummary`."""

    job: str
    epoch: int
    worker_generation: int | None
    state: str | None
    started_at_micros: Micros | None
    finished_at_micros: Micros | None
    watermark_micros: Micros | None
    operators: int | None
    files: int
    size_bytes: int
    new_files: int | None
    new_size_bytes: int | None
    missing: int
    problem: str | None


class OperatorRow(NamedTuple):
    """An operator at one epoch.

    `watermark_micros` is the smallest of its subtasks; null = not all of them have one.
    """

    job: str
    epoch: int
    operator: str
    parallelism: int
    tables: int
    watermark_micros: Micros | None
    max_watermark_micros: Micros | None


class TableRow(NamedTuple):
    """A table of an operator at one epoch. `name`: as queries name it."""

    job: str
    epoch: int
    finished_at_micros: Micros
    operator: str
    table: str
    name: str
    kind: str
    description: str
    owner: str | None
    retention_micros: DurationMicros | None
    generational: bool | None
    files: int
    size_bytes: int


class DataFileRow(NamedTuple):
    """A data file that a table lists at one epoch, in replay order by `place`."""

    job: str
    epoch: int
    operator: str
    table: str
    place: int
    path: str
    size_bytes: int | None
    written_epoch: int | None
    compaction_generation: int | None
    min_routing_key: int | None
    max_routing_key: int | None
    max_timestamp_micros: Micros | None


class RowGroupRow(NamedTuple):
    """A row group of a data file; reading these rows opens the footer of every file."""

    job: str
    epoch: int
    operator: str
    table: str
    path: str
    row_group: int
    rows: int
    size_bytes: int
    compressed_bytes: int


class SourcePosition(NamedTuple):
    """How far one partition of a source is read.

    Attributes:
        connector: such as `Kafka source`.
        partition: the partition, file, shard or subtask, as text.
        position: the offset, or the number of records, lines or events; None = it has no number.
        finished: whether it is read to its end; None = the state does not say.
        state: the whole state, as JSON.
    """

    job: str
    epoch: int
    finished_at_micros: Micros
    operator: str
    table: str
    connector: str
    partition: str
    position: int | None
    finished: bool | None
    state: str


class WatermarkRow(NamedTuple):
    """How far event time has advanced at an operator; the lag is behind the end of the epoch."""

    job: str
    epoch: int
    operator: str
    finished_at_micros: Micros
    watermark_micros: Micros | None
    max_watermark_micros: Micros | None
    lag_seconds: float | None


class WindowRow(NamedTuple):
    """A window, or a bin of sliding windows, that is not closed.

    Attributes:
        ends_at_micros: of a tumbling window its end, of a bin the end of the last window with it.
        rows: increments of aggregates, of which a key may have several.
    """

    job: str
    epoch: int
    operator: str
    kind: str
    starts_at_micros: Micros
    ends_at_micros: Micros
    keys: int
    rows: int


class SessionRow(NamedTuple):
    """An open session of a session window.

    Attributes:
        key: the values of its key columns, as JSON by name.
        closes_at_micros: the watermark that closes it, unless a row comes before.
    """

    job: str
    epoch: int
    operator: str
    key: str
    starts_at_micros: Micros
    last_row_at_micros: Micros
    closes_at_micros: Micros
    rows: int


class JoinSideRow(NamedTuple):
    """One side of a join: the rows that wait for partners."""

    job: str
    epoch: int
    operator: str
    side: str
    keys: int
    rows: int
    first_row_at_micros: Micros | None
    last_row_at_micros: Micros | None


class CommitRow(NamedTuple):
    """A table of a sink that commits in two phases. `pending`: the commit has not finished."""

    job: str
    epoch: int
    operator: str
    table: str
    subtask: int
    size_bytes: int
    pending: bool


class KeyRangeRow(NamedTuple):
    """What one subtask reads of one table in a restore, and the routing keys that it keeps.

    Reading these rows opens the footer of every file. Keys are hashes, taken as spread evenly over
    the range of a file: `rows` and `memory_bytes`, the decoded size, are about. `seconds` are those
    of opening and reading, without the start of a worker.
    """

    job: str
    epoch: int
    operator: str
    table: str
    subtask: int
    min_routing_key: int
    max_routing_key: int
    files: int
    size_bytes: int
    rows: int
    memory_bytes: int
    seconds: float


class PinRow(NamedTuple):
    """A pinned epoch."""

    job: str
    epoch: int
    reason: str
    owner: str
    pinned_at_micros: Micros | None
    released: bool


class LeaseRow(NamedTuple):
    """The newest lease of a job, of each kind.

    `state`: held, expired or released; broken = its record does not decode; unknown = a clock is
    wrong. `age_seconds` is this machine's time minus the store's of the last renewal.
    """

    job: str
    kind: str
    token: int | None
    state: str
    owner: str | None
    host: str | None
    pid: int | None
    description: str | None
    acquired_at_micros: Micros | None
    renewed_at_micros: Micros | None
    age_seconds: float | None
    expires_in_seconds: float | None
    problem: str | None


class JournalRow(NamedTuple):
    """An object that gc deleted, or tried to."""

    job: str
    run: str
    owner: str
    at_micros: Micros
    kind: str
    plan: str
    path: str
    size_bytes: int | None
    outcome: str


class OrphanRow(NamedTuple):
    """An object that gc would delete as an orphan; or why gc refuses to say.

    Nothing is deleted.
    """

    job: str
    path: str | None
    size_bytes: int | None
    problem: str | None


class QuarantineRow(NamedTuple):
    """An object in quarantine."""

    job: str
    quarantine: str
    moved_at_micros: Micros
    path: str
    copy: str
    size_bytes: int


class FateRow(NamedTuple):
    """What became of an object, or of the objects below a directory: one run of gc, or no run.

    `fate`: as `FateState` names it. Of a directory it is null but for the objects that are present.
    `reason`: why an object that is there stays or may be deleted.
    """

    path: str
    fate: str | None = None
    outcome: str | None = None
    kind: str | None = None
    objects: int | None = None
    size_bytes: int | None = None
    first_at_micros: Micros | None = None
    last_at_micros: Micros | None = None
    owner: str | None = None
    run: str | None = None
    plan: str | None = None
    quarantine: str | None = None
    copy: str | None = None
    purgeable_from_micros: Micros | None = None
    reason: str | None = None
    problem: str | None = None


# ---- Arrow and Polars ----------------------------------------------------------------------------


def rows_schema(row: type[Any]) -> pa.Schema:
    """Return the columns of a table: those of the class, without the unit of times."""
    import pyarrow as pa

    kinds = {
        str: pa.string(),
        int: pa.int64(),
        _UNSIGNED: pa.uint64(),
        bool: pa.bool_(),
        float: pa.float64(),
        Micros: pa.timestamp("us", tz="UTC"),
        DurationMicros: pa.duration("us"),
    }
    return pa.schema([pa.field(col.name, kinds[col.kind], col.nullable) for col in _columns(row)])


def rows_table(row: type[Any], found: Iterable[Any]) -> pa.Table:
    """Return rows of a class as an Arrow table."""
    import pyarrow as pa

    schema, listed = rows_schema(row), list(found)
    values = [_values(column, listed) for column in _columns(row)]
    arrays = [pa.array(*pair) for pair in zip(values, schema.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def rows_frame(row: type[Any], found: Iterable[Any]) -> pl.DataFrame:
    """Return rows of a class as a frame. It loads no Arrow, so that a short query starts fast."""
    import polars as pl

    kinds = {
        str: pl.String(),
        int: pl.Int64(),
        _UNSIGNED: pl.UInt64(),
        bool: pl.Boolean(),
        float: pl.Float64(),
        Micros: pl.Datetime("us", "UTC"),
        DurationMicros: pl.Duration("us"),
    }
    listed = list(found)
    return pl.DataFrame(
        [
            pl.Series(
                column.name,
                _values(column, listed),
                pl.Int64() if column.kind in (Micros, DurationMicros) else kinds[column.kind],
            ).cast(kinds[column.kind])
            for column in _columns(row)
        ]
    )


def lazy_source(
    source: Callable[..., Iterator[pl.DataFrame]], schema: Any, name: str
) -> pl.LazyFrame:
    """Return a frame that is read from `source` when it is collected.

    Args:
        source: as of `register_io_source`; called twice it returns the same.
        name: for explanations.
    """
    from polars.io.plugins import register_io_source

    known = inspect.signature(register_io_source).parameters  # polars 1 names no source
    named: dict[str, Any] = {"explain_name": name} if "explain_name" in known else {}
    return register_io_source(source, schema=schema, is_pure=True, **named)


class _Column(NamedTuple):
    """`kind`: a type of Python, `Micros`, `DurationMicros` or `_UNSIGNED`."""

    attribute: str
    kind: Any
    nullable: bool

    @property
    def name(self) -> str:
        return self.attribute.removesuffix("_micros")


def _columns(row: type[Any]) -> list[_Column]:
    hints = typing.get_type_hints(row, include_extras=True)
    return [_column(name, hint) for name, hint in hints.items()]


def _column(name: str, hint: Any) -> _Column:
    nullable = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    if nullable:
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
    return _Column(name, _UNSIGNED if name in _UNSIGNED else hint, nullable)


def _values(column: _Column, rows: Iterable[Any]) -> list[Any]:
    values = (getattr(row, column.attribute) for row in rows)
    return [
        # Arroyo's times are unsigned; values from 2**63 are no times.
        min(value, _MAX_MICROS) if column.kind is not _UNSIGNED and type(value) is int else value
        for value in values
    ]
