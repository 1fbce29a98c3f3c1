"""Columns of bincode decoded at once: the same values, and the same refusals with their row."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.model import types as t

NS = pa.timestamp("ns", tz="UTC")


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclass(frozen=True)
class KafkaState:
    partition: t.I32
    offset: t.I64


@dataclass(frozen=True)
class Seen:
    name: str
    at: t.SystemTimeNanos | None
    side: Side


KINDS: list[tuple[Any, list[Any], pa.DataType]] = [
    (t.U8, [0, 251, 255], pa.uint8()),
    (t.I8, [0, -1, -128], pa.int8()),
    (t.U16, [0, 250, 251, 65535], pa.uint16()),
    (t.I32, [0, -1, 126, -(2**31)], pa.int32()),
    (t.USize, [0, 2**16, 2**32, 2**64 - 1], pa.uint64()),
    (int, [0, -(2**63), 2**63 - 1, 300], pa.int64()),
    (t.F32, [0.5, -1.0], pa.float32()),
    (float, [0.1, float("inf")], pa.float64()),
    (bool, [True, False], pa.bool_()),
    (t.Char, ["a", "é", "€", "𝄞"], pa.string()),
    (str, ["", "a", "x" * 300, "héllo"], pa.string()),
    (bytes, [b"", b"\xff" * 251], pa.binary()),
    (t.SystemTimeNanos, [0, 2**63 - 1, 1_357_066_500_000_000_001], NS),
    (t.DurationNanos, [0, 2**63 - 1], pa.duration("ns")),
    (KafkaState, [KafkaState(3, 1234), KafkaState(-1, 2**40)], None),
    (tuple[str, t.U32], [("a", 1), ("", 70000)], None),
    (int | None, [None, 1, None, 2**40], pa.int64()),
    (Side, [Side.RIGHT, Side.LEFT], pa.dictionary(pa.int32(), pa.string())),
    (Seen, [Seen("a", None, Side.LEFT), Seen("b", 5, Side.RIGHT)], None),
    (KafkaState | None, [None, KafkaState(1, 2), None], None),
    (tuple[()], [(), ()], pa.struct([])),
    (None, [None, None], pa.null()),
]


def plain(value: Any, kind: t.Type) -> Any:
    """A decoded value as Arrow gives it back."""
    if value is None:
        return None
    if isinstance(kind, t.OptionOf):
        return plain(value, kind.item)
    if isinstance(kind, t.StructOf):
        return {f.name: plain(getattr(value, f.name), f.type) for f in kind.fields}
    if isinstance(kind, t.TupleOf):
        return {str(i): plain(v, k) for i, (v, k) in enumerate(zip(value, kind.items, strict=True))}
    return value.name if isinstance(value, enum.Enum) else value


def as_counts(column: pa.ChunkedArray) -> list[Any]:
    """Values of a column; times as counts, for Python's end at microseconds."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_struct(column.type) and column.type.num_fields:
        fields = [as_counts(part) for part in column.flatten()]
        rows = [
            dict(zip([f.name for f in column.type], row, strict=True))
            for row in zip(*fields, strict=True)
        ]
        return [
            row if valid else None
            for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)
        ]
    return column.to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "values", "expected"), KINDS)
def test_a_column_decodes_as_its_values_one_by_one(
    kind: Any, values: list[Any], expected: pa.DataType | None
) -> None:
    codec = codec_for(kind)
    column = codec.decode_column(pa.array(codec.encode_many(values), pa.binary()))
    assert column.type == codec.column_type
    assert expected is None or column.type == expected
    assert as_counts(column) == [plain(value, t.describe(kind)) for value in values]


def test_what_may_be_missing_is_nullable_and_nothing_else() -> None:
    kind = codec_for(Seen).column_type
    assert [field.nullable for field in kind] == [False, True, False]


def test_rows_of_many_blocks_slices_and_chunks_are_one_column() -> None:
    codec = codec_for(KafkaState)
    values = [KafkaState(number, number * 1000) for number in range(40_000)]
    raw = pa.array(codec.encode_many(values), pa.binary())
    expected = [{"partition": v.partition, "offset": v.offset} for v in values]
    assert codec.decode_column(raw).to_pylist() == expected
    chunked = pa.chunked_array([raw.slice(3, 20_000), raw.slice(7, 0), raw.slice(39_990)])
    assert codec.decode_column(chunked).to_pylist() == expected[3:20_003] + expected[39_990:]
    assert codec.decode_column(raw.cast(pa.large_binary())).to_pylist() == expected
    assert codec.decode_column(raw.slice(0, 0)).to_pylist() == []


BROKEN: list[tuple[Any, bytes]] = [
    (t.U16, bytes.fromhex("fc00000000")),
    (t.U32, bytes.fromhex("fd0000000000000000")),
    (t.U64, b"\xff"),
    (t.U64, b""),
    (t.U64, b"\xfb\x01"),
    (t.U64, b"\x01\x02"),
    (float, b"\x00" * 7),
    (bool, b"\x02"),
    (str, bytes.fromhex("fdffffffffffffffff61")),
    (str, b"\x02a"),
    (str, b"\x02\xc3\x28"),
    (bytes, b"\x05a"),
    (t.Char, b"\x80"),
    (t.Char, b"\xc3"),
    (int | None, b"\x02"),
    (int | None, b"\x01"),
    (Side, b"\x02"),
    (KafkaState, b"\x06\xfb\xa4"),
]


@pytest.mark.parametrize(("kind", "raw"), BROKEN)
def test_a_broken_row_is_refused_as_it_is_alone(kind: Any, raw: bytes) -> None:
    codec = codec_for(kind)
    good = {t.Char: "a", Side: Side.LEFT, KafkaState: KafkaState(1, 1), bool: True, float: 1.0}
    good |= {str: "a", bytes: b"a"}
    right = codec.encode(good.get(kind, 1))
    with pytest.raises(FormatError) as alone:
        codec.decode(raw)
    rows = pa.chunked_array([[right] * 3, [right, raw, right, raw]], pa.binary())
    with pytest.raises(FormatError) as caught:
        codec.decode_column(rows)
    assert str(caught.value.message) == str(alone.value.message)
    assert caught.value.facts == alone.value.facts | {"row": 4}


def test_bytes_after_a_value_are_ignored_only_on_request() -> None:
    rows = pa.array([b"\x01more", b"\x02"])
    assert codec_for(t.U8).decode_column(rows, strict=False).to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "kind", [list[int], dict[str, int], set[int], t.U128, tuple[int, list[int]]]
)
def test_types_without_a_fixed_shape_say_so(kind: Any) -> None:
    assert codec_for(kind).column_type is None
    with pytest.raises(InputError, match="no fixed shape"):
        codec_for(kind).decode_column(pa.array([], pa.binary()))


def test_columns_of_something_else_are_refused() -> None:
    codec = codec_for(int)
    for data in ([b"\x01"], pa.array(["a"]), pa.array([1])):
        with pytest.raises(InputError, match="must be of type binary"):
            codec.decode_column(data)
    with pytest.raises(InputError, match="nulls"):
        codec.decode_column(pa.array([None], pa.binary()))


def test_a_time_that_no_column_holds_is_refused() -> None:
    codec = codec_for(t.SystemTimeNanos)
    rows = pa.array([codec.encode(2**63)])
    with pytest.raises(InputError, match="too late"):
        codec.decode_column(rows)
