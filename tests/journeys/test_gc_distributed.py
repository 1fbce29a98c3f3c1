"""gc whose objects are copied, restored and deleted by workers: killed after any change, with
attempts that were given up and still run, no epoch is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from arroyo_dagster import GcOptions, MemoryStore, run_gc
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.gc import deleting_on_spark
from arroyo_dagster.state.operations.engines import OnItems, Threads
from arroyo_dagster.state.planning.engines import EngineChoice, StepEngine, WorkAmount
from tests.faulty_stores import Crash, FaultInjecting
from tests.fleets import Written
from tests.gc_jobs import KINDS, Clock, begun, expiry, whole, without_ours
from tests.internals import Pace, UndeleteOptions, read_journal, read_pins, run_undelete
from tests.jobs import copied
from tests.shares import Share, dealt_out

pytestmark = pytest.mark.usefixtures("one_at_a_time", "small_batches")


class LateAttempts:
    """An engine that runs each item twice, and once more whenever a later step has run.

    So do workers that were given up because they did not answer.
    """

    distributes = True

    def __init__(self) -> None:
        self.steps: set[str] = set()
        self._late: list[Callable[[], object]] = []

    def choose(
        self, step: str, amount: WorkAmount, *, only_here: str | None = None
    ) -> EngineChoice:
        self.steps.add(step)
        return EngineChoice(step=step, engine=StepEngine.SPARK, reason="a test")

    def run(
        self,
        choice: EngineChoice,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        weights: Sequence[int],
        *,
        threads: Threads = Threads(),  # noqa: B008
        on_items: OnItems = lambda count: None,
    ) -> list[Any]:
        assert len(items) == len(weights)
        for item in items:
            function(item)  # the answer is lost
        results = [function(item) for item in items]
        for attempt in self._late[-20:]:
            with contextlib.suppress(ArroyoStateError):
                attempt()
        self._late += [lambda item=item: function(item) for item in items]  # type: ignore[misc]
        return results


def a_job(kind: str, clock: Clock) -> tuple[MemoryStore, int]:
    if kind == "ours":
        return begun(5, clock, sinks=0, parallelism=1), 5
    store = MemoryStore(clock=clock)
    epochs = 5 if kind == "protocol" else 17  # Arroyo restores the newest eleven
    Written(store, KINDS[kind], start=clock.micros).epochs(epochs)
    return store, epochs


def collected(store: Any, kind: str, clock: Clock, *, quarantine: bool) -> LateAttempts:
    late, paths = LateAttempts(), KINDS[kind]
    said = {} if kind == "ours" else {str(paths.root): "stopped"}
    options = GcOptions(
        quarantine=quarantine,
        clock=clock,
        pace=Pace(in_flight=2, sleep=lambda seconds: None),
        delete=deleting_on_spark(late),  # type: ignore[arg-type]
        items=late,
    )
    run_gc(store, paths, expiry(2, **said), options)
    return late


@pytest.mark.parametrize(("kind", "share"), dealt_out(KINDS, 4))
def test_an_expiry_killed_after_any_change_leaves_every_epoch_that_stays(
    kind: str, share: Share
) -> None:
    clock = Clock()
    start, epochs = a_job(kind, clock)
    counted = FaultInjecting(copied(start, clock=clock, keep_times=True))
    collected(counted, kind, clock, quarantine=False)
    kept = (epochs - 1, epochs)
    for at in share(range(1, counted.changes + 1)):
        store = copied(start, clock=clock, keep_times=True)
        with contextlib.suppress(Crash):
            faulty = FaultInjecting(store, fail_at=at, mode="after", crash=True)
            collected(faulty, kind, clock, quarantine=False)
        whole(store, KINDS[kind], *kept)
        clock.micros += 120_000_000
        collected(store, kind, clock, quarantine=False)
        whole(store, KINDS[kind], *kept)
        entries = list(read_journal(store, KINDS[kind]))
        gone = {one.path for one in entries if one.outcome in ("deleted", "gone")}
        assert not [path for path in gone if store.head(path) is not None]


@pytest.mark.parametrize(("kind", "share"), dealt_out(KINDS, 4))
def test_what_was_quarantined_by_workers_comes_back_whatever_run_was_killed(
    kind: str, share: Share
) -> None:
    clock = Clock()
    paths = KINDS[kind]
    start, epochs = a_job(kind, clock)
    before = without_ours(start)
    counted = FaultInjecting(copied(start, clock=clock, keep_times=True))
    late = collected(counted, kind, clock, quarantine=True)
    assert {"copy to quarantine", "delete"} <= late.steps
    for at in share(range(1, counted.changes + 1)):
        store = copied(start, clock=clock, keep_times=True)
        with contextlib.suppress(Crash):
            faulty = FaultInjecting(store, fail_at=at, mode="after", crash=True)
            collected(faulty, kind, clock, quarantine=True)
        clock.micros += 120_000_000
        collected(store, kind, clock, quarantine=True)
        whole(store, paths, epochs - 1, epochs)
        for name in read_pins(store, paths).quarantines:
            again = LateAttempts()
            options = UndeleteOptions(clock=clock, sleep=clock.seconds, items=again)
            run_undelete(store, paths, name, options)
            assert again.steps <= {"compare with quarantine", "copy from quarantine"}
        assert without_ours(store) == before, f"killed after change {at}"


@pytest.mark.parametrize(("kind", "share"), dealt_out(KINDS, 4))
def test_an_undelete_killed_after_any_change_is_finished_by_the_next(
    kind: str, share: Share
) -> None:
    clock = Clock()
    paths = KINDS[kind]
    start, _ = a_job(kind, clock)
    before = without_ours(start)
    moved = copied(start, clock=clock, keep_times=True)
    collected(moved, kind, clock, quarantine=True)
    (name,) = read_pins(moved, paths).quarantines

    def undelete(store: Any) -> None:
        options = UndeleteOptions(clock=clock, sleep=clock.seconds, items=LateAttempts())
        run_undelete(store, paths, name, options)

    counted = FaultInjecting(copied(moved, clock=clock, keep_times=True))
    undelete(counted)
    for at in share(range(1, counted.changes + 1)):
        store = copied(moved, clock=clock, keep_times=True)
        with contextlib.suppress(Crash):
            undelete(FaultInjecting(store, fail_at=at, mode="after", crash=True))
        clock.micros += 120_000_000
        undelete(store)
        assert without_ours(store) == before, f"killed after change {at}"
