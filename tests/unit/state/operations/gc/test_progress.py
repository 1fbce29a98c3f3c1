"""Progress told again while the work says nothing."""

from __future__ import annotations

import threading

from arroyo_dagster.state.operations.gc.progress import heartbeat, no_progress


def test_what_was_said_last_is_said_again_until_the_work_ends() -> None:
    heard: list[int] = []
    enough = threading.Event()

    def tell(state: int) -> None:
        heard.append(state)
        if heard.count(2) == 3:
            enough.set()

    with heartbeat(tell, seconds=0.03) as say:
        say(1)
        say(2)
        assert enough.wait(10)
    after = len(heard)
    assert heard[:2] == [1, 2]
    assert set(heard[2:]) <= {2}
    assert not any(one.name == "arroyo-progress" for one in threading.enumerate())
    assert len(heard) == after


def test_where_nobody_listens_no_thread_is_started() -> None:
    with heartbeat(no_progress) as say:
        say(1)
        assert not any(one.name == "arroyo-progress" for one in threading.enumerate())
