"""The catalogue: every epoch read once, rows that outlive it, and a store of its own."""

from __future__ import annotations

import io

import pyarrow.parquet as pq
import pytest

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.progress import Progress
from arroyo_dagster.state.operations.catalog.epochs import (
    EPOCH_CATALOG,
    OPERATOR_METADATA,
    UNREADABLE,
    Refreshed,
    RefreshOptions,
    catalogue_path,
    newest_rows,
    read_history,
    refresh,
)
from arroyo_dagster.state.operations.catalog.jobs import list_epochs, list_jobs
from arroyo_dagster.state.storage import Counting, MemoryStore, WriteProtected, open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.compat.arroyo import ARCHIVES, unpack
from tests.faulty_stores import Crash, FaultInjecting
from tests.fleets import START, Written, legacy_job, protocol_job
from tests.jobs import run_word_job

ONE = protocol_job("words")
OLD = legacy_job("old")
BOTH = pytest.mark.parametrize("paths", [ONE, OLD], ids=["protocol", "legacy"])


def refreshed(
    store: ObjectStore, catalogue: ObjectStore, paths: JobPaths, **options: int
) -> Refreshed:
    return refresh(WriteProtected(store), catalogue, paths, RefreshOptions(**options))  # type: ignore[arg-type]


def test_the_epochs_and_footers_that_are_read_are_reported() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    Written(store, ONE, keep=2).epochs(3)
    reports: list[Progress] = []
    options = RefreshOptions(on_progress=reports.append)
    refresh(store, catalogue, ONE, options)
    assert [(one.step, one.done, one.total) for one in reports] == [
        *(("read epochs", done, 3) for done in (1, 2, 3)),
        *(("read footers", done, 3) for done in (1, 2, 3)),
    ]
    reports.clear()
    refresh(store, catalogue, ONE, options)
    assert [(one.step, one.done, one.total) for one in reports] == [("read epochs", 1, 1)]


@BOTH
def test_the_newest_epoch_is_not_read_again_if_it_was_just_read(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    Written(store, paths).epochs(3)
    newest = ParquetBackend(store, paths).load()
    counting = Counting(store)
    found = refresh(counting, catalogue, paths, RefreshOptions(newest=newest))
    assert found.history == refresh(store, MemoryStore(), paths).history
    before = counting.calls["read"]
    refresh(counting, catalogue, paths, RefreshOptions(newest=newest))
    pins = paths.layout is Layout.PROTOCOL  # they tell which epochs are metadata only
    assert counting.calls["read"] == before + pins


@BOTH
def test_every_epoch_has_a_row_and_every_file_of_it_one(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    Written(store, paths, keep=2).epochs(4)
    found = refreshed(store, catalogue, paths)
    assert found.added == 4
    assert found.history == read_history(catalogue, paths)
    rows = found.history.epochs
    assert [row.epoch for row in rows] == [1, 2, 3, 4]
    assert [row.files for row in rows] == [1, 2, 2, 2]
    assert [row.new_files for row in rows] == [1, 1, 1, 1]
    assert [row.rows for row in rows] == [1, 2, 2, 2]
    assert {row.state for row in rows} == {"ready"}
    assert {row.duration_micros for row in rows} == {500}
    assert [len(found.history.files_of(row.epoch)) for row in rows] == [1, 2, 2, 2]
    assert found.history.files[0].columns == "key: binary not null, value: binary not null"


def test_the_figures_are_those_that_listing_the_epochs_gives() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    run_word_job(store, sinks=0, keep_epochs=None, merge_files_after=3)
    (paths,) = list_jobs(store)
    rows = refreshed(store, catalogue, paths).history.epochs
    for row, listed in zip(rows, list_epochs(store, paths), strict=True):
        assert (row.epoch, row.files, row.size_bytes) == (
            listed.epoch,
            listed.files,
            listed.size_bytes,
        )
        assert (row.new_files, row.new_size_bytes) == (listed.new_files, listed.new_size_bytes)


@pytest.mark.parametrize("archive", ARCHIVES)
def test_jobs_of_a_real_arroyo_are_catalogued(archive: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    store, catalogue = open_store(unpack(archive, tmp_path)), MemoryStore()
    for paths in list_jobs(store):
        found = refreshed(store, catalogue, paths)
        assert len(found.history.epochs) == len(ParquetBackend(store, paths).epochs())
        assert not found.problems
        assert all(row.problem is None for row in found.history.files)
        again = refreshed(store, catalogue, paths)
        assert (again.added, again.history) == (0, found.history)


@BOTH
def test_only_what_is_new_is_read(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, paths)
    job.epochs(30)
    refreshed(store, catalogue, paths)
    job.epochs(1)
    counting = Counting(store)
    assert refreshed(counting, catalogue, paths).added == 1
    # The new epoch and its metadata; of its three files the footer of the new one.
    assert counting.calls["read"] <= 3
    assert counting.calls["read_range"] <= 3


@BOTH
def test_an_epoch_that_expired_keeps_its_row_and_loses_its_files(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, paths)
    job.epochs(4)
    refreshed(store, catalogue, paths)
    job.expire([1, 2])
    found = refreshed(store, catalogue, paths)
    assert (found.added, found.expired) == (0, 2)
    assert [row.present for row in found.history.epochs] == [False, False, True, True]
    assert {row.epoch for row in found.history.files} == {3, 4}
    assert found.history.newest is not None
    assert found.history.newest.epoch == 4
    assert newest_rows(catalogue, [paths, legacy_job("never")]) == {
        paths.root: found.history.newest
    }


def test_rows_of_expired_epochs_are_bounded() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, ONE)
    job.epochs(6)
    refreshed(store, catalogue, ONE)
    job.expire(range(1, 5))
    rows = refreshed(store, catalogue, ONE, max_expired_epochs=2).history.epochs
    assert [row.epoch for row in rows] == [3, 4, 5, 6]


def test_more_epochs_than_a_run_may_read_are_left_for_the_next() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    Written(store, ONE).epochs(5)
    first = refreshed(store, catalogue, ONE, max_new_epochs=2)
    assert ([row.epoch for row in first.history.epochs], first.left) == ([4, 5], 3)
    assert first.history.epochs[0].new_files is None  # the epoch before it is not known
    second = refreshed(store, catalogue, ONE, max_new_epochs=10)
    assert ([row.epoch for row in second.history.epochs], second.left) == ([1, 2, 3, 4, 5], 0)


def test_a_committing_epoch_is_read_again_until_it_is_ready() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, ONE)
    job.epochs(1)
    job.write(committing=True)
    assert refreshed(store, catalogue, ONE).history.epochs[-1].state == "committing"
    job.commit()
    job.epochs(1)
    rows = refreshed(store, catalogue, ONE).history.epochs
    assert [row.state for row in rows] == ["ready", "ready", "ready"]


@BOTH
def test_an_unreadable_epoch_has_a_row_that_says_why(paths: JobPaths) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, paths)
    job.epochs(3)
    job.damage(2)
    found = refreshed(store, catalogue, paths)
    assert len(found.problems) == 1
    assert [row.state for row in found.history.epochs] == ["ready", UNREADABLE, "ready"]
    assert "checkpoint-0000002" in str(found.history.epochs[1].problem)
    assert refreshed(store, catalogue, paths).problems == ()


def test_a_missing_file_is_a_problem_of_its_row() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, ONE, files=False)
    job.epochs(1)
    history = refreshed(store, catalogue, ONE).history
    assert history.files[0].problem == "the file is missing"
    assert (history.epochs[0].files, history.epochs[0].rows) == (1, None)


@BOTH
def test_a_job_that_began_anew_keeps_the_rows_of_the_one_before(paths: JobPaths) -> None:
    clock = iter(range(1, 10_000))
    store, catalogue = MemoryStore(clock=lambda: next(clock)), MemoryStore()
    job = Written(store, paths)
    job.epochs(3)
    refreshed(store, catalogue, paths)
    job.vanish()
    Written(store, paths, start=START + 10**9).epochs(2)
    history = refreshed(store, catalogue, paths).history
    assert [(row.epoch, row.present) for row in history.epochs] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
        (3, False),
    ]
    assert refreshed(store, catalogue, paths).history == history


def test_a_copy_of_a_job_is_the_same_job() -> None:
    clock = iter(range(1, 10_000))
    store, copy, catalogue = MemoryStore(), MemoryStore(clock=lambda: next(clock)), MemoryStore()
    Written(store, ONE).epochs(3)
    refreshed(store, catalogue, ONE)
    for info in store.list():
        copy.put(info.path, store.read(info.path))
    rows = refreshed(copy, catalogue, ONE).history.epochs
    assert [(row.epoch, row.present) for row in rows] == [(1, True), (2, True), (3, True)]


def test_a_job_that_vanished_has_no_present_epoch() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, ONE)
    job.epochs(2)
    refreshed(store, catalogue, ONE)
    job.vanish()
    found = refreshed(store, catalogue, ONE)
    assert (found.expired, found.history.present, found.history.files) == (2, (), ())


# ---- its own store -------------------------------------------------------------------------------


def test_no_two_jobs_share_an_object_whatever_their_names() -> None:
    jobs = [
        legacy_job("a"),
        legacy_job("a.parquet"),
        legacy_job("protocol"),
        protocol_job("a", "b"),
        protocol_job("a.parquet", "b"),
        protocol_job("legacy", "a"),
    ]
    paths = {catalogue_path(EPOCH_CATALOG, job) for job in jobs}
    assert len(paths) == len(jobs)
    assert not [a for a in paths for b in paths if str(b).startswith(f"{a}/")]


def test_odd_names_reach_local_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    store, catalogue = MemoryStore(), open_store(str(tmp_path))
    for paths in (legacy_job("50 % <a>"), protocol_job("p#1", "ü~")):
        Written(store, paths).epochs(1)
        refreshed(store, catalogue, paths)
        assert len(read_history(catalogue, paths).epochs) == 1


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_run_killed_at_any_write_is_made_good_by_the_next(fail_at: int) -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    job = Written(store, ONE)
    job.epochs(2)
    refreshed(store, catalogue, ONE)
    job.epochs(1)
    with pytest.raises(Crash):
        refreshed(store, FaultInjecting(catalogue, fail_at, crash=True), ONE)
    found = refreshed(store, catalogue, ONE).history
    assert [row.epoch for row in found.epochs] == [1, 2, 3]
    assert len(found.files) == len({(row.epoch, row.path) for row in found.files}) == 6


def test_anything_that_reads_parquet_reads_the_catalogue() -> None:
    store, catalogue = MemoryStore(), MemoryStore()
    run_word_job(store, sinks=0)
    (paths,) = list_jobs(store)
    refreshed(store, catalogue, paths)
    table = pq.read_table(io.BytesIO(catalogue.read(catalogue_path(OPERATOR_METADATA, paths))))
    assert str(table.schema.field("max_routing_key").type) == "uint64"
    assert set(table["table_kind"].to_pylist()) == {"global keyed", "expiring time-key"}


def test_a_catalogue_that_is_broken_says_which_object() -> None:
    catalogue = MemoryStore()
    catalogue.put(catalogue_path(EPOCH_CATALOG, ONE), b"no parquet")
    with pytest.raises(FormatError, match="epoch_catalog/protocol/words/main"):
        read_history(catalogue, ONE)
    assert StatePath("epoch_catalog/legacy/old.parquet") == catalogue_path(EPOCH_CATALOG, OLD)
