"""Numbers, texts and bytes in bincode: little-endian, integers of variable length.

Source: the crate bincode 2, `config::standard()`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.shapes import Broken, Decoder, Encoder, named_value

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


# --- many values ----------------------------------------------------------------------------------


def encode_texts(values: Sequence[Any]) -> list[bytes] | None:
    """Encode texts shorter than 251 bytes; None if any value is no such text."""
    try:
        return [_ONE_BYTE[len(text)] + text for text in map(str.encode, values)]
    except (TypeError, UnicodeEncodeError, IndexError):
        return None


def encode_unsigned_ints(values: Sequence[Any], bits: int) -> list[bytes] | None:
    """Encode non-negative ints of at most `bits` bits; None if any value is no such int."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) >> bits:
        return None
    return list(map(_ONE_BYTE.__getitem__ if max(values) < 251 else varint, values))


# --- integers ------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """Encode a non-negative number of at most 128 bits in the fewest bytes."""
    if number < 251:
        return _ONE_BYTE[number]
    if number <= 0xFFFF:
        return _pack_16(number)
    if number <= 0xFFFFFFFF:
        return _pack_32(number)
    if number <= 0xFFFFFFFFFFFFFFFF:
        return _pack_64(number)
    return b"\xfe" + number.to_bytes(16, "little")


def check_int(value: object, name: str, low: int, high: int) -> int:
    """Return a number from `low` to `high`, both included; anything else is an InputError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"expected an int for {name}", found=named_value(value))
    if not low <= value <= high:
        raise InputError(
            f"expected a number for {name}, from {low} to {high}", found=named_value(value)
        )
    return int(value)


def _unsigned_encoder(name: str, bits: int) -> Encoder:
    high = (1 << bits) - 1

    def encode_unsigned(value: Any) -> bytes:
        if type(value) is not int or not 0 <= value <= high:
            value = check_int(value, name, 0, high)
        return varint(value)

    return encode_unsigned


def _signed_encoder(name: str, bits: int) -> Encoder:
    high = (1 << (bits - 1)) - 1
    low = -high - 1

    def encode_signed(value: Any) -> bytes:
        if type(value) is not int or not low <= value <= high:
            value = check_int(value, name, low, high)
        number = value << 1 if value >= 0 else -(value << 1) - 1
        return varint(number)

    return encode_signed


def _byte_encoder(name: str) -> Encoder:
    low, high = (0, 255) if name == "u8" else (-128, 127)

    def encode_byte(value: Any) -> bytes:
        return bytes((check_int(value, name, low, high) & 0xFF,))

    return encode_byte


def varint_decoder(name: str, bits: int) -> Decoder:
    """Return a decoder of numbers of `bits` bits in any of their forms; `name` is for errors."""

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
        raise Broken(f"the byte {first:#04x} begins no number of {name}", at)

    return decode_unsigned


def _signed_decoder(name: str, bits: int) -> Decoder:
    wide = varint_decoder(name, bits)

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


decode_length = varint_decoder("a length", 64)


# --- the other primitives ------------------------------------------------------------------------


def _encode_bool(value: Any) -> bytes:
    if value is True:
        return b"\x01"
    if value is False:
        return b"\x00"
    raise InputError("expected True or False", found=named_value(value))


def _decode_bool(data: bytes, at: int) -> tuple[bool, int]:
    byte = data[at]
    if byte > 1:
        raise Broken(f"the byte {byte:#04x} is no bool", at)
    return byte == 1, at + 1


def _float_encoder(name: str, code: str) -> Encoder:
    pack = struct.Struct(code).pack

    def encode_float(value: Any) -> bytes:
        if type(value) is not float:
            value = _checked_float(value, name)
        try:
            return pack(value)
        except OverflowError as error:
            raise InputError(
                f"expected a number that fits {name}", found=named_value(value)
            ) from error

    return encode_float


def _checked_float(value: object, name: str) -> float:
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"expected a float for {name}", found=named_value(value))
    try:
        same = float(value)
    except OverflowError:
        same = 0.5
    if same != value:
        raise InputError(f"expected a number that {name} holds exactly", found=named_value(value))
    return same


def _float_decoder(code: str) -> Decoder:
    packed = struct.Struct(code)
    unpack, size = packed.unpack_from, packed.size

    def decode_float(data: bytes, at: int) -> tuple[float, int]:
        return unpack(data, at)[0], at + size

    return decode_float


def _encode_char(value: Any) -> bytes:
    if not isinstance(value, str) or len(value) != 1:
        raise InputError("expected a str of one character", found=named_value(value))
    return _utf8(value)


def _decode_char(data: bytes, at: int) -> tuple[str, int]:
    first = data[at]
    width = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if at + width > len(data):
        raise IndexError
    return _text(data, at, at + width)


def _encode_string(value: Any) -> bytes:
    if not isinstance(value, str):
        raise InputError("expected a str", found=named_value(value))
    encoded = _utf8(value)
    size = len(encoded)
    return (_ONE_BYTE[size] if size < 251 else varint(size)) + encoded


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            "expected text; half a surrogate pair is none", found=named_value(text)
        ) from error


def _decode_string(data: bytes, at: int) -> tuple[str, int]:
    size = data[at]
    if size < 251:
        at += 1
    else:
        size, at = decode_length(data, at)
    end = at + size
    if end > len(data):
        raise Broken(f"{size} bytes of text are announced, {len(data) - at} remain", at)
    return _text(data, at, end)


def _text(data: bytes, at: int, end: int) -> tuple[str, int]:
    try:
        return data[at:end].decode(), end
    except UnicodeDecodeError as error:
        raise Broken("the text is not UTF-8", at + error.start) from error


def _encode_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InputError("expected bytes", found=named_value(value))
    raw = bytes(value)
    return varint(len(raw)) + raw


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = decode_length(data, at)
    end = at + size
    if end > len(data):
        raise Broken(f"{size} bytes are announced, {len(data) - at} remain", at)
    return data[at:end], end


def _encode_unit(value: Any) -> bytes:
    if value is not None:
        raise InputError("expected None", found=named_value(value))
    return b""


def _decode_unit(data: bytes, at: int) -> tuple[None, int]:
    return None, at


def primitive_encoder(name: str) -> Encoder:
    """Return the encoder of a primitive type."""
    if name in _INT_BITS:
        make = _unsigned_encoder if name.startswith("u") else _signed_encoder
        return make(name, _INT_BITS[name])
    simple: dict[str, Encoder] = {
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


def primitive_decoder(name: str) -> Decoder:
    """Return the decoder of a primitive type."""
    if name in _INT_BITS:
        make = varint_decoder if name.startswith("u") else _signed_decoder
        return make(name, _INT_BITS[name])
    simple: dict[str, Decoder] = {
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
