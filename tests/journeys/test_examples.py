"""The programs of `examples/` that `make` runs, run as it runs them, and the cells of the
notebook."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.state import open_state, open_store
from tests.jobs import copy_into, listing, written_by_word_job

PROJECT = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
CHECKPOINTS = """{ assetNodes(assetKeys: [{path: ["arroyo", "flights", "live", "checkpoint"]}]) {
  assetMaterializations(limit: 1) { timestamp } } }"""
STATE = """{ assetNodes(assetKeys: [{path: ["sdf", "examples", "flights", "state",
  "punctuality", "on-time"]}]) { assetMaterializations(limit: 1) { timestamp } } }"""


def test_the_demo_ends_with_equal_tables_fewer_files_and_what_to_do_next() -> None:
    done = subprocess.run(
        [sys.executable, "examples/flights/demo.py", "--in-process"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Equal to a plain group-by of 336,776 flights") == 2
    assert "compacted while it runs" in done.stdout
    assert "expired to 2 epochs" in done.stdout
    assert "Equal to plain counts: 39 words of 22 keys" in done.stdout
    assert "examples.flights / hourly" in done.stdout
    assert "make ui" in done.stdout
    steps = re.findall(r"^(\d+) of (\d+)  [A-Z].+ \(\d+ s so far\)$", done.stdout, re.MULTILINE)
    assert steps == [(str(number), "6") for number in range(1, 7)]


def _asked(url: str, query: str) -> Any:
    request = urllib.request.Request(
        f"{url}/graphql",
        json.dumps({"query": query}).encode(),
        {"Content-Type": "application/json"},
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer).get("data")
    return None


def _seen(url: str) -> bool:
    nodes = (_asked(url, CHECKPOINTS) or {}).get("assetNodes") or []
    states = (_asked(url, STATE) or {}).get("assetNodes") or []
    return bool(
        nodes
        and nodes[0]["assetMaterializations"]
        and states
        and states[0]["assetMaterializations"]
    )


def _line_with(log: Path, words: str) -> str | None:
    return next((line for line in log.read_text().splitlines() if words in line), None)


def test_the_ui_opens_on_a_job_and_states_that_are_seen(tmp_path: Path) -> None:
    log = tmp_path / "ui.log"
    with log.open("wb") as output:
        ui = subprocess.Popen(
            [sys.executable, "examples/flights/ui.py", "--folder", str(tmp_path / "live")],
            cwd=PROJECT,
            # A user's own settings must not reach what deletes.
            env={**os.environ, "ARROYO__CHECKPOINT_URL": "file:///nowhere/at/all"},
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while (line := _line_with(log, "Open http")) is None or not _seen(
            line.split()[1].removesuffix("/asset-groups")
        ):
            assert ui.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(1)
    finally:
        ui.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ui.wait(60)
    assert ui.poll() is not None
    assert not Path("/nowhere").exists()


NOTEBOOK = Path(__file__).parents[2] / "examples" / "bucket_to_plot.ipynb"
DOCUMENT = json.loads(NOTEBOOK.read_text())
CELLS = ["".join(one["source"]) for one in DOCUMENT["cells"] if one["cell_type"] == "code"]


def run_cells() -> list[Any]:
    """Run the cells in one namespace, as a kernel does; return what each would display."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for number, cell in enumerate(CELLS):
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        code = None if last is None else compile(ast.Expression(last.value), "last line", "eval")
        values.append(None if code is None else eval(code, names))
    return values


def test_ten_cells_lead_to_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("ARROYO__CHECKPOINT_URL", raising=False)
    assert len(CELLS) == 10
    values = run_cells()
    assert values[2] == ["hamlet/main"]
    top, found, changed, sources = values[4], values[5], values[6], values[7]
    assert top["value"].to_list() == sorted(top["value"].to_list(), reverse=True)
    assert found.num_rows == 1
    assert changed["_change"].to_list()
    assert sources.row(0) == (240, "advances")
    plot = ElementTree.fromstring(values[-1]._repr_svg_())
    lines = [one for one in plot if one.tag.endswith("polyline")]
    assert len(lines) == 4
    assert all(len(one.attrib["points"].split()) > 1 for one in lines)
    assert sum(top["value"]) == 240


def test_it_reads_a_job_of_ones_own_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}")
    written = written_by_word_job(rows=60, keep_epochs=None)
    copy_into(store, written)
    before = listing(store)
    monkeypatch.setenv("ARROYO__CHECKPOINT_URL", f"file://{tmp_path}")
    values = run_cells()
    assert values[2] == [open_state(store).jobs()[0].name]
    assert "<polyline" in values[-1]._repr_svg_()
    assert listing(store) == before


def test_it_is_stored_without_outputs() -> None:
    assert (DOCUMENT["nbformat"], DOCUMENT["nbformat_minor"]) == (4, 5)
    for one in DOCUMENT["cells"]:
        assert one["id"]
        if one["cell_type"] == "code":
            assert one["outputs"] == []
            assert one["execution_count"] is None
