"""Bincode values of any type as Arrow columns, for queries.

Unlike `Codec.column_type`, every type has a column: lists, sets and arrays are lists, maps are
maps, enums with payloads and numbers of 128 bits are JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for
from arroyo_dagster.state.codec.bincode.shapes import pick_variant, struct_values
from arroyo_dagster.state.codec.iso_times import nanos_of
from arroyo_dagster.state.codec.plain import plain_value
from arroyo_dagster.state.model.types import (
    UNIT,
    ArrayOf,
    EnumOf,
    ListOf,
    MapOf,
    OptionOf,
    Primitive,
    SetOf,
    StructOf,
    TimeOf,
    TupleOf,
    Type,
)

_TIMES = {"duration": pa.duration("ns"), "system_time": pa.timestamp("ns", tz="UTC")}


def arrow_type(described: Type) -> pa.DataType:
    """Return the Arrow type of a column of such values.

    Times are nanoseconds; a tuple is a struct with the fields `0`, `1`…; an enum without payloads
    is the text of its variant.
    """
    match described:
        case TimeOf(name=name):
            return _TIMES[name]
        case OptionOf(item=item):
            return arrow_type(item)
        case ListOf(item=item) | SetOf(item=item) | ArrayOf(item=item):
            return pa.list_(arrow_type(item))
        case MapOf(key=key, value=value):
            return pa.map_(arrow_type(key), arrow_type(value))
        case StructOf(fields=fields):
            return pa.struct([pa.field(f.name, arrow_type(f.type)) for f in fields])
        case TupleOf(items=items):
            return pa.struct([pa.field(str(i), arrow_type(part)) for i, part in enumerate(items)])
        case EnumOf():
            return pa.string()
        case _:
            kind = codec_for(described).column_type
            return pa.string() if kind is None else kind


def decode_to_arrow(data: pa.ChunkedArray, described: Type) -> pa.ChunkedArray:
    """Decode a column of bincode.

    Args:
        data: binary or large binary, without nulls.

    Raises:
        FormatError: a value does not match the type; the facts contain the row.
    """
    codec, kind = codec_for(described), arrow_type(described)
    if codec.column_type is not None:
        return codec.decode_column(data).cast(kind)
    chunks = [_decoded(codec, chunk, described, kind) for chunk in data.chunks]
    return pa.chunked_array(chunks, kind)


def _decoded(codec: Codec[Any], chunk: pa.Array, described: Type, kind: pa.DataType) -> pa.Array:
    values = codec.decode_many(chunk.to_pylist())
    return pa.array([_value(value, described) for value in values], kind)


def _value(value: Any, described: Type) -> Any:
    match described:
        case OptionOf(item=item):
            return None if value is None else _value(value, item)
        case ListOf(item=item) | SetOf(item=item) | ArrayOf(item=item):
            return [_value(v, item) for v in value]
        case MapOf(key=key, value=item):
            # A map within a key is a frozenset of pairs.
            pairs = value.items() if isinstance(value, Mapping) else value
            return [(_value(k, key), _value(v, item)) for k, v in pairs]
        case StructOf(fields=fields):
            values = struct_values(value, described)
            return {f.name: _value(v, f.type) for f, v in zip(fields, values, strict=True)}
        case TupleOf(items=items):
            return {
                str(i): _value(v, kind)
                for i, (v, kind) in enumerate(zip(value, items, strict=True))
            }
        case TimeOf():
            return nanos_of(value)
        case EnumOf():
            return _variant(value, described)
        case Primitive(name="u128" | "i128"):
            return str(value)
        case _:
            return value


def _variant(value: Any, described: EnumOf) -> str:
    index, _ = pick_variant(value, described)
    if all(variant.payload == UNIT for variant in described.variants):
        return described.variants[index].name
    return json.dumps(plain_value(value, described))
