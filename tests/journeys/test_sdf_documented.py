"""The commands and the code of docs/sdf.md, run as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from tests.documentation import PROJECT, blocks

PAGE = "docs/sdf.md"


def _blocks(language: str) -> list[str]:
    return blocks(PAGE, language)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where states may lie; the examples are in the working directory."""
    monkeypatch.chdir(PROJECT)
    return tmp_path


def _shell(block: str, place: Path) -> str:
    """Run each line: in this process, unless something is piped into it."""
    shown, env = "", {}
    for line in block.replace("file:///tmp/", f"file://{place}/").splitlines():
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            env[name] = value
        elif "|" in line.split("'")[0]:
            shown += _piped(line, place, env)
        else:
            command, *args = shlex.split(line, comments=True)
            assert command == "arroyo-state"
            result = CliRunner().invoke(cli.main, args, env=env)
            assert result.exit_code == 0, result.output
            shown += result.stdout
    return shown


def _piped(line: str, place: Path, env: dict[str, str]) -> str:
    answer = subprocess.run(
        ["/bin/sh", "-c", line.replace("arroyo-state", f"{sys.executable} -m arroyo_dagster.cli")],
        env={**os.environ, **env, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.parametrize("block", _blocks("sh"), ids=lambda block: block.split("\n")[0][-30:])
def test_a_block_of_commands_runs(block: str, place: Path) -> None:
    shown = _shell(block, place)
    if "echo bridge" in block:
        assert '"word":"bridge"' in shown
        assert _blocks("text")[0] in shown
        assert "can be restored: nothing found" in shown
    if "temperature" in block:
        assert '"until":"2026-03-02T08:30:00+00:00"' in shown
    if "flights" in block:
        assert '"busiest"' in shown
        assert "United Air Lines Inc." in shown
    if "sdf test" in block:
        assert "0 failed" in shown


def test_the_code_runs(place: Path) -> None:
    views, definitions, functions, tests = _blocks("python")
    run = "\n".join(line for line in _blocks("sh")[0].splitlines() if "sdf run" in line)
    _shell(_blocks("sh")[0].split("\n")[0] + "\n" + run.split("\n")[0], place)
    code = views.replace("file:///tmp/", f"file://{place}/").replace("\nviews.", "\nfound = views.")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["found"] is False
    exec(definitions, names)
    keys = names["defs"].resolve_all_asset_keys()  # type: ignore[attr-defined]
    assert any("word-stats" in key.to_user_string() for key in keys)
    exec(functions, names)
    exec(tests, names)
    names["test_words_are_counted"]()  # type: ignore[operator]


def test_every_definition_shown_is_part_of_an_example() -> None:
    files = sorted((PROJECT / "examples" / "sdf").rglob("*.yaml"))
    examples = [re.sub(r"\s+", " ", file.read_text()) for file in files]
    for block in _blocks("yaml"):
        if not block.startswith("sources:"):
            shown = re.sub(r"\s+", " ", block).strip()
            assert any(shown in text for text in examples), block
    shown = [block for block in _blocks("yaml") if "def report_carrier" in block]
    assert shown
