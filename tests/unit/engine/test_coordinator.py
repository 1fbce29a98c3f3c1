"""What a run refuses, what it never does twice, and what it keeps of a pipeline that changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    Pipeline,
    Stream,
    TableSource,
    request_stop,
    run_pipeline,
)
from arroyo_dagster.engine.coordinator import JobRun
from arroyo_dagster.engine.in_process import LocalRun
from arroyo_dagster.engine.stop_requests import requested_stop
from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state import (
    Epoch,
    MemoryStore,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    StatePath,
    TableConfig,
    global_table_config,
)
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.storage import Counting
from tests.faulty_stores import FaultInjecting
from tests.jobs import (
    TIMED,
    CountWords,
    KeepWords,
    SinkInto,
    copied,
    listing,
    output_of,
    run_word_job,
    state_of,
    word_job,
    words,
)
from tests.shares import Share, share_or_all

ROWS: dict[str, Any] = {"rows": 12, "rows_per_epoch": 3}


class Registers(CountWords):
    """Registers the tables it is given."""

    def __init__(self, *configs: TableConfig) -> None:
        self._configs = configs

    def tables(self) -> Sequence[TableConfig]:
        return self._configs


def pipeline(*operators: tuple[str, Operator], rows: int = 12, parallelism: int = 2) -> Pipeline:
    made = Pipeline("words", parallelism=parallelism, keep_epochs=2, merge_files_after=3)
    source = TableSource(words(rows), rows_per_epoch=3, splits=2)
    stream = made.source("lines", source, timestamp="at").key_by("word")
    for name, operator in operators:
        stream.apply(name, operator)
    return made


def begun(epochs: int = 2, **options: Any) -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, **ROWS, **options, max_epochs=epochs)
    return store


def manifest_path(store: ObjectStore, epoch: int) -> StatePath:
    return ParquetBackend(store, word_job(store).paths).load(Epoch(epoch)).ref


def refused(store: MemoryStore, made: Pipeline, kind: type[ArroyoStateError]) -> ArroyoStateError:
    """Start the pipeline; it must be refused, with nothing written."""
    before, counted = listing(store), Counting(store)
    with pytest.raises(kind) as caught:
        run_pipeline(made, counted, allow_dropped=("count", "keep", "sum", "out"))
    assert listing(store) == before
    assert not {"put", "create", "delete_many"} & set(counted.calls)
    return caught.value


# ---- bad input: one clear error each, and nothing written ----------------------------------------


def test_a_store_that_cannot_be_reached_says_so_and_may_be_tried_again() -> None:
    class Unreachable(MemoryStore):
        def list_dir(self, prefix: str = "") -> Any:
            raise StorageError("connection refused", url=self.url)

    store = Unreachable()
    counted = Counting(store)
    with pytest.raises(StorageError, match="refused") as caught:
        run_pipeline(word_job(counted, **ROWS), counted)
    assert caught.value.retryable
    assert not {"put", "create", "delete_many"} & set(counted.calls)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_manifest_truncated_anywhere_is_refused(epoch: int) -> None:
    store = begun(epoch)
    ref = manifest_path(store, epoch)
    whole = store.read(ref)
    boundaries = _ends_of_fields(whole)
    lengths = sorted({*range(0, len(whole), 61), *boundaries, len(whole) - 1} - {len(whole)})
    for length in lengths:
        store.put(ref, whole[:length])
        with pytest.raises((FormatError, ProtocolError)) as caught:
            JobRun.start(store, word_job(store, **ROWS))
        assert str(ref) in str(caught.value), length
    store.put(ref, whole)
    run_word_job(store, **ROWS)


def _ends_of_fields(data: bytes) -> set[int]:
    """Where a cut leaves something that decodes."""
    ends = set()
    for length in range(len(data)):
        try:
            pb.CheckpointManifest().ParseFromString(data[:length])
        except DecodeError:
            continue
        ends.add(length)
    return ends


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_missing_or_truncated_data_file_is_found_before_anything_starts(how: str) -> None:
    store = begun(3)
    made = word_job(store, **ROWS)
    backend = ParquetBackend(store, made.paths)
    for path in dict.fromkeys(backend.load().paths):
        data = store.read(path)
        if how == "missing":
            store.delete_many([path])
        else:
            store.put(path, data[:-5])
        error = refused(store, made, FormatError)
        assert error.facts["path"] == path
        store.put(path, data)


def test_values_of_another_type_are_refused() -> None:
    store = begun(1)
    other = global_table_config("counts", key=str, value=str)
    error = refused(store, pipeline(("count", Registers(other))), InputError)
    assert "new version" in str(error)


def test_an_operator_that_was_a_source_is_refused() -> None:
    refused(begun(1, sinks=0), _source_as_operator(), InputError)


def _source_as_operator() -> Pipeline:
    made = Pipeline("words")
    source = TableSource(words(3), rows_per_epoch=3)
    made.source("other", source, timestamp="at").key_by("word").apply("lines", CountWords())
    return made


def test_two_tables_of_one_name_are_refused() -> None:
    config = global_table_config("g", key=str, value=int)
    with pytest.raises(InputError, match="one name"):
        pipeline(("count", Registers(config, config)))


def test_a_pipeline_without_an_operator_or_a_source_is_refused() -> None:
    store = MemoryStore()
    refused(store, pipeline(), InputError)
    refused(store, Pipeline("words"), InputError)


def test_rows_keyed_to_another_subtask_stop_the_epoch_and_nothing_is_published() -> None:
    class Elsewhere(KeepWords):
        def process_batch(
            self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
        ) -> None:
            every = [f"w{i}" for i in range(20)]
            self.rows.insert(pa.table([every, [10**9] * 20], schema=TIMED))

    store = MemoryStore()
    with pytest.raises(InputError, match="belong to other subtasks"):
        run_pipeline(pipeline(("keep", Elsewhere())), store)
    assert ParquetBackend(store, pipeline(("keep", Elsewhere())).paths).epochs() == []


def test_a_generation_that_leads_nowhere_is_no_reason_to_begin_anew() -> None:
    store = begun(2)
    paths = word_job(store).paths
    manifests = [
        info.path
        for info in store.list(paths.generations)
        if info.path.name == "generation-manifest.json"
    ]
    store.delete_many(manifests)
    with pytest.raises(ProtocolError, match="no worker generation leads to it"):
        run_word_job(store, **ROWS)
    assert ParquetBackend(store, paths).load().epoch == 2


# ---- failures on the way -------------------------------------------------------------------------


class Breaks(CountWords):
    """Raises half way through its rows, once in each process."""

    armed = True

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        if ctx.epoch == 2 and Breaks.armed:
            super().process_batch(batch.slice(0, 1), ctx, collector)
            Breaks.armed = False
            raise RuntimeError("user code")
        super().process_batch(batch, ctx, collector)


@pytest.mark.parametrize("in_process", [True, False])
def test_state_of_an_operator_that_raised_half_way_is_not_used_again(in_process: bool) -> None:
    store, expected = MemoryStore(), MemoryStore()
    made = pipeline(("keep", KeepWords()), ("count", Breaks()))
    Breaks.armed = False
    run_pipeline(made, expected)
    Breaks.armed = True
    run = LocalRun.start(made, store)
    run.step()
    with pytest.raises(RuntimeError, match="user code"):
        run.step()
    if not in_process:
        run = LocalRun.start(made, store)
    while run.step() is not None:
        pass
    assert state_of(store, made) == state_of(expected, made)


@share_or_all(3)
def test_a_run_whose_publication_failed_does_not_go_on_and_the_next_doubles_nothing(
    share: Share,
) -> None:
    store, expected = MemoryStore(), MemoryStore()
    run_word_job(expected, **ROWS)
    counted = FaultInjecting(copied(store))
    LocalRun.start(word_job(counted, **ROWS), counted).step()
    for at in share(range(1, counted.changes + 1)):
        store = MemoryStore()
        faulty = FaultInjecting(store, fail_at=at, mode="after")
        try:
            run = LocalRun.start(word_job(faulty, **ROWS), faulty)
            try:
                run.step()
            except StorageError:
                while run.step() is not None:
                    pass
        except (StorageError, ProtocolError):
            run_word_job(store, **ROWS)
        found = state_of(store, word_job(store, **ROWS)), output_of(store)
        assert found == (state_of(expected, word_job(expected, **ROWS)), output_of(expected)), at


def test_a_subtask_that_did_not_report_stops_the_epoch() -> None:
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **ROWS), store)
    run.step()
    process = run.process

    def lossy(*args: Any) -> Any:
        whole = process(*args)
        left = [r for r in whole.subtasks if (r[0], r[1].subtask_index) != ("keep", 1)]
        return replace(whole, subtasks=left)

    run.process = lossy  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="1 of 2 subtasks"):
        run.step()
    assert ParquetBackend(store, run.pipeline.paths).epochs() == [1]


# ---- a pipeline that changed ---------------------------------------------------------------------


def test_a_new_operator_begins_empty_in_a_job_with_state() -> None:
    store = MemoryStore()
    run_pipeline(pipeline(("count", CountWords())), store, max_epochs=2)
    grown = pipeline(("count", CountWords()), ("keep", KeepWords()))
    run_pipeline(grown, store)
    whole = MemoryStore()
    run_pipeline(pipeline(("count", CountWords())), whole)
    found = state_of(store, grown)
    assert found["count"] == state_of(whole, grown)["count"]
    assert found["keep"]["rows"].total() == 6
    run_pipeline(pipeline(("count", CountWords()), ("keep", KeepWords()), rows=15), store)
    assert state_of(store, grown)[""]["epoch"] == 5


@pytest.mark.parametrize(("name", "before"), [("lines", None), ("read", "lines")])
def test_source_of_other_rows_is_refused_under_a_new_name(name: str, before: str | None) -> None:
    made = Pipeline("words", parallelism=2, keep_epochs=2, merge_files_after=3)
    added = made.source("added", TableSource(words(3), rows_per_epoch=3), timestamp="at")
    other = TableSource(words(12, "xyz"), rows_per_epoch=3)
    stream = made.source(name, other, timestamp="at", renamed_from=before)
    made.apply("count", CountWords(), [added.key_by("word"), stream.key_by("word")])
    assert refused(begun(), made, InputError).facts["operator"] == name


def test_an_epoch_lists_what_no_operator_claims_where_the_pipeline_carries_it() -> None:
    store, made = begun(), pipeline(("other", KeepWords()))
    made.carries_unclaimed = True
    run_pipeline(made, store)
    newest = ParquetBackend(store, made.paths).load()
    assert {"count", "keep", "other"} <= {one.operator for one in newest.operators}
    assert {one.epoch for one in newest.operators} == {newest.epoch}


def test_a_sink_that_has_still_to_commit_may_not_be_taken_out() -> None:
    store = MemoryStore()
    run_word_job(store, **ROWS, max_epochs=1)
    changes = FaultInjecting(copied(store))
    run_word_job(changes, **ROWS, max_epochs=1)
    seen = 0
    for at in range(changes.changes - 6, changes.changes):
        crashed = copied(store)
        faulty = FaultInjecting(crashed, fail_at=at, mode="after")
        with pytest.raises(StorageError):
            run_word_job(faulty, **ROWS, max_epochs=1)
        newest = ParquetBackend(crashed, word_job(crashed).paths).load()
        if newest.epoch != 2 or newest.state.value != "committing":
            continue
        error = refused(crashed, word_job(crashed, **ROWS, sinks=0), InputError)
        assert error.facts["operator"] == "out"
        again = copied(crashed)
        renamed = word_job(again, **ROWS, sinks=0)
        stream = Stream(renamed, OperatorId("sum"), None)
        stream.sink("to_folder", SinkInto(again), renamed_from="out")
        run_pipeline(renamed, again)
        assert output_of(again) == output_of(begun(100))
        run_word_job(crashed, **ROWS, max_epochs=1)
        run_pipeline(word_job(crashed, **ROWS, sinks=0), crashed)
        seen += 1
    assert seen


def test_a_watermark_never_goes_back_when_a_source_is_added() -> None:
    def made(sources: int, rows: int) -> Pipeline:
        result = Pipeline("words", parallelism=2)
        streams = []
        for index in range(sources):
            source = TableSource(words(rows if index == 0 else 0), rows_per_epoch=6)
            streams.append(result.source(f"s{index}", source, timestamp="at").key_by("word"))
        result.apply("keep", KeepWords(2_000_000), streams)
        return result

    store = MemoryStore()
    run_pipeline(made(1, 6), store)
    before = state_of(store, made(1, 6))["keep"]["rows"]
    run_pipeline(made(2, 12), store)
    checkpoint = ParquetBackend(store, made(2, 12).paths).load()
    keep = checkpoint.operator("keep")
    assert keep is not None
    assert keep.min_watermark_micros is not None
    after = state_of(store, made(2, 12))["keep"]["rows"]
    assert before.total() < 6
    assert len(after - before) == 6


def test_a_stream_without_keys_stays_with_the_subtask_that_read_it() -> None:
    store = MemoryStore()
    made = Pipeline("words", parallelism=2)
    source = TableSource(words(8), rows_per_epoch=4, splits=2)
    made.source("lines", source, timestamp="at").sink("out", SinkInto(store))
    run_pipeline(made, store)
    assert output_of(store).total() == 8


# ---- stop requests -------------------------------------------------------------------------------


def test_a_stop_request_ends_the_run_it_was_for_with_a_checkpoint() -> None:
    store = begun(1)
    made = word_job(store, **ROWS)
    run = JobRun.start(store, made)
    assert not run.stop_requested()
    assert request_stop(store, made.paths, 5) == run.generation
    assert run.stop_requested()
    other = JobRun.start(store, made)
    assert not other.stop_requested()
    other.stop_done()
    assert requested_stop(store, made.paths) == run.generation
    run.stop_done()
    assert requested_stop(store, made.paths) is None


def test_a_job_that_was_never_started_cannot_be_stopped() -> None:
    store = MemoryStore()
    with pytest.raises(NotFoundError, match="never been started"):
        request_stop(store, word_job(store).paths, 5)
