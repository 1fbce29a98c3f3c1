"""Windows of a model of Arroyo: a process that dies in one, and the look that follows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from arroyo_dagster.state import ArroyoControl, ObjectStore, WindowOutcome, recover_window
from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions
from tests.arroyo_server import DyingControl, ModelArroyo, arroyo
from tests.faulty_stores import Crash, FaultInjecting

Run = Callable[[ObjectStore, ArroyoControl], Any]


def died(
    model: ModelArroyo,
    run: Run,
    *,
    request: int | None = None,
    change: int | None = None,
    mode: Literal["before", "after"] = "before",
) -> tuple[int, int]:
    """A window whose process dies at a request or a change of the store; how many there were."""
    store = FaultInjecting(model.job.store, fail_at=change, mode=mode, crash=True)
    with arroyo(model) as server:
        control = DyingControl(server.url, dies_at=request, dead=lambda: store.crashed)
        if request is not None:
            inner = control._count

            def count(at: int | None, dead: Callable[[], bool]) -> None:
                try:
                    inner(at, dead)
                except Crash:
                    store.crashed = True
                    raise

            control._count = count  # type: ignore[method-assign]
        with contextlib.suppress(Crash):
            run(store, control)
    return control.requests, store.changes


def deaths(requests: int, changes: int) -> Iterator[dict[str, Any]]:
    """Every point at which `died` can be asked to die."""
    yield from ({"request": at} for at in range(1, requests + 1))
    for at in range(1, changes + 1):
        yield from ({"change": at, "mode": mode} for mode in ("before", "after"))


def recovered(model: ModelArroyo, options: JobWindowOptions) -> WindowOutcome[Any, Any] | None:
    """What the next look does, once the lease of whoever died has run out."""
    model.sleep(120)
    with arroyo(model) as server:
        found = recover_window(model.job.store, model.job.paths, ArroyoControl(server.url), options)
    model.sleep(30)
    return found
