"""Every job that a real Arroyo wrote, edited and forked: positions, watermark and a key change as
they should, nothing else does, and an undo restores every byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    JobPaths,
    ObjectStore,
    ParquetBackend,
    WriteProtected,
    codec_for,
    list_jobs,
    open_state,
    open_store,
    run_undo,
    verify_job,
)
from arroyo_dagster.state.operations.query.positions import source_positions
from arroyo_dagster.state.planning.verify.findings import Verdict
from tests.arroyo_jobs import content, stopped
from tests.compat.arroyo import ARCHIVES, unpack
from tests.damages import copy_job
from tests.formats import (
    Edit,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    KeyDeletion,
    NewPosition,
    SetOffsets,
    SetWatermark,
    decode_file,
    digest_rows,
    encode_pairs,
)
from tests.internals import EditOptions, StateSource, restored_rows, run_edit, run_fork
from tests.shares import Share, share_or_all

NOW = EditOptions(quiet_seconds=0)
FORWARD = SetOffsets(positions=(NewPosition(partition="all", position="+3", relative=True),))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ObjectStore, JobPaths]]:
    found = {}
    for archive in ARCHIVES:
        store = open_store(unpack(archive, tmp_path_factory.mktemp(f"{archive} surgery")))
        for paths in list_jobs(store):
            found[f"{archive} {paths.root}"] = store, paths
    assert len(found) == 15
    return found


def edited(
    jobs: Any, edit: Edit, share: Share
) -> Iterator[tuple[JobPaths, ObjectStore, ObjectStore]]:
    """Each job with its edited copy; the copy verifies, and is undone to the last byte."""
    for store, paths in share(jobs.values()):
        twin = copy_job(store, paths)
        outcome = run_edit(twin, paths, stopped(paths), edit, NOW)
        assert outcome.published, paths
        was = {one.code for one in verify(store, paths).findings}
        found = verify(twin, paths)
        assert found.errors == ()
        assert {one.code for one in found.findings} <= was, paths
        yield paths, store, twin
        assert run_undo(twin, paths, stopped(paths)).done
        for info in store.list(paths.root):
            assert twin.read(info.path) == store.read(info.path)


def verify(store: ObjectStore, paths: JobPaths) -> Verdict:
    return verify_job(WriteProtected(store), paths, level=2).verdict


def positions(store: ObjectStore, paths: JobPaths) -> dict[tuple[str, str], int | None]:
    (epoch,) = open_state(store).job(paths.root).epochs_named(None)
    return {(one.operator, one.partition): one.position for one in source_positions(epoch)}


@share_or_all(4)
def test_positions_of_all_sources_move_and_no_row_does(jobs: Any, share: Share) -> None:
    for paths, store, twin in edited(jobs, FORWARD, share):
        before, after = positions(store, paths), positions(twin, paths)
        assert before
        assert after == {key: (position or 0) + 3 for key, position in before.items()}
        assert content(twin, paths) == content(store, paths)


@share_or_all(4)
@pytest.mark.parametrize("seconds", [-1, 7200], ids=["back", "forward"])
def test_a_watermark_reaches_every_operator_that_has_one(
    jobs: Any, share: Share, seconds: int
) -> None:
    for name, (store, paths) in jobs.items():
        newest = ParquetBackend(store, paths).load()
        at = max(one.min_watermark_micros or 0 for one in newest.operators) + seconds * 1_000_000
        only = {name: (store, paths)} if (store, paths) in share(jobs.values()) else {}
        for _, _, twin in edited(only, SetWatermark(at_micros=at), Share(0, 1)):
            after = ParquetBackend(twin, paths).load()
            for was, now in zip(newest.operators, after.operators, strict=True):
                reached = None if was.min_watermark_micros is None else at
                assert (now.min_watermark_micros, now.max_watermark_micros) == (reached, reached)
            was_rows = {key: one.rows for key, one in content(store, paths).items()}
            for key, one in content(twin, paths).items():
                assert one.rows >= was_rows[key] if seconds < 0 else one.rows <= was_rows[key]


def a_key(store: ObjectStore, paths: JobPaths) -> tuple[pa.Scalar, ...] | None:
    """The key of the first row of the first table with a key of plain columns."""
    for operator in ParquetBackend(store, paths).load().operators:
        for name, files in operator.tables.items():
            config = operator.configs[name].config
            if not isinstance(files, ExpiringTimeKeyFiles):
                continue
            assert isinstance(config, ExpiringTimeKeyConfig)
            rows = restored_rows(store, operator, name, managed=False).rows
            key = tuple(rows.column(at)[0] for at in config.schema.hashed_indices)
            if key and not any(pa.types.is_nested(one.type) for one in key):
                return key
    return None


def as_texts(key: tuple[pa.Scalar, ...]) -> tuple[str, ...]:
    return tuple("null" if not one.is_valid else str(one.as_py()) for one in key)


@share_or_all(4)
def test_a_key_goes_from_every_table_that_has_it(jobs: Any, share: Share) -> None:
    """The truth are the rows that a restore of the original loads, without those of the key."""
    keyed = {name: one for name, one in jobs.items() if a_key(*one) is not None}
    assert len(keyed) == 14  # of one, grand_total, the rows have no key
    for name, job in share(keyed.items()):
        key = a_key(*job)
        assert key is not None
        for paths, store, twin in edited(
            {name: job}, KeyDeletion(values=as_texts(key)), Share(0, 1)
        ):
            expected = {}
            for operator in ParquetBackend(store, paths).load().operators:
                for table, files in operator.tables.items():
                    if isinstance(files, ExpiringTimeKeyFiles):
                        rows = restored_rows(store, operator, table, managed=False).rows
                        config = operator.configs[table].config
                        assert isinstance(config, ExpiringTimeKeyConfig)
                        left = without(rows, config.schema.hashed_indices, key)
                        expected[operator.operator, str(table)] = digest_rows(left)
            found = content(twin, paths)
            assert {k: v for k, v in expected.items() if v.rows} == found
            assert found != content(store, paths)


def without(rows: pa.Table, indices: tuple[int, ...], key: tuple[pa.Scalar, ...]) -> pa.Table:
    columns = [rows.column(at) for at in indices]
    if [one.type for one in columns] != [one.type for one in key]:
        return rows
    same = [
        pc.equal(column, value) if value.is_valid else pc.is_null(column)
        for column, value in zip(columns, key, strict=True)
    ]
    stays = [not all(one[at].as_py() for one in same) for at in range(rows.num_rows)]
    return rows.filter(pa.array(stays, pa.bool_()))


def with_other_outputs(store: ObjectStore, paths: JobPaths) -> ObjectStore:
    """A copy of a job that writes other files: the entries of its single-file sinks have other
    paths."""
    twin = copy_job(store, paths)
    for operator in ParquetBackend(twin, paths).load().operators:
        for name, files in operator.tables.items():
            if operator.configs[name].config.description == "file_sink":
                for path in files.paths:
                    pairs, version = decode_file(twin.read(path), path)
                    keys = [codec_for(str).encode("/elsewhere") for _ in range(pairs.num_rows)]
                    values = pairs.column(1).to_pylist()
                    schema = GLOBAL_KEY_VALUE_SCHEMA
                    twin.put(path, encode_pairs(keys, values, schema, version=version))
    return twin


@share_or_all(4)
def test_every_job_forks_into_a_twin_of_another_state(jobs: Any, share: Share) -> None:
    for store, paths in share(jobs.values()):
        twin = with_other_outputs(store, paths)
        before = positions(store, paths)
        newest = ParquetBackend(store, paths).load()
        back = max(one.min_watermark_micros or 0 for one in newest.operators) - 1_000_000
        run_edit(twin, paths, stopped(paths), FORWARD, NOW)
        run_edit(twin, paths, stopped(paths), SetWatermark(at_micros=back), NOW)
        was = copy_job(twin, paths)
        source = StateSource(store=WriteProtected(store), paths=paths)
        outcome = run_fork(source, twin, paths, stopped(paths), NOW)
        assert outcome.published
        assert content(twin, paths) == content(store, paths)
        assert positions(twin, paths) == before
        after = ParquetBackend(twin, paths).load()
        for theirs, ours in zip(newest.operators, after.operators, strict=True):
            assert ours.min_watermark_micros == theirs.min_watermark_micros
            assert ours.tables.keys() == theirs.tables.keys()
            assert ours.configs == theirs.configs
        assert verify(twin, paths).errors == ()
        assert run_undo(twin, paths, stopped(paths)).operation == "fork"
        for info in store.list(paths.root):
            assert twin.read(info.path) == was.read(info.path)
