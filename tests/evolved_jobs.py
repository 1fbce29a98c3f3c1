"""Two stopped Arroyo jobs of different SQL: what each operator holds is known from given rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import (
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    TableConfig,
    TableName,
    timestamp_table_config,
)
from tests.arroyo_jobs import SECOND, table_rows, twin
from tests.formats import ExpiringTimeKeyConfig, KafkaState, Overrides
from tests.internals import ExpressionWatermarkState, parse_overrides, restored_rows
from tests.surgery_jobs import (
    BEGAN,
    FILE,
    GENERATOR,
    KAFKA,
    NANOS,
    WATERMARK,
    SurgeryJob,
    global_config,
)

SESSIONS = global_config("e", "earliest start time of all active batches.")

_T = TypeVar("_T")

Column = tuple[str, pa.DataType, bool]
Rows = list[dict[str, Any]]

KEY: Column = ("k", pa.string(), True)
TIME: Column = ("_timestamp", pa.timestamp("ns"), False)
COUNT: Column = ("count(Int64(1))[count]", pa.int64(), False)
SUM: Column = ("sum(v)[sum]", pa.int64(), True)
SUMS: Column = ("sum(v)[count]", pa.uint64(), True)
LEAST: Column = ("min(v)[value]", pa.int64(), True)
MOST: Column = ("max(v)[value]", pa.int64(), True)
ITEM: Column = ("item", pa.string(), True)
PRICE: Column = ("price", pa.int64(), False)

HOUR = 3600
DAY = 24 * HOUR


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable) for name, kind, nullable in columns])


@dataclass(frozen=True)
class Sql:
    """What a job's SQL decides: ids, columns, keys, retentions.

    Attributes:
        ids: by the names that tests use.
        window, totals: the aggregates of the window and of the updating aggregate.
        distinct: positions in the SELECT of the updating aggregate of those that keep arguments.
        left: the columns of the left side of the join, besides the key.
        without: names of tables that the job has not written.
        sign: 128 if the arguments that it keeps are signed, and 0 if not.
    """

    ids: Mapping[str, str] = field(
        default_factory=lambda: {
            "source": "source_orders_0",
            "watermark": "watermark_2",
            "window": "tumbling_4",
            "totals": "updating_aggregate_7",
            "join": "join_11",
            "session": "SessionWindow<4s>",
            "sink": "sink_out_13",
            "value": "value_12",
        }
    )
    key: Column = KEY
    window: tuple[Column, ...] = (COUNT, SUM)
    totals: tuple[Column, ...] = (COUNT, MOST)
    distinct: tuple[int, ...] = (1,)
    left: tuple[Column, ...] = (ITEM, PRICE)
    window_seconds: int = 40
    gap_seconds: int = 4
    ttl_seconds: int = DAY
    without: tuple[str, ...] = ()
    sign: int = 0

    def config(self, name: str) -> TableConfig:
        key, ttl = self.key[0], self.ttl_seconds * SECOND
        keyed = {"keys": [key], "retention_micros": ttl}
        if name == "t":
            schema = schema_of((self.key, *self.window, TIME))
            return timestamp_table_config(
                "t",
                "tumbling_intermediate",
                keys=[key],
                retention_micros=self.window_seconds * SECOND,
                schema=schema,
            )
        if name == "a":
            columns = (self.key, *self.totals, (TIME[0], TIME[1], True))
            return timestamp_table_config(
                "a", "accumulator_state", schema=schema_of(columns), generational=True, **keyed
            )
        if name == "b":
            columns = (
                self.key,
                ("accumulator", pa.uint32(), False),
                ("args_row", pa.binary(), False),
                ("count", pa.uint64(), False),
                TIME,
            )
            return timestamp_table_config(
                "b",
                "batch_state",
                retention_micros=ttl,
                schema=schema_of(columns),
                keys=[key, "accumulator", "args_row"],
                routing_keys=[key],
                generational=True,
            )
        if name == "s":
            return timestamp_table_config(
                "s",
                "session",
                keys=[key],
                retention_micros=100 * self.gap_seconds * SECOND,
                schema=schema_of((self.key, *self.left, TIME)),
            )
        schema = schema_of((self.key, *(self.left if name == "left" else (PRICE,)), TIME))
        return timestamp_table_config(name, f"{name} join data", schema=schema, **keyed)


EXPIRING = {
    "t": "window",
    "a": "totals",
    "b": "totals",
    "left": "join",
    "right": "join",
    "s": "session",
}


_WRITTEN: dict[str, SurgeryJob] = {}


def sql_job(
    layout: Layout,
    name: str,
    sql: Sql | None = None,
    *,
    epochs: int = 3,
    base: int = 0,
    parallelism: int = 2,
    store: MemoryStore | None = None,
    more: Sequence[str] = (),
) -> SurgeryJob:
    """A job of this SQL; `base` makes its rows others than those of another job.

    Args:
        more: operators that have no table yet.
    """
    sql = sql or Sql()
    if store is None:
        how = (layout, name, sql, epochs, base, parallelism, tuple(more))
        if (key := repr(how)) not in _WRITTEN:
            given: dict[str, Any] = {"base": base, "parallelism": parallelism, "more": more}
            job = sql_job(layout, name, sql, epochs=epochs, store=MemoryStore(), **given)
            _WRITTEN[key] = job
        return twin(_WRITTEN[key])
    ids = sql.ids
    job = SurgeryJob(
        layout,
        job=name,
        parallelism=parallelism,
        store=store,
        watermark_micros=WATERMARK + base * SECOND,
        early=(ids["source"], ids["watermark"]),
        stateless=(*ids.values(), *more),
    )
    for at in range(1, epochs + 1):
        mark = WATERMARK * 1000
        reached = ExpressionWatermarkState(mark + 9 * NANOS, mark + base)
        began = BEGAN * 1000 + (40 + base) * NANOS
        job.keep(ids["source"], KAFKA, {0: KafkaState(0, 100 * at + base)}, {1: KafkaState(1, 7)})
        job.keep(ids["watermark"], GENERATOR, {0: reached}, {1: reached})
        job.keep(ids["session"], SESSIONS, {0: began}, {1: None})
        job.keep(ids["sink"], FILE, {f"/out/{name}": 10 * at})
        job.write(
            {
                (ids[EXPIRING[table]], sql.config(table)): _rows(sql, table, at, base)
                for table in EXPIRING
                if table not in sql.without
            }
        )
    return job


def _rows(sql: Sql, table: str, at: int, base: int) -> pa.Table:
    config = sql.config(table).config
    assert isinstance(config, ExpiringTimeKeyConfig)
    count = 5
    texts = [f"k{base + n}" for n in range(count)]
    numbers = [1000 * base + n for n in range(count)]
    keys = texts if sql.key[1] == pa.string() else numbers
    times = [BEGAN * 1000 + (25 + 10 * at + n) * NANOS for n in range(count)]
    if table == "b":
        many = [(n, number) for n in range(count) for number in sql.distinct]
        columns = [
            [keys[n] for n, _ in many],
            [number for _, number in many],
            [b"\1" + bytes([sql.sign + n, number]) + bytes(6) for n, number in many],
            [at + n for n, _ in many],
            [times[n] for n, _ in many],
            [at + n for n, _ in many],
        ]
        if not many:
            columns = [[], [], [], [], [], []]
    else:
        middle = {"t": sql.window, "a": sql.totals, "right": (PRICE,)}.get(table, sql.left)
        columns = [keys, *(_values(one, at, base, count) for one in middle), times]
        if table == "a":
            columns.append([2 * at + n for n in range(count)])
    return table_rows(table_schema(sql, table), columns)


def table_schema(sql: Sql, table: str) -> pa.Schema:
    from tests.formats import schema_from_json

    config = sql.config(table).config
    assert isinstance(config, ExpiringTimeKeyConfig)
    return schema_from_json(config.schema.arrow_schema)


def _values(column: Column, at: int, base: int, count: int) -> list[Any]:
    """Values that show from which column they are."""
    seed = sum(map(ord, column[0])) % 89 + 100 * base + 10 * at
    if column[1] == pa.string():
        return [f"{column[0]}-{seed + n}" for n in range(count)]
    if column[1] == pa.binary():
        return [bytes([(seed + n) % 256]) for n in range(count)]
    return [seed + n for n in range(count)]


# ---- what a restore loads ------------------------------------------------------------------------


def loaded(store: ObjectStore, paths: JobPaths) -> dict[tuple[str, str], Rows]:
    """The rows that each operator loads of each expiring table, by column, sorted."""
    found = {}
    for operator in ParquetBackend(store, paths).load().operators:
        for name, config in operator.configs.items():
            if isinstance(config.config, ExpiringTimeKeyConfig):
                rows = restored_rows(store, operator, TableName(name), managed=False).rows
                found[str(operator.operator), str(name)] = in_order(_plain(rows))
    return found


def _plain(rows: pa.Table) -> Rows:
    columns = {
        field.name: (column.cast(pa.int64()) if pa.types.is_timestamp(field.type) else column)
        for field, column in zip(rows.schema, rows.columns, strict=True)
    }
    return pa.table(columns).to_pylist() if columns else []


def in_order(rows: Rows) -> Rows:
    return sorted(rows, key=repr)


def renamed(sql: Sql, **ids: str) -> Sql:
    return replace(sql, ids={**sql.ids, **ids})


SHIFTED = {
    "source": "source_orders_3",
    "watermark": "watermark_5",
    "window": "tumbling_17",
    "totals": "updating_aggregate_9",
    "join": "join_21",
    "session": "SessionWindow<4s>",
    "sink": "sink_result_31",
    "value": "value_30",
}


# ---- suggestions ---------------------------------------------------------------------------------

SUGGESTED = re.compile(r"`map: (\{[^`]*\})`")


def as_suggested(act: Callable[[Overrides], _T], document: Any = None) -> _T:
    """Plan or run an evolve with the pairs that its refusal suggests; not if it is in doubt."""
    try:
        return act(parse_overrides(document))
    except InputError as refused:
        pairs = SUGGESTED.search(refused.next_step or "")
        if pairs is None or "nothing shows which takes which" in str(refused):
            raise
    whole = document or {}
    pairs_of = {**whole.get("map", {}), **json.loads(pairs[1])}
    return act(parse_overrides({**whole, "map": pairs_of}))
