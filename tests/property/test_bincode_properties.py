"""Bincode over random types: round trips, and bytes that are none."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import struct
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state import Codec, codec_for
from tests.formats import types as t

WIDTHS = {"8": 8, "16": 16, "32": 32, "64": 64, "128": 128, "size": 64}
NAMES = ["a", "b", "c", "d", "e"]
SHAPES = ["option", "list", "set", "map", "array", "tuple", "struct", "class", "enum", "members"]
F32_VALUES = st.floats(width=32, allow_nan=False)
TIMES = st.sampled_from(
    [t.TimeOf(n, x) for n in ("duration", "system_time") for x in (True, False)]
)


@st.composite
def types(draw: st.DrawFn, depth: int = 3) -> t.Type:
    """Any description; drawn by hand, since `st.recursive` says too much about one this wide."""
    shape = draw(st.sampled_from(["flat", *SHAPES])) if depth else "flat"
    inner = types(depth - 1)
    match shape:
        case "option":
            item = draw(inner)
            return item if item == t.UNIT or isinstance(item, t.OptionOf) else t.OptionOf(item)
        case "list":
            return t.ListOf(draw(inner), draw(st.booleans()))
        case "members":
            names = NAMES[: draw(st.integers(1, 4))]
            members = tuple(t.Variant(name, t.UNIT) for name in names)
            return t.EnumOf("M", members, enum.Enum("M", names))  # type: ignore[arg-type]
        case "set":
            return t.SetOf(draw(inner), draw(st.booleans()))
        case "map":
            return t.MapOf(draw(inner), draw(inner))
        case "array":
            return t.ArrayOf(draw(inner), draw(st.integers(0, 3)))
        case "tuple":
            return t.TupleOf(tuple(draw(st.lists(inner, max_size=3))))
        case "struct" | "class" | "enum":
            parts = draw(st.lists(inner, min_size=shape == "enum", max_size=5))
            return named(shape, parts)
        case _:
            return draw(st.sampled_from(t.PRIMITIVES).map(t.Primitive) | TIMES)


def named(shape: str, parts: list[t.Type]) -> t.Type:
    names = NAMES[: len(parts)]
    if shape == "enum":
        return t.EnumOf("E", tuple(map(t.Variant, names, parts)))
    cls = dataclasses.make_dataclass("C", names, frozen=True) if shape == "class" else None
    return t.StructOf("S", tuple(map(t.Field, names, parts)), cls)


def primitive_values(name: str) -> st.SearchStrategy[Any]:
    for suffix, bits in WIDTHS.items():
        if name == f"u{suffix}":
            return st.integers(0, 2**bits - 1)
        if name == f"i{suffix}":
            return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    simple: dict[str, st.SearchStrategy[Any]] = {
        "f32": F32_VALUES,
        "f64": st.floats(allow_nan=False),
        "bool": st.booleans(),
        "char": st.characters(exclude_categories=["Cs"]),
        "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        "bytes": st.binary(max_size=5),
        "unit": st.none(),
    }
    return simple[name]


def time_values(kind: t.TimeOf) -> st.SearchStrategy[Any]:
    if kind.as_nanos:
        return st.integers(0, 2**63 * 10**9 - 1)
    if kind.name == "duration":
        return st.timedeltas(min_value=dt.timedelta())
    return st.datetimes(dt.datetime(1970, 1, 1), timezones=st.just(dt.UTC))


def values_of(kind: t.Type, in_key: bool = False) -> st.SearchStrategy[Any]:
    """Values as the decoder gives them, so that a round trip ends where it began."""
    match kind:
        case t.Primitive(name=name):
            return primitive_values(name)
        case t.TimeOf():
            return time_values(kind)
        case t.OptionOf(item=item):
            return st.none() | values_of(item, in_key)
        case t.ListOf(item=item, as_tuple=as_tuple):
            lists = st.lists(values_of(item, in_key), max_size=3)
            return lists.map(tuple) if in_key or as_tuple else lists
        case t.ArrayOf(item=item, length=length):
            lists = st.lists(values_of(item, in_key), min_size=length, max_size=length)
            return lists.map(tuple) if in_key else lists
        case t.SetOf(item=item, frozen=frozen):
            return st.lists(values_of(item, True), max_size=3).map(
                frozenset if in_key or frozen else set
            )
        case t.MapOf(key=key, value=value):
            pairs = st.lists(st.tuples(values_of(key, True), values_of(value, in_key)), max_size=3)
            return pairs.map(lambda p: frozenset(dict(p).items()) if in_key else dict(p))
        case t.TupleOf(items=items):
            return st.tuples(*(values_of(item, in_key) for item in items))
        case t.StructOf(fields=fields):
            return st.tuples(*(values_of(f.type, in_key) for f in fields)).map(
                lambda parts: built(kind, parts, in_key)
            )
        case t.EnumOf(python=cls) if cls is not None:
            return st.sampled_from(list(cls))
        case t.EnumOf(variants=variants):
            return st.one_of([variant_values(variant, in_key) for variant in variants])


def built(kind: t.StructOf, parts: tuple[Any, ...], in_key: bool) -> Any:
    if kind.python is not None:
        return kind.python(*parts)
    pairs = zip((field.name for field in kind.fields), parts, strict=True)
    return frozenset(pairs) if in_key else dict(pairs)


def variant_values(variant: t.Variant, in_key: bool) -> st.SearchStrategy[Any]:
    values, name, payload = values_of(variant.payload, in_key), variant.name, variant.payload
    if payload == t.UNIT:
        return st.just(name)
    if isinstance(payload, t.StructOf) and payload.python is not None:
        return values
    return values.map(lambda value: (name, value) if in_key else {name: value})


@st.composite
def typed_values(draw: st.DrawFn) -> tuple[t.Type, Any]:
    kind = draw(types())
    return kind, draw(values_of(kind))


@given(types())
def test_a_description_survives_its_json_form(kind: t.Type) -> None:
    form = json.loads(json.dumps(t.to_json(kind)))
    assert t.to_json(t.from_json(form)) == form
    assert t.without_classes(t.from_json(form)) == t.from_json(form)


@given(typed_values())
def test_what_is_encoded_decodes_to_the_same(typed: tuple[t.Type, Any]) -> None:
    kind, value = typed
    codec = codec_for(kind)
    raw = codec.encode(value)
    found = codec.decode(raw)
    assert found == value
    assert type(found) is type(value)
    assert codec.decode(raw + b"more", strict=False) == value
    assert codec.encode_many([value, value]) == [raw, raw]
    plain = codec_for(t.without_classes(kind))
    assert plain.encode(plain.decode(raw)) == raw
    assert codec.decode(raw, strict=False) == value


@given(typed_values(), st.data())
def test_bytes_cut_short_never_decode(typed: tuple[t.Type, Any], data: st.DataObject) -> None:
    kind, value = typed
    codec = codec_for(kind)
    raw = codec.encode(value)
    if not raw:
        return
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for strict in (True, False):
        try:
            codec.decode(cut, strict=strict)
        except FormatError:
            continue
        raise AssertionError("bytes that were cut short decoded")


@given(typed_values(), st.binary(min_size=1, max_size=4))
def test_bytes_too_many_never_decode(typed: tuple[t.Type, Any], more: bytes) -> None:
    kind, value = typed
    codec = codec_for(kind)
    try:
        codec.decode(codec.encode(value) + more)
    except FormatError:
        return
    raise AssertionError("bytes after the value were ignored")


@given(types(), st.binary(max_size=40))
def test_random_bytes_decode_or_are_a_format_error(kind: t.Type, raw: bytes) -> None:
    codec = codec_for(kind)
    try:
        value = codec.decode(raw)
    except FormatError as error:
        offset = error.facts["offset"]
    else:
        assert has_nan(value) or codec.decode(codec.encode(value)) == value
        return
    assert isinstance(offset, int)
    assert 0 <= offset <= len(raw)


def has_nan(value: Any) -> bool:
    return "nan" in repr(value)


@given(st.integers(0, 2**64 - 1))
def test_every_bit_of_a_float_survives(bits: int) -> None:
    raw = struct.pack("<Q", bits)
    codec = codec_for(float)
    assert codec.encode(codec.decode(raw)) == raw


# --- columns -------------------------------------------------------------------------------------

FLAT = [name for name in t.PRIMITIVES if name not in ("u128", "i128")]


@st.composite
def fixed_types(draw: st.DrawFn, depth: int = 2) -> t.Type:
    """Descriptions of types whose values have a fixed shape."""
    shape = draw(st.sampled_from(["flat", "option", "tuple", "struct", "enum"])) if depth else ""
    inner = fixed_types(depth - 1)
    match shape:
        case "option":
            item = draw(inner)
            return item if item == t.UNIT or isinstance(item, t.OptionOf) else t.OptionOf(item)
        case "tuple":
            return t.TupleOf(tuple(draw(st.lists(inner, max_size=3))))
        case "struct":
            return named("struct", draw(st.lists(inner, max_size=3)))
        case "enum":
            return named("enum", [t.UNIT] * draw(st.integers(1, 3)))
        case _:
            return draw(
                st.sampled_from(FLAT).map(t.Primitive)
                | st.sampled_from([t.TimeOf("duration"), t.TimeOf("system_time")])
            )


def of_column(array: pa.Array, kind: t.Type) -> list[Any]:
    """Values of a column as the codec gives them, by a way of its own."""
    if isinstance(kind, t.OptionOf):
        inner = of_column(array, kind.item)
        there = array.is_valid().to_pylist()
        return [value if valid else None for value, valid in zip(inner, there, strict=True)]
    if isinstance(kind, t.TimeOf):
        return array.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if isinstance(kind, t.StructOf | t.TupleOf):
        items = kind.items if isinstance(kind, t.TupleOf) else [f.type for f in kind.fields]
        parts = [of_column(array.field(place), item) for place, item in enumerate(items)]
        rows = list(zip(*parts, strict=True)) if parts else [()] * len(array)
        if isinstance(kind, t.TupleOf):
            return rows
        return [dict(zip([f.name for f in kind.fields], row, strict=True)) for row in rows]
    return array.to_pylist()  # type: ignore[no-any-return]


@given(fixed_types(), st.data())
def test_a_column_decodes_as_its_values_one_by_one(kind: t.Type, data: st.DataObject) -> None:
    codec = codec_for(kind)
    raw = codec.encode_many(data.draw(st.lists(values_of(kind), max_size=8)))
    start = data.draw(st.integers(0, len(raw)))
    try:
        found = codec.decode_column(pa.array(raw, pa.binary()).slice(start))
    except InputError as error:
        if "too late" not in error.message:
            raise
        return
    assert found.type == codec.column_type
    values = codec.decode_many(raw[start:])
    columns = [of_column(chunk, kind) for chunk in found.chunks]
    assert repr([value for column in columns for value in column]) == repr(values)


@given(fixed_types(), st.lists(st.binary(max_size=12), min_size=1, max_size=4), st.booleans())
def test_a_column_of_random_bytes_decodes_or_is_refused_as_one_by_one(
    kind: t.Type, raw: list[bytes], strict: bool
) -> None:
    codec = codec_for(kind)
    column = pa.array(raw, pa.binary())
    try:
        values = codec.decode_many(raw, strict=strict)
    except FormatError:
        try:
            codec.decode_column(column, strict=strict)
        except (FormatError, InputError) as error:
            if isinstance(error, FormatError):
                row = error.facts["row"]
                assert isinstance(row, int)
                assert_refused(codec, raw[row], strict)
            return
        raise AssertionError("a column decoded whose values do not") from None
    try:
        found = codec.decode_column(column, strict=strict)
    except InputError as error:
        if "too late" not in error.message:
            raise
        return
    assert repr(of_column(found.chunk(0), kind)) == repr(values)


def assert_refused(codec: Codec[Any], raw: bytes, strict: bool) -> None:
    try:
        codec.decode(raw, strict=strict)
    except FormatError:
        return
    raise AssertionError("a row is refused that decodes alone")
