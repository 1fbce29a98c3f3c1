"""A request is repeated while its answer says nothing, and no longer."""

from __future__ import annotations

import pytest

from arroyo_dagster.state.storage.retries import ask_again


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


def test_the_first_answer_counts_even_if_it_is_false(pauses: list[float]) -> None:
    answers = iter([None, None, False, True])
    assert ask_again(lambda: next(answers), tries=5, pause_seconds=0.5) is False
    assert pauses == [0.5, 1.0]
    assert next(answers) is True


def test_nothing_is_answered_once_the_tries_are_over(pauses: list[float]) -> None:
    assert ask_again(lambda: None, tries=4, pause_seconds=0.1, growth=1) is None
    assert pauses == [0.1, 0.1, 0.1]


def test_an_error_is_not_tried_again(pauses: list[float]) -> None:
    def fail() -> bool | None:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        ask_again(fail, tries=4, pause_seconds=0.1)
    assert pauses == []
