"""A table's Arrow schema in memory and as stored: conversions from and to the JSON in metadata.

Source: crates/arroyo-rpc/src/df.rs, `ArroyoSchema`; arrow-schema 55.2 with its feature `serde`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.tables import (
    GENERATION_COLUMN,
    KEY_HASH_COLUMN,
    NOTE_PREFIX,
    OPERATION_COLUMN,
    TIMESTAMP_COLUMN,
    ExpiringTimeKeyConfig,
    StoredSchema,
)

TIMESTAMP_TYPE = pa.timestamp("ns")
_KEY_HASH = pa.field(KEY_HASH_COLUMN, pa.uint64(), nullable=False)
_OPERATION = pa.field(OPERATION_COLUMN, pa.binary(), nullable=False)
_GENERATION = pa.field(GENERATION_COLUMN, pa.uint64(), nullable=False)

_SIMPLE: dict[str, pa.DataType] = {
    "Null": pa.null(),
    "Boolean": pa.bool_(),
    "Int8": pa.int8(),
    "Int16": pa.int16(),
    "Int32": pa.int32(),
    "Int64": pa.int64(),
    "UInt8": pa.uint8(),
    "UInt16": pa.uint16(),
    "UInt32": pa.uint32(),
    "UInt64": pa.uint64(),
    "Float16": pa.float16(),
    "Float32": pa.float32(),
    "Float64": pa.float64(),
    "Utf8": pa.string(),
    "LargeUtf8": pa.large_string(),
    "Utf8View": pa.string_view(),
    "Binary": pa.binary(),
    "LargeBinary": pa.large_binary(),
    "BinaryView": pa.binary_view(),
    "Date32": pa.date32(),
    "Date64": pa.date64(),
}
_SIMPLE_NAMES = {kind: name for name, kind in _SIMPLE.items()}
_UNITS = {"Second": "s", "Millisecond": "ms", "Microsecond": "us", "Nanosecond": "ns"}
_UNIT_NAMES = {short: name for name, short in _UNITS.items()}
_DECIMALS: dict[str, Callable[[int, int], pa.DataType]] = {
    "Decimal128": pa.decimal128,
    "Decimal256": pa.decimal256,
}
_LIST_OF: dict[str, Callable[[pa.Field], pa.DataType]] = {
    "List": pa.list_,
    "LargeList": pa.large_list,
    "ListView": pa.list_view,
    "LargeListView": pa.large_list_view,
}
_LISTS: dict[str, Callable[[pa.DataType], bool]] = {
    "List": pa.types.is_list,
    "LargeList": pa.types.is_large_list,
    "ListView": pa.types.is_list_view,
    "LargeListView": pa.types.is_large_list_view,
}


def stored_schema(
    schema: pa.Schema,
    *,
    keys: Sequence[str] | None,
    routing_keys: Sequence[str] | None = None,
) -> StoredSchema:
    """Return the memory schema of an expiring table in the form of its configuration.

    Args:
        schema: the user columns, including `_timestamp` (timestamp in ns, without time zone).
        keys: names of the storage key columns; empty = keyed by the empty set, None = no keys.
        routing_keys: names of the columns to hash, if they are not the storage keys.

    Raises:
        InputError: `_timestamp` is missing or of another type, or a key is no column.
    """
    index = schema.get_field_index(TIMESTAMP_COLUMN)
    if index < 0 or schema.field(index).type != TIMESTAMP_TYPE:
        raise InputError(
            f"an expiring table needs a column {TIMESTAMP_COLUMN} of type {TIMESTAMP_TYPE}",
            columns=[f"{field.name}: {field.type}" for field in schema],
            next_step="add it, holding the event time of each row",
        )
    return StoredSchema(
        arrow_schema=schema_to_json(schema),
        timestamp_index=index,
        key_indices=None if keys is None else _indices(schema, keys),
        routing_key_indices=None if routing_keys is None else _indices(schema, routing_keys),
    )


def _indices(schema: pa.Schema, names: Sequence[str]) -> tuple[int, ...]:
    indices = tuple(schema.get_field_index(name) for name in names)
    if -1 in indices:
        raise InputError(
            f"key {names[indices.index(-1)]!r} is not exactly one column of the schema",
            columns=schema.names,
        )
    return indices


def memory_schema(config: ExpiringTimeKeyConfig) -> pa.Schema:
    """Return the schema that operators see: the stored one, plus `_generation` if generational.

    Raises:
        FormatError: it is no Arrow schema, or has not the columns that the configuration names.
    """
    stored = config.schema
    schema = _without_notes(schema_from_json(stored.arrow_schema))
    named = (stored.timestamp_index, *(stored.key_indices or ()), *stored.hashed_indices)
    if max(named) >= len(schema):
        raise FormatError(
            f"the configuration of a table names column {max(named)}, and its schema has "
            f"{len(schema)} columns",
            table=config.table,
        )
    return schema.append(_GENERATION) if config.generational else schema


def _without_notes(schema: pa.Schema) -> pa.Schema:
    """Remove this package's notes on columns, which operators and files do not contain."""
    fields = [field.with_metadata(_user_metadata(field.metadata)) for field in schema]
    return pa.schema(fields, metadata=_user_metadata(schema.metadata))


def _user_metadata(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    rest = {k: v for k, v in (metadata or {}).items() if not k.startswith(NOTE_PREFIX.encode())}
    return rest or None


def file_schema(config: ExpiringTimeKeyConfig) -> pa.Schema:
    """Return the schema of a data file: the memory schema, then `_key_hash` and `_operation`."""
    return memory_schema(config).append(_KEY_HASH).append(_OPERATION)


def schema_to_json(schema: pa.Schema) -> str:
    """Return the compact JSON of a schema, byte for byte as Arroyo writes it.

    Raises:
        InputError: Arroyo has no form for a type.
    """
    return json.dumps(
        {"fields": [_field_json(field) for field in schema], "metadata": _texts(schema.metadata)},
        separators=(",", ":"),
        ensure_ascii=False,
    )


def schema_from_json(text: str) -> pa.Schema:
    """Parse the JSON form of a schema. Raises FormatError: the text is none."""
    try:
        value = json.loads(text)
        fields = [_field(field) for field in value["fields"]]
        return pa.schema(fields, metadata=value.get("metadata") or None)
    except FormatError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        RecursionError,
        pa.ArrowException,
    ) as error:
        raise FormatError(
            f"not the JSON form of an Arrow schema ({type(error).__name__}: {error})",
            schema=text[:200],
        ) from error


def _field_json(field: pa.Field) -> dict[str, Any]:
    ordered = pa.types.is_dictionary(field.type) and field.type.ordered
    return {
        "name": field.name,
        "data_type": _type_json(field.type),
        "nullable": field.nullable,
        "dict_id": 0,
        "dict_is_ordered": ordered,
        "metadata": _texts(field.metadata),
    }


def _texts(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in sorted((metadata or {}).items())}


def _type_json(kind: pa.DataType) -> Any:
    simple = _SIMPLE_NAMES.get(kind)
    if simple is not None:
        return simple
    types = pa.types
    if types.is_timestamp(kind):
        return {"Timestamp": [_UNIT_NAMES[kind.unit], kind.tz]}
    if types.is_time32(kind):
        return {"Time32": _UNIT_NAMES[kind.unit]}
    if types.is_time64(kind):
        return {"Time64": _UNIT_NAMES[kind.unit]}
    if types.is_duration(kind):
        return {"Duration": _UNIT_NAMES[kind.unit]}
    if types.is_fixed_size_binary(kind):
        return {"FixedSizeBinary": kind.byte_width}
    if types.is_decimal128(kind):
        return {"Decimal128": [kind.precision, kind.scale]}
    if types.is_decimal256(kind):
        return {"Decimal256": [kind.precision, kind.scale]}
    unit = interval_unit(kind)
    return _nested_json(kind) if unit is None else {"Interval": unit}


def _nested_json(kind: pa.DataType) -> Any:
    types = pa.types
    for name, is_one in _LISTS.items():
        if is_one(kind):
            return {name: _field_json(kind.value_field)}
    if types.is_fixed_size_list(kind):
        return {"FixedSizeList": [_field_json(kind.value_field), kind.list_size]}
    if types.is_struct(kind):
        return {"Struct": [_field_json(kind.field(i)) for i in range(kind.num_fields)]}
    if types.is_map(kind):
        entries = pa.struct([kind.key_field, kind.item_field])
        entry = _field_json(pa.field("entries", entries, nullable=False))
        return {"Map": [entry, kind.keys_sorted]}
    if types.is_dictionary(kind):
        return {"Dictionary": [_type_json(kind.index_type), _type_json(kind.value_type)]}
    if types.is_union(kind):
        members = (_field_json(kind.field(i)) for i in range(kind.num_fields))
        tagged = [list(pair) for pair in zip(kind.type_codes, members, strict=True)]
        return {"Union": [tagged, kind.mode.capitalize()]}
    if types.is_run_end_encoded(kind):
        ends = pa.field("run_ends", kind.run_end_type, nullable=False)
        values = pa.field("values", kind.value_type)
        return {"RunEndEncoded": [_field_json(ends), _field_json(values)]}
    raise InputError(
        f"Arrow type {kind} has no stored form",
        next_step="cast the column to another type before it reaches the table",
    )


def _field(value: dict[str, Any]) -> pa.Field:
    kind = _type(value["data_type"], ordered=bool(value["dict_is_ordered"]))
    return pa.field(
        value["name"], kind, nullable=value["nullable"], metadata=value["metadata"] or None
    )


def _type(value: Any, *, ordered: bool = False) -> pa.DataType:
    if isinstance(value, str):
        if value not in _SIMPLE:
            raise FormatError(f"unknown Arrow type {value!r}")
        return _SIMPLE[value]
    ((name, inner),) = value.items()
    if name in _DECIMALS:
        return _DECIMALS[name](*inner)
    if name == "Timestamp":
        return pa.timestamp(_UNITS[inner[0]], tz=inner[1])
    if name == "Time32":
        return pa.time32(_UNITS[inner])
    if name == "Time64":
        return pa.time64(_UNITS[inner])
    if name == "Duration":
        return pa.duration(_UNITS[inner])
    interval = interval_type(inner) if name == "Interval" else None
    if interval is not None:
        return interval
    if name == "FixedSizeBinary":
        return pa.binary(inner)
    if name in _LIST_OF:
        return _LIST_OF[name](_field(inner))
    if name == "FixedSizeList":
        return pa.list_(_field(inner[0]), inner[1])
    if name == "Struct":
        return pa.struct([_field(field) for field in inner])
    if name == "Map":
        entries = _field(inner[0]).type
        return pa.map_(entries.field(0), entries.field(1), keys_sorted=inner[1])
    if name == "Dictionary":
        return pa.dictionary(_type(inner[0]), _type(inner[1]), ordered=ordered)
    if name == "Union":
        members = [_field(field) for _, field in inner[0]]
        return pa.union(members, inner[1].lower(), type_codes=[code for code, _ in inner[0]])
    if name == "RunEndEncoded":
        return pa.run_end_encoded(_field(inner[0]).type, _field(inner[1]).type)
    raise FormatError(f"Arrow type {re.sub(r'[^A-Za-z0-9]', '', name)} cannot be read here")


# ---- views ---------------------------------------------------------------------------------------


def without_views(schema: pa.Schema) -> pa.Schema:
    """Return a schema with plain types instead of views (`string_view`, `list_view`), at any depth.

    State files have none: Parquet does not store them, and Arroyo does not know them.
    """
    fields = [_field_without_views(field) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def plain_rows_of(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with the types of `without_views`."""
    schema = without_views(batch.schema)
    if schema.equals(batch.schema):
        return batch
    columns = [
        _plain_array(column, field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_array(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert values; Arrow's own cast of lists from views makes invalid arrays (release 26)."""
    types = pa.types
    if values.type.equals(kind):
        return values
    if types.is_list(kind) or types.is_large_list(kind):
        is_large = types.is_large_list(kind)
        import pyarrow.compute as pc  # loading it takes longer than reading a schema

        lengths = pc.fill_null(pc.list_value_length(values), 0)
        ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
        offsets = pa.array(np.append(0, ends), pa.int64() if is_large else pa.int32())
        array = pa.LargeListArray if is_large else pa.ListArray
        items = _plain_array(values.flatten(), kind.value_type)
        return array.from_arrays(offsets, items, type=kind, mask=values.is_null())
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        children = [_plain_array(values.field(i), field.type) for i, field in enumerate(fields)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=values.is_null())
    return values.cast(kind)


def _field_without_views(field: pa.Field) -> pa.Field:
    return field.with_type(_without_views(field.type))


def _without_views(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_list_view(kind) or types.is_list(kind):
        return pa.list_(_field_without_views(kind.value_field))
    if types.is_large_list_view(kind) or types.is_large_list(kind):
        return pa.large_list(_field_without_views(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_field_without_views(kind.value_field), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([_field_without_views(kind.field(i)) for i in range(kind.num_fields)])
    if types.is_map(kind):
        items = (_field_without_views(kind.key_field), _field_without_views(kind.item_field))
        return pa.map_(*items, keys_sorted=kind.keys_sorted)
    if types.is_dictionary(kind):
        values = _without_views(kind.value_type)
        return pa.dictionary(kind.index_type, values, kind.ordered)
    return kind


# ---- interval types ------------------------------------------------------------------------------
# Two Arrow types that pyarrow supports but cannot construct: intervals of months, and of days.
#
# They are imported through Arrow's C data interface, as from any other library.

_FORMATS = {"YearMonth": b"tiM", "DayTime": b"tiD"}
"""By the unit's name in the JSON form of a schema."""


class _CSchema(ctypes.Structure):
    """`struct ArrowSchema` of the C data interface."""


_Release = ctypes.CFUNCTYPE(None, ctypes.POINTER(_CSchema))
_CSchema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_char_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.c_void_p),
    ("dictionary", ctypes.c_void_p),
    ("release", _Release),
    ("private_data", ctypes.c_void_p),
]


def _take_out(schema: Any) -> None:
    # Releasing a structure means clearing its callback; no memory was allocated for it.
    schema.contents.release = _Release()


_RELEASE = _Release(_take_out)


@functools.cache
def interval_type(unit: str) -> pa.DataType | None:
    """Return the interval type of a unit (`YearMonth`, `DayTime`, `MonthDayNano`), or None."""
    if unit == "MonthDayNano":
        return pa.month_day_nano_interval()
    if unit not in _FORMATS:
        return None
    schema = _CSchema(format=_FORMATS[unit], name=b"", release=_RELEASE)
    return pa.DataType._import_from_c(ctypes.addressof(schema))


def interval_unit(kind: pa.DataType) -> str | None:
    """Return the unit of an interval type; None for any other type."""
    for unit in ("MonthDayNano", *_FORMATS):
        if kind == interval_type(unit):
            return unit
    return None
