"""What is new over all jobs, and what it costs to find out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from arroyo_dagster import (
    Epoch,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    StatePath,
    WorkerGeneration,
    WriteProtected,
)
from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state.operations.catalog.changes import FleetChanges, PollOptions, poll_fleet
from tests.faulty_stores import Before
from tests.fleets import Written, legacy_job, protocol_job
from tests.gc_jobs import Hiding
from tests.internals import FleetCursor

ONE = protocol_job("words")
OLD = legacy_job("old")
BOTH = pytest.mark.parametrize("paths", [ONE, OLD], ids=["protocol", "legacy"])


def told(news: FleetChanges) -> dict[str, list[int]]:
    return {job.paths.root: [one.epoch for one in job.checkpoints] for job in news.jobs}


def polled(
    store: ObjectStore,
    cursor: FleetCursor | None = None,
    *,
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> FleetChanges:
    chosen = PollOptions(**options)
    return poll_fleet(
        WriteProtected(store), cursor or FleetCursor(), chosen, deadline=deadline, clock=clock
    )


# ---- what is told --------------------------------------------------------------------------------


def known(paths: JobPaths = ONE, epochs: int = 2) -> tuple[MemoryStore, Written, FleetCursor]:
    """A job of some epochs that was polled once."""
    store = MemoryStore()
    job = Written(store, paths)
    job.epochs(epochs)
    return store, job, polled(store).cursor


Steps = list[tuple[list[Callable[[Written], object]], list[int]]]
STORIES: dict[str, Steps] = {
    "epochs that expired before anyone looked hide none that are there": [
        ([lambda job: job.epochs(20), lambda job: job.expire(range(1, 21))], [21, 22])
    ],
    "an epoch that is committing is news once it is ready": [
        ([lambda job: job.write(committing=True)], []),
        ([lambda job: job.commit(), lambda job: job.write()], [3, 4]),
    ],
    "a hint without a record is no news yet": [
        ([lambda job: job.write(record=False)], []),
        ([lambda job: job.claim()], [3]),
    ],
    "a new worker generation is followed": [
        ([lambda job: job.start(2), lambda job: job.start(3)], []),
        ([lambda job: job.write()], [3]),
    ],
    # Arroyo counts every attempt to schedule; those that fail leave no manifest.
    "a worker generation that was never scheduled hides no epoch": [
        ([lambda job: job.start(4), lambda job: job.epochs(3), lambda job: job.expire([1, 2, 3])],
         [4, 5])
    ],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_each_epoch_is_told_once_it_is_ready(story: str) -> None:
    store, job, cursor = known()
    for events, epochs in STORIES[story]:
        for happens in events:
            happens(job)
        news = polled(store, cursor)
        cursor = news.cursor
        assert told(news) == ({ONE.root: epochs} if epochs else {})
        assert (news.vanished, cursor.positions[ONE].worker_generation) == ((), job.generation)


def test_a_first_look_at_a_committing_epoch_tells_the_one_before_and_then_it() -> None:
    store = MemoryStore()
    job = Written(store, ONE)
    job.epochs(2)
    job.write(committing=True)
    news = polled(store)
    assert told(news) == {ONE.root: [2]}
    job.commit()
    assert told(polled(store, news.cursor)) == {ONE.root: [3]}


def test_a_fence_without_a_manifest_is_no_new_job_and_its_epochs_are_seen() -> None:
    store, job, cursor = known()
    job.write(record=False)
    late = job.paths.manifest(job.generation, job.epoch)
    job.start(2)
    store.delete_many([ONE.generation_manifest(job.generation)])
    news = polled(store, cursor)
    assert (news.jobs, news.vanished) == ((), ())
    job.generation = WorkerGeneration(1)
    job.claim(late)
    assert told(polled(store, news.cursor)) == {ONE.root: [3]}


def test_a_run_that_was_fenced_as_it_published_is_seen() -> None:
    store, job, cursor = known()
    job.write(record=False)
    late = job.paths.manifest(job.generation, job.epoch)
    job.start(2)
    cursor = polled(store, cursor).cursor
    job.generation = WorkerGeneration(1)
    job.claim(late)
    assert told(polled(store, cursor)) == {ONE.root: [3]}


@BOTH
def test_a_job_that_began_anew_under_its_name_is_seen_first_again(paths: JobPaths) -> None:
    store, job, cursor = known(paths, epochs=9)
    job.vanish()
    Written(store, paths).epochs(3)
    assert told(polled(store, cursor)) == {paths.root: [3]}


def test_numbers_that_outgrow_their_seven_digits_are_found() -> None:
    store = MemoryStore()
    job = Written(store, ONE)
    job.epoch = Epoch(9_999_997)
    job.epochs(1)
    cursor = polled(store).cursor
    job.epochs(30)
    assert told(polled(store, cursor, newest=2)) == {ONE.root: [10_000_027, 10_000_028]}
    cursor = polled(store, cursor).cursor
    job.epochs(20)
    assert polled(store, cursor, newest=2).jobs[0].passed_over == 18


# ---- jobs that come, go, or cannot be read -------------------------------------------------------


def test_jobs_appear_and_vanish() -> None:
    store = MemoryStore()
    first, second = Written(store, ONE), Written(store, OLD)
    first.epochs(1)
    second.epochs(1)
    cursor = polled(store).cursor
    third = protocol_job("words", "other")
    Written(store, third).epochs(2)
    second.vanish()
    news = polled(store, cursor)
    assert told(news) == {third.root: [2]}
    assert news.vanished == (OLD,)
    assert news.cursor.positions.keys() == {ONE, third}
    first.vanish()
    assert polled(store, news.cursor).vanished == (ONE,)


def test_a_job_without_an_epoch_is_known_and_its_first_epoch_news() -> None:
    store = MemoryStore()
    job = Written(store, ONE)
    news = polled(store)
    assert told(news) == {ONE.root: []}
    job.epochs(3)
    assert told(polled(store, news.cursor)) == {ONE.root: [1, 2, 3]}


@BOTH
def test_an_unreadable_epoch_is_told_once_and_later_ones_go_on(paths: JobPaths) -> None:
    store, job, cursor = known(paths, epochs=1)
    job.epochs(3)
    job.damage(3)
    news = polled(store, cursor)
    assert told(news) == {paths.root: [2, 4]}
    assert len(news.jobs[0].problems) == 1
    job.epochs(1)
    news = polled(store, news.cursor)
    assert told(news) == {paths.root: [5]}
    assert news.jobs[0].problems == ()


@BOTH
def test_an_unreadable_newest_epoch_is_told_once(paths: JobPaths) -> None:
    store = MemoryStore()
    job = Written(store, paths)
    job.epochs(3)
    job.damage(3)
    news = polled(store)
    assert told(news) == {paths.root: [2]}
    assert len(news.jobs[0].problems) == 1
    assert polled(store, news.cursor).jobs == ()


def test_a_directory_that_cannot_be_listed_makes_no_job_vanish() -> None:
    store = MemoryStore()
    Written(store, ONE).epochs(1)
    job = Written(store, protocol_job("zebra"))
    job.epochs(1)
    down: list[str] = []

    def check(verb: str, path: str) -> None:
        if verb in ("list_dir", "read") and any(path.startswith(below) for below in down):
            raise StorageError("the store failed", path=path)

    failing = Before(store, check)
    cursor = polled(failing).cursor
    job.epochs(2)
    down.append("zebra")
    news = polled(failing, cursor)
    assert news.vanished == ()
    assert news.problems
    assert news.cursor == cursor
    down.clear()
    assert told(polled(failing, news.cursor)) == {"zebra/main": [2, 3]}


@BOTH
def test_an_empty_root_never_means_that_all_jobs_vanished(paths: JobPaths) -> None:
    store, job, cursor = known(paths, epochs=1)
    job.vanish()
    with pytest.raises(StorageError, match="indicates a failure"):
        polled(store, cursor)
    store.put(StatePath("other/thing"), b"x")
    with pytest.raises(StorageError, match="indicates a failure"):
        polled(store, cursor)


@BOTH
def test_jobs_of_which_only_the_directories_are_left_never_all_vanish(paths: JobPaths) -> None:
    store, job, cursor = known(paths)
    job.vanish()
    store.put(paths.root / "checkpoints" / "rest", b"x")
    with pytest.raises(StorageError, match="all 1 known jobs are missing"):
        polled(store, cursor, sweep=5)


@BOTH
def test_a_listing_that_lags_behind_makes_no_job_vanish(paths: JobPaths) -> None:
    store = MemoryStore()
    job = Written(store, paths)
    job.epochs(2)
    Written(store, protocol_job("other")).epochs(1)
    cursor = polled(store).cursor
    for below in (str(paths.root), paths.root.split("/")[0], str(paths.root / "checkpoints")):
        news = polled(Hiding(store, lambda path, below=below: path.startswith(below)), cursor)  # type: ignore[misc]
        assert (news.vanished, news.jobs) == ((), ())
        assert news.cursor == cursor


def test_a_root_that_is_missing_empty_or_no_root_at_all_says_so() -> None:
    with pytest.raises(NotFoundError):
        polled(MemoryStore("never-written-to-by-fleet"))
    assert polled(MemoryStore()).jobs == ()
    store = MemoryStore()
    store.put(StatePath("photos/cat.jpg"), b"x")
    with pytest.raises(InputError, match="no directory in it looks like a job"):
        polled(store)


# ---- deadline and cost ---------------------------------------------------------------------------


def test_jobs_the_deadline_does_not_reach_come_first_the_next_time() -> None:
    store = MemoryStore()
    jobs = [Written(store, protocol_job(f"p{at:02}")) for at in range(60)]
    for job in jobs:
        job.epochs(1)
    cursor = polled(store).cursor
    for job in jobs:
        job.epochs(1)
    positions: list[str] = []
    for _ in range(10):
        clock = _ticking()
        # 61 looks at the clock go by as pipelines are listed; some twenty are left for jobs.
        news = polled(store, cursor, deadline=80.0, clock=lambda clock=clock: next(clock))  # type: ignore[misc]
        assert (
            news.left
            or not set(told(news)) - set(positions)
            or len(positions) + len(told(news)) >= 60
        )
        positions.extend(told(news))
        assert news.vanished == ()
        cursor = news.cursor
        if len(positions) >= 60:
            break
    assert sorted(positions) == [job.paths.root for job in jobs]


def _ticking() -> Iterator[float]:
    at = 0.0
    while True:
        at += 1.0
        yield at


def test_a_deadline_that_has_passed_changes_nothing() -> None:
    store, job, cursor = known(epochs=1)
    job.epochs(1)
    news = polled(store, cursor, deadline=0.0, clock=lambda: 1.0)
    assert (news.jobs, news.vanished, news.left) == ((), (), 1)
    assert told(polled(store, news.cursor)) == {ONE.root: [2]}


@pytest.mark.parametrize("layout", Layout)
def test_each_directory_is_listed_in_its_turn(layout: Layout) -> None:
    store = MemoryStore()
    names = [f"p{at}" for at in range(7)]
    legacy = layout is Layout.LEGACY
    jobs = [Written(store, legacy_job(one) if legacy else protocol_job(one)) for one in names]
    for job in jobs:
        job.epochs(1)
    cursor = polled(store, sweep=3).cursor
    hidden: set[str] = set()
    for job in jobs:  # what only a listing shows: a gap in the numbers, a job of a known pipeline
        if legacy:
            job.epoch = Epoch(2)
            job.epochs(1)
            hidden.add(job.paths.root)
        else:
            Written(store, protocol_job(job.paths.root.split("/")[0], "second")).epochs(1)
            hidden.add(f"{job.paths.root.split('/')[0]}/second")
    found: list[set[str]] = []
    for _ in range(3):
        news = polled(store, cursor, sweep=3)
        cursor = news.cursor
        found.append(set(told(news)))
    assert set().union(*found) == hidden
    assert max(map(len, found)) == 3


@BOTH
def test_epochs_beyond_an_expired_one_are_found_without_a_turn(paths: JobPaths) -> None:
    store = MemoryStore()
    job = Written(store, paths)
    job.epochs(2)
    others = [Written(store, protocol_job(f"a{at}")) for at in range(9)]
    for other in others:
        other.epochs(1)
    cursor = polled(store, sweep=99).cursor
    job.epochs(20)
    job.expire(range(1, 21))
    if paths.pipeline is None:
        for epoch in range(1, 21):
            below = paths.checkpoint(Epoch(epoch))
            store.delete_many([info.path for info in store.list(below)])
    assert told(polled(store, cursor, sweep=99)) == {paths.root: [21, 22]}
