"""The first epoch of a job of the protocol layout is made from another job's. A start finds all of
it or nothing, wherever the creation is cut off; whatever fails, both jobs keep what they have."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.state import (
    Epoch,
    Layout,
    ObjectStore,
    ParquetBackend,
    WorkerGeneration,
    WriteProtected,
    open_store,
)
from arroyo_dagster.state.codec.derived import encode
from tests.arroyo_jobs import Telling, facts_of, stopped
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import EditOutcome, JobCondition
from tests.internals import (
    Claim,
    EditOptions,
    JobDirectory,
    Restore,
    StartEmpty,
    plan_fork,
    run_fork,
    run_rebuild_undo,
)
from tests.jobs import copied, copy_into
from tests.journeys.test_create_epoch import check_goes_on
from tests.journeys.test_fork import below, taken
from tests.journeys.test_surgery import errors_of, others, state_of
from tests.surgery_jobs import SurgeryJob, surgery_job

RUN = WorkerGeneration(3)
NOW = EditOptions(quiet_seconds=0)


def jobs(layout: Layout = Layout.PROTOCOL) -> tuple[SurgeryJob, SurgeryJob]:
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


def run(source: SurgeryJob, job: SurgeryJob, **options: Any) -> EditOutcome:
    store = options.pop("store", job.store)
    directory = options.pop("directory", stopped(job.paths))
    chosen = EditOptions(**{"quiet_seconds": 0.0, **options})
    return run_fork(taken(source), store, job.paths, directory, chosen, create=True)


def undo(job: SurgeryJob, store: ObjectStore | None = None) -> Any:
    return run_rebuild_undo(store or job.store, job.paths, stopped(job.paths), NOW)


@pytest.mark.parametrize("layout", list(Layout), ids=[one.value for one in Layout])
def test_the_job_goes_on_from_the_source_state(layout: Layout) -> None:
    source, job = jobs(layout)
    theirs, was = state_of(source.store, source.paths), below(source.store, source.paths)
    store = WriteProtected(job.store)
    plan = plan_fork(taken(source), store, job.paths, stopped(job.paths), create=True)
    assert (plan.epoch, plan.creates, plan.why_not, plan.afterwards) == (1, True, None, ())
    assert any("never created for a running Arroyo" in one for one in plan.unknown)
    assert plan.preconditions[1].evidence.startswith("worker generation 3 names none")
    outcome = run(source, job, approved=plan.digest)
    assert outcome.plan == plan
    assert below(source.store, source.paths) == was
    check_goes_on(job, theirs)


def test_it_is_undone_until_the_job_has_written_an_epoch() -> None:
    source, job = jobs()
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
            run_rebuild_undo(job.store, job.paths, JobDirectory([said]), NOW)
        assert "pass --arroyo-db" in str(refused.value)
    assert others(job.store) == started
    said = Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=job.run))
    assert run_rebuild_undo(job.store, job.paths, JobDirectory([said]), NOW) is not None
    assert isinstance(ParquetBackend(job.store, job.paths).next_restore(), StartEmpty)


def test_it_is_not_undone_once_the_job_has_written_an_epoch() -> None:
    source, job = jobs()
    run(source, job)
    job.start()
    job.write({})
    was = others(job.store)
    said = Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=job.run))
    with pytest.raises(ConflictError, match="the job has continued from it"):
        run_rebuild_undo(job.store, job.paths, JobDirectory([said]), NOW)
    assert others(job.store) == was


@pytest.mark.parametrize(("mode", "crash"), [("before", False), ("after", True)])
def test_a_fault_at_any_change_leaves_nothing_or_a_whole_epoch(
    mode: Literal["before", "after"], crash: bool
) -> None:
    source, job = jobs()
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
                assert undo(job, store) is not None, note
            run(source, job, store=store)
            assert state_of(store, job.paths) == expected, note
        while undo(job, store) is not None:
            pass
        assert others(store) == was, note
    assert StartEmpty in seen
    assert Restore in seen


def test_an_undo_that_is_cut_off_is_completed() -> None:
    source, job = jobs()
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
    source: SurgeryJob, job: SurgeryJob, message: str, directory: JobDirectory | None = None
) -> None:
    was = others(job.store)
    with pytest.raises(InputError, match=message):
        run(source, job, directory=directory or stopped(job.paths))
    assert others(job.store) == was


def test_a_job_that_has_an_epoch_or_never_ran_is_refused() -> None:
    source, job = jobs()
    whole = surgery_job(Layout.PROTOCOL, epochs=2, name="job_c", store=job.store)
    refused(source, whole, "the job has epoch 2, so none needs to be created")
    whole.store.delete_many([whole.paths.epoch_record(Epoch(one)) for one in (1, 2)])
    refused(source, whole, "the next start of the job finds a checkpoint")
    whole.store.delete_many([whole.paths.manifest(RUN, Epoch(2))])
    refused(source, whole, "names the checkpoint .*, which is missing")
    job.store.delete_many([job.paths.generation_manifest(RUN)])
    refused(source, job, "has no worker generation that an epoch could belong to")


def test_a_run_that_arroyo_names_otherwise_or_that_runs_is_refused() -> None:
    source, job = jobs()
    other = JobDirectory([Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=2))])
    refused(source, job, "generation of the job is 3, and the test names run 2", other)
    runs = JobDirectory([Telling(facts_of(job.paths, JobCondition.RUNNING, run_id=3))])
    refused(source, job, "the job runs", runs)
    refused(source, job, "unknown", JobDirectory())


def test_a_start_meanwhile_ends_it() -> None:
    source, job = jobs()
    was = state_of(source.store, source.paths)
    now = facts_of(job.paths, JobCondition.STOPPED, run_id=3)
    for at in range(2, 9):
        store = copied(job.store)
        said = Telling(now, later=replace(now, run_id=4), at=at)
        with contextlib.suppress(ConflictError, InputError):
            run(source, job, store=store, directory=JobDirectory([said]))
            assert said.asked < at
        while undo(job, store) is not None:
            pass
        assert isinstance(ParquetBackend(store, job.paths).next_restore(), StartEmpty), at
    assert state_of(source.store, source.paths) == was


def test_the_command_needs_nothing_by_hand(tmp_path: Path) -> None:
    _, job = jobs()
    target = copy_into(open_store(str(tmp_path / "state")), job.store)
    words = ["fork", "job_a", "job_b", "--create", "--assume", "job_b=stopped"]
    given = [*words, "--url", target.url]
    runner = CliRunner()
    dry = runner.invoke(cli.main, given)
    assert dry.exit_code == 0, dry.output
    assert "by hand" not in dry.output
    assert "at epoch 1, which it creates" in dry.output
    found = json.loads(runner.invoke(cli.main, [*given, "--json"]).stdout)
    assert (found["plan"]["creates"], found["done"]) == (True, False)
    done = runner.invoke(cli.main, [*given, "--yes", "--quiet", "0"])
    assert done.exit_code == 0, done.output
    end = ["undo", "job_b", "--url", target.url, "--assume", "job_b=stopped", "--yes"]
    assert "the fork of epoch 1 was undone" in runner.invoke(cli.main, end).output
    assert ParquetBackend(target, job.paths).epochs() == []
