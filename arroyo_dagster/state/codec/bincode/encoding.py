"""Encoders of bincode, compiled once per type into nested functions, for millions of keys.

Source: the crate bincode 2, `config::standard()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, call
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.scalars import primitive_encoder, varint
from arroyo_dagster.state.codec.bincode.shapes import (
    MAX_EMPTY_ITEMS,
    Encoder,
    key_pairs,
    min_size,
    named_value,
    pick_variant,
    struct_values,
)
from arroyo_dagster.state.codec.bincode.times import time_encoder
from arroyo_dagster.state.model.types import (
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


def encoder_of(described: Type, in_key: bool) -> Encoder:
    """Compile an encoder; `in_key`: whether its values are hashable, as parts of keys."""
    match described:
        case Primitive(name=name):
            return primitive_encoder(name)
        case TimeOf():
            return time_encoder(described)
        case OptionOf():
            return _option_encoder(described, in_key)
        case ListOf() | ArrayOf():
            return _items_encoder(described, in_key)
        case SetOf():
            return _set_encoder(described)
        case MapOf():
            return _map_encoder(described, in_key)
        case TupleOf():
            return _tuple_encoder(described, in_key)
        case StructOf():
            return _struct_encoder(described, in_key)
        case EnumOf():
            return _enum_encoder(described, in_key)


def _items_encoder(described: ListOf | ArrayOf, in_key: bool) -> Encoder:
    encode_item = encoder_of(described.item, in_key)
    length = described.length if isinstance(described, ArrayOf) else None
    empty = length is None and min_size(described.item) == 0

    def encode_items(value: Any) -> bytes:
        if not isinstance(value, list | tuple):
            raise InputError("expected a list", found=named_value(value))
        if length is None:
            if empty and len(value) > MAX_EMPTY_ITEMS:
                raise InputError(
                    f"expected at most {MAX_EMPTY_ITEMS} items that take no bytes",
                    found=len(value),
                )
            return varint(len(value)) + b"".join(map(encode_item, value))
        if len(value) != length:
            raise InputError(f"expected exactly {length} items", found=len(value))
        return b"".join(map(encode_item, value))

    return encode_items


def _set_encoder(described: SetOf) -> Encoder:
    encode_item = encoder_of(described.item, True)

    def encode_set(value: Any) -> bytes:
        if not isinstance(value, set | frozenset):
            raise InputError("expected a set", found=named_value(value))
        items = sorted(map(encode_item, value))
        if len(set(items)) != len(items):
            raise InputError("two items of a set have the same bytes", found=named_value(value))
        return varint(len(items)) + b"".join(items)

    return encode_set


def _map_encoder(described: MapOf, in_key: bool) -> Encoder:
    encode_key = encoder_of(described.key, True)
    encode_value = encoder_of(described.value, in_key)

    def encode_map(value: Any) -> bytes:
        pairs = key_pairs(value) if in_key else value
        if not isinstance(pairs, Mapping):
            raise InputError("expected a dict", found=named_value(value))
        entries = {encode_key(key): encode_value(item) for key, item in pairs.items()}
        if len(entries) != len(pairs):
            raise InputError("two keys of a map have the same bytes", found=named_value(value))
        items = sorted(entries.items()) if in_key else entries.items()
        return varint(len(entries)) + b"".join(map(b"".join, items))

    return encode_map


def _option_encoder(described: OptionOf, in_key: bool) -> Encoder:
    encode_item = encoder_of(described.item, in_key)

    def encode_option(value: Any) -> bytes:
        return b"\x00" if value is None else b"\x01" + encode_item(value)

    return encode_option


def _tuple_encoder(described: TupleOf, in_key: bool) -> Encoder:
    encoders = [encoder_of(item, in_key) for item in described.items]
    count = len(encoders)

    def encode_tuple(value: Any) -> bytes:
        if not isinstance(value, tuple) or len(value) != count:
            raise InputError(f"expected a tuple of {count}", found=named_value(value))
        return b"".join(map(call, encoders, value))

    return encode_tuple


def _struct_encoder(described: StructOf, in_key: bool) -> Encoder:
    encoders = [encoder_of(field.type, in_key) for field in described.fields]
    cls, names = described.python, [field.name for field in described.fields]
    if cls is None or len(names) < 2:
        return lambda value: b"".join(map(call, encoders, struct_values(value, described)))
    get = attrgetter(*names)
    join = _few_joined(encoders, get) or (lambda value: b"".join(map(call, encoders, get(value))))

    def encode_struct(value: Any) -> bytes:
        if type(value) is not cls:
            struct_values(value, described)
        return join(value)

    return encode_struct


def _few_joined(encoders: list[Encoder], get: Callable[[Any], Any]) -> Encoder | None:
    """Return an encoder of a small struct without a loop, which halves the time."""

    def encode_two(value: Any) -> bytes:
        a, b = get(value)
        return first(a) + second(b)

    def encode_three(value: Any) -> bytes:
        a, b, c = get(value)
        return first(a) + second(b) + third(c)

    def encode_four(value: Any) -> bytes:
        a, b, c, d = get(value)
        return first(a) + second(b) + third(c) + fourth(d)

    first, second, third, fourth = (*encoders, *encoders, *encoders, *encoders)[:4]
    return {2: encode_two, 3: encode_three, 4: encode_four}.get(len(encoders))


def _enum_encoder(described: EnumOf, in_key: bool) -> Encoder:
    encoders = [encoder_of(variant.payload, in_key) for variant in described.variants]

    def encode_enum(value: Any) -> bytes:
        index, payload = pick_variant(value, described)
        return varint(index) + encoders[index](payload)

    return encode_enum
