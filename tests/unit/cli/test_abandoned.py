"""Abandoned prefixes among the rows of `arroyo-state jobs`; nothing is written."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from arroyo_dagster import MemoryStore, ObjectStore, StatePath
from arroyo_dagster.state.model.clock import wall_clock
from tests.commands import run
from tests.fleets import Written, legacy_job, protocol_job
from tests.jobs import listing

WEEK = 7 * 86_400 * 1_000_000
SHOP, GONE, LEGACY = protocol_job("shop"), protocol_job("gone"), legacy_job("job_1")
KNOWN = ("--assume", "shop/main=running", "--assume", "gone/main=gone")


def last_week() -> int:
    return wall_clock() - WEEK


@pytest.fixture
def store(url: str) -> ObjectStore:
    """Arroyo jobs of both layouts, the remains of a job, and what is no job; a week old."""
    store = MemoryStore(url.removeprefix("memory://"), clock=last_week)
    for paths in (SHOP, GONE, LEGACY):
        Written(store, paths, now=last_week).epochs(3)
    store.put(StatePath("shop/deleted/generations/1/generation-manifest.json"), b"0123456789")
    store.put(StatePath("warehouse/orders/data.parquet"), b"not ours")
    store.put(StatePath("removed/job/_arroyo_dagster/journal/run/part"), b"kept")
    return store


def rows(url: str, *args: str) -> dict[str, Any]:
    """What is said of each row: None, or what can be reclaimed."""
    jobs = json.loads(run(url, "jobs", *args, "--json").stdout)
    return {"/".join(filter(None, (row["pipeline"], row["job"]))): row["abandoned"] for row in jobs}


def stored_bytes(store: ObjectStore, prefix: str) -> int:
    return sum(info.size_bytes for info in store.list(prefix))


def test_without_a_status_source_only_remains_are_abandoned(url: str, store: ObjectStore) -> None:
    found = rows(url)
    assert found.keys() == {"shop/main", "gone/main", "job_1", "shop/deleted"}
    assert {name for name, one in found.items() if one} == {"shop/deleted"}
    assert (found["shop/deleted"]["bytes"], found["shop/deleted"]["objects"]) == (10, 1)
    assert "no command deletes it" in found["shop/deleted"]["next_step"]


def test_dead_job_is_abandoned_with_its_bytes_and_command(url: str, store: ObjectStore) -> None:
    before = listing(store)
    found = rows(url, *KNOWN)
    dead = found["gone/main"]
    assert dead["bytes"] == stored_bytes(store, "gone/main")
    assert dead["next_step"].startswith("arroyo-state gc plan dead-job gone/main")
    assert found["shop/main"] is None
    lines = run(url, "jobs", *KNOWN).stdout.splitlines()
    (line,) = (line for line in lines if "gone" in line and "abandoned" in line)
    assert "objects; " in line
    assert "Next: arroyo-state gc plan dead-job gone/main" in line
    assert listing(store) == before
    command = shlex.split(dead["next_step"].partition(",")[0])[1:]
    plan = run(url, *command, *KNOWN, "--json")
    assert plan.exit_code == 0, plan.output


def test_unreadable_job_is_not_abandoned_unless_known_gone(url: str, store: ObjectStore) -> None:
    store.put(GONE.current_generation, b"damaged")
    assert rows(url)["gone/main"] is None
    dead = rows(url, *KNOWN)["gone/main"]
    assert "--unreadable" in dead["next_step"]
    assert "--quarantine" in dead["next_step"]


def test_remains_within_the_grace_period_may_belong_to_a_job_that_starts(url: str) -> None:
    store = MemoryStore(url.removeprefix("memory://"))
    Written(store, SHOP).epochs(1)
    store.put(StatePath("shop/new/generations/1/generation-manifest.json"), b"{}")
    assert rows(url) == {"shop/main": None}
