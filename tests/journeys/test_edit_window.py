"""Edits of a running Arroyo job: it is stopped, edited and started. Whatever goes wrong, and
wherever, no run loads a state that is half edited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster import ArroyoControl, JobPaths, Layout, ObjectStore, WindowLimits
from arroyo_dagster.errors import ConflictError, StorageError
from arroyo_dagster.state.model.maintenance_window import WindowEnd
from arroyo_dagster.state.model.surgery.edits import NewPosition, SetOffsets, SetWatermark
from arroyo_dagster.state.operations.compaction.window_recovery import (
    JobWindowOptions,
    interrupted_windows,
    read_window_record,
)
from arroyo_dagster.state.operations.gc.pins import forget_changes
from arroyo_dagster.state.operations.surgery.execute import run_edit
from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork
from arroyo_dagster.state.operations.surgery.plan import plan_edit
from arroyo_dagster.state.operations.surgery.window import (
    EditWindow,
    PlannableEdit,
    run_edit_window,
)
from arroyo_dagster.state.storage.wrappers import MUTATING
from tests.arroyo_jobs import SECOND, ArroyoJob
from tests.arroyo_server import ModelArroyo, arroyo
from tests.arroyo_windows import deaths, died, recovered
from tests.faulty_stores import FaultInjecting
from tests.gc_jobs import Hiding
from tests.journeys.test_fork import as_forked, taken, two_jobs, with_watermark_of
from tests.journeys.test_surgery import state_of
from tests.shares import LAYOUTS, Share, everywhere
from tests.surgery_jobs import WATERMARK, surgery_job

EVERYWHERE = everywhere("layout")
LATER = SetWatermark(at_micros=WATERMARK + 5 * SECOND)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """A state without the numbers of its epoch, which the stop changes."""
    return {name: (*head[:3], rows, pairs) for name, (head, rows, pairs) in state.items()}


def state(model: ModelArroyo) -> dict[str, Any]:
    return whole(state_of(model.job.store, model.job.paths))


@dataclass
class Starts:
    """What each run of a job has loaded."""

    loaded: list[dict[str, Any]] = field(default_factory=list)
    refuses: Callable[[dict[str, Any]], bool] = lambda state: False

    def __call__(self, job: ArroyoJob) -> bool:
        self.loaded.append(whole(state_of(job.store, job.paths)))
        return self.refuses(self.loaded[-1])


def running(job: ArroyoJob) -> tuple[ModelArroyo, Starts]:
    starts = Starts()
    return ModelArroyo(job, will_not_restore=starts), starts


def options(model: ModelArroyo, **more: Any) -> JobWindowOptions:
    limits = WindowLimits(stop=60, rewrite=600, start=60, quiet=0)
    return JobWindowOptions(limits=limits, clock=model.clock, sleep=model.sleep, **more)


def edit_of(paths: JobPaths, wanted: SetWatermark | SetOffsets) -> PlannableEdit:
    return PlannableEdit(
        paths,
        plan=lambda store, directory: plan_edit(store, paths, directory, wanted),
        run=lambda store, directory, how: run_edit(store, paths, directory, wanted, how),
    )


def window(
    model: ModelArroyo, edit: PlannableEdit, store: ObjectStore | None = None, **more: Any
) -> EditWindow:
    with arroyo(model) as server:
        control = ArroyoControl(server.url)
        return run_edit_window(store or model.job.store, control, edit, options(model, **more))


def later(model: ModelArroyo) -> PlannableEdit:
    return edit_of(model.job.paths, LATER)


def edited(layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state before the edit `LATER`, and after it."""
    model, _ = running(surgery_job(layout))
    before = state(model)
    assert window(model, later(model)).end is WindowEnd.REWRITTEN
    return before, state(model)


# ---- what it does --------------------------------------------------------------------------------


@LAYOUTS
def test_a_running_job_goes_on_from_the_state_of_another_one(layout: Layout) -> None:
    source, job = two_jobs(layout)
    model, starts = running(job)
    theirs, ours = (state_of(one.store, one.paths) for one in (source, job))
    expected = whole(with_watermark_of(as_forked(theirs, ours), theirs))
    fork = PlannableEdit(
        job.paths,
        plan=lambda store, directory: plan_fork(taken(source), store, job.paths, directory),
        run=lambda store, directory, how: run_fork(taken(source), store, job.paths, directory, how),
    )
    outcome = window(model, fork)
    assert outcome.end is WindowEnd.REWRITTEN, outcome
    assert starts.loaded == [expected]
    assert (model.state, model.stop) == ("Running", "none")
    assert read_window_record(job.store, job.paths) is None
    assert 5 < outcome.downtime_seconds < 60


def test_a_job_that_was_stopped_before_is_edited_and_stays_stopped() -> None:
    model, starts = running(surgery_job(Layout.LEGACY))
    before, after = edited(Layout.LEGACY)
    model.stop = "checkpoint"
    model.sleep(60)
    assert state(model) == before
    assert window(model, later(model)).end is WindowEnd.AT_REST
    assert state(model) == after
    assert (model.state, starts.loaded) == ("Stopped", [])


def test_an_edit_that_changes_nothing_does_not_stop_the_job() -> None:
    model, _ = running(surgery_job(Layout.PROTOCOL))
    same = SetOffsets(positions=(NewPosition(partition="5", position="20", relative=False),))
    assert window(model, edit_of(model.job.paths, same)).end is WindowEnd.NOTHING_TO_DO
    assert model.log == []


@LAYOUTS
def test_other_tables_than_before_the_stop_are_not_changed(layout: Layout) -> None:
    model, starts = running(surgery_job(layout, without="window_3"))
    before = state(model)
    edit = later(model)
    seen: list[Any] = []

    def plan(store: ObjectStore, directory: Any) -> Any:
        seen.append(edit.plan(store, directory))
        if len(seen) == 1:
            return plan_edit(
                store,
                model.job.paths,
                directory,
                SetOffsets(positions=(NewPosition(partition="5", position="21"),)),
            )
        return seen[-1]

    outcome = window(model, PlannableEdit(edit.paths, plan, edit.run))
    assert outcome.end is WindowEnd.KEPT
    assert isinstance(outcome.problem, ConflictError)
    assert "only one of the plans before and after the stop" in str(outcome.problem)
    assert starts.loaded == [before]


@LAYOUTS
def test_a_job_that_will_not_run_from_the_edited_state_gets_its_own_back(layout: Layout) -> None:
    before, after = edited(layout)
    model, starts = running(surgery_job(layout))
    starts.refuses = lambda found: found == after
    outcome = window(model, later(model))
    assert outcome.end is WindowEnd.UNDONE
    assert starts.loaded[0] == after
    assert starts.loaded[-1] == before
    assert model.state == "Running"


# ---- it is never started from a state that is half edited ----------------------------------------


def test_an_edit_that_is_published_in_part_is_undone_before_the_start() -> None:
    before, after = edited(Layout.LEGACY)
    last = writes_of_an_edit()
    ends = set()
    for at in range(last - 5, last):
        model, starts = running(surgery_job(Layout.LEGACY))
        lagging = Hiding(model.job.store, lambda path: "/changes/" in path)
        store = FaultInjecting(lagging, fail_at=at, mode="before")
        outcome = window(model, later(model), store)
        ends.add(outcome.end)
        assert all(one in (before, after) for one in starts.loaded), at
        assert model.state == "Running", (at, outcome.problem)
    assert {WindowEnd.UNDONE, WindowEnd.KEPT} & ends


def writes_of_an_edit() -> int:
    """How many changes of the store a window has, until the job is started."""
    model, _ = running(surgery_job(Layout.LEGACY))
    store = FaultInjecting(model.job.store)
    window(model, later(model), store)
    return store.changes


def test_a_job_stays_stopped_while_a_half_published_edit_cannot_be_undone() -> None:
    before, after = edited(Layout.LEGACY)
    stayed = 0
    last = writes_of_an_edit()
    for at in range(last - 7, last, 2):
        model, starts = running(surgery_job(Layout.LEGACY))
        store = _Full(model.job.store, at)
        try:
            outcome = window(model, later(model), store)
        except StorageError:  # before the job was touched
            assert model.log == []
            continue
        if outcome.end is WindowEnd.NOT_STARTED:
            stayed += 1
            assert starts.loaded == []
            assert any("published in part" in step.did for step in outcome.steps)
            model.sleep(600)
            paths = model.job.paths
            cut_off = interrupted_windows(model.job.store, [paths], clock=model.clock)
            assert cut_off == [paths]
            found = recovered(model, options(model))
            assert found is not None
            assert found.end is WindowEnd.RECOVERED, found.problem
        assert all(one in (before, after) for one in starts.loaded), at
        assert model.state == "Running"
    assert stayed > 1


def test_a_job_stays_stopped_while_the_record_that_undoes_its_half_published_edit_is_lost() -> None:
    model, starts = running(surgery_job(Layout.LEGACY))
    store, paths = model.job.store, model.job.paths
    died(
        model,
        lambda store, control: run_edit_window(store, control, later(model), options(model)),
        change=writes_of_an_edit() - 4,
    )
    forget_changes(store, paths, lambda name: True)
    found = recovered(model, options(model))
    assert found is not None
    assert found.end is WindowEnd.NOT_STARTED
    assert "the record that undoes it is lost" in str(found.problem)
    assert starts.loaded == []


class _Full(FaultInjecting):
    """A store that takes no more changes from the k-th one on: a disk that is full."""

    def _is_fault(self, verb: str) -> bool:
        if verb in MUTATING:
            self.changes += 1
        return self._fail_at is not None and verb in MUTATING and self.changes >= self._fail_at


@EVERYWHERE
def test_a_process_that_dies_anywhere_leaves_a_job_that_the_next_look_starts_whole(
    layout: Layout, share: Share
) -> None:
    before, after = edited(layout)

    def dies(model: ModelArroyo, **point: Any) -> tuple[int, int]:
        return died(
            model,
            lambda store, control: run_edit_window(store, control, later(model), options(model)),
            **point,
        )

    requests, changes = dies(running(surgery_job(layout))[0])
    seen = []
    for point in share(list(deaths(requests, changes)), sparse=2):
        model, starts = running(surgery_job(layout))
        dies(model, **point)
        recovered(model, options(model))
        assert recovered(model, options(model)) is None
        assert (model.state, model.stop) == ("Running", "none"), point
        assert all(one in (before, after) for one in starts.loaded), point
        seen += starts.loaded
    assert before in seen or after in seen
