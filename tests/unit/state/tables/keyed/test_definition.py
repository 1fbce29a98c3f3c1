"""Registration of keyed state: the tables are ordinary ones, and say what they are."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.schema import file_schema, memory_schema
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.keyed.definition import (
    KeyedDefinition,
    KeyedForm,
    is_by_clock,
    keyed_state,
    keyed_timers,
)


def columns(config: TableConfig) -> list[str]:
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    return memory_schema(config.config).names


def test_a_table_has_the_columns_of_its_form() -> None:
    assert columns(keyed_state("t", str, int)) == ["key", "value", "_timestamp", "_generation"]
    assert columns(keyed_state("t", str, list[int]))[:3] == ["key", "position", "value"]
    assert columns(keyed_state("t", str, dict[str, int]))[:3] == ["key", "map_key", "value"]
    assert columns(keyed_timers("t", str))[:2] == ["at", "key"]


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (int | None, KeyedForm.VALUE),
        (pa.struct([("x", pa.int64())]), KeyedForm.VALUE),
        (pa.schema([("x", pa.int64()), ("y", pa.string())]), KeyedForm.VALUE),
        (list[str], KeyedForm.LIST),
        (pa.list_(pa.struct([("x", pa.int64()), ("y", pa.string())])), KeyedForm.LIST),
        (pa.map_(pa.string(), pa.float64()), KeyedForm.MAP),
    ],
    ids=str,
)
def test_a_stored_table_says_what_its_columns_mean(value: Any, form: KeyedForm) -> None:
    ttl = dt.timedelta(seconds=2)
    config = keyed_state("t", pa.schema([("a", pa.string()), ("b", pa.int64())]), value, ttl)
    found = KeyedDefinition.of(config)
    assert found is not None
    assert (found.form, found.ttl_micros) == (form, 2_000_000)
    assert [field.name for field in found.keys] == ["a", "b"]
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    stored = config.config.schema
    assert stored.routing_key_indices == (0, 1)
    assert len(stored.key_indices or ()) == len(found.storage_key)
    # What files contain has no notes: an Arroyo reads it as any other table.
    assert file_schema(config.config).metadata is None


def test_timers_are_stored_by_time_and_key_and_routed_by_key() -> None:
    config = keyed_timers("t", str, processing_time=True)
    found = KeyedDefinition.of(config)
    assert found is not None
    assert [field.name for field in found.storage_key] == ["at", "key"]
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    assert config.config.schema.key_indices == (0, 1)
    assert config.config.schema.routing_key_indices == (1,)
    assert is_by_clock(config)
    assert not is_by_clock(keyed_timers("t", str))


def test_other_tables_hold_no_keyed_state() -> None:
    schema = pa.schema([pa.field("_timestamp", pa.timestamp("ns"), nullable=False)])
    assert (
        KeyedDefinition.of(timestamp_table_config("t", retention_micros=1, schema=schema)) is None
    )
    assert KeyedDefinition.of(global_table_config("t", key=str, value=int)) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (float, int),
        (pa.list_(pa.int64()), int),
        (pa.decimal128(5), int),
        (object, int),
        (str, object),
        (str, list[list[int]]),
        (str, pa.null()),
        (str, pa.schema([("key", pa.int64())])),
        (str, pa.schema([("_x", pa.int64())])),
        (str, pa.dictionary(pa.int32(), pa.string())),
        (str, dict[float, int]),
    ],
    ids=str,
)
def test_types_that_cannot_be_stored_are_refused(key: Any, value: Any) -> None:
    with pytest.raises(InputError):
        keyed_state("t", key, value)


def test_a_ttl_is_positive_and_a_name_is_one() -> None:
    with pytest.raises(InputError, match="positive"):
        keyed_state("t", str, int, dt.timedelta(0))
    with pytest.raises(InputError, match="name"):
        keyed_state("../t", str, int)
