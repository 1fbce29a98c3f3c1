"""Small dataflows that tests of several rooms run: counted words, who reads them, windows."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.runtime.service import Bindings, RunOptions, build_dataflow
from arroyo_dagster.dataflow.topics.records import RECORDS, Found, record_batches
from arroyo_dagster.dataflow.views.view import Views, service_paths
from arroyo_dagster.engine import (
    Collector,
    OperatorContext,
    Pipeline,
    Sink,
    TableSource,
    run_pipeline,
)
from arroyo_dagster.state import (
    Epoch,
    GlobalKeyedTable,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    TableConfig,
    TableName,
    codec_for,
    global_table_config,
)
from tests.formats import GlobalKeyedFiles

WORDS = """
apiVersion: 0.6.0
meta: {name: words, version: 0.1.0, namespace: tests}
config: {converter: json}
types:
  word: {type: object, properties: {text: {type: string}, at: {type: i64}}}
  top: {type: object, properties: {text: {type: string}, n: {type: u32}}}
topics:
  words: {schema: {value: {type: word}}}
  asked: {schema: {value: {type: string}}}
  answers: {schema: {value: {type: top}}}
  tops: {schema: {value: {type: top}}}
services:
  count:
    sources: [{type: topic, id: words}]
    states:
      counts: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
      last-seen:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, properties: {n: {type: u32}, last: {type: i64}}}
    partition:
      assign-key: {run: "def by_text(word):\\n    return word.text"}
      update-state:
        run: |
          def count(word):
              counts().increment(1)
              row = last_seen()
              row.n += 1
              row.last = max(row.last, word.at)
              row.update()
  look-up:
    sources: [{type: topic, id: asked}]
    sinks: [{type: topic, id: answers}]
    states:
      seen: {from: count.last-seen}
    transforms:
      - operator: map
        run: |
          def answer(text):
              found = seen().sql("select n from last_seen where _key = '" + text + "'")
              rows = found.rows()
              n = rows.u32(found.col("n")) if rows.next() else 0
              return {"text": text, "n": n}
  windowed:
    sources: [{type: topic, id: words}]
    sinks: [{type: topic, id: tops}]
    states:
      in-window:
        type: keyed-state
        properties: {key: {type: string}, value: {type: arrow-row, properties: {n: {type: u32}}}}
    window:
      assign-timestamp: {run: "def at(word, event_time):\n    return word.at"}
      tumbling: {duration: 10s}
      watermark: {grace-period: 2s}
      partition:
        assign-key: {run: "def by_text_in_window(word):\n    return word.text"}
        update-state:
          run: |
            def count_in_window(word):
                row = in_window()
                row.n += 1
                row.update()
      flush:
        run: |
          def top():
              found = in_window().sql("select _key, n from in_window order by n desc, _key limit 1")
              rows = found.rows()
              if not rows.next():
                  return {"text": "", "n": 0}
              return {"text": rows.str(found.col("_key")), "n": rows.u32(found.col("n"))}
"""


def words_dataflow(text: str = WORDS) -> Dataflow:
    found = parse_document(text)
    assert isinstance(found, Dataflow)
    return found


def topic(values: Sequence[bytes]) -> pa.Table:
    """Records of a topic, one after the other."""
    found = (Found(at, value) for at, value in enumerate(values))
    return pa.Table.from_batches(record_batches(found, 0), RECORDS)


def random_words(count: int, seed: int) -> list[dict[str, Any]]:
    """Words with an event time in milliseconds, mostly in order."""
    chance = random.Random(seed)
    return [
        {"text": f"w{chance.randrange(9)}", "at": 1_000_000 + at * 400 + chance.randrange(3000)}
        for at in range(count)
    ]


def encoded(values: Sequence[Any]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


class Kept(Sink):
    """A sink that keeps what it was given, in the job's own table: read it with `kept`."""

    def tables(self) -> Sequence[TableConfig]:
        return (global_table_config("kept", key=int, value=bytes),)

    def on_start(self, ctx: OperatorContext) -> None:
        self._kept = ctx.table_manager.get_global_keyed_state("kept", int, bytes)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        begin = len(self._kept.get_all()) * 1000 + ctx.task_info.task_index
        for at, value in enumerate(batch.column("value").to_pylist()):
            self._kept.insert(begin + at * 1000, value)

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        pass


def words_services(
    store: ObjectStore,
    words: Sequence[Any],
    asked: Sequence[str] = (),
    *,
    per_epoch: int = 50,
    parallelism: int = 2,
) -> list[Pipeline]:
    """The services of the dataflow, over these records."""
    return build_dataflow(
        words_dataflow(),
        store,
        bindings=Bindings(
            sources={
                "words": TableSource(topic(encoded(words)), rows_per_epoch=per_epoch, splits=2),
                "asked": TableSource(topic(encoded(asked)), rows_per_epoch=per_epoch),
            },
            sinks={"answers": Kept(), "tops": Kept()},
        ),
        options=RunOptions(parallelism=parallelism, clock=lambda: 2_000_000, flush_open=True),
    )


def run_words(store: ObjectStore, words: Sequence[Any], asked: Sequence[str] = ()) -> None:
    """All services in process, one after the other."""
    for service in words_services(store, words, asked):
        run_pipeline(service, store)


def states_of(store: ObjectStore) -> dict[str, Any]:
    """Every state of the dataflow, rows by key."""
    views = Views(store, words_dataflow())
    return {
        name: views.view(name).frame().drop("_updated_at", strict=False).rows()
        for name in sorted(views.states)
    }


def kept(store: ObjectStore, service: str, sink: str) -> list[Any]:
    """What a service has put out to a sink that is `Kept`."""
    checkpoint = ParquetBackend(store, service_paths(words_dataflow(), service)).load()
    operator = checkpoint.operator(OperatorId(f"sink.{sink}"))
    assert operator is not None
    config = operator.configs[TableName("kept")]
    files = operator.tables[TableName("kept")]
    assert isinstance(files, GlobalKeyedFiles)
    writes = GlobalKeyedTable(config, store).last_writes(files.files)
    return sorted(
        (json.loads(codec_for(bytes).decode(last[1])) for last in writes.values() if last), key=str
    )


def plain_counts(words: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """How often each word came, and its latest time."""
    counts = Counter(word["text"] for word in words)
    latest: dict[str, int] = {}
    for word in words:
        latest[word["text"]] = max(latest.get(word["text"], 0), word["at"])
    return {text: (n, latest[text]) for text, n in counts.items()}
