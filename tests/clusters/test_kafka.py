"""A pipeline from Kafka to Kafka on a real broker: read exactly once, written at least once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clusters.kafka import answer_of, kafka_broker
from tests.documentation import blocks

pytestmark = pytest.mark.clusters

APPLICATION = """
import json, sys
import pyarrow as pa, pyarrow.compute as pc
from arroyo_dagster.spark.engine.connectors import KafkaSink, SparkSource
from arroyo_dagster.spark.engine.pipeline import SparkOptions, run_pipeline
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.engine import Operator, Pipeline
from arroyo_dagster.state import global_table_config, open_store

servers, folder, ivy, connector, documentation = sys.argv[1:]
settings = SparkSettings(
    master="local[2]", packages=(connector,), conf={"spark.jars.ivy": ivy}
)
session = open_session(settings).session


class Count(Operator):
    output_schema = pa.schema([("word", pa.string()), ("n", pa.int64())])

    def tables(self):
        return [global_table_config("counts", key=str, value=int)]

    def on_start(self, ctx):
        self.counts = ctx.table_manager.get_global_keyed_state("counts", str, int)

    def process_batch(self, batch, ctx, collector):
        words, counts = [value.decode() for value in batch["value"].to_pylist()], []
        for word in words:
            counts.append(self.counts.get(word, 0) + 1)
            self.counts.insert(word, counts[-1])
        collector.collect(pa.table([words, counts], schema=self.output_schema))


def produce(words):
    rows = [(word.encode(), word.encode()) for word in words]
    frame = session.createDataFrame(rows, "key binary, value binary")
    options = {"kafka.bootstrap.servers": servers, "topic": "words"}
    frame.write.format("kafka").options(**options).save()


def records(topic="counts"):
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "includeHeaders": "true"}
    frame = session.read.format("kafka").options(**options).load()
    return [
        {
            "key": bytes(row.key).decode(),
            "value": bytes(row.value).decode(),
            **{header.key: bytes(header.value).decode() for header in row.headers},
        }
        for row in frame.collect()
    ]


store = open_store(f"file://{folder}/state")
options = {"kafka.bootstrap.servers": servers, "subscribe": "words", "startingOffsets": "earliest"}
pipeline = Pipeline("words", parallelism=2)
rows = pipeline.source("words", SparkSource("kafka", options), timestamp="timestamp")
counted = rows.key_by("value").apply("count", Count())
counted.sink("counts", KafkaSink(servers, "counts", key="word"))


class Crash(BaseException):
    pass


class Crashing:
    \"\"\"A store on which a run dies after the records were sent, before that is recorded.\"\"\"

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def put(self, path, data):
        if path.endswith(".done"):
            raise Crash
        return self.inner.put(path, data)

    def __reduce__(self):
        return (lambda inner: inner), (self.inner,)


def run(store=store):
    return run_pipeline(pipeline, store, SparkOptions(session=session)).epochs


found = {}
produce(["to", "be", "or", "not"])
found["epochs"] = run()
found["first"] = records()
produce(["to", "be"])
try:
    run(Crashing(store))
except Crash:
    found["crashed"] = len(records())
found["again"] = run()
found["all"] = records()
documented = {}
exec(documentation.replace("HOST:9092", servers).replace('"orders"', '"words"'), documented)
run_pipeline(documented["pipeline"], store, SparkOptions(session=session))
found["copied"] = len(records("copied"))
staged = store.list(pipeline.paths.spark_source("words"))
found["staged"] = [one.path for one in staged if one.path.endswith(".parquet")]
print(json.dumps(found))
session.stop()
"""


def test_records_are_read_exactly_once_and_written_at_least_once(tmp_path: Path) -> None:
    with kafka_broker(tmp_path) as servers:
        found = answer_of(APPLICATION, tmp_path, servers, blocks("docs/spark.md", "python")[0])
    first, everything = found["first"], found["all"]
    assert (found["epochs"], len(first)) == (1, 4)
    assert {(one["key"], json.loads(one["value"])["n"]) for one in first} == {
        *(("to", 1), ("be", 1), ("or", 1), ("not", 1))
    }
    assert {one["arroyo-job"] for one in everything} == {"words/main/counts"}
    # The epoch that was sent before the crash comes again, with the same headers.
    assert (found["crashed"], found["again"], len(everything)) == (6, 0, 8)
    once: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for one in everything:
        header = one["arroyo-epoch"], one["arroyo-index"]
        once.setdefault(header, set()).add((one["key"], json.loads(one["value"])["n"]))
    assert sorted(pair for (pair,) in once.values()) == [
        *(("be", 1), ("be", 2), ("not", 1), ("or", 1), ("to", 1), ("to", 2))
    ]
    assert found["staged"] == []
    assert found["copied"] == 6
