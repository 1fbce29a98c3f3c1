"""The notebook of `examples/`: its cells run in order, from a URL to a plot."""

from __future__ import annotations

import ast
import json
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.state import open_state, open_store
from tests.jobs import copy_into, listing, written_by_word_job

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
