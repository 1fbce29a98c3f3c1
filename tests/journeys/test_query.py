"""Queries of managed jobs: removals, time travel, names that do not exist, private columns, and
epochs that are collected while they are read; and queries of what a real Arroyo wrote.
Differences of two epochs equal those of brute force; moved rows are none."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import json
import pickle
import runpy
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from arroyo_dagster import (
    MemoryStore,
    ParquetBackend,
    PrivateColumns,
    StateCatalog,
    cli,
    open_state,
)
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    ReadOptions,
    StateEpoch,
    WriteProtected,
    find_job,
    open_store,
    read_rows,
    run_compaction,
    storage,
)
from arroyo_dagster.state.codec.plain import plain_scalar
from arroyo_dagster.state.operations.query.diff import TableDiff, diff_epochs, diff_tables
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from tests.compat.arroyo import ARCHIVES, description, unpack
from tests.internals import CHANGE, Change
from tests.jobs import as_multiset, copied, listing, table_content, written_by_word_job

RETENTION = 60_000_000


@pytest.fixture
def store() -> MemoryStore:
    return written_by_word_job(rows=60, keep_epochs=None, retention_micros=RETENTION)


@pytest.fixture
def state(store: MemoryStore) -> StateCatalog:
    return open_state(store)


def test_removals_are_applied_at_every_epoch(state: StateCatalog) -> None:
    before = listing(state.store)
    job = state.job("words/main")
    deleted = 0
    for number in job.epochs():
        epoch = job.epoch(number)
        for table in epoch.tables():
            operator = epoch.checkpoint.operator(table.name.operator or "")
            assert operator is not None
            expected = table_content(state.store, operator, table.name.table)
            rows = table.to_arrow()
            if isinstance(table.scan, ExpiringScan):
                assert as_multiset(rows) == expected
                raw = table.raw().to_arrow()
                deleted += Counter(raw.column("_operation").to_pylist())["delete_key"]
            else:
                assert dict(zip(*rows.to_pydict().values(), strict=True)) == expected
    assert deleted
    assert listing(state.store) == before


def test_a_scan_can_be_sent_to_another_process(state: StateCatalog) -> None:
    table = state.table('"words/main".count.counts')
    scan = dataclasses.replace(table.scan, store=None)
    assert pickle.loads(pickle.dumps(scan)).schema == table.schema


def test_an_epoch_is_found_by_its_time(store: MemoryStore, state: StateCatalog) -> None:
    job = state.job("main")
    for number in job.epochs():
        finished = job.epoch(number).checkpoint.finish_time_micros
        assert job.epoch(at=finished).number >= number
    last = job.epoch().checkpoint.finish_time_micros
    moment = dt.datetime.fromtimestamp(last // 10**6 + 1, dt.UTC)
    assert job.epoch(at=moment).number == job.epochs()[-1]
    assert state.epoch(f"words/main@{moment.isoformat()}").number == job.epochs()[-1]
    assert state.epoch("words/main@2").number == 2
    assert state.epoch("words/main@latest").number == job.epochs()[-1]
    with pytest.raises(NotFoundError, match="finished at that time"):
        job.epoch(at="2001-01-01")
    with pytest.raises(InputError, match="not a point in time"):
        job.epoch(at="yesterday")
    with pytest.raises(InputError, match="number or by a time"):
        job.epoch(2, at=last)


def test_unknown_names_list_the_nearest(state: StateCatalog) -> None:
    for name, nearest in (
        ('"words/mian".count.counts', "words/main"),
        ('"words/main".cuont.counts', "count"),
        ('"words/main".count.count', "counts"),
    ):
        with pytest.raises(NotFoundError, match=f"did you mean {nearest}"):
            state.table(name)
    with pytest.raises(NotFoundError, match="did you mean word"):
        state.table('"words/main".keep.rows').to_arrow(["wrod"])
    with pytest.raises(InputError, match="table of an operator"):
        state.table("jobs")
    with pytest.raises(InputError, match="not the name of a table"):
        state.table("a..b")
    with pytest.raises(InputError, match="cannot be compared"):
        state.table('"words/main".keep.rows').to_arrow(where=[("word", "=", 3)])
    with pytest.raises(InputError, match="not compared with"):
        state.table('"words/main".keep.rows').to_arrow(where=[("word", "~", "a")])


def test_an_epoch_that_is_collected_meanwhile_is_named(store: MemoryStore) -> None:
    job = open_state(store).job("main")
    table = job.epoch(3).table("count", "counts")
    for info in list(store.list()):
        if "checkpoint-0000003" in info.path or info.path.endswith("epoch-0000003.record"):
            store.delete_many([info.path])
    newest = ParquetBackend(store, job.paths).epochs()[-1]
    with pytest.raises(NotFoundError, match=f"epoch 3 was collected; the newest is {newest}"):
        table.to_arrow()
    with pytest.raises(NotFoundError, match="epoch 3 was collected"):
        table.to_polars().collect()


def test_private_columns_are_masked_before_conditions_see_them(store: MemoryStore) -> None:
    state = open_state(store, private=PrivateColumns.of(["word"]))
    table = state.table('"words/main".keep.rows')
    rows = table.to_arrow()
    assert all(one.startswith("private:") for one in rows.column("word").to_pylist())
    plain = open_state(store).table('"words/main".keep.rows').to_arrow()
    word = plain.column("word")[0].as_py()
    assert rows.num_rows == plain.num_rows
    assert table.to_arrow(where=[("word", "=", word)]).num_rows == 0
    assert table.to_polars().filter(pl.col("word") == word).collect().height == 0
    digest = rows.column("word")[0].as_py()
    assert table.to_arrow(where=[("word", "=", digest)]).num_rows > 0
    assert table.raw().to_arrow().column("_key_hash").null_count > 0
    with pytest.raises(InputError, match="private"):
        table.lookup(word)


Archive = Callable[[str], str]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """Gives the URL of an archive, unpacked once."""
    urls: dict[str, str] = {}

    def url_of(name: str) -> str:
        if name not in urls:
            urls[name] = unpack(name, tmp_path_factory.mktemp(name))
        return urls[name]

    return url_of


def output(*args: str) -> Any:
    result = CliRunner().invoke(cli.main, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def iso_seconds(micros: int | None) -> str | None:
    """Independent of the code under test: whole seconds of UTC."""
    if micros is None:
        return None
    return dt.datetime.fromtimestamp(micros // 10**6, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")


# ---- what Arroyo wrote ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHIVES)
def test_jobs_agree_with_the_independent_reader(name: str, archive: Archive) -> None:
    described = description(name)
    jobs = output("jobs", "--url", archive(name))
    found = {"/".join(filter(None, (job["pipeline"], job["job"]))): job for job in jobs}
    assert set(found) == set(described)
    for path, job in found.items():
        epochs = [epoch["epoch"] for epoch in described[path]["epochs"]]
        assert (job["epochs"], job["newest_epoch"]) == (len(epochs), max(epochs))
        assert job["layout"] == ("protocol" if name == "leader" else "legacy")
        assert (job["state"], job["problem"]) == ("ready", None)
        marks = [one["min_watermark_us"] for one in newest(described[path])["operators"].values()]
        watermark = min(mark for mark in marks if mark is not None)
        assert job["watermark"][:19] == iso_seconds(watermark)


def newest(job: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = max(job["epochs"], key=lambda epoch: epoch["epoch"])
    return found


def tables_of(epoch: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (operator, table): facts
        for operator, one in epoch["operators"].items()
        for table, facts in one["tables"].items()
    }


def test_show_as_json_holds_what_was_promised(archive: Archive) -> None:
    found = output("show", "aircraft_sessions", "--url", archive("flights"))
    assert (found["job"], found["epoch"], found["state"]) == ("aircraft_sessions", 8, "ready")
    assert found["operators"][-1] == {
        "operator_id": "SessionWindow<21600s>",
        "parallelism": 2,
        "watermark": "2013-01-05T02:30:00.000000Z",
        "tables": [
            {"table": "e", "kind": "global_keyed", "owner": "session window"}
            | {"files": 2, "rows": 2, "bytes": 1218},
            {"table": "s", "kind": "expiring_time_key", "owner": "session window", "files": 16}
            | {key: found["operators"][-1]["tables"][1][key] for key in ("rows", "bytes")},
        ],
    }


@pytest.mark.parametrize("name", ARCHIVES)
def test_rows_of_every_table_of_arroyo_are_plain_json(name: str, archive: Archive) -> None:
    store = WriteProtected(open_store(archive(name)))
    for path, job in description(name).items():
        paths = find_job(store, path)
        for (operator, table), facts in tables_of(newest(job)).items():
            found = read_rows(store, paths, operator, table, ReadOptions(limit=50))
            json.dumps(found.rows, allow_nan=False)
            assert len(found.rows) == min(50, found.count)
            assert found.count <= facts["rows"]
            if facts["kind"] == "global":
                assert all(set(row) == {"key", "value"} for row in found.rows)
                assert (found.known is not None, found.problem) == (True, None)
            elif facts["generational"]:
                whole = read_rows(store, paths, operator, table, ReadOptions(history=True, limit=1))
                assert 0 < found.count < whole.count == facts["rows"]


def test_two_columns_of_one_name_are_both_printed(archive: Archive) -> None:
    at = ("median_delays", "tumbling_4", "t", "--url", archive("flights"))
    rows = output("rows", *at, "--limit", "0")
    assert list(rows[0]) == ["origin", "0", "0_1", "1", "_timestamp"]
    assert {row["_timestamp"] for row in rows} == {"2013-01-05T00:00:00.000000000"}
    assert all(len(row["0"]) == len(row["0_1"]) == len(row["1"]) for row in rows)


# ---- what a beginner writes ----------------------------------------------------------------------


def test_the_first_example_goes_from_nothing_to_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (EXAMPLES / "hello_state.py").read_text()
    assert len(source.splitlines()) <= 20
    monkeypatch.setattr("arroyo_dagster.open_store", lambda _: storage.open_store(str(tmp_path)))
    runpy.run_path(str(EXAMPLES / "hello_state.py"), run_name="__main__")
    rows = output("rows", "main", "count", "counts", "--url", str(tmp_path))
    assert sorted(rows, key=lambda row: str(row["key"])) == [
        {"key": "be", "value": 1},
        {"key": "to", "value": 2},
    ]
    assert "arroyo-state rows main count counts --url /tmp/hello-state" in source


FULL = CompactionSettings(policy=CompactionPolicy.FULL)


@pytest.fixture(scope="module")
def expiring() -> MemoryStore:
    return written_by_word_job(rows=60, keep_epochs=None, retention_micros=20_000_000)


def rows_of(epoch: StateEpoch, operator: str, table: str) -> Counter[str]:
    for one in epoch.tables():
        if (one.name.operator, one.name.table) == (operator, table):
            columns = [[repr(plain_scalar(v)) for v in c] for c in one.to_arrow().columns]
            return Counter(map(repr, zip(*columns, strict=True)))
    return Counter()


def applied(rows: Counter[str], diff: TableDiff) -> Counter[str]:
    """The rows before, with the changes applied."""
    found = Counter(rows)
    *columns, kinds = (
        [repr(plain_scalar(v)) for v in c] if name != CHANGE else c.to_pylist()
        for name, c in zip(diff.changes.schema.names, diff.changes.columns, strict=True)
    )
    added = (Change.INSERTED.value, Change.UPDATED_TO.value)
    for row, kind in zip(map(repr, zip(*columns, strict=True)), kinds, strict=True):
        found[row] += 1 if kind in added else -1
    assert min(found.values(), default=0) >= 0, diff
    return +found


def check_pair(before: StateEpoch, after: StateEpoch) -> list[TableDiff]:
    found = diff_epochs(before, after)
    for one in found:
        was, now = (rows_of(epoch, one.operator, one.table) for epoch in (before, after))
        assert applied(was, one) == now, (one.operator, one.table)
        most = sum(((was - now) + (now - was)).values())
        assert len(one.changes) == most, "a row that did not change is named"
    return found


def test_managed_jobs_with_removals_and_expiry(expiring: MemoryStore) -> None:
    job = open_state(expiring).job("main")
    kinds: Counter[Change] = Counter()
    numbers = job.epochs()
    for first, second in itertools.pairwise(numbers):
        for one in check_pair(job.epoch(first), job.epoch(second)):
            for kind in Change:
                kinds[kind] += one.count(kind)
    assert all(kinds[kind] for kind in Change)
    assert kinds[Change.UPDATED_FROM] == kinds[Change.UPDATED_TO]
    check_pair(job.epoch(numbers[-1]), job.epoch(numbers[0]))


def test_a_compaction_changes_nothing(expiring: MemoryStore) -> None:
    compacted = copied(expiring)
    job = open_state(compacted).job("main")
    before = job.epoch()
    run_compaction(compacted, job.paths, FULL)
    after = job.epoch()
    assert after.number > before.number
    assert all(one.is_empty for one in diff_epochs(before, after))


def test_changes_are_counted_by_key_range(expiring: MemoryStore) -> None:
    job = open_state(expiring).job("main")
    diffs = diff_epochs(job.epoch(1), job.epoch(), "keep", "rows")
    (keep,) = diffs
    assert keep.key_columns == ("word",)
    assert sum(keep.by_subtask) == len(keep.changes)
    assert len(keep.by_subtask) == 2


def test_two_jobs_and_two_parallelisms_are_compared(expiring: MemoryStore) -> None:
    here = open_state(expiring).job("main").epoch()
    other = written_by_word_job(
        rows=60, keep_epochs=None, retention_micros=20_000_000, parallelism=3
    )
    there = open_state(other).job("main").epoch()
    state = {(one.operator, one.table): one for one in diff_epochs(here, there)}
    assert state["count", "counts"].is_empty
    assert state["keep", "rows"].is_empty


def test_names_that_neither_has_are_refused(expiring: MemoryStore) -> None:
    job = open_state(expiring).job("main")
    with pytest.raises(NotFoundError, match="did you mean count"):
        diff_epochs(job.epoch(1), job.epoch(2), "cuont")
    with pytest.raises(NotFoundError, match="did you mean counts"):
        diff_epochs(job.epoch(1), job.epoch(2), "count", "count")
    with pytest.raises(InputError, match="no table"):
        diff_tables(None, None)
