"""Interrupts that are put off come in the end, and a second one comes at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from arroyo_dagster.state.metadata.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Those of a process in which nobody else, such as Spark, has set any."""
    before = [
        (signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)),
        (signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_DFL)),
    ]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def interrupted(times: int) -> list[str]:
    """What is done of a block that gets so many interrupts."""
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("the first half")
            if times > 1:
                signal.raise_signal(signal.SIGINT)
            done.append("the second half")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return done


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    assert interrupted(1) == ["the first half", "the second half"]


def test_a_second_interrupt_comes_through() -> None:
    assert interrupted(2) == ["the first half"]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone() -> None:
    ended = []

    def work() -> None:
        with uninterrupted():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
