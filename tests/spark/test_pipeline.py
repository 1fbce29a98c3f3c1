"""The runtime on Spark: equal to the one in process, exactly once, and never silently skipping, in
both layouts. A subtask stays in one process, and an interrupt ends the work of the workers."""

from __future__ import annotations

import os
import signal
import tarfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import Collector, Operator, OperatorContext, Pipeline, TableSource
from arroyo_dagster.engine import run_pipeline as run_in_process
from arroyo_dagster.errors import ConflictError, InputError, StorageError
from arroyo_dagster.spark.engine import pipeline as pipeline_on_spark
from arroyo_dagster.spark.engine import worker
from arroyo_dagster.spark.engine.pipeline import SparkOptions, run_pipeline
from arroyo_dagster.spark.engine.worker import SmallEpochs
from arroyo_dagster.spark.tasks import run_items
from arroyo_dagster.state import Layout, open_store, plan_rollback, run_rollback, verify_job
from tests.compat.arroyo import DATA
from tests.internals import JobRun
from tests.located import KEYS, Places, counts_of, located_pipeline
from tests.seeds import soak_seeds
from tests.stores import LocalDiskStore
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


EPOCHS = 8


def test_subtasks_stay_and_those_of_a_process_that_ended_move_once(
    session: Any, tmp_path: Path
) -> None:
    log, store = tmp_path / "located.log", open_store(f"file://{tmp_path}/state")
    pipeline = located_pipeline(log, epochs=EPOCHS)
    ended = []

    def end_one(checkpoint: Any) -> None:
        if checkpoint.epoch == EPOCHS // 2:
            ended.append(Places.read(log).processes[0][-1])
            os.kill(ended[0], signal.SIGKILL)

    run_pipeline(pipeline, store, on_epoch=end_one)
    before, after = Places.read(log, up_to_epoch=EPOCHS // 2), Places.read(log)
    assert max(before.moves.values()) <= 1  # of the first epoch, if it was uneven
    assert before.starts == {subtask: 1 + moves for subtask, moves in before.moves.items()}
    assert max(before.copies[epoch] for epoch in (3, 4)) <= 1.3 * pipeline.parallelism
    held = {subtask: found[-1] for subtask, found in before.processes.items()}
    for subtask, process in held.items():
        more = after.starts[subtask] - before.starts[subtask]
        assert more == after.moves[subtask] - before.moves[subtask]
        assert more <= 2
        assert process not in ended or more
    assert counts_of(store, pipeline) == {f"key-{number}": EPOCHS for number in range(KEYS)}
    assert verify_job(store, pipeline.paths).passed


def test_errors_of_user_code_are_reported_with_their_text(session: Any, tmp_path: Path) -> None:
    message = "key 7 is not mine"
    log, store = tmp_path / "located.log", open_store(f"file://{tmp_path}/state")
    pipeline = located_pipeline(log, epochs=3, fail=message)
    with pytest.raises(StorageError, match=f"ValueError: {message}") as failed:
        run_pipeline(pipeline, store)
    assert failed.value.retryable
    run_in_process(located_pipeline(log, epochs=3), store)
    assert newest(store, pipeline).epoch == 3


SLOW_SECONDS = 60.0


class Interrupted(BaseException):
    """What a scheduler raises in the main thread to end a run."""


def _slow(directory: str, item: int) -> int:
    Path(directory, str(item)).touch()
    time.sleep(SLOW_SECONDS)
    return item


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


def test_an_interrupt_cancels_what_spark_was_asked_for(session: Any, tmp_path: Path) -> None:
    tracker = session.sparkContext.statusTracker()
    store = LocalDiskStore(str(tmp_path))

    def interrupt_once_begun() -> None:
        while not list(tmp_path.iterdir()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, _interrupt)
    threading.Thread(target=interrupt_once_begun, daemon=True).start()
    try:
        with pytest.raises(Interrupted):
            run_items(session, partial(_slow, str(tmp_path)), [1, 2], [1, 1], store=store)
    finally:
        signal.signal(signal.SIGUSR1, before)
    until = time.monotonic() + SLOW_SECONDS / 4
    while tracker.getActiveJobsIds() and time.monotonic() < until:
        time.sleep(0.1)
    assert not tracker.getActiveJobsIds()
    assert session.range(3).count() == 3  # the session goes on


def legacy(rows: object, output: Path) -> Pipeline:
    made = words_pipeline(rows, f"file://{output}", rows_per_epoch=60, parallelism=2)  # type: ignore[arg-type]
    made.layout = Layout.LEGACY
    return made


def test_a_job_in_the_legacy_layout_stops_and_goes_on_with_equal_tables(tmp_path: Path) -> None:
    rows = random_words(240, 5)
    stores = [open_store(f"file://{tmp_path}/{name}-state") for name in ("local", "spark")]
    outputs = [tmp_path / f"{name}-output" for name in ("local", "spark")]
    run_in_process(legacy(rows, outputs[0]), stores[0])
    on_spark = legacy(rows, outputs[1])
    first = run_pipeline(on_spark, stores[1], SparkOptions(max_epochs=2))
    assert first.newest is not None
    assert first.newest.worker_generation is None
    held = JobRun.start(stores[1], on_spark)
    with pytest.raises(ConflictError, match="the job is leased by"):
        run_pipeline(on_spark, stores[1])
    held.close()
    assert run_pipeline(on_spark, stores[1]).exhausted
    pairs = zip(stores, (legacy(rows, outputs[0]), on_spark), strict=True)
    local, spark = (tables_of(store, newest(store, made)) for store, made in pairs)
    assert spark == local
    assert output_of(outputs[1]) == output_of(outputs[0])
