"""How the columns of a table may change, and what its metadata notes of it."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.state import Epoch, timestamp_table_config
from arroyo_dagster.state.planning.restore.schema_evolution import (
    bare,
    changed_in,
    columns_in,
    evolution,
    fits,
    how_to_read,
    noted,
    type_text,
)
from tests.formats import ExpiringTimeKeyConfig, file_schema, memory_schema, schema_to_json

TIME = pa.field("_timestamp", pa.timestamp("ns"), nullable=False)
K = pa.field("k", pa.string())


def config(*columns: pa.Field, keys: Any = ("k",), **options: Any) -> ExpiringTimeKeyConfig:
    found = timestamp_table_config(
        "t", retention_micros=1, schema=pa.schema(columns), keys=keys, **options
    ).config
    assert isinstance(found, ExpiringTimeKeyConfig)
    return found


def int32(name: str = "v", *, nullable: bool = True) -> pa.Field:
    return pa.field(name, pa.int32(), nullable=nullable)


def int64(name: str = "v", *, nullable: bool = True) -> pa.Field:
    return pa.field(name, pa.int64(), nullable=nullable)


BEFORE = config(K, int32(), TIME)


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        (BEFORE, []),
        (config(K, int32(), TIME, int64("n")), ["added n: Int64"]),
        (config(int64("n"), K, int32(), TIME), ["added n: Int64"]),
        (config(K, TIME), ["dropped v: Int32"]),
        (config(K, int64(), TIME), ["v: Int32 became v: Int64"]),
        (config(int32(), K, TIME), ["columns moved"]),
        (config(K, int64("w"), TIME), ["added w: Int64", "dropped v: Int32"]),
        (config(K, pa.field("v", pa.int32(), metadata={"a": "b"}), TIME), []),
    ],
)
def test_columns_may_be_changed(now: ExpiringTimeKeyConfig, changes: list[str]) -> None:
    found = evolution(BEFORE, now)
    assert list(found.changes) == changes
    assert found.problems == ()


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (
            config(K, int32(), TIME, int64("n", nullable=False)),
            "n: Int64 not null must be nullable",
        ),
        (config(K, int32(nullable=False), TIME), "older rows may hold nulls"),
        (config(K, pa.field("v", pa.int16()), TIME), "v: Int32 cannot become v: Int16"),
        (config(K, pa.field("v", pa.string()), TIME), "some values would not fit"),
        (config(pa.field("k", pa.large_string()), int32(), TIME), "storage key was (k: Utf8)"),
        (config(pa.field("k", pa.string(), nullable=False), int32(), TIME), "storage key"),
        (config(int32(), TIME, keys=["v"]), "now (v: Int32)"),
        (config(K, int32(), TIME, keys=[]), "the storage key was (k: Utf8) and is now ()"),
        (config(K, int32(), TIME, keys=["k", "v"]), "keys never change"),
        (config(K, int32(), TIME, keys=["k"], routing_keys=[]), "the routing key"),
        (config(K, int32(), TIME, generational=True), "row generations"),
        (
            config(K, int32(), pa.field("_timestamp", pa.timestamp("ns"))),
            "_timestamp: Timestamp<Nanosecond, None> not null cannot become",
        ),
        (config(K, int32(), int32(), TIME), "there were 1 columns"),
    ],
)
def test_what_may_not_change_has_a_reason(now: ExpiringTimeKeyConfig, problem: str) -> None:
    assert any(problem in one for one in evolution(BEFORE, now).problems)


def test_columns_of_one_name_keep_their_places_or_go_together() -> None:
    twins = config(K, int32("0"), int64("0"), TIME)
    assert evolution(twins, config(K, int64("0"), int64("0"), TIME)).problems == ()
    assert evolution(twins, config(K, TIME)).problems == ()
    assert evolution(twins, config(K, int64("0"), TIME)).problems != ()
    assert evolution(twins, config(K, int32("0"), int32("0"), TIME)).problems != ()
    assert evolution(twins, twins).changes == ()


# ---- notes ---------------------------------------------------------------------------------------


def test_notes_are_carried_on_and_seen_by_nobody_but_readers() -> None:
    wider = config(K, int32(), int64("n"), TIME)
    first = noted(BEFORE, wider, Epoch(7))
    assert changed_in(first.schema) == 7
    assert [c.added_in for c in columns_in(first.schema.arrow_schema)] == [0, 0, 7, 0]
    assert memory_schema(first).equals(memory_schema(wider), check_metadata=True)
    assert file_schema(first).equals(file_schema(wider), check_metadata=True)
    assert noted(first, wider, Epoch(9)) == first
    assert noted(first, first, Epoch(9)) == first
    dropped = noted(first, config(K, int64("n"), TIME), Epoch(9))
    assert changed_in(dropped.schema) == 9
    assert [c.added_in for c in columns_in(dropped.schema.arrow_schema)] == [0, 7, 0]
    again = noted(dropped, wider, Epoch(11))
    assert [c.added_in for c in columns_in(again.schema.arrow_schema)] == [0, 11, 7, 0]


# ---- reading a file ------------------------------------------------------------------------------


def reading(now: ExpiringTimeKeyConfig, of: ExpiringTimeKeyConfig, epoch: int) -> Any:
    return how_to_read(now, schema_to_json(file_schema(of)), Epoch(epoch))


def test_a_file_of_an_older_epoch_is_read_as_what_the_table_is_now() -> None:
    wider = noted(BEFORE, config(int64("n"), K, int64(), TIME), Epoch(7))
    assert reading(wider, BEFORE, 6).sources == (None, 0, 1, 2)
    assert reading(wider, wider, 7).sources == (0, 1, 2, 3)
    # Merged from older files, and written with the columns of now.
    assert reading(wider, wider, 6).sources == (None, 1, 2, 3)


def test_a_column_dropped_and_added_again_has_no_old_values() -> None:
    dropped = noted(BEFORE, config(K, TIME), Epoch(5))
    again = noted(dropped, config(K, int32(), TIME), Epoch(8))
    assert reading(again, BEFORE, 3).sources == (0, None, 2)
    assert reading(again, dropped, 6).sources == (0, None, 1)
    assert reading(again, BEFORE, 8).sources == (0, 1, 2)
    other = noted(dropped, config(K, pa.field("v", pa.string()), TIME), Epoch(8))
    assert reading(other, BEFORE, 3).sources == (0, None, 2)


@pytest.mark.parametrize(
    ("now", "of", "epoch", "problem"),
    [
        (BEFORE, config(K, int32(), TIME, int64("n")), 1, "not match its table"),
        (BEFORE, config(K, TIME), 1, "not match its table"),
        (BEFORE, config(K, pa.field("v", pa.int16()), TIME), 1, "not match its table"),
        (noted(BEFORE, config(K, int64(), TIME), Epoch(5)), BEFORE, 5, "not match its table"),
        (noted(BEFORE, config(K, int64(), TIME), Epoch(5)), config(K, TIME), 4, "lacks"),
        (
            noted(BEFORE, config(K, int64(), TIME), Epoch(5)),
            config(K, pa.field("v", pa.string()), TIME),
            4,
            "cannot become",
        ),
        (
            noted(config(K, int32("0"), TIME), config(K, int64("0"), TIME), Epoch(5)),
            config(K, int32("0"), int32("0"), TIME),
            4,
            "cannot be matched",
        ),
    ],
)
def test_a_file_that_its_table_cannot_have_written_is_refused(
    now: ExpiringTimeKeyConfig, of: ExpiringTimeKeyConfig, epoch: int, problem: str
) -> None:
    found = reading(now, of, epoch)
    assert found.problem is not None
    assert problem in found.problem


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
