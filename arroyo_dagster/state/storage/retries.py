"""Requests that are repeated until they have a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_exponential

_T = TypeVar("_T")


def ask_again(
    ask: Callable[[], _T | None], *, tries: int, pause_seconds: float, growth: float = 2
) -> _T | None:
    """Call `ask` until it returns a value; None if it never does. Errors of `ask` propagate.

    Args:
        tries: the maximum number of calls.
        pause_seconds: the first pause between two calls; each pause is `growth` times the previous.
    """
    retrying = Retrying(
        stop=stop_after_attempt(tries),
        wait=wait_exponential(multiplier=pause_seconds, exp_base=growth),
        retry=retry_if_result(lambda answer: answer is None),
        retry_error_callback=lambda state: None,
    )
    return retrying(ask)
