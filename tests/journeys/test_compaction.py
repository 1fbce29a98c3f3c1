"""Compaction of one job: what a restore loads stays the same, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.errors import ConflictError, FormatError, ProtocolError
from arroyo_dagster.state import (
    CompactionOptions,
    CompactionPolicy,
    CompactionSettings,
    JobId,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    WriteProtected,
    list_jobs,
    open_store,
    plan_compaction,
    run_compaction,
    verify_job,
)
from arroyo_dagster.state.operations.compaction.execute import merge_here
from arroyo_dagster.state.planning.compaction.plan import ARROYO_JOB
from arroyo_dagster.state.storage.wrappers import Counting
from arroyo_dagster.state.tables.merge.rows import OnBytes
from arroyo_dagster.state.tables.merge.task import MergeTask
from tests.compat.arroyo import unpack
from tests.formats import MergeOutcome, RowsDigest, is_compacted
from tests.internals import LocalRun, lease
from tests.jobs import (
    copied,
    listing,
    output_of,
    run_word_job,
    state_of,
    word_job,
    written_by_word_job,
)

pytestmark = pytest.mark.usefixtures("one_at_a_time")

JOB: dict[str, Any] = {
    "rows": 18,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
}
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
PACK = CompactionSettings(min_files=2)
PATHS = word_job(MemoryStore(), **JOB).paths


def begun(epochs: int, job: dict[str, Any] = JOB) -> MemoryStore:
    """A job that was stopped: every run of so many epochs ends with a last checkpoint."""
    return written_by_word_job(**job, max_epochs=epochs)


def killed(epochs: int, job: dict[str, Any] = JOB) -> MemoryStore:
    """A job that just died."""
    return written_by_word_job(**job, max_epochs=epochs, killed=True)


def content(store: ObjectStore) -> dict[str, Any]:
    found = state_of(store, word_job(store, **JOB))
    found.pop("")
    return found


def ended(job: dict[str, Any] = JOB) -> tuple[Any, Any]:
    store = begun(100, job)
    return content(store), output_of(store)


def files_of(store: ObjectStore) -> int:
    return len(set(ParquetBackend(store, PATHS).load().paths))


@pytest.mark.parametrize("settings", [FULL, PACK], ids=["full", "bin-pack"])
def test_a_job_at_rest_gets_an_epoch_of_the_same_content_and_shorter_lists(
    settings: CompactionSettings,
) -> None:
    store = begun(7)
    before, files = content(store), files_of(store)
    assert plan_compaction(WriteProtected(store), PATHS, settings).merges
    outcome = run_compaction(store, PATHS, settings)
    assert outcome.published == "epoch"
    assert outcome.epoch == 8
    assert outcome.files_after == files_of(store) < files
    assert content(store) == before
    assert all(merge.same for merge in outcome.merges)
    run_word_job(store, **JOB)
    assert (content(store), output_of(store)) == ended()


@pytest.mark.parametrize("merge_files_after", [2, 99])
def test_a_table_whose_every_key_was_removed_has_lost_no_file(merge_files_after: int) -> None:
    """Each word is forgotten at its fourth row, and there is one word: no key remains."""
    job = {**JOB, "rows": 16, "letters": "a", "merge_files_after": merge_files_after}
    store = begun(100, job)
    before = {**state_of(store, word_job(store, **job)), "": None}
    assert verify_job(store, PATHS).verdict.findings == ()
    assert run_compaction(store, PATHS, FULL).published == "epoch"
    assert verify_job(store, PATHS).verdict.findings == ()
    assert {**state_of(store, word_job(store, **job)), "": None} == before
    assert run_compaction(store, PATHS, FULL).published is None


@pytest.mark.parametrize("settings", [FULL, PACK], ids=["full", "bin-pack"])
def test_a_second_run_changes_nothing(settings: CompactionSettings) -> None:
    for store in (begun(7), killed(7)):
        assert run_compaction(store, PATHS, settings).changed
        counted = Counting(store)
        again = run_compaction(counted, PATHS, settings)
        assert not again.changed
        assert not again.plan.merges
        assert {one.reason for one in again.plan.left_out}
        assert not counted.bytes_written.total()


@pytest.mark.parametrize("settings", [FULL, PACK], ids=["full", "bin-pack"])
@pytest.mark.parametrize("later", [0, 1, 4])
def test_a_running_job_takes_over_what_was_merged_at_its_next_checkpoint(
    settings: CompactionSettings, later: int
) -> None:
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **JOB), store)
    for _ in range(6):
        run.step()
    plan_of = plan_compaction(store, PATHS, settings)
    outcome = run_compaction(store, PATHS, settings)
    assert outcome.published == "record"
    assert outcome.plan == plan_of
    assert content(store)  # nothing has changed yet
    run.step()
    listed = ParquetBackend(store, PATHS).load().paths
    assert any(map(is_compacted, listed))
    assert not ParquetBackend(store, PATHS).compaction_records()
    for _ in range(later):
        run.step()
    run_word_job(store, **JOB)
    assert (content(store), output_of(store)) == ended()


def test_what_a_killed_run_never_took_over_the_next_one_does() -> None:
    store = killed(6)
    assert run_compaction(store, PATHS, FULL).published == "record"
    run_word_job(store, **JOB, max_epochs=1)
    assert any(map(is_compacted, ParquetBackend(store, PATHS).load().paths))
    run_word_job(store, **JOB)
    assert (content(store), output_of(store)) == ended()


def test_what_a_stopped_run_never_took_over_the_compactor_does() -> None:
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **JOB), store)
    for _ in range(6):
        run.step()
    run_compaction(store, PATHS, FULL)
    record = next(iter(ParquetBackend(store, PATHS).compaction_records()))
    kept = store.read(record)
    run_word_job(store, **JOB, max_epochs=1)
    store.put(record, kept)  # as if it came too late
    before = content(store)
    outcome = run_compaction(store, PATHS, FULL)
    assert outcome.published == "epoch"
    assert content(store) == before
    assert not ParquetBackend(store, PATHS).compaction_records()


def test_two_records_for_the_same_files_count_once() -> None:
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **JOB), store)
    for _ in range(6):
        run.step()
    other = copied(store)
    run_compaction(store, PATHS, FULL)
    run_compaction(other, PATHS, PACK)
    for info in other.list():
        if store.head(info.path) is None:
            store.put(info.path, other.read(info.path))
    assert len(ParquetBackend(store, PATHS).compaction_records()) == 2
    run.step()
    assert not ParquetBackend(store, PATHS).compaction_records()
    run_word_job(store, **JOB)
    assert (content(store), output_of(store)) == ended()


@pytest.mark.parametrize("damage", ["outputs gone", "of another job", "another path"])
def test_a_record_that_cannot_be_believed_changes_nothing(damage: str) -> None:
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **JOB), store)
    for _ in range(6):
        run.step()
    outcome = run_compaction(store, PATHS, FULL)
    assert outcome.record is not None
    text = store.read(outcome.record)
    if damage == "outputs gone":
        gone = [path for merge in outcome.merges for path in merge.merged.output_paths]
        store.delete_many(gone)
    elif damage == "of another job":
        store.put(outcome.record, text.replace(b'"job_id":"main"', b'"job_id":"mine"'))
    else:
        store.put(outcome.record, text.replace(b"words/main/", b"words/mine/"))
    run.step()
    run_word_job(store, **JOB)
    assert (content(store), output_of(store)) == ended()


def test_a_job_that_is_started_meanwhile_wins() -> None:
    store = begun(6)

    def start_the_job(
        held: ObjectStore, tasks: Sequence[MergeTask], on_bytes: OnBytes
    ) -> Iterable[MergeOutcome]:
        yield from merge_here(held, tasks)
        run_word_job(store, **JOB, max_epochs=1)

    with pytest.raises(ConflictError, match="started while its files were merged"):
        run_compaction(store, PATHS, FULL, CompactionOptions(run=start_the_job))
    run_word_job(store, **JOB)
    assert (content(store), output_of(store)) == ended()


def test_a_merge_that_would_not_restore_the_same_is_not_published() -> None:
    store = begun(6)
    before = content(store), ParquetBackend(store, PATHS).epochs()

    def lose_a_row(
        held: ObjectStore, tasks: Sequence[MergeTask], on_bytes: OnBytes
    ) -> Iterable[MergeOutcome]:
        for outcome in merge_here(held, tasks):
            yield replace(outcome, after=RowsDigest(outcome.after.rows - 1, 7))

    with pytest.raises(ProtocolError, match="nothing was published"):
        run_compaction(store, PATHS, FULL, CompactionOptions(run=lose_a_row))
    assert (content(store), ParquetBackend(store, PATHS).epochs()) == before


def test_a_plan_of_the_newest_epoch_is_carried_out_as_it_is() -> None:
    for store in (begun(7), killed(7)):
        plan = plan_compaction(store, PATHS, PACK)
        outcome = run_compaction(store, PATHS, FULL, plan=plan)
        assert outcome.plan == plan
        assert {one.merged.input_paths for one in outcome.merges} == {
            one.paths for one in plan.merges
        }


def test_a_plan_of_an_older_epoch_is_refused() -> None:
    store = begun(6)
    plan = plan_compaction(store, PATHS, FULL)
    assert run_compaction(store, PATHS, plan=plan).changed
    before = listing(store)
    with pytest.raises(ConflictError, match="it is of epoch 6, the job is at epoch 7"):
        run_compaction(store, PATHS, plan=plan)
    assert listing(store) == before


def test_a_plan_whose_files_a_record_has_merged_is_refused() -> None:
    store = killed(6)
    plan = plan_compaction(store, PATHS, FULL)
    assert run_compaction(store, PATHS, PACK).published == "record"
    before = listing(store)
    with pytest.raises(ConflictError, match="its files were merged meanwhile"):
        run_compaction(store, PATHS, plan=plan)
    assert listing(store) == before


def test_a_plan_is_refused_whose_file_was_written_again() -> None:
    store = begun(6)
    plan = plan_compaction(store, PATHS, FULL)
    file = plan.inputs[0].path
    store.put(file, store.read(file) + b" ")
    with pytest.raises(ConflictError, match="a file was written again") as caught:
        run_compaction(store, PATHS, plan=plan)
    assert caught.value.facts["path"] == file


def test_a_plan_of_another_job_is_refused() -> None:
    store = begun(6)
    plan = replace(plan_compaction(store, PATHS, FULL), job=JobId("another"))
    with pytest.raises(ConflictError, match="it is of another job"):
        run_compaction(store, PATHS, plan=plan)


def test_a_missing_file_stops_everything() -> None:
    store = begun(6)
    gone = ParquetBackend(store, PATHS).load().paths[0]
    store.delete_many([gone])
    with pytest.raises(FormatError, match="nothing is merged") as caught:
        run_compaction(store, PATHS, FULL)
    assert caught.value.facts["path"] == gone


def test_one_at_a_time() -> None:
    store = begun(6)
    with lease(store, PATHS, "somebody"):
        with pytest.raises(ConflictError, match="the job is leased by") as caught:
            run_compaction(store, PATHS, FULL)
        assert caught.value.retryable
    assert run_compaction(store, PATHS, FULL).changed


@pytest.mark.parametrize("archive", ["flights", "leader"])
def test_jobs_of_arroyo_are_left_alone_and_that_is_said(archive: str, tmp_path: Path) -> None:
    store = open_store(unpack(archive, tmp_path))
    for paths in list_jobs(store):
        plan = plan_compaction(WriteProtected(store), paths, FULL)
        assert not plan.merges
        assert [one.reason for one in plan.left_out] == [ARROYO_JOB]
        assert not run_compaction(WriteProtected(store), paths, FULL).changed
