"""Dataflows on Spark beside the same in process, and a state's restore beside a plain read."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.runtime.service import RunOptions, build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.dataflow.views.snapshots import STATES
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.spark.dataflow.pipelines import run_pipelines
from arroyo_dagster.spark.pipeline import SparkOptions
from arroyo_dagster.spark.session import get_session
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, TableName, WorkerGeneration
from arroyo_dagster.state.runtime.in_process import run_pipeline
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.task import EpochPlan, OperatorSubtask
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.benchmarks.conftest import Comparison
from tests.benchmarks.sdf import ROW, spark_epochs
from tests.dataflows import builder, definition

KEYS = 1_000_000
ROWS_PER_EPOCH = KEYS
STATE = TableName("counts")


def dataflow() -> Dataflow:
    found = parse_document(definition(builder(ROW[1], value=ROW[0]), converter="raw"))
    assert isinstance(found, Dataflow)
    return found


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two million records of a million words, in no order."""
    listed = [f"word-{at % KEYS}" for at in range(2 * KEYS)]
    random.Random(1).shuffle(listed)
    path = tmp_path_factory.mktemp("words") / "words.parquet"
    pq.write_table(pa.table({"word": listed}), path)
    return path


def services(words: Path, url: str, parallelism: int) -> tuple[Any, Any]:
    store = open_store(url)
    source = parse_binding(f"words=parquet:{words}?rows_per_epoch={ROWS_PER_EPOCH}", "source")
    wired = wire(dataflow(), BindingsText(sources={"words": source}), store)
    options = RunOptions(parallelism=parallelism)
    return build_dataflow(dataflow(), store, bindings=wired.bindings, options=options), store


def test_the_builder_on_two_cores_of_spark_beside_the_one_in_process(
    words: Path, tmp_path: Path, comparison: Comparison
) -> None:
    """Goal: at least 0.5 of its rate, so at most twice its time; a session is not counted."""
    session, ours = get_session("local[2]")
    times: tuple[list[float], list[float]] = ([], [])
    try:
        for turn in range(3):
            pipelines, store = services(words, str(tmp_path / f"spark-{turn}"), 2)
            begun = time.perf_counter()
            run_pipelines(pipelines, store, SparkOptions(session=session))
            times[0].append(time.perf_counter() - begun)
            (pipeline,), plain = services(words, str(tmp_path / f"plain-{turn}"), 1)
            begun = time.perf_counter()
            run_pipeline(pipeline, plain)
            times[1].append(time.perf_counter() - begun)
            assert Views(store, dataflow()).view("counts").frame().height == KEYS
    finally:
        if ours:
            session.stop()
    ratio = comparison.report(times[0], times[1], goal=2.0)
    print(f"rate against the run in process {1 / ratio:.2f}, goal 0.5, growing with cores")


def test_four_services_of_a_dataflow() -> None:
    """One session start, and at most a second for each service and epoch."""
    for figure in spark_epochs():
        print(f"\n{figure.row()}")


def _states(head: Checkpoint) -> OperatorCheckpoint:
    found = head.operator(STATES)
    assert found is not None
    return found


@dataclass(frozen=True)
class Stored:
    """A job with a state of a million keys, and the files of the state."""

    pipeline: Pipeline
    store: ObjectStore
    head: Checkpoint
    files: list[Path]

    def read(self, _: Any) -> None:
        rows = [pq.ParquetFile(path).read() for path in self.files]
        assert sum(table.num_rows for table in rows) >= KEYS


@pytest.fixture(scope="module")
def stored(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    url = tmp_path_factory.mktemp("stored")
    (pipeline,), store = services(words, str(url), 1)
    head = run_pipeline(pipeline, store).newest
    assert head is not None
    files = [url / path for path in _states(head).tables[STATE].paths]
    return Stored(pipeline, store, head, files)


def test_a_state_of_a_million_keys_restored_beside_a_read_of_its_files(
    stored: Stored, comparison: Comparison
) -> None:
    """As the subtask does it when its service starts, so that a key's row is found at once.

    Goal: at most 2 times what pyarrow needs to read the same files.
    """
    head, pipeline = stored.head, stored.pipeline
    plan = EpochPlan(
        epoch=Epoch(head.epoch + 1),
        min_epoch=head.min_epoch,
        generation=WorkerGeneration(2),
        then_stop=False,
        base_epoch=head.epoch,
        base={one.operator: one for one in head.operators if one.operator in pipeline.operators},
        watermarks_micros={},
    )

    def restore(_: Any) -> None:
        task = OperatorSubtask(pipeline, pipeline.operators[STATES], 0, stored.store, plan)
        (rows,) = task._operator._stores  # type: ignore[attr-defined]
        rows.bring(pa.array(["word-1", "nobody"]))
        assert rows._entries[GLOBAL_WINDOW]["word-1"][0] == 2

    comparison.ratio(restore, stored.read, goal=2.0, rounds=7)


def test_a_view_of_a_million_keys_opened_beside_a_read_of_its_files(
    stored: Stored, comparison: Comparison
) -> None:
    """Besides reading, a view puts its rows in order of their keys."""

    def look(_: Any) -> None:
        assert Views(stored.store, dataflow()).view("counts").frame().height == KEYS

    comparison.ratio(look, stored.read, goal=float("nan"), rounds=5)
