"""Locating the nested value that cannot be encoded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.encoding import encoder_of
from arroyo_dagster.state.codec.bincode.shapes import (
    key_pairs,
    named_value,
    pick_variant,
    struct_values,
    type_name,
)
from arroyo_dagster.state.model.types import (
    ArrayOf,
    EnumOf,
    ListOf,
    MapOf,
    OptionOf,
    SetOf,
    StructOf,
    TupleOf,
    Type,
)

__all__ = ["ENCODE_ERRORS", "locate"]

ENCODE_ERRORS = (InputError, TypeError, ValueError, AttributeError, KeyError)
_encoder_again = lru_cache(maxsize=256)(encoder_of)


class _Nested(NamedTuple):
    """A nested value: the suffix of its path, its type, and whether it is part of a key."""

    suffix: str
    type: Type
    value: Any
    in_key: bool


def locate(described: Type, value: Any, error: Exception) -> InputError:
    """Return the error for the innermost value that cannot be encoded, with its path."""
    path, part = "", _Nested("", described, value, False)
    while (step := _wrong_nested(part)) is not None:
        part, error = step
        path += part.suffix
    if isinstance(error, InputError):
        expected, found = error.message, error.facts.get("found")
    else:
        expected, found = f"it cannot be encoded: {error}", named_value(part.value)
    return InputError(
        f"a value does not fit its type: {expected}",
        type=type_name(described),
        at=path or None,
        found=found,
    )


def _wrong_nested(whole: _Nested) -> tuple[_Nested, Exception] | None:
    try:
        for part in _inside(whole):
            try:
                _encoder_again(part.type, part.in_key)(part.value)
            except ENCODE_ERRORS as error:
                return part, error
    except (TypeError, ValueError, AttributeError):
        # The value does not even have nested values of its type: it is itself the error.
        pass
    return None


def _inside(whole: _Nested) -> Iterator[_Nested]:
    _, described, value, in_key = whole
    match described:
        case OptionOf(item=item) if value is not None:
            yield _Nested("", item, value, in_key)
        case ListOf(item=item) | ArrayOf(item=item) if isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                yield _Nested(f"[{index}]", item, inner, in_key)
        case SetOf(item=item) if isinstance(value, set | frozenset):
            for inner in value:
                yield _Nested(f"[{inner!r:.40}]", item, inner, True)
        case MapOf(key=key, value=item):
            for name, inner in key_pairs(value).items():
                yield _Nested(f"[key {name!r:.40}]", key, name, True)
                yield _Nested(f"[{name!r:.40}]", item, inner, in_key)
        case TupleOf(items=items) if isinstance(value, tuple):
            for index, (item, inner) in enumerate(zip(items, value, strict=True)):
                yield _Nested(f"[{index}]", item, inner, in_key)
        case StructOf(fields=fields):
            for field, inner in zip(fields, struct_values(value, described), strict=True):
                yield _Nested(f".{field.name}", field.type, inner, in_key)
        case EnumOf(variants=variants):
            index, payload = pick_variant(value, described)
            yield _Nested(f"<{variants[index].name}>", variants[index].payload, payload, in_key)
