"""A running Arroyo job is rescaled and started at the new parallelism. Wherever it fails, the job
runs again and loads every row, at one of the two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import InputError
from arroyo_dagster.state import Epoch, Layout, MemoryStore, OperatorId
from arroyo_dagster.state.model.maintenance_window import WindowEnd
from arroyo_dagster.state.model.surgery.edits import Rescale
from arroyo_dagster.state.operations.surgery.window import (
    EditWindow,
    PlannableEdit,
    run_edit_window,
)
from tests.arroyo_jobs import ArroyoJob
from tests.arroyo_server import ModelArroyo, arroyo
from tests.arroyo_windows import deaths, died, recovered
from tests.formats import metadata
from tests.internals import controlled_job, plan_edit, run_edit
from tests.journeys.test_edit_window import EVERYWHERE, LAYOUTS, options, running, window
from tests.journeys.test_rescale import shared
from tests.journeys.test_surgery import errors_of
from tests.shares import Share
from tests.surgery_jobs import held_rows, surgery_job


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
