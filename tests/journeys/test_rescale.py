"""A stopped job at another parallelism: its subtasks load exactly the rows of before, each only its
own, or the rescale is refused. Nothing is lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state import (
    Epoch,
    Layout,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    WriteProtected,
    list_jobs,
    open_store,
    range_for_server,
    verify_job,
)
from arroyo_dagster.state.operations.surgery import rescale
from tests.arroyo_jobs import ArroyoJob, Telling, content, facts_of, stopped
from tests.compat.arroyo import unpack
from tests.damages import copy_job
from tests.formats import (
    EditOutcome,
    ExpiringTimeKeyFiles,
    JobCondition,
    Rescale,
    TableAction,
    metadata,
)
from tests.internals import EditOptions, JobDirectory, plan_edit, plan_managed_edit, run_edit
from tests.jobs import copied, copy_into, written_by_word_job
from tests.journeys.test_fork import nexmark
from tests.journeys.test_surgery import others, state_of
from tests.shares import LAYOUTS
from tests.surgery_jobs import STATE, SurgeryJob, global_config, held_rows, surgery_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")


def run(store: ObjectStore, job: ArroyoJob, parallelism: int, **options: Any) -> EditOutcome:
    directory = options.pop("directory", stopped(job.paths))
    chosen = EditOptions(**{"quiet_seconds": 0.0, **options})
    return run_edit(store, job.paths, directory, Rescale(parallelism=parallelism), chosen)


def shared(store: ObjectStore, job: ArroyoJob, parallelism: int) -> int:
    """The files that more than one subtask would read."""
    return sum(
        len(file.owners(parallelism)) > 1
        for operator in ParquetBackend(store, job.paths).load().operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for file in files.files
    )


@LAYOUTS
@pytest.mark.parametrize("parallelism", [1, 3, 7])
def test_each_subtask_gets_its_own_files_and_together_they_load_the_same(
    layout: Layout, parallelism: int
) -> None:
    job = surgery_job(layout)
    state, was = state_of(job.store, job.paths), others(job.store)
    plan = plan_edit(
        WriteProtected(job.store), job.paths, stopped(job.paths), Rescale(parallelism=parallelism)
    )
    assert plan.preconditions[-1].name == f"{parallelism} subtasks load what the present ones load"
    outcome = run(job.store, job, parallelism, approved=plan.digest)
    assert outcome.plan == plan
    assert state_of(job.store, job.paths) == state
    assert shared(job.store, job, parallelism) == 0
    assert verify_job(job.store, job.paths, parallelism=parallelism).verdict.errors == ()
    if parallelism == 1:  # one subtask reads every file as it is
        assert (outcome.published, others(job.store)) == (False, was)
        return
    assert {one.operator for one in plan.tables if one.action is TableAction.CHANGED} == {*STATE}
    (evidence,) = outcome.evidence
    assert evidence.endswith(plan.preconditions[-1].evidence)


def test_subtasks_of_impulse_sources_that_come_or_go_are_named() -> None:
    job = surgery_job(Layout.LEGACY)
    more = run(copied(job.store), job, 4).plan
    assert more.duplicate_outputs == ("source_impulse_0: subtasks 2, 3 are new and count from 0",)
    assert (more.missing_outputs, more.unknown) == ((), ())
    fewer = run(job.store, job, 1).plan
    assert fewer.missing_outputs == ("source_impulse_0: subtasks 1 do not go on counting",)
    assert "a lower parallelism was not tried" in fewer.unknown[0]


@pytest.mark.parametrize("name", ["legacy", pytest.param("leader", marks=pytest.mark.soak)])
def test_real_jobs_hold_their_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of Nexmark, whose source alone could not be restored."""
    monkeypatch.setattr(rescale, "_ONE_PARALLELISM", frozenset())
    store = open_store(unpack(name, tmp_path))
    split = 0
    for paths in list_jobs(store):
        twin = copy_job(store, paths)
        before = content(twin, paths)
        edit, options = Rescale(parallelism=5), EditOptions(quiet_seconds=0)
        outcome = run_edit(twin, paths, stopped(paths), edit, options)
        split += outcome.published
        after = content(twin, paths)
        # Rows of joins beyond the retention depend on record batches, and so on the files.
        assert {at: one for at, one in after.items() if at[1] not in ("left", "right")} == {
            at: one for at, one in before.items() if at[1] not in ("left", "right")
        }
        assert verify_job(twin, paths, parallelism=5).verdict.errors == ()
    assert split > 2


# ---- refusals ------------------------------------------------------------------------------------


def refused(job: ArroyoJob, kind: type[Exception], message: str, parallelism: int = 3) -> None:
    was = others(job.store)
    edit = Rescale(parallelism=parallelism)
    for act in (
        partial(plan_edit, job.store, job.paths, stopped(job.paths), edit),
        partial(run, job.store, job, parallelism),
    ):
        with pytest.raises(kind, match=message):
            act()
    assert others(job.store) == was


def test_tables_that_arroyo_restores_at_one_parallelism_only_are_refused() -> None:
    job = SurgeryJob(Layout.LEGACY, job="job_a")
    table = global_config("s", "nexmark source state")
    job.keep("source_nexmark_0", table, {0: nexmark()}, {1: nexmark()})
    job.write({})
    refused(job, InputError, "cannot be restored at parallelism 3, only at 2")
    unknown = ArroyoJob(Layout.LEGACY)
    unknown.write({})
    refused(unknown, InputError, "cannot be restored at parallelism 3, only at 2")
    bare = surgery_job(Layout.LEGACY)
    path = bare.paths.operator_metadata(OperatorId("source_kafka_1"), Epoch(3))
    operator = metadata.decode_operator(bare.store.read(path), path)
    bare.store.put(path, metadata.encode_operator(replace(operator, configs={})))
    refused(bare, InputError, "cannot be restored at parallelism 3, only at 2")


@pytest.mark.parametrize("parallelism", [0, -1, 1001, 10**9, 2**64])
def test_a_parallelism_that_no_job_has_is_refused_before_anything_is_read(parallelism: int) -> None:
    job = surgery_job(Layout.LEGACY)
    refused(job, InputError, "can be rescaled to 1 to 1000 subtasks", parallelism)
    words = ["edit", "rescale", "job_x", "--", str(parallelism)]
    done = CliRunner().invoke(cli.main, [*words, "--url", "memory:none"])
    assert done.exit_code != 0


def test_neighbours_restored_together_prove_what_each_alone_proves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = surgery_job(Layout.LEGACY)
    checkpoint = ParquetBackend(job.store, job.paths).load()
    alone = rescale.loaded_rows(job.store, checkpoint, 7)
    monkeypatch.setattr(rescale, "MAX_RESTORES", 3)
    assert [one.end for one in rescale._ranges(7, 3)][:2] == [
        range_for_server(2, 7).end,
        range_for_server(5, 7).end,
    ]
    assert rescale.loaded_rows(job.store, checkpoint, 7) == alone
    state = state_of(job.store, job.paths)
    run(job.store, job, 7)
    assert (state_of(job.store, job.paths), shared(job.store, job, 7)) == (state, 0)


@pytest.mark.parametrize("together", [64, 3])
def test_files_whose_bounds_hide_rows_of_a_new_subtask_are_refused(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One subtask reads the file as a whole; of seven the owners of some rows would not open it."""
    monkeypatch.setattr(rescale, "MAX_RESTORES", together)
    job = surgery_job(Layout.LEGACY, parallelism=1)
    path = job.paths.operator_metadata(OperatorId("window_3"), Epoch(3))
    operator = metadata.decode_operator(job.store.read(path), path)
    (name, files), *_ = operator.tables.items()
    assert isinstance(files, ExpiringTimeKeyFiles)
    first, second = range_for_server(0, 7), range_for_server(1, 7)
    narrow = [
        replace(one, min_routing_key=first.start, max_routing_key=second.end) for one in files.files
    ]
    wrong = replace(operator, tables={name: replace(files, files=tuple(narrow))})
    job.store.put(path, metadata.encode_operator(wrong))
    refused(job, ProtocolError, "of which not all are the .* rows that are loaded now", 7)


def test_managed_jobs_and_running_jobs_are_refused() -> None:
    store = written_by_word_job(max_epochs=2)
    (paths,) = list_jobs(store)
    with pytest.raises(InputError, match="a managed job needs no rescale"):
        plan_managed_edit(store, paths, JobDirectory(), Rescale(parallelism=3))
    job = surgery_job(Layout.LEGACY)
    was = others(job.store)
    running = JobDirectory([Telling(facts_of(job.paths, JobCondition.RUNNING))])
    with pytest.raises(InputError, match="the job runs"):
        run(job.store, job, 3, directory=running)
    assert others(job.store) == was


def test_the_command_prints_the_proof_in_the_plan_and_in_the_result(tmp_path: Path) -> None:
    job = surgery_job(Layout.PROTOCOL)
    target = copy_into(open_store(str(tmp_path)), job.store)
    given = ["edit", "rescale", "job_x", "3", "--url", str(tmp_path), "--assume", "job_x=stopped"]
    runner = CliRunner()
    dry = runner.invoke(cli.main, given)
    assert dry.exit_code == 0, dry.output
    assert "precondition met: 3 subtasks load what the present ones load" in dry.output
    digest = json.loads(runner.invoke(cli.main, [*given, "--json"]).stdout)["plan"]["digest"]
    done = runner.invoke(cli.main, [*given, "--yes", "--approve", digest, "--quiet", "0"])
    assert done.exit_code == 0, done.output
    assert "evidence: 3 subtasks load from the new files:" in done.output
    assert "to do by hand: before the job is started, set the parallelism" in done.output
    assert held_rows(target, job.paths) == held_rows(job.store, job.paths)
