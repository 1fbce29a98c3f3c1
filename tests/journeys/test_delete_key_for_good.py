"""The recipe that deletes a person's data from a managed job at rest: it ends, nothing that the job
stores holds the key afterwards, and the job goes on. Until then `find-key` names what holds it."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import (
    CompactionPolicy,
    CompactionSettings,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    Pipeline,
    cli,
    configure,
    run_compaction,
    run_gc,
    run_pipeline,
    verify_job,
)
from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.metadata import lease as leases
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.storage.failures import delete_all
from tests.documentation import blocks
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import ExpiringTimeKeyFiles
from tests.gc_jobs import expiry
from tests.internals import LocalRun
from tests.jobs import copied, state_of, word_job
from tests.surgery_jobs import surgery_job

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


def documented(name: str, epoch: int) -> list[list[str]]:
    """The commands of docs/edit-state.md."""
    words = {"JOB": name, "KEY": "d", "EPOCH": str(epoch)}
    lines = blocks("docs/edit-state.md", "sh")[-1].splitlines()
    return [[words.get(one, one) for one in shlex.split(line, comments=True)[1:]] for line in lines]


def found(store: MemoryStore, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run(store, "find-key", name, "d", "--json").stdout)[
        "found"
    ]
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
    backend = ParquetBackend(store, pipeline.paths)
    newest = backend.load().epoch + 1
    edit, unpin, expire, orphans, search = documented(name, newest - 1)
    run(store, *edit, "--quiet", "0")
    assert {epoch for one in found(store, name) for epoch in one["epochs"]} == set(range(1, newest))
    run(store, *unpin)
    run(store, *expire, *way)
    run(store, *(one for one in orphans if not way or one != "--delete"))
    assert "0 rows in 0 of" in run(store, *search).stdout or way
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
    if not way:
        copy = MemoryStore("for-good-copy")
        run(store, "copy", name, copy.url, "--yes")
        assert state_of(copy, pipeline) == after
        assert list(metadata_only_epochs(copy, pipeline.paths)) == [newest - 1]
        run_pipeline(pipeline, copy, max_epochs=1)
        assert verify_job(copy, pipeline.paths).verdict.findings == ()
    for _ in range(3):  # a start reads the metadata of the parent; later expiries take it
        run_pipeline(pipeline, store, max_epochs=1)
        run(store, "gc", "run", "expire", name, "--keep", "2", "--yes")
        assert verify_job(store, pipeline.paths).verdict.findings == ()
    assert newest - 1 not in backend.every_epoch()


def test_a_waiting_compaction_keeps_the_key_until_the_job_has_run(store: MemoryStore) -> None:
    pipeline = job(store)
    alive = LocalRun.start(pipeline, store)
    for _ in range(6):
        alive.step()
    settings = CompactionSettings(policy=CompactionPolicy.FULL, min_files=2)
    assert run_compaction(store, pipeline.paths, settings).published == "record"
    name = str(pipeline.paths.root)
    run(store, "edit", "delete-key", name, "d", "--yes", "--assume", "main=stopped")
    run(store, "unpin", name, "6")
    expire = ("gc", "run", "expire", name, "--keep", "1", "--yes")
    run(store, *expire)
    assert {one["place"] for one in found(store, name)} == {"epochs", "unlisted"}
    run_pipeline(pipeline, store, max_epochs=1)
    run(store, *expire)
    old = [one["place"] for one in found(store, name) if "checkpoint-0000006" in one["path"]]
    assert set(old) <= {"unlisted"}  # until they are old enough for `gc run orphans`
    assert verify_job(store, pipeline.paths).verdict.errors == ()


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


@pytest.mark.parametrize("crash", [False, True], ids=["fails", "dies"])
def test_an_expiry_that_is_interrupted_anywhere_is_finished_by_the_next(
    crash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_check_free", lambda *_: None)
    begun = MemoryStore()
    small = word_job(begun, rows=30, rows_per_epoch=6, parallelism=1, keep_epochs=None)
    run_pipeline(small, begun, max_epochs=4)
    request = expiry(1)
    counted = FaultInjecting(copied(begun))
    assert run_gc(counted, small.paths, request).plan.keep_from == 4
    for at in range(1 + crash, counted.changes + 1, 2):
        store = copied(begun)
        faulty = FaultInjecting(store, fail_at=at, mode="after" if crash else "before", crash=crash)
        with contextlib.suppress(Crash, StorageError):
            run_gc(faulty, small.paths, request)
        assert state_of(store, small) == state_of(begun, small), at
        run_gc(store, small.paths, request)
        left = listing(store, small.paths)
        assert left == listing(counted, small.paths), at
        assert verify_job(store, small.paths).verdict.errors == (), at


def listing(store: ObjectStore, paths: JobPaths) -> set[str]:
    managed = f"{paths.maintenance}/"
    return {info.path for info in store.list(paths.root) if not info.path.startswith(managed)}


@pytest.mark.parametrize("layout", list(Layout), ids=[one.value for one in Layout])
def test_an_arroyo_job_loses_the_key_with_the_epochs_that_follow(
    store: MemoryStore, layout: Layout
) -> None:
    made = surgery_job(layout, epochs=3, store=store)
    said = ("--assume", "job_x=stopped")
    run(store, "edit", "delete-key", "job_x", "k1", "--yes", "--quiet", "0", *said)
    made.files = {
        (str(one.operator), str(name)): list(files.files)
        for one in ParquetBackend(store, made.paths).load().operators
        for name, files in one.tables.items()
        if isinstance(files, ExpiringTimeKeyFiles)
    }
    made.start()
    for _ in range(12 if layout is Layout.LEGACY else 2):
        made.write({})
    assert "epochs 1 to 2" in run(store, "find-key", "job_x", "k1").stdout
    run(store, "gc", "run", "expire", "job_x", "--keep", "1", "--yes", *said)
    # `gc run orphans` deletes them a day later.
    left = json.loads(run(store, "find-key", "job_x", "k1", "--json").stdout)["found"]
    assert {one["place"] for one in left} == {"unlisted"}
    plan = run(store, "gc", "plan", "orphans", "job_x", *said)
    assert "young" in plan.stdout
    assert len(ParquetBackend(store, made.paths).every_epoch()) > 1
    assert verify_job(store, made.paths).verdict.errors == ()
