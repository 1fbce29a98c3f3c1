"""Types of computed columns that may fit the job's table are those whose values convert exactly."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster import HashVariant, Layout, OperatorId, ParquetBackend, timestamp_table_config
from arroyo_dagster.state.operations.surgery.bootstrap import column_errors, fits
from arroyo_dagster.state.operations.surgery.computed_rows import TableTarget
from tests.evolved_jobs import sql_job
from tests.formats import ExpiringTimeKeyConfig, memory_schema

MOMENT = dt.datetime(2026, 11, 24, 10, tzinfo=dt.UTC)
WINDOW = {"start": MOMENT, "end": MOMENT}
FITTING: dict[str, tuple[pa.DataType, pa.DataType, Any]] = {
    "a wider number": (pa.int64(), pa.int32(), 7),
    "no sign": (pa.int64(), pa.uint64(), 7),
    "a decimal without fraction": (pa.decimal128(30, 0), pa.uint64(), Decimal(2**64 - 1)),
    "a whole number for a fraction": (pa.int64(), pa.float64(), 7),
    "a narrower fraction": (pa.float32(), pa.float64(), 0.5),
    "a wider decimal": (pa.decimal128(38, 2), pa.decimal128(20, 2), Decimal("1.25")),
    "an instant": (pa.timestamp("us", "UTC"), pa.timestamp("ns"), MOMENT),
    "text": (pa.large_string(), pa.string(), "x"),
    "an id": (pa.binary(), pa.binary(16), b"x" * 16),
    "NULL": (pa.null(), pa.string(), None),
    "a list": (pa.list_(pa.int64()), pa.list_(pa.uint32()), [1, 2]),
    "a window": (
        pa.struct([(name, pa.timestamp("us", "UTC")) for name in WINDOW]),
        pa.struct([(name, pa.timestamp("ns")) for name in WINDOW]),
        WINDOW,
    ),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_type_that_fits_converts_without_another_value(name: str) -> None:
    found, wanted, value = FITTING[name]
    assert fits(found, wanted)
    schema = pa.schema([("v", wanted), pa.field("_timestamp", pa.timestamp("ns"), False)])
    config = timestamp_table_config("t", retention_micros=1, schema=schema).config
    assert isinstance(config, ExpiringTimeKeyConfig)
    job = sql_job(Layout.LEGACY, "job_b", epochs=1)
    target = TableTarget(
        checkpoint=ParquetBackend(job.store, job.paths).load(),
        operator=OperatorId("op"),
        config=config,
        variant=HashVariant.FALLBACK,
        cutoff_micros=0,
    )
    rows = pa.table([pa.array([value], found), pa.array([MOMENT])], names=["v", "_timestamp"])
    assert target.stored(rows).column("v").combine_chunks().equals(_naive(value, wanted))


def _naive(value: Any, kind: pa.DataType) -> pa.Array:
    """A value as Arroyo has it: times without a zone."""
    text = {None: None, MOMENT: MOMENT.replace(tzinfo=None)}
    if isinstance(value, dict):
        value = {name: text[one] for name, one in value.items()}
    return pa.array(
        [text.get(value, value) if not isinstance(value, (dict, list)) else value], kind
    )


MISFITS: dict[str, tuple[pa.DataType, pa.DataType]] = {
    "text for a number": (pa.string(), pa.int64()),
    "a number for text": (pa.int64(), pa.string()),
    "a mean for a sum": (pa.float64(), pa.int64()),
    "a fraction in a decimal": (pa.decimal128(20, 2), pa.int64()),
    "a decimal that a float rounds": (pa.decimal128(20, 2), pa.float64()),
    "a double that a float rounds": (pa.float64(), pa.float32()),
    "a number of seconds for a time": (pa.int64(), pa.timestamp("ns")),
    "a day for a time": (pa.date32(), pa.timestamp("ns")),
    "a truth for a number": (pa.bool_(), pa.int64()),
    "a number for a truth": (pa.int32(), pa.bool_()),
    "a number without the room of a decimal": (pa.int64(), pa.decimal128(20, 2)),
    "text for bytes": (pa.string(), pa.binary()),
    "a list of text": (pa.list_(pa.string()), pa.list_(pa.int64())),
    "one value for a list": (pa.int64(), pa.list_(pa.int64())),
    "another field": (pa.struct([("a", pa.int64())]), pa.struct([("b", pa.int64())])),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_type_whose_values_become_others_does_not_fit(name: str) -> None:
    assert not fits(*MISFITS[name])


def test_every_column_that_does_not_fit_is_named_with_both_types() -> None:
    config = sql_job(Layout.LEGACY, "job_b", epochs=1).configs["tumbling_4", "t"].config
    assert isinstance(config, ExpiringTimeKeyConfig)
    wanted = memory_schema(config)
    kinds = [pa.int64(), pa.string(), pa.int64(), pa.timestamp("us")]
    found = pa.schema(list(zip(wanted.names, kinds, strict=True)))
    texts = [str(one) for one in column_errors("tumbling_4.t", found, wanted)]
    assert [text.partition(". Next")[0] for text in texts] == [
        "tumbling_4.t: column 'k' does not fit the type string of the job: it is int64",
        "tumbling_4.t: column 'count(Int64(1))[count]' does not fit the type int64 of the job: it "
        "is string",
    ]
    (other,) = column_errors("tumbling_4.t", pa.schema([found.field(0)]), wanted)
    assert "have other columns than the table" in str(other)
