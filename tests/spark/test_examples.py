"""Every dataflow of examples/sdf on Spark: equal states and outputs to those in process."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.loading import load_with_packages
from arroyo_dagster.dataflow.in_process import run_dataflow
from arroyo_dagster.dataflow.runtime.service import RunOptions, build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.engine import Pipeline
from arroyo_dagster.spark.engine.dataflow.pipelines import run_pipelines
from arroyo_dagster.spark.engine.pipeline import SparkOptions
from arroyo_dagster.state import ObjectStore, open_store

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples" / "sdf"
FLIGHTS = PROJECT / "examples" / "flights" / "data" / "flights-2013.parquet"
OPTIONS = RunOptions(parallelism=2, clock=lambda: 1_800_000_000_000, flush_open=True)


@dataclass(frozen=True)
class Example:
    """A dataflow, what its topics are read from, and how many records an epoch takes."""

    name: str
    sources: Mapping[str, str]
    rows: Mapping[str, int] = field(default_factory=dict)

    def pipelines(
        self, root: Path, store: ObjectStore, *, in_epochs: bool
    ) -> tuple[Dataflow, list[Pipeline], Any]:
        rows = self.rows if in_epochs else {}
        dataflow, packages = load_with_packages(EXAMPLES / self.name / "dataflow.yaml")
        assert isinstance(dataflow, Dataflow)
        written = {one.id for service in dataflow.services.values() for one in service.sinks}
        read = {one.id for service in dataflow.services.values() for one in service.sources}
        given = BindingsText(
            sources={
                topic: parse_binding(
                    f"{topic}={where}?rows_per_epoch={rows.get(topic, 100_000)}", "source"
                )
                for topic, where in self.sources.items()
            },
            sinks={
                topic: parse_binding(f"{topic}=jsonl:{root}/{self.name}/{topic}/", "sink")
                for topic in written - read
                if topic is not None
            },
        )
        wired = wire(dataflow, given, store, packages=packages)
        services = build_dataflow(dataflow, store, bindings=wired.bindings, options=OPTIONS)
        return dataflow, services, wired.between


def examples(folder: Path) -> list[Example]:
    """All of them: small ones as they are, flights over the first days."""
    rows = pq.ParquetFile(FLIGHTS).read_row_group(0).slice(0, 2500)
    pq.write_table(rows, folder / "flights.parquet")
    words = random.Random(5)
    sentences = [" ".join(words.choices("abcdefgh", k=6)) for _ in range(60)]
    (folder / "sentences.txt").write_text("\n".join(sentences))
    (folder / "asked.txt").write_text("a\nnobody\nh\n")
    here, asked = EXAMPLES / "flights", f"jsonl:{folder}/asked.txt"
    return [
        Example(
            "words",
            {"sentences": f"jsonl:{folder}/sentences.txt", "asked": asked},
            {"sentences": 25},
        ),
        Example(
            "temperature",
            {
                "readings": f"csv:{EXAMPLES}/temperature/readings.csv",
                "floors-asked": f"jsonl:{EXAMPLES}/temperature/floors.jsonl",
            },
            {"readings": 5},
        ),
        Example(
            "flights",
            {
                "flights": f"parquet:{folder}/flights.parquet",
                "carriers": f"csv:{here}/carriers.csv",
                "asked": f"jsonl:{here}/asked.txt",
            },
            {"flights": 1000},
        ),
        Example("packages", {"sentences": f"jsonl:{folder}/sentences.txt", "asked": asked}),
    ]


def seen(dataflow: Dataflow, store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Every state, the open windows too, and what was put out."""
    views = Views(store, dataflow)
    found: dict[str, Any] = {
        f"{name}, live: {live}": views.view(name, live=live).frame().rows()
        for name in views.states
        for live in (False, True)
    }
    for file in sorted(folder.rglob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found.setdefault(file.parent.name, []).extend(lines)
    return found


def test_the_folder_has_no_other_examples(tmp_path: Path) -> None:
    here = {one.name for one in examples(tmp_path)}
    # tests/journeys/test_sdf_changes.py, tests/unit/test_sdf_testing.py
    in_process = {"changes", "clicks"}
    assert here | in_process == {one.name for one in EXAMPLES.iterdir()}


@pytest.mark.parametrize("in_epochs", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["words", "temperature", "flights", "packages"])
def test_an_example_gives_equal_states_and_outputs_in_process_and_on_spark(
    session: Any, tmp_path: Path, name: str, in_epochs: bool
) -> None:
    (example,) = [one for one in examples(tmp_path) if one.name == name]
    found = []
    for where in ("plain", "spark"):
        root = tmp_path / where
        store = open_store(f"{root}/state")
        dataflow, services, between = example.pipelines(root, store, in_epochs=in_epochs)
        if where == "plain":
            run_dataflow(services, store, between=between)
        else:
            run_pipelines(services, store, SparkOptions(session=session), between=between)
        found.append(seen(dataflow, store, root / name))
    assert found[1] == found[0]
    assert all(found[0][name] for name in found[0] if not name.endswith("True"))
