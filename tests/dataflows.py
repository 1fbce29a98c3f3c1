"""Small dataflows run in process: topics from lists, a clock that stands still, sinks that keep.

What a `Flow` shows is read back from the store, never from what a run has in memory.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.names import METRICS
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.runtime.letters import Letter
from arroyo_dagster.dataflow.runtime.service import Bindings, RunOptions, build_dataflow
from arroyo_dagster.dataflow.storage.boundary import topic_schema
from arroyo_dagster.dataflow.storage.engine_tables import Metric, MetricKey, total
from arroyo_dagster.dataflow.topics.replay import build_replay, plan_replay
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.engine import Collector, OperatorContext, Pipeline, Sink, Source, run_pipeline
from arroyo_dagster.state import (
    Epoch,
    MemoryStore,
    ObjectStore,
    TableConfig,
    TableName,
    global_table_config,
)
from tests.faulty_stores import Crash
from tests.internals import LocalRun, Offset
from tests.stores import Wrapper

SECOND = 1000


@dataclass(slots=True)
class Clock:
    """The engine's clock, in milliseconds; it goes when it is told to."""

    ms: int = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


@dataclass(frozen=True, slots=True)
class Sent:
    """A record: its value as bytes, its key, the time it was made."""

    value: bytes | None
    key: bytes | None = None
    time_ms: int | None = None


def sent(value: Any, *, key: str | None = None, time_ms: int | None = None) -> Sent:
    """A record of text (as it is), or of anything else as JSON."""
    data = value if isinstance(value, str) else json.dumps(value)
    return Sent(data.encode(), None if key is None else key.encode(), time_ms)


@dataclass(slots=True)
class Topic(Source):
    """A topic in memory: `send` appends; an epoch takes at most `per_epoch` records.

    The records lie in `splits` splits an epoch, all of partition 0.
    """

    records: list[Sent] = field(default_factory=list)
    per_epoch: int = 1 << 30
    splits: int = 1
    ended: bool = False
    schema: pa.Schema = field(default_factory=topic_schema)

    def send(self, *values: Any, **more: Any) -> None:
        self.records.extend(one if isinstance(one, Sent) else sent(one, **more) for one in values)

    def initial_offset(self) -> Offset:
        return {"at": 0}

    def latest_offset(self, start: Offset) -> Offset:
        return {"at": min(len(self.records), start["at"] + self.per_epoch)}

    def partitions(self, start: Offset, end: Offset) -> Sequence[Any]:
        first, last = start["at"], end["at"]
        step = max(1, -(-(last - first) // self.splits))
        return [(at, min(at + step, last)) for at in range(first, last, step)]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        first, last = partition
        part = self.records[first:last]
        columns = [
            pa.array([one.key for one in part], pa.binary()),
            pa.array([one.value for one in part], pa.binary()),
            pa.array([0] * len(part), pa.int32()),
            pa.array(range(first, last), pa.int64()),
            pa.array([one.time_ms for one in part], pa.timestamp("ms")),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def exhausted(self, offset: Offset) -> bool:
        return self.ended and offset["at"] >= len(self.records)


_KEPT: dict[str, dict[int, list[tuple[bytes | None, bytes]]]] = {}
_NUMBERS = iter(range(1, 1 << 60))


class KeepSink(Sink):
    """Keeps what is committed, in this process; committing twice changes nothing."""

    def __init__(self) -> None:
        self.name = f"sink {next(_NUMBERS)}"
        _KEPT[self.name] = {}

    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config("p", two_phase_commit=True, key=str, value=str)]

    def on_start(self, ctx: OperatorContext) -> None:
        self._rows: list[tuple[bytes | None, bytes]] = []

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        rows = batch.to_pydict()
        self._rows.extend(zip(rows["key"], rows["value"], strict=True))

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        if self._rows:
            ctx.table_manager.insert_committing_data("p", pickle.dumps(self._rows))
            self._rows = []

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        partial = data.get(TableName("p"), {})
        rows = [row for subtask in sorted(partial) for row in pickle.loads(partial[subtask])]
        _KEPT[self.name][epoch] = rows

    @property
    def rows(self) -> list[tuple[bytes | None, bytes]]:
        """Everything committed, in order."""
        epochs = _KEPT[self.name]
        return [row for epoch in sorted(epochs) for row in epochs[epoch]]

    @property
    def values(self) -> list[Any]:
        """The values: from JSON where they are that, else text."""
        return [_value(value) for _, value in self.rows]


def _value(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


class Flow:
    """A dataflow, its topics and sinks, and what its views show."""

    def __init__(
        self,
        text: str,
        *,
        topics: Mapping[str, Topic] | None = None,
        functions: Mapping[str, Callable[..., Any] | str] | None = None,
        store: ObjectStore | None = None,
        clock: Clock | None = None,
        env: Mapping[str, str] | None = None,
        extended: bool = True,
        **options: Any,
    ) -> None:
        document = parse_document(text, extended=extended)
        assert isinstance(document, Dataflow)
        self.dataflow = document
        self.store = MemoryStore() if store is None else store
        self.clock = Clock() if clock is None else clock
        names = {one.id for service in document.services.values() for one in service.sources}
        self.topics = {name: Topic() for name in names if name is not None} | dict(topics or {})
        sinks = {one.id for service in document.services.values() for one in service.sinks}
        self.sinks = {name: KeepSink() for name in sinks if name is not None}
        self.bindings = Bindings(
            sources=self.topics, sinks=self.sinks, functions=functions or {}, env=env or {}
        )
        self.options = RunOptions(clock=self.clock, **options)
        self._runs: list[LocalRun] | None = None

    @property
    def pipelines(self) -> list[Pipeline]:
        return build_dataflow(
            self.dataflow, self.store, bindings=self.bindings, options=self.options
        )

    def letters(self, service: str) -> list[Letter]:
        """The dead letters of a service that wait for a replay, whole ones before partial."""
        found: list[Letter] = []
        for one in plan_replay(self.dataflow, self.store, service=service):
            found += [*one.letters, *one.partial]
        return found

    def replay(self, *, partial: bool = False) -> Flow:
        """Replay dead letters until none waits."""
        self._runs = None
        replays = plan_replay(self.dataflow, self.store, partial=partial)
        for pipeline in build_replay(
            self.dataflow, self.store, replays, bindings=self.bindings, options=self.options
        ):
            run_pipeline(pipeline, self.store)
        return self

    def step(self) -> int:
        """One epoch of each service that has something to do. Returns how many there were."""
        if self._runs is None:
            self._runs = [LocalRun.start(pipeline, self.store) for pipeline in self.pipelines]
        return sum(run.step() is not None for run in self._runs)

    def run(self) -> Flow:
        """Epochs until nothing is left to do."""
        while self.step():
            pass
        return self

    def restart(self) -> None:
        """Begin a new run of every service with the next step, as after a crash."""
        self._runs = None

    def send(self, topic: str, values: Iterable[Any], **more: Any) -> Flow:
        """Send records, and run until they are done."""
        self.topics[topic].send(*values, **more)
        return self.run()

    def views(self) -> Views:
        return Views(self.store, self.dataflow, clock=self.clock)

    def cells(self, state: str) -> dict[str, Any]:
        """A primitive state as its readers see it."""
        return dict(self.views().view(state).pairs())

    def rows(self, state: str, *, live: bool = False) -> dict[str, dict[str, Any]]:
        """An arrow-row state as its readers see it, by key."""
        frame = self.views().view(state, live=live).frame().drop("_updated_at")
        return {row.pop("_key"): row for row in frame.iter_rows(named=True)}

    def sql(self, text: str) -> pl.DataFrame:
        return self.views().sql(text)

    def metrics(self, service: str) -> dict[str, Metric]:
        """What a service counted, by name, all subtasks and operators together."""
        found: dict[str, list[Metric]] = {}
        for run in self._runs or ():
            if run.pipeline.job != service or run.job.base is None:
                continue
            for operator in run.job.base.operators:
                files = operator.tables.get(TableName(METRICS))
                if files is not None:
                    for key, metric in _metrics_in(self.store, operator, files):
                        found.setdefault(key.name, []).append(metric)
        return {name: total(partial) for name, partial in found.items()}


def _metrics_in(
    store: ObjectStore, operator: Any, files: Any
) -> Iterator[tuple[MetricKey, Metric]]:
    from arroyo_dagster.state import GlobalKeyedTable, codec_for

    table = GlobalKeyedTable(operator.configs[TableName(METRICS)], store)
    keys, values = codec_for(MetricKey), codec_for(Metric)
    for key, value in table.load(files.files).items():
        yield keys.decode(key), values.decode(value)


# ---- faults -------------------------------------------------------------------------------------


class KilledAt(Wrapper):
    """Is killed before its n-th call that writes an object, or one of such a name."""

    def __init__(self, store: Any, at: int, name: str = "") -> None:
        super().__init__(store)
        self._name, self.left = name, at

    def _call(self, verb: str, path: str, action: Any, data: bytes = b"") -> Any:
        if verb in ("put", "create", "copy", "delete") and self._name in path.rpartition("/")[2]:
            self.left -= 1
            if self.left == 0:
                raise Crash(f"killed before {verb} {path}")
        return action()


# ---- definitions ---------------------------------------------------------------------------------


def definition(
    services: str, *, topics: Mapping[str, str] | None = None, converter: str = "json"
) -> str:
    """A dataflow of services; topics are of text unless said otherwise, "" = of anything."""
    known = {"words": "string", "asked": "string", "answers": "string", **(topics or {})}
    listed = "\n".join(
        f"  {name}: {{schema: {{value: {{type: {kind}}}}}}}" if kind else f"  {name}: {{}}"
        for name, kind in known.items()
    )
    return (
        "apiVersion: 0.6.0\nmeta: {name: flow, version: 0.1.0, namespace: test}\n"
        f"config: {{converter: {converter}}}\ntopics:\n{listed}\nservices:\n{services}"
    )


def builder(
    body: str,
    *,
    value: str = "{type: u32}",
    key: str = "string",
    state: str = "counts",
    key_body: str = "return record",
    topic: str = "words",
    name: str = "build",
) -> str:
    """A service that folds records into one state; `body` is that of its update-state."""
    lines = "\n".join(f"              {line}" for line in body.strip().splitlines())
    return f"""
  {name}:
    sources: [{{type: topic, id: {topic}}}]
    states:
      {state}:
        type: keyed-state
        properties:
          key: {{type: {key}}}
          value: {value}
    partition:
      assign-key:
        run: |
          def {name}_key(record):
              {key_body}
      update-state:
        run: |
          def {name}_update(record):
{lines}
"""


def row_of(**columns: str) -> str:
    """An arrow-row with columns of these types; `_` stands for a dash."""
    listed = ", ".join(
        f"{name.replace('_', '-')}: {{type: {kind}}}" for name, kind in columns.items()
    )
    return f"{{type: arrow-row, properties: {{{listed}}}}}"


def reader(
    body: str,
    *,
    states: str = "{counts: {from: build.counts}}",
    operator: str = "map",
    name: str = "read",
) -> str:
    """A service that looks something up for each record of `asked`; answers go to `answers`."""
    lines = "\n".join(f"              {line}" for line in body.strip().splitlines())
    return f"""
  {name}:
    sources: [{{type: topic, id: asked}}]
    states: {states}
    transforms:
      - operator: {operator}
        run: |
          def {name}_look_up(record):
{lines}
    sinks: [{{type: topic, id: answers}}]
"""
