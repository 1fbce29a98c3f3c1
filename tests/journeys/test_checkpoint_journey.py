"""A job from its first epoch on: every epoch is what it says, at any parallelism, at any size."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    Pipeline,
    TableSource,
    run_pipeline,
)
from arroyo_dagster.state import (
    Checkpoint,
    Epoch,
    JobId,
    JobPaths,
    MemoryStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    PipelineId,
    TableManager,
    TableName,
    TaskInfo,
    WorkerGeneration,
    global_table_config,
    range_for_server,
)
from tests.formats import ExpiringTimeKeyFiles, decode_file
from tests.internals import LocalRun, merge_operator
from tests.jobs import output_of, run_word_job, state_of, word_job, words
from tests.stores import Counting


def test_every_kept_epoch_stays_restorable_while_the_job_goes_on() -> None:
    store = MemoryStore()
    made = word_job(store, rows=40, rows_per_epoch=2, keep_epochs=3, merge_files_after=2)
    backend = ParquetBackend(store, made.paths)
    kept: list[int] = []

    def look(checkpoint: Checkpoint) -> None:
        epochs = backend.epochs()
        kept.append(len(epochs))
        assert epochs == list(range(epochs[0], checkpoint.epoch + 1))
        for epoch in epochs:
            backend.prepare_checkpoint_load(epoch)

    run_pipeline(made, store, on_epoch=look)
    assert min(kept[3:]) == 3
    assert max(kept) < 3 + 4


@pytest.mark.parametrize("parallelisms", [(1, 4), (4, 1), (2, 3, 5, 2), (3, 1, 3)])
def test_a_job_restarted_with_another_parallelism_keeps_every_row_and_key(
    parallelisms: tuple[int, ...],
) -> None:
    store, whole = MemoryStore(), MemoryStore()
    # Rows must not expire, or nothing would be left to lose.
    options: dict[str, Any] = {"rows_per_epoch": 3, "retention_micros": 10**12, "sinks": 2}
    for round_number, parallelism in enumerate(parallelisms, start=1):
        rows = 9 * round_number
        run_word_job(store, rows=rows, parallelism=parallelism, **options)
        keep = ParquetBackend(store, word_job(store).paths).load().operator("keep")
        assert keep is not None
        check_ranges(store, keep, parallelism)
    run_word_job(whole, rows=9 * len(parallelisms), parallelism=1, **options)
    assert state_of(store, word_job(store)) == state_of(whole, word_job(whole))
    assert output_of(store) == output_of(whole)


def check_ranges(store: MemoryStore, keep: OperatorCheckpoint, parallelism: int) -> None:
    """Files of the newest epoch hold rows of one subtask, and say exactly which."""
    files = keep.tables[TableName("rows")]
    assert isinstance(files, ExpiringTimeKeyFiles)
    ranges = [range_for_server(index, parallelism) for index in range(parallelism)]
    for file in files.files:
        rows, _ = decode_file(store.read(file.path), file.path)
        hashes = rows.column("_key_hash").to_pylist()
        assert (file.min_routing_key, file.max_routing_key) == (min(hashes), max(hashes))
        if file.epoch == keep.epoch:
            inside = [r.covers(file.min_routing_key, file.max_routing_key) for r in ranges]
            assert inside.count(True) == 1


def test_epochs_without_rows_keep_everything() -> None:
    store = MemoryStore()
    run_word_job(store, rows=9, rows_per_epoch=3)
    before = state_of(store, word_job(store)), output_of(store)
    run = LocalRun.start(word_job(store, rows=9, rows_per_epoch=3), store)
    for _ in range(5):
        run.step(even_if_idle=True)
    after = state_of(store, word_job(store)), output_of(store)
    assert after[0].pop("") == {"epoch": before[0].pop("")["epoch"] + 5}
    assert after == before


def test_bytes_written_an_epoch_follow_the_change_and_not_the_size() -> None:
    keys, changed = 400_000, 4_000
    store = Counting(MemoryStore())
    name = TableName("g")
    paths = JobPaths(JobId("j"), PipelineId("p"))
    tables = TableManager(
        ParquetBackend(store, paths, generation=WorkerGeneration(1)),
        TaskInfo(
            pipeline=paths.pipeline,
            job=paths.job,
            operator=OperatorId("o"),
            task_index=0,
            parallelism=1,
        ),
        {name: global_table_config("g", key=int, value=int)},
        None,
    )
    view = tables.get_global_keyed_state("g", int, int)
    view.insert_many((key, key) for key in range(keys))
    written: list[int] = []
    newest: OperatorCheckpoint | None = None
    for epoch in range(1, 5):
        before = store.bytes_written["put"]
        report = tables.checkpoint(epoch, 1, None, False)
        newest = merge_operator(JobId("j"), OperatorId("o"), Epoch(epoch), [report], newest)
        assert tables.follow(newest)
        written.append(store.bytes_written["put"] - before)
        view.insert_many((key, -epoch) for key in range(0, keys, keys // changed))
    whole, *later = written
    assert whole > keys
    assert all(part < whole / 50 for part in later)
    assert len(view) == keys


STARTED: list[int | None] = []


class Started(Operator):
    """Notes the event time it is told when its tables are ready."""

    def on_start(self, ctx: OperatorContext) -> None:
        STARTED.append(ctx.watermark_micros)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        pass


def test_an_operator_starts_with_the_watermark_of_the_epoch_restored() -> None:
    store = MemoryStore()
    STARTED.clear()
    for _ in range(2):
        pipeline = Pipeline("started", parallelism=1)
        source = TableSource(words(4), rows_per_epoch=2)
        pipeline.source("lines", source, timestamp="at").key_by("word").apply("op", Started())
        run_pipeline(pipeline, store, max_epochs=1)
    first, second = STARTED
    (operator,) = (
        one
        for one in ParquetBackend(store, pipeline.paths).load(Epoch(1)).operators
        if one.operator == "op"
    )
    assert first is None
    assert second == operator.min_watermark_micros is not None
