"""Each condition alone keeps what nothing refers to: arroyo-state.md 9.8, one by one."""

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
    JobId,
    JobPaths,
    OperatorId,
    PipelineId,
    PlanKind,
    Retention,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.garbage import DAY_MICROS, GRACE_MICROS, EpochRoot, Root
from arroyo_dagster.state.model.job_facts import JobAnswer, merge_answers
from arroyo_dagster.state.model.layout import staged_name
from arroyo_dagster.state.planning.gc.expiry import plan_expiry
from arroyo_dagster.state.planning.gc.orphans import (
    Reason,
    judge,
    judge_below,
    plan_orphans,
    reason_of,
    standing_of,
)
from arroyo_dagster.state.planning.restore.recovery import marker_path
from tests.formats import (
    SKEW_MICROS,
    JobCondition,
    JobFacts,
    ObjectKind,
    Packed,
    Quarantined,
    Roots,
    SourceAnswer,
    StoredObject,
    object_name,
)

PROTOCOL = JobPaths(JobId("j"), PipelineId("p"))
LEGACY = JobPaths(JobId("j"))
NOW = 1_800_000_000_000_000
HEAD_BEGAN = NOW - DAY_MICROS
OLD = NOW - 10 * DAY_MICROS


def data(paths: JobPaths, epoch: int, generation: int = 2, name: str = "000-x") -> StatePath:
    number = WorkerGeneration(generation) if paths.pipeline else None
    directory = paths.operator(OperatorId("o"), Epoch(epoch), number)
    return directory / f"table-t-{name}"


def epoch_root(paths: JobPaths, epoch: int, *files: StatePath, **changes: Any) -> EpochRoot:
    number = changes.pop("generation", 2)
    generation = WorkerGeneration(number) if paths.pipeline else None
    ref = (
        paths.manifest(generation, Epoch(epoch))
        if generation
        else paths.legacy_metadata(Epoch(epoch))
    )
    found = EpochRoot(
        epoch=Epoch(epoch),
        worker_generation=generation,
        ref=ref,
        parent_ref=None,
        state=CheckpointState.READY,
        min_epoch=Epoch(1),
        start_time_micros=HEAD_BEGAN,
        finish_time_micros=HEAD_BEGAN + 5,
        written_at_micros=HEAD_BEGAN + 10,
        oldest_object_micros=HEAD_BEGAN + 10,
        needs_commit=False,
        operators=((OperatorId("o"), 1),),
        managed=True,
        files=Packed.of_paths(files),
    )
    return replace(found, **changes)


def roots_of(paths: JobPaths, **changes: Any) -> Roots:
    """A job at epoch 9 of generation 2, which went on from epoch 5 of generation 1."""
    managed = changes.pop("managed", True)
    epochs = tuple(
        epoch_root(paths, number, data(paths, number), managed=managed) for number in (9, 8, 7)
    )
    found = Roots(
        paths=paths,
        worker_generation=WorkerGeneration(2) if paths.pipeline else None,
        resolved_from=WorkerGeneration(2) if paths.pipeline else None,
        restored=PROTOCOL.manifest(WorkerGeneration(1), Epoch(5)) if paths.pipeline else None,
        epochs=epochs,
    )
    return replace(found, **changes)


def answer(condition: JobCondition, paths: JobPaths = PROTOCOL, **known: Any) -> JobAnswer:
    facts = JobFacts(job=paths.job, source="s", condition=condition, **known)
    return merge_answers(paths, [SourceAnswer(source="s", facts=facts)])


def reason(roots: Roots, path: StatePath, modified: int | None = OLD, **said: Any) -> Reason:
    standing = standing_of(
        roots,
        [StoredObject(roots.head.ref, 1, HEAD_BEGAN + 10)],
        now_micros=NOW,
        grace_micros=said.pop("grace", GRACE_MICROS),
        answer=said.pop("answer", None),
    )
    return reason_of(standing, StoredObject(path, 1, modified), object_name(roots.paths, path))


@pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
def test_what_fulfils_every_condition_goes(paths: JobPaths) -> None:
    assert reason(roots_of(paths), data(paths, 3, 1)) is Reason.ORPHAN
    assert reason(roots_of(paths), data(paths, 6)) is Reason.ORPHAN


@pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
def test_each_condition_alone_keeps_a_file(paths: JobPaths) -> None:
    roots = roots_of(paths)
    assert reason(roots, data(paths, 7)) is Reason.REFERENCED
    assert reason(roots, data(paths, 6), NOW - GRACE_MICROS + 1) is Reason.YOUNG
    assert reason(roots, data(paths, 6), None) is Reason.NO_TIME
    assert reason(roots, data(paths, 6), 0) is Reason.NO_TIME
    young = {"grace": 3_600_000_000}
    assert reason(roots, data(paths, 6), HEAD_BEGAN, **young) is Reason.IN_FLIGHT
    assert reason(roots, data(paths, 6), HEAD_BEGAN - 59_000_000, **young) is Reason.IN_FLIGHT
    assert reason(roots, data(paths, 6), HEAD_BEGAN - 61_000_000, **young) is Reason.ORPHAN
    for epoch in (9, 10, 11):
        assert reason(roots, data(paths, epoch, name="001-y")) is Reason.MAY_COME_AGAIN


def test_a_clock_of_the_writer_that_is_ahead_does_not_make_a_file_older() -> None:
    head = epoch_root(PROTOCOL, 9, data(PROTOCOL, 9), start_time_micros=HEAD_BEGAN + 200_000_000)
    roots = roots_of(PROTOCOL)
    roots = replace(roots, epochs=(head, *roots.epochs[1:]))
    # By the store's clock it began 200 seconds earlier than it says.
    assert reason(roots, data(PROTOCOL, 6), HEAD_BEGAN + 50_000_000, grace=3_600_000_000) is (
        Reason.IN_FLIGHT
    )


def test_of_a_new_generation_that_has_published_nothing_everything_stays() -> None:
    roots = roots_of(PROTOCOL, worker_generation=WorkerGeneration(3))
    assert reason(roots, data(PROTOCOL, 6, 3)) is Reason.MAY_COME_AGAIN
    assert reason(roots, data(PROTOCOL, 6, 2)) is Reason.ORPHAN


def test_the_directory_that_the_run_went_on_from_stays() -> None:
    assert reason(roots_of(PROTOCOL), data(PROTOCOL, 5, 1)) is Reason.RESTORED_FROM
    assert reason(roots_of(PROTOCOL), data(PROTOCOL, 5, 2)) is Reason.ORPHAN


def test_what_was_merged_lately_in_the_legacy_layout_stays() -> None:
    roots = roots_of(LEGACY)
    assert reason(roots, data(LEGACY, 8, name="000-compacted")) is Reason.MERGED_LATELY
    assert reason(roots, data(LEGACY, 7, name="001-compacted")) is Reason.ORPHAN


def test_in_the_legacy_layout_names_may_be_written_again_where_the_newest_epoch_wrote() -> None:
    """After ignore_state the worker counts its directories from 1 again."""
    roots = roots_of(LEGACY)
    head = epoch_root(LEGACY, 9, data(LEGACY, 3), data(LEGACY, 8))
    roots = replace(roots, epochs=(head, *roots.epochs[1:]))
    assert reason(roots, data(LEGACY, 3, name="001-y")) is Reason.MAY_COME_AGAIN
    assert reason(roots, data(LEGACY, 2, name="001-y")) is Reason.ORPHAN
    nothing = replace(roots, epochs=(replace(head, files=Packed()), *roots.epochs[1:]))
    assert reason(nothing, data(LEGACY, 2, name="001-y")) is Reason.MAY_COME_AGAIN


def test_of_a_run_that_may_have_ignored_the_state_and_published_nothing_everything_stays() -> None:
    """Then nobody names the epochs of before as ready any more."""
    roots = roots_of(LEGACY, managed=False)
    for newest, expected in (
        (Epoch(9), Reason.ORPHAN),
        (Epoch(8), Reason.ORPHAN),  # a database may be one behind
        (Epoch(7), Reason.MAY_COME_AGAIN),
        (Epoch(10), Reason.MAY_COME_AGAIN),
        (None, Reason.MAY_COME_AGAIN),
    ):
        said = answer(JobCondition.RUNNING, LEGACY, newest_ready_epoch=newest)
        assert reason(roots, data(LEGACY, 2, name="001-y"), answer=said) is expected, newest
    stopped = answer(JobCondition.STOPPED, LEGACY)
    assert reason(roots, data(LEGACY, 2, name="001-y"), answer=stopped) is Reason.ORPHAN
    ahead = answer(JobCondition.STOPPED, LEGACY, newest_ready_epoch=Epoch(10))
    with pytest.raises(ProtocolError, match="is lost or damaged"):
        reason(roots, data(LEGACY, 2, name="001-y"), answer=ahead)


def test_of_a_stopped_job_of_arroyo_s_what_is_unlisted_goes_but_never_what_is_young() -> None:
    roots = roots_of(PROTOCOL, managed=False)
    said = {"answer": answer(JobCondition.STOPPED), "grace": 3_600_000_000}
    assert reason(roots, data(PROTOCOL, 9, name="001-y"), **dict(said)) is Reason.ORPHAN
    assert reason(roots, data(PROTOCOL, 6), HEAD_BEGAN + 7, **dict(said)) is Reason.ORPHAN
    assert reason(roots, data(PROTOCOL, 6), NOW - 5, **dict(said)) is Reason.YOUNG
    running = {"answer": answer(JobCondition.RUNNING), "grace": 3_600_000_000}
    assert reason(roots, data(PROTOCOL, 6), HEAD_BEGAN + 7, **running) is Reason.IN_FLIGHT


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("generations/1/checkpoints/checkpoint-0000003/operator-o/table-t-000", Reason.ORPHAN),
        ("generations/1/checkpoints/checkpoint-0000003/operator-a/b/table-t-000", Reason.FOREIGN),
        ("generations/1/checkpoints/checkpoint-0000003/operator-o-0.metadata", Reason.ORPHAN),
        ("generations/2/checkpoints/checkpoint-0000008/operator-o-0.metadata", Reason.METADATA),
        ("generations/1/generation-manifest.json", Reason.OLD_GENERATION),
        ("generations/2/generation-manifest.json", Reason.METADATA),
        ("generations/2/checkpoints/checkpoint-0000003/committed.json", Reason.METADATA),
        ("epochs/epoch-0000001.record", Reason.METADATA),
        ("current-generation.json", Reason.METADATA),
        ("_arroyo_dagster/leases/0000000001.json", Reason.MAINTENANCE),
        ("_arroyo_dagster/quarantine/x/000001-0000", Reason.MAINTENANCE),
        ("generations/1/checkpoints/checkpoint-0000003/operator-o/table-t-000.tmp", Reason.FOREIGN),
        ("generations/1/checkpoints/checkpoint-0000003/operator-o/tables", Reason.FOREIGN),
        ("generations/1/checkpoints/checkpoint-3/operator-o/table-t-000", Reason.FOREIGN),
        ("generations/one/checkpoints/checkpoint-0000003/operator-o/table-t-000", Reason.FOREIGN),
        ("checkpoints/checkpoint-0000003/operator-o/table-t-000", Reason.FOREIGN),
        ("state.sqlite", Reason.FOREIGN),
        ("notes.txt", Reason.FOREIGN),
    ],
)
def test_names_decide_and_unknown_objects_are_foreign(name: str, expected: Reason) -> None:
    assert reason(roots_of(PROTOCOL), PROTOCOL.root / name) is expected


@pytest.mark.parametrize("area", ["topics", "spark-sinks"])
def test_staged_files_go_once_their_epoch_is_older_than_the_newest(area: str) -> None:
    roots = roots_of(PROTOCOL)

    def staged(epoch: int) -> StatePath:
        name = staged_name(Epoch(epoch), 0, "0123456789abcdef", ".jsonl")
        return PROTOCOL.root / f"_arroyo_dagster/{area}/out/_staging/o/{name}"

    assert object_name(PROTOCOL, staged(8)).kind is ObjectKind.STAGED
    assert reason(roots, staged(8)) is Reason.ORPHAN
    assert reason(roots, staged(8), NOW - GRACE_MICROS + 1) is Reason.YOUNG
    assert reason(roots, staged(8), None) is Reason.NO_TIME
    assert reason(roots, staged(9)) is Reason.UNCOMMITTED
    assert reason(roots, staged(10)) is Reason.UNCOMMITTED


def test_file_of_an_operator_whose_id_holds_a_slash_is_known_by_metadata_alone() -> None:
    listed = PROTOCOL.checkpoint(Epoch(9), WorkerGeneration(2)) / "operator-a/b/table-t-000"
    assert object_name(PROTOCOL, listed).kind is ObjectKind.FOREIGN
    roots = roots_of(PROTOCOL)
    assert reason(roots, listed) is Reason.FOREIGN
    head = epoch_root(PROTOCOL, 9, listed)
    assert reason(replace(roots, epochs=(head, *roots.epochs[1:])), listed) is Reason.REFERENCED


def test_nothing_is_judged_while_the_writer_s_clock_is_ahead() -> None:
    """Where the store does not say when the newest epoch was written, the time now counts."""
    for ahead, refused in ((SKEW_MICROS, False), (SKEW_MICROS + 1, True)):
        head = epoch_root(
            PROTOCOL,
            9,
            finish_time_micros=NOW + ahead,
            written_at_micros=None,
            oldest_object_micros=None,
        )
        roots = roots_of(PROTOCOL, epochs=(head,))
        if refused:
            with pytest.raises(ProtocolError, match="the writer's clock is ahead"):
                reason(roots, data(PROTOCOL, 6))
            behind = replace(head, finish_time_micros=NOW - ahead, oldest_object_micros=NOW)
            with pytest.raises(ProtocolError, match="clock"):
                reason(replace(roots, epochs=(behind,)), data(PROTOCOL, 6))
        else:
            assert reason(roots, data(PROTOCOL, 6)) is Reason.IN_FLIGHT


def test_nothing_is_judged_beside_an_epoch_that_cannot_be_read() -> None:
    roots = roots_of(PROTOCOL)
    broken = replace(roots.epochs[1], rolled_back=True, unreadable="it is cut short")
    roots = replace(roots, epochs=(roots.head, broken, roots.epochs[2]))
    with pytest.raises(ProtocolError, match="cannot be read") as error:
        reason(roots, data(PROTOCOL, 6))
    assert error.value.facts == {"job": PROTOCOL.root, "epoch": 8, "path": broken.ref}


def test_manifests_that_lost_go_and_one_that_may_still_win_stays() -> None:
    lost = epoch_root(
        PROTOCOL, 8, data(PROTOCOL, 8, 1), generation=1, state=CheckpointState.ORPHANED
    )
    ahead = epoch_root(
        PROTOCOL, 10, data(PROTOCOL, 10, 1), generation=1, state=CheckpointState.UNCLAIMED
    )
    roots = roots_of(PROTOCOL, attempts=(lost, ahead))
    old = [StoredObject(one.ref, 1, OLD) for one in (lost, ahead)]
    standing = standing_of(roots, old, now_micros=NOW, grace_micros=GRACE_MICROS)
    assert standing.lost == {lost.ref}
    assert data(PROTOCOL, 8, 1) not in standing.referenced
    assert data(PROTOCOL, 10, 1) in standing.referenced
    young = [StoredObject(one.ref, 1, NOW - 5) for one in (lost, ahead)]
    assert not standing_of(roots, young, now_micros=NOW, grace_micros=GRACE_MICROS).lost
    arroyo = roots_of(PROTOCOL, managed=False, attempts=(lost,))
    running = answer(JobCondition.RUNNING)
    kept = standing_of(arroyo, old, now_micros=NOW, grace_micros=GRACE_MICROS, answer=running)
    assert not kept.lost, "metadata of a running Arroyo is its own"


@pytest.mark.parametrize(
    ("managed", "condition", "generation", "goes"),
    [
        (True, None, 1, True),  # no writer of a fenced generation can publish it any more
        (True, None, 2, False),  # its writer may be at work, and is not fenced
        (False, JobCondition.STOPPED, 2, True),  # nobody is at work
        (False, JobCondition.STOPPED, 1, True),
    ],
    ids=["fenced", "at work", "at rest", "at rest and fenced"],
)
def test_manifest_that_lost_goes_only_if_its_writer_is_fenced_or_at_rest(
    managed: bool, condition: JobCondition | None, generation: int, goes: bool
) -> None:
    lost = epoch_root(
        PROTOCOL,
        8,
        data(PROTOCOL, 8, generation, "001-y"),
        generation=generation,
        state=CheckpointState.ORPHANED,
    )
    roots = roots_of(PROTOCOL, managed=managed, attempts=(lost,))
    standing = standing_of(
        roots,
        [StoredObject(lost.ref, 1, OLD)],
        now_micros=NOW,
        grace_micros=GRACE_MICROS,
        answer=None if condition is None else answer(condition),
    )
    assert standing.lost == ({lost.ref} if goes else set())


@pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
def test_a_name_that_folds_to_a_referenced_one_stays(paths: JobPaths) -> None:
    listed, other = (data(paths, 3, 1, name=name) for name in ("000-Ä", "000-a\u0308"))
    roots = roots_of(paths)
    newest = replace(roots.epochs[0], files=Packed.of_paths([*roots.head.files.paths, listed]))
    roots = replace(roots, epochs=(newest, *roots.epochs[1:]))
    assert reason(roots, listed) is Reason.REFERENCED
    assert reason(roots, other) is Reason.ALIAS
    assert reason(roots, data(paths, 3, 1, name="000-b")) is Reason.ORPHAN
    listed = data(paths, 3, 1, name="000-a")
    newest = replace(roots.epochs[0], files=Packed.of_paths([data(paths, 9), listed]))
    roots = replace(roots, epochs=(newest, *roots.epochs[1:]))
    assert reason(roots, data(paths, 3, 1, name="000-A")) is Reason.ALIAS
    for name in ("000-a.", "000-a "):
        assert reason(roots, data(paths, 3, 1, name=name)) is Reason.FOREIGN


def lost_of(
    roots: Roots, one: EpochRoot, modified: int | None = OLD, generation: int | None = None
) -> bool:
    manifest = PROTOCOL.generation_manifest(WorkerGeneration(1))
    standing = standing_of(
        replace(roots, attempts=(one,)),
        [StoredObject(one.ref, 1, modified), StoredObject(manifest, 1, generation)],
        now_micros=NOW,
        grace_micros=GRACE_MICROS,
    )
    return one.ref in standing.lost


def test_each_condition_alone_keeps_a_manifest_that_lost() -> None:
    roots = roots_of(PROTOCOL)
    lost = epoch_root(PROTOCOL, 8, generation=1, state=CheckpointState.ORPHANED)
    assert lost_of(roots, lost)
    assert lost_of(roots, replace(lost, state=CheckpointState.UNCLAIMED))
    for state in (CheckpointState.READY, CheckpointState.COMMITTING, CheckpointState.INVISIBLE):
        assert not lost_of(roots, replace(lost, state=state)), state
    at_head = epoch_root(PROTOCOL, 9, generation=1, state=CheckpointState.ORPHANED)
    ahead = epoch_root(PROTOCOL, 10, generation=1, state=CheckpointState.ORPHANED)
    assert lost_of(roots, at_head)
    assert not lost_of(roots, ahead)
    assert lost_of(roots, lost, NOW - GRACE_MICROS)
    assert not lost_of(roots, lost, NOW - GRACE_MICROS + 1)
    assert not lost_of(roots, lost, None)
    assert lost_of(roots, lost, OLD, NOW - GRACE_MICROS)
    assert not lost_of(roots, lost, OLD, NOW - GRACE_MICROS + 1), "it names the other as its latest"
    read = Root(path=lost.ref, digest="d")
    assert not lost_of(replace(roots, more=(read,)), lost), "a start reads it"
    other = Root(path=roots.head.ref, digest="d")
    assert lost_of(replace(roots, more=(other,)), lost)


def test_times_at_the_very_end_of_a_period() -> None:
    roots, short = roots_of(PROTOCOL), 3_600_000_000
    assert reason(roots, data(PROTOCOL, 6), NOW - GRACE_MICROS) is Reason.ORPHAN
    assert reason(roots, data(PROTOCOL, 6), HEAD_BEGAN - 60_000_000, grace=short) is (
        Reason.IN_FLIGHT
    )
    assert reason(roots, data(PROTOCOL, 6), HEAD_BEGAN - 60_000_001, grace=short) is Reason.ORPHAN


def test_head_that_took_long_began_as_long_before_the_store_wrote_it() -> None:
    second = 1_000_000
    head = epoch_root(PROTOCOL, 9, data(PROTOCOL, 9), finish_time_micros=HEAD_BEGAN + 200 * second)
    roots = roots_of(PROTOCOL)
    roots = replace(roots, epochs=(head, *roots.epochs[1:]))
    began = HEAD_BEGAN - 200 * second - 60 * second  # written by the store at HEAD_BEGAN + 10
    short = {"grace": 3_600_000_000}
    assert reason(roots, data(PROTOCOL, 6), began + 10, **short) is Reason.IN_FLIGHT
    assert reason(roots, data(PROTOCOL, 6), began + 9, **short) is Reason.ORPHAN


def test_directories_that_the_newest_legacy_epoch_wrote_are_told_from_those_of_before() -> None:
    """After ignore_state epoch 9 may have written the directory of epoch 3."""
    head = epoch_root(LEGACY, 9, data(LEGACY, 3), data(LEGACY, 8), managed=False)
    before = epoch_root(LEGACY, 8, data(LEGACY, 8), managed=False)
    stopped = answer(JobCondition.STOPPED, LEGACY)
    for epochs in ((head, before), (head, before, before)):
        roots = roots_of(LEGACY, managed=False, epochs=epochs)
        assert reason(roots, data(LEGACY, 3, name="001-y"), answer=stopped) is Reason.ORPHAN
        assert reason(roots, data(LEGACY, 4, name="001-y"), answer=stopped) is Reason.MAY_COME_AGAIN
    alone = roots_of(LEGACY, managed=False, epochs=(head,))
    assert reason(alone, data(LEGACY, 8, name="001-y"), answer=stopped) is Reason.ORPHAN
    assert reason(alone, data(LEGACY, 9, name="001-y"), answer=stopped) is Reason.MAY_COME_AGAIN


def test_plan_takes_what_goes_and_counts_what_stays() -> None:
    lost = epoch_root(
        PROTOCOL, 8, data(PROTOCOL, 8, 1), generation=1, state=CheckpointState.ORPHANED
    )
    older = epoch_root(
        PROTOCOL, 7, data(PROTOCOL, 7, 1), generation=1, state=CheckpointState.ORPHANED
    )
    roots = roots_of(PROTOCOL, attempts=(lost, older))
    generation = PROTOCOL.generation_manifest(WorkerGeneration(1))
    metadata = [
        StoredObject(roots.head.ref, 3, HEAD_BEGAN + 10),
        *(StoredObject(one, 5, OLD) for one in (lost.ref, older.ref, generation)),
    ]
    subtask = PROTOCOL.subtask_metadata(OperatorId("o"), 0, Epoch(3), WorkerGeneration(1))
    kept_subtask = PROTOCOL.subtask_metadata(OperatorId("o"), 0, Epoch(8), WorkerGeneration(2))
    files = [
        StoredObject(data(PROTOCOL, 3, 1), 10, OLD),
        StoredObject(data(PROTOCOL, 8, 1), 20, OLD),
        StoredObject(data(PROTOCOL, 9), 30, OLD),
        StoredObject(data(PROTOCOL, 6), 40, NOW - 5),
        StoredObject(data(PROTOCOL, 6, name="002-z"), None, NOW - 5),
        StoredObject(subtask, 2, OLD),
        StoredObject(kept_subtask, 2, OLD),
    ]
    foreign = [StoredObject(StatePath("p/j/notes.txt"), 9, OLD)]
    standing = standing_of(roots, metadata, now_micros=NOW, grace_micros=GRACE_MICROS)
    parts = [judge(standing, files)]
    plan = plan_orphans(standing, parts, metadata, foreign, listed=12)
    assert list(plan.data.paths) == [data(PROTOCOL, 3, 1), data(PROTOCOL, 8, 1)]
    assert list(plan.records.paths) == [subtask]
    assert list(plan.metadata.paths) == [generation, older.ref, lost.ref]
    assert plan.size_bytes == 10 + 20 + 2 + 5 + 5 + 5
    assert plan.stays == {
        "foreign": (1, 0),
        "metadata": (2, 3 + 2),
        "referenced": (1, 30),
        "young": (2, 40),
    }
    assert plan.foreign == (StatePath("p/j/notes.txt"),)
    assert (plan.kind, plan.paths, plan.made_at_micros) == (PlanKind.ORPHANS, PROTOCOL, NOW)
    assert plan.rule == {"grace_micros": GRACE_MICROS}
    assert (plan.proof.listed, plan.proof.referenced) == (12, 3)
    assert plan.proof.digest == standing.referenced.hexdigest
    # A directory at a time the same is decided.
    in_parts = standing_of(
        roots, metadata, now_micros=NOW, grace_micros=GRACE_MICROS, in_parts=True
    )
    below = {path.partition("/operator-")[0] for path in (one.path for one in files)}
    below |= {PROTOCOL.checkpoint(Epoch(number), WorkerGeneration(2)) for number in (7, 8, 9)}
    each = [
        judge_below(in_parts, f"{name}/", [one for one in files if one.path.startswith(name)])
        for name in sorted(below)
    ]
    again = plan_orphans(in_parts, each, metadata, foreign, listed=12)
    assert set(again.data.paths) == set(plan.data.paths)
    assert again.records == plan.records
    assert again.stays == plan.stays
    assert again.proof.digest == plan.proof.digest
    assert again.proof.referenced == plan.proof.referenced


def test_plan_says_who_said_what_the_job_does() -> None:
    roots, said = roots_of(PROTOCOL, managed=False), answer(JobCondition.STOPPED)
    standing = standing_of(roots, [], now_micros=NOW, grace_micros=GRACE_MICROS, answer=said)
    plan = plan_orphans(standing, [judge(standing, [])], [], [], listed=1, answer=said)
    assert plan.proof.condition == "stopped (s)"  # asked again before each step


def test_quarantines_are_purged_from_an_age_on_if_at_all() -> None:
    ages = (99, 100, 101)
    moved = [Quarantined(name=f"{one}", needs=Packed(), moved_at_micros=NOW - one) for one in ages]
    roots = roots_of(PROTOCOL, quarantined=tuple(moved))
    standing = standing_of(roots, [], now_micros=NOW, grace_micros=GRACE_MICROS)
    for after, purged in ((None, ()), (100, ("100", "101"))):
        parts = [judge(standing, [])]
        plan = plan_orphans(standing, parts, [], [], listed=1, purge_after_micros=after)
        assert (plan.purges, plan.rule.get("purge_after_micros")) == (purged, after)


def test_manifest_is_lost_or_metadata() -> None:
    lost = epoch_root(PROTOCOL, 8, generation=1, state=CheckpointState.ORPHANED)
    roots = roots_of(PROTOCOL, attempts=(lost,))
    metadata = [StoredObject(lost.ref, 1, OLD)]
    standing = standing_of(roots, metadata, now_micros=NOW, grace_micros=GRACE_MICROS)
    assert reason_of(standing, metadata[0], object_name(PROTOCOL, lost.ref)) is Reason.LOST
    head = StoredObject(roots.head.ref, 1, OLD)
    assert reason_of(standing, head, object_name(PROTOCOL, head.path)) is Reason.METADATA
    # Of no other kind, whatever it is called.
    odd = replace(standing, lost=frozenset({PROTOCOL.current_generation}))
    fence = StoredObject(PROTOCOL.current_generation, 1, OLD)
    assert reason_of(odd, fence, object_name(PROTOCOL, fence.path)) is Reason.METADATA


# ---- expiry over every history -------------------------------------------------------------------

FILES = [data(PROTOCOL, number) for number in range(1, 7)]


@given(
    listed=st.lists(st.sets(st.sampled_from(FILES)), min_size=1, max_size=9),
    keep=st.integers(2, 6) | st.none(),
    young=st.integers(0, 9) | st.none(),
    pins=st.sets(st.integers(1, 9)),
    legacy=st.booleans(),
)
def test_whatever_is_asked_every_epoch_that_stays_keeps_all_it_needs(
    listed: list[set[StatePath]], keep: int | None, young: int | None, pins: set[int], legacy: bool
) -> None:
    from tests.formats import JobPins, Pin

    if keep is None and young is None:
        keep = 2
    paths = LEGACY if legacy else PROTOCOL
    epochs: list[EpochRoot] = []
    for number, files in enumerate(listed, start=1):
        own = [StatePath(one.replace("p/j", str(paths.root), 1)) for one in sorted(files)]
        parent = None if not epochs or legacy else epochs[0].ref
        times = {"start_time_micros": NOW - 100 + number, "finish_time_micros": NOW - 100 + number}
        times["written_at_micros"] = times["finish_time_micros"]
        epochs.insert(0, epoch_root(paths, number, *own, parent_ref=parent, **times))
    pinned = tuple(
        Pin(epoch=Epoch(one), owner="o", pinned_at_micros=1)
        for one in sorted(pins)
        if one <= len(epochs)
    )
    roots = replace(roots_of(paths), epochs=tuple(epochs), job_pins=JobPins(pins=pinned))
    age = None if young is None else 100 - (len(epochs) - young)
    plan = plan_expiry(roots, Retention(keep_epochs=keep, keep_micros=age), now_micros=NOW)
    stays = [one for one in epochs if one.epoch not in plan.epochs]
    assert epochs[0] in stays
    assert set(epochs[:2]) <= set(stays), "the newest and its parent"
    whole = [one for one in stays if one.epoch >= (plan.keep_from or 0) or one.epoch in pins]
    needed = {path for one in whole for path in one.files.paths}
    assert not needed & set(plan.data.paths)
    going = {path for one in epochs if one not in whole for path in one.files.paths}
    assert set(plan.data.paths) == going - needed
    refs = set(plan.metadata.paths)
    for one in whole:
        assert one.ref not in refs
        if one.parent_ref is not None and one.epoch < (plan.keep_from or 0):
            assert one.parent_ref not in refs, "recovery asks for the parent of a pinned epoch"
    if keep is not None:
        assert len(stays) >= min(keep, len(epochs))
    for one in stays:
        assert marker_path(one.ref) not in set(plan.records.paths) if not legacy else True
    if legacy:
        assert plan.epochs == ()  # fewer than eleven: Arroyo's own cleanup needs all of them
