"""Registration of keyed state: the tables are ordinary ones, and say what they are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import keyed_state, keyed_timers
from arroyo_dagster.errors import InputError
from arroyo_dagster.state import TableConfig
from tests.formats import ExpiringTimeKeyConfig, memory_schema


def columns(config: TableConfig) -> list[str]:
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    return memory_schema(config.config).names


def test_a_table_has_the_columns_of_its_form() -> None:
    assert columns(keyed_state("t", str, int)) == ["key", "value", "_timestamp", "_generation"]
    assert columns(keyed_state("t", str, list[int]))[:3] == ["key", "position", "value"]
    assert columns(keyed_state("t", str, dict[str, int]))[:3] == ["key", "map_key", "value"]
    assert columns(keyed_timers("t", str))[:2] == ["at", "key"]


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
