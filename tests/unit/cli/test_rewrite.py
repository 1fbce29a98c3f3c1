"""`arroyo-state compact` on jobs of Arroyo's: stopped ones, running ones in a window, put back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pendulum
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import Layout, MemoryStore, cli, configure
from tests.arroyo_jobs import ArroyoJob, content
from tests.arroyo_server import Faults, ModelArroyo, arroyo
from tests.documentation import blocks
from tests.internals import LeaseOptions, controlled_job, lease
from tests.jobs import copy_into, listing
from tests.journeys.test_rewriting import begun


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ArroyoJob]:
    """A window, and an aggregate without GROUP BY of which Arroyo would lose rows."""
    made = begun(Layout.LEGACY)
    store = copy_into(MemoryStore(f"cli-rewriting-{tmp_path.name}"), made.store)
    made.store = store
    yield made
    configure(None)


@pytest.fixture
def model(job: ArroyoJob, monkeypatch: pytest.MonkeyPatch) -> ModelArroyo:
    monkeypatch.setattr(controlled_job, "POLL_SECONDS", 0.01)
    return ModelArroyo(job, seconds_a_request=2.0)


def run(job: ArroyoJob, *args: str) -> Result:
    group = () if args[0] in ("undo", "compact") else ("compact",)
    command = [*group, *args, "--url", job.store.url]
    return CliRunner().invoke(cli.main, command, catch_exceptions=False)


def test_a_stopped_job_is_planned_rewritten_and_put_back(job: ArroyoJob) -> None:
    before, was = content(job.store, job.paths), listing(job.store)
    said = ("job_x", "--assume", "job_x=stopped")
    shown = run(job, "run", *said, "--policy", "full")
    assert shown.exit_code == 0
    assert "newest rows, one a row group" in shown.stdout
    assert "up to 12 rows that Arroyo would lose are repaired" in shown.stdout
    assert "every epoch writes it completely," in shown.stdout
    assert "nothing was changed, add --yes to execute" in shown.stdout
    assert listing(job.store) == was
    done = run(job, "run", *said, "--policy", "full", "--quiet", "0", "--yes")
    assert "17 files became 5" in done.stdout
    assert "3 rows that Arroyo would have lost were repaired" in done.stdout
    assert content(job.store, job.paths) == before
    again = json.loads(run(job, "run", *said, "--policy", "full", "--json", "--yes").stdout)
    assert not again["done"]
    assert {one["table"] for one in again["left_out"]} == {"s", "t", "a", "b"}
    assert "would be restored" in run(job, "undo", *said).stdout
    assert "the compaction of epoch 4 was undone" in run(job, "undo", *said, "--yes").stdout
    assert "nothing to undo" in run(job, "undo", *said, "--yes").stdout
    assert content(job.store, job.paths) == before


def test_the_documented_commands_show_their_plan(job: ArroyoJob, model: ModelArroyo) -> None:
    lines = "".join(blocks("docs/compaction.md", "sh")).splitlines()
    lines = [line for line in lines if "--assume" in line or "--arroyo-api" in line]
    was = listing(job.store)
    assert len(lines) == 3
    with arroyo(model) as server:
        for line in lines:
            words = shlex.split(line.partition("#")[0].replace("JOB", "job_x"))
            words = [server.url if word == "URL" else word for word in words]
            shown = run(job, *words[1:])
            assert shown.exit_code == 0, shown.stderr
            assert "job_x: " in shown.stdout
    assert listing(job.store) == was
    assert model.log == []


# ---- the window ----------------------------------------------------------------------------------


def window(job: ArroyoJob, url: str, *args: str) -> Result:
    limits = [
        word
        for step in ("quiet_seconds=0", "stop_seconds=20", "start_seconds=20")
        for word in ("--limit", step)
    ]
    return run(job, "window", "job_x", "--arroyo-api", url, *limits, *args)


def test_a_window_is_kept_to(job: ArroyoJob, model: ModelArroyo) -> None:
    later = pendulum.now("Europe/Berlin").add(hours=5)
    hours = f"{later:HH:mm}-{later.add(hours=1):HH:mm}"
    with arroyo(model) as server:
        zone = ("--time-zone", "Europe/Berlin", "--yes")
        closed = window(job, server.url, "--between", hours, *zone)
        assert closed.exit_code == 1
        assert "the window is not open now" in closed.stderr
        assert window(job, server.url, "--yes").exit_code == 2
        assert window(job, server.url, "--between", "2-4", "--yes").exit_code == 1
        assert model.log == []
        now = pendulum.now("Europe/Berlin")
        hours = f"{now.subtract(hours=1):HH:mm}-{now.add(hours=1):HH:mm}"
        done: Any = window(job, server.url, "--between", hours, *zone, "--json")
    told = json.loads(done.stdout)
    assert (told["end"], told["started"], told["problem"]) == ("rewritten, runs again", True, None)
    assert told["state"] == "Running"
    assert told["rewrite"]["done"]


def test_job_left_down_is_started_by_the_next_call(job: ArroyoJob, model: ModelArroyo) -> None:
    before = content(job.store, job.paths)
    with arroyo(model, Faults(at=14, until=10**9)) as server:
        failed = window(job, server.url, "--now", "--yes", "--limit", "start_seconds=0.3")
    assert failed.exit_code == 1
    assert "NOT STARTED AGAIN" in failed.stdout
    later = pendulum.now("UTC").add(hours=5)
    hours = f"{later:HH:mm}-{later.add(hours=1):HH:mm}"
    with arroyo(model) as server:
        done = window(job, server.url, "--between", hours, "--yes")
    assert done.exit_code == 1
    assert "the change of the interrupted window was not done" in done.stderr
    assert model.state == "Running"
    assert content(job.store, job.paths) == before


def held_by_a_dead_process(job: ArroyoJob, seconds: float) -> None:
    """Leave the lease of the job's window as a process leaves it that was killed."""
    with lease(
        job.store, job.paths, "killed", LeaseOptions(directory=job.paths.windows, seconds=seconds)
    ) as held:
        path = held.lease.path
        left = job.store.read(path)
    job.store.put(path, left)


def test_call_after_a_killed_window_starts_the_job(job: ArroyoJob, model: ModelArroyo) -> None:
    """Also while the lease of the killed process has not run out, and outside of the window."""
    with arroyo(model, Faults(at=14, until=10**9)) as server:
        window(job, server.url, "--now", "--yes", "--limit", "start_seconds=0.3")
    held_by_a_dead_process(job, seconds=3.0)
    later = pendulum.now("UTC").add(hours=5)
    hours = f"{later:HH:mm}-{later.add(hours=1):HH:mm}"
    with arroyo(model) as server:
        shown = window(job, server.url, "--between", hours)
        assert "the same call with --yes starts it again" in shown.stderr
        assert model.state != "Running"
        done = window(job, server.url, "--between", hours, "--yes")
    assert done.exit_code == 1
    assert "this call changed nothing" in done.stderr
    for said in (shown.stderr, done.stderr):
        assert said.startswith("job_x: the window that arroyo-state compact window opened at ")
        assert "has not ended; the job may be down" in said
        assert "Arroyo reports status Stopped" in said
    assert "waiting until the lease of an earlier window is free" in done.stderr
    assert "the window is not open now" not in done.stderr
    assert model.state == "Running"


# ---- waiting, and what is left -------------------------------------------------------------------


def test_one_wait_for_quiet_serves_all_jobs_of_a_call_and_is_announced(job: ArroyoJob) -> None:
    second = begun(Layout.LEGACY, name="job_y")
    copy_into(job.store, second.store)
    say = ("--assume", "job_x=stopped", "--assume", "job_y=stopped")
    done = run(job, "run", "job_x", "job_y", *say, "--policy", "full", "--quiet", "0.8", "--yes")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("17 files became 5") == 2
    assert done.stderr.count("Arroyo's cleanup has finished (--quiet)") == 1
