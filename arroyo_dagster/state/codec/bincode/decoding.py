"""Decoders of bincode, compiled once per type; memory is allocated only for bytes that exist.

Source: the crate bincode 2, `config::standard()`.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.scalars import (
    check_int,
    decode_length,
    primitive_decoder,
    varint,
    varint_decoder,
)
from arroyo_dagster.state.codec.bincode.shapes import (
    MAX_EMPTY_ITEMS,
    Broken,
    Decoder,
    Encoder,
    empty_items,
    min_size,
    named_value,
)
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


class Reading(NamedTuple):
    """The options of a decoder.

    Attributes:
        in_key: whether decoded values must be hashable, because they are keys or parts of keys.
        lenient: whether the last of two equal keys of a map is taken, as in Arroyo.
    """

    in_key: bool = False
    lenient: bool = False

    @property
    def as_key(self) -> Reading:
        """The same options within a key."""
        return Reading(True, self.lenient)


def decoder_of(described: Type, how: Reading) -> Decoder:
    """Compile a decoder."""
    match described:
        case Primitive(name=name):
            return primitive_decoder(name)
        case TimeOf():
            return time_decoder(described)
        case OptionOf():
            return _option_decoder(described, how)
        case ListOf():
            return _list_decoder(described, how)
        case ArrayOf():
            return _array_decoder(described, how)
        case SetOf():
            return _set_decoder(described, how)
        case MapOf():
            return _map_decoder(described, how)
        case TupleOf():
            return _tuple_decoder(described, how)
        case StructOf():
            return _struct_decoder(described, how)
        case EnumOf():
            return _enum_decoder(described, how)


def _counted(described: Type) -> Decoder:
    """Decode a length; refuse it before any allocation if the remaining bytes are too few."""
    smallest = min_size(described)
    most_empty = MAX_EMPTY_ITEMS // empty_items(described) if smallest == 0 else 0

    def decode_count(data: bytes, at: int) -> tuple[int, int]:
        count, end = decode_length(data, at)
        if smallest:
            if count * smallest > len(data) - end:
                raise Broken(f"{count} items are announced, {len(data) - end} bytes remain", at)
        elif count > most_empty:
            raise Broken(f"{count} items that take no bytes are announced", at)
        return count, end

    return decode_count


def _list_decoder(described: ListOf, how: Reading) -> Decoder:
    decode_count = _counted(described.item)
    decode_items = _run_decoder(described.item, how, described.as_tuple)

    def decode_list(data: bytes, at: int) -> tuple[Any, int]:
        count, at = decode_count(data, at)
        return decode_items(data, at, count)

    return decode_list


def _array_decoder(described: ArrayOf, how: Reading) -> Decoder:
    length, smallest = described.length, min_size(described)
    if smallest == 0 and empty_items(described) > MAX_EMPTY_ITEMS:
        raise InputError(
            f"an array may hold at most {MAX_EMPTY_ITEMS} items that take no bytes",
            length=length,
        )
    decode_items = _run_decoder(described.item, how)

    def decode_array(data: bytes, at: int) -> tuple[Any, int]:
        if smallest > len(data) - at:
            raise Broken(f"{length} items need {smallest} bytes, {len(data) - at} remain", at)
        return decode_items(data, at, length)

    return decode_array


def _run_decoder(
    item: Type, how: Reading, as_tuple: bool = False
) -> Callable[[bytes, int, int], tuple[Any, int]]:
    decode_item = decoder_of(item, how)
    hashable = how.in_key or as_tuple

    def decode_items(data: bytes, at: int, count: int) -> tuple[Any, int]:
        items = []
        for _ in range(count):
            value, at = decode_item(data, at)
            items.append(value)
        return (tuple(items) if hashable else items), at

    return decode_items


def _set_decoder(described: SetOf, how: Reading) -> Decoder:
    decode_count = _counted(described.item)
    decode_items = _run_decoder(described.item, how.as_key)

    def decode_set(data: bytes, at: int) -> tuple[Any, int]:
        start = at
        count, at = decode_count(data, at)
        items, at = decode_items(data, at, count)
        members = frozenset(items) if how.in_key or described.frozen else set(items)
        if len(members) != count and not how.lenient:
            raise Broken("an item of a set occurs twice", start)
        return members, at

    return decode_set


def _map_decoder(described: MapOf, how: Reading) -> Decoder:
    decode_count = _counted(TupleOf((described.key, described.value)))
    decode_key, decode_value = (
        decoder_of(described.key, how.as_key),
        decoder_of(described.value, how),
    )

    def decode_map(data: bytes, at: int) -> tuple[Any, int]:
        start = at
        count, at = decode_count(data, at)
        entries = {}
        for _ in range(count):
            key, at = decode_key(data, at)
            entries[key], at = decode_value(data, at)
        if len(entries) != count and not how.lenient:
            raise Broken("a key of a map occurs twice", start)
        return (frozenset(entries.items()) if how.in_key else entries), at

    return decode_map


def _option_decoder(described: OptionOf, how: Reading) -> Decoder:
    decode_item = decoder_of(described.item, how)

    def decode_option(data: bytes, at: int) -> tuple[Any, int]:
        tag = data[at]
        if tag == 0:
            return None, at + 1
        if tag == 1:
            return decode_item(data, at + 1)
        raise Broken(f"the byte {tag:#04x} begins no option", at)

    return decode_option


def _tuple_decoder(described: TupleOf, how: Reading) -> Decoder:
    decoders = [decoder_of(item, how) for item in described.items]

    def decode_tuple(data: bytes, at: int) -> tuple[Any, int]:
        values = []
        for decode_part in decoders:
            value, at = decode_part(data, at)
            values.append(value)
        return tuple(values), at

    return decode_tuple


def _struct_decoder(described: StructOf, how: Reading) -> Decoder:
    decoders = [decoder_of(field.type, how) for field in described.fields]
    build = _struct_builder(described, [field.name for field in described.fields], how)

    def decode_struct(data: bytes, start: int) -> tuple[Any, int]:
        values = []
        at = start
        for decode_part in decoders:
            value, at = decode_part(data, at)
            values.append(value)
        try:
            return build(*values), at
        except Exception as error:
            raise Broken(f"{described.name} refuses the values found: {error}", start) from error

    return decode_struct


def _struct_builder(described: StructOf, names: list[str], how: Reading) -> Callable[..., Any]:
    cls = described.python
    if cls is None:
        if how.in_key:
            return lambda *values: frozenset(zip(names, values, strict=True))
        return lambda *values: dict(zip(names, values, strict=True))
    if how.in_key and cls.__hash__ is None:
        raise InputError(
            f"the dataclass {described.name} is part of a key or a set, but cannot be hashed",
            next_step="declare it with @dataclass(frozen=True)",
        )
    if getattr(cls, "__match_args__", None) == tuple(names):
        return cls
    return lambda *values: cls(**dict(zip(names, values, strict=True)))


def _enum_decoder(described: EnumOf, how: Reading) -> Decoder:
    decode_u32 = varint_decoder("the place of a variant", 32)
    decoders = [
        _variant_decoder(
            described.python[variant.name] if described.python else variant.name,
            variant.payload,
            how,
        )
        for variant in described.variants
    ]

    def decode_enum(data: bytes, at: int) -> tuple[Any, int]:
        index, end = decode_u32(data, at)
        if index >= len(decoders):
            raise Broken(f"{described.name} has no variant {index}", at)
        return decoders[index](data, end)

    return decode_enum


def _variant_decoder(name: str | enum.Enum, payload: Type, how: Reading) -> Decoder:
    decode_payload = decoder_of(payload, how)
    if isinstance(payload, StructOf) and payload.python is not None:
        return decode_payload
    if payload == UNIT:
        return lambda data, at: (name, at)

    def decode_variant(data: bytes, at: int) -> tuple[Any, int]:
        value, at = decode_payload(data, at)
        return ((name, value) if how.in_key else {name: value}), at

    return decode_variant


# ---- durations and points in time in bincode: seconds, then nanoseconds --------------------------
# Source: the crate bincode 2, its implementations for `Duration` and `SystemTime`.

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
NANOS = 10**9
# Rust's SystemTime counts seconds in a signed 64-bit number, its Duration in an unsigned one.
MAX_SECONDS = {"duration": 2**64 - 1, "system_time": 2**63 - 1}


def _check_micros(value: object, attribute: str) -> None:
    # Subclasses, such as those of pandas, may have a finer resolution than their base class.
    if getattr(value, attribute, 0):
        raise InputError(
            "expected a time that ends at microseconds; declare SystemTimeNanos or DurationNanos",
            found=named_value(value),
        )


def time_encoder(described: TimeOf) -> Encoder:
    """Return the encoder of a duration or a point in time, as nanoseconds or Python's own types."""
    name = described.name
    high = (MAX_SECONDS[name] + 1) * NANOS - 1

    def encode_nanos(value: Any) -> bytes:
        nanos = check_int(value, f"nanoseconds of {name}", 0, high)
        return varint(nanos // NANOS) + varint(nanos % NANOS)

    def encode_duration(value: Any) -> bytes:
        if not isinstance(value, dt.timedelta) or value < dt.timedelta():
            raise InputError("expected a timedelta that is not negative", found=named_value(value))
        _check_micros(value, "nanoseconds")
        return encode_nanos(dt.timedelta.__floordiv__(value, _MICROSECOND) * 1000)

    def encode_system_time(value: Any) -> bytes:
        if not isinstance(value, dt.datetime) or value.utcoffset() is None or value < _EPOCH:
            raise InputError(
                "expected a datetime with a time zone, not before 1970", found=named_value(value)
            )
        _check_micros(value, "nanosecond")
        return encode_nanos(dt.datetime.__sub__(value, _EPOCH) // _MICROSECOND * 1000)

    if described.as_nanos:
        return encode_nanos
    return encode_duration if name == "duration" else encode_system_time


def time_decoder(described: TimeOf) -> Decoder:
    """Return the decoder of a duration or a point in time; values are never truncated."""
    name = described.name
    limit = (MAX_SECONDS[name] + 1) * NANOS
    decode_u32 = varint_decoder("nanoseconds", 32)

    def decode_nanos(data: bytes, at: int) -> tuple[int, int]:
        seconds, end = decode_length(data, at)
        nanos, end = decode_u32(data, end)
        # Rust also carries a second or more of nanoseconds into the seconds.
        total = seconds * NANOS + nanos
        if total >= limit:
            raise Broken(f"{total} nanoseconds do not fit {name}", at)
        return total, end

    def decode_python(data: bytes, at: int) -> tuple[Any, int]:
        nanos, end = decode_nanos(data, at)
        return _python_time(nanos, name, at), end

    return decode_nanos if described.as_nanos else decode_python


def _python_time(nanos: int, name: str, at: int) -> dt.timedelta | dt.datetime:
    alias = "DurationNanos" if name == "duration" else "SystemTimeNanos"
    if nanos % 1000:
        raise Broken(
            f"{nanos} nanoseconds end between two microseconds, where Python's types cannot; "
            f"declare the type {alias}",
            at,
        )
    try:
        span = dt.timedelta(microseconds=nanos // 1000)
        return span if name == "duration" else _EPOCH + span
    except OverflowError as error:
        raise Broken(
            f"{nanos} nanoseconds are more than Python's types hold; declare the type {alias}", at
        ) from error
