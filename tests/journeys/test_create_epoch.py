"""The first epoch of a job that has none is made from another job's. Until Arroyo's database names
it, or in the protocol layout until it is whole, nothing starts from it; whatever fails, the source
and the job keep what they have."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.errors import ConflictError, InputError, NotFoundError
from arroyo_dagster.state import (
    Epoch,
    JobPaths,
    Layout,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    StatePath,
    TableName,
    WorkerGeneration,
    WriteProtected,
    open_store,
    run_undo,
)
from tests.arroyo_jobs import Telling, facts_of, stopped
from tests.documentation import blocks
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import CheckpointFacts, EditOutcome, JobCondition, SetWatermark, encode, metadata
from tests.internals import (
    Claim,
    EditOptions,
    JobDirectory,
    Restore,
    StartEmpty,
    plan_evolve,
    plan_fork,
    run_edit,
    run_fork,
)
from tests.jobs import copied, copy_into
from tests.journeys.test_fork import below, taken
from tests.journeys.test_surgery import errors_of, others, state_of
from tests.loopback import Reply, serving
from tests.surgery_jobs import SurgeryJob, surgery_job

SINK = OperatorId("sink_6")
RUN = WorkerGeneration(3)
NOW = EditOptions(quiet_seconds=0)


def begun_job(layout: Layout = Layout.LEGACY) -> tuple[SurgeryJob, SurgeryJob]:
    """Job A with four epochs, and B, which was stopped within its first checkpoint: two of its
    operators had finished, and the sink had written."""
    source = surgery_job(layout, epochs=4, name="job_a")
    job = surgery_job(layout, epochs=1, name="job_b", store=source.store)
    if layout is Layout.PROTOCOL:
        job.store.delete_many([job.paths.epoch_record(Epoch(1))])
        return source, job
    for info in list(job.store.list(job.paths.root)):
        kept = "operator-sink_6/" in info.path or "source_impulse_0/" in info.path
        if not kept or info.path == job.paths.operator_metadata(SINK, Epoch(1)):
            job.store.delete_many([info.path])
    return source, job


def jobs_of_runs(layout: Layout = Layout.PROTOCOL) -> tuple[SurgeryJob, SurgeryJob]:
    """Job A with four epochs, and B, which was stopped before it finished one: worker generation 3
    has files of two operators, and its manifest names no checkpoint."""
    source = surgery_job(layout, epochs=4, name="job_a")
    job = surgery_job(Layout.PROTOCOL, epochs=1, name="job_b", store=source.store)
    for info in list(job.store.list(job.paths.generations)):
        kept = "operator-sink_6/" in info.path or "source_impulse_0/" in info.path
        if not kept and info.path != job.paths.generation_manifest(RUN):
            job.store.delete_many([info.path])
    job.store.delete_many([job.paths.epoch_record(Epoch(1))])
    job.previous = None
    job._publish_generation(base=None, latest=None)
    assert isinstance(ParquetBackend(job.store, job.paths).next_restore(), StartEmpty)
    return source, job


def said(paths: JobPaths, *checkpoints: CheckpointFacts, **facts: Any) -> JobDirectory:
    rows = checkpoints or (CheckpointFacts(epoch=Epoch(1), ready=False, state="inprogress"),)
    newest = max((one.epoch for one in rows if one.ready), default=None)
    known = {"checkpoints": rows, "newest_ready_epoch": newest, **facts}
    return JobDirectory([Telling(facts_of(paths, JobCondition.STOPPED, **known))])


def told(paths: JobPaths) -> JobDirectory:
    """What has to be known of a job whose epoch is created."""
    return said(paths) if paths.layout is Layout.LEGACY else stopped(paths)


def run(source: SurgeryJob, job: SurgeryJob, **options: Any) -> EditOutcome:
    store = options.pop("store", job.store)
    directory = options.pop("directory", told(job.paths))
    chosen = EditOptions(**{"quiet_seconds": 0.0, **options})
    return run_fork(taken(source), store, job.paths, directory, chosen, create=True)


def undo(job: SurgeryJob, store: ObjectStore | None = None) -> Any:
    return run_undo(store or job.store, job.paths, stopped(job.paths))


def check_goes_on(job: SurgeryJob, theirs: dict[str, Any]) -> None:
    """The job has the source's state, but for that of its sink, and goes on from it."""
    found = state_of(job.store, job.paths)
    assert found.keys() == theirs.keys()
    for name, one in found.items():
        if name != SINK:
            assert one[1:] == theirs[name][1:], name
            assert one[0][:2] == theirs[name][0][:2], name
    (entry,) = found[SINK][2].values()
    assert [key for key in entry if b"/out/job_b.json" in key]  # its own, not the source's
    assert errors_of(job.store, job.paths) == set()
    job.start()
    for _ in range(2):
        job.write({})
    for name in ("window_3", "join_4", "agg_5"):
        assert state_of(job.store, job.paths)[name][1] == theirs[name][1]
    assert errors_of(job.store, job.paths) == set()


@pytest.mark.parametrize(
    "jobs",
    [
        begun_job,
        partial(jobs_of_runs, Layout.LEGACY),
        partial(jobs_of_runs, Layout.PROTOCOL),
    ],
    ids=["legacy", "legacy-protocol", "protocol"],
)
def test_the_created_epoch_holds_the_source_state_and_the_job_goes_on_from_it(
    jobs: Callable[[], tuple[SurgeryJob, SurgeryJob]],
) -> None:
    source, job = jobs()
    theirs = state_of(source.store, source.paths)
    was = below(source.store, source.paths)
    store = WriteProtected(job.store)
    plan = plan_fork(taken(source), store, job.paths, told(job.paths), create=True)
    assert (plan.epoch, plan.creates, plan.why_not) == (1, True, None)
    if job.paths.layout is Layout.LEGACY:
        assert plan.afterwards == (
            "before the job is started, set the row in Arroyo's database: UPDATE checkpoints SET "
            "state = 'ready' WHERE job_id = 'job_b' AND epoch = 1",
        )
    else:
        assert plan.afterwards == ()
        assert any("never created for a running Arroyo" in one for one in plan.unknown)
        assert plan.preconditions[1].evidence.startswith("worker generation 3 names none")
    outcome = run(source, job, approved=plan.digest)
    assert outcome.plan == plan
    assert below(source.store, source.paths) == was
    check_goes_on(job, theirs)


def test_a_job_without_an_object_gets_an_epoch() -> None:
    source, job = begun_job()
    job.store.delete_many([info.path for info in job.store.list(job.paths.root)])
    plan = run(source, job).plan
    assert any("which file sink_6 writes" in one for one in plan.unknown)
    theirs = state_of(source.store, source.paths)
    assert state_of(job.store, job.paths)["agg_5"][1:] == theirs["agg_5"][1:]


@pytest.fixture
def api() -> Iterator[str]:
    """Arroyo's API, which lists the epoch without an end, whatever the state of its row."""
    job = {"id": "job_b", "pipeline_id": "pl_b", "state": "Stopped", "run_id": 1}
    pipeline = {"id": "pl_b", "name": "b", "stop": "checkpoint"}
    begun = {"epoch": 1, "checkpoint_type": "stopping", "start_time": 1, "finish_time": None}
    answers: dict[str, Any] = {
        "/jobs": {"data": [job]},
        "/pipelines": {"data": [pipeline], "hasMore": False},
        "/pipelines/pl_b": pipeline,
        "/pipelines/pl_b/jobs/job_b/checkpoints": {"data": [begun]},
    }
    with serving(lambda path, query: Reply(body=answers[path.removeprefix("/api/v1")])) as server:
        yield server.url


def test_it_is_undone_until_the_database_names_the_epoch(tmp_path: Path, api: str) -> None:
    source, job = begun_job()
    was = others(job.store)
    run(source, job)
    target = copy_into(open_store(str(tmp_path / "state")), job.store)
    created = others(target)

    def undo(*sources: str) -> Result:
        words = ["undo", "job_b", "--url", target.url, "--yes", *sources]
        return CliRunner().invoke(cli.main, words)

    ready = database(tmp_path / "ready.sqlite", "ready")
    for sources, message in (
        (("--assume", "job_b=stopped"), "no source names the checkpoints"),
        (("--arroyo-api", api), "Arroyo's API has no state of the created epoch"),
        (("--arroyo-db", ready), "Arroyo's database names epoch 1 as ready"),
        (("--arroyo-api", api, "--arroyo-db", ready), "database names epoch 1 as ready"),
    ):
        refused = undo(*sources)
        assert (refused.exit_code, message in refused.stderr) == (1, True), refused.stderr
        text = " ".join(refused.stderr.split())
        step = (
            "SET state = 'failed' WHERE job_id = 'job_b'" if "ready" in message else "--arroyo-db"
        )
        assert step in text
        assert others(target) == created
    done = undo("--arroyo-api", api, "--arroyo-db", database(tmp_path / "db.sqlite", "inprogress"))
    assert "the fork of epoch 1 was undone" in done.stdout, done.stderr
    assert others(target) == was


def test_it_is_undone_until_the_job_has_written_an_epoch() -> None:
    source, job = jobs_of_runs()
    was = others(job.store)
    run(source, job)
    assert undo(job).operation == "fork"
    assert others(job.store) == was
    run(source, job)
    job.start()  # and fails, or is stopped before its first checkpoint
    started = others(job.store)
    for known, kind, message in (
        (None, InputError, "no source says that this run has ended"),
        (3, InputError, "no source says that this run has ended"),
    ):
        said = Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=known))
        with pytest.raises(kind, match=message) as refused:
            run_undo(job.store, job.paths, JobDirectory([said]))
        assert "pass --arroyo-db" in str(refused.value)
    assert others(job.store) == started
    said = Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=job.run))
    assert run_undo(job.store, job.paths, JobDirectory([said])).done
    assert isinstance(ParquetBackend(job.store, job.paths).next_restore(), StartEmpty)


@pytest.mark.parametrize("published", [True, False])
def test_it_is_not_undone_once_the_job_has_written_an_epoch(published: bool) -> None:
    source, job = jobs_of_runs()
    run(source, job)
    job.start()
    if published:
        job.write({})
    else:
        job.store.put(job.paths.manifest(WorkerGeneration(job.run), Epoch(2)), b"claimed next")
    was = others(job.store)
    said = Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=job.run))
    with pytest.raises(ConflictError, match="the job has continued from it"):
        run_undo(job.store, job.paths, JobDirectory([said]))
    assert others(job.store) == was


def test_the_created_epoch_is_edited_like_any_other() -> None:
    source, job = begun_job()
    run(source, job)
    at = ParquetBackend(job.store, job.paths).load().operators[-1].min_watermark_micros
    assert at is not None
    edit = SetWatermark(at_micros=at + 1_000_000)
    assert run_edit(
        job.store, job.paths, stopped(job.paths), edit, EditOptions(quiet_seconds=0)
    ).published


@pytest.mark.parametrize(("mode", "crash"), [("before", False), ("after", True)])
def test_a_fault_at_any_change_leaves_no_epoch_or_a_whole_one(
    mode: Literal["before", "after"], crash: bool
) -> None:
    source, job = begun_job()
    was = others(job.store)
    counted = FaultInjecting(copied(job.store))
    run(source, job, store=counted)
    expected = state_of(counted, job.paths)
    for at in range(1 + crash, counted.changes + 1, 6):
        note = f"fault at change {at} of {counted.changes}"
        store = copied(job.store)
        with contextlib.suppress(Crash, OSError):
            run(source, job, store=FaultInjecting(store, fail_at=at, mode=mode, crash=crash))
        if ParquetBackend(store, job.paths).epochs():
            assert state_of(store, job.paths) == expected, note
        else:
            run(source, job, store=store)
            assert state_of(store, job.paths) == expected, note
        assert errors_of(store, job.paths) == set(), note
        while run_undo(store, job.paths, said(job.paths)).done:
            pass
        assert others(store) == was, note


@pytest.mark.parametrize(("mode", "crash"), [("before", False), ("after", True)])
def test_a_fault_at_any_change_leaves_nothing_or_a_whole_epoch(
    mode: Literal["before", "after"], crash: bool
) -> None:
    source, job = jobs_of_runs()
    was = others(job.store)
    counted = FaultInjecting(copied(job.store))
    run(source, job, store=counted)
    expected = state_of(counted, job.paths)
    seen = set()
    for at in [
        *range(1, counted.changes - 6, 22),
        *range(counted.changes - 6 + crash, counted.changes + 1, 2),
    ]:
        note = f"fault at change {at} of {counted.changes}"
        store = copied(job.store)
        with contextlib.suppress(Crash, OSError):
            run(source, job, store=FaultInjecting(store, fail_at=at, mode=mode, crash=crash))
        backend = ParquetBackend(store, job.paths)
        restored = backend.next_restore()
        seen.add(type(restored))
        if isinstance(restored, Claim):  # as Arroyo's start does
            assert store.create(restored.record_path, encode(restored.record))
            assert state_of(store, job.paths) == expected, note
            store.delete_many([restored.record_path])
        elif isinstance(restored, Restore):
            assert state_of(store, job.paths) == expected, note
            assert errors_of(store, job.paths) == set(), note
        else:
            assert isinstance(restored, StartEmpty), note
            if store.head(job.paths.manifest(RUN, Epoch(1))) is not None:
                with pytest.raises(InputError, match="has a manifest that nothing names"):
                    run(source, job, store=store)
                assert undo(job, store).done, note
            run(source, job, store=store)
            assert state_of(store, job.paths) == expected, note
        while undo(job, store).done:
            pass
        assert others(store) == was, note
    assert StartEmpty in seen
    assert Restore in seen


def test_an_undo_that_is_cut_off_is_completed() -> None:
    source, job = jobs_of_runs()
    was = others(job.store)
    run(source, job)
    counted = FaultInjecting(copied(job.store))
    undo(job, counted)
    for at in range(1, counted.changes + 1):
        store = copied(job.store)
        with contextlib.suppress(Crash, OSError):
            undo(job, FaultInjecting(store, fail_at=at, mode="after", crash=True))
        undo(job, store)
        assert others(store) == was, at


# ---- refusals ------------------------------------------------------------------------------------


def refused(
    source: SurgeryJob,
    job: SurgeryJob,
    message: str,
    directory: JobDirectory | None = None,
    kind: type[Exception] = InputError,
) -> None:
    was = others(job.store)
    with pytest.raises(kind, match=message):
        run(source, job, directory=directory or told(job.paths))
    assert others(job.store) == was


def test_what_arroyo_has_not_begun_or_has_finished_is_refused() -> None:
    source, job = begun_job()
    paths = job.paths
    refused(source, job, "no source names the checkpoints", stopped(paths))
    none = JobDirectory([Telling(facts_of(paths, JobCondition.STOPPED, checkpoints=()))])
    refused(source, job, "has not begun a checkpoint", none)
    ready = CheckpointFacts(epoch=Epoch(1), ready=True, state="ready")
    refused(source, job, "names epoch 1 as ready, but its metadata is missing", said(paths, ready))
    late = CheckpointFacts(epoch=Epoch(1), ready=False, state="committing")
    refused(source, job, "may still have to be committed", said(paths, late))
    rows = (CheckpointFacts(epoch=Epoch(1), ready=False),)
    runs = JobDirectory([Telling(facts_of(paths, JobCondition.RUNNING, checkpoints=rows))])
    refused(source, job, "the job runs", runs)
    whole = surgery_job(Layout.LEGACY, epochs=2, name="job_b", store=source.store)
    refused(source, whole, "the job has epoch 2, so none needs to be created")


def test_a_checkpoint_of_the_protocol_layout_that_a_start_claims_is_refused() -> None:
    source, job = begun_job(Layout.PROTOCOL)
    refused(source, job, "the next start of the job finds a checkpoint")


def test_a_job_of_other_sql_or_with_the_same_output_is_refused() -> None:
    source, job = begun_job()
    strange = StatePath(f"{job.paths.checkpoint(Epoch(1))}/operator-other_9/table-t-000")
    job.store.put(strange, b"x")
    refused(source, job, "has an operator that the source lacks")
    job.store.delete_many([strange])
    path = job.paths.subtask_file(SINK, TableName("f"), 0, Epoch(1))
    theirs = source.paths.subtask_file(SINK, TableName("f"), 0, Epoch(4))
    job.store.put(path, job.store.read(theirs))
    refused(source, job, "both jobs write the file")


def test_a_source_whose_sink_commits_in_two_phases_is_refused() -> None:
    source, job = begun_job()
    path = source.paths.operator_metadata(SINK, Epoch(4))
    sink = metadata.decode_operator(job.store.read(path), path)
    kinds = {
        name: replace(one, config=replace(one.config, uses_two_phase_commit=True))
        for name, one in sink.configs.items()
    }
    job.store.put(path, metadata.encode_operator(replace(sink, configs=kinds)))
    refused(source, job, "a sink commits in two phases")


def test_a_fork_and_an_evolve_without_it_name_it() -> None:
    source, job = begun_job()
    with pytest.raises(NotFoundError, match="the job has no checkpoint") as found:
        plan_fork(taken(source), job.store, job.paths, said(job.paths))
    assert "fork --create" in str(found.value)
    with pytest.raises(NotFoundError, match="the job has no checkpoint") as found:
        plan_evolve(taken(source), job.store, job.paths, said(job.paths))
    assert "evolve reads the columns of its tables from one" in str(found.value)


def test_a_job_that_has_an_epoch_or_never_ran_is_refused() -> None:
    source, job = jobs_of_runs()
    whole = surgery_job(Layout.PROTOCOL, epochs=2, name="job_c", store=job.store)
    refused(source, whole, "the job has epoch 2, so none needs to be created")
    whole.store.delete_many([whole.paths.epoch_record(Epoch(one)) for one in (1, 2)])
    refused(source, whole, "the next start of the job finds a checkpoint")
    whole.store.delete_many([whole.paths.manifest(RUN, Epoch(2))])
    refused(source, whole, "names the checkpoint .*, which is missing")
    job.store.delete_many([job.paths.generation_manifest(RUN)])
    refused(source, job, "has no worker generation that an epoch could belong to")


def test_a_run_that_arroyo_names_otherwise_or_that_runs_is_refused() -> None:
    source, job = jobs_of_runs()
    other = JobDirectory([Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=2))])
    refused(source, job, "generation of the job is 3, and the test names run 2", other)
    runs = JobDirectory([Telling(facts_of(job.paths, JobCondition.RUNNING, run_id=3))])
    refused(source, job, "the job runs", runs)
    refused(source, job, "unknown", JobDirectory())


def test_a_start_meanwhile_ends_it() -> None:
    source, job = jobs_of_runs()
    was = state_of(source.store, source.paths)
    now = facts_of(job.paths, JobCondition.STOPPED, run_id=3)
    for at in range(2, 9):
        store = copied(job.store)
        said = Telling(now, later=replace(now, run_id=4), at=at)
        with contextlib.suppress(ConflictError, InputError):
            run(source, job, store=store, directory=JobDirectory([said]))
            assert said.asked < at
        while undo(job, store).done:
            pass
        assert isinstance(ParquetBackend(store, job.paths).next_restore(), StartEmpty), at
    assert state_of(source.store, source.paths) == was


# ---- the command ---------------------------------------------------------------------------------


def database(path: Path, state: str) -> str:
    """Arroyo's database, as far as it is read."""
    with contextlib.closing(sqlite3.connect(path)) as written:
        written.executescript(
            f"""
            CREATE TABLE pipelines (id INTEGER, pub_id TEXT, name TEXT);
            CREATE TABLE job_configs (id TEXT, pipeline_id INTEGER, stop TEXT);
            CREATE TABLE job_statuses (id TEXT, state TEXT, run_id INTEGER);
            CREATE TABLE checkpoints (job_id TEXT, epoch INTEGER, min_epoch INTEGER, state TEXT);
            INSERT INTO pipelines VALUES (1, 'pl_b', 'b');
            INSERT INTO job_configs VALUES ('job_b', 1, 'checkpoint');
            INSERT INTO job_statuses VALUES ('job_b', 'Stopped', 1);
            INSERT INTO checkpoints VALUES ('job_b', 1, 0, '{state}');
            """
        )
        written.commit()
    return str(path)


@pytest.mark.parametrize("layout", list(Layout), ids=[one.value for one in Layout])
def test_the_command_creates_the_epoch_and_names_what_is_left(
    layout: Layout, tmp_path: Path
) -> None:
    documented = next(
        text for text in blocks("docs/edit-state.md", "sh") if "--create" in text
    ).strip()
    words = documented.replace("SOURCE", "job_a").replace("JOB", "job_b").split()
    assert words[-2:] == ["--arroyo-db", "/var/lib/arroyo/state.sqlite"]
    if layout is Layout.LEGACY:
        _, job = begun_job()
        known = ["--arroyo-db", database(tmp_path / "state.sqlite", "inprogress")]
    else:
        _, job = jobs_of_runs()
        known = ["--assume", "job_b=stopped"]
    target = copy_into(open_store(str(tmp_path / "state")), job.store)
    given = [*words[1:-2], *known, "--url", target.url]
    by_hand = "to do by hand: before the job is started, set the row"
    runner = CliRunner()
    dry = runner.invoke(cli.main, given)
    assert dry.exit_code == 0, dry.output
    assert by_hand in dry.output if layout is Layout.LEGACY else "by hand" not in dry.output
    assert "at epoch 1, which it creates" in dry.output
    found = json.loads(runner.invoke(cli.main, [*given, "--json"]).stdout)
    assert (found["plan"]["creates"], found["done"]) == (True, False)
    done = runner.invoke(cli.main, [*given, "--yes", "--quiet", "0"])
    assert done.exit_code == 0, done.output
    assert ("to do by hand" in done.output) is (layout is Layout.LEGACY)
    assert ParquetBackend(target, job.paths).epochs() == [1]
    end = ["undo", "job_b", "--url", target.url, *known, "--yes"]
    assert "the fork of epoch 1 was undone" in runner.invoke(cli.main, end).output
    assert ParquetBackend(target, job.paths).epochs() == []
    window = [*words[1:-2], "--url", target.url, "--window", "--arroyo-api", "http://localhost:1"]
    assert runner.invoke(cli.main, window).exit_code == 2
