"""Which rows of a table an edit removes. Columns are addressed by their place: names may repeat."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.codec.operations import INSERT
from arroyo_dagster.state.tables.live_rows import nanos


@dataclass(frozen=True, slots=True)
class KeyRows:
    """The rows of one key.

    Attributes:
        columns: the places of the key columns.
        values: of exactly their types, in the same order; null equals null.
    """

    columns: tuple[int, ...]
    values: tuple[pa.Scalar, ...]

    def mask(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        """Return for each row whether it is one of them."""
        mask = pa.array([True] * rows.num_rows, pa.bool_())
        for index, value in zip(self.columns, self.values, strict=True):
            column = rows.column(index)
            same = pc.is_null(column) if not value.is_valid else pc.equal(column, value)
            mask = pc.and_(mask, pc.fill_null(same, False))
        return mask


@dataclass(frozen=True, slots=True)
class OlderRows:
    """The rows before a time; a row without a time is none of them.

    Attributes:
        column: the place of the event time.
        before_nanos: since 1970; excluded.
    """

    column: int
    before_nanos: int

    def mask(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        """Return for each row whether it is one of them."""
        return pc.fill_null(pc.less(rows.column(self.column), nanos(self.before_nanos)), False)


RowCondition = KeyRows | OlderRows


def removed_rows(
    condition: RowCondition, rows: pa.Table, operations: pa.ChunkedArray
) -> pa.ChunkedArray | pa.Array:
    """Return which stored rows of a managed job are removed, with the operations among them.

    An operation of a key goes with its rows. An old operation stays: it may act on younger rows.

    Args:
        operations: of the rows, perhaps dictionary-encoded.
    """
    mask = condition.mask(rows)
    if isinstance(condition, KeyRows):
        return mask
    return pc.and_(mask, inserts(operations))


def inserts(operations: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return which of the operations insert their row."""
    kinds = operations
    if pa.types.is_dictionary(kinds.type):
        kinds = kinds.cast(kinds.type.value_type)
    return pc.equal(kinds, INSERT)
