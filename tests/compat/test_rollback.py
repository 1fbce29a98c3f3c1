"""Every job that a real Arroyo wrote goes back: its next start loads what it would have loaded at
the older epoch, sinks that commit in two phases keep what they have, and undo is exact."""

from __future__ import annotations

import json
from typing import Any

import pytest

from arroyo_dagster.state import Epoch, JobPaths, MemoryStore, ParquetBackend, WriteProtected
from tests.commands import run
from tests.compat.arroyo import DATA
from tests.compat.digests import Objects, filled, loaded
from tests.compat.test_digests import fixtures

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
