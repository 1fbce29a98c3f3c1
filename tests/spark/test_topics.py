"""Topics bound to Spark's own sources and sinks: a dataflow run over them, cut off and gone on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.dataflow.runtime.service import RunOptions, build_dataflow
from arroyo_dagster.dataflow.topics.bindings import (
    BindingsText,
    TopicBinding,
    parse_binding,
    read_bindings,
)
from arroyo_dagster.dataflow.topics.cells import Shape
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.engine.dataflow.pipelines import run_pipelines
from arroyo_dagster.spark.engine.dataflow.topics import SparkTopics
from arroyo_dagster.spark.engine.pipeline import SparkOptions
from arroyo_dagster.state import StatePath, open_store
from tests.spark.test_staging import staged_rows
from tests.word_services import random_words, states_of, words_dataflow


class Place:
    """A folder with what a dataflow reads and writes through Spark."""

    def __init__(self, session: Any, root: Path) -> None:
        self.session = session
        self.root = root
        self.store = open_store(str(root / "state"))
        (root / "words").mkdir()
        (root / "asked.jsonl").write_text('"w1"\n"nobody"\n')

    def write(self, name: str, words: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(word) + "\n" for word in words)
        (self.root / "words" / name).write_text(text)

    def run(self, **options: Any) -> None:
        schema = "text string, at long"
        words = f"words=spark:json?path={self.root}/words&schema={schema}"
        given = BindingsText(
            sources={
                "words": parse_binding(words, "source"),
                "asked": parse_binding(f"asked=jsonl:{self.root}/asked.jsonl", "source"),
            },
            sinks={"answers": parse_binding(f"answers=spark:json?path={self.answers}", "sink")},
        )
        topics = SparkTopics(self.store)
        dataflow = words_dataflow()
        wired = wire(dataflow, given, self.store, outside=topics)
        services = build_dataflow(
            dataflow, self.store, bindings=wired.bindings, options=RunOptions()
        )
        chosen = SparkOptions(session=self.session, **options)
        run_pipelines(services, self.store, chosen, topics=topics)

    @property
    def answers(self) -> Path:
        return self.root / "answers"

    @property
    def counts(self) -> dict[str, int]:
        return dict(states_of(self.store)["count.counts"])


def counted(words: list[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(word["text"] for word in words))


def test_a_dataflow_reads_and_writes_through_spark_each_record_once(
    session: Any, tmp_path: Path
) -> None:
    place, words = Place(session, tmp_path), random_words(80, 6)
    place.write("a.json", words[:40])
    place.run()
    assert place.counts == counted(words[:40])
    answers = [json.loads(line) for file in place.answers.glob("*.json") for line in file.open()]
    assert sorted(answers, key=str) == [
        {"n": 0, "text": "nobody"},
        {"n": counted(words[:40])["w1"], "text": "w1"},
    ]
    place.write("b.json", words[40:])
    place.run()
    assert place.counts == counted(words)
    assert sum(1 for file in place.answers.glob("*.json") for _ in file.open()) == 2
    # What both readers of the topic have taken does not stay.
    staged = StatePath("tests.words/count/_arroyo_dagster/landed/words")
    assert staged_rows(place.store, staged) == []


def test_without_spark_such_a_topic_is_refused(tmp_path: Path) -> None:
    given = BindingsText(
        sources={
            "words": parse_binding("words=spark:kafka?subscribe=words", "source"),
            "asked": parse_binding("asked=spark:kafka?subscribe=asked", "source"),
        }
    )
    with pytest.raises(InputError, match="Spark,") as found:
        wire(words_dataflow(), given, open_store(str(tmp_path)))
    assert "--spark" in str(found.value)


KAFKA = {
    "kafka.bootstrap.servers": "one:9092,two:9092",
    "subscribe": "words",
    "startingOffsets": '{"words": {"0": 23, "1": -2}}',
    "kafka.sasl.jaas.config": 'org.x.PlainLoginModule required username="u" password="p+w=%?";',
    "failOnDataLoss": "false",
    "maxOffsetsPerTrigger": "1000",
}


class Reader:
    """What `spark.readStream` was told."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.readStream = self

    def format(self, name: str) -> Reader:
        self.told["format"] = name
        return self

    def options(self, **options: str) -> Reader:
        self.told["options"] = options
        return self

    def load(self) -> Reader:
        return self


def told(tmp_path: Path, binding: TopicBinding) -> dict[str, Any]:
    topics = SparkTopics(open_store(f"{tmp_path}/state"))
    topics.source(binding, Shape(), StatePath("landed/words"), ("count",))
    reader: Any = Reader()
    topics.queries().streams["words"].stream.frame(reader)
    return reader.told  # type: ignore[no-any-return]


def test_the_options_of_kafka_reach_spark_unharmed_from_flags_and_from_a_file(
    tmp_path: Path,
) -> None:
    query = "&".join(f"{name}={value.replace('%', '%25')}" for name, value in KAFKA.items())
    flag = parse_binding(f"words=spark:kafka?{query}", "source")
    assert told(tmp_path, flag) == {"format": "kafka", "options": KAFKA}
    file = tmp_path / "bindings.yaml"
    options = {**KAFKA, "startingOffsets": {"words": {"0": 23, "1": -2}}, "failOnDataLoss": False}
    file.write_text(json.dumps({"sources": {"words": {"spark": "kafka", **options}}}))
    assert told(tmp_path, read_bindings(file).sources["words"]) == {
        "format": "kafka",
        "options": KAFKA,
    }
