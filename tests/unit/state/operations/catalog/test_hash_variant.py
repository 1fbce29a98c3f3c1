"""Which build of Arroyo hashed a job, from its rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from arroyo_dagster import (
    Checkpoint,
    HashVariant,
    MemoryStore,
    StatePath,
    WriteProtected,
    find_hash_variant,
    key_hashes,
)
from tests.formats import ExpiringTimeKeyConfig, decode_file, encode_rows
from tests.internals import load_epoch
from tests.jobs import run_word_job, word_job
from tests.stores import Counting


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    run_word_job(made, keep_epochs=None)
    return made


def loaded(store: MemoryStore) -> Checkpoint:
    return load_epoch(store, word_job(store).paths)


def keyed_files(checkpoint: Checkpoint) -> list[tuple[StatePath, ExpiringTimeKeyConfig]]:
    return [
        (path, config.config)
        for operator in checkpoint.operators
        for name, config in sorted(operator.configs.items())
        if isinstance(config.config, ExpiringTimeKeyConfig) and config.config.schema.hashed_indices
        for path in operator.tables[name].paths
    ]


def hash_anew(store: MemoryStore, path: StatePath, hashes: pa.Array) -> None:
    rows, _ = decode_file(store.read(path), path)
    place = rows.num_columns - 2
    store.put(path, encode_rows(rows.set_column(place, rows.schema.field(place), hashes)))


@pytest.mark.parametrize("variant", HashVariant)
def test_the_variant_is_found_in_the_first_file(store: MemoryStore, variant: HashVariant) -> None:
    checkpoint = loaded(store)
    files = keyed_files(checkpoint)
    assert files
    for path, config in files:
        rows, _ = decode_file(store.read(path), path)
        keys = [rows.column(index) for index in config.schema.hashed_indices]
        hash_anew(store, path, key_hashes(keys, variant=variant))
    counting = Counting(WriteProtected(store))
    found = find_hash_variant(counting, checkpoint)
    assert found.variant is variant
    assert (found.files, found.against) == (1, None)
    assert found.rows >= 1
    assert found.summary == variant.label
    assert counting.calls.get("open_input", 0) <= 1


def test_keys_of_no_build_are_named_with_their_file(store: MemoryStore) -> None:
    checkpoint = loaded(store)
    path, _ = keyed_files(checkpoint)[0]
    rows, _ = decode_file(store.read(path), path)
    hash_anew(store, path, pa.array([7] * rows.num_rows, pa.uint64()))
    found = find_hash_variant(store, checkpoint)
    assert (found.possible, found.variant, found.against) == ((), None, path)
    assert path in found.summary
