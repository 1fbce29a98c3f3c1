"""`health` finds damage of every kind, at the depth that finds it, and nothing in a whole job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.state import ObjectStore, ParquetBackend, StatePath, open_store
from tests.jobs import run_word_job, word_job

JOB = "words/main"


class Damaged:
    """A managed job of 14 epochs on disk, and ways to damage it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: ObjectStore = open_store(str(root))
        run_word_job(
            self.store, rows=40, rows_per_epoch=2, sinks=0, keep_epochs=None, max_epochs=14
        )
        self.backend = ParquetBackend(self.store, word_job(self.store).paths)

    def record(self, epoch: int) -> StatePath:
        return StatePath(f"{JOB}/epochs/epoch-{epoch:07}.record")

    def listed(self, epoch: int, *, but: int) -> StatePath:
        """A data file that one epoch lists and another does not."""
        listed, others = (
            set(self.backend.load_checkpoint_metadata(one).paths)
            for one in (self.backend.epochs()[epoch], self.backend.epochs()[but])
        )
        return sorted(listed - others)[0]

    def old(self, path: str, data: bytes) -> None:
        """Write an object that is two days old."""
        self.store.put(StatePath(path), data)
        two_days_ago = (self.root / path).stat().st_mtime - 2 * 86_400
        os.utime(self.root / path, (two_days_ago, two_days_ago))

    def lose(self, path: StatePath) -> None:
        self.store.delete_many([path])


def _cut(job: Damaged) -> None:
    path = job.listed(-1, but=0)
    job.store.put(path, job.store.read(path)[:-200])


def _pins(job: Damaged) -> None:
    job.store.put(job.backend.paths.job_pins, b"junk")


def _attempts(job: Damaged) -> None:
    manifest = job.backend.load().ref
    for epoch in (15, 16):
        path = manifest.replace("0000014", f"{epoch:07}")
        job.old(path, job.store.read(manifest))


DAMAGES: dict[str, tuple[Callable[[Damaged], None], tuple[str, ...], set[tuple[str, str]]]] = {
    "whole": (lambda job: None, (), set()),
    "newest record": (
        lambda job: job.store.put(job.record(14), b"junk"),
        (),
        {("error", "newest-epoch-unreadable"), ("error", "metadata-unreadable")},
    ),
    "pins": (_pins, (), {("error", "health-unknown"), ("error", "record-unreadable")}),
    "lost record": (
        lambda job: job.lose(job.record(7)),
        (),
        {("warning", "epoch-gap"), ("warning", "record-missing")},
    ),
    "lost file": (
        lambda job: job.lose(job.listed(-1, but=0)),
        (),
        {("error", "file-missing"), ("warning", "older-epoch-incomplete")},
    ),
    "lost file of an older epoch": (
        lambda job: job.lose(job.listed(0, but=-1)),
        (),
        {("warning", "older-epoch-incomplete")},
    ),
    "cut file": (_cut, (), {("error", "file-broken")}),
    "many epochs": (lambda job: None, ("epochs=3",), {("warning", "gc-behind")}),
    "orphans": (
        lambda job: job.old(f"{job.listed(-1, but=0)}-lost", b"0123456789"),
        ("orphan_mb=0",),
        {("warning", "orphans-large")},
    ),
    "attempts": (_attempts, ("abandoned_attempts=1",), {("warning", "attempts-abandoned")}),
}


def run(*words: str) -> Any:
    result = CliRunner().invoke(cli.main, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code in (0, 3), result.output
    return json.loads(result.stdout)


def findings(root: Path, limits: tuple[str, ...]) -> set[tuple[str, str]]:
    words = [word for one in limits for word in ("--limit", one)]
    checks = run("health", JOB, "--level", "4", *words, "--url", str(root))
    return {
        (one["severity"], one["code"])
        for check in checks
        for job in check["jobs"]
        for one in job["findings"]
    }


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(name: str, tmp_path: Path) -> None:
    damage, limits, expected = DAMAGES[name]
    damage(Damaged(tmp_path))
    assert findings(tmp_path, limits) == expected
