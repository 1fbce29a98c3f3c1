"""A job of ours in the legacy layout: the same results, what a real Arroyo needs to restore it, one
writer at a time, and what is weaker than in the protocol layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.engine import Pipeline, request_stop, run_pipeline
from arroyo_dagster.engine.stop_requests import requested_stop
from arroyo_dagster.errors import ConflictError, InputError, ProtocolError, StorageError
from arroyo_dagster.state import (
    CheckpointState,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    JobId,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    StatePath,
    WriteProtected,
    list_epochs,
    list_jobs,
    open_store,
    plan_compaction,
    run_compaction,
    run_gc,
)
from tests.faulty_stores import FaultInjecting
from tests.formats import LegacyCheckpoint, metadata
from tests.formats import state_pb2 as pb
from tests.gc_jobs import expiry, hiding
from tests.internals import JobRun, LocalRun, lease
from tests.jobs import copied, listing, output_of, state_of, word_job
from tests.stores import ObjectInfo, Wrapper

PATHS = JobPaths(JobId("words"))
JOB: dict[str, Any] = {"rows": 10, "rows_per_epoch": 2, "merge_files_after": 2}
TINY: dict[str, Any] = {"rows": 6, "rows_per_epoch": 2, "parallelism": 1, "merge_files_after": 2}
LONG: dict[str, Any] = {"rows": 32, "rows_per_epoch": 2, "parallelism": 1}


def legacy_job(store: ObjectStore, **options: Any) -> Pipeline:
    made = word_job(store, **options)
    made.layout = Layout.LEGACY
    return made


def run(store: ObjectStore, max_epochs: int | None = None, **options: Any) -> None:
    run_pipeline(legacy_job(store, **options), store, max_epochs=max_epochs)


def end_of(store: MemoryStore, pipeline: Pipeline) -> tuple[Any, Any]:
    return state_of(store, pipeline), output_of(store)


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    store = MemoryStore()
    run(store, **LONG)
    return store


# ---- the same results, in objects that Arroyo can restore ----------------------------------------


def test_it_ends_with_the_state_and_the_output_of_the_protocol_layout() -> None:
    legacy, protocol = MemoryStore(), MemoryStore()
    run(legacy, **JOB)
    run_pipeline(word_job(protocol, **JOB), protocol)
    managed = end_of(legacy, legacy_job(legacy, **JOB))
    assert managed == end_of(protocol, word_job(protocol, **JOB))
    assert list_jobs(legacy) == [PATHS]


def test_every_epoch_has_what_a_real_arroyo_reads_to_restore_it(written: MemoryStore) -> None:
    backend = ParquetBackend(WriteProtected(written), PATHS)
    epochs = backend.epochs()
    assert len(epochs) > 10
    for epoch in epochs:
        head = pb.CheckpointMetadata.FromString(written.read(PATHS.legacy_metadata(epoch)))
        assert (head.job_id, head.epoch) == ("words", epoch)
        assert head.min_epoch <= epoch
        assert set(head.operator_ids) == {"lines", "count", "keep", "sum", "out"}
        for name in head.operator_ids:
            path = PATHS.operator_metadata(OperatorId(name), epoch)
            operator = pb.OperatorCheckpointMetadata.FromString(written.read(path))
            core = operator.operator_metadata
            assert (core.job_id, core.operator_id, core.epoch) == ("words", name, epoch)
            assert set(operator.table_checkpoint_metadata) <= set(operator.table_configs)
            assert not operator.HasField("subtask")
        backend.prepare_checkpoint_load(epoch)


def test_the_objects_of_an_epoch_come_in_the_order_of_arroyo() -> None:
    order: list[str] = []

    class Noting(FaultInjecting):
        def _is_fault(self, verb: str) -> bool:
            return False

        def put(self, path: StatePath, data: bytes) -> None:
            order.append(str(path))
            super().put(path, data)

        def create(self, path: StatePath, data: bytes) -> bool:
            order.append(str(path))
            return super().create(path, data)

    store = Noting(MemoryStore())
    run(store, 1, **JOB)
    at = "words/checkpoints/checkpoint-0000001"
    kinds = [
        "data" if "/table-" in path else "operator" if path.endswith("/metadata") else "subtask"
        for path in order
        if path.startswith(at) and path != f"{at}/metadata"
    ]
    assert order.index(f"{at}/metadata") > max(i for i, p in enumerate(order) if "/table-" in p)
    assert "data" not in kinds[kinds.index("operator") :]
    assert [p for p in order if p.endswith("/metadata")][-1] == f"{at}/metadata"


def test_an_arroyo_that_resumes_finds_the_operators_its_cleanup_needs(written: MemoryStore) -> None:
    # keep_epochs is 2, yet the ten epochs before the newest stay (arroyo-state.md 9.6).
    backend = ParquetBackend(written, PATHS)
    newest = backend.epochs()[-1]
    assert newest == 16
    assert backend.epochs()[0] <= newest - 10
    for epoch in range(newest - 10, newest + 1):
        checkpoint = backend.load_checkpoint_metadata(Epoch(epoch))
        for operator in checkpoint.operators:
            assert written.head(PATHS.operator_metadata(operator.operator, Epoch(epoch)))
    store = copied(written)
    plan = ParquetBackend(store, PATHS).cleanup_checkpoint(Epoch(newest))
    assert plan.keep_from == newest - 10
    head = ParquetBackend(store, PATHS).load()
    assert (head.min_epoch, head.state) == (newest - 10, CheckpointState.READY)
    assert not [
        info for info in store.list(PATHS.maintenance / "commits") if "0000005" in info.path
    ]


def test_an_epoch_without_all_its_operators_is_not_made_visible() -> None:
    store = MemoryStore()
    run(store, 1, **JOB)
    backend = ParquetBackend(store, PATHS)
    first = backend.load()
    second = [replace(one, epoch=Epoch(2)) for one in first.operators]
    for operator in second[:-1]:
        backend.write_operator_checkpoint_metadata(operator)
    head = LegacyCheckpoint(
        job=PATHS.job,
        epoch=Epoch(2),
        min_epoch=Epoch(1),
        start_time_micros=1,
        finish_time_micros=2,
        operators=tuple(one.operator for one in second),
    )
    last = second[-1]
    path = PATHS.operator_metadata(last.operator, Epoch(2))
    before = [
        None,
        metadata.encode_operator(first.operators[-1]),
        metadata.encode_operator(replace(last, parallelism=0)),
        metadata.encode_operator(replace(last, job=JobId("other"))),
    ]
    for data in before:
        if data is not None:
            store.put(path, data)
        with pytest.raises(ProtocolError, match="would not be restorable"):
            backend.write_checkpoint_metadata(head)
    assert backend.epochs() == [1]
    backend.write_operator_checkpoint_metadata(last)
    backend.write_checkpoint_metadata(head)
    # Again, and with another min_epoch, as Arroyo does; but never another checkpoint.
    backend.write_checkpoint_metadata(replace(head, min_epoch=Epoch(2)))
    assert backend.load().min_epoch == 2
    with pytest.raises(ConflictError, match="belongs to another"):
        backend.write_checkpoint_metadata(replace(head, finish_time_micros=3))


# ---- crashes -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("restarts_at_once")
def test_a_commit_that_was_left_is_shown_and_finished_by_the_next_run() -> None:
    store = MemoryStore()
    run(store, 1, **TINY)
    store.delete_many([PATHS.commit_note(Epoch(1))])
    assert [one.state for one in list_epochs(store, PATHS)] == [CheckpointState.COMMITTING]
    JobRun.start(store, legacy_job(store, **TINY)).close()
    assert [one.state for one in list_epochs(store, PATHS)] == [CheckpointState.READY]


def test_a_note_of_another_attempt_commits_nothing() -> None:
    store = MemoryStore()
    run(store, 1, **TINY)
    path = PATHS.commit_note(Epoch(1))
    note = json.loads(store.read(path))
    store.put(path, json.dumps(note | {"finish_time_micros": 1}).encode())
    assert ParquetBackend(store, PATHS).load().state is CheckpointState.COMMITTING


# ---- one writer at a time ------------------------------------------------------------------------


def test_a_second_starter_is_refused_until_the_first_has_ended() -> None:
    store = MemoryStore()
    first = LocalRun.start(legacy_job(store, **TINY), store)
    first.step()
    before = listing(store)
    with pytest.raises(ConflictError, match="the job is leased by") as caught:
        LocalRun.start(legacy_job(store, **TINY), store)
    assert caught.value.retryable
    asked = {PATHS.writers / "clock.json"}  # what the store's clock was asked by
    assert {path: etag for path, etag in listing(store).items() if path not in asked} == before
    first.job.close()
    second = LocalRun.start(legacy_job(store, **TINY), store)
    second.step()
    second.job.close()
    assert ParquetBackend(store, PATHS).epochs() == [1, 2]


@pytest.mark.usefixtures("restarts_at_once")
def test_a_run_whose_lease_was_taken_writes_no_epoch_and_deletes_nothing() -> None:
    store = MemoryStore()
    first = LocalRun.start(legacy_job(store, **TINY), store)
    first.step()
    second = LocalRun.start(legacy_job(store, **TINY), store)
    second.step()
    there = ParquetBackend(store, PATHS).load()
    with pytest.raises(ConflictError, match="lease"):
        first.step()
    first.job.close()
    second.job.close()
    assert ParquetBackend(store, PATHS).load() == there


def test_a_start_that_fails_gives_the_lease_back() -> None:
    store = MemoryStore()
    run(store, 1, **TINY)
    broken = FaultInjecting(store, fail_at=3, error=StorageError("down"))
    pipeline = legacy_job(store, **TINY)
    store.delete_many([PATHS.commit_note(Epoch(1))])
    with pytest.raises(StorageError):
        LocalRun.start(pipeline, broken)
    LocalRun.start(pipeline, store).job.close()


@pytest.mark.parametrize("hidden", [range(3, 4), range(1, 4), range(2, 3)], ids=str)
def test_no_older_epoch_is_restored_where_a_listing_hides_the_newest(hidden: range) -> None:
    store = MemoryStore()
    run(store, **TINY)
    assert ParquetBackend(store, PATHS).epochs() == [1, 2, 3]
    cut = hiding(store, PATHS, hidden)
    assert ParquetBackend(cut, PATHS).epochs() == [n for n in (1, 2, 3) if n not in hidden]
    job = LocalRun.start(legacy_job(store, **TINY), cut).job
    assert job.base is not None
    assert job.base.epoch == 3
    job.close()


def test_state_in_the_other_layout_is_never_silently_left_behind() -> None:
    store = MemoryStore()
    run(store, 1, **TINY)
    with pytest.raises(InputError, match="is stored in the legacy layout"):
        LocalRun.start(word_job(store, **TINY), store)
    other = MemoryStore()
    run_pipeline(word_job(other, **TINY), other, max_epochs=1)
    with pytest.raises(InputError, match="is stored in the protocol layout"):
        LocalRun.start(legacy_job(other, **TINY), other)


@pytest.mark.parametrize("make", [legacy_job, word_job])
def test_the_first_run_below_a_url_that_does_not_exist_begins(
    tmp_path: Path, make: Callable[..., Pipeline]
) -> None:
    sink, store = MemoryStore(), open_store(str(tmp_path / "new" / "root"))
    pipeline = make(sink, **TINY)
    run_pipeline(pipeline, store)
    assert ParquetBackend(store, pipeline.paths).load().epoch == 3


def test_a_backend_that_holds_no_lease_starts_nothing() -> None:
    with pytest.raises(InputError, match="lease"):
        ParquetBackend(MemoryStore(), PATHS).start()


def test_a_maintainer_s_lease_does_not_make_a_writer() -> None:
    store = MemoryStore()
    run(store, 1, **TINY)
    with lease(store, PATHS, "maintenance") as held, pytest.raises(InputError, match="lease"):
        ParquetBackend(held, PATHS).start()


def test_maintenance_of_it_says_what_it_can_and_cannot_do(written: MemoryStore) -> None:
    store = copied(written)
    before = listing(store)
    settings = CompactionSettings(policy=CompactionPolicy.FULL)
    assert plan_compaction(store, PATHS, settings).merges
    with pytest.raises(InputError, match="legacy layout"):
        run_compaction(store, PATHS, settings)
    assert listing(store) == before
    outcome = run_gc(store, PATHS, expiry(2))
    assert outcome.plan.keep_from == 6
    assert ParquetBackend(store, PATHS).epochs() == list(range(6, 17))
    assert ParquetBackend(store, PATHS).load().min_epoch == 6


def test_the_legacy_layout_has_no_second_level() -> None:
    with pytest.raises(InputError, match="one level"):
        Pipeline("words", job="other", layout=Layout.LEGACY)
    assert Pipeline("words", layout=Layout.LEGACY).paths == PATHS


def test_a_run_stops_when_it_is_asked_and_later_ones_are_not_held_up() -> None:
    store = MemoryStore()
    first = JobRun.start(store, legacy_job(store, **TINY))
    assert not first.stop_requested()
    assert request_stop(store, PATHS, 7) == first.number
    assert first.stop_requested()
    first.close()
    second = JobRun.start(store, legacy_job(store, **TINY))
    assert not second.stop_requested()
    assert requested_stop(store, PATHS) == first.number
    second.close()


# ---- the commands --------------------------------------------------------------------------------


def output(*args: str) -> Any:
    result = CliRunner().invoke(cli.main, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_both_layouts_are_shown_in_the_same_words(tmp_path: Path) -> None:
    url = str(tmp_path)
    store = open_store(url)
    sinks = MemoryStore(), MemoryStore()
    run_pipeline(legacy_job(sinks[0], **LONG), store)
    protocol = word_job(sinks[1], **LONG)
    protocol.name = "others"
    run_pipeline(protocol, store)
    shown = {job["job"]: job for job in output("jobs", "--url", url)}
    assert {(name, job["layout"]) for name, job in shown.items()} == {
        ("words", "legacy"),
        ("main", "protocol"),
    }
    assert {job["newest_epoch"] for job in shown.values()} == {16}
    for name in ("words", "others/main"):
        epochs = output("epochs", name, "--url", url)
        assert {(one["state"], one["problem"]) for one in epochs} == {("ready", None)}
    same = [output("show", name, "--url", url)["operators"] for name in ("words", "others/main")]
    assert same[0] == same[1]
    for operator, table in (("count", "counts"), ("keep", "rows"), ("sum", "times")):
        at = operator, table, "--limit", "0", "--url", url
        legacy, other = (output("rows", name, *at) for name in ("words", "others/main"))
        assert sorted(map(str, legacy)) == sorted(map(str, other))
        assert legacy
    assert output("stop", "words", "--url", url)["generation"] == 1


def test_writer_that_loses_its_lease_before_it_publishes_writes_nothing_of_the_epoch() -> None:
    """Every write of a legacy job goes through its lease: nothing else needs to look at it."""

    class Taken(Wrapper):
        """Somebody takes the lease when the writer looks whether its epoch exists already."""

        def head(self, path: StatePath) -> ObjectInfo | None:
            found = self.inner.head(path)
            written = path == PATHS.legacy_metadata(Epoch(2)) and self.inner.list_dir(path.parent)
            if written and written.prefixes and found is None:
                self.inner.create(PATHS.writers / "0000000002.json", b"{}")
            return found

    store = MemoryStore()
    with pytest.raises(ConflictError, match="lease on the job"):
        run(Taken(store), **TINY)
    published = [info.path for info in store.list(PATHS.checkpoint(Epoch(2)))]
    assert not [path for path in published if path.name == "metadata"]
    assert ParquetBackend(store, PATHS).epochs() == [1]
