"""The recipe that deletes a person's data from a managed job at rest: it ends, nothing that the job
stores holds the key afterwards, and the job goes on. Until then `find-key` names what holds it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.expiry import delete_all
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.runtime.in_process import LocalRun, run_pipeline
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage import MemoryStore, configure
from tests.jobs import state_of, word_job

OPTIONS: dict[str, Any] = {"rows": 60, "rows_per_epoch": 2, "keep_epochs": None}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    yield MemoryStore(f"for-good-{tmp_path.name}")
    configure(None)


def job(store: MemoryStore, layout: Layout = Layout.PROTOCOL) -> Pipeline:
    made = word_job(store, **{**OPTIONS, "merge_files_after": 2})
    made.layout = layout
    return made


def run(store: MemoryStore, *words: str) -> Result:
    found = CliRunner().invoke(cli.main, [*words, "--url", store.url])
    assert found.exit_code == 0, found.output
    return found


def found(store: MemoryStore, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        run(store, "edit", "find-key", name, "d", "--json").stdout
    )["found"]
    return rows


def holds(store: MemoryStore) -> list[str]:
    """The objects with the word `d` as a stored text, read without our reader."""
    paths = []
    for info in store.list():
        with contextlib.suppress(Exception):
            rows = pq.read_table(io.BytesIO(store.read(info.path)))
            values = [one for column in rows.columns for one in column.to_pylist()]
            texts = [one.encode() if isinstance(one, str) else one for one in values]
            if any(isinstance(one, bytes) and one.endswith(b"d") for one in texts):
                paths.append(str(info.path))
    return paths


@pytest.mark.parametrize("way", [[], ["--quarantine"]], ids=["delete", "quarantine"])
def test_the_recipe_ends_and_the_job_goes_on(store: MemoryStore, way: list[str]) -> None:
    pipeline = job(store)
    run_pipeline(pipeline, store, max_epochs=8)
    name = str(pipeline.paths.root)
    before = state_of(store, pipeline)
    run(store, "edit", "delete-key", name, "d", "--yes", "--quiet", "0")
    backend = ParquetBackend(store, pipeline.paths)
    newest = backend.load().epoch
    assert {epoch for one in found(store, name) for epoch in one["epochs"]} == set(range(1, newest))
    run(store, "unpin", name, str(newest - 1))
    run(store, "gc", "run", "expire", name, "--keep", "1", "--yes", *way)
    run(store, "gc", "run", "orphans", name, "--yes", *(way or ["--delete"]))
    if way:  # until `gc purge`
        assert {one["place"] for one in found(store, name)} == {"quarantine"}
    else:
        assert (found(store, name), holds(store)) == ([], [])
    assert backend.every_epoch() == [newest - 1, newest]
    assert list(metadata_only_epochs(store, pipeline.paths).items()) == [(newest - 1, newest)]
    after = state_of(store, pipeline)
    stays = {key: value for key, value in before["count"]["counts"].items() if key != "d"}
    assert after["count"]["counts"] == stays
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    for _ in range(3):  # a start reads the metadata of the parent; later expiries take it
        run_pipeline(pipeline, store, max_epochs=1)
        run(store, "gc", "run", "expire", name, "--keep", "2", "--yes")
        assert verify_job(store, pipeline.paths).verdict.findings == ()
    assert newest - 1 not in backend.every_epoch()


def test_a_job_that_may_run_keeps_two_epochs(store: MemoryStore) -> None:
    pipeline = job(store)
    alive = LocalRun.start(pipeline, store)
    for _ in range(4):
        alive.step()
    run(store, "gc", "run", "expire", str(pipeline.paths.root), "--keep", "1", "--yes")
    assert ParquetBackend(store, pipeline.paths).every_epoch() == [3, 4]
    assert metadata_only_epochs(store, pipeline.paths) == {}


def test_the_legacy_layout_keeps_what_a_start_needs(store: MemoryStore) -> None:
    pipeline = job(store, Layout.LEGACY)
    run_pipeline(pipeline, store, max_epochs=14)
    run(store, "gc", "run", "expire", str(pipeline.paths.root), "--keep", "1", "--yes")
    assert ParquetBackend(store, pipeline.paths).every_epoch() == list(range(4, 15))


def test_a_newest_epoch_that_does_not_verify_keeps_the_others(store: MemoryStore) -> None:
    pipeline = job(store)
    run_pipeline(pipeline, store, max_epochs=4)
    backend = ParquetBackend(store, pipeline.paths)
    lost = next(iter(backend.load().paths))
    delete_all(store, [lost])
    words = ["gc", "run", "expire", str(pipeline.paths.root), "--keep", "1", "--yes"]
    refused = CliRunner().invoke(cli.main, [*words, "--url", store.url])
    assert refused.exit_code == 1
    assert "would be the only one left, and does not pass verification" in refused.output
    assert backend.every_epoch() == [1, 2, 3, 4]
