"""The commands and code of docs/spark.md, run as a reader would."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.spark.versions import DATA_SOURCES, pyspark_version
from tests.documentation import PROJECT, blocks, first_program
from tests.words import output_of

PAGE = "docs/spark.md"


def _run(command: str, folder: Path, **env: str) -> str:
    program, *words = shlex.split(command, comments=True)
    assert program == "arroyo-state"
    with contextlib.chdir(folder):
        answer = CliRunner().invoke(cli.main, words, env=env)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_pipeline_runs_on_spark(session: Any, tmp_path: Path, capsys: Any) -> None:
    (command,) = blocks(PAGE, "sh")[0].splitlines()
    with first_program(tmp_path):
        _run(command.replace("file:///tmp", f"file://{tmp_path}"), tmp_path)
    url = f"file://{tmp_path}/shop-on-spark"
    rows = _run(f"arroyo-state rows shop/main totals totals --url {url} --json", tmp_path)
    assert '"value": 300' in rows
    _, verifying, querying, streaming, _ = blocks(PAGE, "python")
    exec(verifying.replace("file:///tmp/shop-on-spark", url), {})
    passed, *engines = capsys.readouterr().out.splitlines()
    assert passed == "True"
    assert engines[0].startswith("verify files: Spark (")
    if pyspark_version() < DATA_SOURCES:
        return
    names: dict[str, object] = {}
    exec(querying.replace("file:///tmp/shop-on-spark", url), names)
    assert "|ada|  300|" in capsys.readouterr().out
    exec(streaming.replace("/tmp/", f"{tmp_path}/"), names)
    written = [file.read_text() for file in (tmp_path / "shop-changes").glob("*.json")]
    assert '"_change":"inserted"' in "".join(written)


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


def test_the_folder_that_grows_is_read_file_by_file(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = (
        command.replace("file:///tmp/readings", f"file://{tmp_path}")
        for command in blocks(PAGE, "sh")[1].splitlines()
    )
    told = (PROJECT / "examples" / "growing_folder.py").read_text()
    assert run.partition(" --url")[0].replace("--spark", "--spark --follow") in told
    monkeypatch.setenv("READINGS", str(tmp_path))
    (tmp_path / "in").mkdir()
    found = []
    for name, celsius in (("1.json", 20.5), ("2.json", 19.0), ("3.json", 22.0)):
        reading = {"sensor": "a", "celsius": celsius, "at": "2026-01-01T00:00:00Z"}
        lines = [json.dumps(reading), '{"sensor": "a", "celsius": 99.0}', "no reading"]
        (tmp_path / name).write_text("\n".join(lines))
        (tmp_path / name).rename(tmp_path / "in" / name)
        _run(run, PROJECT)
        (row,) = json.loads(_run(f"{rows} --json", PROJECT))
        found.append((row["key"], row["value"]))
    assert found == [("a", 20.5), ("a", 20.5), ("a", 22.0)]
    assert output_of(tmp_path / "out") == [("a", 20.5), ("a", 22.0)]
