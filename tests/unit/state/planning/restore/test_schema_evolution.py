"""How the columns of a table may change, and what its metadata notes of it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.state import Epoch, timestamp_table_config
from arroyo_dagster.state.planning.restore.schema_evolution import (
    changed_in,
    columns_in,
    evolution,
    how_to_read,
    noted,
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
def test_columns_may_be_added_dropped_moved_and_widened(
    now: ExpiringTimeKeyConfig, changes: list[str]
) -> None:
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
def test_what_may_not_change_is_told_with_its_reason(
    now: ExpiringTimeKeyConfig, problem: str
) -> None:
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
