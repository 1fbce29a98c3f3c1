"""Every job that a real Arroyo wrote, rewritten whole: fewer files, the same rows, at any
parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.state import (
    Checkpoint,
    CompactionPolicy,
    CompactionSettings,
    JobPaths,
    Layout,
    ObjectStore,
    ParquetBackend,
    RewriteOptions,
    RewriteOutcome,
    TableName,
    WriteProtected,
    find_job,
    list_jobs,
    open_store,
    plan_rewrite,
    range_for_server,
    run_rewrite,
    run_undo,
    verify_job,
)
from tests.arroyo_jobs import content, stopped
from tests.compat.arroyo import ARCHIVES, unpack
from tests.compat.test_fixtures import as_plain
from tests.damages import copy_job
from tests.formats import ExpiringTimeKeyFiles, decode_file, is_rewritten, metadata
from tests.internals import JobDirectory, restore_plan
from tests.shares import all_but

A = TableName("a")
FULL = CompactionSettings(policy=CompactionPolicy.FULL)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ObjectStore, JobPaths]]:
    return unpacked(tmp_path_factory, "as written")


def unpacked(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> dict[str, tuple[ObjectStore, JobPaths]]:
    """Every job, by archive and path."""
    found = {}
    for archive in ARCHIVES:
        store = open_store(unpack(archive, tmp_path_factory.mktemp(f"{archive} {name}")))
        for paths in list_jobs(store):
            found[f"{archive} {paths.root}"] = store, paths
    return found


@pytest.fixture(scope="module")
def rewritten(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[ObjectStore, RewriteOutcome]]:
    return {
        name: (
            store,
            run_rewrite(
                store, paths, stopped(paths), FULL, RewriteOptions(quiet_seconds=0, sampled=True)
            ),
        )
        for name, (store, paths) in unpacked(tmp_path_factory, "rewritten").items()
    }


def each(
    jobs: Mapping[str, tuple[ObjectStore, JobPaths]],
    rewritten: Mapping[str, tuple[ObjectStore, RewriteOutcome]],
) -> Iterator[tuple[JobPaths, ObjectStore, ObjectStore, RewriteOutcome]]:
    for name, (store, paths) in jobs.items():
        yield paths, store, *rewritten[name]


def test_all_of_them_are_rewritten_whole_but_what_is_one_file_a_subtask(
    jobs: Any, rewritten: Any
) -> None:
    before = after = 0
    for _, _, twin, outcome in each(jobs, rewritten):
        left = {(one.operator, one.table): one.reason for one in outcome.left_out}
        for operator in ParquetBackend(twin, find_job(twin, outcome.plan.job)).load().operators:
            for name, files in operator.tables.items():
                if not isinstance(files, ExpiringTimeKeyFiles):
                    assert "every epoch writes it completely," in left[operator.operator, name]
                elif (operator.operator, name) in left:
                    assert left[operator.operator, name] == "it already has one file per subtask"
                else:
                    assert len(files.files) <= operator.parallelism
                    assert all(map(is_rewritten, files.paths))
        assert outcome.after.files == outcome.plan.after.files
        assert sum(outcome.after.opens) <= sum(outcome.plan.before.opens)
        before, after = before + outcome.plan.before.files, after + outcome.after.files
    assert len(jobs) == 15
    assert before > 4 * after


def test_bytes_come_to_what_was_forecast(jobs: Any, rewritten: Any) -> None:
    for paths, store, _, outcome in each(jobs, rewritten):
        came = outcome.after.size_bytes
        assert came / 1.1 <= outcome.plan.after.size_bytes <= came * 1.1, paths
        dry = plan_rewrite(WriteProtected(store), paths, JobDirectory(), FULL, sampled=True)
        assert dry.after == outcome.plan.after


def test_the_rows_are_the_same(jobs: Any, rewritten: Any) -> None:
    for paths, store, twin, outcome in each(jobs, rewritten):
        assert content(twin, paths) == content(store, paths)
        assert all(part.same for part in outcome.parts)


@pytest.mark.parametrize("parallelism", all_but([1, 2, 3], [1, 2]))
def test_it_verifies_at_the_highest_level_at_any_parallelism(
    jobs: Any, rewritten: Any, parallelism: int
) -> None:
    for paths, store, twin, _ in each(jobs, rewritten):
        found = verify_job(WriteProtected(twin), paths, parallelism=parallelism)
        was = verify_job(WriteProtected(store), paths, parallelism=parallelism)
        assert found.verdict.errors == ()
        codes = {one.code for one in found.verdict.findings}
        assert codes <= {one.code for one in was.verdict.findings}, paths
        rows = {(one.operator, one.table, one.subtask): one.rows for one in found.restore}
        old = {(one.operator, one.table, one.subtask): one.rows for one in was.restore}
        generational = {"a", "b"}
        assert {k: n for k, n in rows.items() if k[1] not in generational} == {
            k: n for k, n in old.items() if k[1] not in generational
        }


def test_each_subtask_reads_its_own_files_whole(rewritten: Any, jobs: Any) -> None:
    """None has to filter rows that belong to others."""
    for paths, _, twin, _ in each(jobs, rewritten):
        for operator in ParquetBackend(twin, paths).load().operators:
            for files in operator.tables.values():
                for file in files.files if isinstance(files, ExpiringTimeKeyFiles) else ():
                    if not is_rewritten(file.path):
                        continue
                    subtask = int(file.path.rpartition("/")[2].split("-")[2])
                    keys = range_for_server(subtask, operator.parallelism)
                    assert keys.covers(file.min_routing_key, file.max_routing_key)
                    assert file.compaction_generation >= 1


def test_nothing_else_of_the_metadata_changes(jobs: Any, rewritten: Any) -> None:
    for paths, store, twin, outcome in each(jobs, rewritten):
        before, after = (ParquetBackend(one, paths).load() for one in (store, twin))
        assert without_files(before) == without_files(after)
        changed = {
            info.path
            for info in store.list(paths.root)
            if twin.read(info.path) != store.read(info.path)
        }
        names = {path.name for path in changed}
        assert names <= (
            {"metadata"} if paths.layout is Layout.LEGACY else {"checkpoint-manifest.pb"}
        )
        assert all(path.startswith(f"{outcome.plan.ref.parent}/") for path in changed)


def without_files(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint without the lists of its expiring tables."""
    operators = tuple(
        replace(
            one,
            tables={
                name: replace(files, files=()) if isinstance(files, ExpiringTimeKeyFiles) else files
                for name, files in one.tables.items()
            },
        )
        for one in checkpoint.operators
    )
    return replace(checkpoint, operators=operators)


def test_columns_of_every_kind_come_back_exactly(jobs: Any, rewritten: Any) -> None:
    """Names that repeat, nanoseconds in structs, lists, unsigned keys: types, names, nullability,
    and of tables without generations every value, hashes included."""
    compared = 0
    for paths, store, twin, _ in each(jobs, rewritten):
        before, after = (ParquetBackend(one, paths).load() for one in (store, twin))
        for operator in after.operators:
            was = before.operator(operator.operator)
            assert was is not None
            for name, files in operator.tables.items():
                if not any(map(is_rewritten, files.paths)):
                    continue
                old = [decode_file(store.read(p), p)[0] for p in was.tables[name].paths]
                new = [decode_file(twin.read(p), p)[0] for p in files.paths]
                for one in new:
                    assert one.schema.equals(old[0].schema, check_metadata=True)
                opened = {p for read in restore_plan(before).reads for p in read.files}
                assert set(was.tables[name].paths) == opened & set(was.tables[name].paths)
                if name not in ("a", "b", "t"):
                    assert multiset(new) == multiset(old)
                compared += 1
    assert compared >= 13


def multiset(tables: list[pa.Table]) -> list[str]:
    columns = [[as_plain(table.column(at)) for at in range(table.num_columns)] for table in tables]
    rows = (row for table in columns for row in zip(*table, strict=True))
    return sorted(map(repr, rows))


def test_what_was_put_back_is_what_arroyo_wrote(jobs: Any, rewritten: Any) -> None:
    for paths, store, twin, outcome in each(jobs, rewritten):
        if outcome.plan.before.files > 60:
            continue
        again = copy_job(twin, paths)
        assert run_undo(again, paths, stopped(paths)).done == outcome.published
        for info in store.list(paths.root):
            assert again.read(info.path) == store.read(info.path)


def test_a_second_rewrite_finds_nothing(jobs: Any, rewritten: Any) -> None:
    for paths, _, twin, _ in each(jobs, rewritten):
        assert not plan_rewrite(WriteProtected(twin), paths, stopped(paths), FULL).tables


# ---- an aggregate without GROUP BY ---------------------------------------------------------------


def test_an_unknown_field_of_the_metadata_is_kept(jobs: Any) -> None:
    """A later release may say more than we understand."""
    store, paths = jobs["flights carrier_totals"]
    twin = copy_job(store, paths)
    path = paths.operator_metadata(
        ParquetBackend(twin, paths).load().operators[0].operator,
        ParquetBackend(twin, paths).load().epoch,
    )
    for operator in ParquetBackend(twin, paths).load().operators:
        path = paths.operator_metadata(operator.operator, operator.epoch)
        twin.put(path, twin.read(path) + b"\xf2\x3e\x03abc")  # field 1006
    run_rewrite(twin, paths, stopped(paths), FULL, RewriteOptions(quiet_seconds=0))
    for operator in ParquetBackend(twin, paths).load().operators:
        assert operator.unknown == b"\xf2\x3e\x03abc"
        data = twin.read(paths.operator_metadata(operator.operator, operator.epoch))
        assert metadata.decode_operator(data, path) == operator
