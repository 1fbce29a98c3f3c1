"""The last write of each key: against a plain dict, for any files and however bad the hash."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state.codec.digest import value_codes
from arroyo_dagster.state.model.compaction import PairsMerge, RowsDigest
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable, global_table_config
from arroyo_dagster.state.tables.last_writes import (
    REMOVED,
    CodedPairs,
    LastWrites,
    SharedHash,
    _CodeIndex,
)
from arroyo_dagster.state.tables.merge.pairs import merge_pairs
from tests.fabricated import pair_files

Writes = list[tuple[bytes, bytes]]
KEYS = st.binary(max_size=2) | st.binary(min_size=9, max_size=9).map(lambda key: key[:1] * 600)
FILES = st.lists(
    st.tuples(st.sampled_from([REMOVED, 0, 3]), st.lists(st.tuples(KEYS, st.binary(max_size=3)))),
    max_size=6,
)


def coded(version: int, writes: Writes, bits: int) -> CodedPairs:
    keys, seconds = (pa.array([pair[at] for pair in writes], pa.large_binary()) for at in range(2))
    return CodedPairs(keys, seconds, version, value_codes(keys) % np.uint64(2**bits))


def last_writes(files: list[tuple[int, Writes]], bits: int, *, exact: bool) -> LastWrites:
    found = LastWrites(exact=exact)
    for version, writes in reversed(files):
        found.add(coded(version, writes, bits))
    return found


@given(FILES, st.sampled_from([1, 4, 63]))
def test_the_last_write_of_each_key_is_kept(files: list[tuple[int, Writes]], bits: int) -> None:
    """A hash of a few bits is shared by many keys: that is noticed, never guessed over."""
    expected = {key: (value, version) for version, writes in files for key, value in writes}
    try:
        found = last_writes(files, bits, exact=False)
    except SharedHash:
        found = last_writes(files, bits, exact=True)
    kept = {
        key: (value, version)
        for version, columns in found.by_version().items()
        for key, value in zip(*(column.to_pylist() for column in columns), strict=True)
    }
    assert kept == expected
    assert len(found) == len(expected)
    assert found.removals == sum(version == REMOVED for _, version in expected.values())
    for keys, _ in found.by_version().values():
        assert keys.to_pylist() == sorted(keys.to_pylist())


@given(FILES)
def test_the_digest_of_the_inputs_is_that_of_what_is_written(
    files: list[tuple[int, Writes]],
) -> None:
    found = last_writes(files, 63, exact=True)
    total = RowsDigest()
    for version, (keys, seconds) in found.by_version().items():
        if version != REMOVED:
            pairs = list(zip(keys.to_pylist(), seconds.to_pylist(), strict=True))
            total += coded(version, pairs, 63).digest()
    assert found.digest(removals=False) == total


def test_another_value_of_a_key_is_another_digest() -> None:
    digests = {
        last_writes([(version, [(b"k", value)])], 63, exact=False).digest(removals=True)
        for version, value in [(0, b"a"), (0, b"b"), (1, b"a"), (REMOVED, b"a")]
    }
    assert len(digests) == 4


def test_more_keys_than_the_index_began_with() -> None:
    """It grows on the way, and what it had is found again."""
    writes = [
        (number, [(b"%d" % key, b"%d" % number) for key in range(0, 30_000, 1 + number)])
        for number in range(4)
    ]
    found = last_writes(writes, 63, exact=False)
    expected = {key: value for _, pairs in writes for key, value in pairs}
    kept = {
        key: value
        for columns in found.by_version().values()
        for key, value in zip(*(column.to_pylist() for column in columns), strict=True)
    }
    assert kept == expected


@pytest.mark.parametrize("exact", [False, True])
def test_the_index_finds_what_was_inserted_and_nothing_else(exact: bool) -> None:
    """Of numbers, as in place of hashes that keys share, it never takes one for another."""
    chance = np.random.default_rng(5)
    codes = np.arange(300_000, dtype=np.uint64)
    if not exact:
        codes = chance.integers(0, 2**64, 300_000, dtype=np.uint64)
    chance.shuffle(codes)
    index = _CodeIndex()
    for start in range(0, 200_000, 50_000):
        index.insert(codes[start : start + 50_000])
    assert index.find(codes[:200_000]).tolist() == list(range(200_000))
    assert set(index.find(codes[200_000:]).tolist()) == {-1}


def test_two_keys_of_one_hash_are_told_apart() -> None:
    """The second, met later, is not taken for an older write of the first."""
    with pytest.raises(SharedHash):
        last_writes([(0, [(b"a", b"1")]), (0, [(b"b", b"2")])], 0, exact=False)
    found = last_writes([(0, [(b"a", b"1")]), (0, [(b"b", b"2")])], 0, exact=True)
    assert len(found) == 2


def test_a_merge_of_keys_that_share_a_hash_counts_every_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are read again then: their rows count once, and progress is told once."""
    store, config = MemoryStore(), global_table_config("g", key=bytes, value=bytes)
    epochs: list[tuple[dict[bytes, bytes | None], int]] = [
        ({b"a": b"1", b"b": b"2"}, 0),
        ({b"c": b"3"}, 0),
        ({b"a": b"4"}, 0),
    ]
    files = pair_files(store, config, epochs)
    merge = PairsMerge(
        operator=OperatorId("o"),
        table=TableName("g"),
        inputs=files,
        size_bytes=3,
        sizes=(1, 1, 1),
        from_oldest=True,
    )
    told: list[int] = []
    monkeypatch.setattr(
        "arroyo_dagster.state.tables.last_writes.value_codes",
        lambda values, rows=None: value_codes(values, rows) % np.uint64(1),
    )
    done = merge_pairs(config, store, merge, lambda end: StatePath(f"new{end}"), told.append)
    assert done.input_rows == dict(zip(files, (2, 1, 1), strict=True))
    assert (done.rows_in, done.rows_out, done.dropped) == (4, 3, {"older writes of a key": 1})
    assert told == [1, 1, 1]
    kept = GlobalKeyedTable(config, store).load(done.merged.output_paths)  # type: ignore[arg-type]
    assert kept == {b"a": b"4", b"b": b"2", b"c": b"3"}
