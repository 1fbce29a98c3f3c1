"""A job whose operator keeps everything there is by key, and a model of it with dicts.

Each row is a command. What the operator sees, and the timers that fire, are its output.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from arroyo_dagster.engine import (
    Collector,
    ListState,
    MapState,
    Operator,
    OperatorContext,
    Pipeline,
    Source,
    Timers,
    ValueState,
    keyed_state,
    keyed_timers,
)
from arroyo_dagster.engine.operators import registered
from arroyo_dagster.state import (
    ObjectStore,
    ParquetBackend,
    TableConfig,
    TableManager,
    TaskInfo,
    global_table_config,
)
from tests.internals import Offset

TTL_MICROS = 30
OPERATIONS = (
    *("put", "put", "remove", "again", "append", "append", "clear"),
    *("entry", "entry", "no entry", "no map", "timer", "timer", "alarm", "alarm", "cancel"),
)
COMMANDS = pa.schema(
    [
        pa.field("number", pa.int64()),
        pa.field("key", pa.string()),
        pa.field("verb", pa.string()),
        pa.field("at", pa.timestamp("us")),
    ]
)
Command = tuple[str, str, int]


class Script(Source):
    """Commands that are added while the job runs; each epoch takes all there are.

    Args:
        splits: the parts that subtasks read at the same time.
    """

    schema = COMMANDS

    def __init__(self, commands: list[Command], splits: int = 1) -> None:
        self.commands = commands
        self._splits = splits

    def __deepcopy__(self, memo: Any) -> Script:
        return self

    def initial_offset(self) -> Offset:
        return {"row": 0}

    def latest_offset(self, start: Offset) -> Offset:
        return {"row": len(self.commands)}

    def partitions(self, start: Offset, end: Offset) -> Sequence[Any]:
        rows = end["row"] - start["row"]
        ends = [start["row"] + rows * at // self._splits for at in range(self._splits + 1)]
        return list(itertools.pairwise(ends))

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        first, last = partition
        rows = [(n, *self.commands[n]) for n in range(first, last)]
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
        yield pa.record_batch(columns, schema=COMMANDS)


class KeepByKey(Operator):
    """Does what its rows say, and puts out what it sees of their keys."""

    def __init__(self, ttl_micros: int | None = TTL_MICROS) -> None:
        self._ttl = None if ttl_micros is None else dt.timedelta(microseconds=ttl_micros)

    output_schema = pa.schema([("number", pa.int64()), ("key", pa.string()), ("seen", pa.int64())])

    def tables(self) -> Sequence[TableConfig]:
        return [
            keyed_state("values", str, int),
            keyed_state("fleeting", str, int | None, ttl=self._ttl),
            keyed_state("lists", str, list[int]),
            keyed_state("maps", str, dict[str, int], ttl=self._ttl),
            keyed_timers("timers", str),
            keyed_timers("alarms", str, processing_time=True),
            global_table_config("clock", key=str, value=int),
        ]

    def on_start(self, ctx: OperatorContext) -> None:
        self.values, self.fleeting = ctx.value_state("values"), ctx.value_state("fleeting")
        self.lists, self.maps = ctx.list_state("lists"), ctx.map_state("maps")
        self.timers, self.alarms = ctx.timers("timers"), ctx.timers("alarms")
        self.clock = ctx.table_manager.get_global_keyed_state("clock", str, int)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        micros = batch["_timestamp"].cast(pa.int64()).to_pylist()
        numbers, keys, verbs = (batch[name].to_pylist() for name in ("number", "key", "verb"))
        seen = []
        for number, key, verb, nanos in zip(numbers, keys, verbs, micros, strict=True):
            self._obey(number, key, verb, nanos // 1000, ctx)
            seen.append(self._seen(key))
        collector.collect(pa.record_batch([numbers, keys, seen], schema=self.output_schema))

    def _obey(self, number: int, key: str, verb: str, micros: int, ctx: OperatorContext) -> None:
        name, later = f"m{number % 3}", number % 7
        if verb == "put":
            self.values.put(key, number)
            self.fleeting.put_many([key, key], [0, None if number % 5 == 0 else number])
        elif verb == "remove":
            self.values.remove_many([key, key])
            self.fleeting.remove(key)
        elif verb == "again":
            self.values.remove(key)
            self.values.put(key, number)
        elif verb == "append":
            self.lists.append_many([key, key], [number, -number])
        elif verb == "clear":
            self.lists.put(key, [number])
        elif verb == "entry":
            self.maps.put_entry(key, name, number)
        elif verb == "no entry":
            self.maps.remove_entry(key, name)
        elif verb == "no map":
            self.maps.remove(key)
        elif verb == "timer":
            self.timers.register(key, micros + later)
        elif verb == "alarm":
            self.alarms.register(key, ctx.clock_micros + later * 5)
        elif verb == "cancel":
            self.timers.cancel(key, micros + later)

    def _seen(self, key: str) -> int:
        held = self.values.get(key, 0) + 100 * len(self.lists.get(key))
        return held + 10_000 * len(self.maps.get(key)) + 100_000 * (key in self._fleeting())

    def _fleeting(self) -> list[str]:
        return [key for part in self.fleeting.rows() for key in part["key"].to_pylist()]

    def on_timers(
        self, name: str, timers: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        times, keys = timers["at"].cast(pa.int64()).to_pylist(), timers["key"].to_pylist()
        assert list(zip(times, keys, strict=True)) == sorted(zip(times, keys, strict=True))
        numbers = [-1 if name == "timers" else -2] * len(keys)
        micros = [time // 1000 for time in times]
        collector.collect(pa.record_batch([numbers, keys, micros], schema=self.output_schema))
        self.lists.append_many(keys, micros)
        for key, time in zip(keys, micros, strict=True):
            if time % 3 == 0:  # one that is due at once, or soon
                getattr(self, name).register(key, time + 1)

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        if ctx.task_info.task_index == 0:
            self.clock.insert("clock", ctx.clock_micros)


class KeyedModel:
    """What `KeepByKey` does, with dicts."""

    def __init__(self, ttl_micros: int = TTL_MICROS) -> None:
        self._ttl = ttl_micros
        self.values: dict[str, int] = {}
        self.fleeting: dict[str, tuple[int | None, int]] = {}
        self.lists: dict[str, list[int]] = {}
        self.maps: dict[str, dict[str, tuple[int, int]]] = {}
        self.timers: set[tuple[int, str]] = set()
        self.alarms: set[tuple[int, str]] = set()
        self.output: Counter[Any] = Counter()
        self.now = 0

    def begin(self, clock_micros: int) -> None:
        self.now = clock_micros
        fresh = {
            key: (value, at)
            for key, (value, at) in self.fleeting.items()
            if at + self._ttl > self.now
        }
        self.fleeting = fresh
        for key, entries in list(self.maps.items()):
            self.maps[key] = {k: v for k, v in entries.items() if v[1] + self._ttl > self.now}
            if not self.maps[key]:
                del self.maps[key]

    def obey(self, number: int, command: Command) -> None:
        key, verb, micros = command
        name, later = f"m{number % 3}", number % 7
        if verb == "put":
            self.values[key] = number
            self.fleeting[key] = (None if number % 5 == 0 else number, self.now)
        elif verb == "remove":
            self.values.pop(key, None)
            self.fleeting.pop(key, None)
        elif verb == "again":
            self.values[key] = number
        elif verb == "append":
            self.lists.setdefault(key, []).extend([number, -number])
        elif verb == "clear":
            self.lists[key] = [number]
        elif verb == "entry":
            self.maps.setdefault(key, {})[name] = (number, self.now)
        elif verb == "no entry":
            self.maps.get(key, {}).pop(name, None)
        elif verb == "no map":
            self.maps.pop(key, None)
        elif verb == "timer":
            self.timers.add((micros + later, key))
        elif verb == "alarm":
            self.alarms.add((self.now + later * 5, key))
        elif verb == "cancel":
            self.timers.discard((micros + later, key))
        held = self.values.get(key, 0) + 100 * len(self.lists.get(key, ()))
        seen = held + 10_000 * len(self.maps.get(key, ())) + 100_000 * (key in self.fleeting)
        self._put_out(number, key, seen)

    def _put_out(self, number: int, key: str, seen: int) -> None:
        self.output[(("number", number), ("key", key), ("seen", seen))] += 1

    def fire(self, watermark_micros: int | None) -> None:
        """As the runtime does: what is due of one table, then of the other, until nothing is."""
        while True:
            fired = False
            for number, timers, time in (
                (-1, self.timers, watermark_micros),
                (-2, self.alarms, self.now),
            ):
                due = sorted(timer for timer in timers if time is not None and timer[0] <= time)
                fired = fired or bool(due)
                timers.difference_update(due)
                for at, key in due:
                    self._put_out(number, key, at)
                    self.lists.setdefault(key, []).append(at)
                timers.update((at + 1, key) for at, key in due if at % 3 == 0)
            if not fired:
                return

    def content(self) -> dict[str, Any]:
        """What `keyed_content` returns."""
        return {
            "values": self.values,
            "fleeting": {key: value for key, (value, _) in self.fleeting.items()},
            "lists": {key: items for key, items in self.lists.items() if items},
            "maps": {
                key: {name: value for name, (value, _) in entries.items()}
                for key, entries in self.maps.items()
                if entries
            },
            "timers": {(key, at) for at, key in self.timers},
            "alarms": {(key, at) for at, key in self.alarms},
        }


def keyed_content(
    store: ObjectStore, pipeline: Pipeline, parallelism: int, operator: str = "keep"
) -> dict[str, Any]:
    """What the subtasks of a restart at some parallelism hold, together: each key in one of them.

    Reads the newest epoch.
    """
    backend = ParquetBackend(store, pipeline.paths)
    checkpoint = backend.load(backend.epochs()[-1])
    found: dict[str, Any] = {
        **{name: {} for name in ("values", "fleeting", "lists", "maps")},
        **{name: set() for name in ("timers", "alarms")},
    }
    for index in range(parallelism):
        manager = TableManager(
            backend,
            TaskInfo(
                pipeline=pipeline.paths.pipeline,
                job=pipeline.paths.job,
                operator=pipeline.operators[operator].operator_id,  # type: ignore[index]
                task_index=index,
                parallelism=parallelism,
            ),
            registered(pipeline.operators[operator].operator),  # type: ignore[index]
            checkpoint.operator(operator),
        )
        for name in ("values", "fleeting"):
            view = manager.get_keyed_state(name, ValueState)
            keys = _keys(view)
            values = view.get_many(keys).to_pylist()
            _add(found[name], dict(zip(keys.to_pylist(), values, strict=True)))
        lists, maps = (
            manager.get_keyed_state("lists", ListState),
            manager.get_keyed_state("maps", MapState),
        )
        _add(found["lists"], {key: lists.get(key) for key in set(_keys(lists).to_pylist())})
        _add(found["maps"], {key: maps.get(key) for key in set(_keys(maps).to_pylist())})
        for name in ("timers", "alarms"):
            for part in manager.get_keyed_state(name, Timers).rows():
                times = part["at"].cast(pa.int64()).to_pylist()
                pairs = zip(part["key"].to_pylist(), times, strict=True)
                fresh = {(key, time // 1000) for key, time in pairs}
                assert not fresh & found[name]
                found[name] |= fresh
    return found


def _keys(view: Any) -> pa.Array:
    parts = [part["key"] for part in view.rows()]
    return (
        pa.chunked_array(parts, pa.string()).combine_chunks() if parts else pa.array([], "string")
    )


def _add(found: dict[str, Any], more: dict[str, Any]) -> None:
    assert not found.keys() & more.keys()
    found.update(more)
