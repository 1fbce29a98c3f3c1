"""`arroyo-state sdf log`: the last failures of each step, kept with the state of its service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli

FLOW = """\
apiVersion: 0.6.0
meta: {name: checked, version: 0.1.0, namespace: t}
topics:
  lines: {schema: {value: {type: string, converter: raw}}}
services:
  check:
    sources: [{type: topic, id: lines}]
    transforms:
      - operator: filter
        run: |
          # Numbers only.
          def is_even(line):
              number = int(line)
              return number % 2 == 0
  again:
    sources: [{type: topic, id: lines}]
    transforms: [{operator: map, run: "def invert(line): return 1 / int(line)"}]
"""


def run(*args: object) -> Result:
    words = ["sdf", *map(str, args)]
    return CliRunner().invoke(cli.main, words, catch_exceptions=False)


@pytest.fixture
def flow(tmp_path: Path) -> Path:
    file = tmp_path / "dataflow.yaml"
    file.write_text(FLOW)
    return file


def processed(flow: Path, *lines: str, flags: tuple[str, ...] = ()) -> int:
    with (flow.parent / "lines").open("a") as out:
        out.writelines(f"{line}\n" for line in lines)
    source = ("--source", f"lines=jsonl:{flow.parent / 'lines'}")
    return run("run", flow, *source, "--url", flow.parent / "state", *flags).exit_code


def logged(flow: Path, *flags: object) -> list[dict[str, Any]]:
    result = run("log", flow, "--url", flow.parent / "state", "--json", *flags)
    assert result.exit_code == 0
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("on_error", ["skip", "dead-letter"])
def test_failures_say_when_where_and_why(flow: Path, on_error: str) -> None:
    assert logged(flow) == []
    assert processed(flow, "1", "2", "x", flags=("--on-error", on_error)) == 4
    (checked,) = logged(flow, "--service", "check")
    line = 1 + FLOW.split("\n").index("              number = int(line)")
    assert (checked["step"], checked["line"], checked["number"]) == ("is_even", line, 1)
    assert (checked["topic"], checked["partition"], checked["epoch"]) == ("lines", 0, 1)
    assert checked["file"] == ("lines" if on_error == "dead-letter" else None)
    assert "ValueError" in checked["reason"]
    (inverted,) = logged(flow, "--service", "again")
    assert inverted["line"] == 1 + next(
        at for at, text in enumerate(FLOW.split("\n")) if "def invert" in text
    )
    assert inverted["offset"] == checked["offset"]
    shown = run("log", flow, "--url", flow.parent / "state").stdout
    assert f"check/is_even epoch 1 on lines {checked['file'] or ''}".rstrip() in shown
    assert f"\n  {flow}:{line}\n  ValueError: invalid literal" in shown
    assert "in line 3 of the body: `int(line)`" in shown


def test_the_last_failures_of_all_runs_are_kept(flow: Path) -> None:
    processed(flow, "1", *(f"a{number}" for number in range(15)))
    processed(flow, "1", *(f"b{number}" for number in range(15)))
    found = logged(flow, "--service", "check")
    assert [one["number"] for one in found] == list(range(11, 31))
    assert [one["reason"].split("'")[1] for one in found] == [
        *(f"a{number}" for number in range(10, 15)),
        *(f"b{number}" for number in range(15)),
    ]
    assert {one["epoch"] for one in found} == {1, 2}
    last = logged(flow, "--last", 2)
    assert {one["service"]: one["number"] for one in last} == {"check": 30, "again": 30}
    assert len(last) == 4


def test_an_epoch_that_is_not_published_leaves_none(flow: Path) -> None:
    assert processed(flow, "1", "x", flags=("--on-error", "fail")) == 1
    assert logged(flow) == []
    assert processed(flow, flags=("--max-errors", "0")) == 1
    assert logged(flow) == []
    assert processed(flow) == 4
    assert len(logged(flow)) == 2


def test_messages_of_functions_are_kept_with_their_epoch(flow: Path) -> None:
    says = "from arroyo_dagster.sdf import log_message\n          # Numbers only."
    text = FLOW.partition("  again:")[0].replace("# Numbers only.", says)
    flow.write_text(text.replace("number = int(line)", "number = int(line); log_message(line)"))
    assert processed(flow, *map(str, range(15))) == 0
    assert processed(flow, *map(str, range(15, 30)), "x") == 4
    messages = [one for one in logged(flow, "--last", 100) if one["message"] is not None]
    assert [one["message"] for one in messages] == [str(number) for number in range(10, 30)]
    assert [one["number"] for one in messages] == list(range(11, 31))
    assert {(one["step"], one["epoch"]) for one in messages} == {("is_even", 1), ("is_even", 2)}
    (failed,) = [one for one in logged(flow, "--last", 100) if one["reason"] is not None]
    assert (failed["number"], failed["message"]) == (1, None)
    shown = run("log", flow, "--url", flow.parent / "state", "--last", 30).stdout
    assert "check/is_even epoch 2\n  message: 29\n" in shown
    assert processed(flow, "1", "y", flags=("--on-error", "fail")) == 1
    again = [one for one in logged(flow, "--last", 100) if one["message"] is not None]
    assert again == messages  # nothing of an epoch that was not published
