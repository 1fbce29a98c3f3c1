"""The legacy layout on Spark: the same tables as in process, one run at a time, stop and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from arroyo_dagster.engine import Pipeline
from arroyo_dagster.engine import run_pipeline as run_in_process
from arroyo_dagster.errors import ConflictError
from arroyo_dagster.spark.engine.pipeline import SparkOptions, run_pipeline
from arroyo_dagster.state import Layout, open_store
from tests.internals import JobRun
from tests.words import newest, output_of, random_words, tables_of, words_pipeline

pytestmark = pytest.mark.usefixtures("session")


def legacy(rows: object, output: Path) -> Pipeline:
    made = words_pipeline(rows, f"file://{output}", rows_per_epoch=60, parallelism=2)  # type: ignore[arg-type]
    made.layout = Layout.LEGACY
    return made


def test_a_job_in_the_legacy_layout_stops_and_goes_on_with_equal_tables(tmp_path: Path) -> None:
    rows = random_words(240, 5)
    stores = [open_store(f"file://{tmp_path}/{name}-state") for name in ("local", "spark")]
    outputs = [tmp_path / f"{name}-output" for name in ("local", "spark")]
    run_in_process(legacy(rows, outputs[0]), stores[0])
    on_spark = legacy(rows, outputs[1])
    first = run_pipeline(on_spark, stores[1], SparkOptions(max_epochs=2))
    assert first.newest is not None
    assert first.newest.worker_generation is None
    held = JobRun.start(stores[1], on_spark)
    with pytest.raises(ConflictError, match="the job is leased by"):
        run_pipeline(on_spark, stores[1])
    held.close()
    assert run_pipeline(on_spark, stores[1]).exhausted
    pairs = zip(stores, (legacy(rows, outputs[0]), on_spark), strict=True)
    local, spark = (tables_of(store, newest(store, made)) for store, made in pairs)
    assert spark == local
    assert output_of(outputs[1]) == output_of(outputs[0])
