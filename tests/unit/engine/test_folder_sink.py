"""Commits of sinks in folders: the store copies, each file comes once, and a commit can repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from arroyo_dagster.engine import ParquetSink, connectors
from arroyo_dagster.engine.connectors import PRE_COMMIT
from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import Epoch, MemoryStore, ObjectStore, StatePath, TableName
from arroyo_dagster.state.tables.managed import STAGED_FILES
from tests.faulty_stores import Crash, FaultInjecting
from tests.stores import Counting

SUBTASKS = 5
NAMES = [f"0000007-{subtask:03}-{subtask:016x}.parquet" for subtask in range(SUBTASKS)]
DATA = {
    TableName(PRE_COMMIT): {
        subtask: STAGED_FILES.encode([f"_staging/p/j/sink/{name}"])
        for subtask, name in enumerate(NAMES)
    }
}
CONTENTS = {StatePath(name): b"rows of " + name.encode() for name in NAMES}


@pytest.fixture
def sink_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[ObjectStore], ParquetSink]:
    def make(store: ObjectStore) -> ParquetSink:
        monkeypatch.setattr(connectors, "open_store", lambda url: store)
        return ParquetSink("memory://sink")

    return make


def staged() -> MemoryStore:
    store = MemoryStore()
    for path, data in CONTENTS.items():
        store.put(StatePath(f"_staging/p/j/sink/{path}"), data)
    return store


def contents(store: ObjectStore) -> dict[StatePath, bytes]:
    return {info.path: store.read(info.path) for info in store.list()}


def test_commit_reads_and_writes_no_rows(sink_on: Callable[[ObjectStore], ParquetSink]) -> None:
    store = Counting(staged())
    sink_on(store).commit(Epoch(7), DATA)
    assert contents(store.inner) == CONTENTS
    assert store.calls["copy"] == SUBTASKS
    assert store.calls["delete_many"] == 1
    assert store.bytes_read == {}
    assert store.bytes_written == {}


def test_a_commit_killed_after_any_change_is_completed_by_the_next(
    sink_on: Callable[[ObjectStore], ParquetSink], one_at_a_time: None
) -> None:
    counted = FaultInjecting(staged())
    sink_on(counted).commit(Epoch(7), DATA)
    for at in range(1, counted.changes + 1):
        for mode in ("before", "after", "partial"):
            store = staged()
            with contextlib.suppress(Crash):
                faulty = FaultInjecting(store, fail_at=at, mode=mode, crash=True)  # type: ignore[arg-type]
                sink_on(faulty).commit(Epoch(7), DATA)
            found = {path: data for path, data in contents(store).items() if "/" not in path}
            assert found.items() <= CONTENTS.items()
            for _ in range(2):
                sink_on(store).commit(Epoch(7), DATA)
                assert contents(store) == CONTENTS, (at, mode)


def test_missing_file_is_an_error(sink_on: Callable[[ObjectStore], ParquetSink]) -> None:
    store = staged()
    store.delete_many([StatePath(f"_staging/p/j/sink/{NAMES[2]}")])
    before = len(contents(store))
    with pytest.raises(ProtocolError, match="neither staged nor in its place"):
        sink_on(store).commit(Epoch(7), DATA)
    assert sum("_staging" in path for path in contents(store)) == before
