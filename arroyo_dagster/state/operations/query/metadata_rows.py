"""The rows of metadata tables, one class per table, and their Arrow form."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import pyarrow as pa

Micros = Annotated[int, "a point in time"]
DurationMicros = Annotated[int, "a duration"]

_TYPES = {
    str: pa.string(),
    int: pa.int64(),
    bool: pa.bool_(),
    float: pa.float64(),
    Micros: pa.timestamp("us", tz="UTC"),
    DurationMicros: pa.duration("us"),
}
_UNSIGNED = ("min_routing_key", "max_routing_key")
_MAX_MICROS = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEpochRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFileRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroupRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkRow:
    """How far event time has advanced at an operator; the lag is behind the end of the epoch."""

    job: str
    epoch: int
    operator: str
    finished_at_micros: Micros
    watermark_micros: Micros | None
    max_watermark_micros: Micros | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRow:
    """A table of a sink that commits in two phases. `pending`: the commit has not finished."""

    job: str
    epoch: int
    operator: str
    table: str
    subtask: int
    size_bytes: int
    pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRangeRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRow:
    """A pinned epoch."""

    job: str
    epoch: int
    reason: str
    owner: str
    pinned_at_micros: Micros | None
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanRow:
    """An object that gc would delete as an orphan; or why gc refuses to say.

    Nothing is deleted.
    """

    job: str
    path: str | None
    size_bytes: int | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRow:
    """An object in quarantine."""

    job: str
    quarantine: str
    moved_at_micros: Micros
    path: str
    copy: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FateRow:
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


# ---- Arrow ---------------------------------------------------------------------------------------


def rows_schema(row: type[Any]) -> pa.Schema:
    """Return the columns of a table: those of the class, without the unit of times."""
    hints = typing.get_type_hints(row, include_extras=True)
    return pa.schema([_column(one.name, hints[one.name]) for one in fields(row)])


def rows_table(row: type[Any], found: Iterable[Any]) -> pa.Table:
    """Return rows of a class as an Arrow table."""
    schema, listed = rows_schema(row), list(found)
    columns = [
        pa.array([_value(getattr(one, field.name), kind) for one in listed], kind)
        for field, kind in zip(fields(row), schema.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(name: str, hint: Any) -> pa.Field:
    nullable = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    if nullable:
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
    kind = pa.uint64() if name in _UNSIGNED else _TYPES[hint]
    return pa.field(name.removesuffix("_micros"), kind, nullable)


def _value(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, int) and kind != pa.uint64() and not isinstance(value, bool):
        return min(
            value, _MAX_MICROS
        )  # Arroyo's times are unsigned; values from 2**63 are no times
    return value
