"""Bincode: the bytes of the specification, and what is refused."""

from __future__ import annotations

import datetime as dt
import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state import DeleteKey, codec_for
from arroyo_dagster.state.codec.bincode.codec import decode, encode
from arroyo_dagster.state.codec.bincode.shapes import MAX_EMPTY_ITEMS
from arroyo_dagster.state.codec.operations import decode_operation, delete_keys_of, encode_key
from tests.formats import encode_operation
from tests.formats import types as t

NANOS = 10**9


@dataclass
class KafkaState:
    partition: t.I32
    offset: t.I64


@dataclass
class WatermarkState:
    last_watermark_emitted_at: dt.datetime
    max_watermark: dt.datetime


@dataclass
class ImpulseState:
    counter: t.USize
    start_time: t.SystemTimeNanos


@dataclass(frozen=True)
class Insert:
    pass


@dataclass(frozen=True)
class Delete:
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Stop:
    code: str
    delay: t.I32


@dataclass
class Flight:
    number: int
    stops: list[Stop]
    seen: dict[str, Stop] = field(default_factory=dict)


@dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("negative")


class Colour(enum.Enum):
    RED = 7
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 5
    HIGH = 9


@dataclass(frozen=True)
class Finished:
    pass


@dataclass(frozen=True)
class RecordsRead:
    count: t.USize


Progress = Annotated[Finished | RecordsRead, t.enum_of("Progress", Finished, RecordsRead)]


@dataclass(frozen=True)
class FileState:
    path: str
    progress: Progress
    colour: Colour | None = None


OPERATION = t.EnumOf(
    "Operation", (t.Variant("Insert", t.describe(Insert)), t.Variant("Delete", t.describe(Delete)))
)
READ_STATE = t.EnumOf(
    "FileReadState", (t.Variant("Finished", t.UNIT), t.Variant("RecordsRead", t.Primitive("usize")))
)
KINESIS_OFFSET = t.EnumOf(
    "KinesisOffset",
    (
        t.Variant("Earliest", t.UNIT),
        t.Variant("Latest", t.UNIT),
        t.Variant("SequenceNumber", t.STRING),
        t.Variant("Timestamp", t.TimeOf("system_time")),
    ),
)
KINESIS_STATE = t.TupleOf((t.STRING, t.STRING, KINESIS_OFFSET, t.BOOL))
UTC = dt.UTC


def at(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, UTC)


VECTORS: list[tuple[Any, Any, str]] = [
    (t.U64, 250, "fa"),
    (t.U64, 251, "fb fb 00"),
    (t.U64, 65536, "fc 00 00 01 00"),
    (t.U64, 2**32, "fd 00 00 00 00 01 00 00 00"),
    (t.U64, 65535, "fb ff ff"),
    (t.U128, 2**64, "fe 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00"),
    (t.I32, 0, "00"),
    (t.I32, -1, "01"),
    (t.I32, 1, "02"),
    (t.I32, -126, "fb fb 00"),
    (t.I32, 126, "fb fc 00"),
    (t.I128, -(2**127), "fe" + " ff" * 16),
    (t.U8, 251, "fb"),
    (t.I8, -1, "ff"),
    (bool, True, "01"),
    (t.Char, "é", "c3 a9"),
    (float, 1.5, "00 00 00 00 00 00 f8 3f"),
    (t.F32, 1.5, "00 00 c0 3f"),
    (None, None, ""),
    (bytes, b"\x01\x02", "02 01 02"),
    (list[t.U8], [1, 2], "02 01 02"),
    (t.ArrayOf(t.Primitive("u8"), 2), [1, 2], "01 02"),
    (t.I32, 3, "06"),
    (KafkaState, KafkaState(3, 1234), "06 fb a4 09"),
    (t.U32, 2, "02"),
    (t.SystemTimeNanos, 1700000000 * NANOS + 500, "fc 00 f1 53 65 fb f4 01"),
    (t.OptionOf(t.TimeOf("system_time")), 1700000000 * NANOS + 500, "01 fc 00 f1 53 65 fb f4 01"),
    (t.OptionOf(t.TimeOf("system_time")), None, "00"),
    (
        WatermarkState,
        WatermarkState(at(1700000000), at(1699999995.25)),
        "fc 00 f1 53 65 00 fc fb f0 53 65 fc 80 b2 e6 0e",
    ),
    (ImpulseState, ImpulseState(1000, 1700000000 * NANOS), "fb e8 03 fc 00 f1 53 65 00"),
    (str, "a.json", "06 61 2e 6a 73 6f 6e"),
    (
        t.TupleOf((t.STRING, READ_STATE)),
        ("a.json", {"RecordsRead": 42}),
        "06 61 2e 6a 73 6f 6e 01 2a",
    ),
    (READ_STATE, "Finished", "00"),
    (tuple[()], (), ""),
    (t.OptionOf(t.STRING), "id7", "01 03 69 64 37"),
    (
        KINESIS_STATE,
        ("s", "shardId-000000000000", {"SequenceNumber": "495"}, False),
        "01 73 14 73 68 61 72 64 49 64 2d" + " 30" * 12 + " 02 03 34 39 35 00",
    ),
    (t.USize, 401, "fb 91 01"),
    (
        WatermarkState,
        WatermarkState(at(1357066500), at(1357065600)),
        "fc 04 31 e3 50 00 fc 80 2d e3 50 00",
    ),
    (t.OptionOf(t.TimeOf("system_time")), 1357035300 * NANOS, "01 fc 24 b7 e2 50 00"),
    (ImpulseState, ImpulseState(182, 1795225382292863173), "b6 fc 26 f7 00 6b fc c5 bc 74 11"),
    (tuple[t.USize, list[str]], (6, []), "06 00"),
    (OPERATION, Insert(), "00"),
    (OPERATION, Delete(b"k"), "01 01 6b"),
    (t.U16, 300, "fb 2c 01"),
    (t.I16, -129, "fb 01 01"),
    (t.ISize, -3, "05"),
    (t.U128, 2**128 - 1, "fe" + " ff" * 16),
    (t.F32, -0.0, "00 00 00 80"),
    (t.DurationNanos, 3_000_000_007, "03 07"),
    (dt.timedelta, dt.timedelta(seconds=3), "03 00"),
    (t.Char, "𝄞", "f0 9d 84 9e"),
    # Computed with the crate bincode 2.0.1:
    (list[t.Char], ["a", "é", "𝄞"], "03 61 c3 a9 f0 9d 84 9e"),
    (tuple[t.U16, t.U16, t.U16], (250, 251, 65535), "fa fb fb 00 fb ff ff"),
    (tuple[t.I16, t.I16], (-126, -(2**15)), "fb fb 00 fb ff ff"),
    (
        tuple[t.I128, t.U128, t.U128, t.I128],
        (-(2**127), 2**128 - 1, 2**64, -1),
        "fe" + " ff" * 16 + "fe" + " ff" * 16 + "fe 0000000000000000 01 00000000000000 01",
    ),
    (
        tuple[t.F32, float, float],
        (-0.0, 1.5, 1.7976931348623157e308),
        "00 00 00 80 00 00 00 00 00 00 f8 3f ff ff ff ff ff ff ef 7f",
    ),
    (t.ArrayOf(t.Primitive("u32"), 2), [1, 300], "01 fb 2c 01"),
    (dict[str, t.U8], {"a": 1, "b": 255}, "02 01 61 01 01 62 ff"),
    (t.DurationNanos, (2**64 - 1) * NANOS + 999_999_999, "fd" + " ff" * 8 + "fc ff c9 9a 3b"),
    (tuple[bool, bool], (True, False), "01 00"),
    (tuple[t.ISize, t.USize], (-(2**63), 2**64 - 1), "fd" + " ff" * 8 + "fd" + " ff" * 8),
    (Colour, Colour.GREEN, "01"),
    (Level, Level.LOW, "00"),
    (dict[Colour, Level], {Colour.RED: Level.HIGH}, "01 00 01"),
    (Progress, Finished(), "00"),
    (Progress, RecordsRead(42), "01 2a"),
    (FileState, FileState("a", RecordsRead(1), Colour.RED), "01 61 01 01 01 00"),
    (list[FileState], [FileState("a", Finished())], "01 01 61 00 00"),
    (tuple[t.U8, ...], (1, 2), "02 01 02"),
    (Sequence[str], ["a"], "01 01 61"),
    (Mapping[str, bool], {"a": True}, "01 01 61 01"),
    (set[str], {"b", "a"}, "02 01 61 01 62"),
    (dict[str, int], {"b": 1, "a": 2}, "02 01 62 02 01 61 04"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), VECTORS)
def test_values_have_the_bytes_of_the_specification(kind: Any, value: Any, expected: str) -> None:
    raw = bytes.fromhex(expected.replace(" ", ""))
    assert encode(value, kind) == raw
    assert decode(raw, kind) == value
    assert type(decode(raw, kind)) is type(value)


@pytest.mark.parametrize(
    ("kind", "raw", "message", "offset"),
    [
        (t.U16, "fc01000000", "begins no number of u16", 0),
        (t.U32, "fd0100000000000000", "begins no number of u32", 0),
        (t.I64, "fe" + "00" * 16, "begins no number of i64", 0),
        (t.U128, "ff" + "00" * 16, "begins no number", 0),
        (t.U64, "", "end within", 0),
        (t.U64, "fb01", "end within", 2),
        (t.U128, "fe01", "end within", 2),
        (float, "0000", "end within", 2),
        (bool, "02", "no bool", 0),
        (int | None, "02", "begins no option", 0),
        (str, "0361", "3 bytes of text", 1),
        (str, "02c328", "not UTF-8", 1),
        (t.Char, "c3", "end within", 1),
        (t.Char, "80ff", "not UTF-8", 0),
        (bytes, "fd" + "ff" * 8, "bytes are announced", 9),
        (list[int], "fdffffffffffffffff01", "items are announced", 0),
        (dict[str, int], "fbffff", "items are announced", 0),
        (list[tuple[()]], "fdffffffffffffffff", "items that take no bytes", 0),
        (list[t.ArrayOf(t.STRING, 0)], "fdffffffffffffffff", "items that take no bytes", 0),
        (t.ArrayOf(t.Primitive("f64"), 2**32), "00", "need 34359738368 bytes", 0),
        (set[int], "020202", "occurs twice", 0),
        (dict[int, int], "0202020203", "occurs twice", 0),
        (READ_STATE, "02", "no variant 2", 0),
        (READ_STATE, "fd0000000000000000", "begins no number", 0),
        (int, "0000", "bytes follow", 1),
        (Positive, "01", "refuses the values found: negative", 0),
        (dt.datetime, "01fb0001", "between two microseconds", 0),
        (dt.timedelta, "0001", "declare the type DurationNanos", 0),
        (dt.datetime, "fdffffffffffffff0000", "more than Python's types hold", 0),
        (t.SystemTimeNanos, "fd" + "ff" * 8 + "00", "do not fit system_time", 0),
        (t.DurationNanos, "fd" + "ff" * 8 + "fc00ca9a3b", "do not fit duration", 0),
    ],
)
def test_broken_bytes_are_refused_by_place(kind: Any, raw: str, message: str, offset: int) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        decode(bytes.fromhex(raw), kind)
    assert caught.value.facts["offset"] == offset


def test_keys_that_come_twice_are_as_in_arroyo_only_on_request() -> None:
    assert decode(bytes.fromhex("0202020204"), dict[int, int], strict=False) == {1: 2}
    assert decode(bytes.fromhex("020202"), set[int], strict=False) == {1}
    nested = tuple[dict[str, dict[int, int]], int]
    raw = bytes.fromhex("0101610202020204" + "06")
    assert decode(raw + b"more", nested, strict=False) == ({"a": {1: 2}}, 3)
    with pytest.raises(FormatError, match="occurs twice"):
        decode(raw, nested)


def test_the_order_of_a_union_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"order its variants.*enum_of\(name, Finished, RecordsR"):
        codec_for(Finished | RecordsRead)
    with pytest.raises(InputError, match="must be a dataclass"):
        t.enum_of("Progress", Finished, int)
    with pytest.raises(InputError, match="several flags"):
        codec_for(enum.Flag("Flags", "A B"))


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (t.U8, 256, "from 0 to 255"),
        (t.I8, -129, "from -128 to 127"),
        (t.U64, -1, "from 0 to 18446744073709551615"),
        (t.U64, 2**64, "from 0 to 18446744073709551615"),
        (int, 2**63, "for i64"),
        (int, True, "expected an int"),
        (int, 1.0, "expected an int"),
        (int, None, "expected an int"),
        (bool, 1, "expected True or False"),
        (float, True, "expected a float"),
        (float, "1", "expected a float"),
        (float, 2**53 + 1, "holds exactly"),
        (float, 10**400, "holds exactly"),
        (t.F32, 1e300, "fits f32"),
        (str, b"a", "expected a str"),
        (str, "\ud800", "surrogate"),
        (t.Char, "ab", "one character"),
        (bytes, "a", "expected bytes"),
        (None, 0, "expected None"),
        (list[int], "12", "expected a list"),
        (tuple[int, int], (1,), "expected a tuple of 2"),
        (t.ArrayOf(t.STRING, 2), ["a"], "exactly 2 items"),
        (set[int], [1], "expected a set"),
        (set[t.F32], {0.1, struct.unpack("<f", struct.pack("<f", 0.1))[0]}, "same bytes"),
        (dict[str, int], [("a", 1)], "expected a dict"),
        (Stop, {"code": "a", "delay": 1}, "exactly a Stop"),
        (t.without_classes(t.describe(Stop)), {"code": "a"}, "fields code, delay"),
        (READ_STATE, "RecordsRead", "one of the variants"),
        (READ_STATE, {"Finished": None}, "one of the variants"),
        (Colour, "RED", "a member of Colour"),
        (Colour, Level.LOW, "a member of Colour"),
        (Progress, FileState("a", Finished()), "one of the variants of Progress"),
        (OPERATION, "Insert", "one of the variants"),
        (list[None], [None] * (MAX_EMPTY_ITEMS + 1), "take no bytes"),
        (dt.datetime, dt.datetime(2020, 1, 1), "time zone"),
        (dt.datetime, dt.datetime(1969, 12, 31, tzinfo=UTC), "not before 1970"),
        (dt.timedelta, dt.timedelta(seconds=-1), "not negative"),
        (t.SystemTimeNanos, -1, "nanoseconds of system_time"),
        (t.SystemTimeNanos, 2**63 * NANOS, "nanoseconds of system_time"),
    ],
)
def test_values_that_do_not_fit_are_refused(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode(value, kind)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (
            Flight(1, [Stop(code="a", delay=0)] * 3 + [Stop(code="b", delay=2**31)]),
            ".stops[3].delay",
        ),
        (Flight(1, [], {"x": Stop(code=1, delay=0)}), ".seen['x'].code"),  # type: ignore[arg-type]
        (Flight(1, [], {3: Stop(code="", delay=0)}), ".seen[key 3]"),  # type: ignore[dict-item]
        (Flight("1", []), ".number"),  # type: ignore[arg-type]
    ],
)
def test_an_error_says_where_the_value_is(value: Flight, path: str) -> None:
    with pytest.raises(InputError) as caught:
        encode(value, Flight)
    assert caught.value.facts["at"] == path
    with pytest.raises(InputError) as caught:
        codec_for(Flight).encode_many([Flight(1, []), value])
    assert caught.value.facts["at"] == path


def test_nanoseconds_of_subclasses_are_never_cut() -> None:
    class Finer(dt.datetime):
        nanosecond = 5

    with pytest.raises(InputError, match="SystemTimeNanos"):
        encode(Finer(2020, 1, 1, tzinfo=UTC), dt.datetime)


def test_types_that_cannot_be_decoded_are_refused_at_once() -> None:
    @dataclass
    class Mutable:
        number: int

    with pytest.raises(InputError, match="frozen=True"):
        codec_for(t.SetOf(t.describe(Mutable)))
    with pytest.raises(InputError, match="take no bytes"):
        codec_for(t.ArrayOf(t.ArrayOf(t.UNIT, 1000), 1000))
    with pytest.raises(InputError, match="cannot be encoded"):
        codec_for([int])
    deep: t.Type = t.STRING
    for _ in range(100):
        deep = t.ListOf(deep)
    with pytest.raises(InputError, match="lie within each other"):
        codec_for(deep)


@pytest.mark.parametrize(
    "kind", [list[int], dict[str, int], set[int], t.U128, tuple[int, list[int]]]
)
def test_types_without_a_fixed_shape_say_so(kind: Any) -> None:
    assert codec_for(kind).column_type is None
    with pytest.raises(InputError, match="no fixed shape"):
        codec_for(kind).decode_column(pa.array([], pa.binary()))


def test_a_time_that_no_column_holds_is_refused() -> None:
    codec = codec_for(t.SystemTimeNanos)
    rows = pa.array([codec.encode(2**63)])
    with pytest.raises(InputError, match="too late"):
        codec.decode_column(rows)


_EDGES = [0, 1, 125, 126, 250, 251, 255, 2**15, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32]
VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [*_EDGES, *(-edge for edge in _EDGES), 2**63 - 1, -(2**63)]),
    (pa.uint64(), [*_EDGES, 2**64 - 1]),
    (pa.uint32(), _EDGES[:-1]),
    (pa.int16(), [-(2**15), 300, 0]),
    (pa.uint16(), [0, 250, 251, 2**16 - 1]),
    (pa.int8(), [-128, 0, 127]),
    (pa.uint8(), [0, 250, 251, 255]),
    (pa.bool_(), [True, False]),
    (pa.float64(), [0.5, -0.0]),
    (pa.float32(), [1.5]),
    (pa.string(), ["", "a", "é" * 200, "x" * 70_000]),
    (pa.large_string(), ["q"]),
    (pa.binary(), [b"", b"\0"]),
    (pa.large_binary(), [b"1"]),
    (pa.binary(3), [b"abc"]),
    (pa.timestamp("ns"), [0, -5, 10**18]),
    (pa.date32(), [1, -1]),
    (pa.time32("s"), [77]),
    (pa.duration("s"), [-4]),
]


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize(("kind", "values"), VALUES, ids=lambda one: str(one)[:20])
def test_column_deletes_match_single_keys(
    kind: pa.DataType, values: list[Any], nullable: bool
) -> None:
    fields = [pa.field("a", kind, nullable), pa.field("b", pa.string())]
    whole = pa.array([*values, None] if nullable else values, kind)
    for column in (whole, pa.concat_arrays([whole, whole]).slice(1, len(whole))):
        plain = column
        if pa.types.is_temporal(kind):
            plain = column.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
        found = delete_keys_of(fields, [column, pa.array(["z"] * len(column))])
        expected = [DeleteKey(encode_key(fields, [value, "z"])) for value in plain.to_pylist()]
        assert [decode_operation(one) for one in found.to_pylist()] == expected
        assert found.to_pylist() == [encode_operation(one) for one in expected]
