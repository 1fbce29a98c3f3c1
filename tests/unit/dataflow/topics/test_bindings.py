"""What topics are bound to: read from flags and files, every mistake named, and put together."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding, read_bindings
from arroyo_dagster.dataflow.topics.rate import RateSource
from arroyo_dagster.dataflow.topics.sinks import KeptSink, LinesFolderSink
from arroyo_dagster.dataflow.topics.wiring import FileSource, Wired, wire
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state import MemoryStore
from tests.reading import read_on


@pytest.mark.parametrize(
    ("role", "text", "words"),
    [
        ("source", "words", "TOPIC=KIND:PATH"),
        ("source", "=jsonl:a", "TOPIC=KIND:PATH"),
        ("sink", "words=", "TOPIC=KIND:PATH"),
        ("source", "words=kafka:a", "expected jsonl, csv, parquet, rate, stdin"),
        ("source", "words=stdout", "a source cannot be bound to"),
        ("sink", "words=rate:5", "expected jsonl, csv, parquet, stdout"),
        ("source", "words=jsonl", "needs a path"),
        ("source", "words=rate", "numbers a second"),
        ("source", "words=stdin:x", "takes no path"),
        ("source", "words=jsonl:a?folow=true", "no option 'folow'"),
        ("sink", "words=jsonl:a?follow=true", "no option 'follow'"),
        ("source", "words=jsonl:a?follow=maybe", "true or false"),
        ("source", "words=jsonl:a?rows_per_epoch=0", "whole number above 0"),
    ],
)
def test_a_binding_that_is_none_is_told_with_an_example(role: str, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        parse_binding(text, role)
    assert raised.value.facts
    if text.startswith("words"):
        assert "words" in str(raised.value)


# ---- the file ------------------------------------------------------------------------------------


def test_every_mistake_of_a_bindings_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bindings.yaml"
    file.write_text(
        "sources:\n  a: kafka:x\n  b: {jsonl: x, csv: y}\n  c: {jsonl: x, follow: maybe}\n"
        "  d: {jsonl: [x]}\nsinks: [x]\nfunctions: {f: 5}\nenvironment: {}\n"
    )
    with pytest.raises(InvalidDefinition) as raised:
        read_bindings(file)
    assert [(one.line, one.path) for one in raised.value.diagnostics] == [
        (2, "sources.a"),
        (3, "sources.b"),
        (4, "sources.c"),
        (5, "sources.d.jsonl"),
        (6, "sinks"),
        (7, "functions.f"),
        (8, "environment"),
    ]
    assert str(file) in str(raised.value)
    with pytest.raises(NotFoundError, match="no such bindings file"):
        read_bindings(tmp_path / "nowhere.yaml")


# ---- put together --------------------------------------------------------------------------------

FLOW = """
apiVersion: 0.6.0
meta: {name: flow, version: 0.1.0, namespace: test}
config: {converter: json}
topics:
  sentences: {schema: {value: {type: string, converter: raw}}}
  asked: {schema: {value: {type: string}}}
  words: {schema: {value: {type: string}}}
  counts: {schema: {value: {type: count}}}
types:
  count: {type: object, properties: {word: {type: string}, n: {type: u32}}}
services:
  split:
    sources: [{type: topic, id: sentences}]
    transforms: [{operator: flat-map, uses: "m:split"}]
    sinks: [{type: topic, id: words}]
  count:
    sources: [{type: topic, id: words}]
    transforms: [{operator: map, uses: "m:count"}]
    sinks: [{type: topic, id: counts}]
  look:
    sources: [{type: topic, id: asked}]
    transforms: [{operator: map, uses: "m:look"}]
    sinks: [{type: topic, id: counts}]
"""


def wired(*flags: str, store: MemoryStore | None = None, **options: Any) -> Wired:
    flow = parse_document(FLOW)
    assert isinstance(flow, Dataflow)
    sources = [parse_binding(flag[1:], "source") for flag in flags if flag[0] == "<"]
    sinks = [parse_binding(flag[1:], "sink") for flag in flags if flag[0] == ">"]
    given = BindingsText(
        sources={one.topic: one for one in sources}, sinks={one.topic: one for one in sinks}
    )
    return wire(flow, given, store or MemoryStore(), **options)


def test_topics_get_what_they_are_bound_to_and_those_between_nothing(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("a b\n")
    found = wired(
        f"<sentences=jsonl:{tmp_path}/in.jsonl", "<asked=rate:5", f">counts=jsonl:{tmp_path}"
    )
    kinds = {topic: type(source) for topic, source in found.bindings.sources.items()}
    assert kinds["sentences"] is FileSource
    assert kinds["asked"] is RateSource
    assert found.bindings.sources["words"] is found.between[0]
    assert isinstance(found.bindings.sinks["words"], KeptSink)
    assert isinstance(found.bindings.sinks["counts"], LinesFolderSink)
    assert found.unbound == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "2 topics have no source: sentences, asked"),
        (["<sentences=rate:1"], "1 topic has no source: asked"),
        (["<sentence=rate:1", "<asked=rate:1"], "no service reads a topic 'sentence'"),
        (["<sentences=rate:1", "<asked=rate:1", ">count=stdout"], "writes a topic 'count'"),
        (["<sentences=rate:1", "<asked=rate:1", "<words=rate:1"], "also written by a service"),
        (["<sentences=stdin", "<asked=stdin"], "only one service can read"),
        (["<sentences=stdin", "<asked=rate:1"], "the standard input"),
        (["<sentences=rate:x", "<asked=rate:1"], "numbers a second"),
        (["<sentences=rate:1", "<asked=rate:1", ">counts=jsonl:out"], "of only one service"),
        (["<sentences=jsonl:/nowhere/at/all", "<asked=rate:1"], "no such file"),
    ],
)
def test_what_does_not_fit_the_dataflow_is_told(flags: list[str], words: str) -> None:
    with pytest.raises((InputError, NotFoundError), match=words) as raised:
        wired(*flags)
    assert raised.value.facts.get("topic") or raised.value.facts.get("topics") or "topic" in words
    assert raised.value.next_step or "standard input" in words or "numbers" in words


def test_a_topic_that_is_bound_to_another_thing_loses_and_doubles_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "in").write_text("one\n")
    file = f"<sentences=jsonl:{tmp_path}/in"

    def source(flag: str, stdin: bytes = b"") -> Any:
        found = wired(flag, "<asked=rate:1", store=store, stdin=io.BytesIO(stdin))
        return found.bindings.sources["sentences"]

    found, offset = read_on(source(file), source(file).initial_offset())
    more, offset = read_on(source("<sentences=stdin", b"two\n"), offset)
    found += more
    with (tmp_path / "in").open("a") as into:
        into.write("three\n")
    more, offset = read_on(source(file), offset)
    found += more
    more, offset = read_on(source("<sentences=rate:1000000?limit=2"), offset)
    found += more
    more, offset = read_on(source("<sentences=stdin", b"four\n"), offset)
    found += [more[0]]
    assert [value for value in found if value[:1] != b"{"] == [b"one", b"two", b"three", b"four"]
