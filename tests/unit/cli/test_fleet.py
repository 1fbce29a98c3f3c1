"""`arroyo-state fleet`: abandoned prefixes; nothing is written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import Epoch, WorkerGeneration
from arroyo_dagster.state.model.progress import Progress
from arroyo_dagster.state.operations.catalog.fleet import find_abandoned
from arroyo_dagster.state.operations.catalog.job_directory import open_directory
from arroyo_dagster.state.planning.fleet.abandoned import Usage
from arroyo_dagster.state.storage import MemoryStore, configure
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.storage.wrappers import Wrapper, WriteProtected
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.jobs import listing

WEEK = 7 * 86_400 * 1_000_000
SHOP, GONE, LEGACY = protocol_job("shop"), protocol_job("gone"), legacy_job("job_1")
KNOWN = ("--assume", "shop/main=running", "--assume", "gone/main=gone")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield f"memory://cli-fleet-{tmp_path.name}"
    configure(None)


def last_week() -> int:
    return wall_clock() - WEEK


@pytest.fixture
def store(url: str) -> ObjectStore:
    """Arroyo jobs of both layouts, the remains of a job, and what is no job; a week old."""
    store = MemoryStore(url.removeprefix("memory://"), clock=last_week)
    for paths in (SHOP, GONE, LEGACY):
        Written(store, paths, now=last_week).epochs(3)
    store.put("shop/deleted/generations/1/generation-manifest.json", b"0123456789")
    store.put("warehouse/orders/data.parquet", b"not ours")
    store.put("removed/job/_arroyo_dagster/journal/run/part", b"kept")
    return store


def run(url: str, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["fleet", *args, "--url", url], catch_exceptions=False)


def verdicts(url: str, *args: str) -> dict[str, dict[str, Any]]:
    result = run(url, "abandoned", *args, "--json")
    assert result.exit_code == 0, result.stderr
    return {one["prefix"]: one for one in json.loads(result.stdout)}


def stored_bytes(store: ObjectStore, prefix: str) -> int:
    return sum(info.size_bytes for info in store.list(prefix))


# ---- abandoned -----------------------------------------------------------------------------------


def test_without_a_source_of_status_no_job_is_abandoned(url: str, store: ObjectStore) -> None:
    found = verdicts(url)
    assert {name: one["verdict"] for name, one in found.items()} == {
        "shop/main": "not judged",
        "gone/main": "not judged",
        "job_1": "not judged",
        "shop/deleted": "abandoned",
        "warehouse": "not judged",
        "removed": "in use",
    }
    for job in ("shop/main", "gone/main", "job_1"):
        assert found[job]["bytes"] == stored_bytes(store, job)
        assert f"--assume {job}=gone" in found[job]["next_step"]
    assert found["shop/deleted"]["bytes"] == 10


def test_a_dead_job_is_abandoned_with_its_bytes_and_the_command(
    url: str, store: ObjectStore
) -> None:
    before = listing(store)
    found = verdicts(url, *KNOWN)
    dead = found["gone/main"]
    assert dead["verdict"] == "abandoned"
    assert dead["bytes"] == stored_bytes(store, "gone/main")
    assert dead["next_step"].startswith("arroyo-state gc plan dead-job gone/main")
    assert found["shop/main"]["verdict"] == "in use"
    text = run(url, "abandoned", *KNOWN).stdout
    assert "abandoned prefixes; 2 not judged" in text.splitlines()[-1]
    assert listing(store) == before
    command = shlex.split(dead["next_step"].partition(",")[0])[1:]
    plan = CliRunner().invoke(cli.main, [*command, *KNOWN, "--url", url, "--json"])
    assert plan.exit_code == 0, plan.output


def test_objects_that_no_epoch_lists_are_found_by_generation(url: str, store: ObjectStore) -> None:
    off_chain = SHOP.data_file(OPERATOR, TABLE, 0, Epoch(1), WorkerGeneration(1), attempt="lost")
    store.put(off_chain, b"0123456789" * 5)
    found = verdicts(url, "--assume", "shop/main=stopped")
    orphan = found["shop/main/generations/1"]
    assert (orphan["verdict"], orphan["bytes"], orphan["objects"]) == ("abandoned", 50, 1)
    assert orphan["next_step"].startswith("arroyo-state gc plan orphans shop/main")


def test_an_unreadable_job_is_not_abandoned_unless_a_source_says_so(
    url: str, store: ObjectStore
) -> None:
    store.put(GONE.current_generation, b"damaged")
    found = verdicts(url)["gone/main"]
    assert found["verdict"] == "not judged"
    assert "does not mean that it is abandoned" in found["why"]
    dead = verdicts(url, *KNOWN)["gone/main"]
    assert dead["verdict"] == "abandoned"
    assert "--unreadable" in dead["next_step"]
    assert "--quarantine" in dead["next_step"]


def test_remains_within_the_grace_period_may_belong_to_a_job_that_starts(url: str) -> None:
    store = MemoryStore(url.removeprefix("memory://"))
    store.put("shop/new/generations/1/generation-manifest.json", b"{}")
    (found,) = find_abandoned(store, open_directory())
    assert found.usage is Usage.NOT_JUDGED
    assert "grace period" in found.why


def test_what_the_budget_does_not_allow_is_named(url: str, store: ObjectStore) -> None:
    found = verdicts(url, "--budget", "0s")
    assert not any(one["complete"] for one in found.values())
    assert not any(one["verdict"] == "abandoned" for one in found.values())
    running = verdicts(url, "--budget", "0s", *KNOWN)["shop/main"]
    assert (running["verdict"], running["complete"]) == ("in use", False)


class Listed(Wrapper):
    """A store that records which prefixes are listed at any depth."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.prefixes: list[str] = []

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        self.prefixes.append(prefix)
        return super().list(prefix, start_after=start_after)


def test_each_object_is_listed_once_and_nothing_is_written(store: ObjectStore) -> None:
    directory = open_directory(assumed={"shop/main": "running", "gone/main": "gone"})
    recorded = Listed(WriteProtected(store))
    reports: list[Progress] = []
    find_abandoned(recorded, directory, on_progress=reports.append)
    assert [one.done for one in reports] == [0, 1, 2]
    listed = recorded.prefixes
    assert len(listed) == len(set(listed))
    assert not any(
        one != other and str(other).startswith(f"{one}/") for one in listed for other in listed
    )
