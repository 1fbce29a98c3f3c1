"""State by key on Spark: the same content and output as in process, timers included, where the run
continues what was begun in process at another parallelism.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import ParquetSink, Pipeline, TableSource
from arroyo_dagster.engine import run_pipeline as run_in_process
from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.spark.engine.pipeline import run_pipeline
from arroyo_dagster.state import open_store
from tests.formats import EditOutcome, KeyDeletion
from tests.internals import AssumedJobs, JobDirectory, run_managed_edit
from tests.jobs import output_of
from tests.keyed_jobs import COMMANDS, OPERATIONS, KeepByKey, keyed_content

pytestmark = pytest.mark.usefixtures("session")

ROWS = 120
TIMELESS = [verb for verb in OPERATIONS if verb != "alarm"]


def keyed_job(output: Path, parallelism: int = 2) -> Pipeline:
    chance = random.Random(11)
    script = [(chance.choice("abcdefg"), chance.choice(TIMELESS), 10 + at) for at in range(ROWS)]
    rows = pa.table([list(range(ROWS)), *map(list, zip(*script, strict=True))], schema=COMMANDS)
    pipeline = Pipeline("keyed", parallelism=parallelism)
    source = TableSource(rows, rows_per_epoch=40, splits=2)
    stream = pipeline.source("script", source, timestamp="at")
    kept = stream.key_by("key").apply("keep", KeepByKey(ttl_micros=None))
    kept.sink("out", ParquetSink(f"file://{output}"))
    return pipeline


def test_keyed_state_and_timers_are_those_in_process(tmp_path: Path) -> None:
    found: dict[str, tuple[dict[str, Any], Counter[Any]]] = {}
    for name in ("local", "spark"):
        store = open_store(f"file://{tmp_path}/{name}-state")
        output = tmp_path / f"{name}-output"
        if name == "spark":
            run_in_process(keyed_job(output, 3), store, max_epochs=1)
            run_pipeline(keyed_job(output), store)
        else:
            run_in_process(keyed_job(output), store)
        content = keyed_content(store, keyed_job(output), 2)
        found[name] = content, output_of(open_store(f"file://{output}"))
    assert found["spark"] == found["local"]
    assert any(dict(row)["number"] == -1 for row in found["local"][1]), "no timer has fired"


def test_a_key_is_deleted_beside_a_run_that_is_fenced_and_the_next_continues(
    tmp_path: Path,
) -> None:
    """Nothing of the key comes back from the memory of Spark's workers, and no row counts twice."""
    stores = {name: open_store(f"file://{tmp_path}/{name}-state") for name in ("local", "spark")}
    outputs = {name: tmp_path / f"{name}-output" for name in stores}
    paths = keyed_job(tmp_path).paths
    assumed = JobDirectory([AssumedJobs({str(paths.root): "stopped"})])
    edit = KeyDeletion(values=("a",))
    deleted: list[EditOutcome] = []

    def delete(*_: object) -> None:
        store = stores["spark"]
        with pytest.raises(InputError, match="may be alive"):
            run_managed_edit(store, paths, JobDirectory(), edit)
        deleted.append(run_managed_edit(store, paths, assumed, edit))

    with pytest.raises(ConflictError):
        run_pipeline(keyed_job(outputs["spark"]), stores["spark"], on_epoch=delete)
    run_in_process(keyed_job(outputs["local"]), stores["local"], max_epochs=1)
    deleted.append(run_managed_edit(stores["local"], paths, JobDirectory(), edit))
    assert all(one.published for one in deleted)
    held = [keyed_content(one, keyed_job(tmp_path), 2) for one in stores.values()]
    assert held[0] == held[1]
    assert "a" not in {**held[0]["values"], **held[0]["lists"], **held[0]["maps"]}
    run_pipeline(keyed_job(outputs["spark"]), stores["spark"])
    run_in_process(keyed_job(outputs["local"]), stores["local"])
    found = [
        (keyed_content(stores[name], keyed_job(tmp_path), 2), output_of(open_store(f"file://{at}")))
        for name, at in outputs.items()
    ]
    assert found[0] == found[1]
