"""The README's commands and code, run as a reader would."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.state.storage.open import open_store
from tests.jobs import run_word_job

PROJECT = Path(__file__).parents[2]
README = (PROJECT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def _run(command: str, folder: Path, **environment: str) -> str:
    words = shlex.split(command, comments=True)
    assert words[0] == "arroyo-state"
    answer = subprocess.run(
        [sys.executable, "-m", "arroyo_dagster.cli", *words[1:]],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_operator_of_the_readme_runs_and_its_totals_are_shown(tmp_path: Path) -> None:
    (code,) = [block for block in _blocks("python") if "Pipeline" in block]
    (tmp_path / "shop.py").write_text(code)
    run, rows = next(block for block in _blocks("sh") if "shop.py" in block).splitlines()
    url = f"file://{tmp_path}/state"
    _run(run.replace("file:///tmp/shop", url), tmp_path)
    shown = _run(rows.replace("file:///tmp/shop", url) + " --json", tmp_path)
    assert {"key": "ada", "value": 300} in json.loads(shown)


def test_the_commands_that_look_at_state_run_against_a_job(tmp_path: Path) -> None:
    (code,) = [block for block in _blocks("python") if "Pipeline" in block]
    (tmp_path / "shop.py").write_text(code)
    url = f"file://{tmp_path}/state"
    _run(f"arroyo-state run shop.py:pipeline --url {url}", tmp_path)
    block = next(block for block in _blocks("sh") if "arroyo-state jobs" in block)
    commands = [line for line in block.splitlines() if line.startswith("arroyo-state")]
    assert len(commands) == 4
    for command in commands:
        for word, value in (("JOB", "main"), ("OPERATOR", "totals"), ("TABLE", "totals")):
            command = command.replace(word, value)
        assert _run(command, tmp_path, ARROYO__CHECKPOINT_URL=url)


def test_the_commands_that_verify_run_against_a_job(tmp_path: Path) -> None:
    (code,) = [block for block in _blocks("python") if "Pipeline" in block]
    (tmp_path / "shop.py").write_text(code)
    url = f"file://{tmp_path}/state"
    _run(f"arroyo-state run shop.py:pipeline --url {url}", tmp_path)
    words, document = (
        _run(command.replace("JOB", "main"), tmp_path, ARROYO__CHECKPOINT_URL=url)
        for command in next(b for b in _blocks("sh") if "verify JOB" in b).splitlines()
    )
    assert "can be restored: nothing found" in words
    assert json.loads(document)["parallelism"] == 8


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


def test_the_commands_that_keep_state_small_show_their_plan(tmp_path: Path) -> None:
    (code,) = [block for block in _blocks("python") if "Pipeline" in block]
    (tmp_path / "shop.py").write_text(code)
    url = f"file://{tmp_path}/state"
    _run(f"arroyo-state run shop.py:pipeline --url {url}", tmp_path)
    block = next(block for block in _blocks("sh") if "arroyo-state compact" in block)
    commands = [line for line in block.splitlines() if line.startswith("arroyo-state")]
    assert len(commands) == 4
    for command in commands:
        assert _run(command.replace("JOB", "shop/main"), tmp_path, ARROYO__CHECKPOINT_URL=url)


def test_the_commands_that_free_what_nothing_needs_run(tmp_path: Path) -> None:
    block = next(block for block in _blocks("sh") if "arroyo-state gc plan" in block)
    commands = [line for line in block.splitlines() if line.startswith("arroyo-state")]
    assert len(commands) == 8
    url = f"file://{tmp_path}"
    run_word_job(open_store(url), rows=24, rows_per_epoch=2, keep_epochs=None)
    for command in commands:
        words = shlex.split(command.replace("JOB", "words/main"), comments=True)[1:]
        result = CliRunner().invoke(main, [*words, "--url", url], catch_exceptions=False)
        assert result.exit_code == 0, (command, result.stderr)
        assert result.stdout


def test_the_definitions_of_the_readme_load() -> None:
    (code,) = [block for block in _blocks("python") if "build_arroyo_definitions" in block]
    found: dict[str, object] = {}
    exec(code, found)
    assert found["defs"].resolve_all_asset_keys()  # type: ignore[attr-defined]
