"""Garbage collection of one job: what stays is whole, whatever goes wrong."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from arroyo_dagster import (
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    Layout,
    MemoryStore,
    OperatorId,
    ParquetBackend,
    WorkerGeneration,
    WriteProtected,
    list_jobs,
    open_store,
    plan_gc,
    run_compaction,
    run_gc,
)
from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.state.operations.gc.journal import list_runs
from arroyo_dagster.state.planning.gc.reachability import referenced_by
from arroyo_dagster.state.storage.wrappers import Counting
from tests.compat.arroyo import ARCHIVES, unpack
from tests.faulty_stores import Crash, FaultInjecting
from tests.fleets import Written, legacy_job
from tests.gc_jobs import (
    JOB,
    PATHS,
    Clock,
    Interrupted,
    begun,
    data_files,
    expiry,
    orphans,
    reachable,
    restorable,
    whole,
    without_ours,
)
from tests.internals import LocalRun, Pace, read_journal, read_roots
from tests.jobs import copied, output_of, run_word_job, state_of, word_job
from tests.shares import EITHER_OR_BOTH, either_or_both

pytestmark = pytest.mark.usefixtures("one_at_a_time")

QUICK = Pace(sleep=lambda seconds: None)


# ---- expire --------------------------------------------------------------------------------------


def test_an_expiry_keeps_what_it_says_and_a_second_one_finds_nothing(clock: Clock) -> None:
    store = begun(8, clock)
    planned = plan_gc(WriteProtected(store), PATHS, expiry(3), now_micros=clock())
    assert planned.epochs == (1, 2, 3, 4, 5)
    outcome = run_gc(store, PATHS, expiry(3), GcOptions(clock=clock))
    assert outcome.done
    assert (outcome.deleted, outcome.size_bytes) == (planned.objects, planned.size_bytes)
    assert outcome.plan.digest == planned.digest
    restorable(store, PATHS, 6, 7, 8)
    again = run_gc(store, PATHS, expiry(3), GcOptions(clock=clock))
    assert (again.done, again.plan.objects) == (False, 0)
    assert data_files(store, PATHS) == reachable(store, PATHS)
    with pytest.raises(InputError, match="at least 1"):
        run_gc(store, PATHS, expiry(0), GcOptions(clock=clock))
    restorable(store, PATHS, 6, 7, 8)
    run_word_job(store, **JOB)


@pytest.mark.parametrize("archive", ARCHIVES)
def test_what_is_reachable_is_what_brute_force_finds(archive: str, tmp_path: Path) -> None:
    store = WriteProtected(open_store(unpack(archive, tmp_path)))
    for paths in list_jobs(store):
        roots = read_roots(store, paths)
        found = referenced_by(roots, (*roots.epochs, *roots.attempts))
        expected = reachable(store, paths)
        assert len(found) == len(expected)
        assert all(path in found for path in expected)


@pytest.mark.parametrize("archive", ARCHIVES)
def test_an_expiry_to_the_newest_two_leaves_both_restorable(archive: str, tmp_path: Path) -> None:
    store = open_store(unpack(archive, tmp_path))
    for paths in list_jobs(store):
        before = ParquetBackend(store, paths).epochs()
        newest = before[-2:]
        said = {str(paths.root): "stopped"}
        outcome = run_gc(store, paths, expiry(2, **said))
        restorable(store, paths, *newest)
        assert reachable(store, paths) <= data_files(store, paths)
        if paths.layout is Layout.PROTOCOL:
            assert outcome.done
            assert ParquetBackend(store, paths).epochs() == newest
        else:
            # Arroyo's own cleanup needs the ten before either of the two newest.
            left = ParquetBackend(store, paths).epochs()
            assert left[0] == max(before[0], newest[0] - 10)


def test_an_expiry_without_sizes_lists_nothing_and_reads_every_object_once() -> None:
    store = Counting(WriteProtected(begun(9)))
    reads: Counter[str] = Counter()
    store.read = lambda path: (reads.update([path]), Counting.read(store, path))[1]  # type: ignore[method-assign,misc]
    plan = plan_gc(store, PATHS, expiry(3), with_sizes=False)
    assert plan.epochs == (1, 2, 3, 4, 5, 6)
    assert store.calls["list"] == store.calls["list_dir"] == 0
    assert {path for path, count in reads.items() if count > 1} <= {PATHS.current_generation}
    full = plan_gc(WriteProtected(store), PATHS, expiry(3))
    assert list(plan.data.paths) == sorted(full.data.paths, key=list(plan.data.paths).index)


def ended(store: MemoryStore) -> tuple[Any, Any]:
    """What a job of at most 8 epochs holds and has put out at its end."""
    job = {**JOB, "rows": 16}
    run_word_job(store, **job)
    found = state_of(store, word_job(store, **job))
    found.pop("")
    return found, output_of(store)


@EITHER_OR_BOTH
@pytest.mark.parametrize(
    ("mode", "crash"),
    [("before", False), ("after", False), ("after", True), ("partial", True)],
    ids=["failure", "answer-lost", "crash", "crash-half-way"],
)
@pytest.mark.parametrize("aside", [False, True], ids=["deleted", "moved-aside"])
def test_a_fault_at_any_change_leaves_what_stays_whole_and_the_next_run_finishes(
    mode: Literal["before", "after", "partial"], crash: bool, aside: bool, both: bool
) -> None:
    clock = Clock()
    start, expected = begun(6, clock, rows=16), ended(begun(1, rows=16))

    def run(store: Any) -> Any:
        later = Clock()
        later.micros = clock.micros
        return run_gc(
            store,
            PATHS,
            expiry(2),
            GcOptions(quarantine=aside, clock=later, pace=QUICK, owner="one"),
        )

    def fresh() -> MemoryStore:
        return copied(start, clock=clock)

    counted = FaultInjecting(fresh())
    run(counted)
    clean = without_ours(counted)
    assert counted.changes > 8
    for at in range(1, counted.changes + 1):
        store = fresh()
        faulty = FaultInjecting(store, fail_at=at, mode=mode, crash=crash)
        with contextlib.suppress(Crash, StorageError):
            run(faulty)
        whole(store, PATHS, 5, 6)
        at_once = copied(store)
        run(store)
        assert without_ours(store) == clean, f"fault at change {at}: not finished by the next run"
        outcomes = {entry.outcome.partition(":")[0] for entry in read_journal(store, PATHS)}
        assert "unknown" not in outcomes, f"fault at change {at}"
        assert all(one.ended for one in list_runs(store, PATHS)), f"fault at change {at}"
        # To a job, what was moved aside is gone as what was deleted.
        for end in either_or_both(at_once, store, at, both=both) if both or not aside else ():
            assert ended(end) == expected, f"fault at change {at}"


def test_after_a_compaction_most_files_go_and_what_waits_to_be_taken_over_stays() -> None:
    full = CompactionSettings(policy=CompactionPolicy.FULL)
    expected = ended(begun(1, rows=16))
    store = begun(6, rows=16)
    run_compaction(store, PATHS, full)
    files = data_files(store, PATHS)
    run_gc(store, PATHS, expiry(2))
    assert len(data_files(store, PATHS)) < len(files)
    whole(store, PATHS, *ParquetBackend(store, PATHS).epochs()[-2:])
    assert ended(store) == expected
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **{**JOB, "rows": 16}), store)
    for _ in range(6):
        run.step()
    run_compaction(store, PATHS, full)
    run_gc(store, PATHS, expiry(2))
    run.step()
    run_gc(store, PATHS, expiry(2))
    whole(store, PATHS, *ParquetBackend(store, PATHS).epochs()[-2:])
    assert ended(store) == expected


def _died() -> None:
    raise Crash("the process died")


@pytest.mark.parametrize("layout", ["protocol", "legacy"])
@pytest.mark.parametrize("aside", [False, True], ids=["deleted", "moved-aside"])
def test_a_collection_of_orphans_that_dies_before_any_call_is_finished_by_the_next(
    layout: str, aside: bool
) -> None:
    clock = Clock()
    start, paths, generation, said = MemoryStore(clock=clock), legacy_job("j"), None, {}
    if layout == "protocol":
        start, paths = begun(3, clock, sinks=0, parallelism=1), PATHS
        generation = WorkerGeneration(1)
    else:
        Written(start, paths, start=clock.micros, keep=2).epochs(5)
        said = {"j": "stopped"}
    clock.days(-5)
    for number in (1, 2):
        place = paths.operator(OperatorId("count"), Epoch(number), generation)
        start.put(place / "table-counts-007-lost", b"an attempt that nobody waits for")
    clock.days(5)
    epochs = ParquetBackend(start, paths).epochs()

    def run(store: Any) -> Any:
        later = Clock()
        later.micros = clock.micros
        return run_gc(
            store,
            paths,
            orphans(**said),
            GcOptions(quarantine=aside, clock=later, pace=QUICK, owner="o"),
        )

    counted = Interrupted(copied(start, clock=clock, keep_times=True))
    assert run(counted).deleted == 2
    clean = without_ours(counted.inner)
    assert counted.calls > 30
    for at in range(1, counted.calls + 1):
        store = copied(start, clock=clock, keep_times=True)
        with contextlib.suppress(Crash):
            run(Interrupted(store, at, _died))
        whole(store, paths, *epochs)
        run(store)
        assert without_ours(store) == clean, f"died before call {at}: not finished by the next run"
        outcomes = {entry.outcome.partition(":")[0] for entry in read_journal(store, paths)}
        assert "unknown" not in outcomes, f"died before call {at}"
