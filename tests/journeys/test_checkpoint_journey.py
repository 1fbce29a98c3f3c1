"""A job from its first epoch on: every epoch is what it says, at any parallelism, at any size;
and every change of the store that a checkpoint makes goes wrong once, in every way it can.

The sink writes to the same store as the state, so the faults reach it too. Whatever happens, the
next start goes on, and the job ends with the state and the output of a run nobody disturbed.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

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
from arroyo_dagster.errors import StorageError
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
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import ExpiringTimeKeyFiles, decode_file
from tests.internals import LocalRun, merge_operator
from tests.jobs import copied, output_of, run_word_job, state_of, word_job, words
from tests.shares import Share, dealt_out, share_or_all
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


pytestmark = pytest.mark.usefixtures("one_at_a_time")

Mode = Literal["before", "after", "partial"]
Ending = tuple[Any, Any]

JOB: dict[str, Any] = {"rows": 10, "rows_per_epoch": 2, "merge_files_after": 2}
"""Five epochs; the fourth merges files and expires epochs."""
TINY: dict[str, Any] = {"rows": 6, "rows_per_epoch": 2, "parallelism": 1, "merge_files_after": 2}
START_CHANGES = 7
"""What a start changes at most: the generation, the fence, a claim, its base, a commit."""


def end_of(store: MemoryStore, options: dict[str, Any] = JOB) -> Ending:
    return state_of(store, word_job(store, **options)), output_of(store)


def run_until(epochs: int, options: dict[str, Any] = JOB) -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, **options, max_epochs=epochs)
    return store


def undisturbed(options: dict[str, Any]) -> Ending:
    store = MemoryStore()
    run_word_job(store, **options)
    return end_of(store, options)


def changes_of(begun: MemoryStore, options: dict[str, Any], max_epochs: int | None = 1) -> int:
    counted = FaultInjecting(copied(begun))
    run_word_job(counted, **options, max_epochs=max_epochs)
    return counted.changes


def disturb(
    store: MemoryStore,
    at: int,
    mode: Mode = "after",
    *,
    crash: bool = True,
    options: dict[str, Any] = JOB,
    max_epochs: int | None = 1,
) -> bool:
    """Run until the fault, or to the end if retention met it. Returns whether there was one."""
    faulty = FaultInjecting(store, fail_at=at, mode=mode, crash=crash)
    with contextlib.suppress(Crash, StorageError):
        run_word_job(faulty, **options, max_epochs=max_epochs)
        assert not crash or faulty.changes < at
    return faulty.changes >= at


@pytest.mark.parametrize(
    ("mode", "crash", "share"),
    dealt_out([("before", False), ("after", False), ("after", True), ("partial", True)], 4),
)
def test_a_fault_at_any_change_of_a_checkpoint_loses_and_doubles_nothing(
    mode: Mode, crash: bool, share: Share
) -> None:
    begun, expected = run_until(3), undisturbed(JOB)
    changes = changes_of(begun, JOB)
    assert changes > 25
    for at in share(range(1, changes + 1)):
        store = copied(begun)
        assert disturb(store, at, mode, crash=crash), at
        run_word_job(store, **JOB)
        assert end_of(store) == expected, f"fault at change {at} of {changes}"


@pytest.mark.parametrize(("dead_starts", "share"), dealt_out([0, 2], 4))
def test_a_crash_at_any_change_of_a_whole_first_run_loses_and_doubles_nothing(
    dead_starts: int, share: Share
) -> None:
    expected = undisturbed(TINY)
    changes = changes_of(MemoryStore(), TINY, None)
    for at in share(range(1, changes + 1)):
        store = MemoryStore()
        assert disturb(store, at, options=TINY, max_epochs=None), at
        for _ in range(dead_starts):
            disturb(store, 1, options=TINY, max_epochs=None)
        run_word_job(store, **TINY)
        assert end_of(store, TINY) == expected, f"crash at change {at} of {changes}"


@share_or_all(3)
def test_a_crash_while_recovering_from_any_crash_loses_and_doubles_nothing(share: Share) -> None:
    begun, expected = run_until(1, TINY), undisturbed(TINY)
    # Before its manifest is written an attempt leaves what the next never sees: one will do.
    changes = changes_of(begun, TINY)
    for at in range(changes - 8, changes + 1):
        crashed = copied(begun)
        assert disturb(crashed, at, options=TINY)
        begin = 2 + at % share.of  # from crash to crash another share
        for again in share(range(begin, START_CHANGES + 1)):
            store = copied(crashed)
            disturb(store, again, options=TINY)
            run_word_job(store, **TINY)
            assert end_of(store, TINY) == expected, f"crash at change {at}, then at {again}"
