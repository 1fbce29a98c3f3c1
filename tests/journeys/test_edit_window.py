"""Edits of a running Arroyo job: it is stopped, edited and started. Whatever goes wrong, and
wherever, no run loads a state that is half edited. An edited watermark says which windows are never
emitted, or emitted again, and is refused where a join of windows fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import (
    ArroyoControl,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    WindowLimits,
    cli,
    configure,
)
from arroyo_dagster.errors import ConflictError, StorageError
from arroyo_dagster.state.operations.compaction.window_recovery import (
    JobWindowOptions,
    read_window_record,
)
from arroyo_dagster.state.operations.surgery.window import (
    EditWindow,
    PlannableEdit,
    run_edit_window,
)
from tests.arroyo_jobs import EVENTS, SECOND, ArroyoJob, join_config, table_rows, window_config
from tests.arroyo_server import ModelArroyo, arroyo
from tests.arroyo_windows import deaths, died, recovered
from tests.compat.arroyo import unpack
from tests.faulty_stores import FaultInjecting
from tests.formats import NewPosition, SetOffsets, SetWatermark, iso_micros
from tests.gc_jobs import Hiding
from tests.internals import (
    ExpressionWatermarkState,
    WindowEnd,
    forget_changes,
    interrupted_windows,
    plan_edit,
    plan_fork,
    run_edit,
    run_fork,
)
from tests.jobs import listing
from tests.journeys.test_fork import as_forked, taken, two_jobs, with_watermark_of
from tests.journeys.test_surgery import state_of
from tests.programs import program_database
from tests.shares import LAYOUTS, Share, everywhere
from tests.stores import MUTATING
from tests.surgery_jobs import BEGAN, GENERATOR, NANOS, WATERMARK, SurgeryJob, surgery_job

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


@functools.cache
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


@functools.cache
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


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack("flights", tmp_path_factory.mktemp("flights"))


def edit(url: str, job: str, at: str, *more: str) -> Result:
    words = ["edit", "watermark", job, at, "--assume", f"{job}=stopped", "--url", url, *more]
    return CliRunner().invoke(cli.main, words)


QUIET = ("--quiet", "0")
LATE, EARLY = "2013-01-05T04:00:00Z", "2013-01-04T20:00:00Z"


@pytest.mark.parametrize(
    ("job", "at", "expected"),
    [
        # Of the windows from 2 and 3 o'clock that of 3 o'clock is emitted: a restore loads it.
        ("hourly_departures", LATE, "never seen: tumbling_4: 1 of 2 open windows are never"),
        # Of those that end from 3:00 to 5:30 the ones until 4:00 are skipped.
        ("busiest_routes", LATE, "never seen: sliding_window_4: 3 of 6 open windows, by the slide"),
        ("aircraft_sessions", LATE, "never seen: SessionWindow<21600s>: 93 of 352 open windows"),
        ("aircraft_sessions", LATE, "93 of 352 open windows are never emitted\n"),
        ("busiest_routes", EARLY, "seen twice: sliding_window_4: 13 windows that were emitted are"),
        ("busiest_routes", EARLY, "emitted once more, without new rows"),
        ("aircraft_sessions", EARLY, "seen twice: SessionWindow<21600s>: 262 windows that were"),
    ],
)
def test_the_plan_counts_windows_by_operator(
    flights: str, job: str, at: str, expected: str
) -> None:
    found = edit(flights, job, at)
    assert found.exit_code == 0, found.stderr
    assert expected in found.stdout


def windowed(name: str, *, waiting: bool) -> SurgeryJob:
    """A job whose windows, which end 70 to 86 s after `BEGAN`, are joined.

    Args:
        waiting: the join holds a row of a window that the other side has not emitted.
    """
    job = SurgeryJob(
        Layout.LEGACY,
        parallelism=1,
        store=MemoryStore(name),
        watermark_micros=WATERMARK,
        job="job_x",
        early=("watermark_2",),
        stateless=("tumbling_3", "join_4"),
    )
    reached = ExpressionWatermarkState(WATERMARK * 1000, WATERMARK * 1000)
    job.keep("watermark_2", GENERATOR, {0: reached})
    times = [BEGAN * 1000 + (30 + 4 * n) * NANOS for n in range(5)]
    rows = table_rows(EVENTS, [[f"k{n}" for n in range(5)], list(range(5)), times])
    tables = {("tumbling_3", window_config(EVENTS, ["k"], retention=40)): rows}
    if waiting:
        late = table_rows(EVENTS, [["k1"], [1], [BEGAN * 1000 + 64 * NANOS]])
        tables["join_4", join_config(EVENTS, ["k"], retention=0)] = late
    job.write(tables)
    return job


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (70, "passes the end of 1 open windows, and join_4 joins windows"),
        (66, "passes 1 waiting rows, and join_4 joins windows"),
        (63, None),
        (40, None),
    ],
)
def test_a_watermark_at_which_a_join_of_windows_fails_is_refused(
    seconds: int, expected: str | None
) -> None:
    job = windowed("joined-windows", waiting=True)
    was = listing(job.store)
    found = edit(job.store.url, "job_x", iso_micros(BEGAN + seconds * SECOND), "--yes", *QUIET)
    configure(None)
    if expected is None:
        assert "watermark done" in found.stdout, found.stderr
    else:
        assert (found.exit_code, listing(job.store)) == (1, was)
        assert expected in found.stderr


@pytest.mark.parametrize(
    ("kind", "code"), [(None, 1), ("InstantJoin", 1), ("Join", 0)], ids=["unknown", "windows", "no"]
)
def test_a_join_without_rows_is_known_from_the_program(
    kind: str | None, code: int, tmp_path: Path
) -> None:
    job = windowed("join-without-rows", waiting=False)
    more = []
    if kind is not None:
        nodes = [("watermark_2", "ExpressionWatermark"), ("tumbling_3", "TumblingWindowAggregate")]
        program_database(tmp_path / "db.sqlite", {"job_x": [*nodes, ("join_4", kind)]})
        more = ["--arroyo-db", str(tmp_path / "db.sqlite")]
    found = edit(job.store.url, "job_x", iso_micros(BEGAN + 70 * SECOND), *more)
    configure(None)
    assert found.exit_code == code, found.stderr
    if kind is None:
        assert "pass --arroyo-db" in found.stderr
