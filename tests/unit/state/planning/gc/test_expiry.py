"""Which epochs expire: every rule that keeps one, alone and at its boundary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import (
    CheckpointState,
    Epoch,
    JobPaths,
    OperatorId,
    PlanKind,
    Retention,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.garbage import EpochRoot
from arroyo_dagster.state.planning.gc.epoch_roots import unreadable_objects
from arroyo_dagster.state.planning.gc.expiry import (
    in_safe_groups,
    plan_expiry,
    plan_own_expiry,
    why_epochs_stay,
)
from arroyo_dagster.state.planning.gc.reachability import metadata_of, records_of
from tests.formats import (
    SKEW_MICROS,
    GcPlan,
    JobCondition,
    JobPins,
    Packed,
    Pin,
    Quarantined,
    Roots,
)
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
            behind = replace(head, finish_time_micros=NOW - ahead, oldest_object_micros=NOW)
            with pytest.raises(ProtocolError, match="the writer's clock is behind"):
                planned(replace(roots, epochs=(behind, *roots.epochs[1:])), micros=3 * HOUR)
        else:
            assert expired(wrong, micros=3 * HOUR) == [1, 2, 3, 4, 5]


def rolled_back(newest: int, to: int, paths: JobPaths = PROTOCOL) -> Roots:
    """Epoch `to` was published again as the newest one, and those between were rolled back."""
    roots = job(newest, paths)
    head = replace(roots.head, rolled_back_to=Epoch(to), parent_ref=roots.epochs[newest - to].ref)
    older = [replace(one, rolled_back=one.epoch > to) for one in roots.epochs[1:]]
    return replace(roots, epochs=(head, *older))


def test_epochs_that_were_rolled_back_are_not_counted_and_the_restored_one_stays() -> None:
    assert expired(rolled_back(10, 4), micros=1) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert expired(rolled_back(10, 8), micros=1) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert planned(rolled_back(10, 4), micros=1).keep_from == 10
    assert expired(rolled_back(10, 4), keep=3) == [1, 2]


def test_rolled_back_epochs_stay_among_the_newest_by_number_where_few_are_left() -> None:
    # The job's own retention has let 5 and all before it expire.
    roots = rolled_back(10, 5)
    few = replace(roots, epochs=roots.epochs[:3])
    assert [one.epoch for one in few.epochs] == [10, 9, 8]
    assert expired(few, keep=3) == []
    assert expired(few, keep=2) == [8]
    assert expired(few, micros=1) == [8, 9]
    # With numbers missing: the two newest that can be read.
    fewer = replace(roots, epochs=roots.epochs[:5:2])
    assert [one.epoch for one in fewer.epochs] == [10, 8, 6]
    assert expired(fewer, keep=3) == expired(fewer, keep=2) == [6]


def test_epoch_that_was_rolled_back_and_cannot_be_read_goes_and_never_stays() -> None:
    roots = rolled_back(10, 4)
    lone = roots.epochs[5]
    by_name = (lone.ref,)
    broken = replace(lone, unreadable="it is cut short", by_name=by_name, files=Packed())
    roots = replace(roots, epochs=(*roots.epochs[:5], broken, *roots.epochs[6:]))
    assert expired(roots, keep=10) == []
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
    with pytest.raises(ProtocolError, match="metadata of epoch 19 is lost"):
        planned(replace(roots, epochs=(roots.head, *roots.epochs[2:])), keep=2, answer=said)
    said = answer(JobCondition.STOPPED, LEGACY, newest_ready_epoch=Epoch(18))
    assert expired(roots, keep=2, answer=said) == [*range(1, 8)]
    # Or it has not been found ready in the store.
    assert expired(replace(job(9), restorable=Epoch(7)), keep=2) == [*range(1, 6)]


@pytest.mark.parametrize(
    ("state", "number", "kept"),
    [
        (CheckpointState.UNCLAIMED, 10, 3),
        (CheckpointState.UNCLAIMED, 9, 8),
        (CheckpointState.ORPHANED, 10, 8),
    ],
)
def test_parent_of_a_claimable_epoch_stays(state: CheckpointState, number: int, kept: int) -> None:
    roots = job(9)
    ahead = epoch_root(PROTOCOL, number, state=state, parent_ref=roots.epochs[6].ref)
    assert planned(replace(roots, attempts=(ahead,)), keep=2).keep_from == kept


def test_ten_epochs_before_the_newest_stay_in_the_legacy_layout() -> None:
    assert expired(job(20, LEGACY), keep=2) == [*range(1, 10)]
    assert expired(job(11, LEGACY), keep=2) == []
    assert expired(job(12, LEGACY), keep=2) == [1]


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


def test_why_epochs_stay_is_said_with_the_first_reason_of_each() -> None:
    def why(roots: Roots, keep: int | None = None, micros: int | None = None) -> str:
        retention = Retention(keep_epochs=keep, keep_micros=micros)
        return why_epochs_stay(roots, retention, now_micros=NOW)

    roots = job(9, pins=(9, 3))
    timeless = replace(roots.epochs[7], written_at_micros=None)
    roots = replace(roots, epochs=(*roots.epochs[:7], timeless, roots.epochs[8]))
    assert why(roots, keep=2, micros=3 * HOUR) == (
        "9 epochs, all needed: 2 newest kept, 2 younger than asked, "
        "3 needed to restore a newer one, 1 pinned, 1 of unknown age"
    )
    assert why(roots, keep=2) == (
        "9 epochs, all needed: 2 newest kept, 6 needed to restore a newer one, 1 pinned"
    )
    assert why(job(12, LEGACY), micros=0) == (
        "12 epochs, all needed: 1 newest kept, 10 of the ten before the newest, "
        "which Arroyo's cleanup reads, 1 needed to restore a newer one"
    )


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


# ---- the job's own retention ---------------------------------------------------------------------


def own(roots: Roots, min_epoch: int) -> list[int]:
    return list(plan_own_expiry(roots, Epoch(min_epoch)).epochs)


def test_own_retention_keeps_the_newest_and_its_parent_whatever_is_asked() -> None:
    assert own(job(9), 9) == own(job(9), 8) == [1, 2, 3, 4, 5, 6, 7]
    assert own(job(1), 1) == []
    assert own(job(9), -4) == []


def test_own_retention_counts_no_epochs_that_were_rolled_back() -> None:
    assert own(rolled_back(10, 4), 8) == [1, 2]
    assert own(rolled_back(10, 4), 9) == [1, 2, 3]


def test_parent_of_the_newest_stays_by_reference_wherever_it_lies() -> None:
    roots = job(9)
    head = replace(roots.head, parent_ref=roots.epochs[6].ref)
    roots = replace(roots, epochs=(head, *roots.epochs[1:]))
    assert expired(roots, keep=2) == own(roots, 8) == [1, 2]
    assert expired(roots, micros=1) == [1, 2]


def test_min_epoch_newer_than_the_newest_is_refused() -> None:
    with pytest.raises(ProtocolError, match="newer than the newest"):
        plan_own_expiry(job(3), Epoch(4))
    assert own(job(3), 3) == [1]


def test_epoch_that_lists_a_file_of_another_job_is_refused() -> None:
    roots = job(9)
    stray = replace(roots.epochs[8], outside=data(LEGACY, 1))
    roots = replace(roots, epochs=(*roots.epochs[:8], stray))
    with pytest.raises(ProtocolError, match="epoch 1 lists a file outside of its job"):
        own(roots, 8)


def test_file_that_another_name_of_one_that_stays_may_mean_stays() -> None:
    roots = job(9)
    shared = data(PROTOCOL, 9)
    other: StatePath = shared.parent / shared.name.upper()
    alias = replace(roots.epochs[8], files=Packed.of_paths([other]))
    roots = replace(roots, epochs=(*roots.epochs[:8], alias))
    assert other not in set(plan_own_expiry(roots, Epoch(8)).data.paths)


def test_what_epochs_in_quarantine_need_stays() -> None:
    aside = Quarantined(name="01-a", needs=Packed.of_paths([data(PROTOCOL, 2)]), moved_at_micros=1)
    roots = replace(job(9), quarantined=(aside,))
    plan = plan_own_expiry(roots, Epoch(8))
    assert list(plan.data.paths) == [data(PROTOCOL, n) for n in (1, 3, 4, 5, 6, 7)]


def test_objects_of_an_unreadable_epoch_by_name_what_makes_it_exist_last() -> None:
    operators = [OperatorId("a"), OperatorId("b")]
    ref = PROTOCOL.manifest(WorkerGeneration(2), Epoch(3))
    record = PROTOCOL.epoch_record(Epoch(3))
    marker = "p/j/generations/2/checkpoints/checkpoint-0000003/committed.json"
    assert unreadable_objects(PROTOCOL, Epoch(3), ref) == (marker, ref, record)
    assert unreadable_objects(PROTOCOL, Epoch(3), None) == (record,)
    assert unreadable_objects(LEGACY, Epoch(3), None, operators) == (
        "j/checkpoints/checkpoint-0000003/operator-a/metadata",
        "j/checkpoints/checkpoint-0000003/operator-b/metadata",
        "j/_arroyo_dagster/commits/epoch-0000003.json",
        "j/checkpoints/checkpoint-0000003/metadata",
    )


@given(
    files=st.lists(st.sets(st.sampled_from("abcdefgh"), max_size=5), min_size=1, max_size=7),
    asked=st.integers(1, 7),
)
def test_kept_epochs_keep_all_their_files(files: list[set[str]], asked: int) -> None:
    roots = job(len(files))
    listed = [[PROTOCOL.root / name for name in sorted(names)] for names in reversed(files)]
    epochs = zip(roots.epochs, listed, strict=True)
    epochs_now = tuple(replace(one, files=Packed.of_paths(some)) for one, some in epochs)
    roots = replace(roots, epochs=epochs_now)
    min_epoch = min(asked, len(files))
    plan = plan_own_expiry(roots, Epoch(min_epoch))
    kept = [one for one in roots.epochs if one.epoch not in plan.epochs]
    assert kept[-1].epoch == plan.keep_from == max(1, min(min_epoch, len(files) - 1))
    assert len(kept) >= min(2, len(files))
    needed = {path for one in kept for path in one.files.paths}
    every = {path for one in roots.epochs for path in one.files.paths}
    assert set(plan.data.paths) == every - needed


def test_operators_of_one_legacy_epoch_go_in_one_request_and_manifests_one_by_one() -> None:
    def of_epoch(number: int) -> list[StatePath]:
        names = (OperatorId("a"), OperatorId("b"))
        operators = [LEGACY.operator_metadata(name, Epoch(number)) for name in names]
        return [*operators, LEGACY.legacy_metadata(Epoch(number))]

    legacy = [*of_epoch(1), *of_epoch(2)]
    groups = list(in_safe_groups(LEGACY, legacy))
    assert groups == [legacy[0:2], [legacy[2]], legacy[3:5], [legacy[5]]]
    assert list(in_safe_groups(LEGACY, legacy[:2])) == [legacy[:2]]
    manifests = [PROTOCOL.manifest(WorkerGeneration(1), Epoch(number)) for number in (1, 2)]
    assert list(in_safe_groups(PROTOCOL, manifests)) == [[one] for one in manifests]
