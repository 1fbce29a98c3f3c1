"""Columns as operators give and receive them: one array, a struct of several, or rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from arroyo_dagster.errors import InputError

Given: TypeAlias = "pa.Array | pa.ChunkedArray | pa.RecordBatch | pa.Table | Sequence[Any]"
"""Values: an array; for several columns a struct array, or rows with columns of their names."""

Fields = Sequence[pa.Field]


def arrays_of(given: Given, fields: Fields, table: str) -> list[pa.Array]:
    """Return the columns that were given, as arrays of the fields' types.

    Raises:
        InputError: other columns or types, or a null where none is allowed.
    """
    try:
        columns = [
            _array(column, field)
            for column, field in zip(_split(given, fields), fields, strict=True)
        ]
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(
            f"the columns do not fit their table ({error})",
            table=table,
            expected=[f"{field.name}: {field.type}" for field in fields],
        ) from error
    if len({len(column) for column in columns}) > 1:
        raise InputError("the columns have different lengths", table=table)
    for column, field in zip(columns, fields, strict=True):
        if column.null_count and not field.nullable:
            raise InputError(
                "a column without nulls contains a null",
                table=table,
                column=field.name,
                nulls=column.null_count,
            )
    return columns


def _split(given: Given, fields: Fields) -> Sequence[Any]:
    if isinstance(given, pa.RecordBatch | pa.Table):
        if len(fields) == 1 and given.num_columns == 1:
            return [given.column(0)]
        return [_column(given, field.name) for field in fields]
    if len(fields) == 1:
        return [given]
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
    if isinstance(given, pa.StructArray):
        if given.null_count:
            raise ValueError("a row is null")
        return [_column(given, field.name) for field in fields]
    if isinstance(given, pa.Array):
        raise TypeError(f"{len(fields)} columns are expected, not one of type {given.type}")
    return list(zip(*given, strict=True)) or [[] for _ in fields]


def _column(given: pa.RecordBatch | pa.Table | pa.StructArray, name: str) -> Any:
    if isinstance(given, pa.StructArray):
        return given.field(name)
    if given.schema.names.count(name) != 1:
        raise KeyError(name)
    return given.column(name)


def _array(column: Any, field: pa.Field) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays([pa.array([], column.type), *column.chunks])
    if not isinstance(column, pa.Array):
        return pa.array(column, field.type)
    return column if column.type.equals(field.type) else column.cast(field.type)


def joined(columns: Sequence[pa.Array], fields: Fields) -> pa.Array:
    """Return one array: the only column, or a struct of several."""
    if len(columns) == 1:
        return columns[0]
    return pa.StructArray.from_arrays(columns, fields=list(fields))
