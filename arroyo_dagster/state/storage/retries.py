"""Requests that are repeated because their answer says nothing yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_exponential

_T = TypeVar("_T")


def ask_again(
    ask: Callable[[], _T | None], *, tries: int, pause_seconds: float, growth: float = 2
) -> _T | None:
    """Ask until the answer is not None; None if it is None each time. Errors of `ask` go through.

    Args:
        tries: how often to ask at most.
        pause_seconds: the first pause between two tries; each is `growth` times the one before.
    """
    retrying = Retrying(
        stop=stop_after_attempt(tries),
        wait=wait_exponential(multiplier=pause_seconds, exp_base=growth),
        retry=retry_if_result(lambda answer: answer is None),
        retry_error_callback=lambda state: None,
    )
    return retrying(ask)
