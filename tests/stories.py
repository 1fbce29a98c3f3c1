"""A dataflow that is sensitive to order, loss and doubling, run by the command line or in process.

`told` sentences of numbered words become words, counted in both kinds of state, kept in the order
they came, and gathered in windows; so whatever a restart does wrong shows in a state or a file.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.in_process import DataflowOptions, DataflowOutcome, run_dataflow
from arroyo_dagster.dataflow.runtime.service import RunOptions, build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.dataflow.views.namespaces import Namespaces
from arroyo_dagster.dataflow.views.view import service_paths
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state import ObjectStore, ParquetBackend

STORY = """
apiVersion: 0.6.0
meta: {name: story, version: 0.1.0, namespace: tests}
config: {converter: json}
types:
  word: {type: object, properties: {text: {type: string}, at: {type: i64}}}
topics:
  told: {schema: {value: {type: string, converter: raw}}}
  words: {schema: {value: {type: word}}}
  trail: {schema: {value: {type: string, converter: raw}}}
  closed: {schema: {value: {type: string, converter: raw}}}
services:
  split:
    sources: [{type: topic, id: told}]
    transforms:
      - operator: flat-map
        run: |
          def split(sentence):
              at, *words = sentence.split()
              return [{"text": word, "at": int(at)} for word in words]
    sinks: [{type: topic, id: words}]
  count:
    sources: [{type: topic, id: words}]
    states:
      hits: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
      seen:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, properties: {count: {type: u32}, trail: {type: u64}}}
    partition:
      assign-key: {run: "def by_text(word): return word.text"}
      update-state:
        run: |
          def count(word):
              hits().increment(1)
              row = seen()
              row.count += 1
              row.trail = (row.trail * 31 + word.at) % 1000003
              if row.count % 11 == 0:
                  row.delete()
              else:
                  row.update()
  follow:
    sources: [{type: topic, id: words}]
    transforms:
      - operator: map
        run: |
          def told(word):
              return f"{word.at} {word.text}"
    sinks: [{type: topic, id: trail}]
  gather:
    sources: [{type: topic, id: words}]
    states:
      gathered: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
    window:
      tumbling: {duration: 10s}
      assign-timestamp: {run: "def when(word, _): return word.at * 1000"}
      partition:
        assign-key: {run: "def of_window(word): return word.text"}
        update-state: {run: "def gather(word): gathered().increment(1)"}
      flush:
        run: |
          def close():
              pairs = " ".join(f"{word}={count}" for word, count in sorted(gathered()))
              return f"{window()[0] // 1000} {pairs}"
    sinks: [{type: topic, id: closed}]
"""
"""Four services: words between them, two states of one, windows of another, two files."""


@cache
def dataflow() -> Dataflow:
    """The definition."""
    found = parse_document(STORY)
    assert isinstance(found, Dataflow)
    return found


def write_story(folder: Path, sentences: int, seed: int) -> None:
    """The definition and the sentences, as files."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    lines = [
        f"{at} " + " ".join(f"w{chance.randrange(9)}" for _ in range(chance.randrange(1, 6)))
        for at in range(sentences)
    ]
    (folder / "story.yaml").write_text(STORY)
    (folder / "told.txt").write_text("\n".join(lines) + "\n")


def flags(folder: Path, rows_per_epoch: int) -> list[str]:
    """What the topics are bound to."""
    return [
        *("--source", f"told=jsonl:{folder}/told.txt?rows_per_epoch={rows_per_epoch}"),
        *("--sink", f"trail=jsonl:{folder}/trail.txt"),
        *("--sink", f"closed=jsonl:{folder}/closed/"),
    ]


def run_story(
    store: ObjectStore, folder: Path, *, rows_per_epoch: int, **options: Any
) -> DataflowOutcome:
    """Run it in this process."""
    given = flags(folder, rows_per_epoch)
    pairs = zip(given[::2], given[1::2], strict=True)
    bound = [parse_binding(text, flag.removeprefix("--")) for flag, text in pairs]
    text = BindingsText(
        sources={one.topic: one for one in bound if one.role == "source"},
        sinks={one.topic: one for one in bound if one.role == "sink"},
    )
    wired = wire(dataflow(), text, store)
    pipelines = build_dataflow(
        dataflow(),
        store,
        bindings=wired.bindings,
        options=RunOptions(flush_open=True, keep_epochs=4),
    )
    chosen = DataflowOptions(**options)
    return run_dataflow(pipelines, store, chosen, between=wired.between)


def outcome(store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Every state, and what was put out."""
    spaces = Namespaces(store, dataflow()).all("/state$|/metrics$")
    found: dict[str, Any] = {space.name: space.lines() for space in spaces}
    found["trail"] = (folder / "trail.txt").read_text().splitlines()
    files = sorted((folder / "closed").glob("*.jsonl"))
    found["closed"] = [line for file in files for line in file.read_text().splitlines()]
    return found


def newest_epoch(store: ObjectStore, service: str) -> int:
    """The newest epoch of a service, 0 if it has none."""
    try:
        return max(ParquetBackend(store, service_paths(dataflow(), service)).epochs(), default=0)
    except NotFoundError:
        return 0
