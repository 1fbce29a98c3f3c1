"""What may go when epochs expire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    OperatorCheckpoint,
    StreamProgress,
)
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import GlobalKeyedConfig, GlobalKeyedFiles, TableConfig
from arroyo_dagster.state.planning.gc.retention import (
    oldest_kept,
    plan_expire,
    unreadable_objects,
    with_unreadable,
)

PROTOCOL = JobPaths(JobId("j"), PipelineId("p"))
LEGACY = JobPaths(JobId("j"))


def checkpoint(epoch: int, *files: str, paths: JobPaths = PROTOCOL) -> Checkpoint:
    generation = WorkerGeneration(1) if paths.pipeline else None
    tables = {TableName("g"): GlobalKeyedFiles(files=tuple(StatePath(f) for f in files))}
    operator = OperatorCheckpoint(
        job=JobId("j"), operator=OperatorId("o"), epoch=Epoch(epoch), parallelism=2, tables=tables
    )
    ref = (
        paths.manifest(generation, Epoch(epoch))
        if generation is not None
        else paths.legacy_metadata(Epoch(epoch))
    )
    return Checkpoint(
        pipeline=paths.pipeline,
        job=paths.job,
        worker_generation=generation,
        epoch=Epoch(epoch),
        min_epoch=Epoch(1),
        start_time_micros=0,
        finish_time_micros=0,
        state=CheckpointState.READY,
        operators=(operator,),
        ref=ref,
    )


def test_a_file_a_kept_checkpoint_references_is_never_deleted() -> None:
    history = [checkpoint(3, "a", "d"), checkpoint(2, "a", "c"), checkpoint(1, "a", "b")]
    plan = plan_expire(PROTOCOL, history, Epoch(2))
    assert plan.epochs == (1,)
    assert plan.data == ("b",)


def test_the_newest_checkpoint_and_its_parent_stay_whatever_is_asked() -> None:
    history = [checkpoint(3, "c"), checkpoint(2, "b"), checkpoint(1, "a")]
    plan = plan_expire(PROTOCOL, history, Epoch(3))
    assert plan.epochs == (1,)
    assert plan_expire(PROTOCOL, history[:1], Epoch(3)).steps == ((), ())


def test_data_goes_first_then_records_then_manifests_one_by_one_oldest_first() -> None:
    history = [checkpoint(e, f"f{e}") for e in (5, 4, 3, 2, 1)]
    plan = plan_expire(PROTOCOL, history, Epoch(4))
    data, records, *manifests = plan.steps
    assert data == ("f1", "f2", "f3")
    assert [path for path in records if path.endswith(".record")] == [
        PROTOCOL.epoch_record(Epoch(e)) for e in (1, 2, 3)
    ]
    assert {path.name for path in records} >= {"operator-o-0.metadata", "operator-o-1.metadata"}
    assert manifests == [(PROTOCOL.manifest(WorkerGeneration(1), Epoch(e)),) for e in (1, 2, 3)]


def test_in_the_legacy_layout_operators_go_before_the_checkpoint_that_lists_them() -> None:
    history = [checkpoint(e, paths=LEGACY) for e in (13, 12, 2, 1)]
    plan = plan_expire(LEGACY, history, Epoch(2))
    assert plan.manifests == (
        "j/checkpoints/checkpoint-0000001/operator-o/metadata",
        "j/checkpoints/checkpoint-0000001/metadata",
    )


@pytest.mark.parametrize("newest", [None, 3])
def test_a_min_epoch_newer_than_the_newest_checkpoint_is_refused(newest: int | None) -> None:
    history = [checkpoint(newest)] if newest else []
    with pytest.raises(ProtocolError, match="newer than the newest"):
        plan_expire(PROTOCOL, history, Epoch(4))


@given(
    files=st.lists(st.sets(st.sampled_from("abcdefgh"), max_size=5), min_size=1, max_size=7),
    asked=st.integers(1, 7),
)
def test_whatever_expires_every_kept_epoch_keeps_all_its_files(
    files: list[set[str]], asked: int
) -> None:
    history = [checkpoint(at, *sorted(part)) for at, part in enumerate(files, start=1)][::-1]
    min_epoch = Epoch(min(asked, len(files)))
    plan = plan_expire(PROTOCOL, history, min_epoch)
    kept = [c for c in history if c.epoch not in plan.epochs]
    assert [c.epoch for c in kept] == [c.epoch for c in history if c.epoch >= kept[-1].epoch]
    assert kept[-1].epoch == oldest_kept([c.epoch for c in history], min_epoch) <= min_epoch
    assert len(kept) >= min(2, len(history))
    assert not {path for c in kept for path in c.paths} & set(plan.data)
    every = {path for c in history for path in c.paths}
    assert every - {path for c in kept for path in c.paths} == set(plan.data)


def test_legacy_objects_by_name_and_the_ten_epochs_before_the_newest() -> None:
    history = [checkpoint(epoch, f"f{epoch}", paths=LEGACY) for epoch in range(20, 0, -1)]
    plan = plan_expire(LEGACY, history, Epoch(19))
    assert (plan.min_epoch, plan.keep_from) == (19, 10)
    assert plan.epochs == tuple(range(1, 10))
    base = "j/checkpoints/checkpoint-0000001"
    assert list(plan.records)[:2] == [f"{base}/operator-o-{index}.metadata" for index in (0, 1)]
    assert len(plan.records) == 2 * 9
    assert list(plan.manifests)[:2] == [f"{base}/operator-o/metadata", f"{base}/metadata"]


def test_the_note_of_a_commit_goes_with_an_epoch_of_ours_that_committed() -> None:
    progress = StreamProgress(query_id="q", batch_id=1, offsets="")
    for own, commits, noted in ((True, True, 1), (True, False, 0), (False, True, 0)):
        old = checkpoint(1, "a", paths=LEGACY)
        table = GlobalKeyedConfig(table=TableName("g"), uses_two_phase_commit=commits)
        operator = replace(old.operators[0], configs={TableName("g"): TableConfig(config=table)})
        old = replace(old, progress=progress if own else None, operators=(operator,))
        history = [checkpoint(epoch, "b", paths=LEGACY) for epoch in range(12, 1, -1)]
        records = plan_expire(LEGACY, [*history, old], Epoch(12)).records
        notes = [path for path in records if "/commits/" in path]
        assert notes == [LEGACY.commit_note(Epoch(1))] * noted


def test_records_of_a_generation_lie_in_its_directory() -> None:
    plan = plan_expire(PROTOCOL, [checkpoint(n, f"f{n}") for n in (3, 2, 1)], Epoch(2))
    base = "p/j/generations/1/checkpoints/checkpoint-0000001"
    assert list(plan.records) == [
        f"{base}/operator-o-0.metadata",
        f"{base}/operator-o-1.metadata",
        f"{base}/committed.json",
        "p/j/epochs/epoch-0000001.record",
    ]


def test_only_the_parents_of_pinned_epochs_keep_their_metadata() -> None:
    history = [checkpoint(n, f"f{n}") for n in (6, 5, 4, 3, 2, 1)]
    linked = [
        replace(one, parent_ref=before.ref)
        for one, before in zip(history, [*history[1:], history[-1]], strict=True)
    ]
    assert plan_expire(PROTOCOL, linked, Epoch(5)).epochs == (1, 2, 3, 4)
    assert plan_expire(PROTOCOL, linked, Epoch(5), pinned={Epoch(3)}).epochs == (1, 4)


def test_parent_of_the_newest_stays_although_a_rollback_made_it_much_older() -> None:
    history = [checkpoint(n, f"f{n}") for n in range(10, 0, -1)]
    head = replace(history[0], parent_ref=history[6].ref)
    plan = plan_expire(PROTOCOL, [head, *history[1:]], Epoch(10))
    assert plan.epochs == (1, 2, 3, 5, 6, 7, 8)
    assert "f4" not in plan.data


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


def test_plan_takes_unreadable_epochs_and_what_makes_them_exist_goes_last() -> None:
    plan = plan_expire(PROTOCOL, [checkpoint(n, f"f{n}") for n in (9, 8, 3, 1)], Epoch(8))
    names = {name: StatePath(name) for name in "abcd"}
    unreadable = {Epoch(5): [names["a"], names["b"], names["c"]], Epoch(2): [names["d"]]}
    found = with_unreadable(plan, unreadable)
    assert found == replace(
        plan,
        epochs=(1, 2, 3, 5),
        records=(*plan.records, "a", "b"),
        manifests=("c", "d", *plan.manifests),
    )
    assert found.data == ("f1", "f3")
