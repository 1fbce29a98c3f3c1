"""Keys of global keyed tables counted without their values, beside reading everything."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from arroyo_dagster.state.tables import data_files, global_keys
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable, global_table_config
from arroyo_dagster.state.tables.global_keys import (
    first_entries,
    keys_of_several,
    open_keyed_files,
)

KEYS = st.sampled_from([b"", b"a", b"b", b"c", b"\x00", b"\xff" * 20])
WRITES = st.dictionaries(KEYS, st.binary(max_size=3), max_size=5)
FILES = st.lists(st.tuples(st.sampled_from(["write", "remove"]), WRITES), max_size=6)
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


@given(files=FILES, limit=st.integers(0, 7))
def test_the_first_entries_are_those_of_the_whole_table(files: list[File], limit: int) -> None:
    store = MemoryStore()
    paths = stored(store, files)
    whole = GlobalKeyedTable(global_table_config("t"), store).load_with_version(paths)
    found = first_entries(store, paths, limit)
    assert found.count == len(whole)
    assert list(found.first.items()) == list(whole.items())[:limit]


@given(groups=st.lists(st.lists(WRITES, max_size=3), max_size=4))
def test_keys_of_several_are_those_that_a_loop_finds(
    groups: list[list[dict[bytes, bytes]]],
) -> None:
    opened = []
    values: dict[bytes, set[bytes]] = {}
    writers: dict[bytes, set[int]] = {}
    for place, group in enumerate(groups):
        store = MemoryStore()
        opened.append(list(open_keyed_files(store, stored(store, [("write", p) for p in group]))))
        for pairs in group:
            for key, value in pairs.items():
                values.setdefault(key, set()).add(value)
                writers.setdefault(key, set()).add(place)
    shared = {key for key, by in writers.items() if len(by) > 1}
    found = keys_of_several(opened)
    assert (found is None) == (not shared)
    if found is not None:
        assert found.keys == len(shared)
        assert found.differ == sum(len(values[key]) > 1 for key in shared)
        assert found.example in shared
        assert set(found.groups) == set.union(*(writers[key] for key in shared))


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


def test_a_large_file_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_keys, "SLICE_ROWS", 7)
    monkeypatch.setattr(data_files, "WHOLE_BYTES", 1)
    store = MemoryStore()
    pairs = {f"{number:04}".encode(): bytes([number % 256]) for number in range(100)}
    paths = stored(store, [("write", pairs), ("remove", dict(list(pairs.items())[10:20]))])
    found = first_entries(store, paths, 30)
    assert found.count == 90
    names = [key for key in pairs if not 10 <= int(key) < 20][:30]
    assert found.first == {key: (0, pairs[key]) for key in names}


def test_a_file_of_another_table_is_refused() -> None:
    store = MemoryStore()
    store.put(StatePath("other"), encode_rows(pa.table({"key": [1]})))
    with pytest.raises(FormatError, match="has the columns"):
        first_entries(store, [StatePath("other")], 1)
