"""Bincode 2 as Arroyo writes it: little-endian, variable-length integers, not self-describing.

`codec_for` compiles the codec of a type; `describe` in `model.types` lists the supported Python
types. `Codec.decode_column` decodes a whole column of values at once.

Source: the crate bincode 2, `config::standard()`;
    crates/arroyo-state/src/tables/global_keyed_map.rs.

Differs: Arroyo's decoder ignores bytes after the value and takes the last of two equal map keys;
    this decoder refuses both unless `strict=False`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter, call
from typing import Any, Generic, NamedTuple, TypeVar, cast

import pyarrow as pa

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.bincode.columns import RowBroken, column_type, decode_column
from arroyo_dagster.state.codec.bincode.decoding import Reading, decoder_of, time_encoder
from arroyo_dagster.state.codec.bincode.scalars import (
    encode_texts,
    encode_unsigned_ints,
    primitive_encoder,
    varint,
)
from arroyo_dagster.state.codec.bincode.shapes import (
    MAX_EMPTY_ITEMS,
    Broken,
    Decoder,
    Encoder,
    depth_of,
    item_types,
    key_pairs,
    min_size,
    named_value,
    pick_variant,
    struct_values,
    type_name,
)
from arroyo_dagster.state.model.types import (
    MAX_DEPTH,
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
)

# ---- encoders of bincode, compiled once per type into nested functions, for millions of keys -----
# Source: the crate bincode 2, `config::standard()`.


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


# ---- the codec -----------------------------------------------------------------------------------

_T = TypeVar("_T")
_MANY = 16
_UNSIGNED_BITS = {"u16": 16, "u32": 32, "u64": 64}


def _quickly(described: Type, values: list[Any] | tuple[Any, ...]) -> list[bytes] | None:
    """Encode values of common types at once; None if they must be encoded one by one."""
    if not isinstance(described, Primitive) or len(values) < _MANY:
        return None
    if described.name == "string":
        return encode_texts(values)
    bits = _UNSIGNED_BITS.get(described.name)
    return None if bits is None else encode_unsigned_ints(values, bits)


class Codec(Generic[_T]):
    """Encodes and decodes values of one type; created by `codec_for`."""

    __slots__ = ("_decode", "_decode_lenient", "_encode", "type")

    def __init__(
        self, described: Type, encoder: Encoder, decoder: Decoder, lenient: Decoder
    ) -> None:
        self.type = described
        self._encode = encoder
        self._decode = decoder
        self._decode_lenient = lenient

    def encode(self, value: _T) -> bytes:
        """Encode a value.

        Sets are written in the order of their items' bytes, so that equal sets have equal bytes.
        Maps are written in their own order, except within keys.

        Raises:
            InputError: the value, or a nested value, does not fit the type; the facts contain its
                path.
        """
        try:
            return self._encode(value)
        except ENCODE_ERRORS as error:
            raise locate(self.type, value, error) from error

    def encode_many(self, values: Iterable[_T]) -> list[bytes]:
        """Encode many values as `encode` does, but faster.

        Raises:
            InputError: as in `encode`.
        """
        values = values if isinstance(values, list | tuple) else list(values)
        quickly = _quickly(self.type, values)
        if quickly is not None:
            return quickly
        try:
            return list(map(self._encode, values))
        except ENCODE_ERRORS:
            # The fast path does not locate the invalid value; encoding one by one does.
            return [self.encode(value) for value in values]

    def decode(self, data: bytes | bytearray | memoryview, *, strict: bool = True) -> _T:
        """Decode a value.

        Args:
            data: the bytes of one value.
            strict: whether bytes after the value, duplicate keys of a map and duplicate items of a
                set are errors; Arroyo ignores the bytes and takes the last of the duplicates.

        Raises:
            FormatError: the bytes are no value of this type; the facts contain the offset.
        """
        return self._decoded(data, strict)

    def decode_many(
        self, data: Iterable[bytes | bytearray | memoryview], *, strict: bool = True
    ) -> list[_T]:
        """Decode many values, each as in `decode`.

        Raises:
            FormatError: as in `decode`.
        """
        return [self._decoded(value, strict) for value in data]

    @property
    def column_type(self) -> pa.DataType | None:
        """The Arrow type of `decode_column`; None if values have no fixed shape.

        Times are nanoseconds, a tuple is a struct with the fields `0`, `1`…, an enum a dictionary
        of the names of its variants. Lists, maps, sets, arrays, enums with payloads and numbers of
        128 bits have no fixed shape.
        """
        return column_type(self.type)

    def decode_column(
        self, data: pa.Array | pa.ChunkedArray, *, strict: bool = True
    ) -> pa.ChunkedArray:
        """Decode a column of values at once, tens of times faster than one by one.

        Args:
            data: of type binary (or large binary), without nulls.
            strict: as in `decode`.

        Raises:
            FormatError: as in `decode`; the facts contain the row as well.
            InputError: the type has no fixed shape, `data` is no such column, or a time is after
                the year 2262, the limit of nanoseconds in 64 bits.
        """
        kind = self.column_type
        if kind is None:
            raise InputError(
                f"values of {type_name(self.type)} have no fixed shape",
                next_step="use decode_many",
            )
        chunks = _binary_chunks(data)
        decoded, before = [], 0
        for chunk in chunks:
            try:
                decoded.append(decode_column(chunk, self.type, strict=strict))
            except RowBroken as error:
                raise self._refused_row(chunk, error.row, strict, before) from error
            before += len(chunk)
        return pa.chunked_array(decoded, kind)

    def _refused_row(self, chunk: pa.Array, first: int, strict: bool, before: int) -> FormatError:
        """Decode rows one by one, beginning with `first`, and return the error of `decode`."""
        for row in range(first, len(chunk)):
            try:
                self._decoded(chunk[row].as_py(), strict)
            except FormatError as error:
                error.facts["row"] = before + row
                return error
        raise AssertionError("a column is refused whose rows all decode")

    def _decoded(self, data: bytes | bytearray | memoryview, strict: bool) -> _T:
        if type(data) is not bytes:
            if not isinstance(data, bytes | bytearray | memoryview):
                raise InputError("only bytes can be decoded", found=named_value(data))
            data = bytes(data)
        try:
            value, end = (self._decode if strict else self._decode_lenient)(data, 0)
        except (IndexError, struct.error) as error:
            raise self._refused("the bytes end within the value", data, len(data)) from error
        except Broken as error:
            raise self._refused(error.message, data, error.offset) from error
        if strict and end != len(data):
            raise self._refused("bytes follow the value", data, end)
        return cast(_T, value)

    def _refused(self, message: str, data: bytes, offset: int) -> FormatError:
        return FormatError(
            f"not the bincode of {type_name(self.type)}: {message}", offset=offset, size=len(data)
        )


def _binary_chunks(data: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    kinds = (pa.binary(), pa.large_binary())
    if not isinstance(data, pa.Array | pa.ChunkedArray) or data.type not in kinds:
        raise InputError(
            "a column to decode must be of type binary", found=str(getattr(data, "type", data))[:80]
        )
    if data.null_count:
        raise InputError("a column to decode holds nulls", nulls=data.null_count)
    chunks = data.chunks if isinstance(data, pa.ChunkedArray) else [data]
    return [chunk.cast(pa.binary()) for chunk in chunks]


def encode(value: object, type: Any) -> bytes:  # noqa: A002 - the word users know
    """Encode a value of a type; for many values use `codec_for(type).encode`.

    Raises:
        InputError: the type is not supported, or the value does not fit it.
    """
    return codec_for(type).encode(value)


def decode(
    data: bytes | bytearray | memoryview,
    type: Any,  # noqa: A002
    *,
    strict: bool = True,
) -> Any:
    """Decode a value of a type; for many values use `codec_for(type).decode`.

    Raises:
        InputError: the type is not supported.
        FormatError: the bytes are no value of the type; with `strict` also if bytes follow it.
    """
    return codec_for(type).decode(data, strict=strict)


def codec_for(type: Any) -> Codec[Any]:  # noqa: A002 - the word users know
    """Return the codec of a Python type or a description; codecs are cached.

    Raises:
        InputError: the type is not supported, or its values could not be decoded.
    """
    try:
        return _codec_for(type)
    except TypeError:
        # Not hashable, so no supported type; the error of `describe` lists the supported ones.
        return _compiled(describe(type))


@lru_cache(maxsize=4096)
def _codec_for(python_type: Any) -> Codec[Any]:
    if isinstance(python_type, Type):
        return _compiled(python_type)
    return _codec_for(describe(python_type))


def _compiled(described: Type) -> Codec[Any]:
    if depth_of(described) > MAX_DEPTH:
        raise InputError(f"more than {MAX_DEPTH} types lie within each other")
    decoder = decoder_of(described, Reading())
    lenient = decoder
    if _has_keys(described):
        lenient = decoder_of(described, Reading(lenient=True))
    return Codec(described, encoder_of(described, False), decoder, lenient)


def _has_keys(described: Type) -> bool:
    return isinstance(described, MapOf | SetOf) or any(map(_has_keys, item_types(described)))


# ---- locating the nested value that cannot be encoded --------------------------------------------

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
