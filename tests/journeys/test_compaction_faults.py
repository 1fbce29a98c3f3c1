"""A compaction that fails at any of its store calls, reads included: nothing lost, nothing twice.

Small tables made by hand, each kind of merge among them: rows that only move, deletes, row
generations, pieces of a key range, parts, global tables with removals.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    DeleteKey,
    GlobalKeyedTable,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    TableConfig,
    global_table_config,
    run_compaction,
    timestamp_table_config,
)
from tests.fabricated import PATHS, pair_files, publish, stored_rows, time_files
from tests.faulty_stores import Crash
from tests.formats import (
    INSERT,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    SortOrder,
    encode_operation,
)
from tests.jobs import copied, expiring_rows
from tests.shares import Share, share_or_all
from tests.stores import Wrapper

T = TypeVar("T")
SCHEMA = pa.schema([("k", pa.int64()), pa.field("_timestamp", pa.timestamp("ns"), nullable=False)])
GENERATIONAL = SCHEMA.append(pa.field("_generation", pa.uint64(), nullable=False))
COUNTS = global_table_config("counts", key=bytes, value=bytes)
WAYS = {
    "whole": CompactionSettings(policy=CompactionPolicy.FULL),
    "in pieces": CompactionSettings(
        policy=CompactionPolicy.FULL, memory_bytes=100, part_bytes=900, sort=SortOrder.KEY
    ),
}


class FailingAt(Wrapper):
    """The k-th call of any verb fails, or finds the process dead."""

    def __init__(self, store: ObjectStore, at: int | None, *, crash: bool, late: bool) -> None:
        super().__init__(store)
        self.calls = 0
        self._at, self._crash, self._late = at, crash, late
        self._dead = threading.Event()

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        with self._lock:
            if self._dead.is_set():
                raise Crash(f"{verb} after the crash")
            self.calls += 1
            fails = self.calls == self._at
            if fails and self._crash:
                self._dead.set()
        if not fails:
            return action()
        if self._late:
            action()
        if self._crash:
            raise Crash(f"{verb} {path}")
        raise StorageError(f"injected fault in {verb}", url=self.url, path=path)


def table(name: str, *, generational: bool = False) -> TableConfig:
    return timestamp_table_config(
        name, retention_micros=1000, schema=SCHEMA, keys=["k"], generational=generational
    )


def made(config: TableConfig, epoch: int, *, delete: int | None = None) -> pa.Table:
    times = pa.array([epoch * 1_000_000 + at for at in range(6)], pa.int64())
    columns = [pa.array([at % 4 for at in range(6)]), times.cast(pa.timestamp("ns"))]
    schema = SCHEMA
    if config.config.generational:  # type: ignore[union-attr]
        columns.append(pa.array([epoch] * 6, pa.uint64()))
        schema = GENERATIONAL
    operations = [INSERT] * 6
    if delete is not None:
        operations[delete] = encode_operation(DeleteKey(b""))
    rows = pa.Table.from_arrays(columns, schema=schema)
    return stored_rows(config, rows, pa.array(operations, pa.binary()))


def job() -> MemoryStore:
    store = MemoryStore()
    plain, deleting, newest = table("plain"), table("deleting"), table("newest", generational=True)
    epochs = range(1, 4)
    tables: list[tuple[TableConfig, Any]] = [
        (config, ExpiringTimeKeyFiles(files=time_files(store, config, batches, 1)))
        for config, batches in (
            (plain, [made(plain, epoch) for epoch in epochs]),
            (deleting, [made(deleting, at, delete=2 if at == 2 else None) for at in epochs]),
            (newest, [made(newest, epoch) for epoch in epochs]),
        )
    ]
    writes: list[tuple[dict[bytes, bytes | None], int]] = [
        ({b"a": b"1", b"b": b"2"}, 0),
        ({b"a": None}, 0),
        ({b"c": b"3", b"b": b"4"}, 0),
    ]
    tables.append((COUNTS, GlobalKeyedFiles(files=pair_files(store, COUNTS, writes))))
    publish(store, tables, parallelism=1, watermark_micros=2000)
    return store


def content(store: ObjectStore) -> dict[str, Any]:
    (operator,) = ParquetBackend(store, PATHS).load().operators
    found: dict[str, Any] = {}
    for name in operator.tables:
        files = operator.tables[name]
        if isinstance(files, GlobalKeyedFiles):
            found[name] = GlobalKeyedTable(COUNTS, store).load(files.files)
            continue
        rows = expiring_rows(store, operator, name)
        if name == "newest":  # the largest generation of each key counts
            best: dict[Any, Any] = {}
            for row in rows:
                best[row[0]] = max(best.get(row[0], row), row, key=lambda one: (one[2], one[1]))
            rows = best  # type: ignore[assignment]
        found[name] = rows
    return found


Mode = tuple[bool, bool]
MODES: list[Mode] = [(False, False), (False, True), (True, True)]  # failure, unknown outcome, crash


def check(
    start: MemoryStore, before: object, settings: CompactionSettings, at: int, mode: Mode
) -> None:
    store, (crash, late) = copied(start), mode
    with contextlib.suppress(Crash, ArroyoStateError):
        run_compaction(FailingAt(store, at, crash=crash, late=late), PATHS, settings)
    assert content(store) == before, f"fault at call {at}"
    run_compaction(store, PATHS, settings)
    assert content(store) == before, f"run again after a fault at call {at}"


def calls_of(start: MemoryStore, settings: CompactionSettings) -> int:
    counted = FailingAt(copied(start), None, crash=False, late=False)
    assert run_compaction(counted, PATHS, settings).changed
    assert content(counted.inner) == content(start)
    assert not run_compaction(counted.inner, PATHS, settings).changed
    return counted.calls


@share_or_all(2)
def test_a_fault_at_any_call_leaves_what_a_restore_loads(share: Share) -> None:
    start = job()
    before, calls = content(start), calls_of(start, WAYS["whole"])
    assert calls > 60
    for at in share(range(1, calls + 1)):  # two and three: every kind of fault
        check(start, before, WAYS["whole"], at, MODES[at % 3])


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES, ids=["failure", "unknown-outcome", "crash"])
def test_any_fault_at_any_call_in_pieces_too(way: str, mode: Mode) -> None:
    start = job()
    before = content(start)
    for at in range(1, calls_of(start, WAYS[way]) + 1):
        check(start, before, WAYS[way], at, mode)
