"""Maintenance that gives way: what counts as slower checkpoints, and what compaction and gc do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import (
    CompactionOptions,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    GcRequest,
    PlanKind,
    Retention,
    plan_compaction,
    run_compaction,
    run_gc,
)
from arroyo_dagster.state.operations import slowdown
from arroyo_dagster.state.operations.slowdown import CheckpointWatch, last_slowdown
from arroyo_dagster.state.planning.slowdown import EpochTime, slowdown_between, slowdown_since
from tests.faulty_stores import once_before
from tests.internals import LeaseOptions, Pace, lease
from tests.jobs import copied, copy_into, written_by_word_job
from tests.orchestration.results import JOB, PATHS

SECOND = 1_000_000
FULL = CompactionSettings(policy=CompactionPolicy.FULL)


def times(*seconds: float, gap: float = 10.0) -> list[EpochTime]:
    """Epochs 1, 2… of these durations, one every `gap` seconds."""
    return [
        EpochTime(
            epoch=Epoch(number),
            start_micros=int(number * gap * SECOND),
            finish_micros=int((number * gap + duration) * SECOND),
        )
        for number, duration in enumerate(seconds, 1)
    ]


def test_checkpoints_that_take_longer_than_the_ratio_are_a_slowdown() -> None:
    found = slowdown_since(times(1, 1, 1, 4, 5), Epoch(3), 2.0)
    assert found is not None
    assert found.ratio == 4.5
    assert str(found) == ("checkpoints took 4.5 s in place of 1.0 s (4.5 times) at epochs 4 to 5")
    assert slowdown_since(times(1, 1, 1, 4, 5), Epoch(3), 5.0) is None


@pytest.mark.parametrize(
    "seconds", [(1, 1, 9, 9), (1, 1, 1, 9), (0.01, 0.01, 0.01, 0.5, 0.5)], ids=str
)
def test_too_few_epochs_and_small_times_conclude_nothing(seconds: tuple[float, ...]) -> None:
    newest = Epoch(2 if len(seconds) == 4 and seconds[2] == 9 else 3)
    assert slowdown_since(times(*seconds), newest, 2.0) is None


def test_the_time_of_a_maintenance_says_which_epochs_it_slowed() -> None:
    found = times(1, 1, 1, 5, 5, 1)
    assert slowdown_between(found, 39 * SECOND, 56 * SECOND, 2.0) is not None
    assert slowdown_between(found, 59 * SECOND, 62 * SECOND, 2.0) is None
    assert slowdown_between(found, 0, 5 * SECOND, 2.0) is None


def test_a_ratio_of_one_or_less_is_refused() -> None:
    with pytest.raises(InputError, match="above 1"):
        CompactionSettings(max_checkpoint_slowdown=1.0)


# ---- on a job ------------------------------------------------------------------------------------


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The seconds that each epoch's checkpoint took; a test changes them while it goes on."""
    found = dict.fromkeys(range(1, 100), 1.0)
    read = slowdown.epoch_times

    def taken(backend: Any, epochs: Any) -> list[EpochTime]:
        return [
            replace(one, start_micros=one.finish_micros - int(found[one.epoch] * SECOND))
            for one in read(backend, epochs)
        ]

    monkeypatch.setattr(slowdown, "epoch_times", taken)
    monkeypatch.setattr(slowdown, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(
        CheckpointWatch.__init__,
        "__kwdefaults__",
        {**(CheckpointWatch.__init__.__kwdefaults__ or {}), "every_seconds": 0.0},
    )
    return found


def killed_job(epochs: int) -> Any:
    """A job that a run was killed of, so that it counts as running."""
    return written_by_word_job(killed=True, max_epochs=epochs, **JOB)


def test_compaction_stops_and_publishes_what_is_done(durations: dict[int, float]) -> None:
    store, later = killed_job(8), killed_job(11)
    durations.update(dict.fromkeys((9, 10, 11), 9.0))
    told: list[str] = []

    def writer(outcome: Any, left: int) -> None:  # the job goes on while it is compacted
        for info in later.list():
            store.create(info.path, later.read(info.path))

    planned = len(plan_compaction(store, PATHS, FULL).merges)
    assert planned > 2
    options = CompactionOptions(on_merge=writer, on_lease=told.append)
    outcome = run_compaction(store, PATHS, FULL, options)
    assert outcome.published == "record"
    assert len(outcome.merges) == len(outcome.plan.merges) == 1
    left = [one.reason for one in outcome.plan.left_out if "stopped, since" in one.reason]
    assert len(left) == planned - 1
    assert "checkpoints took 9.0 s in place of 1.0 s (9.0 times) at epochs 9 to 11" in left[0]
    assert f"{planned - 1} merges are left out" in told[0]


def test_job_slowed_down_before_gets_one_merge(durations: dict[int, float]) -> None:
    store = killed_job(8)
    begun = [one.finish_micros for one in epoch_times_of(store)][4]
    clock = [begun]
    slow = copied(store, clock=lambda: clock[0], keep_times=True)
    with lease(slow, PATHS, "before", LeaseOptions(clock=lambda: clock[0])):
        clock[0] += 3600 * SECOND
    assert last_slowdown(slow, PATHS, 2.0) is None
    durations.update(dict.fromkeys((5, 6, 7, 8), 7.0))
    found = last_slowdown(slow, PATHS, 2.0)
    assert found is not None
    plan = plan_compaction(slow, PATHS, FULL)
    assert len(plan.merges) == 1
    assert any(
        one.reason.startswith("deferred, since checkpoints took 7.0 s in place of 1.0 s")
        for one in plan.left_out
    )
    more = replace(FULL, max_checkpoint_slowdown=10.0)
    assert len(plan_compaction(slow, PATHS, more).merges) > 1


def epoch_times_of(store: Any) -> list[EpochTime]:
    from arroyo_dagster.state import ParquetBackend

    backend = ParquetBackend(store, PATHS)
    return slowdown.epoch_times(backend, backend.epochs())


def test_gc_pauses_while_checkpoints_are_slower(durations: dict[int, float]) -> None:
    store, later = killed_job(8), killed_job(11)
    durations.update(dict.fromkeys((9, 10, 11), 9.0))
    told: list[str] = []
    pauses: list[float] = []

    def delete(held: Any, batches: Any) -> Any:
        for info in later.list():
            store.create(info.path, later.read(info.path))
        return [held.delete_many(batch) for batch in batches]

    options = GcOptions(pace=Pace(sleep=pauses.append), on_lease=told.append, delete=delete)
    asked = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=2))
    assert run_gc(store, PATHS, asked, options).done
    assert [one for one in told if one.startswith("deletes more slowly, since checkpoints took")]
    assert pauses


# ---- an epoch that expires while it is read ------------------------------------------------------


def test_a_plan_is_made_again_where_its_epoch_expired_meanwhile() -> None:
    store, later = killed_job(8), killed_job(11)

    def go_on_and_expire() -> None:
        copy_into(store, later)
        run_gc(store, PATHS, GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=2)))
        gone = {info.path for info in store.list()} - {info.path for info in later.list()}
        store.delete_many([one for one in gone if "/table-" in one])

    changing = once_before(
        store, lambda verb, path: verb == "head" and "/table-" in path, go_on_and_expire
    )
    assert plan_compaction(changing, PATHS, FULL).epoch == 11
