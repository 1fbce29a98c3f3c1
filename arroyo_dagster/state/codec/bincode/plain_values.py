"""JSON values, in the form in which entries are printed, to values of a described type.

The inverse of `arroyo_dagster.state.codec.plain.plain_value`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.shapes import type_name
from arroyo_dagster.state.codec.iso_times import parse_moment_nanos
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

_NANOS = 10**9
_INFINITIES = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def typed_value(plain: Any, described: Type) -> Any:
    """Convert JSON values to a value that a codec of this type encodes.

    Raises:
        InputError: they are no value of the type; names the expected form.
    """
    match described:
        case OptionOf(item=item):
            return None if plain is None else typed_value(plain, item)
        case Primitive(name=name):
            return _primitive(plain, name)
        case TimeOf():
            return _time(plain, described)
        case ListOf(item=item, as_tuple=as_tuple):
            items = [typed_value(part, item) for part in _list(plain, described)]
            return tuple(items) if as_tuple else items
        case ArrayOf(item=item):
            return [typed_value(part, item) for part in _list(plain, described)]
        case SetOf(item=item, frozen=frozen):
            members = {typed_value(part, item) for part in _list(plain, described)}
            return frozenset(members) if frozen else members
        case TupleOf(items=items):
            return tuple(
                typed_value(part, kind)
                for part, kind in zip(_list(plain, described, len(items)), items, strict=True)
            )
        case MapOf():
            return _map(plain, described)
        case StructOf():
            return _struct(plain, described)
        case EnumOf():
            return _variant(plain, described)


def _wrong(plain: Any, described: Type, expected: str) -> InputError:
    return InputError(
        f"not a value of {type_name(described)}: {plain!r:.80}",
        expected=expected,
        next_step="give the whole value in the form in which `arroyo-state rows` prints it",
    )


def _list(plain: Any, described: Type, length: int | None = None) -> list[Any]:
    if not isinstance(plain, list) or length not in (None, len(plain)):
        raise _wrong(plain, described, f"a list{'' if length is None else f' of {length}'}")
    return plain


def _primitive(plain: Any, name: str) -> Any:
    described = Primitive(name)
    if name == "unit":
        return None
    if name == "bool":
        fits = isinstance(plain, bool)
    elif name in ("string", "char"):
        fits = isinstance(plain, str)
    elif name in ("f32", "f64"):
        if isinstance(plain, str) and plain in _INFINITIES:
            return _INFINITIES[plain]
        if not isinstance(plain, int | float) or isinstance(plain, bool):
            raise _wrong(plain, described, "a number")
        return float(plain)
    elif name == "bytes":
        try:
            return bytes.fromhex(plain)
        except (TypeError, ValueError):
            raise _wrong(plain, described, "bytes in hex") from None
    else:
        fits = isinstance(plain, int) and not isinstance(plain, bool)
    if not fits:
        raise _wrong(plain, described, name)
    return plain


def _time(plain: Any, described: TimeOf) -> Any:
    if not isinstance(plain, str):
        raise _wrong(plain, described, "a text")
    if described.name == "system_time":
        nanos = parse_moment_nanos(plain)
    else:
        try:
            seconds = Decimal(plain.removesuffix("s"))
            if not abs(seconds) < 2**64:  # nor is NaN
                raise InvalidOperation
            nanos = int(seconds * _NANOS)
        except InvalidOperation:
            raise _wrong(plain, described, "seconds, for example 1.5s") from None
    if described.as_nanos:
        return nanos
    whole = dt.timedelta(microseconds=nanos // 1000)
    if described.name == "duration":
        return whole
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + whole


def _map(plain: Any, described: MapOf) -> dict[Any, Any]:
    pairs = plain.items() if isinstance(plain, Mapping) else plain
    if not isinstance(plain, Mapping | list) or any(len(pair) != 2 for pair in pairs):
        raise _wrong(plain, described, "an object, or a list of pairs")
    return {
        typed_value(key, described.key): typed_value(value, described.value) for key, value in pairs
    }


def _struct(plain: Any, described: StructOf) -> Any:
    names = [field.name for field in described.fields]
    if not isinstance(plain, Mapping) or set(plain) != set(names):
        raise _wrong(plain, described, f"an object with exactly {', '.join(names) or 'no fields'}")
    values = {field.name: typed_value(plain[field.name], field.type) for field in described.fields}
    return values if described.python is None else described.python(**values)


def _variant(plain: Any, described: EnumOf) -> Any:
    name = plain
    if isinstance(plain, Mapping) and len(plain) == 1:
        ((name, payload),) = plain.items()
    else:
        payload = None
    for variant in described.variants:
        if variant.name != name:
            continue
        if described.python is not None:
            return described.python[variant.name]
        if variant.payload == UNIT:
            return variant.name
        if isinstance(variant.payload, StructOf):
            value = typed_value({} if payload is None else payload, variant.payload)
            return value if variant.payload.python is not None else (variant.name, value)
        return (variant.name, typed_value(payload, variant.payload))
    raise _wrong(plain, described, " or ".join(v.name for v in described.variants))
