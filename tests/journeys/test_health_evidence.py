"""`health` says what is usual of a job with evidence only: an hour and 20 epochs, by the times in
their metadata. The epochs are those of the store and of the history that is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.state import HealthLimits, MemoryStore, ObjectStore, open_store
from arroyo_dagster.state.model.health import EpochFigures
from arroyo_dagster.state.operations.catalog.health import JobReadings, job_health, read_figures
from arroyo_dagster.state.planning.rules import JobHealth
from tests.fleets import SECOND, START, Written, legacy_job, protocol_job
from tests.jobs import copy_into

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
