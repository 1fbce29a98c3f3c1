"""Lost metadata of the protocol layout written anew: proven by what can be read, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.state import (
    Epoch,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    StatePath,
    WorkerGeneration,
    list_jobs,
    open_store,
    verify_job,
)
from arroyo_dagster.state.operations.surgery.rebuild.execute import find_damaged_job
from tests.arroyo_jobs import Telling, facts_of, stopped
from tests.compat.arroyo import unpack
from tests.damages import copy_job
from tests.formats import JobCondition, SetWatermark, encode, metadata, records
from tests.internals import (
    Claim,
    EditOptions,
    JobDirectory,
    Restore,
    StartEmpty,
    plan_rebuild,
    run_edit,
    run_rebuild,
)
from tests.jobs import copy_into, own, written_by_word_job
from tests.journeys.test_rebuild import (
    DAMAGE,
    assert_as_good,
    lose,
    rebuilt_as_it_was,
    refused,
)
from tests.shares import all_but
from tests.surgery_jobs import SurgeryJob, held_rows, surgery_job

NOW = EditOptions(quiet_seconds=0)
RUN = WorkerGeneration(3)
RUN_OPERATOR = OperatorId("window_3")


def whole_job() -> SurgeryJob:
    """Each subtask of each operator has written its file, as Arroyo does it."""
    return surgery_job(Layout.PROTOCOL, sink_files=2)


def the_manifest(paths: JobPaths, epoch: int = 3) -> StatePath:
    return paths.manifest(RUN, Epoch(epoch))


OBJECTS: dict[str, Callable[[JobPaths], StatePath]] = {
    "manifest": the_manifest,
    "generation": lambda paths: paths.generation_manifest(RUN),
    "fence": lambda paths: paths.current_generation,
}


def restored_epoch(store: ObjectStore, paths: JobPaths) -> int:
    found = ParquetBackend(store, paths).next_restore()
    assert isinstance(found, Restore)
    return found.manifest.epoch


@DAMAGE
@pytest.mark.parametrize("name", OBJECTS)
def test_a_lost_object_of_the_newest_epoch_is_rebuilt(name: str, damage: bytes | None) -> None:
    job = whole_job()
    store, paths = job.store, job.paths
    rebuilt_as_it_was(job, OBJECTS[name](paths), damage)
    assert restored_epoch(store, paths) == 3
    assert verify_job(store, paths).verdict.errors == ()


@DAMAGE
def test_the_record_of_an_epoch_with_a_child_is_rebuilt_as_it_was(damage: bytes | None) -> None:
    """Without it no start succeeds: the parent of the newest epoch is not ready."""
    job = whole_job()
    store, paths = job.store, job.paths
    path = paths.epoch_record(Epoch(2))
    was = records.decode_epoch_record(store.read(path), path)
    lose(store, path, damage)
    with pytest.raises(InputError, match="no metadata of the epoch is missing"):
        plan_rebuild(store, paths, stopped(paths))  # of epoch 3
    assert verify_job(store, paths).verdict.errors
    run_rebuild(store, paths, stopped(paths), 2, NOW)
    now = records.decode_epoch_record(store.read(path), path)
    assert replace(now, created_at_micros=was.created_at_micros) == was
    assert restored_epoch(store, paths) == 3
    assert verify_job(store, paths).verdict.errors == ()


def test_the_record_of_the_newest_epoch_needs_the_hint_of_its_run() -> None:
    job = whole_job()
    store, paths = job.store, job.paths
    lose(store, paths.epoch_record(Epoch(3)))
    plan = plan_rebuild(store, paths, stopped(paths), 3)
    assert any("the next start of Arroyo would write the same record" in one for one in plan.doubts)
    hint = paths.generation_manifest(RUN)
    named = records.decode_generation_manifest(store.read(hint), hint)
    older = replace(named, latest_ref=the_manifest(paths, 2))
    store.put(hint, encode(older))
    refused(store, paths, "nothing shows that .* was ever published", 3)


def test_the_record_of_the_only_epoch_is_rebuilt() -> None:
    job = surgery_job(Layout.PROTOCOL, epochs=1, sink_files=2)
    store, paths = job.store, job.paths
    record = paths.epoch_record(Epoch(1))
    before = store.read(record)
    lose(store, record)
    done = run_rebuild(store, paths, stopped(paths), 1, NOW)
    assert done.plan.head.epoch == 1
    found = records.decode_epoch_record(store.read(record), record)
    was = records.decode_epoch_record(before, record)
    assert replace(found, created_at_micros=0) == replace(was, created_at_micros=0)
    assert restored_epoch(store, paths) == 1


def test_a_fence_that_is_lost_names_the_run_that_arroyo_names() -> None:
    job = whole_job()
    store, paths = job.store, job.paths
    lose(store, paths.current_generation)
    with pytest.raises(InputError):
        list_jobs(store)
    assert find_damaged_job(store, "pl_x/job_x") == paths
    with pytest.raises((InputError, NotFoundError)):
        find_damaged_job(store, "pl_x/job_y")
    said = JobDirectory([Telling(facts_of(paths, JobCondition.STOPPED, run_id=5))])
    assert run_rebuild(store, paths, said, options=NOW).plan.doubts == ()
    at = paths.current_generation
    assert records.decode_current_generation(store.read(at), at).worker_generation == 5
    assert list_jobs(store) == [paths]


def with_commits(manifest: Any) -> Any:
    *rest, sink = manifest.operators
    kinds = {
        name: replace(one, config=replace(one.config, uses_two_phase_commit=True))
        for name, one in sink.configs.items()
    }
    return replace(manifest, needs_commit=True, operators=(*rest, replace(sink, configs=kinds)))


def committed(store: MemoryStore, paths: JobPaths, epoch: int) -> StatePath:
    """Write the marker of an epoch as Arroyo does, and return its path."""
    backend = ParquetBackend(store, paths, generation=RUN)
    backend.mark_committed(backend.load(Epoch(epoch)))
    return paths.committed(RUN, Epoch(epoch))


def committing_job() -> SurgeryJob:
    """A job whose last operator, a sink, commits in two phases; epochs 1 to 3 are committed."""
    job = whole_job()
    for number in (1, 2, 3):
        ref = the_manifest(job.paths, number)
        manifest = metadata.decode_manifest(job.store.read(ref), ref)
        ordered = sorted(manifest.operators, key=lambda one: one.operator == "sink_6")
        changed = with_commits(replace(manifest, operators=tuple(ordered)))
        job.store.put(ref, metadata.encode_manifest(changed))
        committed(job.store, job.paths, number)
    assert verify_job(job.store, job.paths).verdict.errors == ()
    return job


@DAMAGE
def test_the_marker_of_a_parent_is_rebuilt(damage: bytes | None) -> None:
    job = committing_job()
    store, paths = job.store, job.paths
    path = paths.committed(RUN, Epoch(2))
    was = store.read(path)
    lose(store, path, damage)
    run_rebuild(store, paths, stopped(paths), 2, NOW)
    assert store.read(path) == was
    assert verify_job(store, paths).verdict.errors == ()


def test_a_missing_marker_of_the_newest_epoch_is_no_damage() -> None:
    """A start finishes its commit: a marker in its place would lose the output."""
    job = committing_job()
    lose(job.store, job.paths.committed(RUN, Epoch(3)))
    refused(job.store, job.paths, "no metadata of the epoch is missing", error=InputError)


def test_a_manifest_with_a_commit_is_rebuilt_if_its_marker_is_there() -> None:
    job = committing_job()
    store, paths = job.store, job.paths
    lose(store, the_manifest(paths))
    plan = plan_rebuild(store, paths, stopped(paths))
    assert any("sink_6: its commit data is lost" in one for one in plan.doubts)
    lose(store, paths.committed(RUN, Epoch(3)))
    refused(store, paths, "no commit marker says that the commit was finished")


def test_the_first_epoch_of_a_run_is_rebuilt_with_a_doubt_about_its_parallelism() -> None:
    job = whole_job()
    job.start()
    job.write({})
    rows = held_rows(job.store, job.paths)
    lose(job.store, job.paths.manifest(WorkerGeneration(4), Epoch(4)))
    plan = run_rebuild(job.store, job.paths, stopped(job.paths), options=NOW).plan
    assert any("its parallelism that of epoch 3, of generation 3" in one for one in plan.doubts)
    assert held_rows(job.store, job.paths) == rows
    base = job.paths.generation_manifest(WorkerGeneration(4))
    was = job.store.read(base)
    lose(job.store, base)
    run_rebuild(job.store, job.paths, stopped(job.paths), options=NOW)
    now = records.decode_generation_manifest(job.store.read(base), base)
    then = records.decode_generation_manifest(was, base)
    assert (now.base_ref, now.latest_ref) == (then.base_ref, then.latest_ref)


def test_a_table_that_was_empty_for_an_epoch_is_known_from_older_ones() -> None:
    job = whole_job()
    rows = dict(job.files)
    job.files["window_3", "t"] = []
    job.write({})
    job.files["window_3", "t"] = [
        replace(one, epoch=Epoch(5)) for one in rows["window_3", "t"] if one.epoch == 3
    ]
    directory = job.paths.operator(RUN_OPERATOR, Epoch(5), RUN)
    moved = []
    for subtask, one in enumerate(job.files["window_3", "t"]):
        path = StatePath(f"{directory}/table-t-{subtask:03}")
        job.store.put(path, job.store.read(one.path))
        moved.append(replace(one, path=path))
    job.files["window_3", "t"] = moved
    job.write({})
    expected = held_rows(job.store, job.paths)
    assert ("window_3", "t") in expected
    lose(job.store, the_manifest(job.paths, 5))
    run_rebuild(job.store, job.paths, stopped(job.paths), options=NOW)
    assert held_rows(job.store, job.paths) == expected


@pytest.mark.parametrize("damage", [b"", b"\xff"])
def test_a_damaged_start_of_a_later_run_is_rebuilt(damage: bytes) -> None:
    """It published nothing; a start reads its manifest first, and fails."""
    job = whole_job()
    job.start()
    path = job.paths.generation_manifest(WorkerGeneration(4))
    was = records.decode_generation_manifest(job.store.read(path), path)
    lose(job.store, path, damage)
    assert run_rebuild(job.store, job.paths, stopped(job.paths), options=NOW).record
    now = records.decode_generation_manifest(job.store.read(path), path)
    assert (now.base_ref, now.latest_ref) == (was.base_ref, None)
    assert restored_epoch(job.store, job.paths) == 3


def losses(paths: JobPaths) -> list[StatePath]:
    """All objects of the two newest epochs, and what leads to them."""
    epochs = (Epoch(2), Epoch(3))
    named = [*map(paths.epoch_record, epochs), *(the_manifest(paths, one) for one in epochs)]
    return [*named, paths.generation_manifest(RUN), paths.current_generation]


def assert_nothing_older(store: ObjectStore, paths: JobPaths) -> None:
    """Check that a start restores epoch 3, claims it before, or fails: its manifest is there."""
    found = ParquetBackend(store, paths).next_restore()
    assert not isinstance(found, StartEmpty)
    epoch = found.record.epoch if isinstance(found, Claim) else 3
    epoch = found.manifest.epoch if isinstance(found, Restore) else epoch
    assert epoch == 3


@pytest.mark.parametrize("many", all_but(range(1, 7), [3]))
def test_any_objects_together_are_rebuilt_as_they_were_or_left_alone(many: int) -> None:
    """No combination makes a start restore other rows than those that were there."""
    job = whole_job()
    paths, rows = job.paths, held_rows(job.store, job.paths)
    rebuilt = 0
    for lost in itertools.combinations(losses(paths), many):
        store = copy_job(job.store, paths)
        store.delete_many(lost)
        for epoch in (2, 3, 2):  # 3 may need its parent, and the record of 2 needs its child
            left = own(store, paths)
            try:
                run_rebuild(store, paths, stopped(paths), epoch, NOW)
            except ArroyoStateError:
                assert own(store, paths) == left, lost
        there = own(store, paths)
        if {paths.generation_manifest(RUN), the_manifest(paths), paths.current_generation} <= {
            *there
        }:
            assert_nothing_older(store, paths)
        assert {path: there[path] for path in own(job.store, paths) if path not in lost} == {
            path: data for path, data in own(job.store, paths).items() if path not in lost
        }
        if set(lost) <= there.keys():
            assert (held_rows(store, paths), restored_epoch(store, paths)) == (rows, 3), lost
            assert verify_job(store, paths).verdict.errors == (), lost
            rebuilt += 1
    assert rebuilt or many > 4


def test_the_start_of_a_run_names_the_newest_checkpoint_although_its_record_is_lost() -> None:
    job = whole_job()
    store, paths = job.store, job.paths
    lose(store, paths.generation_manifest(RUN))
    lose(store, paths.epoch_record(Epoch(3)))
    plan = run_rebuild(store, paths, stopped(paths), 2, NOW).plan
    assert any("has no epoch record: the next start claims it" in one for one in plan.doubts)
    hint = paths.generation_manifest(RUN)
    named = records.decode_generation_manifest(store.read(hint), hint)
    assert named.latest_ref == the_manifest(paths)
    run_rebuild(store, paths, stopped(paths), 3, NOW)
    assert restored_epoch(store, paths) == 3
    lost = copy_job(store, paths)
    for path in (hint, paths.epoch_record(Epoch(3)), the_manifest(paths)):
        lose(lost, path)
    plan = plan_rebuild(lost, paths, stopped(paths), 2)
    assert any("a start restores an older epoch" in one for one in plan.doubts)


def test_a_run_at_another_parallelism_is_refused() -> None:
    job = whole_job()
    job.start()
    job.parallelism = 3
    job.entries["source_kafka_1", "k"].append({})
    job.write({})
    lose(job.store, job.paths.manifest(WorkerGeneration(4), Epoch(4)))
    refused(
        job.store, job.paths, "no table and subtask of source_kafka_1 is known|has 3 of 2 files"
    )


def test_real_jobs_get_equal_lists_and_rows(tmp_path: Path) -> None:
    """The manifest of the newest epoch of each job that Arroyo has written."""
    store = open_store(unpack("leader", tmp_path))
    rebuilt = 0
    refused: set[str] = set()
    for paths in list_jobs(store):
        was = ParquetBackend(store, paths).load()
        twin = copy_job(store, paths)
        lose(twin, was.ref)
        try:
            plan = plan_rebuild(twin, paths, stopped(paths))
        except ProtocolError as error:
            refused.add(error.message)
            continue
        now = metadata.decode_manifest(plan.after[was.ref], was.ref)
        assert (now.needs_commit, now.parent_ref) == (was.needs_commit, was.parent_ref)
        operators = {one.operator: one for one in now.operators}  # Arroyo's own order is random
        assert operators.keys() == {one.operator for one in was.operators}
        for old in was.operators:
            assert_as_good(twin, old, operators[old.operator], plan)
            rebuilt += 1
    assert rebuilt > 10
    assert not refused


def test_real_records_are_rebuilt_as_they_were(tmp_path: Path) -> None:
    store = open_store(unpack("leader", tmp_path))
    for paths in list_jobs(store):
        newest = ParquetBackend(store, paths).load()
        assert newest.parent_ref is not None
        before = Epoch(newest.epoch - 1)
        twin = copy_job(store, paths)
        path = paths.epoch_record(before)
        was = records.decode_epoch_record(twin.read(path), path)
        lose(twin, path)
        run_rebuild(twin, paths, stopped(paths), before, NOW)
        now = records.decode_epoch_record(twin.read(path), path)
        assert replace(now, created_at_micros=was.created_at_micros) == was
        assert was.worker_generation is not None
        hint = paths.generation_manifest(was.worker_generation)
        old = records.decode_generation_manifest(twin.read(hint), hint)
        lose(twin, hint)
        run_rebuild(twin, paths, stopped(paths), options=NOW)
        new = records.decode_generation_manifest(twin.read(hint), hint)
        assert new.latest_ref == old.latest_ref
        assert new.base_ref in (old.base_ref, None)
        assert restored_epoch(twin, paths) == newest.epoch


def test_what_cannot_be_known_is_refused() -> None:
    job = whole_job()
    paths = job.paths

    def damaged(*lost: StatePath) -> MemoryStore:
        twin = copy_job(job.store, paths)
        twin.delete_many(lost)
        return twin

    directory = paths.checkpoint(Epoch(3), RUN)
    manifest = the_manifest(paths)
    both = damaged(manifest, paths.epoch_record(Epoch(3)))
    refused(both, paths, "its record is lost, and 0 worker generations have a manifest", 3)
    both.put(manifest, b"\xff")
    refused(both, paths, "nothing shows that the epoch was ever complete", 3)
    refused(damaged(manifest, the_manifest(paths, 2)), paths, "rebuild that epoch first")
    first = damaged(the_manifest(paths, 1))
    refused(first, paths, "it is the first epoch of the job", 1)
    foreign = damaged(manifest)
    foreign.put(StatePath(f"{directory}/operator-other_9/table-t-000"), b"x")
    refused(foreign, paths, "belongs to an operator that epoch 2 lacks")
    table = paths.operator(OperatorId("source_kafka_1"), Epoch(3), RUN) / "table-k-001"
    refused(damaged(manifest, table), paths, r"source_kafka_1.k has 1 of 2 files")
    refused(damaged(manifest), paths, "no such epoch", 9, error=NotFoundError)
    twice = damaged(paths.epoch_record(Epoch(3)))
    other = twice.read(manifest)
    twice.put(paths.manifest(WorkerGeneration(2), Epoch(3)), other)
    refused(twice, paths, "2 worker generations have a manifest of it", 3)


def test_managed_jobs_and_edited_epochs_are_refused() -> None:
    store = written_by_word_job(max_epochs=3)
    (paths,) = list_jobs(store)
    lose(store, ParquetBackend(store, paths).load().ref)
    refused(store, paths, "this is a managed job", error=InputError)
    job = whole_job()
    at = ParquetBackend(job.store, job.paths).load().operators[-1].min_watermark_micros
    assert at is not None
    edit = SetWatermark(at_micros=at + 1_000_000)
    run_edit(job.store, job.paths, stopped(job.paths), edit, NOW)
    lose(job.store, the_manifest(job.paths))
    refused(job.store, job.paths, "edited or compacted in place")


def test_the_command_rebuilds_a_job_without_its_fence(tmp_path: Path) -> None:
    job = whole_job()
    target = copy_into(open_store(str(tmp_path)), job.store)
    target.delete_many([job.paths.current_generation])
    given = ["rebuild", str(job.paths.root), "--url", str(tmp_path), "--assume"]
    done = CliRunner().invoke(cli.main, [*given, "job_x=stopped", "--yes", "--quiet", "0"])
    assert done.exit_code == 0, done.output
    assert "1 object of epoch 3 rebuilt; `arroyo-state undo` undoes it" in done.output
    assert held_rows(target, job.paths) == held_rows(job.store, job.paths)
