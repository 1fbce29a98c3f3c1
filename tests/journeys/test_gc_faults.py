"""What schedules of the explorer have found: each stopped a job's collections for ever, or would
have brought back an epoch that nobody can restore; and the way out where nothing can be read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster import (
    CompactionOptions,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    JobPaths,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    WorkerGeneration,
    WriteProtected,
    pin_epoch,
    plan_gc,
    run_compaction,
    run_gc,
)
from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec.references import operator_references
from arroyo_dagster.state.operations.gc.roots import newest_root
from tests.explorer import mutants
from tests.faulty_stores import Before
from tests.fleets import OPERATOR, Written, legacy_job
from tests.formats import metadata
from tests.gc_jobs import (
    JOB,
    PATHS,
    Clock,
    Hiding,
    begun,
    clock_of_all,
    dead,
    directory,
    expiry,
    hiding,
    kept_no_more,
    orphans,
    whole,
    without_ours,
)
from tests.internals import (
    JobDirectory,
    LocalRun,
    Pace,
    UndeleteOptions,
    list_quarantines,
    read_pins,
    read_roots,
    run_undelete,
)
from tests.jobs import copied, word_job
from tests.journeys.test_gc_refused import (
    test_a_job_that_starts_while_it_is_collected_stops_the_collection as stopped_by_a_start,
)
from tests.stores import Listing, Wrapper

pytestmark = pytest.mark.usefixtures("one_at_a_time")

QUICK = Pace(sleep=lambda seconds: None)
SMALL: dict[str, Any] = {"sinks": 0, "parallelism": 1}
GONE = dead(**{str(PATHS.root): "gone"})


def some_epochs(layout: str, clock: Clock) -> tuple[MemoryStore, JobPaths, dict[str, str]]:
    if layout == "protocol":
        return begun(4, clock, **SMALL), PATHS, {}
    store, paths = MemoryStore(clock=clock), legacy_job("j")
    Written(store, paths, start=clock.micros, keep=2).epochs(15)
    return store, paths, {"j": "stopped"}


@pytest.mark.parametrize("hidden", [range(1, 3), range(6, 9), range(9, 15), range(15, 16)])
def test_epochs_of_the_legacy_layout_that_no_listing_shows_are_found_out(hidden: range) -> None:
    clock = Clock()
    store, paths = MemoryStore(clock=clock), legacy_job("j")
    Written(store, paths, start=clock.micros, keep=2).epochs(15)
    clock.days(5)
    seen = hiding(WriteProtected(store), paths, hidden)
    for asked in (expiry(2, j="stopped"), orphans(j="stopped")):
        with pytest.raises(ProtocolError, match="the listing is incomplete"):
            plan_gc(seen, paths, asked, now_micros=clock())


def test_merged_files_that_wait_stay_where_a_listing_hides_their_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, gap = clock_of_all(monkeypatch), threading.Event()
    store = MemoryStore(clock=clock)
    cut = Hiding(store, lambda path: gap.is_set() and path.startswith(PATHS.compactions))
    run = LocalRun.start(word_job(store, **JOB), cut)
    full = CompactionSettings(policy=CompactionPolicy.FULL)
    for epochs in (6, 2):  # the record of the first is adopted by then, and its name forgotten
        for _ in range(epochs):
            run.step()
        outcome = run_compaction(store, PATHS, full, CompactionOptions(clock=clock))
        assert outcome.published == "record"
    assert outcome.record is not None
    assert read_pins(store, PATHS).compactions == (outcome.record.name,)
    merged = [path for one in outcome.merges for path in one.merged.output_paths]
    gap.set()
    run.step()  # does not see the record
    clock.days(30)
    run.step()
    run_gc(cut, PATHS, orphans(), GcOptions(clock=clock, pace=QUICK))
    assert all(map(store.head, merged))
    gap.clear()
    run.step()
    assert set(merged) & set(ParquetBackend(store, PATHS).load().paths)


class FirstListingEndsEarly(Wrapper):
    """A store whose first listing of checkpoints shows nothing above an epoch."""

    def __init__(self, inner: ObjectStore, last: int) -> None:
        super().__init__(inner)
        self._last: int | None = last

    def list_dir(self, prefix: str = "") -> Listing:
        whole = super().list_dir(prefix)
        if not prefix.endswith("checkpoints") or self._last is None:
            return whole
        last, self._last = self._last, None
        shown = [one for one in whole.prefixes if int(one.rpartition("-")[2]) <= last]
        return replace(whole, prefixes=tuple(shown))


@pytest.mark.parametrize("last", [9, 13, 14])
def test_epochs_that_only_a_second_listing_shows_are_roots(last: int) -> None:
    store, paths = MemoryStore(), legacy_job("j")
    Written(store, paths, start=0, keep=2).epochs(15)
    found = newest_root(FirstListingEndsEarly(store, last), paths)
    assert found is not None
    assert found.epoch == 15
    roots = read_roots(FirstListingEndsEarly(store, last), paths)
    assert roots.head.epoch == 15
    assert roots.epochs == read_roots(store, paths).epochs


def left_behind(clock: Clock, *, min_epoch: int, half: bool) -> tuple[MemoryStore, JobPaths]:
    """Thirty epochs of Arroyo's, of which its cleaning up has removed those from 6 to 17.

    A run without state began at 7: it took 6, at which an attempt failed, for the oldest that is
    kept (arroyo-state.md 9.6).

    Args:
        min_epoch: the oldest epoch that the newest says is kept.
        half: of epoch 10 the metadata of its operator has stayed.
    """
    store, paths = MemoryStore(clock=clock), legacy_job("j")
    Written(store, paths, start=clock.micros, keep=2).epochs(30)
    stays = paths.operator_metadata(OPERATOR, Epoch(10)) if half else None
    for number in range(6, 18):
        found = store.list(paths.checkpoint(Epoch(number)))
        names = [info.path for info in found if info.path.name == "metadata"]
        store.delete_many([name for name in names if name != stays])
    for number in range(18, 31):
        ref = paths.legacy_metadata(Epoch(number))
        epoch = metadata.decode_legacy_checkpoint(store.read(ref), ref)
        kept = Epoch(min_epoch if number == 30 else 6)
        store.put(ref, metadata.encode_legacy_checkpoint(replace(epoch, min_epoch=kept)))
    return store, paths


@pytest.mark.parametrize("half", [False, True])
def test_what_a_run_of_before_ignore_state_has_left_is_no_gap_that_stops_everything(
    half: bool,
) -> None:
    """Arroyo goes on with the next number, keeps ten epochs, and leaves the old run's behind."""
    clock = Clock()
    store, paths = left_behind(clock, min_epoch=18, half=half)
    said = {"j": "stopped"}
    plan = plan_gc(store, paths, expiry(2, **said), now_micros=clock())
    assert plan.epochs == (1, 2, 3, 4, 5, 18)
    run_gc(store, paths, expiry(2, **said), GcOptions(clock=clock, pace=QUICK))
    assert ParquetBackend(store, paths).epochs() == list(range(19, 31))
    whole(store, paths, *range(19, 31))
    if half:
        left = paths.operator_metadata(OPERATOR, Epoch(10))
        files = operator_references(store.read(left), left).files
        assert len(files) == 2
        assert all(store.head(path) for path in files), "what nobody has decided about stays"


def test_a_collector_that_does_not_ask_again_is_found_out() -> None:
    """No schedule finds it: what a job that has started writes is safe by the other rules, too."""
    stopped_by_a_start(Clock())
    broken = mutants.MUTANTS["the directory of jobs is not asked again"]
    with broken(), pytest.raises((pytest.fail.Exception, AssertionError)):
        stopped_by_a_start(Clock())


def test_a_pin_waits_for_what_the_job_has_sent_before_it_could_see_it(clock: Clock) -> None:
    start = kept_no_more(begun, 8, clock, **SMALL)
    for epoch in range(1, 9):
        store = copied(start, clock=clock)
        plan = ParquetBackend(store, PATHS).expire_plan(Epoch(6))
        waited: list[float] = []

        def arrives(seconds: float) -> None:
            waited.append(seconds)  # noqa: B023
            for step in (plan.data, plan.records, plan.metadata):  # noqa: B023
                store.delete_many(step.paths)  # noqa: B023

        def pin(arrives: Callable[[float], None] = arrives) -> None:
            pin_epoch(store, PATHS, Epoch(epoch), clock=clock, sleep=arrives)  # noqa: B023

        if epoch <= 5:
            with pytest.raises((NotFoundError, FormatError)):
                pin()
            assert not read_pins(store, PATHS).pinned
        else:
            pin()
            whole(store, PATHS, epoch)
        assert waited == ([10.0] if epoch <= 6 else []), "6 has a parent that goes"


def test_a_quarantine_waits_for_what_the_job_has_sent_before_it_could_see_it(clock: Clock) -> None:
    for store, expected in (
        (begun(8, clock, **SMALL), []),
        (kept_no_more(begun, 8, clock, **SMALL), [10.0]),
    ):
        waited: list[float] = []
        pace = Pace(sleep=waited.append)
        done = run_gc(store, PATHS, expiry(3), GcOptions(quarantine=True, clock=clock, pace=pace))
        assert done.quarantine
        (aside,) = [one for one, _ in list_quarantines(store, PATHS)]
        assert aside.needs, "nothing could be lost: this shows nothing"
        assert waited == expected
        run_undelete(
            store, PATHS, done.quarantine, UndeleteOptions(clock=clock, sleep=waited.append)
        )
        assert waited == expected * 2
        whole(store, PATHS, *range(1, 9))


def test_in_the_legacy_layout_the_last_thing_before_each_deletion_is_to_ask(clock: Clock) -> None:
    """A run that ignores the state writes the old names again, seconds after it was started."""
    store, paths, _ = some_epochs("legacy", clock)
    events: list[str] = []
    knows = directory(j="stopped").sources[0]

    class Listening:
        source = "the user"

        def look_up(self, jobs: Any, *, checkpoints: bool = False) -> Any:
            events.append("asked")
            return knows.look_up(jobs, checkpoints=checkpoints)

    def note(verb: str, path: str) -> None:
        events.append(f"{verb} data" if "/table-" in path else verb)

    asked = replace(expiry(2), directory=JobDirectory([Listening()]))
    run_gc(Before(store, note), paths, asked, GcOptions(quarantine=True, clock=clock, pace=QUICK))
    deletions = [at for at, event in enumerate(events) if event == "delete_many data"]
    assert deletions
    assert all(events[at - 1] == "asked" for at in deletions)


# ---- a job that is gone and cannot be read -------------------------------------------------------

BROKEN = {
    "fence": lambda: PATHS.current_generation,
    "generation": lambda: PATHS.generation_manifest(WorkerGeneration(1)),
    "record": lambda: PATHS.epoch_record(Epoch(2)),
    "manifest": lambda: PATHS.manifest(WorkerGeneration(1), Epoch(2)),
}


@pytest.mark.parametrize("what", [*BROKEN, "no fence", "no epoch"])
def test_a_job_that_is_gone_and_cannot_be_read_can_be_moved_aside_on_the_user_s_word(
    what: str,
) -> None:
    clock = Clock()
    store = begun(3, clock, **SMALL)
    beside = PATHS.root.parent / "other/current-generation.json"  # type: ignore[operator]
    store.put(beside, b"of another job")
    if what == "no fence":
        store.delete_many([PATHS.current_generation])
    elif what == "no epoch":
        doomed = [info.path for info in store.list(PATHS.root)]
        store.delete_many([p for p in doomed if p.name != "current-generation.json"])
    else:
        store.put(BROKEN[what](), b"\xff\xfe{")
    clock.days(4)
    before = without_ours(store)
    with pytest.raises(ArroyoStateError):
        run_gc(store, PATHS, GONE, GcOptions(quarantine=True, clock=clock, pace=QUICK))
    for said in ({}, {str(PATHS.root): "stopped"}):
        asked = replace(dead(**said), unreadable=True, others=())
        with pytest.raises(ProtocolError, match="refused"):
            run_gc(store, PATHS, asked, GcOptions(quarantine=True, clock=clock, pace=QUICK))
    asked = replace(GONE, unreadable=True, others=())
    with pytest.raises(InputError, match="moved to quarantine but not deleted"):
        run_gc(store, PATHS, asked, GcOptions(clock=clock, pace=QUICK))
    assert without_ours(store) == before
    done = run_gc(store, PATHS, asked, GcOptions(quarantine=True, clock=clock, pace=QUICK))
    assert done.plan.rule["unreadable"], "the plan says why it could not be read"
    assert list(without_ours(store)) == [beside]
    with contextlib.suppress(ArroyoStateError):  # what comes back is as broken as it was
        run_undelete(store, PATHS, str(done.quarantine), UndeleteOptions(clock=clock))
    assert without_ours(store) == before


def test_a_job_that_may_live_is_never_quarantined_unread(clock: Clock) -> None:
    store = begun(3, clock, **SMALL)
    store.put(PATHS.epoch_record(Epoch(2)), b"{")
    asked = replace(GONE, unreadable=True, others=())
    with pytest.raises(ProtocolError, match="within the grace period"):
        run_gc(store, PATHS, asked, GcOptions(quarantine=True, clock=clock, pace=QUICK))
    store.put(PATHS.job_pins, b"{")
    clock.days(4)
    with pytest.raises(FormatError):
        run_gc(store, PATHS, asked, GcOptions(quarantine=True, clock=clock, pace=QUICK))
    with pytest.raises(InputError, match="the metadata of the job"):
        replace(orphans(), unreadable=True)
