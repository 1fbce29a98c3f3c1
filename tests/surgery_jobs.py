"""A stopped Arroyo job with sources, a watermark, windows, joins and aggregates, to be edited."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    StatePath,
    TableConfig,
    TableName,
    codec_for,
)
from arroyo_dagster.state.tables.known.built_in import BUILT_IN
from arroyo_dagster.state.tables.known.sources import ImpulseSourceState
from tests.arroyo_jobs import (
    EVENTS,
    GROUPS,
    SECOND,
    TUPLES,
    ArroyoJob,
    accumulators_config,
    join_config,
    table_rows,
    tuples_config,
    twin,
    window_config,
)
from tests.formats import (
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    KafkaState,
    TableFiles,
    encode_pairs,
)
from tests.internals import ExpressionWatermarkState, restored_rows

NANOS = SECOND * 1000
BEGAN = 100_000 * SECOND
WATERMARK = BEGAN + 60 * SECOND

Entries = Mapping[Any, Any]


def global_config(table: str, description: str, *, commits: bool = False) -> TableConfig:
    return TableConfig(
        config=GlobalKeyedConfig(
            table=TableName(table), description=description, uses_two_phase_commit=commits
        )
    )


def encoded(description: str, entries: Entries) -> dict[bytes, bytes]:
    """The entries of one subtask, by the types that the catalogue knows for the table."""
    known = next(one for one in BUILT_IN if one.description == description)
    key, value = codec_for(known.key_type), codec_for(known.value_type)
    return {key.encode(k): value.encode(v) for k, v in entries.items()}


@dataclass
class SurgeryJob(ArroyoJob):
    """A job with global keyed tables of its own.

    Attributes:
        entries: of each subtask, by operator and table.
        early: operators before the watermark generator, which have no watermark.
        stateless: operators that have no table yet.
    """

    entries: dict[tuple[str, str], list[Entries]] = field(default_factory=dict)
    globals: dict[tuple[str, str], TableConfig] = field(default_factory=dict)
    early: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()

    def keep(self, operator: str, config: TableConfig, *subtasks: Entries) -> None:
        """From the next epoch on the operator keeps these entries, one file a subtask."""
        self.globals[operator, str(config.table)] = config
        self.entries[operator, str(config.table)] = list(subtasks)

    def _names(self) -> list[str]:
        names = (name for name, _ in self.globals)
        return list(dict.fromkeys([*names, *super()._names(), *self.stateless]))

    def _source(self) -> tuple[dict[TableName, TableFiles], dict[TableName, TableConfig]]:
        return {}, {}

    def _operator(self, name: str) -> OperatorCheckpoint:
        found = super()._operator(name)
        tables, configs = dict(found.tables), dict(found.configs)
        for (operator, table), config in self.globals.items():
            if operator == name:
                tables[TableName(table)] = self._written_entries(name, config)
                configs[TableName(table)] = config
        found = replace(found, tables=tables, configs=configs)
        if name in self.early:
            found = replace(found, min_watermark_micros=None, max_watermark_micros=None)
        return found

    def _written_entries(self, name: str, config: TableConfig) -> GlobalKeyedFiles:
        listed = []
        for subtask, entries in enumerate(self.entries[name, str(config.table)]):
            path = StatePath(
                self.paths.operator(OperatorId(name), self.directory, self.generation)
                / f"table-{config.table}-{subtask:03}"
            )
            pairs = encoded(config.config.description, entries)
            data = encode_pairs(pairs.keys(), pairs.values(), GLOBAL_KEY_VALUE_SCHEMA, version=0)
            self.store.put(path, data)
            listed.append(path)
        return GlobalKeyedFiles(files=tuple(listed))


IMPULSE = global_config("i", "impulse source state")
KAFKA = global_config("k", "kafka offsets")
GENERATOR = global_config("s", "expression watermark state")
FILE = global_config("f", "file_sink")
WINDOW = window_config(EVENTS, ["k"], retention=40)
LEFT = join_config(EVENTS, ["k"], retention=40)
TOTALS = accumulators_config(GROUPS, ["k"])
DISTINCT = tuples_config(TUPLES, ["k"])

STATE = ("window_3", "join_4", "agg_5")


def surgery_job(
    layout: Layout,
    epochs: int = 3,
    name: str = "job_x",
    *,
    store: MemoryStore | None = None,
    parallelism: int = 2,
    without: str = "",
    sink_files: int = 1,
) -> SurgeryJob:
    """Two sources, a generator, a window, an updating join, an aggregate with GROUP BY, a sink.

    Args:
        without: an operator that has no rows.
        sink_files: of the sink, one for each subtask that writes one.
    """
    if store is None:
        return twin(_surgery_job(layout, epochs, name, parallelism, without, sink_files))
    return _write(store, layout, epochs, name, parallelism, without, sink_files)


@functools.cache
def _surgery_job(layout: Layout, *how: Any) -> SurgeryJob:
    return _write(MemoryStore(), layout, *how)


def _write(
    store: MemoryStore,
    layout: Layout,
    epochs: int,
    name: str,
    parallelism: int,
    without: str,
    sink_files: int,
) -> SurgeryJob:
    job = SurgeryJob(
        layout,
        parallelism=parallelism,
        store=store,
        watermark_micros=WATERMARK,
        job=name,
        early=("source_impulse_0", "source_kafka_1", "watermark_2"),
        stateless=STATE,
    )
    start = 1_700_000_000 * NANOS
    for at in range(1, epochs + 1):
        job.keep(
            "source_impulse_0",
            IMPULSE,
            {0: ImpulseSourceState(100 * at, start)},
            {1: ImpulseSourceState(100 * at + 7, start)},
        )
        job.keep(
            "source_kafka_1",
            KAFKA,
            {3: KafkaState(3, 1000 * at), 5: KafkaState(5, 20)},
            {4: KafkaState(4, 1000 * at)},
        )
        reached = ExpressionWatermarkState(WATERMARK * 1000 + 9 * NANOS, WATERMARK * 1000)
        job.keep("watermark_2", GENERATOR, {0: reached}, {1: reached})
        job.keep("sink_6", FILE, {f"/out/{name}.json": 10 * at}, *[{}] * (sink_files - 1))
        job.write({key: rows for key, rows in _rows(at).items() if key[0] != without})
    return job


def _rows(at: int) -> dict[tuple[str, TableConfig], pa.Table]:
    names = [f"k{n}" for n in range(5)]
    times = [BEGAN * 1000 + (22 + 10 * at + 4 * n) * NANOS for n in range(5)]
    numbers = [100 * at + n for n in range(5)]
    grows = [2 * at + n for n in range(5)]
    both = [f"k{n % 5}" for n in range(10)]
    return {
        ("window_3", WINDOW): table_rows(EVENTS, [names, numbers, times]),
        ("join_4", LEFT): table_rows(EVENTS, [names, numbers, times]),
        ("agg_5", TOTALS): table_rows(GROUPS, [names, numbers, times, grows]),
        ("agg_5", DISTINCT): table_rows(
            TUPLES,
            [
                both,
                [1] * 10,
                [b"x", b"y"] * 5,
                [at + n % 3 for n in range(10)],
                [BEGAN * 1000 + 100 * NANOS] * 10,
                [at + n for n in range(10)],
            ],
        ),
    }


# ---- what a restore holds ------------------------------------------------------------------------


def held_rows(store: ObjectStore, paths: JobPaths) -> dict[tuple[str, str], list[tuple[Any, ...]]]:
    """The rows of every expiring table that a restore of the newest epoch loads, sorted."""
    found = {}
    for operator in ParquetBackend(store, paths).load().operators:
        for name, files in operator.tables.items():
            if isinstance(files, ExpiringTimeKeyFiles):
                rows = restored_rows(store, operator, name, managed=False).rows
                columns = [
                    (
                        rows.column(at).cast(pa.int64())
                        if pa.types.is_timestamp(rows.column(at).type)
                        else rows.column(at)
                    ).to_pylist()
                    for at in range(rows.num_columns)
                ]
                found[str(operator.operator), str(name)] = sorted(
                    zip(*columns, strict=True), key=repr
                )
    return found
