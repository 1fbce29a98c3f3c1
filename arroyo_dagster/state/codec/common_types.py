"""Arrow columns as Spark, Delta and Iceberg have them: exactly, or with an error that names the
option to choose.

They have no unsigned numbers, times in microseconds only, and time zones as UTC only. By default
unsigned numbers of 64 bits become `decimal(20,0)`, and a time or duration with a part below the
microsecond is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError

UNSIGNED = ("decimal", "long")
NANOS = ("exact", "floor", "long")
DURATIONS = ("duration", "long")
_WIDER = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """How types that Spark, Delta and Iceberg do not have are represented.

    Attributes:
        unsigned: `decimal` = `decimal(20,0)`; `long` = a long, and an error from 2^63 on.
        nanos: `exact` = times in microseconds, and an error if there is a part below; `floor` =
            without that part; `long` = the number of nanoseconds.
        durations: `duration` = in microseconds, as Spark has them; `long` = their number, for table
            formats, which have none.

    Raises:
        InputError: another value.
    """

    unsigned: str = "decimal"
    nanos: str = "exact"
    durations: str = "duration"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("unsigned", self.unsigned, UNSIGNED),
            ("nanos", self.nanos, NANOS),
            ("durations", self.durations, DURATIONS),
        ):
            if value not in choices:
                raise InputError(
                    f"not a value of the option {name}: {value!r}", expected=", ".join(choices)
                )

    def type_of(self, kind: pa.DataType) -> pa.DataType:
        """Return the Arrow type that a column has there."""
        types = pa.types
        if kind in _WIDER:
            return _WIDER[kind]
        if kind == pa.uint64():
            return pa.int64() if self.unsigned == "long" else pa.decimal128(20, 0)
        if types.is_timestamp(kind) or types.is_duration(kind):
            if self.nanos == "long" and kind.unit == "ns":
                return pa.int64()
            if pa.types.is_duration(kind):
                return pa.int64() if self.durations == "long" else pa.duration("us")
            return pa.timestamp("us", None if kind.tz is None else "UTC")
        if types.is_float16(kind):
            return pa.float32()
        if types.is_date64(kind):
            return pa.date32()
        if types.is_time(kind) or types.is_interval(kind) or types.is_decimal256(kind):
            return pa.string()
        if types.is_large_string(kind) or types.is_string_view(kind):
            return pa.string()
        if types.is_large_binary(kind) or types.is_binary_view(kind):
            return pa.binary()
        if types.is_dictionary(kind):
            return self.type_of(kind.value_type)
        types = pa.types
        if types.is_struct(kind):
            return pa.struct([self._field(field) for field in kind])
        if types.is_map(kind):
            return pa.map_(self.type_of(kind.key_type), self.type_of(kind.item_type))
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return pa.list_(self.type_of(kind.value_type))
        return kind

    def schema_of(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns that rows have there."""
        return pa.schema([self._field(field) for field in schema])

    def _field(self, field: pa.Field) -> pa.Field:
        return pa.field(field.name, self.type_of(field.type), field.nullable)

    def convert(self, rows: pa.Table) -> pa.Table:
        """Convert rows to `schema_of` their columns.

        Raises:
            InputError: a value has no exact form; names the column and the option.
        """
        columns = [
            self._column(column, field.name)
            for field, column in zip(rows.schema, rows.columns, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self.schema_of(rows.schema))

    def _column(self, column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
        kind = self.type_of(column.type)
        if kind.equals(column.type):
            return column
        try:
            chunks = [self._cast(_unsliced(chunk), kind) for chunk in column.chunks]
        except pa.ArrowInvalid as error:
            raise InputError(
                f"a value has no exact form in microseconds or signed numbers ({error})",
                column=name,
                type=str(column.type),
                next_step="set the option nanos=floor or nanos=long for times, unsigned=decimal "
                "for numbers",
            ) from error
        return pa.chunked_array(chunks, kind)

    def _cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        types = pa.types
        stored = values.type
        if kind.equals(stored):
            return values
        if types.is_dictionary(stored):
            return self._cast(values.dictionary_decode(), kind)
        if types.is_struct(stored):
            parts = zip(values.flatten(), kind, strict=True)
            fields = [self._cast(part, field.type) for part, field in parts]
            return pa.StructArray.from_arrays(fields, fields=list(kind), mask=values.is_null())
        if types.is_map(stored):
            return self._cast_map(values, kind)
        if types.is_list(stored) or types.is_large_list(stored) or types.is_fixed_size_list(stored):
            plain = values.cast(pa.list_(stored.value_type))
            return _with_items(plain, lambda items: self._cast(items, kind.value_type))
        if types.is_timestamp(stored) or types.is_duration(stored):
            return self._cast_time(values, kind)
        if types.is_interval(stored) or types.is_decimal256(stored):
            return pa.array([None if value is None else str(value) for value in values.to_pylist()])
        return values.cast(kind)

    def _cast_time(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        if kind == pa.int64():
            if self.nanos == "long" and values.type.unit == "ns":
                return values.cast(kind)
            return self._cast_time(values, pa.duration("us")).cast(kind)
        if self.nanos != "floor" or values.type.unit != "ns":
            return values.cast(kind, safe=True)
        numbers = values.cast(pa.int64())
        micros = pc.divide(numbers, 1000)  # rounds towards 0, which moves times before 1970
        below = pc.less(numbers, pc.multiply(micros, 1000))
        return pc.subtract(micros, below.cast(pa.int64())).cast(kind)

    def _cast_map(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        keys = self._cast(values.keys, kind.key_type)
        items = self._cast(values.items, kind.item_type)
        return pa.MapArray.from_arrays(values.offsets, keys, items, kind, mask=values.is_null())


def _with_items(values: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
    return pa.ListArray.from_arrays(values.offsets, convert(values.values), mask=values.is_null())


def _unsliced(values: pa.Array) -> pa.Array:
    """Return an array that begins its buffers: parts of others cannot be put together anew."""
    return values if not values.offset else pa.concat_arrays([values.slice(0, 0), values])
