"""The runtime on Spark: equal to the one in process, exactly once, and never silently skipping."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import Collector, Operator, OperatorContext, Pipeline, TableSource
from arroyo_dagster.engine import run_pipeline as run_in_process
from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.spark.engine import pipeline as pipeline_on_spark
from arroyo_dagster.spark.engine import worker
from arroyo_dagster.spark.engine.pipeline import SparkOptions, run_pipeline
from arroyo_dagster.spark.engine.worker import SmallEpochs
from arroyo_dagster.state import open_store, plan_rollback, run_rollback
from tests.compat.arroyo import DATA
from tests.internals import JobRun
from tests.seeds import soak_seeds
from tests.words import Count, newest, output_of, random_words, tables_of, words_pipeline

pytestmark = pytest.mark.usefixtures("session")


def _paths(tmp_path: Path, name: str) -> tuple[Any, Path]:
    return open_store(f"file://{tmp_path}/{name}-state"), tmp_path / f"{name}-output"


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in soak_seeds(1))]
)
def test_the_same_stream_gives_equal_tables_in_process_and_on_spark(
    tmp_path: Path, seed: int
) -> None:
    rows = random_words(300, seed)
    found = {}
    for name, run in (("local", run_in_process), ("spark", run_pipeline)):
        store, output = _paths(tmp_path, name)
        pipeline = words_pipeline(rows, f"file://{output}", rows_per_epoch=60, parallelism=3)
        outcome = run(pipeline, store)
        assert outcome.exhausted
        assert outcome.epochs == 5
        found[name] = (tables_of(store, newest(store, pipeline)), output_of(output))
    assert found["spark"] == found["local"]
    assert len(found["local"][1]) == 300


@pytest.mark.parametrize("parallelism", [1, 3])  # one subtask: a task runs all levels
def test_epochs_that_workers_read_give_what_those_of_the_driver_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallelism: int
) -> None:
    rows, found, read_here = random_words(300, 3), {}, {}
    read = SmallEpochs.read
    most = worker.MOST_BYTES
    # `query`: as on a cluster, where small epochs are jobs of SQL too.
    for name, most_bytes, local in (
        ("driver", most, True),
        ("query", most, False),
        ("workers", 0, True),
    ):
        answers: list[Any] = []
        monkeypatch.setattr(worker, "MOST_BYTES", most_bytes)
        monkeypatch.setattr(pipeline_on_spark, "runs_in_process", lambda _, local=local: local)
        monkeypatch.setattr(
            SmallEpochs,
            "read",
            lambda self, splits, told=answers: told.append(read(self, splits)) or told[-1],
        )
        store, output = _paths(tmp_path, name)
        pipeline = words_pipeline(
            rows, f"file://{output}", rows_per_epoch=60, parallelism=parallelism
        )
        assert run_pipeline(pipeline, store).epochs == 5
        found[name] = (tables_of(store, newest(store, pipeline)), output_of(output))
        read_here[name] = sum(one is not None for one in answers)
    assert found["driver"] == found["query"] == found["workers"]
    assert read_here == {"driver": 5, "query": 5, "workers": 0}


def test_runs_in_process_and_on_spark_take_turns(tmp_path: Path) -> None:
    rows = random_words(240, 5)
    store, output = _paths(tmp_path, "both")
    pipeline = words_pipeline(rows, f"file://{output}", rows_per_epoch=60)
    run_pipeline(pipeline, store, SparkOptions(max_epochs=1))
    assert run_in_process(pipeline, store, max_epochs=1).epochs == 1
    assert run_pipeline(pipeline, store, SparkOptions(max_epochs=1)).epochs == 1
    assert run_in_process(pipeline, store).exhausted
    plain, plain_output = _paths(tmp_path, "plain")
    run_in_process(words_pipeline(rows, f"file://{plain_output}", rows_per_epoch=60), plain)
    assert tables_of(store, newest(store, pipeline)) == tables_of(plain, newest(plain, pipeline))
    assert output_of(output) == output_of(plain_output)
    assert not (tmp_path / "log").exists()
    assert not [one.path for one in store.list() if "/spark" in one.path]


def test_what_a_streaming_query_wrote_goes_on_in_both_runtimes(tmp_path: Path) -> None:
    rows = random_words(60, 1)
    found = []
    for name, run in (("local", run_in_process), ("spark", run_pipeline)):
        folder = tmp_path / name
        with tarfile.open(DATA / "spark-0.1.0.tar.gz") as file:
            file.extractall(folder, filter="data")
        store, output = open_store(f"file://{folder}/jobs"), folder / "output"
        pipeline = words_pipeline(rows, f"file://{output}", rows_per_epoch=20, parallelism=2)
        assert newest(store, pipeline).epoch == 2
        outcome = run(pipeline, store)
        assert (outcome.epochs, outcome.exhausted) == (1, True)
        found.append((tables_of(store, newest(store, pipeline)), output_of(output)))
    plain, plain_output = _paths(tmp_path, "plain")
    pipeline = words_pipeline(rows, f"file://{plain_output}", rows_per_epoch=20)
    run_in_process(pipeline, plain)
    alone = tables_of(plain, newest(plain, pipeline)), output_of(plain_output)
    assert found == [alone, alone]


def test_a_run_goes_on_from_the_offsets_of_a_rollback(tmp_path: Path) -> None:
    rows = random_words(240, 7)
    store, output = _paths(tmp_path, "back")
    pipeline = words_pipeline(rows, f"file://{output}", rows_per_epoch=60)
    before = run_pipeline(pipeline, store, SparkOptions(max_epochs=3)).newest
    assert before is not None
    assert before.progress is not None
    plan = plan_rollback(store, pipeline.paths, 1)
    run_rollback(store, plan, sleep=lambda _: None)
    after = run_pipeline(pipeline, store)
    assert (after.epochs, after.exhausted) == (3, True)
    plain, plain_output = _paths(tmp_path, "plain")
    run_in_process(words_pipeline(rows, f"file://{plain_output}", rows_per_epoch=60), plain)
    assert tables_of(store, newest(store, pipeline)) == tables_of(plain, newest(plain, pipeline))
    assert len(output_of(output)) == 240 + 120  # of the epochs given up the rows come again


def test_a_run_that_was_fenced_stops_and_loses_nothing(tmp_path: Path) -> None:
    rows = random_words(240, 7)
    store, output = _paths(tmp_path, "fenced")
    pipeline = words_pipeline(rows, f"file://{output}", rows_per_epoch=60)

    def start_another(checkpoint: Any) -> None:
        if checkpoint.epoch == 2:
            JobRun.start(store, pipeline)

    with pytest.raises(ConflictError, match="fenced"):
        run_pipeline(pipeline, store, on_epoch=start_another)
    assert newest(store, pipeline).epoch == 2
    assert run_pipeline(pipeline, store).exhausted
    assert len(output_of(output)) == 240


class Fails(Count):
    """Counts, then fails over one row."""

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        super().process_batch(batch, ctx, collector)
        if ctx.epoch == 2:
            raise InputError("this row is not for me", number=7)


def test_an_error_of_user_code_comes_back_as_itself_and_nothing_of_its_epoch_stays(
    tmp_path: Path,
) -> None:
    rows = random_words(180, 8)
    store = open_store(f"file://{tmp_path}/failing")
    pipeline = _only(rows, Fails())
    with pytest.raises(InputError, match="not for me"):
        run_pipeline(pipeline, store)
    assert newest(store, pipeline).epoch == 1
    mended = _only(rows, Count())
    assert run_pipeline(mended, store).exhausted
    plain = open_store(f"file://{tmp_path}/plain")
    run_in_process(mended, plain)
    assert tables_of(store, newest(store, mended)) == tables_of(plain, newest(plain, mended))


def _only(rows: pa.Table, operator: Operator) -> Pipeline:
    pipeline = Pipeline("failing", parallelism=2)
    source = TableSource(rows, rows_per_epoch=60)
    pipeline.source("source", source, timestamp="at").key_by("word").apply("count", operator)
    return pipeline
