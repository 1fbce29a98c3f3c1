"""Which jobs a listing shows, which epochs to look at, and which files a read needs."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import Checkpoint, Epoch, OperatorCheckpoint, WorkerGeneration
from arroyo_dagster.state.planning.restore.reads import (
    Attempt,
    Level,
    check_root,
    is_at_rest,
    jobs_in,
    plan_read,
    unfinished_attempts,
)
from tests.formats import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles, RunProgress, TimeFile
from tests.unit.state.planning import values


def level(*names: str) -> Level:
    """Names that end in `/` are directories."""
    directories = frozenset(name[:-1] for name in names if name.endswith("/"))
    return Level(frozenset(name for name in names if not name.endswith("/")), directories)


# ---- jobs ----------------------------------------------------------------------------------------


def test_layouts_are_told_apart_by_structure_not_by_name() -> None:
    known = {
        "pl_1/job_1": level("current-generation.json"),
        "job_2/checkpoints": level("checkpoint-0000001/"),
        "x/checkpoints": level("current-generation.json", "checkpoint-0000001/"),
        "job_3/checkpoints": level("metadata", "checkpoint-/", "checkpoint-1/"),
    }
    assert [paths.root for paths in jobs_in(known)] == ["job_2", "pl_1/job_1", "x", "x/checkpoints"]


def checked(known: dict[str, Level], url: str) -> None:
    check_root(known, jobs_in(known), url)


def test_a_directory_with_our_records_alone_is_a_job_that_was_removed() -> None:
    legacy = {"": level("old/"), "old": level("_arroyo_dagster/")}
    checked(legacy, "u")
    protocol = {"words": level("main/"), "words/main": level("_arroyo_dagster/")}
    checked({"": level("words/"), **protocol}, "u")
    with pytest.raises(InputError, match="not a checkpoint root") as caught:
        checked({"": level("words/", "word/"), **protocol}, "u")
    assert caught.value.facts["found"] == "word/"


def test_a_root_that_holds_something_else_is_refused_with_what_was_found() -> None:
    with pytest.raises(InputError, match="not a checkpoint root") as caught:
        checked({"": level("src/", "README.md")}, "file:///x")
    assert caught.value.facts == {"url": "file:///x", "found": "src/, README.md"}
    with pytest.raises(InputError) as caught:
        checked({"": level(*(f"d{n:02}/" for n in range(12)))}, "u")
    assert str(caught.value.facts["found"]).endswith("d09/ and 2 more")


# ---- epochs --------------------------------------------------------------------------------------


def attempt(epoch: int, generation: int) -> Attempt:
    return Attempt(Epoch(epoch), WorkerGeneration(generation))


def test_remains_of_expired_epochs_are_no_unfinished_attempts() -> None:
    attempts = [attempt(e, 1) for e in (3, 5, 6)] + [attempt(e, 2) for e in (6, 7, 8)]
    owners = [attempt(5, 1), attempt(6, 2), attempt(7, 2)]
    assert unfinished_attempts(attempts, owners) == [attempt(6, 1), attempt(8, 2)]


def checkpoint(
    *operators: OperatorCheckpoint, final: bool | None = None, generation: int = 2
) -> Checkpoint:
    progress = RunProgress(offsets="{}", final=bool(final))
    return values.checkpoint(
        *operators,
        worker_generation=WorkerGeneration(generation),
        progress=None if final is None else progress,
    )


def test_a_job_is_at_rest_when_its_last_run_ended_and_none_was_started_since() -> None:
    assert is_at_rest(checkpoint(final=True), WorkerGeneration(2))
    assert not is_at_rest(checkpoint(final=True), WorkerGeneration(3))
    assert not is_at_rest(checkpoint(final=False), WorkerGeneration(2))
    assert not is_at_rest(checkpoint(), WorkerGeneration(2))


# ---- reads ---------------------------------------------------------------------------------------


def time_file(name: str, latest: int, low: int = 0, high: int = 9) -> TimeFile:
    return values.time_file(
        name, min_routing_key=low, max_routing_key=high, max_timestamp_micros=latest
    )


FILES = ExpiringTimeKeyFiles(
    files=(time_file("b", 10), time_file("a", 4, 5, 9), time_file("c", 7, 20, 30))
)


def config(*, generational: bool = False) -> ExpiringTimeKeyConfig:
    return values.expiring("t", 5, generational=generational)


def test_arroyo_reads_generational_tables_whole_and_we_do_not() -> None:
    assert len(plan_read(config(generational=True), FILES, 100, managed=False).files) == 3
    assert plan_read(config(generational=True), FILES, 100).files == ()
