"""Commands that change a job wait for another process that maintains it, and are skipped then."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import (
    CompactionOptions,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    GcRequest,
    JobPaths,
    MemoryStore,
    ObjectStore,
    PlanKind,
    Retention,
    RewriteOptions,
    StatePath,
    UndoOptions,
    cli,
    configure,
    list_jobs,
    open_store,
    pin_epoch,
    run_gc,
    run_rewrite,
)
from arroyo_dagster.cli.common import EXIT_SKIPPED
from tests.compat.arroyo import unpack
from tests.internals import AssumedJobs, JobDirectory, LeaseOptions, Pace, lease, list_quarantines
from tests.jobs import listing, run_word_job, word_job

JOB: dict[str, Any] = {"rows": 24, "rows_per_epoch": 2, "keep_epochs": None, "sinks": 0}
PATHS = word_job(None, **JOB).paths  # type: ignore[arg-type]
QUARANTINE = "QUARANTINE"
COMMANDS = (
    "pin main 7",
    "unpin main 6",
    "rollback main 7 --yes",
    "gc run expire main --keep 3 --yes",
    "gc purge main --yes",
    f"gc undelete main {QUARANTINE} --yes",
    "compact run main --policy full --yes",
)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    found = MemoryStore(f"lease-wait-{tmp_path.name}")
    run_word_job(found, **JOB, max_epochs=8)
    pin_epoch(found, PATHS, Epoch(6))
    expire = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=5))
    run_gc(found, PATHS, expire, GcOptions(quarantine=True))
    yield found
    configure(None)


def without_leases(store: MemoryStore) -> dict[StatePath, str | None]:
    return {path: tag for path, tag in listing(store).items() if path.parent != PATHS.leases}


def run(store: MemoryStore, command: str, *more: str) -> Result:
    ((quarantine, _),) = list_quarantines(store, PATHS)
    words = command.replace(QUARANTINE, quarantine.name).split()
    return CliRunner().invoke(cli.main, [*words, *more, "--url", store.url])


@pytest.mark.parametrize("command", COMMANDS)
def test_command_waits_for_the_lease_or_is_skipped(
    command: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as held:
        held.enter_context(lease(store, PATHS, "nightly compaction"))
        before = without_leases(store)
        skipped = run(store, command, "--lease-wait", "0")
        assert skipped.exit_code == EXIT_SKIPPED, skipped.output
        assert f"/{os.getpid()}" in skipped.stderr
        assert without_leases(store) == before
        for kind in (LeaseOptions, Pace, CompactionOptions):
            defaults = kind.__init__.__kwdefaults__
            released = {**defaults, "sleep": lambda seconds: held.close()}
            monkeypatch.setattr(kind.__init__, "__kwdefaults__", released)
        done = run(store, command)
    assert done.exit_code == 0, done.output
    for result in (skipped, done):
        assert "nightly compaction" in result.stderr


@pytest.fixture
def rewritten(tmp_path: Path) -> tuple[ObjectStore, JobPaths]:
    """An Arroyo job at rest whose compaction can be undone."""
    found = open_store(unpack("legacy", tmp_path))
    paths = list_jobs(found)[0]
    directory = JobDirectory([AssumedJobs({str(paths.root): "stopped"})])
    settings = CompactionSettings(policy=CompactionPolicy.FULL)
    options = RewriteOptions(quiet_seconds=0.0)
    assert run_rewrite(found, paths, directory, settings, options).published
    return found, paths


@pytest.mark.parametrize("waits", [True, False])
def test_an_undo_of_a_rewrite_waits_for_the_lease(
    waits: bool, rewritten: tuple[ObjectStore, JobPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, paths = rewritten
    command = ["undo", str(paths.root), "--assume", f"{paths.root}=stopped", "--yes"]
    with contextlib.ExitStack() as held:
        held.enter_context(lease(store, paths, "nightly compaction"))
        defaults = UndoOptions.__init__.__kwdefaults__
        released = {**defaults, "sleep": lambda seconds: held.close()}
        monkeypatch.setattr(UndoOptions.__init__, "__kwdefaults__", released)
        more = [] if waits else ["--lease-wait", "0"]
        found = CliRunner().invoke(cli.main, [*command, *more, "--url", store.url])
    assert found.exit_code == (0 if waits else EXIT_SKIPPED), found.output
    assert "nightly compaction" in found.stderr
    assert bool(store.list_dir(paths.changes).objects) == (not waits)
