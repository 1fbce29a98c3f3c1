"""Wrappers of a store that are slow, fail on request, or die."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state import ObjectStore, StatePath
from tests.stores import MUTATING, DeleteOutcome, Wrapper

T = TypeVar("T")


class Crash(BaseException):
    """A simulated death of the process, which no `except Exception` catches."""


class Slow(Wrapper):
    """A store that takes at least `seconds` for every call.

    Args:
        sleep: waits; a test may advance its own clock instead.
    """

    def __init__(
        self, store: ObjectStore, seconds: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(store)
        self._seconds = seconds
        self._sleep = sleep

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        self._sleep(self._seconds)
        return action()


class Before(Wrapper):
    """A store where something happens before every call.

    Args:
        then: is told the verb and the path; may fail, or wait.
    """

    def __init__(self, store: ObjectStore, then: Callable[[str, str], object]) -> None:
        super().__init__(store)
        self._then = then

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        self._then(verb, path)
        return action()


def once_before(
    store: ObjectStore,
    found: Callable[[str, str], bool],
    then: Callable[[], object],
    *,
    number: int = 1,
) -> Before:
    """A store where something happens before one call: the n-th that is looked for."""
    left = [number]

    def told(verb: str, path: str) -> None:
        if left[0] and found(verb, path):
            left[0] -= 1
            if not left[0]:
                then()

    return Before(store, told)


class FaultInjecting(Wrapper):
    """A store whose k-th change fails.

    put, create, copy and delete_many count as changes. After a failure the store works again. After
    a crash every method raises `Crash`, because a dead process does nothing more.

    Args:
        fail_at: the number of the change, from 1; None for none, to count `changes` only.
        mode: "before": nothing is done. "after": the change is done, but the call fails.
            "partial": delete_many deletes the first half of its paths; the other methods are
            atomic and do nothing.
        crash: raise `Crash` instead of `error`.
        error: the error to raise; by default a retryable StorageError.
    """

    def __init__(
        self,
        store: ObjectStore,
        fail_at: int | None = None,
        *,
        mode: Literal["before", "after", "partial"] = "before",
        crash: bool = False,
        error: Exception | None = None,
    ) -> None:
        super().__init__(store)
        self.changes = 0
        self.crashed = False
        self._fail_at = fail_at
        self._mode = mode
        self._crash = crash
        self._error = error

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects; with a partial fault only half of them."""
        doomed = tuple(paths)
        if self._mode == "partial" and self.changes + 1 == self._fail_at and not self.crashed:
            self.inner.delete_many(doomed[: len(doomed) // 2])
        return super().delete_many(doomed)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if not self._is_fault(verb):
            return action()
        if self._mode == "after":
            with contextlib.suppress(ArroyoStateError):  # the fault comes all the same
                action()
        if self._crash:
            self.crashed = True
            raise Crash(f"{verb} {path}")
        raise self._error or StorageError(f"injected fault in {verb}", url=self.url, path=path)

    def _is_fault(self, verb: str) -> bool:
        with self._lock:
            if self.crashed:
                raise Crash(f"{verb} after the crash")
            if verb not in MUTATING:
                return False
            self.changes += 1
            return self.changes == self._fail_at
