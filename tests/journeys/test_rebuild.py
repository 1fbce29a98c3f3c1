"""Lost metadata of the legacy layout written anew from data files: equal to the original, or
refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state import (
    Epoch,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    StatePath,
    WriteProtected,
    list_jobs,
    open_store,
)
from arroyo_dagster.state.model.surgery.rebuild import RebuildPlan
from tests.arroyo_jobs import Telling, content, facts_of, stopped
from tests.compat.arroyo import unpack
from tests.damages import copy_job
from tests.formats import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    JobCondition,
    digest_rows,
    metadata,
)
from tests.internals import EditOptions, JobDirectory, plan_rebuild, restored_rows, run_rebuild
from tests.jobs import copy_into, own, word_job, written_by_word_job
from tests.surgery_jobs import SurgeryJob, held_rows, surgery_job

NOW = EditOptions(quiet_seconds=0)
DAMAGE = pytest.mark.parametrize(
    "damage", [None, b"", b"\xff\xff"], ids=["missing", "empty", "bad"]
)
OPERATORS = ("source_kafka_1", "watermark_2", "window_3", "join_4", "agg_5")


def lost(store: ObjectStore, paths: JobPaths, operator: str, epoch: int = 3) -> bytes:
    path = paths.operator_metadata(OperatorId(operator), Epoch(epoch))
    data = store.read(path)
    store.delete_many([path])
    return data


def lose(store: ObjectStore, path: StatePath, damage: bytes | None = None) -> None:
    store.delete_many([path])
    if damage is not None:
        store.put(path, damage)


def lists(operator: OperatorCheckpoint) -> dict[str, Any]:
    return {
        str(name): sorted(files.files, key=repr)  # Arroyo's own order is random
        for name, files in operator.tables.items()
    }


def loaded(store: ObjectStore, operator: OperatorCheckpoint) -> dict[str, Any]:
    return {
        str(name): digest_rows(restored_rows(store, operator, name, managed=False).rows)
        for name, files in operator.tables.items()
        if isinstance(files, ExpiringTimeKeyFiles)
    }


# ---- rebuilt -------------------------------------------------------------------------------------


def rebuilt_as_it_was(
    job: SurgeryJob, path: StatePath, damage: bytes | None
) -> tuple[RebuildPlan, StatePath | None]:
    """Lose an object of epoch 3 and rebuild it as planned. The plan, and where its record is."""
    store, paths = job.store, job.paths
    was, rows = ParquetBackend(store, paths).load(), held_rows(store, paths)
    before = own(store, paths)
    lose(store, path, damage)
    plan = plan_rebuild(WriteProtected(store), paths, stopped(paths))
    assert (plan.why_not, list(plan.after), plan.before[path]) == (None, [path], damage)
    outcome = run_rebuild(store, paths, stopped(paths), options=replace(NOW, approved=plan.digest))
    now = ParquetBackend(store, paths).load()
    for old, new in zip(was.operators, now.operators, strict=True):
        assert lists(new) == lists(old)
        assert (new.configs, new.epoch, new.parallelism) == (old.configs, 3, old.parallelism)
    assert held_rows(store, paths) == rows
    assert {at for at, data in own(store, paths).items() if before[at] != data} <= {str(path)}
    return plan, outcome.record


@DAMAGE
@pytest.mark.parametrize("operator", OPERATORS)
def test_lost_metadata_of_an_operator_is_rebuilt_as_it_was(
    operator: str, damage: bytes | None
) -> None:
    job = surgery_job(Layout.LEGACY)
    store, paths = job.store, job.paths
    path = paths.operator_metadata(OperatorId(operator), Epoch(3))
    plan, record = rebuilt_as_it_was(job, path, damage)
    early = operator in ("source_kafka_1", "watermark_2")
    doubt = "it has no watermark, as at epoch 2" if early else "the watermark is that of epoch 2"
    assert any(text.startswith(f"{operator}: {doubt}") for text in plan.doubts)
    assert record is not None
    assert json.loads(store.read(record))["digest"] == plan.digest
    with pytest.raises(InputError, match="no metadata of the epoch is missing"):
        plan_rebuild(store, paths, stopped(paths))


def test_the_checkpoints_own_metadata_is_rebuilt_from_its_operators() -> None:
    job = surgery_job(Layout.LEGACY)
    store, paths = job.store, job.paths
    was, rows = ParquetBackend(store, paths).load(), held_rows(store, paths)
    store.delete_many([paths.legacy_metadata(Epoch(3))])
    with pytest.raises(InputError, match="no metadata of the epoch is missing"):
        plan_rebuild(store, paths, stopped(paths))  # the newest visible one is epoch 2
    assert run_rebuild(store, paths, stopped(paths), 3, NOW).record is not None
    now = ParquetBackend(store, paths).load()
    assert (now.epoch, now.min_epoch, now.operators) == (3, was.min_epoch, was.operators)
    assert held_rows(store, paths) == rows


def test_real_jobs_get_equal_lists_and_rows(tmp_path: Path) -> None:
    """Each operator of the newest epoch of each job. At its own watermark a restore loads its rows;
    at the older one never fewer."""
    store = open_store(unpack("legacy", tmp_path))
    rebuilt = 0
    refused: set[str] = set()
    for paths in list_jobs(store):
        newest = ParquetBackend(store, paths).load()
        for was in newest.operators:
            twin = copy_job(store, paths)
            lost(twin, paths, was.operator, newest.epoch)
            try:
                plan = plan_rebuild(twin, paths, stopped(paths))
            except ProtocolError as error:
                refused.add(error.message.partition(": ")[2])
                continue
            (data,) = plan.after.values()
            now = metadata.decode_operator(data, "rebuilt")
            rebuilt += 1
            assert_as_good(twin, was, now, plan)
    assert rebuilt > 20
    assert all("commits in two phases" in text for text in refused), refused


def assert_as_good(
    store: ObjectStore, was: OperatorCheckpoint, now: OperatorCheckpoint, plan: RebuildPlan
) -> None:
    """Check that the lists differ by files only that the watermark lets expire, or a compaction
    merged."""
    at_its_time = replace(now, min_watermark_micros=was.min_watermark_micros)
    rows = loaded(store, at_its_time)
    assert {name: rows[name] for name in loaded(store, was)} == loaded(store, was)
    assert all(rows[name].rows == 0 for name in rows if name not in was.tables)
    compacted = any("compacted" in text for text in plan.doubts)
    for name, files in was.tables.items():
        assert now.configs[name] == was.configs[name]
        mine = now.tables[name]
        if not isinstance(mine, ExpiringTimeKeyFiles):
            assert set(mine.paths) == set(files.paths)
        elif not compacted:
            config = was.configs[name].config
            assert isinstance(files, ExpiringTimeKeyFiles)
            assert isinstance(config, ExpiringTimeKeyConfig)
            assert set(files.files) <= set(mine.files)
            cutoff = (was.min_watermark_micros or 0) - config.retention_micros
            more = set(mine.files) - set(files.files)
            assert all(one.max_timestamp_micros < cutoff for one in more)


# ---- refused -------------------------------------------------------------------------------------


def refused(
    store: MemoryStore, paths: JobPaths, message: str, epoch: int | None = None, **given: Any
) -> None:
    """Neither the plan nor the execution goes on, and no object changes."""
    directory = given.get("directory", stopped(paths))
    before = own(store, paths)
    error = given.get("error", ProtocolError)
    with pytest.raises(error, match=message):
        run_rebuild(store, paths, directory, epoch, NOW)
    assert own(store, paths) == before


def test_what_cannot_be_known_is_refused() -> None:
    job = surgery_job(Layout.LEGACY)
    paths = job.paths
    kafka = paths.operator(OperatorId("source_kafka_1"), Epoch(3))
    window = paths.operator(OperatorId("window_3"), Epoch(3))

    def damaged(operator: str) -> MemoryStore:
        twin = copy_job(job.store, paths)
        lost(twin, paths, operator)
        return twin

    store = damaged("source_kafka_1")
    store.delete_many([StatePath(kafka / "table-k-001")])
    refused(store, paths, r"source_kafka_1.k has 1 of 2 files")
    store = damaged("window_3")
    store.put(StatePath(window / "table-zzz-000"), b"x")
    refused(store, paths, "no table and subtask of window_3 is known for .*zzz-000")
    store = damaged("window_3")
    (name,) = {p.rpartition("-")[0] for p in own(store, paths) if p.startswith(f"{window}/table-")}
    store.put(StatePath(f"{name}-007"), b"x")
    refused(store, paths, "no table and subtask of window_3 is known for .*-007")
    store = damaged("window_3")
    old = paths.operator(OperatorId("window_3"), Epoch(2))
    store.delete_many([next(StatePath(p) for p in own(store, paths) if p.startswith(f"{old}/t"))])
    refused(store, paths, "is gone, which epoch 3 lists|is gone, which epoch 2 lists")
    store = damaged("window_3")
    store.delete_many([paths.legacy_metadata(Epoch(3))])
    refused(store, paths, "nothing shows that the epoch was ever complete", 3)
    store = damaged("window_3")
    lost(store, paths, "window_3", 2)
    refused(store, paths, "files of window_3 lie in epoch 2, whose metadata cannot be read")
    lost(store, paths, "window_3", 1)
    refused(store, paths, "there is no older epoch that can be read")
    refused(store, paths, "no such epoch", 9, error=NotFoundError)


def test_a_broken_data_file_is_refused() -> None:
    job = surgery_job(Layout.LEGACY)
    lost(job.store, job.paths, "window_3")
    directory = job.paths.operator(OperatorId("window_3"), Epoch(3))
    path = next(p for p in own(job.store, job.paths) if p.startswith(f"{directory}/table-"))
    job.store.put(StatePath(path), b"PAR1")
    refused(job.store, job.paths, "a data file of the epoch is broken", error=ArroyoStateError)


def test_a_rebuild_that_heals_only_a_part_of_the_epoch_is_refused_by_verification() -> None:
    job = surgery_job(Layout.LEGACY)
    lost(job.store, job.paths, "window_3")
    other = job.paths.operator(OperatorId("source_kafka_1"), Epoch(3))
    job.store.delete_many([StatePath(other / "table-k-000")])
    refused(job.store, job.paths, "does not pass verification")


def test_a_job_that_runs_or_of_unknown_status_is_planned_only() -> None:
    job = surgery_job(Layout.LEGACY)
    store, paths = job.store, job.paths
    lost(store, paths, "window_3")
    running = JobDirectory([Telling(facts_of(paths, JobCondition.RUNNING))])
    for directory in (JobDirectory(), running):
        assert plan_rebuild(store, paths, directory).why_not is not None
        refused(store, paths, "cannot be rewritten now", directory=directory, error=InputError)
    starts = Telling(
        facts_of(paths, JobCondition.STOPPED), facts_of(paths, JobCondition.RUNNING), at=3
    )
    refused(store, paths, "the job changed", directory=JobDirectory([starts]), error=ConflictError)


def test_other_plans_and_managed_jobs_are_refused() -> None:
    job = surgery_job(Layout.LEGACY)
    lost(job.store, job.paths, "window_3")
    with pytest.raises(ConflictError, match="plan 00 was approved"):
        run_rebuild(job.store, job.paths, stopped(job.paths), options=replace(NOW, approved="00"))
    store = written_by_word_job(max_epochs=2, layout=Layout.LEGACY)
    pipeline = word_job(store)
    pipeline.layout = Layout.LEGACY
    refused(store, pipeline.paths, "this is a managed job", error=InputError)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_plans_then_executes(tmp_path: Path) -> None:
    job = surgery_job(Layout.LEGACY)
    target = copy_into(open_store(str(tmp_path)), job.store)
    lost(target, job.paths, "window_3")
    given = ["rebuild", str(job.paths.root), "--url", str(tmp_path), "--assume", "job_x=stopped"]
    runner = CliRunner()
    plan = runner.invoke(cli.main, given)
    assert plan.exit_code == 0, plan.output
    assert "doubt: window_3: the watermark is that of epoch 2" in plan.output
    assert "nothing was changed, add --yes to execute" in plan.output
    dry = runner.invoke(cli.main, [*given, "--json"])
    digest = json.loads(dry.stdout)["digest"]
    assert runner.invoke(cli.main, [*given, "--approve", digest]).exit_code == 2
    done = runner.invoke(cli.main, [*given, "--yes", "--approve", digest, "--quiet", "0"])
    assert done.exit_code == 0, done.output
    assert "1 object of epoch 3 rebuilt" in done.output
    assert content(target, job.paths) == content(job_before(), job.paths)


def job_before() -> MemoryStore:
    return surgery_job(Layout.LEGACY).store
