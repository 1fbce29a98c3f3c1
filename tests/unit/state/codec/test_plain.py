"""Decoded values as JSON holds them: nothing is lost, everything is JSON."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.state import codec_for
from arroyo_dagster.state.codec.plain import plain_scalar, plain_value
from arroyo_dagster.state.model.types import (
    UNIT,
    DurationNanos,
    EnumOf,
    Primitive,
    SystemTimeNanos,
    TupleOf,
    Variant,
    describe,
    without_classes,
)
from tests.formats import iso_micros


@dataclass(frozen=True)
class Point:
    x: int
    seen: SystemTimeNanos


SHAPE = EnumOf(
    "Shape", (Variant("Empty", UNIT), Variant("Pair", TupleOf((Primitive("u8"), Primitive("f64")))))
)


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        (2**64 - 1, Primitive("u64"), 2**64 - 1),
        (float("nan"), float, "NaN"),
        (float("-inf"), float, "-Infinity"),
        (b"\x00\xff", bytes, "00ff"),
        (None, str | None, None),
        ("x", str | None, "x"),
        ((1, "a"), tuple[int, str], [1, "a"]),
        ([b"a"], list[bytes], ["61"]),
        ({3, 1}, set[int], [1, 3]),
        ({"a": {1: b"b"}}, dict[str, dict[int, bytes]], {"a": [[1, "62"]]}),
        ({}, dict[int, int], []),
        (Point(1, 5), Point, {"x": 1, "seen": "1970-01-01T00:00:00.000000005Z"}),
        (1_500_000_001, DurationNanos, "1.500000001s"),
        (dt.timedelta(seconds=2), dt.timedelta, "2.000000000s"),
        (dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime, "2024-01-01T00:00:00.000000000Z"),
        ("Empty", SHAPE, "Empty"),
        ({"Pair": (1, float("inf"))}, SHAPE, {"Pair": [1, "Infinity"]}),
    ],
)
def test_a_decoded_value_is_plain(value: Any, kind: Any, plain: object) -> None:
    described = describe(kind)
    assert plain_value(value, described) == plain
    # A reader knows the stored description only, which names no Python class.
    stored = without_classes(described)
    data = codec_for(described).encode(value)
    assert plain_value(codec_for(stored).decode(data), stored) == plain
    json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        (2**64 - 1, pa.uint64(), 2**64 - 1),
        (float("nan"), pa.float32(), "NaN"),
        (1_704_067_219_000_000_001, pa.timestamp("ns"), "2024-01-01T00:00:19.000000001"),
        (-1, pa.timestamp("ns"), "1969-12-31T23:59:59.999999999"),
        (5, pa.timestamp("ms", "Europe/Berlin"), "1970-01-01T00:00:00.005Z"),
        (2**62, pa.timestamp("s"), "4611686018427387904s since 1970"),
        (1, pa.date32(), "1970-01-02"),
        (86_400_000, pa.date64(), "1970-01-02"),
        (3, pa.time64("ns"), "00:00:00.000000003"),
        (86_399, pa.time32("s"), "23:59:59"),
        (-1500, pa.duration("ms"), "-1.500s"),
        ((1, 2, 3), pa.month_day_nano_interval(), {"months": 1, "days": 2, "nanoseconds": 3}),
        (decimal.Decimal("1.20"), pa.decimal128(9, 2), "1.20"),
        (b"\x01", pa.binary(1), "01"),
        (b"\x01", pa.binary_view(), "01"),
        ([1, None], pa.large_list(pa.int8()), [1, None]),
        ([b"a"], pa.list_(pa.binary(), 1), ["61"]),
        ([("a", 1)], pa.map_(pa.string(), pa.int64()), [["a", 1]]),
        ("x", pa.dictionary(pa.int8(), pa.string()), "x"),
        (
            {"start": 1, "rest": [{"at": 2}]},
            pa.struct(
                [
                    ("start", pa.timestamp("ns")),
                    ("rest", pa.list_(pa.struct([("at", pa.timestamp("us"))]))),
                ]
            ),
            {
                "start": "1970-01-01T00:00:00.000000001",
                "rest": [{"at": "1970-01-01T00:00:00.000002"}],
            },
        ),
        (None, pa.null(), None),
        (True, pa.bool_(), True),
    ],
)
def test_an_arrow_value_is_plain(value: Any, kind: pa.DataType, plain: object) -> None:
    assert plain_scalar(pa.scalar(value, kind)) == plain
    json.dumps(plain, allow_nan=False)


def test_times_are_utc_with_every_digit() -> None:
    assert iso_micros(1_704_067_219_000_001) == "2024-01-01T00:00:19.000001Z"
    assert iso_micros(2**64 - 1) == "18446744073709551615us since 1970"
    assert iso_micros(None) is None
