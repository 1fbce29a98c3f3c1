"""Comparisons of columns with values: which rows match, and which values a row group must hold."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError


class Relation(enum.Enum):
    """How a column is compared. A null matches only `is null`."""

    EQUAL = "="
    LESS = "<"
    AT_MOST = "<="
    GREATER = ">"
    AT_LEAST = ">="
    IN = "in"
    IS_NULL = "is null"
    NOT_NULL = "is not null"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One condition on a column.

    Attributes:
        column: its name.
        values: one value; for `in` any number, for `is null` and `is not null` none.
    """

    column: str
    relation: Relation
    values: tuple[Any, ...] = ()

    @classmethod
    def of(cls, column: str, relation: str, value: Any = None) -> Comparison:
        """Return a condition from its parts, as `("word", "=", "a")` or `("n", "in", [1, 2])`.

        Raises:
            InputError: no such relation.
        """
        try:
            kind = Relation("=" if relation == "==" else relation)
        except ValueError:
            raise InputError(
                f"columns are not compared with {relation!r}",
                column=column,
                next_step=f"use one of: {', '.join(kind.value for kind in Relation)}",
            ) from None
        if kind in (Relation.IS_NULL, Relation.NOT_NULL):
            return cls(column, kind)
        return cls(column, kind, tuple(value) if kind is Relation.IN else (value,))


@dataclass(frozen=True, slots=True)
class ColumnFilter:
    """A comparison with a column at a place, with values of its type.

    Attributes:
        place: the index of the column in the rows that are filtered.
        values: valid Arrow values of the column's type.
    """

    place: int
    relation: Relation
    values: tuple[pa.Scalar, ...] = ()

    def mask(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        """Return which rows match, without nulls."""
        column = rows.column(self.place)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if self.relation is Relation.IS_NULL:
            return pc.is_null(column)
        if self.relation is Relation.NOT_NULL:
            return pc.is_valid(column)
        if self.relation is Relation.IN:
            value_set = pa.array(self.values, column.type)
            return pc.is_in(column, value_set=value_set, skip_nulls=True)
        return pc.fill_null(_FUNCTIONS[self.relation](column, self.values[0]), False)

    def bounds(self) -> tuple[int | bytes | None, int | bytes | None] | None:
        """Return the smallest and largest value that can match, both inclusive, as statistics hold
        them; None in place of one = no bound. None = statistics cannot decide.
        """
        if self.relation in (Relation.IS_NULL, Relation.NOT_NULL) or not self.values:
            return None
        raw = [_raw(value) for value in self.values]
        if any(value is None for value in raw):
            return None
        low = None if self.relation in (Relation.LESS, Relation.AT_MOST) else min(raw)  # type: ignore[type-var]
        high = None if self.relation in (Relation.GREATER, Relation.AT_LEAST) else max(raw)  # type: ignore[type-var]
        return low, high


_FUNCTIONS = {
    Relation.EQUAL: pc.equal,
    Relation.LESS: pc.less,
    Relation.AT_MOST: pc.less_equal,
    Relation.GREATER: pc.greater,
    Relation.AT_LEAST: pc.greater_equal,
}


def filter_rows(rows: pa.Table, filters: Sequence[ColumnFilter]) -> pa.Table:
    """Return the rows that match all filters, in their order."""
    for condition in filters if rows.num_rows else ():
        rows = rows.filter(condition.mask(rows))
    return rows


def bind(comparison: Comparison, schema: pa.Schema, place: int) -> ColumnFilter | None:
    """Convert the values of a comparison to the type of a column.

    Returns:
        None if a value has no exact form in the column's type, so that the comparison cannot be
        decided by it; or if values of the type are not comparable.
    """
    kind = schema.field(place).type
    if comparison.relation in (Relation.IS_NULL, Relation.NOT_NULL):
        return ColumnFilter(place, comparison.relation)
    if pa.types.is_nested(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind):
        return None
    try:
        values = tuple(_scalar(value, kind) for value in comparison.values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None
    if any(not value.is_valid for value in values):
        return None
    return ColumnFilter(place, comparison.relation, values)


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    if isinstance(value, pa.Scalar):
        return value.cast(kind, safe=True)
    if isinstance(value, bool) is not pa.types.is_boolean(kind):
        raise TypeError(f"{value!r} is no {kind}")
    return pa.scalar(value, kind)


def _raw(value: pa.Scalar) -> int | bytes | None:
    """Return a value as the statistics of a Parquet column hold it; None = not compared."""
    kind, types = value.type, pa.types
    if types.is_integer(kind):
        return int(value.as_py())
    if types.is_timestamp(kind) and kind.unit != "s":
        return int(value.value)
    if types.is_string(kind) or types.is_large_string(kind):
        return str(value.as_py()).encode()
    if types.is_binary(kind) or types.is_large_binary(kind):
        return bytes(value.as_py())
    return None
