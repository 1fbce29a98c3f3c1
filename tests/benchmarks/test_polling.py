"""Polls of 500 jobs: a quiet one against the bare requests it needs, a first import against one
poll."""

from __future__ import annotations

import pytest

from arroyo_dagster.state import MemoryStore, StatePath
from arroyo_dagster.state.operations.catalog.changes import PollOptions, poll_fleet
from arroyo_dagster.state.planning.polling import poll_interval_seconds, quiet_poll, sweep
from arroyo_dagster.state.storage.concurrency import concurrently
from tests.benchmarks.conftest import Comparison
from tests.faulty_stores import Slow
from tests.fleets import Written, protocol_job
from tests.internals import FleetCursor
from tests.stores import Counting

JOBS = 500
SWEEP = sweep(poll_interval_seconds(JOBS))
OPTIONS = PollOptions(sweep=SWEEP)


@pytest.fixture(scope="module")
def fleet() -> tuple[MemoryStore, FleetCursor]:
    store = MemoryStore("polled-fleet")
    for at in range(JOBS):
        Written(store, protocol_job(f"p{at:03}"), files=False).epochs(3)
    return store, poll_fleet(store, FleetCursor()).cursor


def _bare(store: Counting | Slow, cursor: FleetCursor) -> None:
    """The requests of a quiet poll, and nothing else."""
    jobs = list(cursor.positions)
    store.list_dir("")
    concurrently(store.list_dir, [str(paths.pipeline) for paths in jobs[: JOBS // SWEEP + 1]])
    position = next(iter(cursor.positions.values()))
    assert position.worker_generation is not None
    manifests = [paths.generation_manifest(position.worker_generation) for paths in jobs]
    wanted: list[StatePath] = [*(paths.current_generation for paths in jobs), *manifests]
    concurrently(store.read, wanted)


def test_a_quiet_poll_of_500_jobs(
    fleet: tuple[MemoryStore, FleetCursor], comparison: Comparison
) -> None:
    store, cursor = fleet
    counting = Counting(store)
    poll_fleet(counting, cursor, OPTIONS)
    lists = counting.calls["list"] + counting.calls["list_dir"]
    costs = quiet_poll(JOBS, poll_interval_seconds(JOBS))
    assert (lists, counting.calls.total() - lists) == (costs.lists, costs.gets)
    slow = Slow(store, 0.01)  # as a store on the same network answers
    comparison.ratio(
        lambda _: poll_fleet(slow, cursor, OPTIONS),
        lambda _: _bare(slow, cursor),
        goal=1.3,
        rounds=3,
    )


def test_a_first_import_in_three_polls_and_in_one(
    fleet: tuple[MemoryStore, FleetCursor], comparison: Comparison
) -> None:
    slow = Slow(fleet[0], 0.002)

    def read_in_parts(_: object) -> None:
        found = poll_fleet(slow, FleetCursor(), PollOptions(sweep=SWEEP, most=200))
        while found.left:
            found = poll_fleet(slow, found.cursor, PollOptions(sweep=SWEEP, most=200))

    comparison.ratio(
        read_in_parts, lambda _: poll_fleet(slow, FleetCursor(), OPTIONS), goal=1.5, rounds=3
    )


def test_a_quiet_poll_in_turns_and_one_that_lists_every_directory(
    fleet: tuple[MemoryStore, FleetCursor], comparison: Comparison
) -> None:
    store, cursor = fleet
    slow = Slow(store, 0.01)
    comparison.ratio(
        lambda _: poll_fleet(slow, cursor, OPTIONS),
        lambda _: poll_fleet(slow, cursor),
        goal=0.8,
        rounds=3,
    )
