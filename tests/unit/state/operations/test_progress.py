"""Progress: the time it adds, what is left, and reports repeated while the work is silent."""

from __future__ import annotations

import threading

from arroyo_dagster.state import Progress
from arroyo_dagster.state.model.progress import no_progress
from arroyo_dagster.state.operations.progress import heartbeat, timed


def progress(done: int, total: int | None = None, seconds: float = 0.0) -> Progress:
    return Progress(step="listed objects", done=done, total=total, seconds=seconds)


def test_the_last_report_is_repeated_until_the_work_ends() -> None:
    reports: list[Progress] = []
    enough = threading.Event()

    def report(state: Progress) -> None:
        reports.append(state)
        if reports.count(progress(2)) == 3:
            enough.set()

    with heartbeat(report, seconds=0.03) as on_progress:
        on_progress(progress(1))
        on_progress(progress(2))
        assert enough.wait(10)
    after = len(reports)
    assert reports[:2] == [progress(1), progress(2)]
    assert set(reports[2:]) <= {progress(2)}
    assert not any(one.name == "arroyo-progress" for one in threading.enumerate())
    assert len(reports) == after


def test_reports_carry_the_seconds_since_the_operation_began() -> None:
    reports: list[Progress] = []
    times = iter([100.0, 103.0, 109.0])
    on_progress = timed(reports.append, lambda: next(times))
    on_progress(progress(1, 4))
    on_progress(progress(4, 4))
    assert [one.seconds for one in reports] == [3.0, 9.0]
    assert [one.seconds_left for one in reports] == [9.0, 0.0]
    assert timed(no_progress) is no_progress


def test_the_remaining_time_is_unknown_until_the_speed_predicts_it() -> None:
    assert progress(10, None, 5.0).seconds_left is None
    assert progress(1, 100, 5.0).seconds_left is None
    assert progress(2, 100, 5.0).seconds_left == 245.0
    assert progress(0, 0).share == 1.0
    assert progress(0, 0).seconds_left == 0.0
