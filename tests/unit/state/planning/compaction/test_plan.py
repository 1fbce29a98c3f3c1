"""Which files are merged, and what the metadata says afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import (
    Checkpoint,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    JobId,
    OperatorCheckpoint,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
    global_table_config,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.planning.compaction.apply import adoptable, apply_merges
from arroyo_dagster.state.planning.compaction.plan import ARROYO_JOB, most_outputs, plan_merges
from tests.formats import (
    MAX_ROUTING_KEY,
    CompactionRecord,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    MergedPairs,
    MergedRows,
    RunProgress,
    TableFiles,
    TimeFile,
)
from tests.unit.state.planning import values

G, T = TableName("g"), TableName("t")
SCHEMA = pa.schema([("k", pa.string()), pa.field("_timestamp", pa.timestamp("ns"), nullable=False)])
CONFIGS = {
    G: global_table_config("g", key=str, value=int),
    T: timestamp_table_config("t", retention_micros=100, schema=SCHEMA, keys=["k"]),
}
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
PACK = CompactionSettings(target_bytes=100, small_share=0.5, min_files=2)


def path(name: str) -> StatePath:
    return StatePath(f"p/j/{name}")


def paths(*names: str) -> tuple[StatePath, ...]:
    return tuple(map(path, names))


def timed(name: str, *, subtask: int = 0, latest: int = 1000, wide: bool = False) -> TimeFile:
    keys = range_for_server(subtask, 2)
    return values.time_file(
        path(name),
        min_routing_key=0 if wide else keys.start,
        max_routing_key=MAX_ROUTING_KEY if wide else keys.end,
        max_timestamp_micros=latest,
    )


def operator(files: TableFiles, *, watermark: int | None = 1000) -> OperatorCheckpoint:
    table = G if isinstance(files, GlobalKeyedFiles) else T
    return values.operator(
        "o",
        epoch=Epoch(7),
        parallelism=2,
        min_watermark_micros=watermark,
        tables={table: files},
        configs={table: CONFIGS[table]},
    )


def checkpoint(*files: TableFiles, **changes: Any) -> Checkpoint:
    found = values.checkpoint(
        *(operator(one) for one in files),
        pipeline=PipelineId("p"),
        worker_generation=WorkerGeneration(1),
        epoch=Epoch(7),
        progress=RunProgress(offsets="{}"),
    )
    return replace(found, **changes)


def pairs(*names: str) -> GlobalKeyedFiles:
    return GlobalKeyedFiles(files=paths(*names))


def rows(*files: TimeFile) -> ExpiringTimeKeyFiles:
    return ExpiringTimeKeyFiles(files=files)


def plan(files: TableFiles, settings: CompactionSettings, size: int = 10, **sizes: int) -> Any:
    given = {one: sizes.get(one.name.replace("-", "_"), size) for one in files.paths}
    return plan_merges(checkpoint(files), given, settings)


def inputs(found: Any) -> list[list[str]]:
    return [[one.name for one in merge.paths] for merge in found.merges]


# ---- what is merged ------------------------------------------------------------------------------


def test_full_takes_every_file_of_a_global_table_and_of_each_subtask() -> None:
    found = plan(pairs("a", "b", "c"), FULL)
    assert inputs(found) == [["a", "b", "c"]]
    assert found.merges[0].from_oldest
    assert (found.files_before, found.files_after) == (3, 1)
    files = [timed("a"), timed("b", subtask=1), timed("c"), timed("d", subtask=1)]
    found = plan(rows(*files), FULL)
    assert inputs(found) == [["a", "c"], ["b", "d"]]
    assert [merge.ranges for merge in found.merges] == [
        (range_for_server(0, 2),),
        (range_for_server(1, 2),),
    ]
    assert all(merge.from_oldest for merge in found.merges)


def test_files_of_several_subtasks_are_merged_as_one_and_parted_by_range() -> None:
    found = plan(rows(timed("a", wide=True), timed("b"), timed("c", subtask=1)), FULL)
    assert inputs(found) == [["a", "b", "c"]]
    assert len(found.merges[0].ranges) == 2
    # Two files that would become two again are no gain.
    assert not plan(rows(timed("a", wide=True), timed("b", wide=True)), FULL).merges


def test_bin_pack_takes_small_neighbours_until_they_fill_the_target() -> None:
    found = plan(pairs("a", "b", "big", "c", "d", "e"), PACK, size=40, big=80)
    assert inputs(found) == [["a", "b"], ["c", "d", "e"]]
    assert [merge.from_oldest for merge in found.merges] == [True, False]
    assert [most_outputs(merge) for merge in found.merges] == [1, 2]
    # 40 + 40 + 40 fills the target of 100; behind the oldest two files would become two.
    assert inputs(plan(pairs("a", "b", "c", "d", "e"), PACK, size=40)) == [["a", "b", "c"]]


def test_what_was_merged_is_not_taken_up_again_at_once() -> None:
    for settings in (FULL, PACK):
        found = plan(pairs("a-compacted", "b-compacted"), settings)
        assert not found.merges
        assert "merged already" in found.left_out[0].reason
    assert not plan(pairs("a-compacted", "b-compacted", "c-compacted", "d", "e"), PACK).merges
    assert inputs(plan(pairs("a-compacted", "b", "c"), PACK)) == [["a-compacted", "b", "c"]]


def test_expired_files_are_left_to_expire() -> None:
    files = [timed("old", latest=899), timed("a", latest=900), timed("b")]
    found = plan(rows(*files), FULL)
    assert inputs(found) == [["a", "b"]]
    assert found.merges[0].cutoff_micros == 900
    assert found.merges[0].from_oldest


def test_a_pending_compaction_counts_as_done() -> None:
    files = pairs("a", "b", "c")
    merged = MergedPairs(
        operator=OperatorId("o"), table=G, inputs=paths("a", "b"), outputs=paths("x-compacted")
    )
    record = CompactionRecord(
        pipeline=PipelineId("p"),
        job=JobId("j"),
        epoch=Epoch(6),
        token=1,
        created_at_micros=0,
        merged=(merged,),
    )
    sizes = dict.fromkeys([*files.files, path("x-compacted")], 5)
    found = plan_merges(checkpoint(files), sizes, FULL, [record])
    assert inputs(found) == [["x-compacted", "c"]]
    assert found.pending == 1


def test_jobs_of_arroyo_and_unknown_sizes_are_refused() -> None:
    files = pairs("a", "b", "c")
    foreign = plan_merges(checkpoint(files, progress=None), {}, FULL)
    assert not foreign.merges
    assert foreign.left_out[0].reason == ARROYO_JOB
    with pytest.raises(InputError, match="no known size"):
        plan_merges(checkpoint(files), {path("a"): 1}, FULL)


# ---- what the metadata says afterwards -----------------------------------------------------------


def merged_pairs(*names: str, outputs: tuple[str, ...] = ("x",)) -> MergedPairs:
    return MergedPairs(
        operator=OperatorId("o"), table=G, inputs=paths(*names), outputs=paths(*outputs)
    )


def merged_rows(*files: TimeFile, outputs: tuple[TimeFile, ...]) -> MergedRows:
    return MergedRows(operator=OperatorId("o"), table=T, inputs=files, outputs=outputs)


def names_after(files: TableFiles, merged: Any, **options: Any) -> list[str] | str:
    applied = apply_merges([operator(files, **options)], [merged])
    if applied.stale:
        assert applied.operators == (operator(files, **options),)
        return applied.stale[0].reason
    (one,) = applied.operators
    return [found.name for found in one.paths]


def test_outputs_take_the_place_of_their_inputs() -> None:
    assert names_after(pairs("a", "b", "c", "d"), merged_pairs("b", "c")) == ["a", "x", "d"]
    assert names_after(pairs("a", "b"), merged_pairs("a", "b", outputs=())) == []
    files = [timed("a"), timed("b", subtask=1), timed("c"), timed("d")]
    merged = merged_rows(files[0], files[2], outputs=(timed("x"),))
    assert names_after(rows(*files), merged) == ["x", "b", "d"]


def test_inputs_that_have_expired_meanwhile_are_no_loss() -> None:
    old, kept, later = timed("old", latest=950), timed("kept"), timed("later")
    merged = merged_rows(old, kept, outputs=(timed("x"),))
    assert names_after(rows(kept, later), merged, watermark=1060) == ["x", "later"]
    gone = merged_rows(old, kept, outputs=(timed("x", latest=940),))
    assert names_after(rows(kept, later), gone, watermark=1060) == ["later"]


@pytest.mark.parametrize(
    ("files", "merged", "reason"),
    [
        (pairs("a", "c"), merged_pairs("a", "b"), "side by side"),
        (pairs("a", "n", "b"), merged_pairs("a", "b"), "side by side"),
        (pairs("b", "a"), merged_pairs("a", "b"), "side by side"),
        (pairs("x", "a", "b"), merged_pairs("a", "b"), "already adopted"),
        (rows(timed("z")), merged_rows(timed("a"), outputs=(timed("x"),)), "none of its inputs"),
        (
            rows(timed("a")),
            merged_rows(timed("a"), timed("b"), outputs=(timed("x"),)),
            "merged by another compaction",
        ),
        (rows(timed("a")), merged_pairs("a", "b"), "no longer exists"),
    ],
)
def test_stale_merge_is_void_as_a_whole(files: TableFiles, merged: Any, reason: str) -> None:
    found = names_after(files, merged)
    assert isinstance(found, str)
    assert reason in found


def test_only_a_record_of_the_epochs_since_the_start_may_lack_an_input() -> None:
    """An edit, which every start comes after, may have removed an input that looks expired."""
    old, kept = timed("old", latest=950), timed("kept")
    merged = merged_rows(old, kept, outputs=(timed("x"),))
    record = CompactionRecord(
        pipeline=PipelineId("p"),
        job=JobId("j"),
        epoch=Epoch(7),
        token=1,
        created_at_micros=0,
        merged=(merged,),
    )
    whole, short = [operator(rows(old, kept))], [operator(rows(kept), watermark=1060)]
    assert adoptable(short, [record], Epoch(7)) == [merged]
    assert adoptable(short, [record], Epoch(8)) == []
    assert adoptable(whole, [record], Epoch(8)) == [merged]


def test_merges_of_one_table_are_taken_over_one_by_one() -> None:
    merges = [
        merged_pairs("a", "b", outputs=("x",)),
        merged_pairs("c", "d", outputs=("y",)),
        merged_pairs("a", "b", outputs=("z",)),
    ]
    applied = apply_merges([operator(pairs("a", "b", "c", "d"))], merges)
    assert [one.name for one in applied.operators[0].paths] == ["x", "y"]
    assert len(applied.done) == 2
    assert len(applied.stale) == 1
