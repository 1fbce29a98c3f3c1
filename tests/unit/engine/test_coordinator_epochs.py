"""What a run writes of an epoch, takes over, removes and goes on with: in both layouts."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from arroyo_dagster.engine import (
    Collector,
    OperatorContext,
    Pipeline,
    TableSource,
    keyed_state,
    request_stop,
    run_pipeline,
)
from arroyo_dagster.engine.coordinator import JobRun, finished
from arroyo_dagster.engine.in_process import LocalRun
from arroyo_dagster.engine.start_checks import StartChecks
from arroyo_dagster.engine.stop_requests import requested_stop
from arroyo_dagster.errors import FormatError, NotFoundError, StorageError
from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorId,
    StateBackend,
    StatePath,
    TableConfig,
    TableName,
    global_table_config,
    run_compaction,
)
from arroyo_dagster.state.codec.metadata import decode_manifest, decode_operator, encode_manifest
from arroyo_dagster.state.codec.records import decode_epoch_record
from arroyo_dagster.state.metadata.backend import ProtocolBackend
from arroyo_dagster.state.metadata.lease import newest_lease
from arroyo_dagster.state.model.compaction import CompactionRecord, Merged
from arroyo_dagster.state.model.layout import is_compacted
from arroyo_dagster.state.model.objects import ObjectKind, object_name
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.model.types import Field, Primitive, StructOf
from arroyo_dagster.state.planning.restore.recovery import marker_path
from arroyo_dagster.state.storage import DeleteOutcome
from arroyo_dagster.state.storage.store import Listing
from arroyo_dagster.state.storage.wrappers import Wrapper
from arroyo_dagster.state.tables.messages import Compaction
from tests.jobs import START, CountWords, KeepWords, SinkInto, output_of, state_of, word_job, words
from tests.shares import LAYOUTS

NOW = 1_800_000_000_000_000
PROTOCOL, LEGACY = Layout.PROTOCOL, Layout.LEGACY


def job(store: ObjectStore, layout: Layout = PROTOCOL, **options: Any) -> Pipeline:
    made = word_job(store, **{"rows": 12, "rows_per_epoch": 2, "keep_epochs": None, **options})
    made.layout = layout
    return made


def run_on(store: ObjectStore, made: Pipeline, epochs: int) -> None:
    """Run so many epochs, each in a run of its own, which goes on from the store alone."""
    for _ in range(epochs):
        run_pipeline(made, store, max_epochs=1)


def every(store: ObjectStore, made: Pipeline) -> list[Checkpoint]:
    backend = StateBackend(store, made.paths)
    return [backend.load(epoch) for epoch in backend.epochs()]


def counts(rows: int) -> dict[str, int]:
    """What `CountWords` keeps of so many rows."""
    found: dict[str, int] = {}
    for word in words(rows)["word"].to_pylist():
        found[word] = found.get(word, 0) + 1
        if found[word] == 4:
            del found[word]
    return found


# ---- what an epoch says --------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("sinks", [0, 1])
def test_returned_epoch_is_stored(
    layout: Layout, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = functools.partial(JobRun.start, clock=lambda: NOW)
    monkeypatch.setattr("arroyo_dagster.engine.in_process.JobRun.start", timed)
    store = MemoryStore()
    made = job(store, layout, sinks=sinks)
    run = LocalRun.start(made, store)
    backend = StateBackend(store, made.paths)
    before: Checkpoint | None = None
    with contextlib.closing(run.job):
        while (epoch := run.step()) is not None:
            assert backend.load(epoch.epoch) == epoch == run.job.base
            assert epoch.state is CheckpointState.READY
            assert epoch.epoch == (before.epoch + 1 if before else 1)
            assert (epoch.job, epoch.pipeline) == (made.paths.job, made.paths.pipeline)
            assert epoch.finish_time_micros == NOW
            starts = [one.start_time_micros for one in epoch.operators]
            assert epoch.start_time_micros == min(starts) > 0
            of = {(one.job, one.epoch) for one in epoch.operators}
            assert of == {(made.paths.job, epoch.epoch)}
            lines = epoch.operator("lines")
            assert lines is not None
            assert (lines.start_time_micros, lines.finish_time_micros) == (NOW, NOW)
            names = [object_name(made.paths, path) for path in epoch.paths]
            assert {one.kind for one in names} == {ObjectKind.DATA}
            assert {one.worker_generation for one in names} == {epoch.worker_generation}
            own = made.paths.subtask_metadata(
                lines.operator, 0, epoch.epoch, epoch.worker_generation
            )
            assert decode_operator(store.read(own), own).parallelism == lines.parallelism == 1
            if layout is PROTOCOL:
                record = made.paths.epoch_record(epoch.epoch)
                assert decode_epoch_record(store.read(record), record).created_at_micros == NOW
            parent = before.ref if before and layout is PROTOCOL else None
            assert epoch.parent_ref == parent
            before = epoch
    assert before is not None
    assert before.epoch == 6


class KeepsBoth(KeepWords):
    """Keeps words by key, too, from epoch 2 on, and notes the engine's clock at each epoch."""

    noted: ClassVar[set[tuple[Epoch, int]]] = set()

    def tables(self) -> Sequence[TableConfig]:
        return [*super().tables(), keyed_state("seen", str, int)]

    def on_start(self, ctx: OperatorContext) -> None:
        super().on_start(ctx)
        self.seen = ctx.value_state("seen")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        super().process_batch(batch, ctx, collector)
        if ctx.epoch > 1:
            self.seen.put_many(batch["word"], [1] * batch.num_rows)
        self.noted.add((ctx.epoch, ctx.clock_micros))


@LAYOUTS
def test_a_run_whose_clock_was_ahead_leaves_no_trace_in_later_finish_times(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no epoch's clock is before the end of the last one, or the clock of rows by key; the
    times of other rows are no clock."""
    monkeypatch.setattr(KeepsBoth, "noted", set())
    store = MemoryStore()
    made, day = Pipeline("words", parallelism=2, layout=layout), 86_400_000_000
    stream = made.source("lines", TableSource(words(9), rows_per_epoch=3), timestamp="at")
    stream.key_by("word").apply("keep", KeepsBoth())
    began = int(START.timestamp()) * 1_000_000 - 9 * day  # the rows are of days to come
    times = [began + day, began, began + 1]
    for at in times:
        timed = functools.partial(JobRun.start, clock=lambda at=at: at)
        with monkeypatch.context() as patch:
            patch.setattr("arroyo_dagster.engine.in_process.JobRun.start", timed)
            run_pipeline(made, store, max_epochs=1)
    # gc compares the newest one with the store's clock, and refuses a day of difference.
    assert [epoch.finish_time_micros for epoch in every(store, made)] == times
    assert KeepsBoth.noted == {(epoch, began + day) for epoch in (1, 2, 3)}


def test_tables_of_a_source_say_what_their_keys_and_values_are() -> None:
    store = MemoryStore()
    made = job(store)
    run_on(store, made, 1)
    lines = every(store, made)[0].operator("lines")
    assert lines is not None
    described = {
        name: (one.config.description, one.key_type, one.value_type)
        for name, one in lines.configs.items()
    }
    mark = StructOf("SourceWatermark", (Field("watermark_micros", Primitive("u64")),))
    assert described == {
        "offsets": ("source offsets", Primitive("string"), Primitive("string")),
        "watermark": ("source watermark", Primitive("u32"), mark),
    }


@LAYOUTS
def test_runs_of_one_epoch_each_keep_all_state_of_those_before(layout: Layout) -> None:
    store = MemoryStore()
    made = job(store, layout)
    for epoch in range(1, 7):
        run_on(store, made, 1)
        found = state_of(store, made)
        assert found[""]["epoch"] == epoch
        assert found["count"]["counts"] == counts(2 * epoch)
        with contextlib.closing(JobRun.start(store, made)) as run:
            assert (run.offset(OperatorId("lines")) or {})["row"] == 2 * epoch
            mark = every(store, made)[-1].operator("lines")
            assert mark is not None
            assert run.watermarks_micros == {"lines": mark.min_watermark_micros}
            assert mark.min_watermark_micros is not None


class Noting(SinkInto):
    """A sink that notes what it is asked to commit."""

    asked: list[tuple[int, Mapping[TableName, Mapping[int, bytes]]]] = []  # noqa: RUF012

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        Noting.asked.append((epoch, data))
        super().commit(epoch, data)


@LAYOUTS
def test_sink_commits_each_published_epoch(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "asked", [])
    store = MemoryStore()
    made = Pipeline("words", layout=layout)
    source = TableSource(words(6), rows_per_epoch=2)
    made.source("lines", source, timestamp="at").sink("out", Noting(store))
    run_pipeline(made, store)
    published = [(one.epoch, one.operator("out")) for one in every(store, made)]
    assert Noting.asked == [(number, out.commit_data()) for number, out in published if out]
    assert [number for number, _ in Noting.asked] == [1, 2, 3]
    # A start commits what was left, and nothing else.
    JobRun.start(store, made).close()
    assert [number for number, _ in Noting.asked] == [1, 2, 3]
    newest = every(store, made)[-1]
    noted = made.paths.commit_note(newest.epoch) if layout is LEGACY else marker_path(newest.ref)
    store.delete_many([noted])
    JobRun.start(store, made).close()
    assert [number for number, _ in Noting.asked] == [1, 2, 3, 3]
    assert store.head(noted) is not None


# ---- merged files --------------------------------------------------------------------------------


@LAYOUTS
def test_merged_files_lie_where_the_epoch_that_merged_them_wrote(layout: Layout) -> None:
    store = MemoryStore()
    made = job(store, layout, rows=24, merge_files_after=2)
    run_pipeline(made, store)
    seen: set[StatePath] = set()
    for epoch in every(store, made):
        for operator in epoch.operators:
            for table, files in operator.tables.items():
                for path in files.paths:
                    if not is_compacted(path) or path in seen:
                        continue
                    seen.add(path)
                    expected = made.paths.data_file(
                        operator.operator,
                        table,
                        0,
                        epoch.epoch,
                        epoch.worker_generation,
                        attempt="0123456789abcdef-compacted",
                    )
                    assert re.sub("-[0-9a-f]{16}-", "-0123456789abcdef-", path) == expected
    tables = {path.name.split("-")[1] for path in seen}
    assert tables == {"counts", "times", "offsets", "watermark"}


@LAYOUTS
def test_global_tables_list_few_files_and_lose_nothing(layout: Layout) -> None:
    store = MemoryStore()
    made = job(store, layout, rows=24, merge_files_after=2, parallelism=1)
    run_pipeline(made, store)
    for epoch in every(store, made):
        for name in ("lines", "count", "sum"):
            operator = epoch.operator(name)
            assert operator is not None
            for table, files in operator.tables.items():
                # At most two of before, each with its removals, and those of the epoch itself.
                assert len(files.paths) <= 6, (epoch.epoch, name, table)
    assert state_of(store, made)["count"]["counts"] == counts(24)
    apart = MemoryStore()
    run_on(apart, job(apart, layout, rows=24, merge_files_after=2, parallelism=1), 12)
    assert state_of(apart, made) == state_of(store, made)


def test_table_is_merged_once_it_lists_more_fresh_files_than_are_allowed() -> None:
    store = MemoryStore()
    run = LocalRun.start(job(store, rows=16, merge_files_after=2, parallelism=1), store)
    lengths, told = [], []
    with contextlib.closing(run.job):
        before: tuple[StatePath, ...] = ()
        while (epoch := run.step()) is not None:
            lines = epoch.operator("lines")
            assert lines is not None
            files = lines.tables[TableName("offsets")].paths
            lengths.append(len(files))
            compacted = run.job.plan(False).compacted.get(lines.operator, ())
            mine = [one for one in compacted if "offsets" in one.tables]
            merged = [path for path in files if is_compacted(path) and path not in before]
            if merged:
                name = TableName("offsets")
                metadata = GlobalKeyedFiles(files=tuple(merged))
                assert mine == [Compaction(tables={name: metadata}, inputs={name: before})]
                told.append(
                    (int(epoch.epoch), {table for one in compacted for table in one.tables})
                )
            else:
                assert mine == []
            before = files
    assert lengths == [1, 2, 3, 2, 3, 4, 2, 3]
    assert told == [(4, {"offsets", "watermark"}), (7, {"offsets", "watermark"})]


class TwoTables(CountWords):
    """Writes one table at its first row only, and the other one with each row."""

    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config(name, key=str, value=int) for name in ("a", "b")]

    def on_start(self, ctx: OperatorContext) -> None:
        self.of = {n: ctx.table_manager.get_global_keyed_state(n, str, int) for n in ("a", "b")}

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        if self.of["a"].get("first") is None:
            self.of["a"].insert("first", 1)
        self.of["b"].insert("rows", (self.of["b"].get("rows") or 0) + batch.num_rows)


def test_each_table_of_an_operator_is_merged_by_its_own_files() -> None:
    store = MemoryStore()
    made = Pipeline("words", merge_files_after=2)
    source = TableSource(words(12), rows_per_epoch=2)
    made.source("lines", source, timestamp="at").key_by("word").apply("two", TwoTables())
    run_pipeline(made, store)
    two = every(store, made)[-1].operator("two")
    assert two is not None
    assert [len(two.tables[TableName(name)].paths) for name in ("a", "b")] == [1, 4]
    assert state_of(store, made)["two"] == {"a": {"first": 1}, "b": {"rows": 12}}


def test_source_that_stands_still_keeps_its_offset_and_writes_nothing() -> None:
    store = MemoryStore()
    made = job(store)
    run_on(store, made, 6)
    run = LocalRun.start(made, store)
    with contextlib.closing(run.job):
        before = run.job.base
        assert run.step() is None, "no timer is due"
        idle = run.step(even_if_idle=True)
    assert before is not None
    assert idle is not None
    assert idle.epoch == 7
    for epoch in (before, idle):
        lines = epoch.operator("lines")
        assert lines is not None
        assert lines.paths == (before.operator("lines") or lines).paths
    with contextlib.closing(JobRun.start(store, made)) as again:
        assert (again.offset(OperatorId("lines")) or {})["row"] == 12


def merged_by_maintenance(
    store: MemoryStore, retention_micros: int = 10**12, parallelism: int = 2
) -> tuple[LocalRun, list[Merged]]:
    """A run behind its fourth epoch, and the merges of it that wait for the next one."""
    options = {"retention_micros": retention_micros, "parallelism": parallelism}
    run = LocalRun.start(job(store, merge_files_after=100, **options), store)
    for _ in range(4):
        run.step()
    run_compaction(store, run.pipeline.paths, CompactionSettings(policy=CompactionPolicy.FULL))
    records = waiting(store, run).values()
    return run, [merged for record in records if record for merged in record.merged]


def waiting(store: ObjectStore, run: LocalRun) -> dict[StatePath, CompactionRecord | None]:
    return StateBackend(store, run.pipeline.paths).compaction_records()


def compacted_files(epoch: Checkpoint | None) -> set[StatePath]:
    assert epoch is not None
    return {path for path in epoch.paths if is_compacted(path)}


def test_merges_of_maintenance_are_taken_over_by_the_next_epoch() -> None:
    store = MemoryStore()
    run, merges = merged_by_maintenance(store)
    assert {one.table for one in merges} == {"counts", "times", "offsets", "watermark", "rows"}
    inputs = {path for one in merges for path in one.input_paths}
    with contextlib.closing(run.job):
        outputs = {path for one in merges for path in one.output_paths}
        assert compacted_files(run.step()) == outputs
        assert waiting(store, run) == {}
        while (epoch := run.step()) is not None:
            assert not inputs & set(epoch.paths), "its subtasks were told"
    assert state_of(store, run.pipeline)["count"]["counts"] == counts(12)


def test_subtasks_are_told_what_was_merged_of_what_they_know() -> None:
    """Of inputs that have expired since they know nothing: with those they would read all anew."""
    store = MemoryStore()
    run, merges = merged_by_maintenance(store, retention_micros=6_000_000, parallelism=1)
    record = next(path for path in waiting(store, run))
    data = store.read(record)
    with contextlib.closing(run.job):
        assert run.job.plan(False).compacted == {}
        store.delete_many([record])
        run.step()
        store.put(record, data)  # as one that was written late
        known = set(run.job.base.paths) if run.job.base else set()
        run.step()
        told = run.job.plan(False).compacted
        assert waiting(store, run) == {}
    expected: dict[str, list[Compaction]] = {}
    for one in merges:
        inputs = tuple(path for path in one.input_paths if path in known)
        if inputs:
            message = Compaction(
                tables={one.table: one.output_metadata}, inputs={one.table: inputs}
            )
            expected.setdefault(one.operator, []).append(message)
    assert told == {name: tuple(messages) for name, messages in expected.items()}
    lengths = [(len(one.input_paths), sum(p in known for p in one.input_paths)) for one in merges]
    assert any(0 < left < all_of for all_of, left in lengths), "one has expired in part"


def test_a_run_that_began_since_adopts_no_merge_whose_inputs_are_gone() -> None:
    """They may not have expired: an edit or a rollback may have taken rows out of them."""
    store = MemoryStore()
    run, merges = merged_by_maintenance(store, retention_micros=6_000_000, parallelism=1)
    record = next(path for path in waiting(store, run))
    data = store.read(record)
    with contextlib.closing(run.job):
        store.delete_many([record])
        run.step()
    run = LocalRun.start(run.pipeline, store)
    with contextlib.closing(run.job):
        store.put(record, data)
        known = set(run.job.base.paths) if run.job.base else set()
        whole = [one for one in merges if known.issuperset(one.input_paths)]
        assert 0 < len(whole) < len(merges)
        assert compacted_files(run.step()) == {path for one in whole for path in one.output_paths}


def test_merge_whose_output_is_gone_is_void() -> None:
    store = MemoryStore()
    run, merges = merged_by_maintenance(store)
    gone = next(one for one in merges if one.table == "counts")
    store.delete_many(gone.output_paths)
    with contextlib.closing(run.job):
        found = compacted_files(run.step())
        assert found == {path for one in merges if one is not gone for path in one.output_paths}
        assert waiting(store, run) == {}
    assert state_of(store, run.pipeline)["count"]["counts"] == counts(10)


def test_record_that_cannot_be_read_is_left_and_one_that_cannot_be_removed_ends_no_run() -> None:
    class Kept(Wrapper):
        def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
            doomed = list(paths)
            if any("/compactions/" in path for path in doomed):
                raise StorageError("503 SlowDown")
            return self.inner.delete_many(doomed)

    inner = MemoryStore()
    run, merges = merged_by_maintenance(inner)
    known = list(waiting(inner, run))
    broken = run.pipeline.paths.compactions / "zzz.json"
    inner.put(broken, b"{")
    files = run.job._files
    run.job._files = replace(files, store=Kept(inner))
    with contextlib.closing(run.job):
        assert compacted_files(run.step())
        assert list(waiting(inner, run)) == [*known, broken]
        run.job._files = files
        assert compacted_files(run.step()) == {path for one in merges for path in one.output_paths}
        assert list(waiting(inner, run)) == [broken]


# ---- retention -----------------------------------------------------------------------------------


def epochs_after_each(made: Pipeline, store: ObjectStore, steps: int) -> list[list[int]]:
    run = LocalRun.start(made, store)
    backend = StateBackend(store, made.paths)
    found = []
    with contextlib.closing(run.job):
        for step in range(1, steps + 1):
            run.step(then_stop=step == steps)
            found.append([int(epoch) for epoch in backend.epochs()])
    return found


@pytest.mark.parametrize("keep", [2, 3])
def test_expired_epochs_go_with_every_fourth_epoch_and_with_the_last(keep: int) -> None:
    store = MemoryStore()
    found = epochs_after_each(job(store, rows=99, keep_epochs=keep), store, 10)
    for at, epochs in enumerate(found, start=1):
        cleaned = 10 if at == 10 else at // 4 * 4
        oldest = max(1, cleaned - keep + 1)
        assert epochs == list(range(oldest, at + 1)), at


def test_without_a_number_to_keep_no_epoch_expires() -> None:
    store = MemoryStore()
    assert epochs_after_each(job(store, rows=99), store, 9)[-1] == list(range(1, 10))


def test_legacy_job_keeps_the_ten_epochs_before_its_newest() -> None:
    store = MemoryStore()
    found = epochs_after_each(job(store, LEGACY, rows=99, keep_epochs=2), store, 12)
    assert found[10] == list(range(1, 12))
    assert found[11] == list(range(2, 13))


class Throttled(Wrapper):
    """A store that deletes nothing of a checkpoint while it is throttled."""

    throttled = True
    asked = 0

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        doomed = list(paths)
        if self.throttled and any("/checkpoints/" in path for path in doomed):
            self.asked += 1
            raise StorageError("503 SlowDown")
        return self.inner.delete_many(doomed)


def test_retention_that_fails_is_tried_again_at_once_then_every_fourth_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Throttled(MemoryStore())
    made = job(store, rows=99, keep_epochs=2, sinks=0)
    run = LocalRun.start(made, store)
    found = {}
    with contextlib.closing(run.job), caplog.at_level(logging.WARNING):
        for epoch in range(1, 18):
            store.throttled = epoch not in (12, 13)
            run.step()
            found[epoch] = (run.job.retention.failures, run.job.retention.overdue_epochs)
    tried = {4: (1, 2), 5: (2, 3), 8: (3, 6), 12: (3, 0), 16: (4, 4), 17: (5, 5)}
    expected, last = {}, (0, 0)
    for epoch in range(1, 18):
        expected[epoch] = last = tried.get(epoch, last)
    assert found == expected
    assert caplog.messages[0].startswith(
        "retention of job words/main failed; 2 epochs before epoch 3 stay until the next attempt: "
    )
    assert "503 SlowDown" in caplog.messages[0]


@pytest.mark.parametrize("error", [StorageError("busy"), NotFoundError("gone")], ids=repr)
def test_run_goes_on_where_not_even_what_is_overdue_can_be_counted(error: Exception) -> None:
    class Blind(Throttled):
        def list_dir(self, prefix: str = "") -> Listing:
            if self.asked:
                raise error
            return self.inner.list_dir(prefix)

    store = Blind(MemoryStore())
    run = LocalRun.start(job(store, rows=99, keep_epochs=2, sinks=0), store)
    with contextlib.closing(run.job):
        for _ in range(4):
            run.step()
        assert (run.job.retention.failures, run.job.retention.overdue_epochs) == (1, 0)


# ---- how a run begins and ends -------------------------------------------------------------------


def test_damaged_newest_epoch_names_the_rollback_command(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    made = job(store)
    run_on(store, made, 2)
    ref = every(store, made)[-1].ref
    whole = store.read(ref)
    store.put(ref, whole[:-3])
    with pytest.raises(FormatError) as caught:
        JobRun.start(store, made)
    assert caught.value.facts["path"] == ref
    assert not caught.value.retryable
    assert caught.value.next_step == (
        "restore the object, or go back to an older epoch: `arroyo-state rollback words/main` "
        "lists them"
    )
    store.put(ref, whole)

    def busy(self: StateBackend, epoch: Epoch) -> Checkpoint:
        raise FormatError("it is being written", retryable=True, epoch=epoch)

    monkeypatch.setattr(StateBackend, "prepare_checkpoint_load", busy)
    with pytest.raises(FormatError, match="it is being written") as caught:
        JobRun.start(store, made)
    assert caught.value.retryable
    assert caught.value.facts == {"epoch": 2}


def test_epoch_that_a_live_run_publishes_while_another_starts_is_looked_at_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    made = job(store)
    run_on(store, made, 2)
    checked: list[int] = []
    check = StartChecks.check_restorable

    def noting(self: StartChecks, epoch: Epoch) -> None:
        checked.append(epoch)
        check(self, epoch)

    monkeypatch.setattr(StartChecks, "check_restorable", noting)
    JobRun.start(store, made).close()
    assert checked == [2]
    start = ProtocolBackend.start

    def late(self: ProtocolBackend) -> Any:
        monkeypatch.setattr(ProtocolBackend, "start", start)
        run_on(store, made, 1)
        return start(self)

    monkeypatch.setattr(ProtocolBackend, "start", late)
    with contextlib.closing(JobRun.start(store, made)) as run:
        assert run.base.epoch == 3
    assert checked == [2, 2, 2, 3]  # the other run checks epoch 2, too


def test_lease_of_a_legacy_run_tells_it_from_other_runs() -> None:
    store = MemoryStore()
    made = job(store, LEGACY)
    with contextlib.closing(JobRun.start(store, made)) as run:
        found = newest_lease(store, made.paths.writers)
    assert found is not None
    assert re.fullmatch("run [0-9a-f]{16}", found.description)
    assert found.token == run.number == 1


def test_job_is_finished_once_every_source_has_ended_and_the_commit_is_done() -> None:
    store = MemoryStore()
    made = job(store)
    assert finished(store, made) is None
    run_on(store, made, 5)
    assert finished(store, made) is None
    run_on(store, made, 1)
    newest = every(store, made)[-1]
    assert finished(store, made) == newest
    assert finished(store, job(store, rows=14)) is None, "the source has grown"
    more = job(store)
    other = more.source("more", TableSource(words(2), rows_per_epoch=2), timestamp="at")
    other.key_by("word").apply("more-counts", CountWords())
    assert finished(store, more) is None, "there is another source"
    store.delete_many([marker_path(newest.ref)])
    assert StateBackend(store, made.paths).load().state is CheckpointState.COMMITTING
    assert finished(store, made) is None
    run_on(store, made, 1)
    assert output_of(store).total() > 0
    assert finished(store, made) is not None


@pytest.mark.parametrize("progress", ["none", "not exhausted"])
def test_job_whose_newest_epoch_does_not_say_that_it_ended_is_not_finished(progress: str) -> None:
    store = MemoryStore()
    made = job(store, sinks=0)
    run_on(store, made, 6)
    newest = every(store, made)[-1]
    assert finished(store, made) == newest
    assert newest.progress is not None
    said = None if progress == "none" else replace(newest.progress, exhausted=False)
    manifest = decode_manifest(store.read(newest.ref), newest.ref)
    store.put(newest.ref, encode_manifest(replace(manifest, progress=said)))
    assert finished(store, made) is None


@LAYOUTS
def test_stop_is_asked_of_the_newest_run_by_its_number(layout: Layout) -> None:
    store = MemoryStore()
    made = job(store, layout)
    run_on(store, made, 3)
    with contextlib.closing(JobRun.start(store, made)) as run:
        assert run.number == 4
        assert request_stop(store, made.paths, NOW) == 4
        assert run.stop_requested()
        assert requested_stop(store, made.paths) == 4


def test_requests_and_fences_that_cannot_be_read_are_named() -> None:
    store = MemoryStore()
    made = job(store)
    run_on(store, made, 1)
    for data in (b"{}", b"{"):
        store.put(made.paths.stop_request, data)
        with pytest.raises(FormatError) as caught:
            requested_stop(store, made.paths)
        assert caught.value.facts["path"] == made.paths.stop_request
    store.put(made.paths.current_generation, b"{")
    with pytest.raises(FormatError) as caught:
        request_stop(store, made.paths, NOW)
    assert caught.value.facts["path"] == made.paths.current_generation
