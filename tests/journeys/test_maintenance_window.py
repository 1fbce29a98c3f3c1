"""The maintenance window: whatever goes wrong, and wherever, the job runs again, from the same
rows; and if our process is dead, whoever looks next starts it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    InputError,
    LeaseHeldError,
    StorageError,
)
from arroyo_dagster.state import (
    ArroyoControl,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    Layout,
    ObjectStore,
    ParquetBackend,
    WindowLimits,
    WindowOptions,
    WriteProtected,
    run_window,
    verify_job,
)
from arroyo_dagster.state.operations.compaction import job_window
from arroyo_dagster.state.operations.compaction.maintenance_window import RewriteWindow
from tests.arroyo_jobs import EVENTS, SECOND, ArroyoJob, content, table_rows, window_config
from tests.arroyo_server import Faults, ModelArroyo, arroyo
from tests.arroyo_windows import deaths, died, recovered
from tests.formats import LeftOut, RewriteShard, encode_rows, is_rewritten
from tests.internals import (
    LeaseOptions,
    RewriteTask,
    WindowEnd,
    break_lease,
    controlled_job,
    interrupted_windows,
    lease,
    rewrite_here,
)
from tests.shares import LAYOUTS, Share, everywhere, share_or_all

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
WINDOW = window_config(EVENTS, ["k"], retention=600)
EVERYWHERE = everywhere("layout")
LIMITS = WindowLimits(stop=60, rewrite=600, start=60, quiet=5)


def running(layout: Layout, epochs: int = 4) -> ModelArroyo:
    """A job that has written some epochs, and runs."""
    job = ArroyoJob(layout, watermark_micros=30 * SECOND)
    for at in range(epochs):
        times = [(20 + at + n) * SECOND * 1000 for n in range(4)]
        rows = table_rows(EVENTS, [[f"k{n}" for n in range(4)], [at] * 4, times])
        job.write({("tumbling_1", WINDOW): rows})
    return ModelArroyo(job)


def options(model: ModelArroyo, **more: Any) -> WindowOptions:
    return WindowOptions(
        **{"settings": FULL, "limits": LIMITS, "clock": model.clock, "sleep": model.sleep, **more}
    )


def window(
    model: ModelArroyo, faults: Faults | None = None, store: ObjectStore | None = None, **more: Any
) -> RewriteWindow:
    with arroyo(model, faults) as server:
        return run_window(
            store or model.job.store,
            model.job.paths,
            ArroyoControl(server.url),
            options(model, **more),
        )


@functools.cache
def held_before(layout: Layout) -> Any:
    """What such a job holds before its window."""
    job = running(layout).job
    return content(job.store, job.paths)


def expect_running(model: ModelArroyo, note: str = "") -> None:
    """The job runs, means to, and has what it had."""
    model.sleep(30)
    assert (model.state, model.stop) == ("Running", "none"), note
    assert interrupted_windows(model.job.store, [model.job.paths], clock=model.clock) == [], note
    # What it has in memory shows in its next epoch.
    model.job.write({})
    assert content(model.job.store, model.job.paths) == held_before(model.job.layout), note
    verdict = verify_job(model.job.store, model.job.paths, level=0).verdict
    assert verdict.errors == (), note


# ---- what it does --------------------------------------------------------------------------------


@LAYOUTS
def test_a_window_that_saw_the_job_stop_does_not_wait_for_quiet(layout: Layout) -> None:
    model = running(layout)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        model.sleep(seconds)

    outcome = window(model, sleep=sleep, limits=replace(LIMITS, quiet=60))
    assert outcome.end is WindowEnd.REWRITTEN
    assert max(slept) <= controlled_job.POLL_SECONDS
    assert outcome.downtime_seconds < 60


@LAYOUTS
def test_a_window_of_a_job_that_was_stopped_before_waits_for_quiet(layout: Layout) -> None:
    model = running(layout)
    model.job.write({})
    model.state, model.stop, model.finished_micros = "Stopped", "checkpoint", model.now_micros
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        model.sleep(seconds)

    assert window(model, sleep=sleep, limits=replace(LIMITS, quiet=20)).end is WindowEnd.AT_REST
    assert 15 < max(slept) <= 20


@LAYOUTS
def test_a_running_job_is_stopped_rewritten_verified_and_started(layout: Layout) -> None:
    model = running(layout)
    outcome = window(model)
    assert outcome.end is WindowEnd.REWRITTEN
    assert outcome.problem is None
    assert outcome.started
    assert model.log == [
        *("CheckpointStopping", "Stopping", "Stopped"),
        *("Compiling", "Scheduling", "Running"),
    ]
    assert outcome.plan is not None
    assert outcome.change is not None
    assert outcome.change.published
    assert outcome.change.after.files < outcome.plan.before.files
    assert 5 < outcome.downtime_seconds < 60
    told = [step.did.partition(",")[0].partition(":")[0] for step in outcome.steps]
    assert told == [
        "wrote the window's record; the job runs as 3",
        "requested Arroyo to stop the job",
        "the job's status is Stopped",
        "rewritten",
        "verified at level 2",
        "requested Arroyo to start the job",
        "the job runs",
    ]
    # The run that came up has the rewritten files in memory.
    assert any(is_rewritten(file.path) for file in model.job.files["tumbling_1", "t"])
    expect_running(model)


@LAYOUTS
def test_a_job_with_nothing_to_rewrite_is_not_touched(layout: Layout) -> None:
    model = running(layout, epochs=1)
    assert window(model).end is WindowEnd.NOTHING_TO_DO
    assert model.log == []


@LAYOUTS
def test_a_dry_run_touches_nothing(layout: Layout) -> None:
    model = running(layout)
    with arroyo(model) as server:
        store = WriteProtected(model.job.store)
        control = ArroyoControl(server.url)
        outcome = run_window(store, model.job.paths, control, options(model), dry_run=True)
        assert all(method == "GET" for method, _, _ in server.asked)
    assert outcome.end is WindowEnd.DRY_RUN
    assert outcome.plan is not None
    assert outcome.plan.tables
    assert outcome.plan.why_not is not None
    assert "the job runs" in outcome.plan.why_not


@LAYOUTS
def test_a_job_that_somebody_stopped_is_rewritten_and_stays_stopped(layout: Layout) -> None:
    model = running(layout)
    model.stop = "checkpoint"
    model.sleep(60)
    assert window(model).end is WindowEnd.AT_REST
    assert model.state == "Stopped"
    assert content(model.job.store, model.job.paths) == held_before(model.job.layout)


def test_a_window_that_closes_too_soon_does_not_begin() -> None:
    model = running(Layout.LEGACY)
    with pytest.raises(InputError, match="closes in 60 s") as caught:
        window(model, closes_at_micros=model.now_micros + 60 * SECOND)
    assert "the job was not touched" in str(caught.value)
    assert model.log == []


def test_what_takes_longer_than_the_window_is_given_up_in_time() -> None:
    model = running(Layout.LEGACY)

    def slowly(held: ObjectStore, tasks: Sequence[RewriteTask]) -> Iterable[RewriteShard | LeftOut]:
        for found in rewrite_here(held, tasks):
            model.sleep(400)
            yield found

    closes = model.now_micros + 300 * SECOND
    outcome = window(model, run=slowly, closes_at_micros=closes)
    assert outcome.end is WindowEnd.KEPT
    assert "exceeded its time limit" in str(outcome.problem)
    recovered(model, options(model))  # the lease ran out as well, so the record is still there
    expect_running(model)


@pytest.mark.parametrize("state", ["Compiling", "Scheduling", "Stopping"])
def test_a_job_that_is_changing_is_left_alone(state: str) -> None:
    model = running(Layout.LEGACY)
    model.state, model.due_micros = state, model.now_micros + 10**9
    with pytest.raises(InputError, match=f"this job is {state}"):
        window(model)


def test_the_api_of_another_cluster_is_not_enough() -> None:
    model = running(Layout.PROTOCOL)
    other = ModelArroyo(ArroyoJob(Layout.LEGACY))
    other.job.__class__ = _OtherJob
    with arroyo(other) as server, pytest.raises(ArroyoStateError):
        run_window(model.job.store, model.job.paths, ArroyoControl(server.url), options(model))
    assert model.log == other.log == []


class _OtherJob(ArroyoJob):
    @property
    def paths(self) -> Any:
        return replace(super().paths, job="job_other")


# ---- it is started, whatever happens -------------------------------------------------------------


def test_a_job_that_does_not_stop_runs_on() -> None:
    model = running(Layout.LEGACY)
    model.stuck = {"CheckpointStopping"}
    seen: list[str] = []

    def let_go(step: Any) -> None:
        seen.append(step.did)
        if step.did.startswith("given up"):
            model.stuck = set()

    outcome = window(model, on_step=let_go)
    assert outcome.end is WindowEnd.KEPT
    assert "did not stop within 60 s" in str(outcome.problem)
    recovered(model, options(model))  # the lease ran out as well, so the record is still there
    expect_running(model)


def test_a_job_that_fails_while_it_stops_is_restarted() -> None:
    model = running(Layout.PROTOCOL)
    model.fails = {"CheckpointStopping"}
    outcome = window(model)
    assert outcome.end is WindowEnd.KEPT
    assert "did not stop, its status is Failed: failed in CheckpointStopping" in str(
        outcome.problem
    )
    expect_running(model)


def test_a_job_whose_sources_end_meanwhile_is_finished_and_that_is_said() -> None:
    model = running(Layout.LEGACY)

    def finish(step: Any) -> None:
        if step.did.startswith("requested Arroyo to stop"):
            model._enter("Finished")

    outcome = window(model, on_step=finish)
    assert outcome.end is WindowEnd.KEPT
    assert "its status is Finished" in str(outcome.problem)
    assert interrupted_windows(model.job.store, [model.job.paths], clock=model.clock) == []


@LAYOUTS
def test_a_job_that_will_not_run_from_the_rewritten_state_gets_the_old_one_back(
    layout: Layout,
) -> None:
    model = running(layout)
    model.will_not_restore = lambda job: any(
        is_rewritten(file.path) for files in job.files.values() for file in files
    )
    outcome = window(model)
    assert outcome.end is WindowEnd.UNDONE
    assert "the job failed after its state was changed" in str([step.did for step in outcome.steps])
    assert model.starts == 1
    expect_running(model)


@LAYOUTS
def test_a_rewritten_epoch_that_does_not_pass_is_put_back_before_the_start(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = running(layout)

    def damaged(store: ObjectStore, paths: Any, epoch: Any, level: int) -> None:
        newest = ParquetBackend(model.job.store, paths).load()
        path = next(path for path in newest.paths if is_rewritten(path))
        model.job.store.put(path, encode_rows(table_rows(EVENTS, [[], [], []])))
        return real(store, paths, epoch, level)

    real = job_window.check_restorable
    monkeypatch.setattr(job_window, "check_restorable", damaged)
    outcome = window(model)
    assert outcome.end is WindowEnd.UNDONE
    assert "does not pass" in str(outcome.problem)
    expect_running(model)


def test_a_rewrite_that_hangs_is_left_behind_and_changes_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = running(Layout.LEGACY)
    monkeypatch.setattr(job_window, "_GRACE_SECONDS", 0.2)
    awake: list[bool] = []

    def hang(held: ObjectStore, tasks: Sequence[RewriteTask]) -> Iterator[RewriteShard | LeftOut]:
        time.sleep(0.6)
        awake.append(True)
        yield from rewrite_here(held, tasks)

    limits = replace(LIMITS, rewrite=0.1, quiet=0)
    outcome = window(model, run=hang, limits=limits, sleep=model.sleep, clock=model.clock)
    assert outcome.end is WindowEnd.KEPT
    assert "hangs" in str(outcome.problem)
    deadline = time.monotonic() + 5
    while not awake and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert awake
    expect_running(model)
    assert not any(map(is_rewritten, ParquetBackend(model.job.store, model.job.paths).load().paths))


def test_who_ends_this_process_does_not_leave_the_job_stopped() -> None:
    model = running(Layout.LEGACY)

    def ended(held: ObjectStore, tasks: Sequence[RewriteTask]) -> Iterable[RewriteShard | LeftOut]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        window(model, run=ended)
    model.sleep(60)
    assert model.state == "Running"
    assert (
        recovered(model, options(model)) is not None
    )  # the record is still there, and is taken away
    expect_running(model)


def test_one_window_at_a_time() -> None:
    model = running(Layout.LEGACY)
    paths = model.job.paths
    with lease(
        model.job.store, paths, "another", LeaseOptions(directory=paths.windows, clock=model.clock)
    ):
        with pytest.raises(ConflictError):
            window(model)
        assert interrupted_windows(model.job.store, [paths], clock=model.clock) == []
    assert model.log == []


@LAYOUTS
def test_a_window_that_meets_a_lease_does_not_stop_the_job(layout: Layout) -> None:
    model = running(layout)
    with lease(model.job.store, model.job.paths, "gc", LeaseOptions(clock=model.clock)):
        with pytest.raises(LeaseHeldError, match="gc"):
            window(model)
        with pytest.raises(LeaseHeldError, match="gc"):
            window(model, lease_wait_seconds=20)
    assert model.log == []
    expect_running(model)


@LAYOUTS
def test_a_window_that_waited_for_a_lease_stops_the_job_then(layout: Layout) -> None:
    model = running(layout)
    states_while_held: list[str] = []
    with contextlib.ExitStack() as held:
        held.enter_context(
            lease(model.job.store, model.job.paths, "gc", LeaseOptions(clock=model.clock))
        )
        held.callback(lambda: states_while_held.append(model.state))

        def sleep(seconds: float) -> None:
            held.close()
            model.sleep(seconds)

        assert window(model, sleep=sleep, lease_wait_seconds=65).end is WindowEnd.REWRITTEN
    assert states_while_held == ["Running"]
    expect_running(model)


@LAYOUTS
def test_a_window_whose_lease_is_taken_starts_the_job_again(layout: Layout) -> None:
    model = running(layout)
    store, paths = model.job.store, model.job.paths
    with contextlib.ExitStack() as other:

        def taken(held: ObjectStore, tasks: Sequence[RewriteTask]) -> Any:
            break_lease(store, paths, "maintenance", clock=model.clock, sleep=lambda _: None)
            other.enter_context(lease(store, paths, "gc", LeaseOptions(clock=model.clock)))
            return rewrite_here(held, tasks)

        outcome = window(model, run=taken)
        assert (outcome.end, outcome.started) == (WindowEnd.KEPT, True)
        assert model.log[-1] == "Running"
    expect_running(model)


# ---- the API fails -------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("done", [False, True], ids=["not-done", "done-without-an-answer"])
def test_a_request_that_fails_anywhere_leaves_a_job_that_runs_from_the_same_rows(
    layout: Layout, share: Share, done: bool
) -> None:
    counted = Faults()
    window(running(layout), counted)
    assert counted.asked > 15
    ends = set()
    changes = {at for at, method in enumerate(counted.methods, 1) if method != "GET"}
    others = [at for at in range(1, counted.asked + 1) if at not in changes]
    some = others if share.of == 1 else others[done::2]
    for at in [*changes, *share(some)]:
        model = running(layout)
        with contextlib.suppress(StorageError):  # before the job was touched
            ends.add(window(model, Faults(at=at, done=done)).end)
        expect_running(model, f"request {at}")
    assert ends <= {WindowEnd.REWRITTEN, WindowEnd.KEPT}
    assert WindowEnd.REWRITTEN in ends


@share_or_all(8)
def test_an_api_that_stays_away_is_told_and_the_next_look_starts_the_job(share: Share) -> None:
    counted = Faults()
    window(running(Layout.PROTOCOL), counted)
    for at in share(range(5, counted.asked + 1)):
        model = running(Layout.PROTOCOL)
        outcome = window(model, Faults(at=at, until=10**9))
        assert outcome.problem is not None
        if not outcome.started:
            assert outcome.end is WindowEnd.NOT_STARTED
            paths = model.job.paths
            cut_off = interrupted_windows(model.job.store, [paths], clock=model.clock)
            assert cut_off == [paths]
            found = recovered(model, options(model))
            assert found is not None
            assert found.end is WindowEnd.RECOVERED
        expect_running(model, f"away from request {at}")


# ---- the process dies ----------------------------------------------------------------------------


def dies(model: ModelArroyo, **point: Any) -> tuple[int, int]:
    return died(
        model,
        lambda store, control: run_window(store, model.job.paths, control, options(model)),
        **point,
    )


@EVERYWHERE
def test_a_process_that_dies_at_any_request_or_change_leaves_a_job_that_the_next_look_starts(
    layout: Layout, share: Share
) -> None:
    requests, changes = dies(running(layout))
    assert requests > 15
    assert changes > 8
    left = 0
    for point in share(list(deaths(requests, changes))):
        model = running(layout)
        dies(model, **point)
        model.sleep(120)
        paths = model.job.paths
        if model.state != "Running" or model.stop != "none":
            assert interrupted_windows(model.job.store, [paths], clock=model.clock) == [paths]
            left += 1
        recovered(model, options(model))
        assert recovered(model, options(model)) is None
        expect_running(model, str(point))
    assert left > 3


def test_a_job_that_somebody_started_since_is_left_alone() -> None:
    model = running(Layout.LEGACY)
    dies(model, request=9)
    model.stop = "none"
    model.sleep(60)
    model.stop = "checkpoint"  # and stopped again, on purpose
    model.sleep(60)
    found = recovered(model, options(model))
    assert found is not None
    assert "has been started since" in found.steps[0].did
    assert model.state == "Stopped"
    assert content(model.job.store, model.job.paths) == held_before(model.job.layout)
    assert recovered(model, options(model)) is None


def test_a_record_that_cannot_be_read_counts_as_a_window_that_was_cut_off() -> None:
    model = running(Layout.PROTOCOL)
    model.stop = "checkpoint"
    model.sleep(60)
    store, paths = model.job.store, model.job.paths
    store.put(paths.window, b"{")
    assert interrupted_windows(store, [paths], clock=model.clock)
    # Of a job that was never edited no epoch is read, whatever Arroyo may restore.
    broken = paths.epoch_record(Epoch(9))
    store.put(broken, b"broken")
    recovered(model, options(model))
    store.delete_many([broken])
    expect_running(model)
