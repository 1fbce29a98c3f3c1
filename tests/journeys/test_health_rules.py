"""`health` finds damage of every kind, at the depth that finds it, and nothing in a whole job. It
says what is usual of a job with evidence only: an hour and 20 epochs, by their metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.state import (
    HealthLimits,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    StatePath,
    open_store,
)
from arroyo_dagster.state.model.health import EpochFigures
from arroyo_dagster.state.operations.catalog.health import JobReadings, job_health, read_figures
from arroyo_dagster.state.planning.rules import JobHealth
from tests.fleets import SECOND, START, Written, legacy_job, protocol_job
from tests.jobs import copy_into, run_word_job, word_job

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


MINUTE = 60 * SECOND
PATHS = protocol_job("words")
NOW = START + 1_000 * MINUTE
BOTH = pytest.mark.parametrize("paths", [PATHS, legacy_job("old")], ids=["protocol", "legacy"])


def times(every: int) -> Iterator[int]:
    return count(START, every)


def written(store: ObjectStore, epochs: int, every: int = 4 * MINUTE) -> Written:
    finished = times(every)
    job = Written(store, PATHS, now=lambda: next(finished))
    job.epochs(epochs)
    return job


def judged(store: ObjectStore, *history: EpochFigures) -> JobHealth:
    return job_health(store, PATHS, None, HealthLimits(), history=history, now_micros=NOW)


def codes(health: JobHealth) -> list[str]:
    return [
        finding.code
        for verdict in health.verdicts.values()
        if verdict is not None
        for finding in verdict.findings
    ]


@pytest.mark.parametrize(
    ("epochs", "every", "late"),
    [(30, SECOND, False), (19, 10 * MINUTE, False), (21, 4 * MINUTE, True)],
    ids=["half a minute", "19 epochs", "an hour and 20 epochs"],
)
def test_a_job_is_late_by_an_hour_and_20_epochs_only(
    tmp_path: Path, epochs: int, every: int, late: bool
) -> None:
    written(open_store(str(tmp_path)), epochs, every)
    words = ["health", "words/main", "--json", "--url", str(tmp_path)]
    result = CliRunner().invoke(cli.main, words, catch_exceptions=False)
    (row,) = next(one for one in json.loads(result.stdout) if one["check"] == "late")["jobs"]
    assert result.exit_code == (3 if late else 0)
    assert ("epochs_on_time" in row["not_judged"]) is not late
    if not late:
        assert "an hour" in row["not_judged"]["epochs_on_time"]


def test_the_times_of_objects_decide_nothing() -> None:
    store, copy = MemoryStore(clock=lambda: 1), MemoryStore(clock=lambda: NOW // SECOND)
    written(store, 30)
    copy_into(copy, store)
    assert judged(store) == judged(copy)
    assert codes(judged(copy)) == ["epoch-overdue"]


def test_expired_epochs_count_by_the_history_and_what_it_has_is_not_read_again() -> None:
    store = MemoryStore()
    job = written(store, 40)
    history = read_figures(store, PATHS, range(1, 41), JobReadings())
    job.expire(range(1, 39))
    assert "epochs_on_time" in judged(store).not_judged
    assert codes(judged(store, *history)) == ["epoch-overdue"]
    job.damage(39)
    assert codes(judged(store, *history)) == ["epoch-overdue"]


def test_what_the_store_says_of_an_epoch_wins() -> None:
    store = MemoryStore()
    written(store, 5)
    wrong = [EpochFigures(epoch=epoch, finished_micros=START) for epoch in range(1, 30)]
    health = judged(store, *wrong)
    assert health.figures is not None
    assert health.figures.finished_micros == START + 4 * 4 * MINUTE + 500
    assert "5 epochs" in health.not_judged["epochs_on_time"]


def test_the_history_of_a_job_that_began_anew_does_not_count() -> None:
    store = MemoryStore()
    written(store, 40).vanish()
    predecessor = read_figures(written(MemoryStore(), 40).store, PATHS, range(1, 41), JobReadings())
    anew = count(NOW, SECOND)
    job = Written(store, PATHS, now=lambda: next(anew))
    for epochs in (3, 60):
        job.epochs(epochs - job.epoch)
        health = judged(store, *predecessor)
        assert f"{epochs} epochs are known" in health.not_judged["epochs_on_time"]


@BOTH
def test_the_figures_of_an_epoch_are_those_of_its_metadata_and_footers(paths: object) -> None:
    store = MemoryStore()
    Written(store, paths, keep=2).epochs(4)  # type: ignore[arg-type]
    found = read_figures(store, paths, range(1, 5), JobReadings())  # type: ignore[arg-type]
    assert [row.epoch for row in found] == [1, 2, 3, 4]
    assert [row.files for row in found] == [1, 2, 2, 2]
    assert [row.new_files for row in found] == [1, 1, 1, 1]
    assert [row.rows for row in found] == [1, 2, 2, 2]
    assert {row.duration_micros for row in found} == {500}
    assert [(one.operator, one.table, one.files, one.rows) for one in found[-1].tables] == [
        ("count", "counts", 2, 2)
    ]
