"""Bincode 2 as Arroyo writes it: little-endian, variable-length integers, nothing self-describing.

A codec is compiled once per type into nested functions, because tables encode millions of keys.

Source: the crate bincode 2, `config::standard()`;
    crates/arroyo-state/src/tables/global_keyed_map.rs.

Differs: Arroyo's decoder ignores bytes after the value and takes the last of two equal map keys;
    ours refuses both, the first unless `strict=False`.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from operator import attrgetter, call
from typing import Any, Generic, NamedTuple, TypeVar, cast

from arroyo_dagster.errors import FormatError, InputError
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
    describe,
    to_json,
)

__all__ = ["MAX_EMPTY_ITEMS", "Codec", "codec_for", "decode", "encode"]

MAX_EMPTY_ITEMS = 1024
"""How many items that take no bytes a collection may hold; their count alone proves nothing."""

_T = TypeVar("_T")
_Encoder = Callable[[Any], bytes]
_Decoder = Callable[[bytes, int], tuple[Any, int]]

_ONE_BYTE = tuple(bytes((number,)) for number in range(251))
_INT_BITS = {
    "u16": 16,
    "u32": 32,
    "u64": 64,
    "u128": 128,
    "usize": 64,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "i128": 128,
    "isize": 64,
}
_pack_16 = partial(struct.Struct("<BH").pack, 0xFB)
_pack_32 = partial(struct.Struct("<BI").pack, 0xFC)
_pack_64 = partial(struct.Struct("<BQ").pack, 0xFD)
_unpack_16 = struct.Struct("<H").unpack_from
_unpack_32 = struct.Struct("<I").unpack_from
_unpack_64 = struct.Struct("<Q").unpack_from

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_NANOS = 10**9
# Rust's SystemTime counts seconds in 64 bits with a sign, its Duration without.
_MAX_SECONDS = {"duration": 2**64 - 1, "system_time": 2**63 - 1}


class _Broken(Exception):
    """The bytes are not what their type says, and where."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


class Codec(Generic[_T]):
    """Encodes and decodes values of one type; made by `codec_for`."""

    __slots__ = ("_decode", "_encode", "type")

    def __init__(self, described: Type, encoder: _Encoder, decoder: _Decoder) -> None:
        self.type = described
        self._encode = encoder
        self._decode = decoder

    def encode(self, value: _T) -> bytes:
        """Give the bytes of a value.

        Sets are written in the order of their items' bytes, so that equal sets have equal bytes;
        maps in their own order, except where they are part of a key.

        Raises:
            InputError: the value, or one within it, does not fit the type; the facts name where.
        """
        try:
            return self._encode(value)
        except _ENCODE_ERRORS as error:
            raise _located(self.type, value, error) from error

    def encode_many(self, values: Iterable[_T]) -> list[bytes]:
        """Give the bytes of many values; as `encode`, faster.

        Raises:
            InputError: as `encode`.
        """
        values = values if isinstance(values, list | tuple) else list(values)
        try:
            return list(map(self._encode, values))
        except _ENCODE_ERRORS:
            # Not stopped by a broken one before, so one of these says which it is.
            return [self.encode(value) for value in values]

    def decode(self, data: bytes | bytearray | memoryview, *, strict: bool = True) -> _T:
        """Give back the value.

        Args:
            data: the bytes of one value.
            strict: whether bytes after the value are an error; Arroyo ignores them.

        Raises:
            FormatError: the bytes are no value of this type; the facts name the byte.
        """
        return self._decoded(data, strict)

    def decode_many(
        self, data: Iterable[bytes | bytearray | memoryview], *, strict: bool = True
    ) -> list[_T]:
        """Give back many values; as `decode`.

        Raises:
            FormatError: as `decode`.
        """
        return [self._decoded(one, strict) for one in data]

    def _decoded(self, data: bytes | bytearray | memoryview, strict: bool) -> _T:
        if type(data) is not bytes:
            if not isinstance(data, bytes | bytearray | memoryview):
                raise InputError("only bytes can be decoded", found=_named_value(data))
            data = bytes(data)
        try:
            value, end = self._decode(data, 0)
        except (IndexError, struct.error) as error:
            raise self._refused("the bytes end within the value", data, len(data)) from error
        except _Broken as error:
            raise self._refused(error.message, data, error.offset) from error
        if strict and end != len(data):
            raise self._refused("bytes follow the value", data, end)
        return cast(_T, value)

    def _refused(self, message: str, data: bytes, offset: int) -> FormatError:
        return FormatError(
            f"not the bincode of {type_name(self.type)}: {message}", offset=offset, size=len(data)
        )


def encode(value: object, type: Any) -> bytes:  # noqa: A002 - the word users know
    """Give the bytes of a value of a type; `codec_for(type).encode` for more than a few.

    Raises:
        InputError: the type has no description, or the value does not fit it.
    """
    return codec_for(type).encode(value)


def decode(
    data: bytes | bytearray | memoryview,
    type: Any,  # noqa: A002
    *,
    strict: bool = True,
) -> Any:
    """Give back the value of a type; `codec_for(type).decode` for more than a few.

    Raises:
        InputError: the type has no description.
        FormatError: the bytes are no value of the type; with `strict`, or bytes follow it.
    """
    return codec_for(type).decode(data, strict=strict)


def codec_for(type: Any) -> Codec[Any]:  # noqa: A002 - the word users know
    """Give the codec of a Python type or a description; the same one when asked again.

    Raises:
        InputError: the type has no description, or its values could not be decoded.
    """
    try:
        return _codec_for(type)
    except TypeError:
        # Not hashable, so nothing we know; `describe` says what is allowed.
        return _compiled(describe(type))


@lru_cache(maxsize=4096)
def _codec_for(python_type: Any) -> Codec[Any]:
    if isinstance(python_type, Type):
        return _compiled(python_type)
    return _codec_for(describe(python_type))


def _compiled(described: Type) -> Codec[Any]:
    if _depth(described) > MAX_DEPTH:
        raise InputError(f"more than {MAX_DEPTH} types lie within each other")
    return Codec(described, _encoder(described, False), _decoder(described, False))


def type_name(described: Type) -> str:
    """Give a short name of a type for messages."""
    if isinstance(described, StructOf | EnumOf):
        return described.name
    form = to_json(described)
    return form if isinstance(form, str) else f"{form!r:.80}"


# --- sizes ---------------------------------------------------------------------------------------


def _parts(described: Type) -> tuple[Type, ...]:
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


def _depth(described: Type) -> int:
    deepest, level = 0, [described]
    while level and deepest <= MAX_DEPTH + 1:
        deepest += 1
        level = [part for one in level for part in _parts(one)]
    return deepest - 1


def _min_size(described: Type) -> int:
    """The fewest bytes a value can take."""
    match described:
        case Primitive(name=name):
            return {"unit": 0, "f32": 4, "f64": 8}.get(name, 1)
        case TimeOf():
            return 2
        case ArrayOf(item=item, length=length):
            return length * _min_size(item)
        case TupleOf() | StructOf():
            return sum(map(_min_size, _parts(described)))
        case EnumOf():
            return 1 + min(map(_min_size, _parts(described)))
        case _:
            return 1


def _empty_items(described: Type) -> int:
    """How many values a value that takes no bytes is made of, at most."""
    match described:
        case ArrayOf(item=item, length=length):
            return max(1, length * _empty_items(item))
        case TupleOf() | StructOf():
            return max(1, sum(map(_empty_items, _parts(described))))
        case _:
            return 1


# --- integers ------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    if number < 251:
        return _ONE_BYTE[number]
    if number <= 0xFFFF:
        return _pack_16(number)
    if number <= 0xFFFFFFFF:
        return _pack_32(number)
    if number <= 0xFFFFFFFFFFFFFFFF:
        return _pack_64(number)
    return b"\xfe" + number.to_bytes(16, "little")


def _checked_int(value: object, name: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"expected an int for {name}", found=_named_value(value))
    if not low <= value <= high:
        raise InputError(
            f"expected a number for {name}, from {low} to {high}", found=_named_value(value)
        )
    return int(value)


def _unsigned_encoder(name: str, bits: int) -> _Encoder:
    high = (1 << bits) - 1

    def encode_unsigned(value: Any) -> bytes:
        if type(value) is not int or not 0 <= value <= high:
            value = _checked_int(value, name, 0, high)
        return _varint(value)

    return encode_unsigned


def _signed_encoder(name: str, bits: int) -> _Encoder:
    high = (1 << (bits - 1)) - 1
    low = -high - 1

    def encode_signed(value: Any) -> bytes:
        if type(value) is not int or not low <= value <= high:
            value = _checked_int(value, name, low, high)
        number = value << 1 if value >= 0 else -(value << 1) - 1
        return _varint(number)

    return encode_signed


def _byte_encoder(name: str) -> _Encoder:
    low, high = (0, 255) if name == "u8" else (-128, 127)

    def encode_byte(value: Any) -> bytes:
        return bytes((_checked_int(value, name, low, high) & 0xFF,))

    return encode_byte


def _varint_decoder(name: str, bits: int) -> _Decoder:
    def decode_unsigned(data: bytes, at: int) -> tuple[int, int]:
        first = data[at]
        if first < 251:
            return first, at + 1
        if first == 251:
            return _unpack_16(data, at + 1)[0], at + 3
        if first == 252 and bits >= 32:
            return _unpack_32(data, at + 1)[0], at + 5
        if first == 253 and bits >= 64:
            return _unpack_64(data, at + 1)[0], at + 9
        if first == 254 and bits == 128:
            end = at + 17
            if end > len(data):
                raise IndexError
            return int.from_bytes(data[at + 1 : end], "little"), end
        raise _Broken(f"the byte {first:#04x} begins no number of {name}", at)

    return decode_unsigned


def _signed_decoder(name: str, bits: int) -> _Decoder:
    wide = _varint_decoder(name, bits)

    def decode_signed(data: bytes, at: int) -> tuple[int, int]:
        first = data[at]
        if first < 251:
            return (first >> 1) ^ -(first & 1), at + 1
        if first == 251:
            number, end = _unpack_16(data, at + 1)[0], at + 3
        else:
            number, end = wide(data, at)
        return (number >> 1) ^ -(number & 1), end

    return decode_signed


def _decode_u8(data: bytes, at: int) -> tuple[int, int]:
    return data[at], at + 1


def _decode_i8(data: bytes, at: int) -> tuple[int, int]:
    return (data[at] ^ 0x80) - 0x80, at + 1


_decode_u64 = cast("Callable[[bytes, int], tuple[int, int]]", _varint_decoder("a length", 64))


# --- the other primitives ------------------------------------------------------------------------


def _encode_bool(value: Any) -> bytes:
    if value is True:
        return b"\x01"
    if value is False:
        return b"\x00"
    raise InputError("expected True or False", found=_named_value(value))


def _decode_bool(data: bytes, at: int) -> tuple[bool, int]:
    byte = data[at]
    if byte > 1:
        raise _Broken(f"the byte {byte:#04x} is no bool", at)
    return byte == 1, at + 1


def _float_encoder(name: str, code: str) -> _Encoder:
    pack = struct.Struct(code).pack

    def encode_float(value: Any) -> bytes:
        if type(value) is not float:
            value = _checked_float(value, name)
        try:
            return pack(value)
        except OverflowError as error:
            raise InputError(
                f"expected a number that fits {name}", found=_named_value(value)
            ) from error

    return encode_float


def _checked_float(value: object, name: str) -> float:
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"expected a float for {name}", found=_named_value(value))
    try:
        same = float(value)
    except OverflowError:
        same = 0.5
    if same != value:
        raise InputError(f"expected a number that {name} holds exactly", found=_named_value(value))
    return same


def _float_decoder(code: str) -> _Decoder:
    packed = struct.Struct(code)
    unpack, size = packed.unpack_from, packed.size

    def decode_float(data: bytes, at: int) -> tuple[float, int]:
        return unpack(data, at)[0], at + size

    return decode_float


def _encode_char(value: Any) -> bytes:
    if not isinstance(value, str) or len(value) != 1:
        raise InputError("expected a str of one character", found=_named_value(value))
    return _utf8(value)


def _decode_char(data: bytes, at: int) -> tuple[str, int]:
    first = data[at]
    width = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if at + width > len(data):
        raise IndexError
    return _text(data, at, at + width)


def _encode_string(value: Any) -> bytes:
    if not isinstance(value, str):
        raise InputError("expected a str", found=_named_value(value))
    encoded = _utf8(value)
    size = len(encoded)
    return (_ONE_BYTE[size] if size < 251 else _varint(size)) + encoded


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            "expected text; half a surrogate pair is none", found=_named_value(text)
        ) from error


def _decode_string(data: bytes, at: int) -> tuple[str, int]:
    size = data[at]
    if size < 251:
        at += 1
    else:
        size, at = _decode_u64(data, at)
    end = at + size
    if end > len(data):
        raise _Broken(f"{size} bytes of text are announced, {len(data) - at} remain", at)
    return _text(data, at, end)


def _text(data: bytes, at: int, end: int) -> tuple[str, int]:
    try:
        return data[at:end].decode(), end
    except UnicodeDecodeError as error:
        raise _Broken("the text is not UTF-8", at + error.start) from error


def _encode_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InputError("expected bytes", found=_named_value(value))
    raw = bytes(value)
    return _varint(len(raw)) + raw


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _decode_u64(data, at)
    end = at + size
    if end > len(data):
        raise _Broken(f"{size} bytes are announced, {len(data) - at} remain", at)
    return data[at:end], end


def _encode_unit(value: Any) -> bytes:
    if value is not None:
        raise InputError("expected None", found=_named_value(value))
    return b""


def _decode_unit(data: bytes, at: int) -> tuple[None, int]:
    return None, at


def _primitive_encoder(name: str) -> _Encoder:
    if name in _INT_BITS:
        make = _unsigned_encoder if name.startswith("u") else _signed_encoder
        return make(name, _INT_BITS[name])
    simple: dict[str, _Encoder] = {
        "bool": _encode_bool,
        "char": _encode_char,
        "string": _encode_string,
        "bytes": _encode_bytes,
        "unit": _encode_unit,
        "u8": _byte_encoder("u8"),
        "i8": _byte_encoder("i8"),
        "f32": _float_encoder("f32", "<f"),
        "f64": _float_encoder("f64", "<d"),
    }
    return simple[name]


def _primitive_decoder(name: str) -> _Decoder:
    if name in _INT_BITS:
        make = _varint_decoder if name.startswith("u") else _signed_decoder
        return make(name, _INT_BITS[name])
    simple: dict[str, _Decoder] = {
        "bool": _decode_bool,
        "char": _decode_char,
        "string": _decode_string,
        "bytes": _decode_bytes,
        "unit": _decode_unit,
        "u8": _decode_u8,
        "i8": _decode_i8,
        "f32": _float_decoder("<f"),
        "f64": _float_decoder("<d"),
    }
    return simple[name]


# --- times ---------------------------------------------------------------------------------------


def _check_micros(value: object, attribute: str) -> None:
    # Subclasses, such as those of pandas, hold more than the class they are used as.
    if getattr(value, attribute, 0):
        raise InputError(
            "expected a time that ends at microseconds; declare SystemTimeNanos or DurationNanos",
            found=_named_value(value),
        )


def _time_encoder(described: TimeOf) -> _Encoder:
    name = described.name
    high = (_MAX_SECONDS[name] + 1) * _NANOS - 1

    def encode_nanos(value: Any) -> bytes:
        nanos = _checked_int(value, f"nanoseconds of {name}", 0, high)
        return _varint(nanos // _NANOS) + _varint(nanos % _NANOS)

    def encode_duration(value: Any) -> bytes:
        if not isinstance(value, dt.timedelta) or value < dt.timedelta():
            raise InputError("expected a timedelta that is not negative", found=_named_value(value))
        _check_micros(value, "nanoseconds")
        return encode_nanos(dt.timedelta.__floordiv__(value, _MICROSECOND) * 1000)

    def encode_system_time(value: Any) -> bytes:
        if not isinstance(value, dt.datetime) or value.utcoffset() is None or value < _EPOCH:
            raise InputError(
                "expected a datetime with a time zone, not before 1970", found=_named_value(value)
            )
        _check_micros(value, "nanosecond")
        return encode_nanos(dt.datetime.__sub__(value, _EPOCH) // _MICROSECOND * 1000)

    if described.as_nanos:
        return encode_nanos
    return encode_duration if name == "duration" else encode_system_time


def _time_decoder(described: TimeOf) -> _Decoder:
    name = described.name
    limit = (_MAX_SECONDS[name] + 1) * _NANOS
    decode_u32 = _varint_decoder("nanoseconds", 32)

    def decode_nanos(data: bytes, at: int) -> tuple[int, int]:
        seconds, end = _decode_u64(data, at)
        nanos, end = decode_u32(data, end)
        # Rust carries nanoseconds of a second and more into the seconds, too.
        total = seconds * _NANOS + nanos
        if total >= limit:
            raise _Broken(f"{total} nanoseconds do not fit {name}", at)
        return total, end

    def decode_python(data: bytes, at: int) -> tuple[Any, int]:
        nanos, end = decode_nanos(data, at)
        alias = "DurationNanos" if name == "duration" else "SystemTimeNanos"
        if nanos % 1000:
            raise _Broken(
                f"{nanos} nanoseconds end between two microseconds, where Python's types cannot; "
                f"declare the type {alias}",
                at,
            )
        try:
            span = dt.timedelta(microseconds=nanos // 1000)
            return (span if name == "duration" else _EPOCH + span), end
        except OverflowError as error:
            raise _Broken(
                f"{nanos} nanoseconds are more than Python's types hold; declare the type {alias}",
                at,
            ) from error

    return decode_nanos if described.as_nanos else decode_python


# --- collections ---------------------------------------------------------------------------------


def _items_encoder(described: ListOf | ArrayOf, in_key: bool) -> _Encoder:
    encode_item = _encoder(described.item, in_key)
    length = described.length if isinstance(described, ArrayOf) else None
    empty = length is None and _min_size(described.item) == 0

    def encode_items(value: Any) -> bytes:
        if not isinstance(value, list | tuple):
            raise InputError("expected a list", found=_named_value(value))
        if length is None:
            if empty and len(value) > MAX_EMPTY_ITEMS:
                raise InputError(
                    f"expected at most {MAX_EMPTY_ITEMS} items that take no bytes",
                    found=len(value),
                )
            return _varint(len(value)) + b"".join(map(encode_item, value))
        if len(value) != length:
            raise InputError(f"expected exactly {length} items", found=len(value))
        return b"".join(map(encode_item, value))

    return encode_items


def _set_encoder(described: SetOf) -> _Encoder:
    encode_item = _encoder(described.item, True)

    def encode_set(value: Any) -> bytes:
        if not isinstance(value, set | frozenset):
            raise InputError("expected a set", found=_named_value(value))
        items = sorted(map(encode_item, value))
        if len(set(items)) != len(items):
            raise InputError("two items of a set have the same bytes", found=_named_value(value))
        return _varint(len(items)) + b"".join(items)

    return encode_set


def _map_encoder(described: MapOf, in_key: bool) -> _Encoder:
    encode_key = _encoder(described.key, True)
    encode_value = _encoder(described.value, in_key)

    def encode_map(value: Any) -> bytes:
        pairs = _key_pairs(value) if in_key else value
        if not isinstance(pairs, Mapping):
            raise InputError("expected a dict", found=_named_value(value))
        found = {encode_key(key): encode_value(item) for key, item in pairs.items()}
        if len(found) != len(pairs):
            raise InputError("two keys of a map have the same bytes", found=_named_value(value))
        items = sorted(found.items()) if in_key else found.items()
        return _varint(len(found)) + b"".join(map(b"".join, items))

    return encode_map


def _key_pairs(value: Any) -> Any:
    """Give the dict that a frozenset of pairs stands for, since no key can hold a dict."""
    if not isinstance(value, frozenset):
        return value
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in value):
        raise InputError("expected a frozenset of pairs", found=_named_value(value))
    pairs = dict(value)
    if len(pairs) != len(value):
        raise InputError("two pairs have the same name", found=_named_value(value))
    return pairs


def _counted(described: Type) -> _Decoder:
    """Decode a length, refused before anything is allocated when the bytes cannot hold it."""
    smallest = _min_size(described)
    most_empty = MAX_EMPTY_ITEMS // _empty_items(described) if smallest == 0 else 0

    def decode_count(data: bytes, at: int) -> tuple[int, int]:
        count, end = _decode_u64(data, at)
        if smallest:
            if count * smallest > len(data) - end:
                raise _Broken(f"{count} items are announced, {len(data) - end} bytes remain", at)
        elif count > most_empty:
            raise _Broken(f"{count} items that take no bytes are announced", at)
        return count, end

    return decode_count


def _list_decoder(described: ListOf, in_key: bool) -> _Decoder:
    decode_count = _counted(described.item)
    decode_items = _run_decoder(described.item, in_key)

    def decode_list(data: bytes, at: int) -> tuple[Any, int]:
        count, at = decode_count(data, at)
        return decode_items(data, at, count)

    return decode_list


def _array_decoder(described: ArrayOf, in_key: bool) -> _Decoder:
    length, smallest = described.length, _min_size(described)
    if smallest == 0 and _empty_items(described) > MAX_EMPTY_ITEMS:
        raise InputError(
            f"an array may hold at most {MAX_EMPTY_ITEMS} items that take no bytes",
            length=length,
        )
    decode_items = _run_decoder(described.item, in_key)

    def decode_array(data: bytes, at: int) -> tuple[Any, int]:
        if smallest > len(data) - at:
            raise _Broken(f"{length} items need {smallest} bytes, {len(data) - at} remain", at)
        return decode_items(data, at, length)

    return decode_array


def _run_decoder(item: Type, in_key: bool) -> Callable[[bytes, int, int], tuple[Any, int]]:
    decode_item = _decoder(item, in_key)

    def decode_items(data: bytes, at: int, count: int) -> tuple[Any, int]:
        items = []
        for _ in range(count):
            value, at = decode_item(data, at)
            items.append(value)
        return (tuple(items) if in_key else items), at

    return decode_items


def _set_decoder(described: SetOf, in_key: bool) -> _Decoder:
    decode_count = _counted(described.item)
    decode_items = _run_decoder(described.item, True)

    def decode_set(data: bytes, at: int) -> tuple[Any, int]:
        start = at
        count, at = decode_count(data, at)
        items, at = decode_items(data, at, count)
        found = frozenset(items) if in_key or described.frozen else set(items)
        if len(found) != count:
            raise _Broken("an item of a set occurs twice", start)
        return found, at

    return decode_set


def _map_decoder(described: MapOf, in_key: bool) -> _Decoder:
    decode_count = _counted(TupleOf((described.key, described.value)))
    decode_key, decode_value = _decoder(described.key, True), _decoder(described.value, in_key)

    def decode_map(data: bytes, at: int) -> tuple[Any, int]:
        start = at
        count, at = decode_count(data, at)
        found = {}
        for _ in range(count):
            key, at = decode_key(data, at)
            found[key], at = decode_value(data, at)
        if len(found) != count:
            raise _Broken("a key of a map occurs twice", start)
        return (frozenset(found.items()) if in_key else found), at

    return decode_map


# --- options, tuples, structs, enums -------------------------------------------------------------


def _option_encoder(described: OptionOf, in_key: bool) -> _Encoder:
    encode_item = _encoder(described.item, in_key)

    def encode_option(value: Any) -> bytes:
        return b"\x00" if value is None else b"\x01" + encode_item(value)

    return encode_option


def _option_decoder(described: OptionOf, in_key: bool) -> _Decoder:
    decode_item = _decoder(described.item, in_key)

    def decode_option(data: bytes, at: int) -> tuple[Any, int]:
        tag = data[at]
        if tag == 0:
            return None, at + 1
        if tag == 1:
            return decode_item(data, at + 1)
        raise _Broken(f"the byte {tag:#04x} begins no option", at)

    return decode_option


def _tuple_encoder(described: TupleOf, in_key: bool) -> _Encoder:
    encoders = [_encoder(item, in_key) for item in described.items]
    count = len(encoders)

    def encode_tuple(value: Any) -> bytes:
        if not isinstance(value, tuple) or len(value) != count:
            raise InputError(f"expected a tuple of {count}", found=_named_value(value))
        return b"".join(map(call, encoders, value))

    return encode_tuple


def _tuple_decoder(described: TupleOf, in_key: bool) -> _Decoder:
    decoders = [_decoder(item, in_key) for item in described.items]

    def decode_tuple(data: bytes, at: int) -> tuple[Any, int]:
        values = []
        for decode_part in decoders:
            value, at = decode_part(data, at)
            values.append(value)
        return tuple(values), at

    return decode_tuple


def _struct_encoder(described: StructOf, in_key: bool) -> _Encoder:
    encoders = [_encoder(field.type, in_key) for field in described.fields]
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


def _few_joined(encoders: list[_Encoder], get: Callable[[Any], Any]) -> _Encoder | None:
    """Encode the parts of a small struct one after the other, by half faster than in a loop."""

    def encode_two(value: Any) -> bytes:
        one, two = get(value)
        return first(one) + second(two)

    def encode_three(value: Any) -> bytes:
        one, two, three = get(value)
        return first(one) + second(two) + third(three)

    def encode_four(value: Any) -> bytes:
        one, two, three, four = get(value)
        return first(one) + second(two) + third(three) + fourth(four)

    first, second, third, fourth = (*encoders, *encoders, *encoders, *encoders)[:4]
    return {2: encode_two, 3: encode_three, 4: encode_four}.get(len(encoders))


def struct_values(value: Any, described: StructOf) -> tuple[Any, ...]:
    """Give the values of a struct's fields in order.

    Raises:
        InputError: the value is no instance of the struct's class, nor, where that is None, a
            dict of exactly its fields (or a frozenset of their pairs, where it is part of a key).
    """
    names = [field.name for field in described.fields]
    if described.python is not None:
        # A subclass may have fields that would be lost.
        if type(value) is not described.python:
            raise InputError(f"expected exactly a {described.name}", found=_named_value(value))
        return tuple(getattr(value, name) for name in names)
    fields = _key_pairs(value)
    if not isinstance(fields, Mapping) or set(fields) != set(names):
        raise InputError(
            f"expected a dict with the fields {', '.join(names) or '(none)'}",
            found=_named_value(value),
        )
    return tuple(fields[name] for name in names)


def _struct_decoder(described: StructOf, in_key: bool) -> _Decoder:
    decoders = [_decoder(field.type, in_key) for field in described.fields]
    build = _struct_builder(described, [field.name for field in described.fields], in_key)

    def decode_struct(data: bytes, start: int) -> tuple[Any, int]:
        values = []
        at = start
        for decode_part in decoders:
            value, at = decode_part(data, at)
            values.append(value)
        try:
            return build(*values), at
        except Exception as error:
            raise _Broken(f"{described.name} refuses the values found: {error}", start) from error

    return decode_struct


def _struct_builder(described: StructOf, names: list[str], in_key: bool) -> Callable[..., Any]:
    cls = described.python
    if cls is None:
        if in_key:
            return lambda *values: frozenset(zip(names, values, strict=True))
        return lambda *values: dict(zip(names, values, strict=True))
    if in_key and cls.__hash__ is None:
        raise InputError(
            f"the dataclass {described.name} is part of a key or a set, but cannot be hashed",
            next_step="declare it with @dataclass(frozen=True)",
        )
    if getattr(cls, "__match_args__", None) == tuple(names):
        return cls
    return lambda *values: cls(**dict(zip(names, values, strict=True)))


def _enum_encoder(described: EnumOf, in_key: bool) -> _Encoder:
    encoders = [_encoder(variant.payload, in_key) for variant in described.variants]

    def encode_enum(value: Any) -> bytes:
        index, payload = pick_variant(value, described)
        return _varint(index) + encoders[index](payload)

    return encode_enum


def pick_variant(value: Any, described: EnumOf) -> tuple[int, Any]:
    """Give the place of the variant that a value of an enum is, and what it holds.

    Raises:
        InputError: the value is none of the enum's variants.
    """
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, payload),) = value.items()
    elif isinstance(value, tuple) and len(value) == 2:
        name, payload = value
    else:
        name, payload = value, None
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
        found=_named_value(value),
    )


def _enum_decoder(described: EnumOf, in_key: bool) -> _Decoder:
    decode_u32 = _varint_decoder("the place of a variant", 32)
    decoders = [
        _variant_decoder(variant.name, variant.payload, in_key) for variant in described.variants
    ]

    def decode_enum(data: bytes, at: int) -> tuple[Any, int]:
        index, end = decode_u32(data, at)
        if index >= len(decoders):
            raise _Broken(f"{described.name} has no variant {index}", at)
        return decoders[index](data, end)

    return decode_enum


def _variant_decoder(name: str, payload: Type, in_key: bool) -> _Decoder:
    decode_payload = _decoder(payload, in_key)
    if isinstance(payload, StructOf) and payload.python is not None:
        return decode_payload
    if payload == UNIT:
        return lambda data, at: (name, at)

    def decode_variant(data: bytes, at: int) -> tuple[Any, int]:
        value, at = decode_payload(data, at)
        return ((name, value) if in_key else {name: value}), at

    return decode_variant


# --- by type -------------------------------------------------------------------------------------


def _encoder(described: Type, in_key: bool) -> _Encoder:
    match described:
        case Primitive(name=name):
            return _primitive_encoder(name)
        case TimeOf():
            return _time_encoder(described)
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


def _decoder(described: Type, in_key: bool) -> _Decoder:
    """Compile a decoder; `in_key`: what it gives can be hashed."""
    match described:
        case Primitive(name=name):
            return _primitive_decoder(name)
        case TimeOf():
            return _time_decoder(described)
        case OptionOf():
            return _option_decoder(described, in_key)
        case ListOf():
            return _list_decoder(described, in_key)
        case ArrayOf():
            return _array_decoder(described, in_key)
        case SetOf():
            return _set_decoder(described, in_key)
        case MapOf():
            return _map_decoder(described, in_key)
        case TupleOf():
            return _tuple_decoder(described, in_key)
        case StructOf():
            return _struct_decoder(described, in_key)
        case EnumOf():
            return _enum_decoder(described, in_key)


# --- where a value is wrong ----------------------------------------------------------------------

_ENCODE_ERRORS = (InputError, TypeError, ValueError, AttributeError, KeyError)
_encoder_again = lru_cache(maxsize=256)(_encoder)


class _Part(NamedTuple):
    """A value within a value: how its path goes on, its type, and whether it is part of a key."""

    suffix: str
    type: Type
    value: Any
    in_key: bool


def _located(described: Type, value: Any, error: Exception) -> InputError:
    """Walk to the innermost value that cannot be encoded, and say where it is."""
    path, part = "", _Part("", described, value, False)
    while (step := _wrong_part(part)) is not None:
        part, error = step
        path += part.suffix
    if isinstance(error, InputError):
        expected, found = error.message, error.facts.get("found")
    else:
        expected, found = f"it cannot be encoded: {error}", _named_value(part.value)
    return InputError(
        f"a value does not fit its type: {expected}",
        type=type_name(described),
        at=path or None,
        found=found,
    )


def _wrong_part(whole: _Part) -> tuple[_Part, Exception] | None:
    try:
        for part in _inside(whole):
            try:
                _encoder_again(part.type, part.in_key)(part.value)
            except _ENCODE_ERRORS as error:
                return part, error
    except (TypeError, ValueError, AttributeError):
        # Not even of the shape that has parts: it is itself what is wrong.
        pass
    return None


def _inside(whole: _Part) -> Iterator[_Part]:
    _, described, value, in_key = whole
    match described:
        case OptionOf(item=item) if value is not None:
            yield _Part("", item, value, in_key)
        case ListOf(item=item) | ArrayOf(item=item) if isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                yield _Part(f"[{index}]", item, inner, in_key)
        case SetOf(item=item) if isinstance(value, set | frozenset):
            for inner in value:
                yield _Part(f"[{inner!r:.40}]", item, inner, True)
        case MapOf(key=key, value=item):
            for one, inner in _key_pairs(value).items():
                yield _Part(f"[key {one!r:.40}]", key, one, True)
                yield _Part(f"[{one!r:.40}]", item, inner, in_key)
        case TupleOf(items=items) if isinstance(value, tuple):
            for index, (item, inner) in enumerate(zip(items, value, strict=True)):
                yield _Part(f"[{index}]", item, inner, in_key)
        case StructOf(fields=fields):
            for field, inner in zip(fields, struct_values(value, described), strict=True):
                yield _Part(f".{field.name}", field.type, inner, in_key)
        case EnumOf(variants=variants):
            index, payload = pick_variant(value, described)
            yield _Part(f"<{variants[index].name}>", variants[index].payload, payload, in_key)


def _named_value(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}"
