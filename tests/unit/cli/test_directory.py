"""`arroyo-state jobs` and `show` with a server, a database or the user's word beside the state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli, configure
from arroyo_dagster.cli import inspect as looking
from arroyo_dagster.cli.directory import API_VARIABLE, TOKEN_VARIABLE
from tests.compat.arroyo import DATA, unpack
from tests.loopback import Loopback, Reply, replaying, serving

DATABASE = str(DATA / "state-legacy.sqlite")
NAMES = {
    "job_TgS34gutlY": "auctions",
    "job_VwPGEOb3ML": "sessions",
    "job_d14OMmRXhf": "joins",
    "job_mSLGII6lDN": "tumble",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield unpack("legacy", tmp_path_factory.mktemp("legacy"))
    configure(None)


@pytest.fixture
def server() -> Iterator[Loopback]:
    with serving(replaying("legacy-stopped")) as server:
        yield server


def run(root: str, *args: str, **env: str) -> Result:
    clear: dict[str, str | None] = {API_VARIABLE: None, TOKEN_VARIABLE: None}
    return CliRunner().invoke(
        cli.main, [*args, "--url", root], env=clear | env, catch_exceptions=False
    )


def output(root: str, *args: str, **env: str) -> Any:
    result = run(root, *args, "--json", **env)
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_jobs_have_names_and_conditions_from_any_source(root: str, server: Loopback) -> None:
    for option in (("--arroyo-api", server.url), ("--arroyo-db", DATABASE)):
        jobs = output(root, "jobs", *option)
        assert {job["job"]: job["name"] for job in jobs} == NAMES
        assert {job["condition"] for job in jobs} == {"stopped"}
        assert {job["pipeline"] for job in jobs} == {None}  # what find_job takes, as before
        arroyo = next(job["arroyo"] for job in jobs if job["name"] == "joins")
        assert arroyo == {
            "source": option[1],
            "pipeline": "pl_zbN4vGHGrP",
            "state": "Stopped",
            "run_id": 1,
            "newest_ready_epoch": None if "api" in option[0] else 14,
            "action_in_progress": False if "api" in option[0] else None,
            "failure": None,
            "reason": None,
            "disagreements": [],
        }


def test_the_address_and_the_token_come_from_the_environment(root: str, server: Loopback) -> None:
    env = {API_VARIABLE: server.url, TOKEN_VARIABLE: "s3cr3t"}
    assert output(root, "jobs", **env)[0]["name"]
    assert {headers["Authorization"] for _, _, headers in server.asked} == {"Bearer s3cr3t"}
    options = looking.jobs.to_info_dict(click.Context(looking.jobs))
    assert not any("token" in name for name in options)
    assert output(root, "jobs", **{API_VARIABLE: ""})[0]["arroyo"] is None


def test_the_user_s_word_from_options_and_files(root: str, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    file.write_text(json.dumps({"job_mSLGII6lDN": {"name": "mine", "condition": "failed"}}))
    jobs = output(root, "jobs", "--assume", "job_d14OMmRXhf=Running", "--assume", f"@{file}")
    said = {job["job"]: (job["name"], job["condition"]) for job in jobs}
    assert said["job_d14OMmRXhf"] == (None, "running")
    assert said["job_mSLGII6lDN"] == ("mine", "failed")
    assert said["job_TgS34gutlY"] == (None, "unknown")
    assert run(root, "jobs", "--assume", "nonsense").exit_code == 2
    assert run(root, "jobs", "--assume", "a=asleep").exit_code == 1
    assert run(root, "jobs", "--assume", "@/no/such/file").exit_code == 1


def test_disagreements_are_shown(root: str, server: Loopback) -> None:
    args = ("jobs", "--arroyo-api", server.url, "--assume", "job_d14OMmRXhf=running")
    line = f"condition: stopped ({server.url}) or running (the user)"
    assert f"job_d14OMmRXhf: sources disagree on {line}" in run(root, *args).stdout
    jobs = output(root, *args)
    assert [job["arroyo"]["disagreements"] for job in jobs if job["name"] == "joins"] == [[line]]


@pytest.mark.parametrize(
    ("reply", "kind"), [(Reply(401, {}), "InputError"), (Reply(503, {}), "StorageError")]
)
def test_server_that_does_not_answer_is_reported_once(root: str, reply: Reply, kind: str) -> None:
    with serving(lambda path, query: reply) as server:
        for command in (("jobs",), ("show", "job_d14OMmRXhf")):
            result = run(root, *command, "--arroyo-api", server.url)
            assert result.exit_code == 1
            assert "job_d14OMmRXhf" in result.stdout
            assert "unknown" in result.stdout
            assert len(result.stderr.splitlines()) == 1
            assert result.stderr.startswith(f"{kind}: ")
            as_json = run(root, *command, "--arroyo-api", server.url, "--json")
            found = json.loads(as_json.stdout)
            found = found[0] if isinstance(found, list) else found
            assert found["arroyo"]["reason"].startswith(server.url)
            assert json.loads(as_json.stderr)["error"]["type"] == kind


def test_a_wrong_address_is_one_error_before_anything_is_read(root: str) -> None:
    result = run(root, "jobs", "--arroyo-api", "localhost:5115")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("InputError: not the address of a server")


def test_jobs_say_when_each_can_be_maintained_and_why(root: str) -> None:
    def possible(*options: str) -> tuple[str, str]:
        jobs = json.loads(run(root, "jobs", *options, "--json").stdout)
        found = next(one["maintenance"] for one in jobs if one["job"] == "job_d14OMmRXhf")
        return found["possible"], found["reason"]

    assume = "job_d14OMmRXhf={}".format
    assert possible("--assume", assume("stopped")) == (
        "at rest",
        "Arroyo job, stopped: `compact run` rewrites it",
    )
    when, why = possible("--assume", assume("running"))
    assert (when, "`compact window`" in why) == ("in a window", True)
    when, why = possible()
    assert when == "only inspected"
    assert why.endswith("--assume job_d14OMmRXhf=stopped")
    assert possible("--assume", assume("changing"))[0] == "only inspected"
    shown = run(root, "jobs", "--assume", assume("stopped")).stdout
    assert "at rest" in shown
    assert "Arroyo job, stopped" in shown
