"""Properties of types that all bincode modules use: sizes, parts, valid values.

Source: the crate bincode 2, `config::standard()`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.types import (
    MAX_DEPTH,
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
    to_json,
)

MAX_EMPTY_ITEMS = 64
"""The maximum number of items without bytes in a collection.

No bytes back their count, and nested collections multiply it. With this limit a megabyte of bytes
decodes to at most a few hundred megabytes of values.
"""

Encoder: TypeAlias = Callable[[Any], bytes]
Decoder: TypeAlias = Callable[[bytes, int], tuple[Any, int]]


class Broken(Exception):
    """The bytes are no value of the type; `offset` is the position of the error."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


def type_name(described: Type) -> str:
    """Return a short name of a type for messages."""
    if isinstance(described, StructOf | EnumOf):
        return described.name
    form = to_json(described)
    return form if isinstance(form, str) else f"{form!r:.80}"


def named_value(value: object) -> str:
    """Return the type and the start of a value, for messages."""
    return f"{type(value).__name__} {value!r:.60}"


# --- sizes ---------------------------------------------------------------------------------------


def item_types(described: Type) -> tuple[Type, ...]:
    """Return the types directly within a type."""
    match described:
        case OptionOf(item=item) | ListOf(item=item) | SetOf(item=item) | ArrayOf(item=item):
            return (item,)
        case MapOf(key=key, value=value):
            return (key, value)
        case TupleOf(items=items):
            return items
        case StructOf(fields=fields):
            return tuple(field.type for field in fields)
        case EnumOf(variants=variants):
            return tuple(variant.payload for variant in variants)
        case _:
            return ()


def depth_of(described: Type) -> int:
    """Return the nesting depth of a type; deeper than `MAX_DEPTH` it is not exact."""
    deepest, level = 0, [described]
    while level and deepest <= MAX_DEPTH + 1:
        deepest += 1
        level = [part for outer in level for part in item_types(outer)]
    return deepest - 1


def min_size(described: Type) -> int:
    """Return the minimum number of bytes of a value."""
    match described:
        case Primitive(name=name):
            return {"unit": 0, "f32": 4, "f64": 8}.get(name, 1)
        case TimeOf():
            return 2
        case ArrayOf(item=item, length=length):
            return length * min_size(item)
        case TupleOf() | StructOf():
            return sum(map(min_size, item_types(described)))
        case EnumOf():
            return 1 + min(map(min_size, item_types(described)))
        case _:
            return 1


def empty_items(described: Type) -> int:
    """Return the maximum number of values that a value without bytes consists of."""
    match described:
        case ArrayOf(item=item, length=length):
            return max(1, length * empty_items(item))
        case TupleOf() | StructOf():
            return max(1, sum(map(empty_items, item_types(described))))
        case _:
            return 1


# --- values of structs and enums -----------------------------------------------------------------


def key_pairs(value: Any) -> Any:
    """Convert a frozenset of pairs to a dict; within keys it represents a dict."""
    if not isinstance(value, frozenset):
        return value
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in value):
        raise InputError("expected a frozenset of pairs", found=named_value(value))
    pairs = dict(value)
    if len(pairs) != len(value):
        raise InputError("two pairs have the same name", found=named_value(value))
    return pairs


def struct_values(value: Any, described: StructOf) -> tuple[Any, ...]:
    """Return the values of a struct's fields in order.

    Raises:
        InputError: the value is no instance of the struct's class. If the struct has none: it is no
            dict with exactly its fields, nor a frozenset of their pairs, as within a key.
    """
    names = [field.name for field in described.fields]
    if described.python is not None:
        # A subclass may have additional fields, which would be lost.
        if type(value) is not described.python:
            raise InputError(f"expected exactly a {described.name}", found=named_value(value))
        return tuple(getattr(value, name) for name in names)
    fields = key_pairs(value)
    if not isinstance(fields, Mapping) or set(fields) != set(names):
        raise InputError(
            f"expected a dict with the fields {', '.join(names) or '(none)'}",
            found=named_value(value),
        )
    return tuple(fields[name] for name in names)


def _member_name(value: Any, cls: type[enum.Enum]) -> str:
    if not isinstance(value, cls):
        raise InputError(f"expected a member of {cls.__name__}", found=named_value(value))
    return value.name


def _name_and_payload(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, payload),) = value.items()
        return name, payload
    if isinstance(value, tuple) and len(value) == 2:
        return value
    return value, None


def pick_variant(value: Any, described: EnumOf) -> tuple[int, Any]:
    """Return the index of the variant that an enum value is, and its payload.

    Raises:
        InputError: the value is none of the enum's variants.
    """
    if described.python is not None:
        value = _member_name(value, described.python)
    name, payload = _name_and_payload(value)
    for index, variant in enumerate(described.variants):
        cls = variant.payload.python if isinstance(variant.payload, StructOf) else None
        if cls is not None:
            if type(value) is cls:
                return index, value
        elif variant.name == name and (variant.payload == UNIT) == (name is value):
            return index, payload
    raise InputError(
        f"expected one of the variants of {described.name}: "
        + ", ".join(variant.name for variant in described.variants),
        found=named_value(value),
    )
