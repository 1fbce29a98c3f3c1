"""Windows, sessions and join sides of a real Arroyo: equal to a plain loop over the stored rows."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from arroyo_dagster.state import StateCatalog, StateEpoch, open_state
from arroyo_dagster.state.operations.query.metadata_tables import METADATA_TABLES
from arroyo_dagster.state.operations.query.operator_state import join_sides, sessions, windows
from tests.compat.arroyo import ARCHIVES, unpack
from tests.internals import SqlCatalog
from tests.jobs import written_by_word_job


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
