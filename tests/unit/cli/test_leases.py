"""`sql @leases` and `lease break`: who holds a lease is shown, and one that hangs ends."""

from __future__ import annotations

import json
import os
import platform

import pytest

from arroyo_dagster import MemoryStore, StatePath, open_store
from arroyo_dagster.errors import ConflictError
from tests.commands import document, run
from tests.fleets import Written, legacy_job, protocol_job
from tests.internals import LeaseOptions, lease
from tests.jobs import listing

ONE, TWO = protocol_job("p"), legacy_job("j")
ME = f"{platform.node()}/{os.getpid()}"
SOMETHING = StatePath("p/main/something")


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr("arroyo_dagster.cli.leases.time.sleep", lambda seconds: None)
    found = open_store(url)
    for paths in (ONE, TWO):
        Written(found, paths).epochs(2)
    assert isinstance(found, MemoryStore)
    return found


def test_leases_of_all_jobs_are_listed_and_nothing_is_written(url: str, store: MemoryStore) -> None:
    assert document(url, "sql", "@leases") == []
    with lease(store, ONE, "a compaction"):
        pass
    with (
        lease(store, ONE, "gc"),
        lease(store, TWO, "run 1", LeaseOptions(directory=TWO.writers)),
        lease(store, TWO, "a window", LeaseOptions(directory=TWO.windows)),
    ):
        before = listing(store)
        found = document(url, "sql", "@leases")
        shown = run(url, "sql", "@leases").stdout
        assert listing(store) == before
    assert {(one["job"], one["kind"], one["state"]) for one in found} == {
        ("p/main", "maintenance", "held"),
        ("j", "writer", "held"),
        ("j", "window", "held"),
    }
    gc = next(one for one in found if one["job"] == "p/main")
    assert (gc["token"], gc["owner"], gc["description"]) == (2, f"{ME} (gc)", "gc")
    assert 0 <= gc["age_seconds"] < 60
    assert 0 < gc["expires_in_seconds"] <= 61
    assert f"{ME} (gc)" in shown
    (again,) = document(url, "sql", "@leases", "main")
    assert again["state"] == "released"
    assert again["expires_in_seconds"] is None


def test_a_lease_that_is_held_is_broken_and_its_holder_stops(url: str, store: MemoryStore) -> None:
    with lease(store, ONE, "hangs") as held:
        before = listing(store)
        dry = run(url, "lease", "break", "main")
        assert listing(store) == before
        assert f"held by {ME} (hangs), lease 1" in dry.stdout
        assert "its holder is alive" in dry.stdout
        assert "--yes" in dry.stdout
        held.put(SOMETHING, b"1")
        done = json.loads(run(url, "lease", "break", "main", "--yes", "--json").stdout)
        assert done["done"]
        assert 0 <= done["age_seconds_by_the_store"] < 60
        with pytest.raises(ConflictError, match="was broken"):
            held.put(SOMETHING, b"2")
    with lease(store, ONE, "next") as found:
        assert found.lease.token == 3
        found.put(SOMETHING, b"3")


def test_a_lease_is_nobody_s_while_what_its_holder_sent_may_arrive(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        with pytest.raises(ConflictError, match="lease break"):
            lease(store, ONE, "hasty").__enter__()

    monkeypatch.setattr("arroyo_dagster.cli.leases.time.sleep", sleep)
    with lease(store, ONE, "hangs"):
        assert run(url, "lease", "break", "main", "--yes").exit_code == 0
    assert waited == [10.0]


def test_what_is_free_is_not_broken(url: str, store: MemoryStore) -> None:
    assert "never taken" in run(url, "lease", "break", "main", "--yes").stdout
    with lease(store, ONE, "gc"):
        pass
    before = listing(store)
    assert "released" in run(url, "lease", "break", "main", "--yes").stdout
    assert not document(url, "lease", "break", "main", "--yes")["done"]
    assert listing(store) == before


def test_a_lease_that_does_not_decode_is_shown_and_broken(url: str, store: MemoryStore) -> None:
    with lease(store, TWO, "run", LeaseOptions(directory=TWO.writers)):
        pass
    store.put(TWO.writers / "0000000001.json", b"{")
    (listed,) = document(url, "sql", "@leases", "j")
    assert (listed["state"], listed["problem"] is None) == ("broken", False)
    assert run(url, "lease", "break", "j", "--kind", "writer", "--yes").exit_code == 0
    with lease(store, TWO, "next", LeaseOptions(directory=TWO.writers)) as found:
        assert found.lease.token == 3
