"""Services of a dataflow in one Spark application: equal to those in process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.in_process import DataflowOptions, run_dataflow
from arroyo_dagster.dataflow.runtime.service import (
    Bindings,
    RunOptions,
    build_dataflow,
    build_service,
)
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.engine import TableSource, run_pipeline
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.engine.dataflow.pipelines import run_pipelines
from arroyo_dagster.spark.engine.dataflow.states import register_states, state_frame
from arroyo_dagster.spark.engine.pipeline import SparkOptions
from arroyo_dagster.state import open_store
from tests.seeds import soak_seeds
from tests.word_services import (
    Kept,
    encoded,
    kept,
    plain_counts,
    random_words,
    run_words,
    states_of,
    topic,
    words_dataflow,
    words_services,
)

ASKED = ["w1", "w2", "nobody", "w1"]


def everything(store: Any) -> list[Any]:
    return [states_of(store), kept(store, "look-up", "answers"), kept(store, "windowed", "tops")]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in soak_seeds(6))]
)
def test_the_same_dataflow_gives_equal_states_and_outputs_in_process_and_on_spark(
    session: Any, tmp_path: Path, seed: int
) -> None:
    words = random_words(60, seed)
    plain, spark = (open_store(f"{tmp_path}/{name}") for name in ("plain", "spark"))
    run_dataflow(words_services(plain, words, ASKED), plain, DataflowOptions(until_idle=True))
    told: list[str] = []
    outcome = run_pipelines(
        words_services(spark, words, ASKED),
        spark,
        SparkOptions(session=session),
        on_epoch=lambda pipeline, checkpoint: told.append(pipeline.job),
    )
    assert outcome.ended
    assert told.index("count") < told.index("look-up")  # owners before readers
    assert everything(spark) == everything(plain)
    counts = {key: (n, last) for key, last, n in states_of(spark)["count.last-seen"]}
    assert counts == plain_counts(words)


def test_when_one_service_fails_the_others_stop_with_a_checkpoint(
    session: Any, tmp_path: Path
) -> None:
    store = open_store(f"{tmp_path}/state")
    good, *_ = words_services(store, random_words(20, 4), parallelism=1)
    bad = words_services(store, [{"text": "x", "at": 1}], parallelism=1)[0]
    bad.name = "other"
    bad.sources["topics"].source.read = _fails  # type: ignore[union-attr,method-assign,assignment,index]
    with pytest.raises(ArroyoStateError, match="on purpose"):
        run_pipelines([good, bad], store, SparkOptions(follow=True, session=session))
    newest = Views(store, words_dataflow()).head("count")
    assert newest is not None
    assert newest.progress is not None


def _fails(partition: Any) -> Any:
    raise ArroyoStateError("on purpose")


class OwnerGoesOn(TableSource):
    """Records that are read while the owner of the states writes epochs of all words."""

    def __init__(self, url: str, words: list[Any]) -> None:
        super().__init__(topic(encoded(ASKED)), rows_per_epoch=100)
        self._url, self._words = url, words

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        store = open_store(self._url)
        count, *_ = words_services(store, self._words)
        run_pipeline(count, store)
        yield from super().read(partition)


@pytest.mark.parametrize("on_spark", [False, True])
def test_look_ups_see_the_epoch_that_theirs_began_with_whatever_the_owner_does_meanwhile(
    session: Any, tmp_path: Path, on_spark: bool
) -> None:
    words, store = random_words(100, 8), open_store(f"{tmp_path}/state")
    count, *_ = words_services(store, words[:50])
    run_pipeline(count, store)
    asked = OwnerGoesOn(store.url, words)
    bindings = Bindings(sources={"asked": asked}, sinks={"answers": Kept()})
    look_up = build_service(
        words_dataflow(), "look-up", store, bindings=bindings, options=RunOptions(parallelism=2)
    )
    if on_spark:
        run_pipelines([look_up], store, SparkOptions(session=session))
    else:
        run_pipeline(look_up, store)
    first, every = plain_counts(words[:50]), plain_counts(words)
    assert first["w1"] != every["w1"]
    known = [{"n": first.get(one, (0,))[0], "text": one} for one in ASKED]
    assert kept(store, "look-up", "answers") == sorted(known, key=str)
    assert {key: (n, last) for key, last, n in states_of(store)["count.last-seen"]} == every


def test_states_are_frames_and_views_of_spark_at_one_epoch(session: Any, tmp_path: Path) -> None:
    words = random_words(100, 5)
    store = open_store(f"{tmp_path}/state")
    run_words(store, words[:50])
    before = state_frame(session, store, words_dataflow(), "count.counts")
    epochs = register_states(session, store, words_dataflow())
    assert epochs["count"] is not None
    run_words(store, words)  # the sources have more: a newer epoch
    first, every = plain_counts(words[:50]), plain_counts(words)
    assert {row._key: row.value for row in before.collect()} == {
        text: n for text, (n, _) in first.items()
    }
    rows = session.sql("select _key, n, last from last_seen order by _key").collect()
    assert {row._key: (row.n, row.last) for row in rows} == first
    now = state_frame(session, store, words_dataflow(), "last-seen")
    assert {row._key: (row.n, row.last) for row in now.collect()} == every
    assert dict(now.dtypes)["n"] == "bigint"  # u32


WHOLE_BATCHES = """
apiVersion: 0.6.0
meta: {name: batches, version: 0.1.0, namespace: test}
topics:
  words:
    schema:
      value: {converter: json, type: object, properties: {text: {type: string}, at: {type: i64}}}
services:
  count:
    sources: [{type: topic, id: words}]
    states:
      counts:
        type: keyed-state
        properties: {key: {type: string}, value: {type: u32}}
    transforms:
      - {operator: filter, run: "select text <> 'w8' from batch"}
    partition:
      assign-key:
        run: |
          import polars as pl
          def key_of(words: pl.DataFrame):
              return words["text"]
      update-state:
        run: |
          import polars as pl
          def count(words: pl.DataFrame):
              if (words["at"] % 13 == 0).any():
                  raise ValueError("unlucky")
              more = words.group_by("_key").len("more")
              rows = counts().rows().join(more, on="_key")
              return rows.select("_key", pl.col("value") + pl.col("more"))
"""


def test_functions_of_whole_batches_and_look_ups_are_as_in_process(
    session: Any, tmp_path: Path
) -> None:
    dataflow = parse_document(WHOLE_BATCHES, extended=True)
    assert isinstance(dataflow, Dataflow)
    words = random_words(60, 3)

    def services(store: Any) -> list[Any]:
        source = TableSource(topic(encoded(words)), rows_per_epoch=30, splits=2)
        return build_dataflow(
            dataflow,
            store,
            bindings=Bindings(sources={"words": source}),
            options=RunOptions(parallelism=2, clock=lambda: 2_000_000, max_errors=60),
        )

    expected: dict[str, int] = {}
    for word in words:
        if word["text"] != "w8" and word["at"] % 13:
            expected[word["text"]] = expected.get(word["text"], 0) + 1
    plain, spark = (open_store(f"{tmp_path}/{name}") for name in ("plain", "spark"))
    run_dataflow(services(plain), plain, DataflowOptions(until_idle=True))
    run_pipelines(services(spark), spark, SparkOptions(session=session))
    for store in (plain, spark):
        assert dict(Views(store, dataflow).view("counts").pairs()) == expected


CRASHING = """
apiVersion: 0.6.0
meta: {{name: crashing, version: 0.1.0, namespace: t}}
topics: {{lines: {{schema: {{value: {{type: string, converter: raw}}}}}}}}
services:
  check:
    sources: [{{type: topic, id: lines}}]
    states: {{hits: {{type: keyed-state, properties: {{key: {{type: string}}, value: {{type: u32}}}}}}}}
    transforms:
      - operator: map
        run: |
          import os
          def lowered(line):
              {mapped}
              return line.lower()
    partition:
      assign-key: {{run: "def by_line(line): return line"}}
      update-state:
        run: |
          import os
          def count(line):
              {counted}
              hits().increment(1)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("crashes", "step", "how"),
    [
        ({"mapped": "os._exit(3)"}, "lowered", "with exit code 3"),
        ({"counted": "os.kill(os.getpid(), 11)"}, "count", "by signal 11"),
    ],
)
def test_a_function_that_ends_its_process_is_named_and_nothing_is_lost(
    session: Any, tmp_path: Path, crashes: dict[str, str], step: str, how: str
) -> None:
    (tmp_path / "lines").write_text("A\nb\na\n")
    store = open_store(f"file://{tmp_path}/state")
    given = BindingsText(
        sources={"lines": parse_binding(f"lines=jsonl:{tmp_path / 'lines'}", "source")}
    )

    def run(**bodies: str) -> None:
        text = CRASHING.format(**{"mapped": "pass", "counted": "pass", **bodies})
        dataflow = parse_document(text)
        assert isinstance(dataflow, Dataflow)
        wired = wire(dataflow, given, store)
        pipelines = build_dataflow(dataflow, store, bindings=wired.bindings)
        run_pipelines(pipelines, store, SparkOptions(session=session))

    with pytest.raises(ArroyoStateError) as error:
        run(**crashes)
    # How it ended is known to the worker whose child it was, which Spark may have ended before.
    ended = f"job `t.crashing/check`: the process of a Spark worker ended( {how})? while it ran"
    assert re.search(f"{ended} `{step}`", str(error.value))
    assert "org.apache.spark" not in str(error.value)
    run()
    dataflow = parse_document(CRASHING.format(mapped="pass", counted="pass"))
    assert isinstance(dataflow, Dataflow)
    pairs = Views(store, dataflow).view("check.hits").pairs()
    assert dict(pairs) == {"a": 2, "b": 1}
