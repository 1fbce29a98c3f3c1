"""Columns between Arrow and Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
"""Spark has no unsigned types; each maps to the smallest type that holds all of its values."""

_ARROW = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "void": pa.null(),
    "binary": pa.binary(),
    "date": pa.date32(),
    **dict.fromkeys(("string", "varchar", "char"), pa.string()),
    **dict.fromkeys(("timestamp", "timestamp_ntz"), pa.timestamp("us")),
}
"""By the name of Spark's type."""


def spark_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column for Spark, which has microseconds and no unsigned numbers."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC")
    return _SIGNED.get(kind, kind)


def arrow_type(kind: Any) -> pa.DataType:
    """Return the type of a column of Spark as its rows get to Python.

    Raises:
        InputError: Arrow has no such type, or it is a map.
    """
    from pyspark.sql.types import ArrayType, DecimalType, StructType

    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, ArrayType):
        return pa.list_(arrow_type(kind.elementType))
    if isinstance(kind, StructType):
        return pa.struct([(field.name, arrow_type(field.dataType)) for field in kind])
    name = kind.simpleString().partition("(")[0]
    if name not in _ARROW:
        raise InputError(f"the type {name} is Spark's own", next_step="cast it")
    return _ARROW[name]


def for_spark(rows: pa.Table) -> pa.Table:
    """Convert rows to types that Spark has, without loss."""
    return rows.cast(spark_schema(rows.schema))


def spark_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of rows that `for_spark` returns."""
    return pa.schema([pa.field(field.name, spark_type(field.type)) for field in schema])


def struct_type(schema: pa.Schema) -> StructType:
    """Return Arrow columns as Spark's.

    Raises:
        InputError: Spark has no such type.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return from_arrow_schema(schema)
    except PySparkException as error:
        raise InputError(
            f"Spark has no type for a column ({error})",
            columns=listed_columns(schema),
            next_step="declare the column with another type",
        ) from error


def can_deliver(found: Any, wanted: Any) -> bool:
    """Return whether Spark's column of one type can be cast to another when it is staged.

    Args:
        found, wanted: types of Spark.
    """
    from pyspark.sql.types import NumericType, TimestampNTZType, TimestampType

    kinds: tuple[Any, ...] = (NumericType, (TimestampType, TimestampNTZType))
    return found.simpleString() == wanted.simpleString() or any(
        isinstance(found, kind) and isinstance(wanted, kind) for kind in kinds
    )


def listed_columns(schema: pa.Schema) -> list[str]:
    """Return `name: type` of each column, for messages."""
    return [f"{field.name}: {field.type}" for field in schema]
