"""The undo of a rebuild: the epoch is as damaged as it was, byte for byte, and nothing is lost that
a copy of its original metadata would need."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import ConflictError, FormatError, InputError, StorageError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    JobPaths,
    Layout,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    RewriteOptions,
    StatePath,
    UndoOutcome,
    WriteProtected,
    open_store,
    plan_undo,
    run_rewrite,
    run_undo,
    verify_job,
)
from arroyo_dagster.state.planning.gc.reachability import referenced_by
from tests.arroyo_jobs import Telling, facts_of, stopped
from tests.damages import copy_job
from tests.faulty_stores import Crash, FaultInjecting, once_before
from tests.formats import JobCondition, SetWatermark
from tests.internals import (
    EditOptions,
    JobDirectory,
    plan_rebuild,
    read_inventory,
    run_edit,
    run_rebuild,
)
from tests.jobs import copy_into, own
from tests.shares import LAYOUTS
from tests.surgery_jobs import SurgeryJob, surgery_job

NOW = EditOptions(quiet_seconds=0)


def damaged_job(layout: Layout) -> SurgeryJob:
    """One object is missing, and one is damaged."""
    job = surgery_job(layout, sink_files=2)
    for path, data in zip(objects(job), (None, b"\xff\xff"), strict=True):
        job.store.delete_many([path])
        if data is not None:
            job.store.put(path, data)
    return job


def objects(job: SurgeryJob) -> list[StatePath]:
    paths = job.paths
    if job.generation is not None:
        return [paths.manifest(job.generation, Epoch(3)), paths.generation_manifest(job.generation)]
    return [paths.operator_metadata(OperatorId(one), Epoch(3)) for one in ("window_3", "join_4")]


def rebuild(job: SurgeryJob, **options: Any) -> None:
    chosen = replace(NOW, **options)
    assert run_rebuild(job.store, job.paths, stopped(job.paths), options=chosen).record


def undo(store: ObjectStore, paths: JobPaths, directory: JobDirectory | None = None) -> Any:
    return run_undo(store, paths, directory or stopped(paths))


@LAYOUTS
def test_a_rebuild_is_undone_byte_for_byte(layout: Layout) -> None:
    job = damaged_job(layout)
    was = own(job.store, job.paths)
    rebuild(job)
    rebuilt = own(job.store, job.paths)
    plan = plan_undo(WriteProtected(job.store), job.paths, stopped(job.paths))
    missing, damaged = objects(job)
    assert (plan.deleted, plan.objects, plan.epoch) == ((missing,), (damaged,), 3)
    undone = undo(job.store, job.paths)
    assert undone == UndoOutcome.of_plan(plan, done=True)
    assert own(job.store, job.paths) == was
    rebuild(job)
    assert own(job.store, job.paths) == rebuilt


@LAYOUTS
def test_verify_names_the_rebuild_and_its_doubts(layout: Layout) -> None:
    job = damaged_job(layout)
    rebuild(job)
    (found,) = verify_job(job.store, job.paths).verdict.findings
    assert (found.code, found.severity.value) == ("epoch-rebuilt", "note")
    assert "2 metadata objects of epoch 3" in found.evidence
    assert "the watermark is that of epoch 2" in found.evidence
    job.store.put(StatePath(found.object), b"{")
    (found,) = verify_job(job.store, job.paths).verdict.findings
    assert (found.code, found.severity.value) == ("record-unreadable", "warning")
    with pytest.raises(FormatError):
        undo(job.store, job.paths)
    with pytest.raises(FormatError):
        read_inventory(job.store, job.paths)


@LAYOUTS
def test_edits_and_compactions_after_it_are_undone_first(layout: Layout) -> None:
    job = damaged_job(layout)
    store, paths = job.store, job.paths
    was = own(store, paths)
    rebuild(job)
    rebuilt = own(store, paths)
    at = ParquetBackend(store, paths).load().operators[-1].min_watermark_micros
    assert at is not None
    run_edit(store, paths, stopped(paths), SetWatermark(at_micros=at + 1_000_000), NOW)
    settings = CompactionSettings(policy=CompactionPolicy.FULL)
    run_rewrite(store, paths, stopped(paths), settings, RewriteOptions(quiet_seconds=0))
    for operation in (None, "watermark"):
        assert undo(store, paths).operation == operation
    left = own(store, paths)
    assert {path: left[path] for path in rebuilt} == rebuilt
    assert undo(store, paths).operation == "rebuild"
    assert {path: own(store, paths)[path] for path in was} == was


def test_the_newest_change_is_undone_first_also_if_it_is_of_an_older_epoch() -> None:
    job = surgery_job(Layout.LEGACY, sink_files=2)
    store, paths = job.store, job.paths
    settings = CompactionSettings(policy=CompactionPolicy.FULL)
    run_rewrite(store, paths, stopped(paths), settings, RewriteOptions(quiet_seconds=0))
    store.delete_many([paths.operator_metadata(OperatorId("window_3"), Epoch(2))])
    assert run_rebuild(store, paths, stopped(paths), 2, NOW).record
    assert [undo(store, paths).operation for _ in range(2)] == ["rebuild", None]


@LAYOUTS
def test_a_rebuild_is_not_undone_once_the_job_has_gone_on(layout: Layout) -> None:
    job = damaged_job(layout)
    rebuild(job)
    running = JobDirectory([Telling(facts_of(job.paths, JobCondition.RUNNING))])
    with pytest.raises(InputError, match="cannot be undone: the job was started from it and runs"):
        undo(job.store, job.paths, running)
    with pytest.raises(InputError, match="cannot be rewritten now"):
        undo(job.store, job.paths, JobDirectory([]))
    job.start()
    job.write({})
    was = own(job.store, job.paths)
    with pytest.raises(ConflictError, match="the job has continued from it"):
        undo(job.store, job.paths)
    assert own(job.store, job.paths) == was


def test_a_start_without_an_epoch_yet_is_noticed() -> None:
    job = damaged_job(Layout.PROTOCOL)
    rebuild(job)
    job.start()
    with pytest.raises(ConflictError, match="the job has continued from it"):
        undo(job.store, job.paths)


@LAYOUTS
def test_metadata_that_another_process_wrote_is_left_alone(layout: Layout) -> None:
    job = damaged_job(layout)
    original = surgery_job(layout, sink_files=2)
    rebuild(job)
    path = objects(job)[1]
    other = original.store.read(path) + (b"\n" if layout is Layout.PROTOCOL else b"\x82\x01\x00")
    job.store.put(path, other)
    was = own(job.store, job.paths)
    with pytest.raises(ConflictError, match="changed the metadata of the job after the rebuild"):
        undo(job.store, job.paths)
    assert own(job.store, job.paths) == was


@LAYOUTS
@pytest.mark.parametrize("same", [True, False])
def test_metadata_that_another_process_writes_meanwhile_is_left_alone(
    layout: Layout, same: bool
) -> None:
    job = damaged_job(layout)
    store, path, said = job.store, objects(job)[0], stopped(job.paths)
    data = plan_rebuild(store, job.paths, said).after[path] if same else b"another rebuild"
    racing = once_before(
        store, lambda verb, at: (verb, at) == ("create", path), lambda: store.put(path, data)
    )
    with contextlib.nullcontext() if same else pytest.raises(ConflictError, match="wrote the miss"):
        run_rebuild(racing, job.paths, said, options=NOW)
    assert store.read(path) == data


@LAYOUTS
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("crash", [False, True], ids=["fails", "dies"])
def test_an_undo_interrupted_anywhere_is_completed_by_the_next(
    layout: Layout, mode: Literal["before", "after"], crash: bool
) -> None:
    job = damaged_job(layout)
    was = own(job.store, job.paths)
    rebuild(job)
    counted = FaultInjecting(copy_job(job.store, job.paths))
    undo(counted, job.paths)
    assert counted.changes >= 4
    for at in range(1, counted.changes + 1):
        store = copy_job(job.store, job.paths)
        with contextlib.suppress(Crash, StorageError):
            undo(FaultInjecting(store, fail_at=at, mode=mode, crash=crash), job.paths)
        store.delete_many([one.path for one in store.list(job.paths.leases)])
        undo(store, job.paths)
        assert own(store, job.paths) == was, at
        assert not list(store.list(job.paths.changes))


def test_gc_keeps_what_the_lost_metadata_may_have_listed_until_the_job_goes_on() -> None:
    """Arroyo has compacted the epoch before: its own list of epoch 3 may name the output."""
    job = surgery_job(Layout.LEGACY, sink_files=2)
    store, paths = job.store, job.paths
    at = paths.operator(OperatorId("window_3"), Epoch(2))
    output = StatePath(f"{at}/table-t-000-compacted")
    store.put(output, store.read(StatePath(f"{at}/table-t-000")))
    store.delete_many([paths.operator_metadata(OperatorId("window_3"), Epoch(3))])
    rebuild(job)
    assert output not in ParquetBackend(store, paths).load().paths

    def needed() -> bool:
        _, roots = read_inventory(store, paths)
        return output in referenced_by(roots, (*roots.epochs, *roots.attempts))

    assert needed()
    job.start()
    job.write({})
    assert not needed()


@LAYOUTS
def test_the_command_undoes_a_rebuild(layout: Layout, tmp_path: Path) -> None:
    job = damaged_job(layout)
    was = own(job.store, job.paths)
    rebuild(job)
    target = copy_into(open_store(str(tmp_path)), job.store)
    given = ["undo", "job_x", "--url", str(tmp_path), "--assume", "job_x=stopped"]
    runner = CliRunner()
    dry = runner.invoke(cli.main, given)
    assert dry.exit_code == 0, dry.output
    missing, damaged = objects(job)
    assert f"missing again: {missing}" in dry.output
    assert "the rebuild of epoch 3 would be undone; nothing was changed" in dry.output
    found = json.loads(runner.invoke(cli.main, [*given, "--json"]).stdout)
    assert (found["done"], found["deleted"], found["restored"]) == (False, [missing], [damaged])
    done = runner.invoke(cli.main, [*given, "--yes"])
    assert done.exit_code == 0, done.output
    assert f"restored: {damaged}" in done.output
    assert own(target, job.paths) == was
