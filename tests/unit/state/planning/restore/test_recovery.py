"""The state of a checkpoint, what a start restores, and who may write: every row of the tables."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import (
    CheckpointState,
    Epoch,
    JobId,
    JobPaths,
    OperatorCheckpoint,
    OperatorId,
    PipelineId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.checkpoints import CommittedMarker
from arroyo_dagster.state.planning.restore.recovery import (
    CannotStart,
    CheckpointStanding,
    Fenced,
    MetadataRecord,
    Need,
    RaiseFence,
    answer_with,
    checkpoint_state,
    claim_of,
    expect_manifest_path,
    fence_verdict,
    legacy_state,
    marker_path,
    resolve,
    resolve_with,
    standing,
)
from tests.formats import (
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    LegacyCheckpoint,
    Manifest,
    RunProgress,
)
from tests.internals import Claim, Restore, StartEmpty

PATHS = JobPaths(JobId("j"), PipelineId("p"))


class World:
    """The objects of a job, put there by name."""

    def __init__(self) -> None:
        self.objects: dict[StatePath, MetadataRecord] = {}

    def ref(self, generation: int, epoch: int) -> StatePath:
        return PATHS.manifest(WorkerGeneration(generation), Epoch(epoch))

    def manifest(
        self,
        generation: int,
        epoch: int,
        *,
        parent: StatePath | None = None,
        needs_commit: bool = False,
    ) -> StatePath:
        ref = self.ref(generation, epoch)
        self.objects[ref] = Manifest(
            pipeline=PipelineId("p"),
            job=JobId("j"),
            worker_generation=WorkerGeneration(generation),
            epoch=Epoch(epoch),
            min_epoch=Epoch(1),
            start_time_micros=0,
            finish_time_micros=0,
            needs_commit=needs_commit,
            operators=(),
            parent_ref=parent,
        )
        return ref

    def claim(self, ref: StatePath) -> None:
        manifest = self.objects[ref]
        assert isinstance(manifest, Manifest)
        self.objects[PATHS.epoch_record(manifest.epoch)] = claim_of(ref, manifest, 5)

    def commit(self, ref: StatePath) -> None:
        manifest = self.objects[ref]
        assert isinstance(manifest, Manifest)
        self.objects[marker_path(ref)] = marker(ref, manifest.epoch)

    def ready(self, generation: int, epoch: int, parent: StatePath | None = None) -> StatePath:
        ref = self.manifest(generation, epoch, parent=parent)
        self.claim(ref)
        return ref

    def generation(
        self, number: int, *, base: StatePath | None = None, latest: StatePath | None = None
    ) -> None:
        self.objects[PATHS.generation_manifest(WorkerGeneration(number))] = GenerationManifest(
            pipeline=PipelineId("p"),
            job=JobId("j"),
            worker_generation=WorkerGeneration(number),
            base_ref=base,
            latest_ref=latest,
            updated_at_micros=0,
        )

    def fence(self, number: int) -> None:
        self.objects[PATHS.current_generation] = CurrentGeneration(
            pipeline=PipelineId("p"),
            job=JobId("j"),
            worker_generation=WorkerGeneration(number),
            generation_manifest_ref=PATHS.generation_manifest(WorkerGeneration(number)),
            updated_at_micros=0,
        )

    def start(
        self, generation: int, *, fence: int | None = None, **rules: bool
    ) -> Restore | StartEmpty | CannotStart | Claim:
        """What `generation` would restore; the fence names it unless said otherwise."""
        self.fence(generation if fence is None else fence)
        facts: dict[StatePath, MetadataRecord | None] = {}

        def read(path: StatePath) -> MetadataRecord | None:
            assert path not in facts, "asked twice"
            return self.objects.get(path)

        starting = WorkerGeneration(generation)
        found = resolve_with(read, PATHS, starting, facts, now_micros=9, **rules)
        if isinstance(found, Restore):
            assert found.manifest == self.objects[found.ref]
        return found

    def fenced(self, generation: int) -> Fenced | RaiseFence | None:
        verdict = partial(fence_verdict, PATHS, WorkerGeneration(generation))
        return answer_with(verdict, self.objects.get, {})


def marker(ref: StatePath, epoch: int, job: str = "j") -> CommittedMarker:
    return CommittedMarker(
        pipeline=PipelineId("p"),
        job=JobId(job),
        epoch=Epoch(epoch),
        checkpoint_worker_generation=WorkerGeneration(1),
        writer_worker_generation=WorkerGeneration(1),
        checkpoint_ref=ref,
    )


@pytest.fixture
def world() -> World:
    return World()


# ---- the state of one checkpoint (arroyo-state.md 3.1) -------------------------------------------


def parts(world: World, *, needs_commit: bool = False) -> tuple[StatePath, Manifest, EpochRecord]:
    ref = world.manifest(1, 2, parent=world.ref(1, 1), needs_commit=needs_commit)
    manifest = world.objects[ref]
    assert isinstance(manifest, Manifest)
    return ref, manifest, claim_of(ref, manifest, 5)


OTHER = PATHS.manifest(WorkerGeneration(2), Epoch(2))


@pytest.mark.parametrize(
    ("record", "marked", "needs_commit", "state"),
    [
        (None, True, False, CheckpointState.UNCLAIMED),
        ({}, False, False, CheckpointState.READY),
        ({}, False, True, CheckpointState.COMMITTING),
        ({}, True, True, CheckpointState.READY),
        ({"checkpoint_ref": OTHER}, False, False, CheckpointState.ORPHANED),
    ],
)
def test_state_of_a_checkpoint_follows_from_its_objects(
    world: World,
    record: dict[str, Any] | None,
    marked: bool,
    needs_commit: bool,
    state: CheckpointState,
) -> None:
    ref, manifest, claim = parts(world, needs_commit=needs_commit)
    claimed = None if record is None else replace(claim, **record)
    standing_now = checkpoint_state(ref, manifest, claimed, marker(ref, 2) if marked else None)
    orphaned = state is CheckpointState.ORPHANED
    assert standing_now == CheckpointStanding(state, OTHER if orphaned else None)
    assert state.canonical is (state in (CheckpointState.READY, CheckpointState.COMMITTING))
    invisible = checkpoint_state(ref, None, claimed, None)
    assert invisible == CheckpointStanding(CheckpointState.INVISIBLE)


@pytest.mark.parametrize(
    ("record", "wrong", "message"),
    [
        ({"epoch": Epoch(3)}, None, "epoch 3"),
        ({"parent_ref": None}, None, "different parents"),
        ({}, (None, 3, "j"), "marker"),
        ({}, (OTHER, 2, "j"), "marker"),
        ({}, (None, 2, "other"), "marker"),
    ],
)
def test_objects_of_different_checkpoints_are_an_error(
    world: World, record: dict[str, Any], wrong: tuple[Any, int, str] | None, message: str
) -> None:
    ref, manifest, claim = parts(world, needs_commit=True)
    other = None if wrong is None else marker(wrong[0] or ref, *wrong[1:])
    with pytest.raises(ProtocolError, match=message):
        checkpoint_state(ref, manifest, replace(claim, **record), other)


def test_a_question_says_what_it_needs_one_object_after_the_other(world: World) -> None:
    ref = world.manifest(1, 1, needs_commit=True)
    world.claim(ref)
    facts: dict[StatePath, MetadataRecord | None] = {}
    asked = []
    while isinstance(found := standing(PATHS, ref, facts), Need):
        asked.append(found.path)
        facts[found.path] = world.objects.get(found.path)
    assert asked == [ref, PATHS.epoch_record(Epoch(1)), marker_path(ref)]


@pytest.mark.parametrize("needs_commit", [True, False])
def test_marker_is_read_only_if_claimed_and_committing(world: World, needs_commit: bool) -> None:
    ref = world.manifest(1, 1, needs_commit=needs_commit)
    record = PATHS.epoch_record(Epoch(1))
    unclaimed = standing(PATHS, ref, {**world.objects, record: None})
    assert unclaimed == CheckpointStanding(CheckpointState.UNCLAIMED)
    world.claim(ref)
    ready = CheckpointStanding(CheckpointState.READY)
    claimed = standing(PATHS, ref, dict(world.objects))
    assert claimed == (Need(marker_path(ref)) if needs_commit else ready)


def test_an_object_of_the_wrong_kind_is_an_error(world: World) -> None:
    ref = world.manifest(1, 1)
    with pytest.raises(ProtocolError, match="expected"):
        standing(PATHS, ref, {ref: marker(ref, 1)})


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "arroyo"])
def test_managed_legacy_epoch_without_note_is_committing(managed: bool) -> None:
    def operator(name: str, commits: bool) -> OperatorCheckpoint:
        config = GlobalKeyedConfig(table=TableName("t"), uses_two_phase_commit=commits)
        return OperatorCheckpoint(
            job=JobId("j"),
            operator=OperatorId(name),
            epoch=Epoch(1),
            parallelism=1,
            configs={config.table: TableConfig(config=config)},
            tables={config.table: GlobalKeyedFiles(files=())},
        )

    head = LegacyCheckpoint(
        job=JobId("j"),
        epoch=Epoch(1),
        min_epoch=Epoch(1),
        start_time_micros=0,
        finish_time_micros=0,
        operators=(OperatorId("count"), OperatorId("sink")),
        progress=RunProgress(offsets="") if managed else None,
    )
    count, sink = operator("count", False), operator("sink", True)
    waits = CheckpointState.COMMITTING if managed else CheckpointState.READY
    assert legacy_state(head, [count, sink], committed=False) is waits
    assert legacy_state(head, [count, sink], committed=True) is CheckpointState.READY
    assert legacy_state(head, [count], committed=False) is CheckpointState.READY


# ---- what a start restores (arroyo-state.md 3.3) -------------------------------------------------


def test_a_job_that_never_ran_starts_empty(world: World) -> None:
    assert world.start(1) == StartEmpty()
    assert world.start(7) == StartEmpty()


def test_start_reads_the_fence_and_the_generations_before_its_own_only(world: World) -> None:
    own = world.ready(3, 3)
    world.generation(3, latest=own)
    world.generation(4, latest=own)
    before = [PATHS.generation_manifest(WorkerGeneration(number)) for number in (2, 1, 0)]
    facts: dict[StatePath, MetadataRecord | None] = dict.fromkeys(
        [PATHS.current_generation, *before]
    )
    rules = {"as_arroyo": False, "only_reads": False}
    assert resolve(PATHS, WorkerGeneration(3), facts, now_micros=9, **rules) == StartEmpty()
    assert world.start(3) == StartEmpty()


@pytest.mark.parametrize("latest", ["lost", "canonical"])
def test_an_epoch_record_that_names_nothing_stops_the_start(world: World, latest: str) -> None:
    """Not the epoch before, and not the base: that epoch was published, and its rows may be out."""
    first = world.ready(1, 1)
    lost = world.manifest(2, 2, parent=first)
    published = world.ready(1, 2, first)
    if latest == "canonical":  # the record of the epoch after it names nothing
        lost, published = published, world.ready(1, 3, published)
    world.generation(2, base=first, latest=lost)
    del world.objects[published]
    result = world.start(3)
    assert isinstance(result, CannotStart)
    assert "no manifest" in result.reason
    assert result.ref == published


def test_owner_of_an_epoch_that_is_not_canonical_itself_stops_the_start(world: World) -> None:
    lost = world.manifest(2, 2)
    won = world.ready(1, 2)
    manifest = world.objects[won]
    assert isinstance(manifest, Manifest)
    world.objects[won] = replace(manifest, epoch=Epoch(7))
    world.generation(2, latest=lost)
    found = world.start(3)
    assert found == CannotStart("the canonical checkpoint is unclaimed itself", won)


def test_a_checkpoint_whose_parent_is_not_ready_stops_the_start(world: World) -> None:
    parent = world.manifest(1, 1, needs_commit=True)
    world.claim(parent)
    ref = world.ready(1, 2, parent)
    world.generation(1, latest=ref)
    assert world.start(2) == CannotStart("the parent of the checkpoint is not ready", ref)


def test_newest_unclaimed_checkpoint_is_claimed_as_by_its_writer(world: World) -> None:
    first = world.ready(1, 1)
    ref = world.manifest(1, 2, parent=first)
    world.generation(1, base=None, latest=ref)
    found = world.start(2)
    assert isinstance(found, Claim)
    assert found.record_path == PATHS.epoch_record(Epoch(2))
    assert found.record.checkpoint_ref == ref
    assert found.record.worker_generation == 1
    assert found.record.parent_ref == first
    assert found.record.created_at_micros == 9
    world.objects[found.record_path] = found.record
    restored = world.start(2)
    assert isinstance(restored, Restore)
    assert restored.ref == ref


def test_reader_sees_the_parent_of_a_checkpoint_that_is_being_published(world: World) -> None:
    first = world.ready(1, 1)
    second = world.ready(1, 2, first)
    world.generation(1, latest=world.manifest(1, 3, parent=second))
    assert world.start(2, fence=1) == StartEmpty()
    found = world.start(2, fence=1, only_reads=True)
    assert isinstance(found, Restore)
    assert (found.ref, found.replay_commit) == (second, False)
    first_ever = World()
    first_ever.generation(1, latest=first_ever.manifest(1, 1))
    assert first_ever.start(2, fence=1, only_reads=True) == StartEmpty()


def test_a_late_epoch_that_is_still_to_commit_is_restored_with_its_commit(world: World) -> None:
    first = world.ready(1, 1)
    late = world.manifest(1, 2, parent=first, needs_commit=True)
    world.claim(late)
    world.generation(2, base=first)
    found = world.start(3)
    assert isinstance(found, Restore)
    assert (found.ref, found.replay_commit) == (late, True)


def test_an_epoch_record_that_leads_out_of_the_job_is_an_error(world: World) -> None:
    first = world.ready(1, 1)
    world.generation(1, latest=first)
    late = world.ready(1, 2, first)
    record = world.objects[PATHS.epoch_record(Epoch(2))]
    assert isinstance(record, EpochRecord)
    foreign = StatePath(late.replace("p/j/", "p/other/"))
    world.objects[PATHS.epoch_record(Epoch(2))] = replace(record, checkpoint_ref=foreign)
    with pytest.raises(ProtocolError, match="out of its job"):
        world.start(2)


# ---- who may write -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fence", "generation", "verdict"),
    [
        (2, 2, None),  # the newest one may write
        (5, None, Fenced(WorkerGeneration(5))),
        (2, 3, Fenced(WorkerGeneration(3))),  # a successor, before it has raised the fence
        (None, 2, RaiseFence()),
        (1, 2, RaiseFence()),  # a slow starter wrote it late
    ],
)
def test_generation_is_fenced_by_the_fence_and_by_its_successor(
    world: World, fence: int | None, generation: int | None, verdict: object
) -> None:
    if fence is not None:
        world.fence(fence)
    if generation is not None:
        world.generation(generation)
    assert world.fenced(2) == verdict


@pytest.mark.parametrize(
    "path", ["p/x/generations/1/checkpoints/checkpoint-0000001/checkpoint-manifest.pb", "p/j/x"]
)
def test_a_reference_that_is_no_manifest_of_the_job_is_refused(path: str) -> None:
    with pytest.raises(ProtocolError, match="out of its job"):
        expect_manifest_path(PATHS, StatePath(path))
