"""Queries of managed jobs: removals, time travel, names that do not exist, private columns, and
epochs that are collected while they are read."""

from __future__ import annotations

import dataclasses
import datetime as dt
import pickle
from collections import Counter

import polars as pl
import pytest

from arroyo_dagster import MemoryStore, ParquetBackend, PrivateColumns, StateCatalog, open_state
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from tests.jobs import as_multiset, listing, table_content, written_by_word_job

RETENTION = 60_000_000


@pytest.fixture
def store() -> MemoryStore:
    return written_by_word_job(rows=60, keep_epochs=None, retention_micros=RETENTION)


@pytest.fixture
def state(store: MemoryStore) -> StateCatalog:
    return open_state(store)


def test_removals_are_applied_at_every_epoch(state: StateCatalog) -> None:
    before = listing(state.store)
    job = state.job("words/main")
    deleted = 0
    for number in job.epochs():
        epoch = job.epoch(number)
        for table in epoch.tables():
            operator = epoch.checkpoint.operator(table.name.operator or "")
            assert operator is not None
            expected = table_content(state.store, operator, table.name.table)
            rows = table.to_arrow()
            if isinstance(table.scan, ExpiringScan):
                assert as_multiset(rows) == expected
                raw = table.raw().to_arrow()
                deleted += Counter(raw.column("_operation").to_pylist())["delete_key"]
            else:
                assert dict(zip(*rows.to_pydict().values(), strict=True)) == expected
    assert deleted
    assert listing(state.store) == before


def test_a_scan_can_be_sent_to_another_process(state: StateCatalog) -> None:
    table = state.table('"words/main".count.counts')
    scan = dataclasses.replace(table.scan, store=None)
    assert pickle.loads(pickle.dumps(scan)).schema == table.schema


def test_an_epoch_is_found_by_its_time(store: MemoryStore, state: StateCatalog) -> None:
    job = state.job("main")
    for number in job.epochs():
        finished = job.epoch(number).checkpoint.finish_time_micros
        assert job.epoch(at=finished).number >= number
    last = job.epoch().checkpoint.finish_time_micros
    moment = dt.datetime.fromtimestamp(last // 10**6 + 1, dt.UTC)
    assert job.epoch(at=moment).number == job.epochs()[-1]
    assert state.epoch(f"words/main@{moment.isoformat()}").number == job.epochs()[-1]
    assert state.epoch("words/main@2").number == 2
    assert state.epoch("words/main@latest").number == job.epochs()[-1]
    with pytest.raises(NotFoundError, match="finished at that time"):
        job.epoch(at="2001-01-01")
    with pytest.raises(InputError, match="not a point in time"):
        job.epoch(at="yesterday")
    with pytest.raises(InputError, match="number or by a time"):
        job.epoch(2, at=last)


def test_unknown_names_list_the_nearest(state: StateCatalog) -> None:
    for name, nearest in (
        ('"words/mian".count.counts', "words/main"),
        ('"words/main".cuont.counts', "count"),
        ('"words/main".count.count', "counts"),
    ):
        with pytest.raises(NotFoundError, match=f"did you mean {nearest}"):
            state.table(name)
    with pytest.raises(NotFoundError, match="did you mean word"):
        state.table('"words/main".keep.rows').to_arrow(["wrod"])
    with pytest.raises(InputError, match="table of an operator"):
        state.table("jobs")
    with pytest.raises(InputError, match="not the name of a table"):
        state.table("a..b")
    with pytest.raises(InputError, match="cannot be compared"):
        state.table('"words/main".keep.rows').to_arrow(where=[("word", "=", 3)])
    with pytest.raises(InputError, match="not compared with"):
        state.table('"words/main".keep.rows').to_arrow(where=[("word", "~", "a")])


def test_an_epoch_that_is_collected_meanwhile_is_named(store: MemoryStore) -> None:
    job = open_state(store).job("main")
    table = job.epoch(3).table("count", "counts")
    for info in list(store.list()):
        if "checkpoint-0000003" in info.path or info.path.endswith("epoch-0000003.record"):
            store.delete_many([info.path])
    newest = ParquetBackend(store, job.paths).epochs()[-1]
    with pytest.raises(NotFoundError, match=f"epoch 3 was collected; the newest is {newest}"):
        table.to_arrow()
    with pytest.raises(NotFoundError, match="epoch 3 was collected"):
        table.to_polars().collect()


def test_private_columns_are_masked_before_conditions_see_them(store: MemoryStore) -> None:
    state = open_state(store, private=PrivateColumns.of(["word"]))
    table = state.table('"words/main".keep.rows')
    rows = table.to_arrow()
    assert all(one.startswith("private:") for one in rows.column("word").to_pylist())
    plain = open_state(store).table('"words/main".keep.rows').to_arrow()
    word = plain.column("word")[0].as_py()
    assert rows.num_rows == plain.num_rows
    assert table.to_arrow(where=[("word", "=", word)]).num_rows == 0
    assert table.to_polars().filter(pl.col("word") == word).collect().height == 0
    digest = rows.column("word")[0].as_py()
    assert table.to_arrow(where=[("word", "=", digest)]).num_rows > 0
    assert table.raw().to_arrow().column("_key_hash").null_count > 0
    with pytest.raises(InputError, match="private"):
        table.lookup(word)
