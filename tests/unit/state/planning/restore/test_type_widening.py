"""Which types hold every value of another: what is said, against casting the edges of each."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa

from arroyo_dagster.state.planning.restore.schema_evolution import bare, fits, type_text
from tests.formats import schema_to_json

_ITEM = pa.field("item", pa.int32(), nullable=False)
EDGES: dict[pa.DataType, list[Any]] = {
    pa.null(): [None],
    pa.bool_(): [True, False],
    **{pa.type_for_alias(f"int{b}"): [-(2 ** (b - 1)), 2 ** (b - 1) - 1] for b in (8, 16, 32, 64)},
    **{pa.type_for_alias(f"uint{b}"): [0, 2**b - 1] for b in (8, 16, 32, 64)},
    pa.float16(): [65504.0, 0.5, -0.0],
    pa.float32(): [3.4028234663852886e38, 1.401298464324817e-45],
    pa.float64(): [1.7976931348623157e308, 0.1],
    pa.string(): ["", "ä"],
    pa.large_string(): ["", "ä"],
    pa.binary(): [b"", b"\xff"],
    pa.large_binary(): [b"", b"\xff"],
    pa.binary(2): [b"\x00\xff"],
    pa.date32(): [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
    pa.date64(): [datetime.date(1, 1, 1)],
    pa.time32("s"): [datetime.time(23, 59, 59)],
    pa.time32("ms"): [datetime.time(23, 59, 59, 999_000)],
    pa.time64("us"): [datetime.time(23, 59, 59, 999_999)],
    pa.time64("ns"): [datetime.time(23, 59, 59, 999_999)],
    pa.timestamp("s"): [datetime.datetime(9999, 1, 1)],
    pa.timestamp("ns"): [datetime.datetime(2026, 1, 1)],
    pa.decimal128(5, 2): [Decimal("999.99")],
    pa.decimal128(6, 3): [Decimal("999.999")],
    pa.decimal128(6, 2): [Decimal("9999.99")],
    pa.decimal128(6, 4): [Decimal("99.9999")],
    pa.decimal256(40, 3): [Decimal("9" * 37 + ".999")],
    pa.list_(_ITEM): [[1, 2**31 - 1], []],
    pa.list_(pa.int64()): [[1, None]],
    pa.large_list(pa.int64()): [[1, None]],
    pa.list_(pa.int32(), 2): [[1, 2]],
    pa.list_(pa.int64(), 2): [[1, 2]],
    pa.struct([pa.field("x", pa.int8(), nullable=False)]): [{"x": 1}],
    pa.struct([pa.field("x", pa.int64())]): [{"x": 1}],
    pa.struct([("x", pa.int64()), ("y", pa.int64())]): [{"x": 1, "y": 2}],
    pa.map_(pa.string(), pa.int32()): [[("k", 1)]],
    pa.map_(pa.string(), pa.int64()): [[("k", 1)]],
    pa.dictionary(pa.int8(), pa.string()): ["a", "b"],
    pa.dictionary(pa.int64(), pa.string()): ["a", "b"],
}


def as_json(kind: pa.DataType) -> Any:
    schema = json.loads(schema_to_json(pa.schema([pa.field("c", kind)])))
    return schema["fields"][0]["data_type"]


def test_a_value_that_fits_comes_through_a_cast_unchanged() -> None:
    widened = 0
    for before, edges in EDGES.items():
        for now in EDGES:
            if not fits(as_json(before), as_json(now)):
                continue
            old = pa.array(edges, before)
            new = old.cast(now)
            assert new.to_pylist() == old.to_pylist(), (before, now)
            if before != pa.null():
                assert new.cast(before).equals(old), (before, now)
                widened += before != now
    assert widened >= 50


def test_what_does_not_fit_is_told() -> None:
    refused = [
        (pa.int64(), pa.int32()),
        (pa.int64(), pa.uint64()),
        (pa.uint64(), pa.int64()),
        (pa.int64(), pa.float64()),
        (pa.uint32(), pa.float32()),
        (pa.float64(), pa.float32()),
        (pa.int32(), pa.string()),
        (pa.string(), pa.binary()),
        (pa.large_string(), pa.string()),
        (pa.timestamp("s"), pa.timestamp("ns")),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
        (pa.duration("s"), pa.duration("ms")),
        (pa.time64("ns"), pa.time64("us")),
        (pa.date64(), pa.date32()),
        (pa.decimal128(6, 2), pa.decimal128(6, 3)),
        (pa.decimal256(40, 3), pa.decimal128(38, 3)),
        (pa.list_(pa.int64()), pa.list_(_ITEM)),
        (pa.large_list(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.int32(), 2), pa.list_(pa.int32(), 3)),
        (pa.struct([("x", pa.int64())]), pa.struct([("y", pa.int64())])),
        (pa.struct([("x", pa.int64())]), pa.struct([("x", pa.int64()), ("y", pa.int64())])),
        (pa.struct([("x", pa.int64()), ("y", pa.int64())]), pa.struct([("x", pa.int64())])),
        (pa.map_(pa.int32(), pa.int32()), pa.map_(pa.int64(), pa.int32())),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.large_string())),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.binary(2), pa.binary(3)),
        (pa.bool_(), pa.int8()),
        (pa.int8(), pa.null()),
        (pa.int8(), pa.list_(pa.int8())),
        (pa.list_(pa.int8()), pa.int8()),
    ]
    for before, now in refused:
        assert not fits(as_json(before), as_json(now)), (before, now)


def test_names_inside_lists_and_maps_do_not_count_and_those_of_fields_do() -> None:
    def named(name: str) -> pa.Field:
        return pa.field(name, pa.int64())

    assert bare(as_json(pa.list_(named("item")))) == bare(as_json(pa.list_(named("element"))))
    values = pa.map_(pa.string(), named("value")), pa.map_(pa.string(), named("values"))
    assert bare(as_json(values[0])) == bare(as_json(values[1]))
    assert bare(as_json(pa.struct([named("a")]))) != bare(as_json(pa.struct([named("b")])))
    assert type_text(as_json(pa.struct([named("a")]))) == "Struct<a: Int64>"
    assert type_text(as_json(pa.list_(_ITEM))) == "List<Int32 not null>"
    assert type_text(as_json(pa.timestamp("us", tz="UTC"))) == "Timestamp<Microsecond, UTC>"
