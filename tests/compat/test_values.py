"""Every value and every routing key that a real Arroyo wrote, by what is known of its operators."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.state import (
    Catalogue,
    GlobalKeyedTable,
    HashVariant,
    JobPaths,
    ObjectStore,
    ParquetBackend,
    StatePath,
    TableConfig,
    WriteProtected,
    codec_for,
    find_hash_variant,
    key_hashes,
    list_jobs,
    matching_variants,
    open_store,
    read_rows,
)
from arroyo_dagster.state.codec.hashing.routing import subtasks_for_hashes
from arroyo_dagster.state.tables.known.built_in import BUILT_IN
from tests.compat.arroyo import ARCHIVES, unpack
from tests.formats import ExpiringTimeKeyConfig, file_schema
from tests.internals import load_epoch

CATALOGUE = Catalogue(BUILT_IN)

# Entries of global keyed tables by who keeps them, and rows of expiring ones: of every file on
# disk, also those of epochs that are no longer listed, or were left half written.
ENTRIES: dict[str, dict[str, int]] = {
    "legacy": {
        "Nexmark source s": 82,
        "filesystem sink on local disk p": 6,
        "filesystem sink on local disk r": 24,
        "impulse source i": 24,
        "session window e": 28,
        "single-file sink f": 82,
        "watermark generator s": 106,
    },
    "leader": {
        "Nexmark source s": 78,
        "filesystem sink on local disk p": 8,
        "filesystem sink on local disk r": 24,
        "impulse source i": 24,
        "session window e": 28,
        "single-file sink f": 78,
        "watermark generator s": 102,
    },
    "flights": {
        "session window e": 16,
        "single-file sink f": 56,
        "single-file source f": 56,
        "watermark generator s": 56,
    },
}
ROWS = {"legacy": 13_072, "leader": 16_053, "flights": 15_826}


@dataclass(frozen=True)
class StoredTable:
    """A table, and every file of it on disk."""

    operator: str
    config: TableConfig
    parallelism: int
    files: tuple[StatePath, ...]


@dataclass(frozen=True)
class Written:
    """One archive, unpacked."""

    name: str
    url: str
    store: ObjectStore
    jobs: tuple[JobPaths, ...]
    tables: tuple[StoredTable, ...]


@pytest.fixture(scope="module", params=ARCHIVES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    url = unpack(request.param, tmp_path_factory.mktemp(request.param))
    store = WriteProtected(open_store(url))
    jobs = tuple(list_jobs(store))
    tables = tuple(table for paths in jobs for table in stored_tables(store, paths))
    return Written(request.param, url, store, jobs, tables)


def stored_tables(store: ObjectStore, paths: JobPaths) -> Iterator[StoredTable]:
    backend = ParquetBackend(store, paths)
    known: dict[tuple[str, str], tuple[str, TableConfig, int]] = {}
    for epoch in backend.epochs():
        for operator in backend.load_checkpoint_metadata(epoch).operators:
            for name, files in operator.tables.items():
                for path in files.paths:
                    known[place(path)] = (
                        operator.operator,
                        operator.configs[name],
                        operator.parallelism,
                    )
    found: dict[tuple[str, str], list[StatePath]] = {}
    for info in store.list(paths.root):
        if info.path.name.startswith("table-"):
            found.setdefault(place(info.path), []).append(info.path)
    assert found.keys() <= known.keys()
    for key, files in found.items():
        yield StoredTable(*known[key], tuple(files))


def place(path: StatePath) -> tuple[str, str]:
    """Directory of the operator and name of the table that a file belongs to."""
    parts = path.name.removeprefix("table-").split("-")
    assert path.parent is not None
    return path.parent.name, parts[0]


def test_every_entry_decodes_by_the_catalogue_and_back(written: Written) -> None:
    seen: Counter[str] = Counter()
    for table in written.tables:
        known = CATALOGUE.describe(table.operator, table.config)
        assert known is not None, table
        if not table.config.kind.name.startswith("GLOBAL"):
            continue
        entries = [entry for path in table.files for entry in entries_of(written, table, path)]
        form = CATALOGUE.form_of(table.operator, table.config, dict(entries))
        assert form.problem is None
        assert form.known is not None
        for key, (_, value) in entries:
            decoded = form.decode(key, value)
            assert decoded is not None
            # To the last byte, and back: every field is where it belongs, every number minimal.
            assert codec_for(form.key_type).encode(decoded[0]) == key
            assert codec_for(form.value_type).encode(decoded[1]) == value
        seen[f"{form.known.owner} {table.config.table}"] += len(entries)
    assert dict(seen) == ENTRIES[written.name]


def entries_of(
    written: Written, table: StoredTable, path: StatePath
) -> list[tuple[bytes, tuple[int, bytes]]]:
    found = GlobalKeyedTable(table.config, written.store).load_with_version([path])
    return list(found.items())


def test_recomputed_routing_keys_are_the_stored_ones_of_every_row(written: Written) -> None:
    rows = 0
    for table in written.tables:
        config = table.config.config
        if not isinstance(config, ExpiringTimeKeyConfig):
            continue
        expected = file_schema(config)
        for path in table.files:
            file = pq.ParquetFile(f"{written.url}/{stored_name(path)}")
            assert file.schema_arrow.equals(expected)
            found = file.read()
            keys = [found.column(index) for index in config.schema.hashed_indices]
            stored = found.column(expected.get_field_index("_key_hash"))
            assert key_hashes(keys, found.num_rows) == stored.combine_chunks(), path
            owners = subtasks_for_hashes(stored, table.parallelism)
            assert set(owners.tolist()) <= {int(path.name.split("-")[2])}, path
            rows += found.num_rows
    assert rows == ROWS[written.name]


def stored_name(path: StatePath) -> str:
    return path.replace("<", "%3C").replace(">", "%3E")


def test_the_rows_tell_that_an_official_build_wrote_them(written: Written) -> None:
    for paths in written.jobs:
        evidence = find_hash_variant(written.store, load_epoch(written.store, paths))
        if evidence.files:
            assert evidence.variant is HashVariant.FALLBACK
            assert evidence.against is None
        else:
            assert evidence.possible == tuple(HashVariant)


def test_keys_of_every_job_belong_to_one_build_only(written: Written) -> None:
    for table in written.tables:
        config = table.config.config
        if isinstance(config, ExpiringTimeKeyConfig) and config.schema.hashed_indices:
            found = pq.ParquetFile(f"{written.url}/{stored_name(table.files[0])}").read()
            keys = [found.column(index) for index in config.schema.hashed_indices]
            assert matching_variants(keys, found.column(found.num_columns - 2)) == (
                HashVariant.FALLBACK,
            )


# ---- what people are shown -----------------------------------------------------------------------


def output(*args: str) -> Any:
    result = CliRunner().invoke(cli.main, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in args else result.stdout


def test_the_source_of_the_flights_says_how_many_lines_it_has_read(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    url = unpack("flights", tmp_path_factory.mktemp("flights"))
    at = ("--url", url)
    lines = [
        output("rows", f"carrier_totals@{epoch}", "source_flights_0", "f", *at, "--json")
        for epoch in (1, 8)
    ]
    assert [rows[0]["key"] for rows in lines] == ["/data/in/flights.json"] * 2
    first, last = (rows[0]["value"] for rows in lines)
    assert 400 <= first < last == 3608
    (mark,) = output("rows", "carrier_totals", "watermark_2", "s", *at, "--json")
    assert mark["value"] == {
        "last_watermark_emitted_at": "2013-01-05T03:45:00.000000000Z",
        "max_watermark": "2013-01-05T02:30:00.000000000Z",
    }
    shown = output("rows", "carrier_totals", "source_flights_0", "f", *at)
    assert "single-file source: lines read, by file" in shown
    assert output("show", "carrier_totals", *at, "--json")["key_hash"] == "fallback"
    assert "routing keys: ahash 0.8.7, fallback" in output("show", "carrier_totals", *at)


def test_the_earliest_session_starts_with_a_row_that_is_kept(written: Written) -> None:
    """Two tables of one operator, decoded independently, agree."""
    compared = 0
    for paths in written.jobs:
        for operator in load_epoch(written.store, paths).operators:
            if {"e", "s"} <= operator.tables.keys():
                starts = read_rows(written.store, paths, operator.operator, "e").rows
                rows = read_rows(written.store, paths, operator.operator, "s").rows
                kept = {f"{row['_timestamp']}Z" for row in rows}
                found = {row["value"] for row in starts if row["value"] is not None}
                assert found <= kept
                compared += len(found)
    assert compared >= 1


def test_files_to_be_committed_are_named(written: Written) -> None:
    for paths in written.jobs:
        for operator in load_epoch(written.store, paths).operators:
            if "p" in operator.tables:
                found = read_rows(written.store, paths, operator.operator, "p")
                assert found.rows
                for row in found.rows:
                    assert row["value"]["destination"] == row["key"]
                assert found.commit_data == {0: None, 1: None}
