"""A job taken back to an older epoch: nothing is lost or half done, whatever fails, and gc, verify,
retention and compaction stay right behind it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcRequest,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    PlanKind,
    Retention,
    RollbackOutcome,
    list_epochs,
    plan_gc,
    plan_rollback,
    run_compaction,
    run_gc,
    run_rollback,
    verify_job,
)
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.metadata.backing_store import NextEpoch
from arroyo_dagster.state.model.garbage import DAY_MICROS
from arroyo_dagster.state.operations.catalog.changes import poll_fleet
from arroyo_dagster.state.operations.restore.rollback import restorable_epochs, rollback_done
from tests.damages import Scene, parent_out_of_the_job
from tests.faulty_stores import Crash
from tests.formats import RunProgress
from tests.internals import FleetCursor, JobRun, LocalRun, read_pins
from tests.jobs import copied, listing, output_of, state_of, word_job, written_by_word_job
from tests.shares import LAYOUTS, all_but

pytestmark = pytest.mark.usefixtures("one_at_a_time")

BROKEN = b"\xff\xff\xff"
EXPIRE = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=2))
ORPHANS = GcRequest(kind=PlanKind.ORPHANS)


def job(store: ObjectStore, layout: Layout = Layout.PROTOCOL, **options: Any) -> Pipeline:
    made = word_job(store, **{"rows": 60, "rows_per_epoch": 2, "keep_epochs": None} | options)
    made.layout = layout
    return made


def written(epochs: int = 8, layout: Layout = Layout.PROTOCOL, **options: Any) -> MemoryStore:
    options = {"rows": 60, "rows_per_epoch": 2, "keep_epochs": None} | options
    return written_by_word_job(max_epochs=epochs, layout=layout, **options)


def go_back(store: ObjectStore, paths: JobPaths, epoch: int) -> RollbackOutcome:
    return run_rollback(store, plan_rollback(store, paths, epoch), sleep=lambda _: None)


def tables_of(store: ObjectStore, pipeline: Pipeline) -> dict[str, Any]:
    found = state_of(store, pipeline)
    del found[""]
    return found


def states(store: ObjectStore, paths: JobPaths) -> dict[int, str | None]:
    return {one.epoch: one.state and one.state.value for one in list_epochs(store, paths)}


# ---- ways in which the newest epoch is damaged ---------------------------------------------------


def _nothing(store: MemoryStore, paths: JobPaths) -> None:
    pass


def _exists_broken(store: MemoryStore, paths: JobPaths) -> None:
    legacy = paths.layout is Layout.LEGACY
    store.put(paths.legacy_metadata(Epoch(8)) if legacy else paths.epoch_record(Epoch(8)), BROKEN)


def _metadata_broken(store: MemoryStore, paths: JobPaths) -> None:
    store.put(_metadata(store, paths), BROKEN)


def _metadata_gone(store: MemoryStore, paths: JobPaths) -> None:
    store.delete_many([_metadata(store, paths)])


def _metadata(store: MemoryStore, paths: JobPaths) -> Any:
    newest = ParquetBackend(store, paths).load(Epoch(8))
    if paths.layout is Layout.PROTOCOL:
        return newest.ref
    return paths.operator_metadata(newest.operators[1].operator, Epoch(8))


def _file_gone(store: MemoryStore, paths: JobPaths) -> None:
    newest = ParquetBackend(store, paths).load(Epoch(8))
    own = [path for path in newest.paths if "checkpoint-0000008/" in path]
    store.delete_many(own[:1])


def _parent_elsewhere(store: MemoryStore, paths: JobPaths) -> None:
    if paths.layout is Layout.PROTOCOL:
        parent_out_of_the_job(Scene(store, paths))


DAMAGES: dict[str, Callable[[MemoryStore, JobPaths], None]] = {
    "none": _nothing,
    "what makes it exist is broken": _exists_broken,
    "metadata broken": _metadata_broken,
    "metadata gone": _metadata_gone,
    "file gone": _file_gone,
    "parent elsewhere": _parent_elsewhere,
}
UNREADABLE = ("what makes it exist is broken", "metadata broken", "metadata gone")
EVERY_DAMAGE = pytest.mark.parametrize("damage", DAMAGES)


def rolled_back(damage: str, layout: Layout, **options: Any) -> tuple[MemoryStore, Pipeline]:
    """A job of eight epochs, the newest damaged, taken back to the fifth."""
    store = copied(_rolled_back(damage, layout, tuple(sorted(options.items()))))
    return store, job(store, layout, **options)


@functools.cache
def _rolled_back(damage: str, layout: Layout, options: tuple[tuple[str, Any], ...]) -> MemoryStore:
    store = written(layout=layout, **dict(options))
    paths = job(store, layout, **dict(options)).paths
    DAMAGES[damage](store, paths)
    go_back(store, paths, 5)
    return store


# ---- the job goes on -----------------------------------------------------------------------------


@LAYOUTS
@EVERY_DAMAGE
def test_job_with_damaged_newest_epoch_ends_as_undisturbed_run(damage: str, layout: Layout) -> None:
    store, pipeline = rolled_back(damage, layout, rows=24)
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    run_pipeline(pipeline, store)
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    undisturbed = written(100, layout, rows=24)
    assert tables_of(store, pipeline) == tables_of(undisturbed, job(undisturbed, layout, rows=24))
    missing = output_of(undisturbed) - output_of(store)
    assert not missing


@LAYOUTS
@pytest.mark.parametrize("damage", [*UNREADABLE, "file gone"])
def test_start_on_damaged_newest_epoch_names_the_rollback_command(
    damage: str, layout: Layout
) -> None:
    store = written(layout=layout)
    pipeline = job(store, layout)
    DAMAGES[damage](store, pipeline.paths)
    with pytest.raises((FormatError, NotFoundError, ProtocolError)) as caught:
        run_pipeline(pipeline, store)
    assert f"arroyo-state rollback {pipeline.paths.root}" in (caught.value.next_step or "")


@LAYOUTS
def test_restored_epoch_has_same_content_and_later_ones_are_shown_as_rolled_back(
    layout: Layout,
) -> None:
    store = written(layout=layout)
    pipeline = job(store, layout)
    backend = ParquetBackend(store, pipeline.paths)
    outcome = go_back(store, pipeline.paths, 5)
    before, after = backend.load(Epoch(5)), backend.load()
    assert (outcome.epoch, after.epoch, after.rolled_back_to) == (9, 9, 5)
    assert after.state is CheckpointState.READY
    assert after.paths == before.paths
    assert states(store, pipeline.paths) == {
        **dict.fromkeys((1, 2, 3, 4, 5, 9), "ready"),
        **dict.fromkeys((6, 7, 8), "rolled back"),
    }
    assert read_pins(store, pipeline.paths).pinned == frozenset()


def test_rolled_back_epoch_can_be_restored_again() -> None:
    store = written()
    pipeline = job(store)
    go_back(store, pipeline.paths, 5)
    outcome = go_back(store, pipeline.paths, 8)
    assert [one.epoch for one in outcome.plan.given_up] == [9]
    assert states(store, pipeline.paths)[9] == "rolled back"
    assert states(store, pipeline.paths)[7] == "ready"
    run_pipeline(pipeline, store, max_epochs=3)
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    assert plan_gc(store, pipeline.paths, ORPHANS).objects == 0


# ---- what is shown before ------------------------------------------------------------------------


def test_plan_shows_epochs_rows_offsets_and_committed_output() -> None:
    store = written(rows_per_epoch=6)
    before = listing(store)
    plan = plan_rollback(store, job(store).paths, 6)
    assert listing(store) == before
    assert [one.epoch for one in plan.given_up] == [7, 8]
    assert plan.rows is not None
    assert plan.rows > 0
    assert (plan.offsets_now, plan.offsets_then) == ({"lines": {"row": 48}}, {"lines": {"row": 36}})
    assert {(one.operator, one.epoch) for one in plan.committed} == {("out", 7), ("out", 8)}
    named = {name for one in plan.committed for name in one.files or ()}
    assert named == {
        info.path.name
        for info in store.list_dir().objects
        if info.path.name.startswith(("0000007", "0000008"))
    }
    assert json.loads(json.dumps(plain_values(plan)))["publishes"] == 9


def test_plan_says_that_a_run_may_be_alive_unless_it_ended_with_its_newest_epoch() -> None:
    store = written()
    pipeline = job(store)
    assert not plan_rollback(store, pipeline.paths, 5).may_be_running
    LocalRun.start(pipeline, store).step()
    plan = plan_rollback(store, pipeline.paths, 5)
    assert plan.may_be_running
    assert f"arroyo-state stop {pipeline.paths.root}" in plan.warnings[0]


def test_newest_unknown_and_unrestorable_epochs_are_refused_with_the_choices() -> None:
    store = written()
    paths = job(store).paths
    store.delete_many(
        [path for path in ParquetBackend(store, paths).load(Epoch(4)).paths if "0000004/" in path]
    )
    assert restorable_epochs(store, paths) == [1, 2, 3]
    with pytest.raises(InputError) as newest:
        plan_rollback(store, paths, 8)
    with pytest.raises(NotFoundError) as unknown:
        plan_rollback(store, paths, 99)
    with pytest.raises(FormatError) as damaged:
        plan_rollback(store, paths, 5)
    for caught in (newest, unknown, damaged):
        assert caught.value.facts["restorable_epochs"] == "1-3"


def test_sdf_service_with_siblings_is_refused() -> None:
    store = written()
    pipeline = job(store)
    backend = ParquetBackend(store, pipeline.paths)
    offset = {"topics": {"in": {"byte": 1}}, "clock_ms": 1, "idle": False, "epochs": {}}
    with JobRunOf(store, pipeline) as run:
        base = run.base
        assert base is not None
        assert base.progress is not None
        offsets = json.dumps({"lines": offset})
        progress = replace(base.progress, offsets=offsets, final=False)
        publish_again(run, base, progress, needs_commit=False)
    run_pipeline(job(store, job="other"), store, max_epochs=1)
    go_back(store, pipeline.paths, 8)  # not an SDF service at epoch 8
    assert backend.load().epoch == 10
    with pytest.raises(ProtocolError, match="SDF service"):
        plan_rollback(store, pipeline.paths, 9)


def publish_again(
    run: JobRun, base: Checkpoint, progress: RunProgress, *, needs_commit: bool
) -> None:
    """Publish the state of an epoch as the next epoch of a run."""
    plan = run.plan(False)
    new = NextEpoch(
        epoch=plan.epoch,
        min_epoch=plan.min_epoch,
        parent_ref=base.ref,
        operators=base.operators,
        progress=progress,
        start_time_micros=base.start_time_micros,
        finish_time_micros=run.backend.clock(),
        needs_commit=needs_commit,
    )
    run.backend.publish_next(new)


class JobRunOf:
    """A run that is closed in the end."""

    def __init__(self, store: ObjectStore, pipeline: Pipeline) -> None:
        self._run = JobRun.start(store, pipeline)

    def __enter__(self) -> JobRun:
        return self._run

    def __exit__(self, *_: object) -> None:
        self._run.close()


# ---- writers -------------------------------------------------------------------------------------


def test_run_that_is_alive_is_fenced_and_publishes_nothing_more() -> None:
    store = written()
    pipeline = job(store)
    alive = LocalRun.start(pipeline, store)
    alive.step()
    go_back(store, pipeline.paths, 5)
    with pytest.raises(ConflictError, match="fenced"):
        alive.step()
    assert ParquetBackend(store, pipeline.paths).load().rolled_back_to == 5


def test_plan_is_refused_once_a_run_has_published_since() -> None:
    store = written()
    pipeline = job(store)
    plan = plan_rollback(store, pipeline.paths, 5)
    run_pipeline(pipeline, store, max_epochs=1)
    before = listing(store)
    with pytest.raises(ConflictError, match="is out of date"):
        run_rollback(store, plan, sleep=lambda _: None)
    changed = {path for path, etag in listing(store).items() if before.get(path) != etag}
    assert all("/leases/" in path for path in changed)


def test_legacy_job_is_refused_while_a_run_holds_its_lease() -> None:
    store = written(layout=Layout.LEGACY)
    pipeline = job(store, Layout.LEGACY)
    with JobRunOf(store, pipeline), pytest.raises(ConflictError):
        go_back(store, pipeline.paths, 5)
    assert go_back(store, pipeline.paths, 5).epoch == 9


def test_subtasks_of_an_older_worker_generation_are_not_reused() -> None:
    store = MemoryStore()
    options: dict[str, Any] = {"rows": 24, "retention_micros": 60_000_000}
    pipeline = job(store, **options)
    alive = LocalRun.start(pipeline, store)
    for _ in range(8):
        alive.step()
    go_back(store, pipeline.paths, 5)
    run = LocalRun.start(pipeline, store)
    run._tasks = alive._tasks  # as a Spark worker would keep them
    while run.step() is not None:
        pass
    undisturbed = written(100, **options)
    assert tables_of(store, pipeline) == tables_of(undisturbed, job(undisturbed, **options))


# ---- retention, gc, compaction -------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("damage", all_but(DAMAGES, ["metadata broken", "file gone"]))
def test_own_retention_goes_on_and_lets_rolled_back_epochs_go(damage: str, layout: Layout) -> None:
    store, pipeline = rolled_back(damage, layout)
    keeping = job(store, layout, keep_epochs=3)
    run_pipeline(keeping, store, max_epochs=16)
    backend = ParquetBackend(store, pipeline.paths)
    expected = range(23, 26) if layout is Layout.PROTOCOL else range(14, 26)
    assert set(backend.every_epoch()) <= set(expected)
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    plan = plan_gc(store, pipeline.paths, ORPHANS, now_micros=_later(store))
    assert plan.kind is PlanKind.ORPHANS


def _later(store: ObjectStore) -> int:
    times = [info.modified_micros or 0 for info in store.list()]
    return max(times) + 10 * DAY_MICROS


@LAYOUTS
@EVERY_DAMAGE
def test_gc_is_never_refused_for_ever(damage: str, layout: Layout) -> None:
    store, pipeline = rolled_back(damage, layout)
    paths = pipeline.paths
    unreadable = damage in UNREADABLE
    if unreadable:
        with pytest.raises(ProtocolError, match="epoch 8, which was rolled back, cannot be read"):
            plan_gc(store, paths, ORPHANS)
    else:
        plan_gc(store, paths, ORPHANS)
    run_pipeline(pipeline, store, max_epochs=12)
    run_gc(store, paths, EXPIRE)
    assert min(ParquetBackend(store, paths).every_epoch()) > 8
    plan_gc(store, paths, ORPHANS)
    assert verify_job(store, paths).verdict.findings == ()


def test_compaction_at_rest_right_behind_a_rollback_keeps_the_lineage() -> None:
    store, pipeline = rolled_back("none", Layout.PROTOCOL, merge_files_after=100)
    settings = CompactionSettings(policy=CompactionPolicy.FULL, min_files=2)
    assert run_compaction(store, pipeline.paths, settings).epoch == 10
    assert states(store, pipeline.paths)[9] == "ready"
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    plan_gc(store, pipeline.paths, ORPHANS)
    run_pipeline(pipeline, store, max_epochs=1)
    assert rollback_done(store, pipeline.paths, 9) is None
    assert rollback_done(store, pipeline.paths, 5) == 9


# ---- who looks on --------------------------------------------------------------------------------


def test_the_sensor_goes_on_behind_an_epoch_whose_commit_is_never_finished() -> None:
    store = written()
    pipeline = job(store)
    cursor = poll_fleet(store, FleetCursor()).cursor
    with contextlib.suppress(Crash), JobRunOf(store, pipeline) as run:
        assert run.base is not None
        assert run.base.progress is not None
        publish_again(run, run.base, run.base.progress, needs_commit=True)
    assert states(store, pipeline.paths)[9] == "committing"
    go_back(store, pipeline.paths, 7)
    news = poll_fleet(store, cursor)
    assert [one.epoch for one in news.jobs[0].checkpoints] == [10]
    rows = states(store, pipeline.paths)
    assert (rows[7], rows[8], rows[9], rows[10]) == ("ready", "rolled back", "rolled back", "ready")
    go_back(store, pipeline.paths, 8)
    rows = states(store, pipeline.paths)
    assert (rows[8], rows[9], rows[10], rows[11]) == (
        "ready",
        "rolled back",
        "rolled back",
        "ready",
    )
