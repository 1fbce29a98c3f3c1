"""A job copied to another checkpoint URL: complete, equal byte by byte, and never half startable,
whatever fails; the source keeps every object. What is done with a copy under another name changes
nothing in the original."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from arroyo_dagster import LeaseHeldError, cli
from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.errors import (
    ConflictError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    GcRequest,
    JobId,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    PipelineId,
    PlanKind,
    StatePath,
    WriteProtected,
    list_jobs,
    open_store,
    pin_epoch,
    plan_gc,
    plan_rollback,
    run_gc,
    run_rollback,
    verify_job,
)
from arroyo_dagster.state.metadata import lease as leases
from arroyo_dagster.state.model.surgery.copies import CopyOutcome
from arroyo_dagster.state.operations.surgery.copy_job import CopyOptions, plan_copy, run_copy
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import expiry
from tests.internals import LocalRun, lease, purge, read_pins, run_undelete
from tests.jobs import copied, copy_into, listing, own, state_of, word_job, written_by_word_job
from tests.shares import LAYOUTS
from tests.surgery_jobs import held_rows, surgery_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")

OPTIONS: dict[str, Any] = {"rows": 40, "rows_per_epoch": 4, "keep_epochs": None}


def job(store: ObjectStore, layout: Layout = Layout.PROTOCOL, **options: Any) -> Pipeline:
    made = word_job(store, **{**OPTIONS, **options})
    made.layout = layout
    return made


def written(layout: Layout = Layout.PROTOCOL, epochs: int = 5, **options: Any) -> MemoryStore:
    return written_by_word_job(max_epochs=epochs, layout=layout, **{**OPTIONS, **options})


def copy(
    source: ObjectStore, paths: JobPaths, target: ObjectStore, epoch: int | None = None
) -> CopyOutcome:
    return run_copy(source, paths, target, epoch, CopyOptions(sleep=lambda _: None))


# ---- what is copied ------------------------------------------------------------------------------


@LAYOUTS
def test_copy_has_every_epoch_and_continues_as_the_source_would(layout: Layout) -> None:
    source, target = written(layout), MemoryStore()
    pipeline = job(source, layout)
    was = own(source, pipeline.paths)
    plan = plan_copy(WriteProtected(source), pipeline.paths, WriteProtected(target))
    assert (plan.epochs, plan.epoch, plan.left_out) == ((1, 2, 3, 4, 5), 5, ())
    assert list(target.list()) == []
    outcome = copy(source, pipeline.paths, target)
    assert outcome.done
    assert (outcome.copied, outcome.present) == (plan.objects, 0)
    found = own(target, pipeline.paths)
    names = ("current-generation", "generation-manifest")
    for path, data in found.items():
        assert was[path] == data or any(name in path for name in names)
    assert own(source, pipeline.paths) == was
    assert read_pins(source, pipeline.paths).pinned == frozenset()
    backend = ParquetBackend(target, pipeline.paths)
    assert [backend.prepare_checkpoint_load(epoch).epoch for epoch in backend.every_epoch()] == [
        *range(1, 6)
    ]
    assert verify_job(target, pipeline.paths).verdict.findings == ()
    assert plan_gc(target, pipeline.paths, GcRequest(kind=PlanKind.ORPHANS)).objects == 0
    run_pipeline(job(target, layout), target)
    run_pipeline(job(source, layout), source)
    assert state_of(target, pipeline) == state_of(source, pipeline)
    assert verify_job(target, pipeline.paths).verdict.findings == ()


@LAYOUTS
def test_one_epoch_is_copied_with_its_parent_and_a_start_continues_from_it(layout: Layout) -> None:
    source, target = written(layout), MemoryStore()
    pipeline = job(source, layout)
    outcome = copy(source, pipeline.paths, target, 3)
    expected = (2, 3) if layout is Layout.PROTOCOL else (3,)
    assert outcome.plan.epochs == expected
    assert ParquetBackend(target, pipeline.paths).every_epoch() == [*expected]
    assert verify_job(target, pipeline.paths).verdict.errors == ()
    run_pipeline(job(target, layout), target)
    undisturbed = written(layout, 100)
    found, usual = state_of(target, pipeline), state_of(undisturbed, pipeline)
    assert found == usual


def test_a_job_with_rolled_back_epochs_is_copied_with_its_parent_by_reference() -> None:
    source, target = written(), MemoryStore()
    pipeline = job(source)
    run_rollback(source, plan_rollback(source, pipeline.paths, 2), sleep=lambda _: None)
    copy(source, pipeline.paths, target)
    assert verify_job(target, pipeline.paths).verdict.findings == ()
    assert state_of(target, pipeline) == state_of(source, pipeline)
    alone = MemoryStore()
    assert copy(source, pipeline.paths, alone, 6).plan.epochs == (2, 6)
    run_pipeline(job(alone), alone, max_epochs=1)
    assert verify_job(alone, pipeline.paths).verdict.errors == ()


@LAYOUTS
def test_an_arroyo_job_is_copied(layout: Layout) -> None:
    made, target = surgery_job(layout), MemoryStore()
    outcome = copy(made.store, made.paths, target)
    assert "Arroyo's database does not know the copy" in outcome.plan.warnings[1]
    assert held_rows(target, made.paths) == held_rows(made.store, made.paths)
    assert verify_job(target, made.paths).verdict.errors == ()


def test_a_running_job_is_copied_at_its_newest_epoch_and_goes_on() -> None:
    source, target = written(), MemoryStore()
    alive = LocalRun.start(job(source), source)
    alive.step()
    copy(source, alive.job.pipeline.paths, target)
    alive.step()
    paths = alive.job.pipeline.paths
    assert ParquetBackend(target, paths).load().epoch == 6
    assert ParquetBackend(source, paths).load().epoch == 7
    assert verify_job(target, paths).verdict.errors == ()


# ---- refusals ------------------------------------------------------------------------------------


def test_a_target_with_a_job_of_that_name_is_refused() -> None:
    source, target = written(), written(epochs=1)
    pipeline = job(source)
    was = listing(target)
    with pytest.raises(ConflictError, match="the target has a job of that name"):
        copy(source, pipeline.paths, target)
    with pytest.raises(InputError, match="the same checkpoint URL"):
        copy(source, pipeline.paths, source)
    assert listing(target) == was
    done = MemoryStore()
    copy(source, pipeline.paths, done)
    with pytest.raises(ConflictError, match="the target has a job of that name"):
        copy(source, pipeline.paths, done)


def test_unknown_epochs_other_plans_and_two_copies_at_once_are_refused() -> None:
    source, target = written(), MemoryStore()
    pipeline = job(source)
    with pytest.raises(NotFoundError, match="no such epoch"):
        copy(source, pipeline.paths, target, 99)
    with pytest.raises(ConflictError, match="review the new plan"):
        run_copy(source, pipeline.paths, target, None, CopyOptions(approved="0" * 32))
    with lease(target, pipeline.paths, "another copy"), pytest.raises(LeaseHeldError):
        copy(source, pipeline.paths, target)
    with lease(source, pipeline.paths, "gc"), pytest.raises(LeaseHeldError):
        copy(source, pipeline.paths, target)
    assert own(target, pipeline.paths) == {}


def test_a_copy_begun_from_another_place_is_not_continued() -> None:
    source, target = written(), MemoryStore()
    pipeline = job(source)
    faulty = FaultInjecting(target, fail_at=6)
    with pytest.raises(StorageError):
        copy(source, pipeline.paths, faulty)
    with pytest.raises(ConflictError, match=r"a copy of the job from .* was begun"):
        copy(copied(source), pipeline.paths, target)
    assert copy(source, pipeline.paths, target).present > 0


def test_a_damaged_object_at_the_target_keeps_the_copy_inactive() -> None:
    source, target = written(), MemoryStore()
    pipeline = job(source)
    with pytest.raises(StorageError):
        copy(source, pipeline.paths, FaultInjecting(target, fail_at=8))
    path = next(info.path for info in target.list() if "/table-" in info.path)
    target.put(path, b"damaged")
    with pytest.raises(ConflictError, match="another object at this path"):
        copy(source, pipeline.paths, target)
    assert target.head(pipeline.paths.current_generation) is None


# ---- faults --------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("crash", [False, True], ids=["fails", "dies"])
def test_copy_interrupted_anywhere_is_not_startable_or_complete_and_continued_by_the_next(
    layout: Layout, crash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_check_free", lambda *_: None)
    small: dict[str, Any] = {"rows": 12, "rows_per_epoch": 6, "parallelism": 1}
    source = written(layout, 2, **small)
    pipeline = job(source, layout, **small)
    counted = FaultInjecting(MemoryStore())
    copy(source, pipeline.paths, counted)
    assert counted.changes > 10
    expected = state_of(source, pipeline)
    for at in range(1 + crash, counted.changes + 1, 3):
        target = MemoryStore()
        mode: Literal["after", "before"] = "after" if crash else "before"
        faulty = FaultInjecting(target, fail_at=at, mode=mode, crash=crash)
        with contextlib.suppress(Crash, StorageError):
            copy(source, pipeline.paths, faulty)
        if is_startable(target, pipeline.paths):
            assert state_of(target, pipeline) == expected, at
        with contextlib.suppress(ConflictError):  # it was complete
            copy(source, pipeline.paths, target)
        assert state_of(target, pipeline) == expected, at
        assert target.head(pipeline.paths.copy_marker) is None, at
        assert verify_job(target, pipeline.paths, level=1).verdict.errors == (), at
        assert read_pins(source, pipeline.paths).pinned <= {Epoch(1), Epoch(2)}, at


def is_startable(store: ObjectStore, paths: JobPaths) -> bool:
    if paths.layout is Layout.PROTOCOL:
        return store.head(paths.current_generation) is not None
    try:
        return bool(ParquetBackend(store, paths).epochs())
    except NotFoundError:
        return False


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_copies_from_and_to_a_folder(tmp_path: Path) -> None:
    memory = written()
    copy_into(open_store(f"file://{tmp_path}/source"), memory)
    name = job(memory).paths.root
    args = ["copy", name, f"{tmp_path}/target", "--url", f"{tmp_path}/source"]
    shown = CliRunner().invoke(cli.main, args, catch_exceptions=False)
    assert "epochs 1-5" in shown.stdout
    assert "nothing was changed, add --yes to execute" in shown.stdout
    for chosen, epochs in (("@4", "3-4"), ("@latest", "4-5")):
        one = CliRunner().invoke(cli.main, ["copy", f"{name}{chosen}", *args[2:]])
        assert f"epochs {epochs}," in one.stdout
    digest = shown.stdout.partition(": copy ")[2].split(";")[0]
    done = CliRunner().invoke(
        cli.main, [*args, "--yes", "--approve", digest, "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["done"], document["epoch"]) == (True, 5)
    assert len(document["digests"]) == document["copied"] == document["objects"]
    assert [one.root for one in list_jobs(open_store(f"file://{tmp_path}/target"))] == [name]
    again = CliRunner().invoke(cli.main, [*args, "--yes"])
    assert again.exit_code == 1
    assert "the target has a job of that name" in again.stderr


DAY = 24 * 3_600_000_000


def copied_under(store: MemoryStore, old: JobPaths, new: JobPaths) -> None:
    for info in list(store.list(old.root)):
        path = StatePath(f"{new.root}{info.path.removeprefix(old.root)}")
        store.put(path, store.read(info.path))


def objects_below(store: MemoryStore, paths: JobPaths) -> dict[str, bytes]:
    return {info.path: store.read(info.path) for info in store.list(paths.root)}


def pipeline_of(store: MemoryStore, name: str, layout: Layout, rows: int) -> Pipeline:
    made = word_job(store, rows=rows, rows_per_epoch=2, parallelism=1, keep_epochs=2)
    made.layout, made.name = layout, name
    return made


@pytest.mark.parametrize("layout", Layout)
def test_a_run_on_a_copy_under_another_name_is_refused(layout: Layout) -> None:
    store = MemoryStore()
    original = pipeline_of(store, "words", layout, 24)
    run_pipeline(original, store)
    copy = pipeline_of(store, "words2", layout, 48)
    copied_under(store, original.paths, copy.paths)
    before = objects_below(store, original.paths)
    with pytest.raises((InputError, ProtocolError)):
        run_pipeline(copy, store)
    assert objects_below(store, original.paths) == before


def test_a_run_on_a_copy_claims_no_epoch_of_the_original() -> None:
    store = MemoryStore()
    original = pipeline_of(store, "words", Layout.PROTOCOL, 2)
    run_pipeline(original, store)
    copy = pipeline_of(store, "words", Layout.PROTOCOL, 48)
    copy.job = "main2"
    copied_under(store, original.paths, copy.paths)
    (record,) = [info.path for info in store.list(copy.paths.epochs)]
    store.delete_many([record])  # published, not yet visible: the next start claims it
    with pytest.raises((InputError, ProtocolError)):
        run_pipeline(copy, store)
    assert list(store.list(copy.paths.epochs)) == []


@pytest.mark.parametrize("verb", ["undelete", "purge"])
def test_the_quarantine_of_a_copy_under_another_name_is_refused(verb: str) -> None:
    now = time.time_ns() // 1000
    store = MemoryStore(clock=lambda: now)
    original = pipeline_of(store, "words", Layout.PROTOCOL, 24)
    original.keep_epochs = None
    run_pipeline(original, store)
    run_gc(store, original.paths, expiry(2), GcOptions(quarantine=True))
    copy = JobPaths(JobId(original.paths.job), PipelineId("words2"))
    copied_under(store, original.paths, copy)
    before = objects_below(store, original.paths)
    (name,) = read_pins(store, copy).quarantines
    now += 2 * DAY
    verbs = {
        "undelete": lambda: run_undelete(store, copy, name),
        "purge": lambda: purge(store, copy, older_than_micros=DAY, yes=True, clock=lambda: now),
    }
    with pytest.raises(ProtocolError, match="another job"):
        verbs[verb]()
    assert objects_below(store, original.paths) == before


@pytest.mark.parametrize("layout", Layout)
def test_a_pin_in_a_copy_that_would_hold_nothing_is_refused(layout: Layout) -> None:
    store = MemoryStore()
    original = pipeline_of(store, "words", layout, 24)
    run_pipeline(original, store)
    copy = pipeline_of(store, "words2", layout, 24).paths
    copied_under(store, original.paths, copy)
    before = objects_below(store, copy)
    newest = Epoch(12)
    with pytest.raises(ProtocolError, match=r"another job|out of its job"):
        pin_epoch(store, copy, newest)
    assert objects_below(store, copy) == before
    pin_epoch(store, original.paths, newest)
    assert read_pins(store, original.paths).pinned == {newest}
