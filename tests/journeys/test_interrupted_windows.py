"""What a second call says after a window was killed, what a person may undo of a running job, and
what the next start loses of an aggregate without GROUP BY. A running job is rescaled: wherever
that fails, the job runs again and loads every row, at one of the two parallelisms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.errors import InputError
from arroyo_dagster.state import Epoch, Layout, MemoryStore, OperatorId, PipelineId, configure
from arroyo_dagster.state.model.maintenance_window import WindowRecord
from arroyo_dagster.state.operations.surgery.window import (
    EditWindow,
    PlannableEdit,
    run_edit_window,
)
from tests.arroyo_jobs import ArroyoJob, begun
from tests.arroyo_server import PIPELINE, ModelArroyo, arroyo
from tests.arroyo_windows import deaths, died, recovered
from tests.compat.arroyo import unpack
from tests.formats import Rescale, encode, metadata
from tests.internals import WindowEnd, controlled_job, plan_edit, run_edit
from tests.jobs import copy_into, listing
from tests.journeys.test_edit_window import EVERYWHERE, LAYOUTS, options, running, window
from tests.journeys.test_rescale import shared
from tests.journeys.test_surgery import errors_of
from tests.shares import Share
from tests.surgery_jobs import SurgeryJob, held_rows, surgery_job


def moved(job: Any, name: str) -> Any:
    """The job in a store that the command line opens by its URL."""
    store = copy_into(MemoryStore(name), job.store)
    job.store = store
    return job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SurgeryJob]:
    yield moved(surgery_job(Layout.LEGACY), f"cut-off-{tmp_path.name}")
    configure(None)


@pytest.fixture
def unkeyed(tmp_path: Path) -> Iterator[ArroyoJob]:
    yield moved(begun(Layout.LEGACY), f"unkeyed-{tmp_path.name}")
    configure(None)


def call(job: ArroyoJob, *words: str) -> Result:
    return CliRunner().invoke(cli.main, [*words, "--url", job.store.url])


DELETE = ("edit", "delete-key", "job_x", "k1")
STOPPED = ("--assume", "job_x=stopped")
COMMANDS = {
    "edit": (*DELETE, "--window"),
    "rescale": ("edit", "rescale", "job_x", "3", "--window"),
    "compact": ("compact", "window", "job_x", "--now"),
}


@pytest.mark.parametrize("done", [False, True], ids=["not-done", "done"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_call_after_a_killed_window_says_what_was_not_done(
    job: SurgeryJob, command: tuple[str, ...], done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controlled_job, "POLL_SECONDS", 0.01)
    model = ModelArroyo(job, seconds_a_request=2.0)
    model.stop = "checkpoint"
    model.sleep(60)  # the window has stopped the job, and its process is killed
    record = WindowRecord(
        pipeline=PipelineId(PIPELINE),
        job=job.paths.job,
        run_id=job.run,
        owner="a killed call",
        opened_at_micros=1 if done else 1 << 60,  # an edit from before the window is not its own
        edits=True,
    )
    job.store.put(job.paths.window, encode(record))
    assert call(job, *DELETE, *STOPPED, "--yes", "--quiet", "0").exit_code == 0
    before = held_rows(job.store, job.paths)
    with arroyo(model) as server:
        found = call(job, *command, "--arroyo-api", server.url, "--yes")
        assert held_rows(job.store, job.paths) == before
        assert model.state == "Running"
        again = call(job, *command, "--arroyo-api", server.url, "--yes")
    assert found.exit_code == 1
    text = " ".join(found.stderr.split())
    assert "this call changed nothing" in text
    assert ("its delete-key was done" if done else "window was not done") in text
    assert "started again after a window that was cut off" in found.stdout
    assert again.exit_code == 0, again.output


def test_the_undo_of_a_running_job_is_impossible_and_says_what_is_possible(job: SurgeryJob) -> None:
    assert call(job, *DELETE, *STOPPED, "--yes", "--quiet", "0").exit_code == 0
    was = listing(job.store)
    found = call(job, "undo", "job_x", "--assume", "job_x=running")
    text = " ".join(found.stderr.split())
    assert (found.exit_code, listing(job.store)) == (1, was)
    assert "the delete-key of epoch 3 cannot be undone: the job was started from it" in text
    assert "stop it with a checkpoint first" not in text
    assert "arroyo-state rollback job_x N" in text
    assert call(job, "undo", "job_x", *STOPPED, "--yes").exit_code == 0
    none = call(job, "undo", "job_x", "--assume", "job_x=running")
    assert (none.exit_code, "there is nothing to undo" in none.stdout) == (0, True)


@pytest.mark.parametrize(
    ("checked", "command"),
    [
        ("job_x", ("edit", "rescale", "job_x", "2")),
        ("job_x", ("edit", "retain", "job_x", "1970-01-01T00:00:25Z")),
        ("job_a", ("fork", "job_a", "job_x")),
    ],
    ids=["rescale", "retain", "fork"],
)
def test_plans_say_what_the_next_start_loses_of_an_aggregate_without_keys(
    unkeyed: ArroyoJob, checked: str, command: tuple[str, ...]
) -> None:
    other = begun(Layout.LEGACY, epochs=5, name="job_a")
    copy_into(unkeyed.store, other.store)
    findings = json.loads(call(unkeyed, "verify", checked, "--json").stdout)["findings"]
    losses = [one["evidence"] for one in findings if one["code"] == "unkeyed-aggregate"]
    assert len(losses) == 2
    found = call(unkeyed, *command, *STOPPED)
    assert found.exit_code == 0, found.output
    assert all(f"never seen: {loss}" in found.stdout for loss in losses)


def test_a_rescale_of_an_aggregate_without_keys_is_planned_where_a_subtask_has_no_rows(
    tmp_path: Path,
) -> None:
    url = unpack("flights", tmp_path)
    words = ["edit", "rescale", "grand_total", "3", "--assume", "grand_total=stopped"]
    found = CliRunner().invoke(cli.main, [*words, "--url", url])
    assert found.exit_code == 0, found.output


def rescaling(model: ModelArroyo, parallelism: int) -> PlannableEdit:
    paths, wanted = model.job.paths, Rescale(parallelism=parallelism)
    return PlannableEdit(
        paths,
        plan=lambda store, directory: plan_edit(store, paths, directory, wanted),
        run=lambda store, directory, how: run_edit(store, paths, directory, wanted, how),
        parallelism=parallelism,
    )


def run(model: ModelArroyo, parallelism: int) -> EditWindow:
    return window(model, rescaling(model, parallelism))


def rows(job: ArroyoJob) -> Any:
    return held_rows(job.store, job.paths)


@LAYOUTS
def test_the_job_starts_at_the_new_parallelism_and_holds_its_rows(layout: Layout) -> None:
    model, starts = running(surgery_job(layout))
    was = rows(model.job)
    outcome = run(model, 3)
    assert (outcome.end, outcome.problem) == (WindowEnd.REWRITTEN, None)
    assert (model.job.parallelism, model.state, len(starts.loaded)) == (3, "Running", 1)
    assert any("start, at parallelism 3, the job" in step.did for step in outcome.steps)
    assert shared(model.job.store, model.job, 3) == 0
    model.job.write({})
    assert rows(model.job) == was
    assert errors_of(model.job.store, model.job.paths) == set()


def test_a_parallelism_that_needs_no_other_files_is_set_and_the_present_one_is_not() -> None:
    model, _ = running(surgery_job(Layout.LEGACY))
    assert run(model, 2).end is WindowEnd.NOTHING_TO_DO
    assert model.log == []
    outcome = run(model, 1)
    assert (outcome.end, outcome.problem) == (WindowEnd.KEPT, None)
    assert outcome.change is not None
    assert not outcome.change.published
    assert (model.job.parallelism, model.state) == (1, "Running")


@LAYOUTS
def test_a_job_without_task_slots_for_it_runs_as_before(layout: Layout) -> None:
    model, _ = running(surgery_job(layout))
    model.slots = 2
    was = rows(model.job)
    outcome = run(model, 3)
    assert (model.job.parallelism, model.state, outcome.started) == (2, "Running", True)
    assert "at parallelism 3 (timed out while waiting for task slots)" in str(outcome.problem)
    model.job.write({})
    assert rows(model.job) == was
    assert errors_of(model.job.store, model.job.paths) == set()


def test_a_job_that_was_stopped_before_stays_stopped_at_its_parallelism() -> None:
    model, starts = running(surgery_job(Layout.LEGACY))
    model.stop = "checkpoint"
    model.sleep(60)
    outcome = run(model, 3)
    assert (outcome.end, model.state, starts.loaded) == (WindowEnd.AT_REST, "Stopped", [])
    assert (model.job.parallelism, model.wanted) == (2, None)
    assert outcome.change is not None
    assert "set the parallelism of its pipeline to 3" in outcome.change.plan.afterwards[0]


def test_a_job_whose_operators_differ_in_parallelism_is_not_stopped() -> None:
    job = surgery_job(Layout.LEGACY)
    path = job.paths.operator_metadata(OperatorId("window_3"), Epoch(job.epoch))
    operator = metadata.decode_operator(job.store.read(path), path)
    job.store.put(path, metadata.encode_operator(replace(operator, parallelism=1)))
    model, _ = running(job)
    with pytest.raises(InputError, match=r"run at different parallelisms .*window_3: 1") as refused:
        run(model, 3)
    assert "without --window" in (refused.value.next_step or "")
    assert model.log == []


@EVERYWHERE
def test_a_process_that_dies_anywhere_leaves_a_job_that_runs_with_every_row(
    layout: Layout, share: Share
) -> None:
    def dies(model: ModelArroyo, **point: Any) -> tuple[int, int]:
        return died(
            model,
            lambda store, control: run_edit_window(
                store, control, rescaling(model, 3), options(model)
            ),
            **point,
        )

    requests, changes = dies(running(surgery_job(layout, epochs=2))[0])
    seen = set()
    for point in share(list(deaths(requests, changes)), sparse=6):
        model, _ = running(surgery_job(layout, epochs=2))
        was = rows(model.job)
        dies(model, **point)
        recovered(model, options(model))
        assert recovered(model, options(model)) is None
        assert (model.state, model.stop) == ("Running", "none"), point
        seen.add(model.job.parallelism)
        model.job.write({})
        assert rows(model.job) == was, point
        assert errors_of(model.job.store, model.job.paths, 1) == set(), point
    assert seen <= {2, 3}


def test_the_command_stops_and_starts_the_job(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controlled_job, "POLL_SECONDS", 0.01)
    job = surgery_job(Layout.LEGACY, store=MemoryStore(f"rescale-window-{tmp_path.name}"))
    model = ModelArroyo(job, seconds_a_request=2.0)
    words = ["edit", "rescale", "job_x", "3", "--window", "--url", job.store.url]
    with arroyo(model) as server:
        words += ["--arroyo-api", server.url]
        shown = CliRunner().invoke(cli.main, words)
        assert "to do by hand, if the job is stopped already: before the job" in shown.stdout
        assert model.log == []
        done = CliRunner().invoke(cli.main, [*words, "--yes"])
    assert done.exit_code == 0, done.output
    assert "job_x: rewritten, runs again; rescale done at epoch 4" in done.stdout
    assert "by hand" not in done.stdout
    assert (model.state, model.job.parallelism) == ("Running", 3)
