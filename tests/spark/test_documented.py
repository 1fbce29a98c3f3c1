"""The commands and code of docs/spark.md, run as a reader would."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from tests.documentation import PROJECT, blocks, first_program

PAGE = "docs/spark.md"


def _run(command: str, folder: Path, **env: str) -> str:
    program, *words = shlex.split(command, comments=True)
    assert program == "arroyo-state"
    with contextlib.chdir(folder):
        answer = CliRunner().invoke(main, words, env=env)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_pipeline_runs_on_spark(session: Any, tmp_path: Path, capsys: Any) -> None:
    (command,) = blocks(PAGE, "sh")[0].splitlines()
    with first_program(tmp_path):
        _run(command.replace("file:///tmp", f"file://{tmp_path}"), tmp_path)
    url = f"file://{tmp_path}/shop-on-spark"
    rows = _run(f"arroyo-state rows shop/main totals totals --url {url} --json", tmp_path)
    assert '"value": 300' in rows
    verifying, querying, _ = blocks(PAGE, "python")
    exec(verifying.replace("file:///tmp/shop-on-spark", url), {})
    passed, *engines = capsys.readouterr().out.splitlines()
    assert passed == "True"
    assert engines[0].startswith("verify files: Spark (")
    exec(querying.replace("file:///tmp/shop-on-spark", url), {})
    assert "|ada|  300|" in capsys.readouterr().out


def test_the_states_are_data_frames(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(PROJECT)
    first = next(line for line in blocks("docs/sdf.md", "sh")[0].splitlines() if "sdf run" in line)
    url = f"file://{tmp_path}/words"
    _run(first, PROJECT, ARROYO__CHECKPOINT_URL=url)
    *_, code = blocks(PAGE, "python")
    exec(code.replace("file:///tmp/words", url), {})
    assert "rain" in capsys.readouterr().out
