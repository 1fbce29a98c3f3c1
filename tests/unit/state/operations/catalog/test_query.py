"""Jobs, epochs, tables and rows read from stores, none of which may be written to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Catalogue,
    Epoch,
    JobPaths,
    KnownTable,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    StatePath,
    WorkerGeneration,
    WriteProtected,
    codec_for,
    global_table_config,
    list_epochs,
    read_rows,
)
from arroyo_dagster.state.model.types import SystemTimeNanos
from arroyo_dagster.state.tables.global_keys import first_entries
from tests.formats import decode_file, encode_rows, metadata
from tests.internals import load_epoch
from tests.jobs import copy_into, run_word_job, word_job
from tests.stores import Counting

P = StatePath


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, keep_epochs=None, merge_files_after=512)
    return store


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    """A copy that a test may break."""
    return copy_into(MemoryStore(), written)


def paths_of(store: ObjectStore) -> JobPaths:
    return word_job(store).paths


# ---- epochs --------------------------------------------------------------------------------------


def test_every_state_of_a_checkpoint_is_told(store: MemoryStore) -> None:
    paths = paths_of(store)
    backend = ParquetBackend(store, paths)
    newest = backend.load()
    manifest = metadata.decode_manifest(store.read(newest.ref), newest.ref)
    store.delete_many([P(newest.ref.replace("checkpoint-manifest.pb", "committed.json"))])
    # Another generation lost epoch 6, left 7 without a claim, and 8 without a manifest.
    later = WorkerGeneration(2)
    for epoch in (6, 7):
        lost = replace(manifest, worker_generation=later, epoch=Epoch(epoch))
        store.put(paths.manifest(later, Epoch(epoch)), metadata.encode_manifest(lost))
    store.put(paths.checkpoint(Epoch(8), later) / "operator-x/table-t-000", b"x")
    found = list_epochs(WriteProtected(store), paths)
    assert [(one.epoch, one.worker_generation, one.state and one.state.value) for one in found] == [
        *((epoch, 1, "ready") for epoch in range(1, 6)),
        (6, 1, "committing"),
        (6, 2, "orphaned"),
        (7, 2, "unclaimed"),
        (8, 2, "invisible"),
    ]
    assert [one.problem for one in found] == [None] * 9


def test_an_epoch_that_expires_while_it_is_listed_is_left_out(store: MemoryStore) -> None:
    paths = paths_of(store)

    class Expiring(Counting):
        def list_dir(self, prefix: str = "") -> Any:
            listing = super().list_dir(prefix)
            if prefix == paths.epochs:
                store.delete_many([paths.epoch_record(Epoch(1)), load_epoch(store, paths, 1).ref])
            return listing

    found = list_epochs(Expiring(store), paths)
    assert [one.epoch for one in found] == [2, 3, 4, 5, 6]
    assert not any(one.problem for one in found)


# ---- rows ----------------------------------------------------------------------------------------


def test_a_far_off_time_of_a_known_table_is_a_number_and_no_error(store: MemoryStore) -> None:
    """No Arrow column holds it: such a value is decoded by itself."""
    far = codec_for(SystemTimeNanos).encode(10**9 * 2**60)
    known = KnownTable(owner="test", holds="times", table="counts", key=str, value=SystemTimeNanos)
    rows = pa.Table.from_pydict({"key": [b"\x01!"], "value": [far]}, schema=GLOBAL_KEY_VALUE_SCHEMA)
    path = StatePath("words/main/far")
    store.put(path, encode_rows(rows))
    entries = first_entries(store, [path], 9).first
    config = global_table_config("counts")
    form = Catalogue([known]).form_of("count", config, entries)
    assert form.problem is None
    ((key, (_, value)),) = entries.items()
    assert form.plain(key, value) == {"key": "!", "value": f"{10**9 * 2**60}ns since 1970"}


def test_a_text_that_is_not_utf_8_is_shown_in_hex_and_told(store: MemoryStore) -> None:
    operator = load_epoch(store, paths_of(store)).operator("keep")
    assert operator is not None
    path = operator.paths[-1]
    rows, _ = decode_file(store.read(path), path)
    place = rows.schema.types.index(pa.string())
    broken = pa.array([b"\xff\xfe"] * rows.num_rows, pa.binary()).view(pa.string())
    rows = rows.set_column(place, rows.schema.field(place), broken)
    store.put(path, encode_rows(rows))
    found = read_rows(WriteProtected(store), paths_of(store), "keep", "rows")
    shown = [row[rows.schema.names[place]] for row in found.rows]
    assert {"hex": "fffe"} in shown
    assert any(isinstance(one, str) for one in shown)
    assert found.problem is not None
    assert "not match its column's type" in found.problem
