"""What a second call says after a window was killed, what a person may undo of a running job, and
what the next start loses of an aggregate without GROUP BY."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.state import Layout, MemoryStore, PipelineId, configure
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.model.maintenance_window import WindowRecord
from arroyo_dagster.state.operations.compaction import controlled_job
from tests.arroyo_jobs import ArroyoJob, begun
from tests.arroyo_server import PIPELINE, ModelArroyo, arroyo
from tests.compat.arroyo import unpack
from tests.jobs import copy_into, listing
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
