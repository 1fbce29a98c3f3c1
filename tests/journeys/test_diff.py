"""Differences of two epochs equal those of brute force; moved rows are none."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    MemoryStore,
    StateEpoch,
    open_state,
    run_compaction,
)
from arroyo_dagster.state.codec.plain import plain_scalar
from arroyo_dagster.state.operations.query.diff import TableDiff, diff_epochs, diff_tables
from tests.internals import CHANGE, Change
from tests.jobs import copied, written_by_word_job

FULL = CompactionSettings(policy=CompactionPolicy.FULL)


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return written_by_word_job(rows=60, keep_epochs=None, retention_micros=20_000_000)


def rows_of(epoch: StateEpoch, operator: str, table: str) -> Counter[str]:
    for one in epoch.tables():
        if (one.name.operator, one.name.table) == (operator, table):
            columns = [[repr(plain_scalar(v)) for v in c] for c in one.to_arrow().columns]
            return Counter(map(repr, zip(*columns, strict=True)))
    return Counter()


def applied(rows: Counter[str], diff: TableDiff) -> Counter[str]:
    """The rows before, with the changes applied."""
    found = Counter(rows)
    *columns, kinds = (
        [repr(plain_scalar(v)) for v in c] if name != CHANGE else c.to_pylist()
        for name, c in zip(diff.changes.schema.names, diff.changes.columns, strict=True)
    )
    added = (Change.INSERTED.value, Change.UPDATED_TO.value)
    for row, kind in zip(map(repr, zip(*columns, strict=True)), kinds, strict=True):
        found[row] += 1 if kind in added else -1
    assert min(found.values(), default=0) >= 0, diff
    return +found


def check_pair(before: StateEpoch, after: StateEpoch) -> list[TableDiff]:
    found = diff_epochs(before, after)
    for one in found:
        was, now = (rows_of(epoch, one.operator, one.table) for epoch in (before, after))
        assert applied(was, one) == now, (one.operator, one.table)
        most = sum(((was - now) + (now - was)).values())
        assert len(one.changes) == most, "a row that did not change is named"
    return found


def test_managed_jobs_with_removals_and_expiry(store: MemoryStore) -> None:
    job = open_state(store).job("main")
    kinds: Counter[Change] = Counter()
    numbers = job.epochs()
    for first, second in itertools.pairwise(numbers):
        for one in check_pair(job.epoch(first), job.epoch(second)):
            for kind in Change:
                kinds[kind] += one.count(kind)
    assert all(kinds[kind] for kind in Change)
    assert kinds[Change.UPDATED_FROM] == kinds[Change.UPDATED_TO]
    check_pair(job.epoch(numbers[-1]), job.epoch(numbers[0]))


def test_a_compaction_changes_nothing(store: MemoryStore) -> None:
    compacted = copied(store)
    job = open_state(compacted).job("main")
    before = job.epoch()
    run_compaction(compacted, job.paths, FULL)
    after = job.epoch()
    assert after.number > before.number
    assert all(one.is_empty for one in diff_epochs(before, after))


def test_changes_are_counted_by_key_range(store: MemoryStore) -> None:
    job = open_state(store).job("main")
    diffs = diff_epochs(job.epoch(1), job.epoch(), "keep", "rows")
    (keep,) = diffs
    assert keep.key_columns == ("word",)
    assert sum(keep.by_subtask) == len(keep.changes)
    assert len(keep.by_subtask) == 2


def test_two_jobs_and_two_parallelisms_are_compared(store: MemoryStore) -> None:
    here = open_state(store).job("main").epoch()
    other = written_by_word_job(
        rows=60, keep_epochs=None, retention_micros=20_000_000, parallelism=3
    )
    there = open_state(other).job("main").epoch()
    state = {(one.operator, one.table): one for one in diff_epochs(here, there)}
    assert state["count", "counts"].is_empty
    assert state["keep", "rows"].is_empty


def test_names_that_neither_has_are_refused(store: MemoryStore) -> None:
    job = open_state(store).job("main")
    with pytest.raises(NotFoundError, match="did you mean count"):
        diff_epochs(job.epoch(1), job.epoch(2), "cuont")
    with pytest.raises(NotFoundError, match="did you mean counts"):
        diff_epochs(job.epoch(1), job.epoch(2), "count", "count")
    with pytest.raises(InputError, match="no table"):
        diff_tables(None, None)
