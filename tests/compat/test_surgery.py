"""Every job that a real Arroyo wrote, edited, forked, evolved and taken back: what is to change
does, nothing else, the next start loads what it should, and an undo restores every byte."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Epoch,
    JobPaths,
    MemoryStore,
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
from arroyo_dagster.state.planning.surgery.matching import match_operators, shapes_of
from arroyo_dagster.state.planning.verify.findings import Verdict
from tests.arroyo_jobs import content, stopped
from tests.commands import run
from tests.compat.arroyo import ARCHIVES, DATA, unpack
from tests.compat.digests import Objects, filled, loaded
from tests.compat.test_digests import fixtures
from tests.damages import copy_job
from tests.evolved_jobs import as_suggested
from tests.formats import (
    Edit,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    KeyDeletion,
    NewPosition,
    Overrides,
    SetOffsets,
    SetWatermark,
    decode_file,
    digest_rows,
    encode_pairs,
)
from tests.internals import (
    EditOptions,
    StateSource,
    plan_evolve,
    restored_rows,
    run_edit,
    run_evolve,
    run_fork,
)
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


__all__ = ["jobs"]

Job = tuple[ObjectStore, JobPaths]
NO_COUNTERPART = "no operator of the source is like it"
REASONS = {
    ("carrier_totals", "grand_total"): r"its keys are \(\), and in the source \(_key_carrier",
    ("grand_total", "carrier_totals"): r"its keys are \(_key_carrier .*in the source \(\)",
    ("hourly_departures", "median_delays"): "its window is 21600 s long, and in the source 3600 s",
    ("median_delays", "hourly_departures"): "its window is 3600 s long, and in the source 21600 s",
}
"""Of pairs whose operators have the same ids; all others have operators without a counterpart."""


def sql_of(job: Job) -> str:
    """What the SQL of a job is called: the two clusters ran the same."""
    store, paths = job
    names = [one.operator for one in ParquetBackend(store, paths).load().operators]
    (sink,) = [one for one in names if one.startswith("sink_")]
    return str(paths.job) if sink.startswith("sink_result") else sink


def pairs(jobs: dict[str, Job], *, equal: bool) -> list[tuple[Job, Job]]:
    named = [(sql_of(one), one) for one in jobs.values()]
    every = itertools.product(named, named)
    return [(a, b) for (first, a), (second, b) in every if (first == second) is equal]


def test_operators_match_by_what_they_hold(jobs: dict[str, Job]) -> None:
    same = pairs(jobs, equal=True)
    assert (len(same), len(pairs(jobs, equal=False))) == (23, 202)
    for a, b in same:
        theirs, ours = (ParquetBackend(*one).load() for one in (a, b))
        found = match_operators(shapes_of(theirs), shapes_of(ours), Overrides())
        assert found.suggestions == ()
        assert all(one.source == one.operator for one in found.matches)
        stateful = {one.operator for one in ours.operators if one.tables}
        sinks = {one for one in stateful if one.startswith("sink_")}
        assert {one.operator for one in found.matches} >= stateful - sinks


@share_or_all(6)
def test_jobs_of_one_sql_take_the_whole_state(jobs: Any, share: Share) -> None:
    for (store, paths), (other, target) in share(pairs(jobs, equal=True)):
        twin = with_other_outputs(other, target)
        was = copy_job(twin, target)
        source = StateSource(store=WriteProtected(store), paths=paths)
        assert run_evolve(source, twin, target, stopped(target), None, NOW).published
        assert content(twin, target) == content(store, paths)
        assert positions(twin, target) == positions(store, paths)
        assert verify(twin, target).errors == ()
        assert run_undo(twin, target, stopped(target)).operation == "evolve"
        for info in other.list(target.root):
            assert twin.read(info.path) == was.read(info.path)


@share_or_all(24)
def test_jobs_of_other_sql_are_refused_with_the_reason(jobs: Any, share: Share) -> None:
    cases = pairs(jobs, equal=False)
    known = [one for one in cases if (one[0][1].job, one[1][1].job) in REASONS]
    assert len(known) == len(REASONS)
    for (store, paths), (other, target) in [*share(cases), *share(known)]:
        twin = with_other_outputs(other, target)
        source = StateSource(store=WriteProtected(store), paths=paths)
        expected = REASONS.get((str(paths.job), str(target.job)), "")
        act = partial(plan_evolve, source, WriteProtected(twin), target, stopped(target))
        with pytest.raises(InputError) as refused:
            as_suggested(act)
        assert refused.match(
            expected or f"{NO_COUNTERPART}|its keys are|its gap is|nothing shows which"
        )


JOBS = range(15)
DATABASE = ("--arroyo-db", str(DATA / "state-legacy.sqlite"))


def prepared(number: int) -> tuple[MemoryStore, JobPaths, tuple[str, ...]]:
    """A job, and the words that tell its status."""
    name, objects, paths = fixtures()[number]
    told = DATABASE if name.startswith("legacy") else ("--assume", f"{paths.root}=stopped")
    return filled("rollback", objects), paths, told


def state(store: MemoryStore, paths: JobPaths, epoch: Epoch | None = None) -> dict[str, Any]:
    """What a restore loads."""
    found, _ = loaded(store, paths, epoch)
    return {name: rows for name, rows in found.items() if name not in ("epochs", "state")}


def committing(store: MemoryStore, paths: JobPaths) -> dict[str, Any]:
    """The tables of sinks that commit in two phases, with their commit data."""
    return {
        f"{operator.operator} {name}": files
        for operator in ParquetBackend(store, paths).load().operators
        if operator.needs_commit
        for name, files in operator.tables.items()
    }


def others(store: MemoryStore) -> Objects:
    return {
        info.path: (store.read(info.path), 0)
        for info in store.list()
        if "_arroyo_dagster" not in info.path and "-ext-" not in info.path
    }


@pytest.mark.parametrize("number", JOBS)
def test_the_next_start_loads_what_the_older_epoch_holds(number: int) -> None:
    store, paths, told = prepared(number)
    epochs = json.loads(run(store.url, "rollback", paths.root, "--json").stdout)
    *_, newest = ParquetBackend(store, paths).epochs()
    assert newest not in epochs["restorable_epochs"]
    was, sinks = others(store), committing(store, paths)
    for epoch in {*epochs["restorable_epochs"][::6], newest - 1}:
        expected, now = (state(store, paths, Epoch(one)) for one in (epoch, newest))
        words = ("rollback", paths.root, str(epoch), *told)
        plan = json.loads(run(WriteProtected(store).url, *words, "--json").stdout)
        assert (plan["plan"]["why_not"], plan["epoch"]) == (None, newest)
        digest = plan["plan"]["digest"]
        done = run(store.url, *words, "--yes", "--quiet", "0", "--approve", digest)
        assert done.exit_code == 0, done.output
        kept = {name: now[name] for name in sinks}
        assert state(store, paths) == expected | kept
        assert committing(store, paths) == sinks
        assert run(store.url, "verify", paths.root, "--level", "4").exit_code == 0
        assert run(store.url, "undo", paths.root, *told, "--yes").exit_code == 0
        assert others(store) == was


def test_the_fixtures_hold_sinks_that_commit_in_two_phases() -> None:
    assert sum(bool(committing(*prepared(number)[:2])) for number in JOBS) == 2


def test_without_a_source_that_names_the_committed_epoch_nothing_goes_back() -> None:
    """Of the legacy layout: the store does not say whether the newest epoch is committed."""
    for number in JOBS:
        store, paths, told = prepared(number)
        if told is DATABASE and committing(store, paths):
            break
    was = others(store)
    words = ("rollback", paths.root, str(ParquetBackend(store, paths).epochs()[0]))
    refused = run(store.url, *words, "--assume", f"{paths.root}=stopped", "--yes")
    assert refused.exit_code == 1
    assert "no source says that epoch" in refused.stderr
    assert "pass --arroyo-db or --arroyo-api" in refused.stderr
    assert others(store) == was
