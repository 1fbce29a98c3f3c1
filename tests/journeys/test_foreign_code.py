"""What lies beside a definition is not executed: looking loads no code, running what is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PACKAGE = (PROJECT / "examples" / "sdf" / "packages" / "text" / "sdf-package.yaml").read_text()
TRAP = "import os\nopen(os.path.join({folder!r}, 'executed-' + __name__), 'w').close()\n"
# Any of them may be imported by a library for the first time after the file was read.
NAMES = sorted(
    {
        *(name for name in sys.stdlib_module_names if not name.startswith("_")),
        *("sitecustomize", "usercustomize", "__init__", "numexpr", "torch", "gcsfs", "adlfs"),
        *("conftest", "dataflow", "bodies", "functions", "setup"),
    }
)
DATAFLOW = """
apiVersion: 0.6.0
meta: {name: shop, version: 0.1.0, namespace: trap}
topics: {words: {schema: {value: {type: string}}}}
services:
  count:
    sources: [{type: topic, id: words}]
    states:
      seen:
        type: keyed-state
        properties: {key: {type: string}, value: {type: arrow-row, properties: {n: {type: u32}}}}
    transforms: [{operator: map, uses: "shop_named:tidy"}]
    partition:
      assign-key: {run: "def key_of(word):\\n    return word"}
      update-state: {uses: "shop_named:count"}
"""
NAMED = """
import shop_neighbour
from arroyo_dagster.sdf import state

def tidy(word):
    return word.strip() * shop_neighbour.ONE

def count(word):
    import shop_late
    row = state("seen")
    row.n += shop_late.ONE
    row.update()
"""
PIPELINE = """
from arroyo_dagster.state.storage import MemoryStore
from shop_neighbour import ONE
from tests.jobs import word_job
PIPELINE = word_job(MemoryStore(), rows=12 * ONE, sinks=0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "shop"
    found.mkdir()
    for name in NAMES:
        (found / f"{name}.py").write_text(TRAP.format(folder=str(found)))
    (found / "dataflow.yaml").write_text(DATAFLOW)
    (found / "sdf-package.yaml").write_text(PACKAGE)
    trap = TRAP.format(folder=str(found))
    (found / "shop_named.py").write_text(trap + NAMED)
    (found / "shop_neighbour.py").write_text(trap + "ONE = 1\n")
    (found / "shop_late.py").write_text("ONE = 1\n")
    (found / "shop_pipeline.py").write_text(PIPELINE)
    (found / "words.txt").write_text('"be"\n"be "\n"to"\n')
    return found


def python(folder: Path, *args: str) -> str:
    """Run Python as the script `arroyo-state` does, for a user who stands in the folder."""
    done = subprocess.run(
        [sys.executable, "-P", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def arroyo_state(folder: Path, *args: str) -> str:
    return python(folder, "-m", "arroyo_dagster.cli", *args)


def executed(folder: Path) -> set[str]:
    return {path.name.removeprefix("executed-") for path in folder.glob("executed-*")}


def run_words(folder: Path) -> str:
    source = f"words=jsonl:{folder / 'words.txt'}"
    at = ("--url", str(folder / "state"))
    return arroyo_state(folder, "sdf", "run", "dataflow.yaml", "--source", source, *at, "--json")


def test_run_imports_the_named_module_and_its_neighbours_and_nothing_else(folder: Path) -> None:
    metrics = json.loads(run_words(folder))["metrics"]
    assert executed(folder) == {"shop_named", "shop_neighbour"}
    assert {one["failed"] for one in metrics.values()} == {0}


LOOKS = (
    ("check", "dataflow.yaml"),
    ("check", "sdf-package.yaml"),
    ("show", "sdf-package.yaml"),
    ("show", "dataflow.yaml", "--dot"),
    ("show", "dataflow.yaml", "--url", "state"),
    ("show", "dataflow.yaml", "count/seen/state", "--url", "state"),
    ("sql", "dataflow.yaml", "select * from seen order by n", "--url", "state"),
)
LOOK = """
import json, sys
from arroyo_dagster.cli import main
for words in json.loads(sys.argv[1]):
    main(["sdf", *words], standalone_mode=False)
"""


def test_looking_executes_nothing_that_lies_beside_the_file(folder: Path) -> None:
    run_words(folder)
    for path in folder.glob("executed-*"):
        path.unlink()
    shown = python(folder, "-c", LOOK, json.dumps(LOOKS))
    assert "no errors" in shown
    assert "│ be   ┆ 2   │" in shown
    assert executed(folder) == set()


def test_test_imports_only_what_is_bound(folder: Path) -> None:
    named = ("--bind", "add-word=shop_named:count")
    arroyo_state(folder, "sdf", "test", "function", "count-of", "--value", "be", *named)
    assert executed(folder) <= {"shop_named", "shop_neighbour"}


@pytest.mark.parametrize("target", ["shop_pipeline.py:PIPELINE", "shop_pipeline:PIPELINE"])
def test_run_of_a_pipeline_imports_its_file_and_its_neighbours(folder: Path, target: str) -> None:
    arroyo_state(folder, "run", target, "--epochs", "1", "--url", str(folder / "state"))
    assert executed(folder) == {"shop_neighbour"}


PACK = """
import sys
from arroyo_dagster.spark.engine.worker import PackedPipeline
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.runtime.service import build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.state.storage import open_store
from arroyo_dagster.user_modules import open_folders

folder, out = sys.argv[1:]
dataflow, packages = load_dataflow(f"{folder}/dataflow.yaml")
open_folders(folder)
source = parse_binding(f"words=jsonl:{folder}/words.txt", "source")
store = open_store(f"{folder}/state")
wired = wire(dataflow, BindingsText(sources={"words": source}), store, packages=packages)
(pipeline,) = build_dataflow(dataflow, store, bindings=wired.bindings)
open(out, "wb").write(PackedPipeline.pack(pipeline).data)
"""
WORKER = """
import sys
from arroyo_dagster.spark.engine.worker import PackedPipeline

pipeline = PackedPipeline(open(sys.argv[1], "rb").read(), "x").unpack()
assert "shop_named" not in sys.modules
(plan,) = next(node.operator.plan.transforms for node in pipeline.operators.values())
print(plan.target("  be "))
"""


def test_a_function_travels_to_workers_that_have_no_such_file(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    python(tmp_path, "-c", PACK, str(folder), str(packed))
    assert python(tmp_path, "-c", WORKER, str(packed)) == "be\n"
