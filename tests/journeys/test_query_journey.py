"""From the shell into checkpoints: what a real Arroyo wrote, and what a first example writes."""

from __future__ import annotations

import datetime as dt
import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.state import (
    ReadOptions,
    WriteProtected,
    find_job,
    open_store,
    read_rows,
    storage,
)
from tests.compat.arroyo import ARCHIVES, description, unpack

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


def test_two_columns_of_one_name_are_both_shown(archive: Archive) -> None:
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
