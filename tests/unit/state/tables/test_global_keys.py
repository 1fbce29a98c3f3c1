"""Keys of global keyed tables counted without their values, beside reading everything."""

from __future__ import annotations

import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.operations import DeleteKey, encode_operation
from arroyo_dagster.state.codec.parquet import (
    GLOBAL_KEY_VALUE_SCHEMA,
    REMOVAL_SCHEMA,
    encode_pairs,
    encode_rows,
)
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.tables import global_keys
from arroyo_dagster.state.tables.global_keys import (
    first_entries,
    keys_of_several,
    open_keyed_files,
)

File = tuple[str, dict[bytes, bytes]]


def stored(store: MemoryStore, files: list[File]) -> list[StatePath]:
    paths = []
    for number, (kind, pairs) in enumerate(files):
        seconds = list(pairs.values())
        if kind == "remove":
            seconds = [encode_operation(DeleteKey(key)) for key in pairs]
        schema = GLOBAL_KEY_VALUE_SCHEMA if kind == "write" else REMOVAL_SCHEMA
        paths.append(StatePath(f"file-{number}"))
        store.put(paths[-1], encode_pairs(pairs, seconds, schema, version=number))
    return paths


def test_keys_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def always_one(columns: object, rows: int) -> pa.Array:
        return pa.array([1] * rows, pa.uint64())

    monkeypatch.setattr(global_keys, "key_hashes", always_one)
    store = MemoryStore()
    files = [("write", {b"a": b"1", b"b": b"2"}), ("write", {b"c": b"3", b"a": b"4"})]
    paths = stored(store, files)
    expected = {b"a": (1, b"4"), b"b": (0, b"2"), b"c": (1, b"3")}
    assert first_entries(store, paths, 9).first == expected
    found = keys_of_several([list(open_keyed_files(store, [path])) for path in paths])
    assert found is not None
    assert (found.keys, found.differ, found.example, found.groups) == (1, 1, b"a", (0, 1))


def test_a_file_of_another_table_is_refused() -> None:
    store = MemoryStore()
    store.put(StatePath("other"), encode_rows(pa.table({"key": [1]})))
    with pytest.raises(FormatError, match="has the columns"):
        first_entries(store, [StatePath("other")], 1)
