"""SQL over state: names, metadata tables, what reaches the files, errors that point at the word."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.cli.query.prompt import Prompt
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state import (
    Epoch,
    MemoryStore,
    PrivateColumns,
    list_epochs,
    open_state,
    open_store,
    pin_epoch,
)
from arroyo_dagster.state.operations.query.metadata_tables import METADATA_TABLES
from tests.internals import SqlCatalog
from tests.jobs import copy_into, listing, written_by_word_job

KEEP = '"words/main".keep."rows"'


@pytest.fixture
def store() -> MemoryStore:
    return written_by_word_job(rows=60, keep_epochs=None, retention_micros=60_000_000)


@pytest.fixture
def catalog(store: MemoryStore) -> SqlCatalog:
    return SqlCatalog(open_state(store))


def test_every_metadata_table_answers_and_writes_nothing(
    store: MemoryStore, catalog: SqlCatalog
) -> None:
    pin_epoch(store, catalog.state.job("main").paths, Epoch(2), sleep=lambda _: None)
    before = listing(store)
    tables = {name: one for name, one in METADATA_TABLES.items() if one.of_path is None}
    rows = {name: catalog.collect(f"select * from {name}") for name in tables}
    assert listing(store) == before
    for name, table in tables.items():
        assert rows[name].columns == table.schema.names
        of_job = catalog.collect(f'select * from arroyo."words/main".{name}')
        ages = {"age_seconds", "expires_in_seconds"} & {*of_job.columns}
        assert of_job.drop(ages).equals(rows[name].drop(ages))
    summaries = list_epochs(store, catalog.state.job("main").paths)
    assert rows["epochs"]["epoch"].to_list() == [one.epoch for one in summaries]
    assert rows["epochs"]["files"].to_list() == [one.files for one in summaries]
    assert rows["pins"]["epoch"].to_list() == [2]
    assert rows["files"].height == summaries[-1].files
    assert {"count", "keep", "sum"} <= set(rows["tables"]["operator"])
    assert rows["offsets"]["position"].drop_nulls().len()
    groups = rows["row_groups"].join(rows["files"], on="path", how="semi")
    assert groups.height == rows["row_groups"].height > 0


def test_tables_of_jobs_are_joined_with_metadata(catalog: SqlCatalog) -> None:
    answer = catalog.collect(
        f"""with seen as (select word, count(*) as n from {KEEP} group by word)
        select s.word, s.n, j.newest_epoch from seen s, arroyo.jobs as j
        where extract(year from j.finished_at) > 2000 order by s.word"""
    )
    rows = catalog.state.job("main").epoch().table("keep", "rows").to_arrow()
    words = rows.column("word").to_pylist()
    assert answer["word"].to_list() == sorted(set(words))
    assert sum(answer["n"]) == len(words)


def test_time_travel_by_number_by_time_and_over_all_epochs(catalog: SqlCatalog) -> None:
    job = catalog.state.job("main")
    for number in (job.epochs()[0], job.epochs()[-1]):
        expected = job.epoch(number).table("count", "counts").to_arrow().num_rows
        answer = catalog.collect(f'select count(*) as n from "words/main@{number}".count.counts')
        assert answer["n"].item() == expected
    answer = catalog.collect('select distinct epoch from "main@all".files order by epoch')
    assert answer["epoch"].to_list() == job.epochs()
    with pytest.raises(InputError, match="one epoch is needed"):
        catalog.collect('select * from "main@all".count.counts')


def test_projections_and_filters_reach_the_files(catalog: SqlCatalog) -> None:
    plan = catalog.query(f"select _timestamp from {KEEP} where word = 'a'").explain()
    assert 'SELECTION: col("word") == "a"' in plan


def test_errors_point_at_the_word(catalog: SqlCatalog) -> None:
    for query, error, message in (
        (f"select wrod from {KEEP}", NotFoundError, "did you mean word"),
        (f"select wrod from {KEEP}", NotFoundError, ">>wrod<<"),
        ("select * fro jobs", InputError, "cannot be answered"),
        ("select * from joobs", NotFoundError, "did you mean jobs"),
        ('select * from "words/mian".keep.rows', NotFoundError, "words/main"),
        ('select * from "words/main".kep.rows', NotFoundError, "did you mean keep"),
        ('select * from "words/main".count.rows', NotFoundError, 'job: .*main".count.counts, '),
        ('select * from "words/main".rows', NotFoundError, '"words/main".keep.rows, .*did you'),
        ("delete from jobs", InputError, "`delete` is not a query"),
        ("select 1; drop table jobs", InputError, "`drop` is not a query"),
        ("select * from read_csv('/etc/passwd')", InputError, "reads files"),
        ("select nosuch(job) from jobs", InputError, "cannot be answered"),
        ("select * from a.b.c.d", InputError, "not the name of a table"),
    ):
        with pytest.raises(error, match=message):
            catalog.collect(query)


def test_private_columns_are_masked_in_sql(store: MemoryStore) -> None:
    plain = SqlCatalog(open_state(store))
    word = plain.collect(f"select word from {KEEP} limit 1").item()
    masked = SqlCatalog(open_state(store, private=PrivateColumns.of(["word"])))
    assert masked.collect(f"select word from {KEEP} where word = '{word}'").height == 0
    aliased = masked.collect(f"select upper(t.word) as w from {KEEP} as t")
    assert all(one.startswith("PRIVATE:") for one in aliased["w"])


def test_the_prompt_answers_until_it_ends(
    catalog: SqlCatalog,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    lines = iter(
        [
            "select count(*) as n",
            "from jobs;",
            ".schema jobs",
            ".format jsonl",
            "select 2 as b;",
            "select x from jobs;",
            ".what",
            "",
            ".tables",
        ]
    )

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    with click.Context(cli.main):
        Prompt(catalog, read_line=read).run()
    output = capsys.readouterr()
    assert "newest_epoch" in output.out
    assert '{"b": 2}' in output.out
    assert ".format FORMAT" in output.out
    assert "no such column" in output.err


def test_commands_print_and_write_every_format(store: MemoryStore, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state"
    copy_into(open_store(url), store)
    query = f"select * from {KEEP} order by _timestamp"
    assert "rows" in _output("sql", query, "--url", url)
    for name in ("rows.parquet", "rows.csv", "rows.jsonl"):
        _output("sql", query, "--output", str(tmp_path / name), "--url", url)
    rows = pq.read_table(tmp_path / "rows.parquet")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == rows.num_rows + 1
    assert b"\r" not in (tmp_path / "rows.csv").read_bytes()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == rows.num_rows
    again = CliRunner().invoke(
        cli.main, ["sql", query, "--output", str(tmp_path / "rows.csv"), "--url", url]
    )
    assert again.exit_code == 1
    assert "the file exists" in again.output
    word = rows.column("word")[0].as_py()
    found = json.loads(_output("get", "main", "keep", "rows", word, "--url", url, "--json"))
    assert len(found) == rows.column("word").to_pylist().count(word)
    count = json.loads(_output("get", "main", "count", "counts", word, "--url", url, "--json"))
    assert [one["key"] for one in count] == [word]


def _output(*words: str) -> str:
    found = CliRunner().invoke(cli.main, words, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout
