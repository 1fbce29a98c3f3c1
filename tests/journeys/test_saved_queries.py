"""Saved queries: `arroyo-state sql @NAME JOB` answers what brute force finds, and binds values."""

from __future__ import annotations

import json
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from arroyo_dagster import PrivateColumns, StateCatalog, cli, open_state, open_store
from arroyo_dagster.state.operations.query.saved import saved_queries
from arroyo_dagster.state.operations.query.scans import ScanRequest
from tests.compat.arroyo import ARCHIVES, unpack
from tests.fleets import START, Written, protocol_job
from tests.internals import SqlCatalog, restore_plan
from tests.jobs import run_word_job


@pytest.fixture(scope="module", params=[*ARCHIVES, "managed"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("state")
    if request.param != "managed":
        return unpack(request.param, folder)
    run_word_job(open_store(str(folder)), rows=60, keep_epochs=None)
    return str(folder)


@pytest.fixture(scope="module")
def state(url: str) -> StateCatalog:
    return open_state(url)


def sql(url: str, *words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli.main, ["sql", *words, "--json", "--url", url])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def refused(url: str, *words: str) -> str:
    result = CliRunner().invoke(cli.main, ["sql", *words, "--url", url])
    assert result.exit_code in (1, 2)
    return result.output


def names(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("operator", "table", "partition") if name in row)


def history(state: StateCatalog, job: str, table: str) -> dict[tuple[Any, ...], list[Any]]:
    """The rows of a metadata table at every epoch, oldest first, with times in seconds."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    rows = SqlCatalog(state).collect(f'select * from "{job}@all".{table} order by epoch')
    for row in rows.to_dicts():
        found.setdefault(names(row), []).append(row | {"at": row["finished_at"].timestamp()})
    return found


def test_positions_are_those_of_the_epochs(url: str, state: StateCatalog) -> None:
    for job in state.jobs():
        expected = history(state, job.name, "offsets")
        found = {names(row): row for row in sql(url, "@offsets", job.name, "--param", "epochs=99")}
        assert found.keys() == expected.keys()
        for name, row in found.items():
            epochs = expected[name]
            first, last = epochs[0], epochs[-1]
            moved = [b for a, b in pairwise(epochs) if a["state"] != b["state"]]
            assert (row["epoch"], row["position"]) == (last["epoch"], last["position"])
            assert (row["advanced_at"] is None) == (not moved)
            if last["finished"]:
                assert row["status"] == "finished"
            else:
                assert row["status"] == ("advances" if moved else "stands still")
            if last["position"] is not None and last["at"] > first["at"]:
                rate = (last["position"] - first["position"]) / (last["at"] - first["at"])
                assert row["per_second"] == pytest.approx(rate, rel=1e-3)
        (one, *_) = sql(url, "@offsets", f"{job.name}@{job.epochs()[0]}")
        assert one["status"] in ("one epoch only", "finished")
        (one, *_) = sql(url, "@offsets", job.name, "--param", "high_water=1000000")
        assert one["position"] is None or one["lag"] == 1_000_000 - one["position"]


def test_watermarks_are_those_of_the_epochs(url: str, state: StateCatalog) -> None:
    for job in state.jobs():
        expected = history(state, job.name, "watermarks")
        found = {names(row): row for row in sql(url, "@watermarks", job.name)}
        for operator in job.epoch().operators:
            row, epochs = found.pop((operator.operator,)), expected[operator.operator,][-10:]
            assert row["lag_seconds"] == epochs[-1]["lag_seconds"]
            known = [one for one in epochs if one["watermark"] is not None]
            if len(known) > 1:
                gone = (known[-1]["watermark"] - known[0]["watermark"]).total_seconds()
                rate = gone / (known[-1]["at"] - known[0]["at"])
                assert row["rate"] == pytest.approx(rate, rel=1e-3)
            else:
                assert row["rate"] is None
        assert not found


def growing(folder: Path, epochs: int, minutes: float) -> tuple[str, StateCatalog]:
    """A job whose table grows by a file with each epoch."""
    finished = count(START, round(minutes * 60_000_000))
    Written(
        open_store(str(folder)), protocol_job("words"), keep=epochs, now=lambda: next(finished)
    ).epochs(epochs)
    return str(folder), open_state(str(folder))


def test_growth_is_the_line_of_least_squares(tmp_path: Path) -> None:
    url, state = growing(tmp_path, 21, 4)
    (epochs,) = history(state, "words/main", "tables").values()
    days = [(one["at"] - epochs[-1]["at"]) / 86_400 for one in epochs]
    slope = np.polyfit(days, [one["size_bytes"] for one in epochs], 1)[0]
    limit = epochs[-1]["size_bytes"] * 2
    words = ("--param", "days=2", "--param", f"limit_bytes={limit}")
    (row,) = sql(url, "@growth", "main", *words)
    assert (row["epochs"], row["size_bytes"]) == (21, epochs[-1]["size_bytes"])
    assert row["bytes_per_day"] == pytest.approx(slope, rel=1e-2, abs=1)
    assert row["forecast_bytes"] == pytest.approx(row["size_bytes"] + 2 * slope, rel=1e-2)
    assert row["days_left"] == pytest.approx(row["size_bytes"] / row["bytes_per_day"])


@pytest.mark.parametrize(("epochs", "minutes"), [(19, 10), (30, 2), (30, 1 / 60)])
def test_growth_forecasts_nothing_from_less_than_an_hour_and_20_epochs(
    tmp_path: Path, epochs: int, minutes: float
) -> None:
    url, _ = growing(tmp_path, epochs, minutes)
    (row,) = sql(url, "@growth", "main", "--param", "limit_bytes=10")
    assert row["epochs"] == epochs
    assert [row[name] for name in ("bytes_per_day", "forecast_bytes", "days_left")] == [None] * 3


def test_subtasks_own_the_rows_that_a_restore_loads(url: str, state: StateCatalog) -> None:
    for job in state.jobs():
        for table in job.epoch().tables():
            if not table.scan.divisible_by_key:
                continue
            named = ("--param", f"operator={table.name.operator}", "--param")
            words = ("@skew", job.name, *named, f"table={table.name.table}")
            reads = restore_plan(job.epoch().checkpoint, 3).reads
            found = {row["subtask"]: row for row in sql(url, *words, "--param", "parallelism=3")}
            for read in reads:
                if (read.operator, read.table) == (table.name.operator, table.name.table):
                    request = ScanRequest(columns=(), keys=read.keys)
                    rows = sum(part.num_rows for part in table.read(request))
                    assert found.get(read.subtask, {"rows": 0})["rows"] == rows
            for row in found.values():
                counted = SqlCatalog(state).collect(
                    f"select count(*) as n from {table.name} "
                    f"where _key_hash = {row['largest_key_hash']}"
                )
                assert counted.item() == row["largest_key_rows"]
            assert (
                "_key_hash"
                not in SqlCatalog(state).query(f"select * from {table.name}").collect_schema()
            )


def test_a_restore_reads_what_its_plan_says(url: str, state: StateCatalog) -> None:
    for job in state.jobs():
        checkpoint = job.epoch().checkpoint
        for parallelism in (None, 1, 5):
            more = () if parallelism is None else ("--param", f"parallelism={parallelism}")
            found = sql(url, "@restore", job.name, *more)
            reads = restore_plan(checkpoint, parallelism).reads
            assert sum(row["files"] for row in found) == sum(len(one.files) for one in reads)
            assert {row["subtask"] for row in found} == {one.subtask for one in reads}
            seconds = [row["seconds"] for row in found]
            assert seconds == sorted(seconds, reverse=True)
            opened = [
                5
                + row["files"] * (0.06 if checkpoint.progress is None else 0.003)
                + row["size_bytes"] / 30e6
                for row in found
            ]
            assert seconds == pytest.approx(opened, abs=1e-3)
            assert all(row["memory_bytes"] >= row["rows"] for row in found)


def test_the_page_of_a_job_has_the_answers_of_the_queries(url: str, state: StateCatalog) -> None:
    for job in state.jobs():
        words = ["show", job.name, "--parallelism", "3", "--url", url]
        page = json.loads(CliRunner().invoke(cli.main, [*words, "--json"]).stdout)
        for query in ("offsets", "watermarks", "leases", "pins"):
            assert len(page[query]) == len(sql(url, f"@{query}", job.name))
        assert page["offsets"] == sql(url, "@offsets", job.name)
        assert page["restore"] == sql(url, "@restore", job.name, "--param", "parallelism=3")
        printed = CliRunner().invoke(cli.main, words).stdout
        assert "memory a subtask" in printed
        assert page["offsets"][0]["partition"] in printed


def test_every_saved_query_is_listed_and_uses_its_parameters(url: str) -> None:
    listed = {one["name"]: one for one in sql(url, "--list")}
    assert {*listed} == {
        *("fate", "growth", "journal", "leases", "offsets", "pins", "restore", "skew"),
        "watermarks",
    }
    for query in saved_queries().values():
        for parameter in query.parameters:
            of_reading = parameter.name in ("epochs", "parallelism")
            assert of_reading or f":{parameter.name}" in query.sql
    printed = CliRunner().invoke(cli.main, ["sql", "--list", "--url", url]).output
    assert "@offsets JOB\n" in printed
    assert "high_water (integer, default null)" in printed


def test_wrong_names_and_values_are_refused_with_the_list(tmp_path: Path) -> None:
    url = str(tmp_path)
    run_word_job(open_store(url), rows=8, sinks=0)
    assert "@offsets, @pins" in refused(url, "@offset", "main")
    assert "epochs, partition, high_water" in refused(url, "@offsets", "main", "--param", "x=1")
    assert "operator (required)" in refused(url, "@skew", "main")
    assert "name a job" in refused(url, "@offsets")
    assert "takes no job" in refused(url, "@fate", "main", "--param", "path=x")
    assert "1 or more" in refused(url, "@offsets", "main", "--param", "epochs=0")
    assert "cannot be 'ten'" in refused(url, "@growth", "main", "--param", "days=ten")
    assert "NAME=VALUE" in refused(url, "@growth", "main", "--param", "days")
    assert "of a saved query" in refused(url, "select * from jobs", "main")
    assert "there is no such job" in refused(url, "@offsets", "nobody")


@pytest.mark.parametrize("value", ["' or 1 = 1 --", "x' union select * from jobs", "\\' or true"])
def test_a_value_is_bound_and_never_part_of_the_query(value: str, tmp_path: Path) -> None:
    url = str(tmp_path)
    run_word_job(open_store(url), rows=8, sinks=0)
    assert sql(url, "@offsets", "main", "--param", f"partition={value}") == []
    named = ("--param", "operator=keep", "--param")
    error = refused(url, "@skew", "main", *named, f'table=rows" union select * from "{value}')
    assert "there is no such table" in error


def test_private_columns_have_no_routing_keys(tmp_path: Path) -> None:
    run_word_job(open_store(str(tmp_path)), rows=8, sinks=0)
    state = open_state(str(tmp_path), private=PrivateColumns.of(["word"]))
    for table in state.job("main").epoch().tables():
        if table.mask:
            frame = table.to_polars(["_key_hash"])
            assert "_key_hash" not in frame.collect_schema().names()
