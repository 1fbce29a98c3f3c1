"""Exports: every epoch exactly once, whatever interrupts them, and changes that add up."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import ConflictError, FormatError, NotFoundError, StorageError
from arroyo_dagster.state import (
    Epoch,
    MemoryStore,
    ObjectStore,
    ParquetTarget,
    StateJob,
    StatePath,
    export_changes,
    export_epochs,
    open_state,
    open_store,
)
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.operations.export.epochs import change_feed, unit_of
from tests.faulty_stores import Crash, FaultInjecting
from tests.internals import CHANGE, Change
from tests.jobs import as_multiset, copy_into, listing, written_by_word_job


@pytest.fixture(scope="module")
def job() -> StateJob:
    return open_state(
        written_by_word_job(rows=60, keep_epochs=None, retention_micros=20_000_000)
    ).job("main")


def exported(store: ObjectStore, epoch: int) -> pa.Table:
    folder = StatePath(f"epoch={epoch}")
    done = json.loads(store.read(folder / "_SUCCESS"))
    names = [f"part-{at:05}.parquet" for at in range(done["exported"]["files"])]
    return pa.concat_tables([pq.read_table(BytesIO(store.read(folder / name))) for name in names])


def test_every_epoch_is_exported_once(job: StateJob) -> None:
    target = ParquetTarget(store=MemoryStore())
    found = list(export_epochs(job, "keep", "rows", target, job.epochs()))
    assert all(one.new for one in found)
    before = listing(target.store)
    again = list(export_epochs(job, "keep", "rows", target, job.epochs()))
    assert not any(one.new for one in again)
    assert [one.rows for one in again] == [one.rows for one in found]
    assert listing(target.store) == before
    for one in found:
        rows = job.epoch(one.epoch).table("keep", "rows").to_arrow()
        assert as_multiset(exported(target.store, one.epoch)) == as_multiset(rows)


def test_an_interrupted_export_is_completed(job: StateJob) -> None:
    whole = MemoryStore()
    list(export_epochs(job, "keep", "rows", ParquetTarget(store=whole), job.epochs()))
    for at, mode in itertools.product(range(1, 6), ("before", "after")):
        store = MemoryStore()
        faulty = ParquetTarget(store=FaultInjecting(store, at, mode=mode, crash=True))
        with pytest.raises(Crash):
            list(export_epochs(job, "keep", "rows", faulty, job.epochs()))
        list(export_epochs(job, "keep", "rows", ParquetTarget(store=store), job.epochs()))
        assert listing(store).keys() == listing(whole).keys()
        for epoch in job.epochs():
            assert exported(store, epoch).equals(exported(whole, epoch))


def test_changes_add_up_to_the_newest_epoch(job: StateJob) -> None:
    target = ParquetTarget(store=MemoryStore())
    numbers = job.epochs()
    rows = as_multiset(job.epoch(numbers[0]).table("keep", "rows").to_arrow())
    for one in export_changes(job, "keep", "rows", target, numbers[0]):
        changes = exported(target.store, one.epoch)
        kinds = changes.column(CHANGE).to_pylist()
        found = zip(_tuples(changes.drop_columns([CHANGE])), kinds, strict=True)
        for row, kind in found:
            rows[row] += 1 if kind in (Change.INSERTED.value, Change.UPDATED_TO.value) else -1
    newest = as_multiset(job.epoch().table("keep", "rows").to_arrow())
    assert +Counter(rows) == newest
    feed = list(change_feed(job, "count", "counts", numbers[0]))
    assert [one.epoch for one in feed] == numbers[1:]


def test_changes_that_do_not_follow_those_of_the_folder_are_refused(job: StateJob) -> None:
    target, numbers = ParquetTarget(store=MemoryStore()), job.epochs()
    list(export_changes(job, "keep", "rows", target, numbers[0], numbers[1]))
    with pytest.raises(ConflictError, match=f"which end at epoch {numbers[1]}"):
        list(export_changes(job, "keep", "rows", target, numbers[2]))
    assert len(list(export_changes(job, "keep", "rows", target, numbers[1]))) == len(numbers) - 2


def test_an_epoch_of_a_job_that_began_anew_is_refused(job: StateJob) -> None:
    target, epoch = ParquetTarget(store=MemoryStore()), job.epochs()[0]
    list(export_epochs(job, "keep", "rows", target, [epoch]))
    unit = unit_of(job.epoch(epoch), "keep", "rows")
    with pytest.raises(ConflictError, match="of another state of the job"):
        target.exported(replace(unit, finished_at_micros=unit.finished_at_micros + 1))


def test_a_damaged_marker_of_an_export_is_refused_by_its_name(job: StateJob) -> None:
    target, epoch = ParquetTarget(store=MemoryStore()), job.epochs()[0]
    marker = StatePath(f"epoch={epoch}/_SUCCESS")
    for damaged in (b"", b"{}", b'{"version":1,"unit":1,"exported":{}}'):
        target.store.put(marker, damaged)
        with pytest.raises(FormatError) as refused:
            list(export_epochs(job, "keep", "rows", target, [epoch]))
        assert refused.value.facts["path"] == marker


def _tuples(rows: pa.Table) -> list[tuple[object, ...]]:
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in rows.columns]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def test_targets_and_epochs_that_do_not_fit_are_refused(job: StateJob) -> None:
    target = ParquetTarget(store=MemoryStore())
    list(export_epochs(job, "keep", "rows", target, [job.epochs()[-1]]))
    with pytest.raises(ConflictError, match="words/main keep rows"):
        list(export_epochs(job, "count", "counts", target, [job.epochs()[-1]]))
    with pytest.raises(NotFoundError):
        list(export_epochs(job, "count", "counts", target, [Epoch(999)]))
    with pytest.raises(NotFoundError):
        list(change_feed(job, "count", "counts", Epoch(999)))
    failing = ParquetTarget(store=FaultInjecting(MemoryStore(), 1))
    with pytest.raises(StorageError, match="injected"):
        list(export_epochs(job, "count", "counts", failing, [job.epochs()[-1]]))


def test_the_command_is_repeatable(job: StateJob, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state"
    copy_into(open_store(url), job.catalog.store)
    words = ["export", "main", "keep", "rows", f"{tmp_path}/out", "--url", url, "--nanos", "floor"]
    first = CliRunner().invoke(cli.main, [*words, "--every-epoch"])
    assert first.exit_code == 0, first.output
    assert "written" in first.output
    again = CliRunner().invoke(cli.main, words)
    assert "was there" in again.output
    kind = pq.read_schema(next(tmp_path.glob("out/epoch=*/*.parquet"))).field("_timestamp").type
    assert kind == TypeOptions(nanos="floor").type_of(pa.timestamp("ns"))
    same = CliRunner().invoke(cli.main, [*words[:4], str(tmp_path / "state"), *words[5:]])
    assert "checkpoint URL itself" in same.output
