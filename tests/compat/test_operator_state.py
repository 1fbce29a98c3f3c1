"""Windows, sessions and join sides of a real Arroyo: equal to a plain loop over the stored rows.
Generational tables of it, against the data that they were made from."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from arroyo_dagster.state import (
    Epoch,
    JobPaths,
    ObjectStore,
    OperatorCheckpoint,
    ParquetBackend,
    ReadOptions,
    StateCatalog,
    StateEpoch,
    TableName,
    WriteProtected,
    find_job,
    list_jobs,
    open_state,
    open_store,
    read_rows,
)
from arroyo_dagster.state.operations.query.metadata_tables import METADATA_TABLES
from arroyo_dagster.state.operations.query.operator_state import join_sides, sessions, windows
from tests.compat.arroyo import ARCHIVES, DATA, unpack
from tests.formats import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles
from tests.internals import SqlCatalog, load_epoch, restored_rows
from tests.jobs import written_by_word_job
from tests.shares import Share, dealt_out


@pytest.fixture(scope="module", params=ARCHIVES)
def arroyo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> StateCatalog:
    return open_state(unpack(request.param, tmp_path_factory.mktemp(request.param)))


def stored(epoch: StateEpoch, description: str) -> list[tuple[str, int, str, list[dict[str, Any]]]]:
    """The tables of a description: operator, retention, first column, and rows by key and time."""
    found = []
    for table in epoch.tables():
        config = table.scan.operator.configs[table.scan.name].config
        if config.description == description:
            rows = [
                {"key": row[table.schema.names[0]], "at": row["_timestamp"].value // 1000}
                for row in table.to_arrow([table.schema.names[0], "_timestamp"]).to_pylist()
            ]
            retention = config.retention_micros  # type: ignore[union-attr]
            found.append((str(table.name.operator), retention, table.schema.names[0], rows))
    return found


def test_open_windows_have_every_row_of_their_tables(arroyo: StateCatalog) -> None:
    for job in arroyo.jobs():
        epoch = job.epoch()
        found = list(windows(epoch))
        for operator, width, _, rows in stored(epoch, "tumbling_intermediate"):
            bins: dict[int, list[Any]] = defaultdict(list)
            for row in rows:
                bins[row["at"]].append(row["key"])
            assert [
                (one.starts_at_micros, one.ends_at_micros, one.keys, one.rows)
                for one in found
                if one.operator == operator
            ] == [(at, at + width, len({*keys}), len(keys)) for at, keys in sorted(bins.items())]
        for operator, _, _, rows in stored(epoch, "Sliding_intermediate"):
            mine = [one for one in found if one.operator == operator]
            assert sum(one.rows for one in mine) == len(rows)
            assert {one.kind for one in mine} == {"sliding"}


def test_open_sessions_are_those_of_a_plain_loop(arroyo: StateCatalog) -> None:
    for job in arroyo.jobs():
        epoch = job.epoch()
        found = list(sessions(epoch))
        for operator, retention, name, rows in stored(epoch, "session"):
            starts = epoch.table(operator, "e").to_arrow()["value"].to_pylist()
            first = min(one.value // 1000 for one in starts if one is not None)
            watermark = epoch.checkpoint.operator(operator).min_watermark_micros  # type: ignore[union-attr]
            by_key: dict[Any, list[int]] = defaultdict(list)
            for row in rows:
                if row["at"] >= first:
                    by_key[row["key"]].append(row["at"])
            wanted = set()
            for key, times in by_key.items():
                begun: list[list[int]] = []
                for at in sorted(times):
                    if begun and at < begun[-1][-1] + retention // 100:
                        begun[-1].append(at)
                    else:
                        begun.append([at])
                for one in begun:
                    if one[-1] + retention // 100 >= watermark:
                        wanted.add((json.dumps({name: key}), one[0], one[-1], len(one)))
            assert {
                (one.key, one.starts_at_micros, one.last_row_at_micros, one.rows)
                for one in found
                if one.operator == operator
            } == wanted
            assert wanted


def test_join_sides_count_the_rows_that_wait(arroyo: StateCatalog) -> None:
    for job in arroyo.jobs():
        epoch = job.epoch()
        found = {(one.operator, one.side): one for one in join_sides(epoch)}
        for side in ("left", "right"):
            for operator, _, _, rows in stored(epoch, f"{side} join data"):
                one = found[operator, side]
                assert (one.rows, one.keys) == (len(rows), len({str(row["key"]) for row in rows}))
                assert one.first_row_at_micros == min(row["at"] for row in rows)
                assert one.last_row_at_micros == max(row["at"] for row in rows)


def test_they_are_tables_of_sql_and_empty_for_managed_jobs(arroyo: StateCatalog) -> None:
    managed = open_state(written_by_word_job(rows=20)).jobs()
    for name in ("windows", "sessions", "join_sides"):
        assert not list(METADATA_TABLES[name].rows(managed))
        rows = len(list(METADATA_TABLES[name].rows(arroyo.jobs())))
        counted = SqlCatalog(arroyo).collect(f"select count(*) as n from {name}")
        assert counted["n"].to_list() == [rows]


FLIGHTS = Path(__file__).parents[2] / "examples/flights/data/flights-2013.parquet"
LINES = 6_000
A, B = TableName("a"), TableName("b")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ObjectStore]:
    return {
        name: WriteProtected(open_store(unpack(name, tmp_path_factory.mktemp(name))))
        for name in ("flights", "legacy", "leader")
    }


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    columns = ["carrier", "tailnum", "distance", "dep_delay"]
    table = pq.ParquetFile(FLIGHTS).read(columns=columns)
    return list(table.slice(0, LINES).to_pylist())


def by_carrier(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["carrier"]].append(line)
    return found


def delays(lines: list[dict[str, Any]]) -> list[int]:
    return [line["dep_delay"] for line in lines if line["dep_delay"] is not None]


def miles(lines: list[dict[str, Any]]) -> int:
    return sum(line["distance"] for line in lines)


def lines_read(store: ObjectStore, paths: JobPaths, epoch: int) -> int:
    (position,) = read_rows(store, paths, "source_flights_0", "f", ReadOptions(epoch=epoch)).rows
    return int(position["value"])


def net_results(name: str) -> list[dict[str, Any]]:
    """The rows that are left of a change stream."""
    left: Counter[str] = Counter()
    with gzip.open(DATA / f"{name}.json.gz", "rt") as file:
        for line in file:
            change = json.loads(line)
            for side, by in (("before", -1), ("after", 1)):
                if change[side] is not None:
                    left[json.dumps(change[side])] += by
    return [json.loads(row) for row, count in left.items() for _ in range(count)]


def test_what_the_lines_come_to_is_what_arroyo_prints(lines: list[dict[str, Any]]) -> None:
    """The yardstick of the tests below is right."""
    printed = {row["carrier"]: row for row in net_results("carrier_totals")}
    assert printed.keys() == by_carrier(lines).keys()
    for carrier, of_carrier in by_carrier(lines).items():
        late = delays(of_carrier)
        row = printed[carrier]
        assert (row["flights"], row["miles"]) == (len(of_carrier), miles(of_carrier))
        assert row["aircraft"] == len({line["tailnum"] for line in of_carrier} - {None})
        assert row["worst"] == max(late)
        assert row["mean_delay"] == pytest.approx(sum(late) / len(late))
    (total,) = net_results("grand_total")
    assert total == {"flights": LINES, "miles": miles(lines), "worst": max(delays(lines))}


@pytest.mark.parametrize("epoch", range(1, 9))
def test_accumulators_are_those_of_the_lines_read_so_far(
    stores: dict[str, ObjectStore], lines: list[dict[str, Any]], epoch: int
) -> None:
    store = stores["flights"]
    paths = find_job(store, "carrier_totals")
    truth = by_carrier(lines[: lines_read(store, paths, epoch)])
    found = read_rows(store, paths, "updating_aggregate_4", "a", ReadOptions(epoch=epoch))
    assert found.problem is None
    rows = {row["_key_carrier"]: row for row in found.rows}
    assert len(rows) == found.count == len(found.rows)
    # Carriers without a flight within the retention have no file left that holds them.
    assert len(truth) - len(rows) <= 1
    for carrier, row in rows.items():
        late = delays(truth[carrier])
        assert list(row.values())[1:7] == [
            len(truth[carrier]),
            miles(truth[carrier]),
            len(truth[carrier]),
            len(late),
            pytest.approx(sum(late)),
            max(late),
        ]
        assert row["_generation"] == len(truth[carrier])


@pytest.mark.parametrize("epoch", range(1, 9))
def test_tuples_are_the_distinct_values_of_the_lines_read_so_far(
    stores: dict[str, ObjectStore], lines: list[dict[str, Any]], epoch: int
) -> None:
    store = stores["flights"]
    paths = find_job(store, "carrier_totals")
    truth = by_carrier(lines[: lines_read(store, paths, epoch)])
    kept = read_rows(store, paths, "updating_aggregate_4", "a", ReadOptions(epoch=epoch)).rows
    found: dict[str, Counter[str]] = {row["_key_carrier"]: Counter() for row in kept}
    for row in read_rows(store, paths, "updating_aggregate_4", "b", ReadOptions(epoch=epoch)).rows:
        assert row["accumulator"] == 1
        found[row["_key_carrier"]][row["args_row"]] += row["count"]
    assert found == {
        carrier: Counter(_args_row(line["tailnum"]) for line in truth[carrier]) for carrier in found
    }


def _args_row(text: str | None) -> str:
    """One text of up to eight characters in Arrow's row format, in hex."""
    if text is None:
        return "00"
    return f"02{text.encode().ljust(8, bytes(1)).hex()}{len(text):02x}"


@pytest.mark.parametrize("epoch", range(1, 9))
def test_an_aggregate_without_keys_is_one_row(
    stores: dict[str, ObjectStore], lines: list[dict[str, Any]], epoch: int
) -> None:
    store = stores["flights"]
    paths = find_job(store, "grand_total")
    so_far = lines[: lines_read(store, paths, epoch)]
    found = read_rows(store, paths, "updating_aggregate_4", "a", ReadOptions(epoch=epoch))
    (row,) = found.rows
    expected = [len(so_far), miles(so_far), len(so_far), max(delays(so_far))]
    assert list(row.values())[:4] == expected
    operator = operator_of(store, paths, epoch)
    upstream = restored_rows(store, operator, A, managed=False).upstream
    # A file has one row a second, oldest first, and Arroyo takes the first: told where it matters.
    assert (found.problem is None) == (upstream is None)
    if upstream is not None:
        assert upstream.column(0)[0].as_py() < len(so_far)


def operator_of(store: ObjectStore, paths: JobPaths, epoch: int) -> OperatorCheckpoint:
    checkpoint = load_epoch(store, paths, epoch)
    (found,) = (one for one in checkpoint.operators if one.operator.startswith("updating_"))
    return found


def generational(store: ObjectStore) -> Iterator[tuple[JobPaths, int]]:
    for paths in list_jobs(store):
        for epoch in ParquetBackend(store, paths).epochs():
            for operator in load_epoch(store, paths, epoch).operators:
                config = operator.configs.get(B)
                if config and isinstance(config.config, ExpiringTimeKeyConfig):
                    yield paths, Epoch(epoch)


@pytest.mark.parametrize(("archive", "share"), dealt_out(["legacy", "leader"], 3))
def test_both_tables_of_the_auctions_agree_at_every_epoch(
    stores: dict[str, ObjectStore], archive: str, share: Share
) -> None:
    """`count(distinct bidder)` keeps how often each bidder has bid: they add up to `count(*)`."""
    store, pairs, history = stores[archive], 0, 0
    for paths, epoch in share(generational(store)):
        operator = operator_of(store, paths, epoch)
        totals = restored_rows(store, operator, A, managed=False).rows
        bids = dict(zip(totals[0].to_pylist(), totals[1].to_pylist(), strict=True))
        kept = restored_rows(store, operator, B, managed=False).rows
        bidders: Counter[int] = Counter()
        for auction, count in zip(kept[0].to_pylist(), kept["count"].to_pylist(), strict=True):
            bidders[auction] += count
        assert bidders == bids, (paths, epoch)
        pairs += len(bids)
        files = operator.tables[B]
        assert isinstance(files, ExpiringTimeKeyFiles)
        whole = restored_rows(store, operator, B, managed=False, history=True).rows
        assert whole.num_rows >= kept.num_rows
        history += whole.num_rows - kept.num_rows
    assert pairs > 1_000 // share.of
    assert history > 0
