"""What is referenced, and what is refused because it does not add up: one fact at a time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import (
    CheckpointState,
    Epoch,
    JobPaths,
    OperatorId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.checkpoints import LostObject
from arroyo_dagster.state.model.garbage import MARGIN_MICROS, Root
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.planning.gc.reachability import (
    check_aliases,
    check_nothing_lost,
    check_roots,
    epoch_directories,
    kept_beside,
    lost_objects,
    metadata_of,
    nested_root,
    prove,
    records_of,
    referenced_by,
    written_with,
)
from tests.formats import JobCondition, JobPins, Packed, Pin, Quarantined, Roots, StoredObject
from tests.unit.state.planning.gc.test_orphans import (
    HEAD_BEGAN,
    LEGACY,
    PROTOCOL,
    answer,
    data,
    epoch_root,
    roots_of,
)


def chain(
    paths: JobPaths, *numbers: int, pins: tuple[int, ...] = (), managed: bool = True
) -> Roots:
    pinned = tuple(Pin(epoch=Epoch(one), owner="o", pinned_at_micros=1) for one in pins)
    epochs = tuple(epoch_root(paths, number, managed=managed) for number in numbers)
    return roots_of(paths, managed=managed, epochs=epochs, job_pins=JobPins(pins=pinned))


def refused(roots: Roots, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        check_roots(roots)


@pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
def test_epochs_that_repeat_turn_back_or_leave_a_gap_are_refused(paths: JobPaths) -> None:
    check_roots(chain(paths, 9, 8, 7))
    refused(chain(paths), "no epoch")
    refused(chain(paths, 9, 9, 8), "is out of order:")
    refused(chain(paths, 9, 8, 9), "is out of order:")
    refused(chain(paths, 9, 8, 6), "unexplained gap")


def test_gap_is_explained_by_a_pin_behind_it_only() -> None:
    check_roots(chain(PROTOCOL, 9, 8, 5, pins=(5,)))
    check_roots(chain(PROTOCOL, 9, 8, 5, 4, pins=(5,)))
    refused(chain(PROTOCOL, 9, 8, 6, pins=(5,)), "the pinned epoch 5 does not exist")
    released = Pin(epoch=Epoch(4), owner="o", pinned_at_micros=1, released=True)
    roots = replace(chain(PROTOCOL, 9, 8, 5), job_pins=JobPins(pins=(released,)))
    refused(roots, "unexplained gap")
    refused(chain(PROTOCOL, 9, 8, 5, managed=False), "unexplained gap")


def test_gap_of_an_arroyo_legacy_job_is_one_only_where_nothing_lies_between() -> None:
    roots = chain(LEGACY, 9, 8, 5, managed=False)
    check_roots(roots)
    for number, whole in ((5, True), (6, False), (7, False), (8, True)):
        left = epoch_root(LEGACY, number, state=CheckpointState.UNCLAIMED, managed=False)
        between = replace(roots, attempts=(left,))
        if whole:
            check_roots(between)
        else:
            refused(between, "unexplained gap")
    # What lies below the `min_epoch` of the newest epoch was left by a cleanup that died.
    head = epoch_root(LEGACY, 9, min_epoch=Epoch(7), managed=False)
    left = epoch_root(LEGACY, 6, state=CheckpointState.UNCLAIMED, managed=False)
    check_roots(replace(roots, epochs=(head, *roots.epochs[1:]), attempts=(left,)))


def test_ready_attempt_that_nothing_leads_to_is_refused() -> None:
    ready = epoch_root(PROTOCOL, 3, state=CheckpointState.READY)
    refused(replace(chain(PROTOCOL, 9, 8), attempts=(ready,)), "epoch 3 exists, but no later")


# ---- lost metadata -------------------------------------------------------------------------------

STOPPED = answer(JobCondition.STOPPED)
METADATA = {number: LEGACY.legacy_metadata(Epoch(number)) for number in range(21)}
MANIFESTS = {number: PROTOCOL.manifest(WorkerGeneration(2), Epoch(number)) for number in range(21)}


def changed(roots: Roots, number: int, **changes: Any) -> Roots:
    """The same roots with another epoch of this number."""
    epochs = (replace(e, **changes) if e.epoch == number else e for e in roots.epochs)
    return replace(roots, epochs=tuple(epochs))


def gone(paths: JobPaths, number: int, *numbers: int, managed: bool = False) -> Roots:
    """Epochs of which one lacks an object that lists files, or says which one it is."""
    name = OperatorId("o"), Epoch(number)
    path = paths.operator_metadata(*name) if paths is LEGACY else paths.epoch_record(name[1])
    return changed(chain(paths, *numbers, managed=managed), number, gone=(path,))


ARROYO = chain(LEGACY, 9, 8, 7, managed=False)
IN_CHAIN = chain(PROTOCOL, 9, 8, 7, managed=False)
IN_CHAIN = changed(IN_CHAIN, 9, parent_ref=MANIFESTS[8])
IN_CHAIN = changed(IN_CHAIN, 8, parent_ref=MANIFESTS[7])
BEGUN = gone(LEGACY, 12, *range(20, 11, -1), 10)  # the cleanup has begun with epoch 12
WRITTEN = ("000", "000-compacted", f"000-ext-{'0' * 16}")  # by a subtask, and by merges
FILES = Packed.of_paths([data(LEGACY, 8 - n, name=name) for n, name in enumerate(WRITTEN)])
FILES = Packed.of_paths([*FILES.paths, data(LEGACY, 9)])
CUT = (LostObject(Epoch(7), METADATA[7], "it was cut"),)


@pytest.mark.parametrize(
    ("roots", "said", "expected"),
    [
        (ARROYO, STOPPED, []),
        # The job's controller names an epoch as ready.
        (ARROYO, answer(JobCondition.STOPPED, newest_ready_epoch=Epoch(9)), []),
        (ARROYO, answer(JobCondition.STOPPED, newest_ready_epoch=Epoch(10)), [10]),
        (ARROYO, answer(JobCondition.RUNNING, newest_ready_epoch=Epoch(10)), []),
        (IN_CHAIN, answer(JobCondition.STOPPED, newest_ready_epoch=Epoch(10)), []),
        # No cleanup removes an epoch between others.
        (chain(LEGACY, 9, 7, managed=False), STOPPED, [8]),
        (chain(LEGACY, 9, 7, managed=False), None, []),
        (chain(LEGACY, 9, 7), STOPPED, []),
        (chain(LEGACY, 9, 7, managed=False, pins=(7,)), STOPPED, []),
        (changed(chain(LEGACY, 9, managed=False), 9, files=FILES), STOPPED, [8]),
        # No cleanup has reached the object: Arroyo keeps epochs before the newest, as does gc.
        (gone(LEGACY, 8, 9, 8, 7), STOPPED, [8]),
        (gone(LEGACY, 5, 9, 8, 7, 6, 5), STOPPED, [5]),
        (gone(LEGACY, 4, 9, 8, 7, 6, 5, 4), STOPPED, []),
        (gone(LEGACY, 4, 9, 8, 7, 6, 5, 4), None, [4]),
        (gone(LEGACY, 4, 9, 8, 7, 6, 5, 4, managed=True), STOPPED, [4]),
        (BEGUN, STOPPED, [12, 11]),
        (replace(BEGUN, job_pins=chain(LEGACY, pins=(10,)).job_pins), STOPPED, []),
        (gone(PROTOCOL, 8, 9, 8, 7, managed=True), None, [8]),
        (gone(PROTOCOL, 7, 9, 8, 7, managed=True), None, []),
        (gone(PROTOCOL, 7, 9, 8, 7), STOPPED, [7]),
        (
            replace(gone(PROTOCOL, 7, 9, 8, 7), job_pins=JobPins(expired_below=Epoch(8))),
            STOPPED,
            [],
        ),
        # The end of the chain.
        (IN_CHAIN, STOPPED, []),
        (changed(IN_CHAIN, 7, parent_ref=MANIFESTS[6]), STOPPED, [6]),
        (changed(IN_CHAIN, 7, parent_ref=MANIFESTS[1]), STOPPED, [1]),
        (changed(IN_CHAIN, 7, parent_ref=MANIFESTS[0]), STOPPED, []),
        (changed(IN_CHAIN, 7, parent_ref=StatePath("p/j/notes")), STOPPED, []),
        (changed(chain(PROTOCOL, 9, 5, managed=False), 9, parent_ref=MANIFESTS[6]), STOPPED, [6]),
        (changed(chain(PROTOCOL, 9), 9, parent_ref=MANIFESTS[8]), None, []),
        (replace(IN_CHAIN, lost=MANIFESTS[10], cut=CUT), STOPPED, [10, 7]),
        (replace(IN_CHAIN, lost=StatePath("p/j/notes")), STOPPED, [9]),
        # What it says of its sources was cut off.
        (changed(chain(PROTOCOL, 9, 8, 7), 8, managed=False), None, [8]),
        (changed(chain(PROTOCOL, 9, 8, 7), 9, managed=False), None, [9]),
        (changed(chain(PROTOCOL, 9, 8, 7, 6), 6, managed=False), None, []),
        (changed(chain(PROTOCOL, 9, 8), 8, managed=False), None, []),
        (replace(gone(LEGACY, 8, 9, 8, 7), cut=CUT), STOPPED, [8, 7]),
    ],
)
def test_gc_refuses_where_metadata_is_lost_that_no_cleanup_has_reached(
    roots: Roots, said: JobAnswer | None, expected: list[int]
) -> None:
    lost = lost_objects(roots, said)
    assert [one.epoch for one in lost] == expected
    assert all(
        one.reason and (f"{one.epoch:07}" in one.path or one.path == roots.lost) for one in lost
    )
    with pytest.raises(ProtocolError) if lost else nullcontext() as error:
        check_nothing_lost(roots, said)
    if error is not None:
        assert error.value.facts["path"] == lost[0].path


def test_parent_of_a_pinned_epoch_outlives_newer_ones_too() -> None:
    roots = chain(PROTOCOL, 9, 8, 5, 4, 3, pins=(5,))
    assert kept_beside(changed(roots, 5, parent_ref=MANIFESTS[4])) == {5, 4}


def directories(
    *epochs: tuple[int, int | None], **changes: Any
) -> list[tuple[int, list[int], bool]]:
    """Of each epoch the directories that it may have written, and whether another run may have.

    Args:
        epochs: their numbers, with those of the directories of the files that they list.
    """
    paths = changes.pop("paths", LEGACY)
    roots = chain(paths, *dict(epochs), managed=False)
    for number, written in epochs:
        files = [] if written is None else [data(paths, written)]
        roots = changed(roots, number, files=Packed.of_paths(files), **changes)
    found = list(epoch_directories(roots))
    return [
        (
            one.epoch,
            [number for of, number, _ in found if of is one],
            any(shared for of, _, shared in found if of is one),
        )
        for one in roots.epochs
    ]


@pytest.mark.parametrize(
    ("epochs", "changes", "expected"),
    [
        ([(9, 9), (8, 8)], {"paths": PROTOCOL}, [(9, [9], False), (8, [8], False)]),
        ([(9, 9), (8, 8)], {"managed": True}, [(9, [9], False), (8, [8], False)]),
        ([(9, 9), (8, 8)], {}, [(9, [9], False), (8, [8], True)]),
        ([(9, 9), (8, 5)], {}, [(9, [9], False), (8, [5, 8], True)]),
        # A run that ignored the state began with epoch 7, 8 or 2.
        ([(9, 3), (8, 2), (7, 1)], {}, [(9, [3, 9], True), (8, [2, 8], True), (7, [1, 7], True)]),
        ([(9, 2), (8, 1), (7, 7)], {}, [(9, [2, 9], True), (8, [1, 8], True), (7, [7], True)]),
        ([(9, 8), (8, 7)], {}, [(9, [8, 9], True), (8, [7, 8], True)]),
        ([(8, 8)], {"min_epoch": Epoch(7)}, [(8, [1, 8], True)]),
        ([(2, 2)], {}, [(2, [1, 2], True)]),
        ([(1, 1)], {"min_epoch": Epoch(0)}, [(1, [1], False)]),
        # Their lists are cut.
        ([(9, None), (8, 8)], {}, [(9, [9], False), (8, [8], True)]),
        ([(9, None)], {}, [(9, [9], True)]),
    ],
)
def test_directories_of_an_epoch_follow_from_the_two_newest(
    epochs: list[tuple[int, int | None]], changes: dict[str, Any], expected: list[Any]
) -> None:
    assert directories(*epochs, **changes) == expected


@pytest.mark.parametrize(
    ("modified", "by", "within"),
    [
        (None, None, False),
        (HEAD_BEGAN - MARGIN_MICROS - 1, None, False),
        (HEAD_BEGAN - MARGIN_MICROS, None, True),
        (HEAD_BEGAN + 5 + MARGIN_MICROS, None, True),  # the clocks of store and job may differ
        (HEAD_BEGAN + 6 + MARGIN_MICROS, None, False),
        (HEAD_BEGAN + 12, 7, True),
        (HEAD_BEGAN + 12, 6, False),  # another run wrote it, after the metadata of this epoch
        (HEAD_BEGAN - MARGIN_MICROS, 0, True),
        (HEAD_BEGAN - MARGIN_MICROS - 1, 0, False),
        (None, 0, False),
    ],
)
def test_object_is_of_the_epoch_during_which_it_was_written(
    modified: int | None, by: int | None, within: bool
) -> None:
    """`by`: microseconds after its end, when its metadata was written."""
    epoch, stored = epoch_root(LEGACY, 9), StoredObject(data(LEGACY, 9), 1, modified)
    written_by = None if by is None else epoch.finish_time_micros + by
    assert written_with(epoch, stored, written_by) is within


# ---- names ---------------------------------------------------------------------------------------


def test_file_outside_of_the_job_is_refused() -> None:
    out = epoch_root(PROTOCOL, 9, outside=StatePath("other/job/table-t-000"))
    refused(roots_of(PROTOCOL, epochs=(out,)), "outside of its job")


@pytest.mark.parametrize(
    ("below", "nested"),
    [
        ("current-generation.json", False),
        ("j2/current-generation.json", True),
        ("generations/1/current-generation.json", True),
        ("generations/1/checkpoints/checkpoint-0000001/checkpoint-manifest.pb", False),
        ("j2/generations/1/checkpoints/checkpoint-0000001/checkpoint-manifest.pb", True),
        ("j2/checkpoints/checkpoint-0000001/metadata", True),
        ("other/1/checkpoints/checkpoint-0000001/metadata", True),
        ("generations/checkpoints/checkpoint-0000001/metadata", True),
        ("generations/1/checkpoints/checkpoint-0000001/operator-a/checkpoints/checkpoint-1", False),
        ("generations/1/checkpoints/notes.txt", False),
        ("j2/checkpoints", False),
        ("j2/checkpoints/notes.txt", False),
        ("j2/other/checkpoint-0000001/metadata", False),
        ("notes.txt", False),
    ],
)
def test_objects_of_a_job_within_the_job_are_told_from_its_own(below: str, nested: bool) -> None:
    assert nested_root(PROTOCOL, f"{PROTOCOL.root}/{below}") is nested


def test_checkpoints_of_the_legacy_layout_are_nested_in_a_protocol_job_only() -> None:
    name = "checkpoints/checkpoint-0000001/metadata"
    assert nested_root(PROTOCOL, f"{PROTOCOL.root}/{name}")
    assert not nested_root(LEGACY, f"{LEGACY.root}/{name}")


def test_objects_of_an_epoch_by_name() -> None:
    operators = ((OperatorId("a"), 2), (OperatorId("b"), 1))
    one = epoch_root(PROTOCOL, 3, operators=operators, needs_commit=True)
    base = "p/j/generations/2/checkpoints/checkpoint-0000003"
    subtasks = [f"{base}/operator-{name}.metadata" for name in ("a-0", "a-1", "b-0")]
    ends = [f"{base}/committed.json", "p/j/epochs/epoch-0000003.record"]
    assert list(records_of(PROTOCOL, one)) == [*subtasks, *ends]
    assert list(metadata_of(PROTOCOL, one)) == [f"{base}/checkpoint-manifest.pb"]
    arroyo = replace(one, managed=False, needs_commit=False)
    assert list(records_of(PROTOCOL, arroyo)) == ends[1:]
    old = epoch_root(LEGACY, 3, operators=operators, needs_commit=True)
    base = "j/checkpoints/checkpoint-0000003"
    subtasks = [f"{base}/operator-{name}.metadata" for name in ("a-0", "a-1", "b-0")]
    note = "j/_arroyo_dagster/commits/epoch-0000003.json"
    assert list(records_of(LEGACY, old)) == [*subtasks, note]
    assert list(records_of(LEGACY, replace(old, needs_commit=False))) == subtasks
    assert list(records_of(LEGACY, replace(old, managed=False))) == []
    metadata = [f"{base}/operator-a/metadata", f"{base}/operator-b/metadata", f"{base}/metadata"]
    assert list(metadata_of(LEGACY, old)) == metadata


def test_compactions_and_quarantines_refer_to_files_too() -> None:
    files = {name: StatePath(f"p/j/{name}/table-t-000") for name in "abc"}
    aside = Quarantined(name="q", needs=Packed.of_paths([files["c"]]), moved_at_micros=1)
    roots = roots_of(
        PROTOCOL,
        epochs=(epoch_root(PROTOCOL, 9, files["a"]),),
        compactions={StatePath("p/j/r.json"): Packed.of_paths([files["b"]])},
        quarantined=(aside,),
    )
    found = referenced_by(roots, roots.epochs)
    assert [name for name, path in files.items() if path in found] == ["a", "b", "c"]
    for name in "abc":
        below = referenced_by(roots, roots.epochs, f"p/j/{name}/")
        assert [one for one, path in files.items() if path in below] == [name]


def test_proof_says_what_was_read_and_who_said_what_the_job_does() -> None:
    read = tuple(Root(path=StatePath(f"p/j/{name}"), digest="d") for name in "bca")
    roots = roots_of(PROTOCOL, more=read)
    found = referenced_by(roots, roots.epochs)
    said = answer(JobCondition.STOPPED, run_id=2)
    proof = prove(roots, found, said, listed=12)
    assert (proof.epochs, proof.referenced, proof.digest) == (3, 3, found.hexdigest)
    assert (proof.head, proof.worker_generation, proof.run_id) == (roots.head.ref, 2, 2)
    assert [root.path for root in proof.roots] == ["p/j/a", "p/j/b", "p/j/c"]
    assert (proof.condition, proof.listed) == ("stopped (s)", 12)
    nobody = prove(replace(roots, epochs=()), found)
    assert (nobody.head, nobody.run_id, nobody.condition) == (None, None, None)


@pytest.mark.parametrize("where", ["epoch", "attempt", "listing"])
def test_foreign_name_that_may_be_a_second_name_of_an_object_is_refused(where: str) -> None:
    path = data(PROTOCOL, 6)
    copy = StatePath(path.replace("generations/2/", "Generations/02/"))
    roots = roots_of(PROTOCOL)
    known: list[StoredObject] = []
    if where == "epoch":
        roots = replace(roots, epochs=(*roots.epochs, epoch_root(PROTOCOL, 6, path)))
    elif where == "attempt":
        roots = replace(roots, attempts=(epoch_root(PROTOCOL, 6, path),))
    else:
        known = [StoredObject(path)]
    check_aliases(roots, Packed(), known)
    check_aliases(roots, Packed.of_paths([StatePath("p/j/notes.txt")]), known)
    others = [data(PROTOCOL, 5), path]  # of an operator whose id holds a slash: foreign, and listed
    check_aliases(roots, Packed.of_paths(others), known)
    with pytest.raises(ProtocolError, match="may be a second name of") as error:
        check_aliases(roots, Packed.of_paths([*others[:1], copy]), known)
    assert f"{copy} may be a second name of {path}" in error.value.message
    assert error.value.facts == {"job": PROTOCOL.root, "path": copy}
