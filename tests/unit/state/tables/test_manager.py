"""TableManager: barriers, and following the job in whatever way it went on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError, ProtocolError, StorageError
from arroyo_dagster.state import (
    Epoch,
    JobId,
    JobPaths,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    PipelineId,
    StateMessage,
    TableConfig,
    TableData,
    TableManager,
    TableName,
    TaskInfo,
    WorkerGeneration,
    global_table_config,
    global_table_config_with_version,
    timestamp_table_config,
)
from arroyo_dagster.state.tables.registration import check_tables
from tests.faulty_stores import FaultInjecting
from tests.formats import SubtaskCheckpoint
from tests.internals import merge_operator
from tests.jobs import as_multiset, listing

G, T = TableName("g"), TableName("t")
SCHEMA = pa.schema(
    [pa.field("k", pa.string()), pa.field("_timestamp", pa.timestamp("ns"), nullable=False)]
)
STRICT = pa.field("n", pa.int64(), nullable=False)
CONFIGS = {
    G: global_table_config("g", key=str, value=int),
    T: timestamp_table_config("t", retention_micros=10, schema=SCHEMA, keys=["k"]),
}
PATHS = JobPaths(JobId("j"), PipelineId("p"))
OP, GEN = OperatorId("o"), WorkerGeneration(1)


def manager(
    store: ObjectStore,
    restored: OperatorCheckpoint | None = None,
    *,
    index: int = 0,
    parallelism: int = 1,
    configs: dict[TableName, TableConfig] | None = None,
    base_epoch: int | None = None,
) -> TableManager:
    backend = ParquetBackend(store, PATHS, generation=GEN)
    task = TaskInfo(
        pipeline=PATHS.pipeline,
        job=PATHS.job,
        operator=OP,
        task_index=index,
        parallelism=parallelism,
    )
    return TableManager(
        backend,
        task,
        CONFIGS if configs is None else configs,
        restored,
        base_epoch=None if base_epoch is None else Epoch(base_epoch),
    )


def at(*rows: tuple[str, int]) -> pa.Table:
    """Rows (key, time in microseconds)."""
    keys, times = [row[0] for row in rows], [row[1] * 1000 for row in rows]
    return pa.table([keys, times], schema=SCHEMA)


def counts(tables: TableManager) -> Any:
    return tables.get_global_keyed_state("g", str, int)


def kept(tables: TableManager) -> Any:
    return tables.get_expiring_time_key_table("t")


def content(tables: TableManager) -> tuple[Any, Any]:
    return counts(tables).get_all(), as_multiset(kept(tables).rows())


class Job:
    """Publishes what managers write, as the coordinator does."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.newest: OperatorCheckpoint | None = None

    @property
    def epoch(self) -> int:
        return self.newest.epoch if self.newest else 0

    def write(
        self, *managers: TableManager, watermark: int | None = None, min_epoch: int = 1
    ) -> OperatorCheckpoint:
        epoch = self.epoch + 1
        reports = [m.checkpoint(epoch, min_epoch, watermark, False) for m in managers]
        return self.publish(reports)

    def publish(self, reports: list[SubtaskCheckpoint]) -> OperatorCheckpoint:
        epoch = Epoch(self.epoch + 1)
        self.newest = merge_operator(JobId("j"), OP, epoch, reports, self.newest)
        return self.newest


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def job(store: MemoryStore) -> Job:
    return Job(store)


# ---- the barrier ---------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 2, 7])
def test_barrier_of_another_epoch_than_the_next_is_refused(store: MemoryStore, epoch: int) -> None:
    tables = manager(store)
    counts(tables).insert("a", 1)
    before = listing(store)
    with pytest.raises(ProtocolError, match="barrier"):
        tables.checkpoint(epoch, 1, None, False)
    assert listing(store) == before


def test_nothing_changes_after_the_last_checkpoint(store: MemoryStore) -> None:
    tables = manager(store)
    counts(tables).insert("a", 1)
    tables.checkpoint(1, 1, None, True)
    with pytest.raises(InputError, match="after the last checkpoint"):
        counts(tables).insert("a", 2)
    with pytest.raises(InputError, match="after the last checkpoint"):
        kept(tables).insert(at(("a", 1)))
    assert counts(tables).get("a") == 1


@pytest.mark.parametrize("change", [1, 2, 3])
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_barrier_that_failed_may_come_again_and_lists_nothing_twice(
    store: MemoryStore, job: Job, change: int, mode: Any
) -> None:
    faulty = FaultInjecting(store, fail_at=change, mode=mode)
    tables = manager(faulty)
    counts(tables).insert("a", 1)
    kept(tables).insert(at(("a", 5), ("b", 6)))
    with pytest.raises(StorageError):
        tables.checkpoint(1, 1, None, False)
    published = job.write(tables)
    assert len(published.paths) == 2
    assert content(manager(store, published)) == content(tables)


# ---- views ---------------------------------------------------------------------------------------


def test_a_table_that_is_not_registered_is_named_with_those_that_are(store: MemoryStore) -> None:
    tables = manager(store)
    with pytest.raises(InputError, match="no global keyed table 'x'") as caught:
        tables.get_global_keyed_state("x", str, int)
    assert caught.value.facts["tables"] == {"g": "global keyed", "t": "expiring time-key"}
    with pytest.raises(InputError, match="no global keyed table 't'"):
        tables.get_global_keyed_state("t", str, int)
    with pytest.raises(InputError, match="no expiring table 'g'"):
        tables.get_expiring_time_key_table("g")


def test_other_types_than_the_registered_ones_are_refused(store: MemoryStore) -> None:
    tables = manager(store)
    with pytest.raises(InputError, match="not match the registered one"):
        tables.get_global_keyed_state("g", str, str)
    assert tables.get_global_keyed_state("g").get("a") is None
    untyped = manager(store, configs={G: global_table_config("g")})
    with pytest.raises(InputError, match="not known"):
        untyped.get_global_keyed_state("g")
    with pytest.raises(InputError, match="no VERSION"):
        tables.get_global_keyed_state_migratable("g", str, int)


def test_data_of_one_kind_is_refused_by_a_table_of_the_other(store: MemoryStore) -> None:
    tables = manager(store)
    with pytest.raises(InputError, match="pairs"):
        tables.send(StateMessage.TableData(T, TableData.KeyedData([])))
    rows = at(("a", 1)).to_batches()[0]
    with pytest.raises(InputError, match="rows"):
        tables.send(StateMessage.TableData(G, TableData.RecordBatch(rows, b"\x00")))


# ---- following what was published ----------------------------------------------------------------


# ---- tables that are not those of the checkpoint -------------------------------------------------


def stored(store: ObjectStore, configs: dict[TableName, TableConfig]) -> OperatorCheckpoint:
    tables = manager(store, configs=configs)
    if G in configs and configs[G].key_type is not None:
        counts(tables).insert("a", 1)
    if T in configs:
        kept(tables).insert(at(("a", 1)))
    return Job(store).write(tables)


def expiring(**options: Any) -> TableConfig:
    given: dict[str, Any] = {"retention_micros": 10, "schema": SCHEMA, "keys": ["k"]} | options
    return timestamp_table_config("t", **given)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({T: CONFIGS[T]}, "does not register"),
        ({}, "does not register"),
        ({**CONFIGS, G: replace(CONFIGS[T])}, "was global keyed and is now"),
        ({**CONFIGS, T: replace(CONFIGS[G])}, "was expiring time-key and is now"),
        ({**CONFIGS, G: global_table_config("g", key=int, value=int)}, "type of the table's keys"),
        ({**CONFIGS, G: global_table_config("g", key=str, value=str)}, "new version"),
        ({**CONFIGS, T: expiring(schema=SCHEMA.append(STRICT))}, "must be nullable"),
        ({**CONFIGS, T: expiring(generational=True)}, "row generations"),
        ({**CONFIGS, T: expiring(keys=[])}, "storage key"),
        ({**CONFIGS, T: expiring(routing_keys=[])}, "routing key"),
    ],
)
def test_tables_that_are_not_those_of_the_checkpoint_are_refused(
    store: MemoryStore, configs: dict[TableName, TableConfig], message: str
) -> None:
    restored = stored(store, CONFIGS)
    before = listing(store)
    with pytest.raises(InputError, match=message):
        manager(store, restored, configs=configs)
    assert listing(store) == before


def test_values_of_a_newer_version_are_refused(store: MemoryStore) -> None:
    newer = {G: global_table_config_with_version("g", "", 2, key=str, value=int)}
    restored = stored(store, newer)
    with pytest.raises(InputError, match="state version 2"):
        check_tables({G: CONFIGS[G]}, restored)
