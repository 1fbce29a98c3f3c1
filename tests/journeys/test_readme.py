"""The README's commands and code, run as a reader would."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.state.storage.remote.open import open_store
from tests.jobs import run_word_job

PROJECT = Path(__file__).parents[2]
README = (PROJECT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def _words(command: str) -> list[str]:
    program, *words = shlex.split(command, comments=True)
    assert program == "arroyo-state"
    return words


def _run(command: str, folder: Path, **environment: str) -> str:
    """Run a command in this process: a new one for each would take a second longer."""
    with contextlib.chdir(folder):
        answer = CliRunner().invoke(main, _words(command), env=environment, catch_exceptions=False)
    assert answer.exit_code == 0, answer.stderr
    return answer.stdout


def _run_apart(command: str, folder: Path) -> str:
    """Run a command as a shell would."""
    answer = subprocess.run(
        [sys.executable, "-m", "arroyo_dagster.cli", *_words(command)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The README's first job, run by its first command; its folder and its URL."""
    folder = tmp_path_factory.mktemp("shop")
    (code,) = [block for block in _blocks("python") if "Pipeline" in block]
    (folder / "shop.py").write_text(code)
    url = f"file://{folder}/state"
    _run_apart(_first_commands()[0].replace("file:///tmp/shop", url), folder)
    return folder, url


def _first_commands() -> list[str]:
    return next(block for block in _blocks("sh") if "shop.py" in block).splitlines()


def _commands_of(word: str) -> list[str]:
    block = next(block for block in _blocks("sh") if word in block)
    return [line for line in block.splitlines() if line.startswith("arroyo-state")]


def test_the_operator_of_the_readme_runs_and_its_totals_are_shown(shop: tuple[Path, str]) -> None:
    folder, url = shop
    _, rows = _first_commands()
    shown = _run_apart(rows.replace("file:///tmp/shop", url) + " --json", folder)
    assert {"key": "ada", "value": 300} in json.loads(shown)


def test_the_commands_that_look_at_state_run_against_a_job(shop: tuple[Path, str]) -> None:
    folder, url = shop
    commands = _commands_of("arroyo-state jobs")
    assert len(commands) == 4
    for command in commands:
        for word, value in (("JOB", "main"), ("OPERATOR", "totals"), ("TABLE", "totals")):
            command = command.replace(word, value)
        assert _run(command, folder, ARROYO__CHECKPOINT_URL=url)


def test_the_commands_that_verify_run_against_a_job(shop: tuple[Path, str]) -> None:
    folder, url = shop
    words, document = (
        _run(command.replace("JOB", "main"), folder, ARROYO__CHECKPOINT_URL=url)
        for command in _commands_of("verify JOB")
    )
    assert "can be restored: nothing found" in words
    assert json.loads(document)["parallelism"] == 8


def test_the_commands_that_go_back_show_what_they_would_do(tmp_path: Path) -> None:
    commands = _commands_of("arroyo-state rollback")
    assert len(commands) == 2
    url = f"file://{tmp_path}"
    run_word_job(open_store(url), rows=24, rows_per_epoch=2, keep_epochs=None)
    for command in commands:
        assert _run(command.replace("JOB", "words/main"), tmp_path, ARROYO__CHECKPOINT_URL=url)


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)`?", README))
    assert named
    assert named <= targets


def test_the_component_of_the_readme_loads(tmp_path: Path) -> None:
    import dagster as dg
    import yaml
    from dagster.components.testing import create_defs_folder_sandbox

    from arroyo_dagster import ArroyoStateComponent

    (text,) = _blocks("yaml")
    given = yaml.safe_load(text)
    assert given["type"] == "arroyo_dagster.ArroyoStateComponent"
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(ArroyoStateComponent, defs_yaml_contents=given)
        with sandbox.load_component_and_build_defs(path) as (_, defs):
            dg.Definitions.validate_loadable(defs)
            assert defs.resolve_job_def("arroyo_compaction")


def test_the_commands_that_keep_state_small_show_their_plan(shop: tuple[Path, str]) -> None:
    folder, url = shop
    commands = _commands_of("arroyo-state compact")
    assert len(commands) == 4
    for command in commands:
        assert _run(command.replace("JOB", "shop/main"), folder, ARROYO__CHECKPOINT_URL=url)


def test_the_commands_about_leases_run(shop: tuple[Path, str]) -> None:
    folder, url = shop
    commands = _commands_of("arroyo-state leases")
    assert len(commands) == 2
    for command in commands:
        assert _run(command.replace("JOB", "main"), folder, ARROYO__CHECKPOINT_URL=url)


def test_the_commands_that_free_what_nothing_needs_run(tmp_path: Path) -> None:
    commands = _commands_of("arroyo-state gc plan")
    assert len(commands) == 10
    url = f"file://{tmp_path}"
    run_word_job(open_store(url), rows=24, rows_per_epoch=2, keep_epochs=None)
    for command in commands:
        assert _run(command.replace("JOB", "words/main"), tmp_path, ARROYO__CHECKPOINT_URL=url)


def test_the_definitions_of_the_readme_load() -> None:
    (code,) = [block for block in _blocks("python") if "build_arroyo_definitions" in block]
    found: dict[str, object] = {}
    exec(code, found)
    assert found["defs"].resolve_all_asset_keys()  # type: ignore[attr-defined]
