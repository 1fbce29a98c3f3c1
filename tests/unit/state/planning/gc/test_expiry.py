"""Which epochs expire: every rule that keeps one, alone and at its boundary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.garbage import (
    SKEW_MICROS,
    EpochRoot,
    GcPlan,
    JobPins,
    Pin,
    PlanKind,
    Retention,
    Roots,
)
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import Packed
from arroyo_dagster.state.planning.gc.expiry import plan_expiry
from arroyo_dagster.state.planning.gc.reachability import metadata_of, records_of
from arroyo_dagster.state.planning.gc.retention import behind_pinned, oldest_kept
from tests.unit.state.planning.gc.test_orphans import (
    LEGACY,
    NOW,
    PROTOCOL,
    answer,
    data,
    epoch_root,
    roots_of,
)

HOUR = 3_600_000_000


def job(
    newest: int, paths: JobPaths = PROTOCOL, *, pins: tuple[int, ...] = (), **more: Any
) -> Roots:
    """Epochs 1 to `newest`; epoch n was finished `newest - n` hours ago, and lists its own file."""
    epochs: list[EpochRoot] = []
    for number in range(1, newest + 1):
        time = NOW - (newest - number) * HOUR
        parent = epochs[0].ref if epochs and paths is PROTOCOL else None
        names = ("start_time", "finish_time", "written_at", "oldest_object")
        times = {f"{name}_micros": time for name in names}
        managed = more.get("managed", True)
        one = epoch_root(
            paths, number, data(paths, number), parent_ref=parent, managed=managed, **times
        )
        epochs.insert(0, one)
    pinned = tuple(Pin(epoch=Epoch(one), owner="o", pinned_at_micros=1) for one in pins)
    return replace(roots_of(paths, **more), epochs=tuple(epochs), job_pins=JobPins(pins=pinned))


def expired(roots: Roots, **asked: Any) -> list[int]:
    return list(planned(roots, **asked).epochs)


def planned(
    roots: Roots, keep: int | None = None, micros: int | None = None, **more: Any
) -> GcPlan:
    retention = Retention(keep_epochs=keep, keep_micros=micros)
    return plan_expiry(roots, retention, now_micros=NOW, **more)


def test_count_keeps_the_newest() -> None:
    assert expired(job(9), keep=3) == [1, 2, 3, 4, 5, 6]
    assert expired(job(9), keep=9) == []
    assert expired(job(3), keep=20) == []


def test_age_keeps_what_is_as_old_at_most() -> None:
    assert expired(job(9), micros=3 * HOUR) == [1, 2, 3, 4, 5]
    assert expired(job(9), micros=3 * HOUR - 1) == [1, 2, 3, 4, 5, 6]
    assert expired(job(9), micros=100 * HOUR) == []


def test_an_epoch_stays_if_either_rule_keeps_it() -> None:
    assert expired(job(9), keep=6, micros=2 * HOUR) == [1, 2, 3]
    assert expired(job(9), keep=2, micros=5 * HOUR) == [1, 2, 3]


def test_epoch_without_a_time_stays_unless_it_is_half_gone() -> None:
    roots = job(9)

    def third(**changes: Any) -> Roots:
        one = replace(roots.epochs[6], written_at_micros=None, **changes)
        return replace(roots, epochs=(*roots.epochs[:6], one, *roots.epochs[7:]))

    plan = planned(third(), micros=3 * HOUR)
    assert (list(plan.epochs), plan.stays) == ([1, 2], {"no_time": (1, 0)})
    half = planned(third(gone=(roots.epochs[6].ref,)), micros=3 * HOUR)
    assert (list(half.epochs), half.stays) == ([1, 2, 3, 4, 5], {})
    assert planned(third(), keep=8).stays == {}  # a count asks for no times
    assert planned(roots, micros=3 * HOUR).stays == {}


def test_age_is_refused_while_the_clocks_disagree_and_a_count_is_not() -> None:
    roots = job(9)
    times = {"written_at_micros": None, "oldest_object_micros": None}
    for ahead in (SKEW_MICROS, SKEW_MICROS + 1):
        head = replace(roots.head, finish_time_micros=NOW + ahead, **times)
        wrong = replace(roots, epochs=(head, *roots.epochs[1:]))
        assert expired(wrong, keep=3) == [1, 2, 3, 4, 5, 6]
        if ahead > SKEW_MICROS:
            with pytest.raises(ProtocolError, match="the writer's clock is ahead"):
                planned(wrong, micros=3 * HOUR)
        else:
            assert expired(wrong, micros=3 * HOUR) == [1, 2, 3, 4, 5]


def rolled_back(newest: int, to: int) -> Roots:
    """Epoch `to` was published again as the newest one, and those between were rolled back."""
    roots = job(newest)
    head = replace(roots.head, rolled_back_to=Epoch(to), parent_ref=roots.epochs[newest - to].ref)
    older = [replace(one, rolled_back=one.epoch > to) for one in roots.epochs[1:]]
    return replace(roots, epochs=(head, *older))


def test_epochs_that_were_rolled_back_are_not_counted_and_the_restored_one_stays() -> None:
    assert expired(rolled_back(10, 4), micros=1) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert expired(rolled_back(10, 8), micros=1) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert planned(rolled_back(10, 4), micros=1).keep_from == 10
    assert expired(rolled_back(10, 4), keep=3) == [1, 2]


def test_rolled_back_epochs_stay_among_the_newest_by_number_where_few_are_left() -> None:
    roots = rolled_back(10, 8)
    # The job's own retention has let 8 and all before it expire.
    few = replace(roots, epochs=roots.epochs[:2])
    assert [one.epoch for one in few.epochs] == [10, 9]
    assert expired(few, keep=3) == []
    assert expired(few, micros=1) == [9]


def test_epoch_that_was_rolled_back_and_cannot_be_read_goes_and_never_stays() -> None:
    roots = rolled_back(10, 4)
    lone = roots.epochs[5]
    by_name = (lone.ref,)
    broken = replace(lone, unreadable="it is cut short", by_name=by_name, files=Packed())
    roots = replace(roots, epochs=(*roots.epochs[:5], broken, *roots.epochs[6:]))
    plan = planned(roots, micros=1)
    assert 5 in plan.epochs
    assert set(by_name) <= set(plan.metadata.paths)
    with pytest.raises(ProtocolError, match="epoch 5, which was rolled back, cannot be") as error:
        planned(roots, keep=3)
    assert error.value.facts == {"job": PROTOCOL.root, "epoch": 5, "path": lone.ref}


def test_the_newest_and_its_parent_stay_whatever_is_asked() -> None:
    assert expired(job(9), micros=1) == [1, 2, 3, 4, 5, 6, 7]


def test_what_a_stopped_job_of_arroyo_s_will_be_restored_from_stays_with_its_parent() -> None:
    """Its server may name an epoch before the newest."""
    roots = job(20, LEGACY, managed=False)
    said = answer(JobCondition.STOPPED, LEGACY, newest_ready_epoch=Epoch(20))
    assert expired(roots, keep=2, answer=said) == [*range(1, 10)]
    said = answer(JobCondition.STOPPED, LEGACY, newest_ready_epoch=Epoch(18))
    assert expired(roots, keep=2, answer=said) == [*range(1, 8)]


def test_ten_epochs_before_the_newest_stay_in_the_legacy_layout() -> None:
    assert expired(job(20, LEGACY), keep=2) == [*range(1, 10)]
    assert expired(job(11, LEGACY), keep=2) == []
    assert expired(job(12, LEGACY), keep=2) == [1]
    assert oldest_kept([Epoch(20), Epoch(19)], Epoch(19), LEGACY.layout) == 10
    assert oldest_kept([Epoch(20), Epoch(19)], Epoch(19), PROTOCOL.layout) == 19


def test_epochs_that_came_to_exist_while_the_job_was_listed_stay() -> None:
    assert expired(job(9), keep=2, listed_from=Epoch(5)) == [1, 2, 3, 4]
    assert expired(job(9), keep=5, listed_from=Epoch(8)) == [1, 2, 3, 4]
    assert planned(job(9), keep=2, listed_from=Epoch(5)).keep_from == 5


def test_pinned_epochs_stay_and_the_metadata_of_their_parents() -> None:
    roots = job(9, pins=(3,))
    plan = planned(roots, keep=2)
    assert plan.epochs == (1, 4, 5, 6, 7)  # of 2 the metadata stays, and it has not gone
    assert data(PROTOCOL, 2) in set(plan.data.paths)
    assert data(PROTOCOL, 3) not in set(plan.data.paths)
    # The parent of a pinned one that is still young, too: it grows old, and then it is too late.
    young = job(9, pins=(8,))
    assert 7 not in planned(young, keep=2).epochs


def test_a_running_job_of_arroyo_s_is_refused() -> None:
    roots = job(20, managed=False)
    with pytest.raises(ProtocolError, match="Arroyo expires them itself"):
        planned(roots, keep=2, answer=answer(JobCondition.RUNNING))
    with pytest.raises(ProtocolError, match="unknown"):
        planned(roots, keep=2)
    stopped = planned(roots, keep=2, answer=answer(JobCondition.STOPPED))
    assert stopped.epochs
    assert stopped.proof.condition == "stopped (s)"


def test_epoch_that_is_to_stay_and_is_not_whole_is_refused() -> None:
    roots = job(9)
    broken = replace(roots.epochs[1], gone=(roots.epochs[1].ref,))
    with pytest.raises(ProtocolError, match="epoch 8 is to be kept"):
        planned(replace(roots, epochs=(roots.epochs[0], broken, *roots.epochs[2:])), keep=2)
    old = replace(roots.epochs[8], gone=(roots.epochs[8].ref,))
    assert planned(replace(roots, epochs=(*roots.epochs[:8], old)), keep=2).epochs


@pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
def test_plan_names_all_objects_of_what_goes_oldest_first(paths: JobPaths) -> None:
    roots = job(20, paths)
    plan = planned(roots, keep=11)
    going = [one for one in reversed(roots.epochs) if one.epoch <= 9]
    assert list(plan.epochs) == [one.epoch for one in going]
    assert list(plan.data.paths) == [data(paths, one.epoch) for one in going]
    assert list(plan.records.paths) == [p for one in going for p in records_of(paths, one)]
    assert list(plan.metadata.paths) == [p for one in going for p in metadata_of(paths, one)]
    assert (plan.kind, plan.paths, plan.made_at_micros) == (PlanKind.EXPIRE, paths, NOW)
    assert plan.rule == {"keep_epochs": 11, "keep_micros": None}
    assert (plan.keep_from, plan.proof.referenced) == (10, 11)


def test_epochs_left_behind_pinned_ones_are_not_counted() -> None:
    def behind(epochs: list[int], *pinned: int) -> tuple[int, ...]:
        return behind_pinned([Epoch(one) for one in epochs], {Epoch(one) for one in pinned})

    assert behind([1, 2, 3]) == (1, 2, 3)
    assert behind([1, 2, 5, 6]) == (1, 2, 5, 6)
    assert behind([1, 2, 5, 6], 2) == (5, 6)
    assert behind([1, 2, 4, 5], 2) == (4, 5)
    assert behind([1, 2, 5, 6], 1) == (1, 2, 5, 6)
    assert behind([1, 2, 3], 1, 2) == (1, 2, 3)
    assert behind([2, 5, 8], 2, 5) == (8,)
    assert behind([7]) == (7,)
