"""What holds most of a table: equal to brute force, and a sketch with the error that it says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.operations.query.growth import table_growth
from arroyo_dagster.state.operations.query.scans import ScanRequest
from arroyo_dagster.state.operations.query.skew import TableSkew, row_bytes, table_skew
from arroyo_dagster.state.operations.query.state import StateJob, open_state
from arroyo_dagster.state.operations.query.table import EpochTable
from arroyo_dagster.state.planning.privacy import PrivateColumns
from arroyo_dagster.state.storage import open_store
from tests.compat.arroyo import ARCHIVES, unpack
from tests.jobs import written_by_word_job


@pytest.fixture(scope="module")
def job() -> StateJob:
    return open_state(written_by_word_job(rows=200, keep_epochs=None)).job("main")


@pytest.fixture(scope="module")
def rows(job: StateJob) -> EpochTable:
    return job.epoch().table("keep", "rows")


def counts(found: TableSkew) -> dict[object, int]:
    return {one.values[0]: one.rows for one in found.groups}


def by_word(table: EpochTable) -> Counter[str]:
    return Counter(table.to_arrow(["word"])["word"].to_pylist())


def test_groups_are_those_of_brute_force(rows: EpochTable) -> None:
    words, found = by_word(rows), table_skew(rows, by="word", limit=1000)
    assert counts(found) == words
    assert [one.rows for one in found.groups] == sorted(words.values(), reverse=True)
    assert found.max_error == 0
    assert (found.rows, found.size_bytes) == (
        len(rows.to_arrow()),
        row_bytes(rows.to_arrow()).sum(),
    )
    assert sum(one.size_bytes for one in found.groups) == found.size_bytes
    letters = Counter(word[:1] for word in words.elements())
    assert counts(table_skew(rows, by="substr(word, 1, 1)")) == letters


@pytest.mark.parametrize("name", ARCHIVES)
def test_subtasks_of_a_real_arroyo_own_what_a_restore_loads(name: str, tmp_path: Path) -> None:
    seen = 0
    for job in open_state(unpack(name, tmp_path)).jobs():
        for table in job.epoch().tables():
            found = table_skew(table, parallelism=3)
            assert found.rows == table.to_arrow().num_rows
            for one in found.subtasks if table.scan.divisible_by_key else ():
                seen += 1
                request = ScanRequest(columns=(), keys=one.keys)
                assert one.rows == sum(part.num_rows for part in table.read(request))
            if found.subtasks:
                assert sum(one.size_bytes for one in found.subtasks) == found.size_bytes
    assert seen


def test_the_key_is_the_default_group(job: StateJob) -> None:
    found = table_skew(job.epoch().table("count", "counts"))
    assert found.columns == ("key",)
    assert {one.rows for one in found.groups} == {1}
    assert not found.subtasks


def test_a_sketch_is_off_by_no_more_than_it_says(rows: EpochTable) -> None:
    words = by_word(rows)
    for kept in range(1, len(words)):
        found = table_skew(rows, by="word", limit=kept, kept_groups=kept)
        assert 0 < found.max_error <= found.rows / (kept + 1)
        for word, least in counts(found).items():
            assert least <= words[str(word)] <= least + found.max_error
        heavy = {word for word, count in words.items() if count > found.max_error}
        assert heavy <= {*counts(found)}, "a group with more rows than the error is never lost"


def test_wrong_expressions_are_refused(rows: EpochTable) -> None:
    with pytest.raises(NotFoundError, match="did you mean word"):
        table_skew(rows, by="wrod")
    for wrong in ("substr(", "word + "):
        with pytest.raises(InputError, match="not an expression of SQL"):
            table_skew(rows, by=wrong)


def test_private_columns_are_masked(job: StateJob) -> None:
    state = open_state(job.catalog.store, private=PrivateColumns.of(["word"]))
    found = table_skew(state.table('"words/main".keep.rows'), by="word")
    assert all(str(one.values[0]).startswith("private:") for one in found.groups)
    assert not found.subtasks


def test_sizes_over_epochs_are_those_of_the_files(job: StateJob) -> None:
    numbers = job.epochs()
    found = table_growth(job, len(numbers))
    last = [one.growth.sizes[-1][1] for one in found]
    assert last == sorted(last, reverse=True)
    for one in found:
        assert len(one.growth.sizes) <= len(numbers)
        files = job.epoch().table(one.operator, one.table).scan.paths
        sizes = [len(job.catalog.store.read(path)) for path in {*files}]
        assert one.growth.sizes[-1][1] == sum(sizes)


def test_the_commands_print_bars_and_json(job: StateJob, tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    for info in job.catalog.store.list():
        open_store(url).put(info.path, job.catalog.store.read(info.path))
    printed = CliRunner().invoke(
        main, ["skew", "main", "keep", "rows", "--by", "word", "--url", url]
    )
    assert printed.exit_code == 0, printed.output
    assert "█" in printed.output
    words = ["skew", "main", "count", "counts", "--limit", "1", "--json", "--url", url]
    (group,) = json.loads(CliRunner().invoke(main, words).output)["groups"]
    assert group["group"].keys() == {"key"}
    grown = CliRunner().invoke(main, ["growth", "main", "--json", "--days", "7", "--url", url])
    assert {one["days"] for one in json.loads(grown.output)} == {7.0}
    assert "in 30 days" in CliRunner().invoke(main, ["growth", "main", "--url", url]).output
