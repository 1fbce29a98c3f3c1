"""Default options from a file: who wins, what is refused, and that no secret is read from one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli, open_store
from arroyo_dagster.cli.config import check_config
from arroyo_dagster.cli.lazy import LazyGroup
from tests.jobs import run_word_job

VARIABLES: dict[str, str | None] = {"ARROYO__CHECKPOINT_URL": None, "CHECKPOINT_URL": None}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    for name in ("first", "second", "third"):
        run_word_job(open_store(str(folder / name)), rows=8, sinks=0, job=name)
    return folder


@pytest.fixture
def home(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(jobs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*args: str, **env: str) -> Result:
    return CliRunner().invoke(cli.main, args, env={**VARIABLES, **env}, catch_exceptions=False)


def job(*args: str, **env: str) -> str:
    done = run("jobs", "--json", *args, **env)
    assert done.exit_code == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return str(found[0]["job"])


def test_option_before_environment_before_file(home: Path) -> None:
    (home / "arroyo-state.toml").write_text(f'url = "{home}/first"\n')
    assert job() == "first"
    assert job(ARROYO__CHECKPOINT_URL=f"{home}/second") == "second"
    assert job("--url", f"{home}/third", ARROYO__CHECKPOINT_URL=f"{home}/second") == "third"


def test_the_file_of_the_working_directory_replaces_that_of_the_user(home: Path) -> None:
    user = home / "config" / "arroyo_dagster" / "config.toml"
    user.parent.mkdir(parents=True)
    user.write_text(f'url = "{home}/second"\n')
    assert job() == "second"
    (home / "arroyo-state.toml").write_text(f'url = "{home}/first"\n')
    assert job() == "first"


def test_a_section_is_of_one_command_and_wins(home: Path) -> None:
    (home / "arroyo-state.toml").write_text(
        f'url = "{home}/first"\n[jobs]\nurl = "{home}/second"\njson = true\n[epochs]\nlimit = 1\n'
    )
    assert json.loads(run("jobs").stdout)[0]["job"] == "second"
    assert len(json.loads(run("epochs", "first", "--json").stdout)) == 1
    assert len(json.loads(run("epochs", "first", "--json", "--limit", "0").stdout)) == 2


def test_sections_of_groups_are_nested(home: Path) -> None:
    (home / "arroyo-state.toml").write_text(
        f'url = "{home}/first"\n[gc.plan]\nkeep = 2\njson = true\n'
    )
    assert json.loads(run("gc", "plan", "expire", "first").stdout)["rule"]["keep_epochs"] == 2


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("ulr = 's3://x'", "ulr", "unknown"),
        ("limit = 3", "limit", "unknown"),
        ("jobs = 3", "jobs", "a section"),
        ("[jbos]\nurl = 's3://x'", "jbos", "no command"),
        ("[gc.paln]\nurl = 's3://x'", "gc.paln", "no command"),
        ("[gc]\nkeep = 3", "gc.keep", "unknown"),
        ("[jobs]\nlimit = 3", "jobs.limit", "no option"),
        ("[jobs]\njson = 'perhaps'", "jobs.json", "cannot be used"),
        ("[jobs]\nassume = 'x=stopped'", "jobs.assume", "wrong kind"),
        ("[expire]\nyes = true", "expire.yes", "command line"),
        ("arroyo-token = 'abcdefghijklmnop'", "arroyo-token", "secret"),
        ("url = 's3://user:hunter2hunter2@host/x'", "url", "secret"),
        ("arroyo_db = 'postgresql://me:hunter2hunter2@host/x'", "arroyo_db", "secret"),
    ],
)
def test_wrong_key_is_refused_with_file_and_key(home: Path, text: str, key: str, why: str) -> None:
    (home / "arroyo-state.toml").write_text(text)
    done = run("jobs", "--url", f"{home}/first")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"InputError: the key {key} ")
    assert why in done.stderr
    assert "arroyo-state.toml" in done.stderr
    assert "hunter2" not in done.stderr
    assert "abcdefgh" not in done.stderr


def test_a_file_that_is_not_toml_is_one_error(home: Path) -> None:
    (home / "arroyo-state.toml").write_text("url = s3://x")
    done = run("jobs")
    assert done.exit_code == 1
    assert done.stderr.startswith("InputError: not a TOML file")


def test_a_complete_check_covers_the_sections_of_all_commands(home: Path) -> None:
    assert isinstance(cli.main, LazyGroup)
    path = home / "arroyo-state.toml"
    path.write_text(f'url = "{home}/first"\n[show]\nlimit = 3\n')
    assert job() == "first"  # not a section of `jobs`
    with pytest.raises(ValueError, match=r"show\.limit"):
        check_config(path, cli.main)
    path.write_text(f'url = "{home}/first"\n[rows]\nlimit = 3\n')
    assert check_config(path, cli.main) == 2


def test_completion_answers_with_commands_and_options(home: Path) -> None:
    env = {"_ARROYO_STATE_COMPLETE": "bash_complete", "COMP_WORDS": "arroyo-state ep"}
    done = CliRunner().invoke(
        cli.main, [], env={**env, "COMP_CWORD": "1"}, prog_name="arroyo-state"
    )
    assert done.stdout == "plain,epochs\n"
    env["COMP_WORDS"] = "arroyo-state epochs --lim"
    done = CliRunner().invoke(
        cli.main, [], env={**env, "COMP_CWORD": "2"}, prog_name="arroyo-state"
    )
    assert done.stdout == "plain,--limit\n"


def test_help_works_with_a_wrong_file(home: Path) -> None:
    (home / "arroyo-state.toml").write_text("ulr = 1")
    assert run("jobs", "--help").exit_code == 0
    assert run("--help").exit_code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_of_this_program(shell: str) -> None:
    done = run("completion", shell)
    assert done.exit_code == 0
    assert "_ARROYO_STATE_COMPLETE" in done.stdout
    assert "arroyo-state" in done.stdout
