"""Which keys, subtasks or groups hold most of a table: rows and decoded bytes.

The rows are read once, in batches. Up to a number of groups their counts are exact. Beyond it a
sketch (Misra and Gries) keeps the largest groups: it drops rows, of each group at most `max_error`,
which is at most the rows of the table divided by the number of groups that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.hashing.routing import key_hashes, subtasks_for_hashes
from arroyo_dagster.state.codec.plain import plain_rows
from arroyo_dagster.state.model.keys import KeyRange, range_for_server
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from arroyo_dagster.state.operations.query.names import not_found
from arroyo_dagster.state.operations.query.scans import ScanRequest
from arroyo_dagster.state.operations.query.table import EpochTable

KEPT_GROUPS = 100_000
LIMIT = 20
_ROWS, _BYTES = "_rows", "_bytes"
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskShare:
    """What of a table is in the key range of one subtask."""

    subtask: int
    keys: KeyRange
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """What of a table one group has.

    Attributes:
        values: of the grouping columns, as JSON has them.
        rows, size_bytes: at least; see `TableSkew.max_error`.
    """

    values: tuple[Any, ...]
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSkew:
    """How a table is spread.

    Attributes:
        rows, size_bytes: of the whole table; bytes are decoded values.
        subtasks: empty = the rows are not routed by key, or a column is private.
        columns: by which groups are made; empty = the table has no key.
        groups: the groups with the most rows, largest first.
        max_error: how many rows more a group may have; 0 = the counts are exact.
    """

    rows: int
    size_bytes: int
    subtasks: tuple[SubtaskShare, ...]
    columns: tuple[str, ...]
    groups: tuple[GroupShare, ...]
    max_error: int


def table_skew(
    table: EpochTable,
    *,
    by: str | None = None,
    parallelism: int | None = None,
    limit: int = LIMIT,
    kept_groups: int = KEPT_GROUPS,
) -> TableSkew:
    """Find what holds most of a table.

    Args:
        by: an expression of SQL over the columns, such as `substr(key, 1, 3)`; None = the key.
        parallelism: the number of subtasks; None = that of the operator.
        limit: return at most this many groups.
        kept_groups: count this many groups exactly.

    Raises:
        InputError: the expression is wrong.
        NotFoundError: it names another column; or the epoch was collected while it was read.
        FormatError: a file is broken.
    """
    subtasks = parallelism or table.scan.operator.parallelism
    columns, grouped = _grouping(table, by)
    rows, sizes = np.zeros(subtasks, np.int64), np.zeros(subtasks, np.int64)
    routed, total_rows, total_bytes = True, 0, 0
    sketch = _Sketch(columns, kept_groups)
    for part in table.read(ScanRequest(columns=tuple(range(len(table.schema))))):
        weights = row_bytes(part)
        total_rows, total_bytes = total_rows + part.num_rows, total_bytes + int(weights.sum())
        owners = _subtasks(table, part, subtasks)
        if owners is None:
            routed = False
        else:
            rows += np.bincount(owners, minlength=subtasks)
            sizes += np.bincount(owners, weights, subtasks).astype(np.int64)
        if columns:
            sketch.add(grouped(part), weights)
    return TableSkew(
        rows=total_rows,
        size_bytes=total_bytes,
        subtasks=tuple(
            SubtaskShare(
                subtask=at,
                keys=range_for_server(at, subtasks),
                rows=int(rows[at]),
                size_bytes=int(sizes[at]),
            )
            for at in range(subtasks if routed and total_rows else 0)
        ),
        columns=tuple(columns),
        groups=tuple(sketch.largest(limit)),
        max_error=sketch.max_error,
    )


def row_bytes(rows: pa.Table) -> _Numbers:
    """Return about how many bytes the values of each row have; nested ones count on average."""
    total = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind) or _is_large(kind):
            total += pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)
        elif pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
            total += max(1, kind.bit_width // 8)
        elif rows.num_rows:
            total += column.nbytes // rows.num_rows
    return total


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _subtasks(table: EpochTable, rows: pa.Table, parallelism: int) -> npt.NDArray[np.int32] | None:
    """Return the subtask that owns each row; None = it is not known."""
    scan = table.scan
    if not isinstance(scan, ExpiringScan) or not scan.routing_columns or table.mask:
        return None
    columns = [rows.column(at) for at in scan.routing_columns]
    try:
        hashes = key_hashes(columns, rows.num_rows, variant=scan.variant)
    except InputError:
        return None  # a type that is not hashed here
    return subtasks_for_hashes(hashes, parallelism)


def _grouping(
    table: EpochTable, by: str | None
) -> tuple[list[str], Callable[[pa.Table], pl.DataFrame]]:
    """Return the columns by which rows are grouped, and what finds them in rows."""
    if by is None:
        names = list(table.key_columns)
        return names, lambda rows: pl.DataFrame(rows.select(names))
    try:
        expression = pl.sql_expr(by)
        roots = expression.meta.root_names()
    except pl.exceptions.PolarsError as error:
        raise InputError(f"not an expression of SQL: {error}", expression=by) from error
    for name in roots:
        if name not in table.schema.names:
            raise not_found("column", name, table.schema.names, table=str(table.name))

    def grouped(rows: pa.Table) -> pl.DataFrame:
        frame = pl.DataFrame(rows.select(roots))
        try:
            return frame.select(expression.alias(by))
        except pl.exceptions.PolarsError as error:
            raise InputError(f"the expression does not fit: {error}", expression=by) from error

    return [by], grouped


@dataclass(slots=True)
class _Sketch:
    """Counts the rows and bytes of groups; of too many it keeps the largest."""

    columns: Sequence[str]
    kept: int
    max_error: int = 0
    _frames: list[pl.DataFrame] = field(default_factory=list)
    _pending: int = 0

    def add(self, groups: pl.DataFrame, weights: _Numbers) -> None:
        """Count rows: a group and the bytes of each."""
        rows = groups.with_columns(pl.lit(1, pl.Int64).alias(_ROWS), pl.Series(_BYTES, weights))
        summed = self._summed(rows)
        self._frames.append(summed)
        self._pending += summed.height
        if self._pending > 2 * self.kept:
            self._combine()

    def largest(self, limit: int) -> list[GroupShare]:
        """Return the groups with the most rows, largest first."""
        if not self._frames:
            return []
        self._combine()
        # Groups of the same size have an order, so that a repeated call returns the same.
        top = self._frames[0].sort(_ROWS, _BYTES, descending=True).head(limit)
        values = plain_rows(top.select(self.columns).to_arrow())
        counts = top.select(_ROWS, _BYTES).iter_rows()
        return [
            GroupShare(values=tuple(row.values()), rows=rows, size_bytes=size)
            for row, (rows, size) in zip(values, counts, strict=True)
        ]

    def _summed(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows.group_by(self.columns).agg(pl.col(_ROWS).sum(), pl.col(_BYTES).sum())

    def _combine(self) -> None:
        found = self._summed(pl.concat(self._frames))
        if found.height > self.kept:
            # All groups lose as many rows as the largest that is dropped has: what is left of a
            # group is never more than it has, and never less by more than the sum of these.
            lost = int(found[_ROWS].sort(descending=True)[self.kept])
            self.max_error += lost
            rest = pl.col(_ROWS) - lost
            found = found.filter(rest > 0).with_columns(
                (pl.col(_BYTES) * rest // pl.col(_ROWS)).alias(_BYTES), rest.alias(_ROWS)
            )
        self._frames, self._pending = [found], found.height
