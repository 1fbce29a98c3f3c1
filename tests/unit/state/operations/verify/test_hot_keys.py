"""Hot keys: one routing key with a large share of a table's rows, found in the data files."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from arroyo_dagster import AuditSettings, Epoch, MemoryStore, timestamp_table_config
from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.operations.catalog.health import hot_keys
from tests.fabricated import OPERATOR, PATHS, publish, stored_rows, time_files
from tests.formats import ExpiringTimeKeyFiles

SCHEMA = pa.schema([("user", pa.int64()), ("_timestamp", pa.timestamp("ns"))])
SETTINGS = AuditSettings(hot_key_rows=100)


def written(*batches: Sequence[int], keys: Sequence[str] = ("user",)) -> MemoryStore:
    """A job with one table of these users, each batch in files of its own."""
    store = MemoryStore()
    config = timestamp_table_config("t", retention_micros=0, schema=SCHEMA, keys=list(keys))
    rows = [
        stored_rows(
            config, pa.table([pa.array(one), pa.array(range(len(one)))], SCHEMA.names).cast(SCHEMA)
        )
        for one in batches
    ]
    files = ExpiringTimeKeyFiles(files=time_files(store, config, rows, 2))
    publish(store, {config: files})
    return store


def found(store: MemoryStore, settings: AuditSettings = SETTINGS) -> list[str]:
    return [one.evidence for one in hot_keys(store, PATHS, Epoch(1), settings)]


def test_a_key_with_many_rows_in_several_files_is_found() -> None:
    store = written([*range(100), *[7] * 50], [*range(100, 200), *[7] * 50])
    assert found(store) == [f"one key has 33% of the 300 rows of table {OPERATOR}.t"]
    assert found(store, AuditSettings(hot_key_rows=100, hot_key_percent=40)) == []
    assert found(store, AuditSettings(hot_key_rows=301)) == []


def test_even_keys_and_tables_without_keys_have_none() -> None:
    assert found(written([*range(50)] * 4)) == []
    assert found(written([*range(4)] * 50)) == [], "25% each, and no more than the mean"
    assert found(written([7] * 200, keys=())) == []


def test_an_expired_file_is_left_out_and_a_broken_one_is_an_error() -> None:
    store = written([*range(100), *[7] * 100], [*range(10)])
    paths = sorted(info.path for info in store.list(f"{PATHS.root}/data/e2"))
    store.delete_many(paths)
    assert found(store) == [f"one key has 50% of the 200 rows of table {OPERATOR}.t"]
    store.put(paths[0], b"junk")
    with pytest.raises(FormatError):
        found(store)
