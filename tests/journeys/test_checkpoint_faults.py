"""Every change of the store that a checkpoint makes goes wrong once, in every way it can.

The sink writes to the same store as the state, so the faults reach it too. Whatever happens, the
next start goes on, and the job ends with the state and the output of a run nobody disturbed.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state import MemoryStore
from tests.faulty_stores import Crash, FaultInjecting
from tests.jobs import copied, output_of, run_word_job, state_of, word_job
from tests.shares import Share, dealt_out, share_or_all

pytestmark = pytest.mark.usefixtures("one_at_a_time")

Mode = Literal["before", "after", "partial"]
Ending = tuple[Any, Any]

JOB: dict[str, Any] = {"rows": 10, "rows_per_epoch": 2, "merge_files_after": 2}
"""Five epochs; the fourth merges files and expires epochs."""
TINY: dict[str, Any] = {"rows": 6, "rows_per_epoch": 2, "parallelism": 1, "merge_files_after": 2}
START_CHANGES = 7
"""What a start changes at most: the generation, the fence, a claim, its base, a commit."""


def end_of(store: MemoryStore, options: dict[str, Any] = JOB) -> Ending:
    return state_of(store, word_job(store, **options)), output_of(store)


def run_until(epochs: int, options: dict[str, Any] = JOB) -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, **options, max_epochs=epochs)
    return store


def undisturbed(options: dict[str, Any]) -> Ending:
    store = MemoryStore()
    run_word_job(store, **options)
    return end_of(store, options)


def changes_of(begun: MemoryStore, options: dict[str, Any], max_epochs: int | None = 1) -> int:
    counted = FaultInjecting(copied(begun))
    run_word_job(counted, **options, max_epochs=max_epochs)
    return counted.changes


def disturb(
    store: MemoryStore,
    at: int,
    mode: Mode = "after",
    *,
    crash: bool = True,
    options: dict[str, Any] = JOB,
    max_epochs: int | None = 1,
) -> bool:
    """Run until the fault, or to the end if retention met it. Returns whether there was one."""
    faulty = FaultInjecting(store, fail_at=at, mode=mode, crash=crash)
    with contextlib.suppress(Crash, StorageError):
        run_word_job(faulty, **options, max_epochs=max_epochs)
        assert not crash or faulty.changes < at
    return faulty.changes >= at


@pytest.mark.parametrize(
    ("mode", "crash", "share"),
    dealt_out([("before", False), ("after", False), ("after", True), ("partial", True)], 4),
)
def test_a_fault_at_any_change_of_a_checkpoint_loses_and_doubles_nothing(
    mode: Mode, crash: bool, share: Share
) -> None:
    begun, expected = run_until(3), undisturbed(JOB)
    changes = changes_of(begun, JOB)
    assert changes > 25
    for at in share(range(1, changes + 1)):
        store = copied(begun)
        assert disturb(store, at, mode, crash=crash), at
        run_word_job(store, **JOB)
        assert end_of(store) == expected, f"fault at change {at} of {changes}"


@pytest.mark.parametrize(("dead_starts", "share"), dealt_out([0, 2], 4))
def test_a_crash_at_any_change_of_a_whole_first_run_loses_and_doubles_nothing(
    dead_starts: int, share: Share
) -> None:
    expected = undisturbed(TINY)
    changes = changes_of(MemoryStore(), TINY, None)
    for at in share(range(1, changes + 1)):
        store = MemoryStore()
        assert disturb(store, at, options=TINY, max_epochs=None), at
        for _ in range(dead_starts):
            disturb(store, 1, options=TINY, max_epochs=None)
        run_word_job(store, **TINY)
        assert end_of(store, TINY) == expected, f"crash at change {at} of {changes}"


@share_or_all(3)
def test_a_crash_while_recovering_from_any_crash_loses_and_doubles_nothing(share: Share) -> None:
    begun, expected = run_until(1, TINY), undisturbed(TINY)
    # Before its manifest is written an attempt leaves what the next never sees: one will do.
    changes = changes_of(begun, TINY)
    for at in range(changes - 8, changes + 1):
        crashed = copied(begun)
        assert disturb(crashed, at, options=TINY)
        begin = 2 + at % share.of  # from crash to crash another share
        for again in share(range(begin, START_CHANGES + 1)):
            store = copied(crashed)
            disturb(store, again, options=TINY)
            run_word_job(store, **TINY)
            assert end_of(store, TINY) == expected, f"crash at change {at}, then at {again}"
