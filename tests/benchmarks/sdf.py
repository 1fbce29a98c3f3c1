"""The speed of dataflows in one table: each line beside its floor and its goal.

`make bench-sdf` runs this, prints the table, and writes it to docs/operate/sdf-speed.md. What is
compared is measured in turn. Figures are processor time of one process, except those of Spark,
whose work is spread over processes: they are wall time, so measure them on a machine that is idle.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.runtime.service import RunOptions, build_dataflow
from arroyo_dagster.dataflow.storage.boundary import topic_schema
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.folders import LocalFolder
from arroyo_dagster.dataflow.topics.lines import Lines
from arroyo_dagster.dataflow.topics.wiring import FileSource, wire
from arroyo_dagster.dataflow.views.frames import Frame, Pairs
from arroyo_dagster.dataflow.views.sql import Tables
from arroyo_dagster.engine import TableSource, run_pipeline
from arroyo_dagster.state import open_store
from tests.benchmarks.test_start_up import CALLED, processor_seconds
from tests.dataflows import Flow, builder, definition, reader, row_of

ROUNDS = 5
SIZES = (10**3, 10**4, 10**5, 10**6)
CELL = ("{type: u32}", "counts().increment(1)")
ROW = (row_of(n="u32"), "row = counts()\nrow.n += 1\nrow.update()")
_MODULE = "tests.benchmarks.sdf"
_HEADING = "## Figures"
WORDS = Path(__file__).parents[2] / "examples" / "sdf" / "words"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: a median, its range, and what it should be.

    Attributes:
        at_most: whether less is better.
    """

    line: str
    values: tuple[float, ...]
    unit: str
    floor: float | None = None
    goal: float | None = None
    at_most: bool = False

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        """Floor and goal, and what of them is reached."""
        if self.floor is None:
            return "–"
        bound = f"{'at most ' if self.at_most else ''}{_number(self.floor)}"
        if not self._reaches(self.floor):
            return f"{bound}: **missed**"
        missed = self.goal is not None and not self._reaches(self.goal)
        return f"{bound}: reached" + (f"; goal {self.goal:.4g}: missed" if missed else "")

    def _reaches(self, bound: float) -> bool:
        return self.value <= bound if self.at_most else self.value >= bound

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        scatter = "" if low == high else f" ({_number(low)}–{_number(high)})"
        return f"{_number(self.value)}{scatter}"


_KEYS = re.compile(r", ([\d,]+) keys$")


def table_row(figures: Sequence[Figure]) -> str:
    """Return figures that differ by the number of keys only as a row of the table."""
    keys = "; ".join(size for figure in figures for size in _KEYS.findall(figure.line))
    line = _KEYS.sub("", figures[0].line) + (f", {keys} keys" if keys else "")
    values = f"{'; '.join(map(str, figures))} {figures[0].unit}".rstrip()
    verdicts = dict.fromkeys(figure.verdict for figure in figures)
    return f"| {line} | {values} | {'; '.join(verdicts)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


# ---- look-ups ------------------------------------------------------------------------------------

LOOK_UPS = 300_000


def look_ups() -> Iterator[Figure]:
    """A reader looks keys up, by the number of keys."""
    for keys in SIZES:
        listed = sorted(f"word-{at}" for at in range(keys))
        frame = pl.DataFrame({"_key": listed, "value": range(keys)})
        rows = frame.with_columns(pl.col("value").alias("more"), pl.col("_key").alias("text"))
        asked = random.Random(1).choices(listed, k=LOOK_UPS)
        read: dict[str, Any] = {"primitives": Pairs(frame), "rows": Frame(rows, Tables(()), "rows")}
        rates: dict[str, list[float]] = {name: [] for name in read}
        for _ in range(ROUNDS):
            for name, state in read.items():
                begun = time.process_time()
                for key in asked:
                    state.get(key)
                rates[name].append(LOOK_UPS / (time.process_time() - begun))
        for name, found in rates.items():
            line = f"look-ups by key, {name}, {keys:,} keys"
            yield Figure(line, tuple(found), "a second", floor=1e5)


# ---- a word count of JSON lines ------------------------------------------------------------------

COLUMNS = """
  build:
    sources: [{type: topic, id: words}]
    states:
      counts:
        type: keyed-state
        properties: {key: {type: string}, value: {type: u32}}
    partition:
      assign-key:
        run: select text from batch
      update-state:
        run: |
          import polars as pl
          def count(words: pl.DataFrame):
              more = words.group_by("_key").len("more")
              rows = counts().rows().join(more, on="_key")
              return rows.select("_key", pl.col("value") + pl.col("more"))
"""
BY_RECORD = {
    name: builder(body, value=kind, key_body="return record.text")
    for name, (kind, body) in (("primitive", CELL), ("row", ROW))
}
WORD = {"words": "object, properties: {text: {type: string}, n: {type: u32}}"}
RECORDS = 1_000_000
FORMS: dict[str, tuple[str, float, float | None, int]] = {
    "in columns": (COLUMNS, 5.0, None, 100_000),
    "in columns, all in one epoch": (COLUMNS, 5.0, None, RECORDS),
    "per record, primitive": (BY_RECORD["primitive"], 0.4, 0.8, 100_000),
    "per record, row": (BY_RECORD["row"], 0.3, 0.6, 100_000),
}
"""The services, floor and goal of each line, and the records of an epoch."""


def word_counts() -> Iterator[Figure]:
    """Rates against a loop that decodes each line and counts in a dict, nothing durable."""
    chance = random.Random(1)
    lines = [
        json.dumps({"text": f"word-{int(chance.random() ** 3 * 50_000)}", "n": at})
        for at in range(RECORDS)
    ]
    walls: dict[str, list[float]] = {name: [] for name in FORMS}
    ratios: dict[str, list[float]] = {name: [] for name in FORMS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "words.jsonl")
        file.write_text("\n".join(lines) + "\n")
        for _ in range(ROUNDS):
            loop_wall, loop = _timed(functools.partial(_bare_loop, file))
            for name, (services, _, _, rows) in FORMS.items():
                source: Any = FileSource(
                    "words", LocalFolder(str(file)), Lines(), rows_per_epoch=rows
                )
                flow = Flow(definition(services, topics=WORD), topics={"words": source})
                wall, taken = _timed(functools.partial(run_pipeline, flow.pipelines[0], flow.store))
                walls[name].append(loop_wall / wall)
                ratios[name].append(loop / taken)
    for name, (_, floor, goal, _) in FORMS.items():
        line = f"word count of JSON lines, {name}"
        if not name.startswith("in columns"):
            yield Figure(line, tuple(ratios[name]), "x the bare loop", floor, goal)
            continue
        # Several threads work on columns: the floor is one of wall time.
        yield Figure(f"{line}, wall time", tuple(walls[name]), "x the bare loop", floor, goal)
        yield Figure(f"{line}, processor time", tuple(ratios[name]), "x the bare loop")


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the processor time of a call, in seconds."""
    wall, taken = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - taken


def _bare_loop(file: Path) -> None:
    counted: dict[str, int] = {}
    with file.open() as opened:
        for line in opened:
            word = json.loads(line)["text"]
            counted[word] = counted.get(word, 0) + 1


# ---- a batch beside the number of keys -----------------------------------------------------------

BATCH, DISTINCT, BATCHES = 20_000, 1000, 7


def batches() -> Iterator[Figure]:
    """An epoch of as many records and distinct keys at any number of keys in the state."""
    for name, services in (("in columns", COLUMNS), *BY_RECORD.items()):
        flows = {keys: _with_keys(services, keys) for keys in SIZES}
        times: dict[int, list[float]] = {keys: [] for keys in SIZES}
        for turn in range(BATCHES + 1):
            for keys, flow in flows.items():
                begun = time.process_time()
                assert flow.step() == 1
                if turn:
                    times[keys].append((time.process_time() - begun) * 1e3)
        for keys, found in times.items():
            yield Figure(f"epoch, {name}, {keys:,} keys", tuple(found), "ms")
        medians = [statistics.median(found) for found in times.values()]
        line = f"epoch, {name}, the costliest number of keys by the cheapest"
        yield Figure(line, (max(medians) / min(medians),), "x")


def _with_keys(services: str, keys: int) -> Flow:
    """A dataflow whose first epoch, already written, made all keys, with more epochs to go."""
    chance = random.Random(keys)
    numbers = [*range(keys)]
    for _ in range(BATCHES + 1):
        some = chance.sample(range(keys), DISTINCT)
        numbers += [some[at % DISTINCT] for at in range(BATCH)]
    values = pa.array([f'{{"text": "word-{number}", "n": 1}}'.encode() for number in numbers])
    count = len(numbers)
    table = pa.Table.from_arrays(
        [
            pa.nulls(count, pa.binary()),
            values,
            pa.repeat(pa.scalar(0, pa.int32()), count),
            pa.array(range(count), pa.int64()),
            pa.nulls(count, pa.timestamp("ms")),
        ],
        schema=topic_schema(),
    )
    source: Any = TableSource(table, rows_per_epoch=keys)
    flow = Flow(definition(services, topics=WORD), topics={"words": source})
    assert flow.step() == 1
    source._rows_per_epoch = BATCH
    return flow


# ---- the start -----------------------------------------------------------------------------------


def start_up() -> Iterator[Figure]:
    """`sdf run` of three services with few records: nearly all of it is the start."""
    file, bound = str(WORDS / "dataflow.yaml"), str(WORDS / "bindings.yaml")
    taken: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(7):
            words = ["sdf", "run", file, "--bindings", bound, "--url", f"{folder}/{turn}"]
            taken.append(processor_seconds(CALLED.format(words=words)))
    line = "`sdf run` of three services with few records"
    yield Figure(line, tuple(taken), "s of processor", floor=1.5, at_most=True)


# ---- four services on Spark ----------------------------------------------------------------------

SPLIT = """
  split:
    sources: [{type: topic, id: sentences}]
    transforms:
      - operator: flat-map
        run: |
          def split_sentence(sentence):
              return sentence.split()
    sinks: [{type: topic, id: words}]
"""
FOUR_SERVICES = (
    SPLIT
    + builder(CELL[1], value=CELL[0])
    + builder(
        "lengths().increment(1)",
        state="lengths",
        key="u32",
        key_body="return len(record)",
        name="measure",
    )
    + reader("return str(counts().get(record, 0))")
)
SPARK_RUNS, SPARK_ROUNDS, PER_EPOCH = 3, 5, 200


@dataclass(frozen=True)
class SparkRun:
    """A run of the four services in a process of its own, in seconds.

    Attributes:
        starts: how many Spark sessions it started.
        session_seconds: how long they took.
        rounds: each round of epochs; the first has Spark's first query and its Python workers.
    """

    starts: int
    session_seconds: float
    rounds: list[float]
    epochs: int


def four_services() -> Dataflow:
    """Sentences are split into words, which two services count; a fourth reads the counts."""
    text = definition(FOUR_SERVICES, topics={"sentences": "string"}, converter="raw")
    found = parse_document(text)
    assert isinstance(found, Dataflow)
    return found


def run_four_services(folder: Path) -> SparkRun:
    """Run them on two cores of Spark, with as many rounds as the records make."""
    from arroyo_dagster.spark.engine.dataflow.pipelines import run_pipelines
    from arroyo_dagster.spark.engine.pipeline import SparkOptions
    from arroyo_dagster.spark.session import open_session
    from arroyo_dagster.spark.settings import SparkSettings

    chance = random.Random(1)
    count = PER_EPOCH * SPARK_ROUNDS
    words = [f"word-{chance.randrange(50)}" for _ in range(5 * count)]
    sentences, asked = folder / "sentences.txt", folder / "asked.txt"
    sentences.write_text("\n".join(" ".join(words[at::count]) for at in range(count)) + "\n")
    asked.write_text("\n".join(words[:count]) + "\n")
    sources = {
        topic: parse_binding(f"{topic}=jsonl:{file}?rows_per_epoch={PER_EPOCH}", "source")
        for topic, file in (("sentences", sentences), ("asked", asked))
    }
    sinks = {"answers": parse_binding(f"answers=jsonl:{folder}/answers/", "sink")}
    flow, store = four_services(), open_store(str(folder / "states"))
    wired = wire(flow, BindingsText(sources=sources, sinks=sinks), store)
    pipelines = build_dataflow(flow, store, bindings=wired.bindings, options=RunOptions())

    starts, session_seconds = 0, 0.0
    ends: list[float] = []

    def timed(settings: Any) -> Any:
        nonlocal starts, session_seconds
        begun = time.perf_counter()
        opened = open_session(settings)
        ends.append(time.perf_counter())
        starts += opened.started
        session_seconds += ends[-1] - begun
        return opened

    def on_epoch(pipeline: Any, _: Any) -> None:
        if pipeline is pipelines[-1]:
            ends.append(time.perf_counter())

    options = SparkOptions(spark=SparkSettings(master="local[2]"))
    with patch("arroyo_dagster.spark.engine.pipeline.open_session", timed):
        outcome = run_pipelines(pipelines, store, options, between=wired.between, on_epoch=on_epoch)
    rounds = [after - before for before, after in pairwise(ends)]
    return SparkRun(starts, session_seconds, rounds, sum(outcome.epochs.values()))


def spark_epochs() -> Iterator[Figure]:
    """Each run in a new process, as `sdf run --spark` is."""
    runs: list[SparkRun] = []
    for _ in range(SPARK_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", _MODULE, "--spark", folder],
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        runs.append(SparkRun(**json.loads(done.stdout.splitlines()[-1])))
    services = len(four_services().services)
    assert all(one.epochs == services * SPARK_ROUNDS for one in runs)
    name, unit = f"Spark, {services} services", "s per service and epoch"
    starts = tuple(float(one.starts) for one in runs)
    yield Figure(f"{name}: session starts", starts, "", 1, at_most=True)
    yield Figure(f"{name}: a session start", tuple(one.session_seconds for one in runs), "s")
    seconds: dict[str, Callable[[SparkRun], float]] = {
        f"{SPARK_ROUNDS} epochs of each": lambda run: sum(run.rounds) / run.epochs,
        "the first epoch, with the start of Python": lambda run: run.rounds[0] / services,
        "a later epoch": lambda run: statistics.median(run.rounds[1:]) / services,
    }
    for line, of_run in seconds.items():
        yield Figure(f"{name}: {line}", tuple(map(of_run, runs)), unit, 1, at_most=True)


# ---- the table -----------------------------------------------------------------------------------

MEASURES: tuple[Callable[[], Iterator[Figure]], ...] = (
    look_ups,
    word_counts,
    start_up,
    batches,
    spark_epochs,
)


def write_table(page: Path, figures: Sequence[Figure], measured: str) -> None:
    """Replace the part of a page below the heading of the figures, up to the next heading."""
    before, found, after = page.read_text().partition(f"{_HEADING}\n")
    assert found, f"{page} has no heading {_HEADING!r}"
    _, following, rest = after.partition("\n## ")
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        groups.setdefault(_KEYS.sub("", figure.line), []).append(figure)
    rows = map(table_row, groups.values())
    table = "\n".join(("| Line | Figure | Floor, goal |", "|---|---|---|", *rows))
    page.write_text(f"{before}{_HEADING}\n\n{table}\n\n{measured}\n{following}{rest}")


def main() -> None:
    """Print each line as it is measured, and write all of them to a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", help="the page to write the table to")
    parser.add_argument("--spark", type=Path, help="only run four services on Spark, here")
    given = parser.parse_args()
    if given.spark is not None:
        print(json.dumps(asdict(run_four_services(given.spark))))
        return
    figures: list[Figure] = []
    loads = [os.getloadavg()[0]]
    for measure in MEASURES:
        for figure in measure():
            figures.append(figure)
            print(table_row([figure]), flush=True)
        loads.append(os.getloadavg()[0])
    measured = (
        f"Measured on {dt.date.today()}, on {os.cpu_count()} cores that were shared, with a load "
        f"of {min(loads):.0f} to {max(loads):.0f}."
    )
    print(measured)
    if given.page is not None:
        write_table(given.page, figures, measured)


if __name__ == "__main__":
    main()
