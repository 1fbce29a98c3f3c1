"""What stays besides the newest epochs: pinned ones, and what was moved aside and comes back whole,
or not at all."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster import (
    Epoch,
    GcOptions,
    GcRequest,
    JobPaths,
    MemoryStore,
    OperatorId,
    ParquetBackend,
    Progress,
    TableName,
    WorkerGeneration,
    pin_epoch,
    plan_gc,
    run_gc,
    unpin_epochs,
)
from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.operations.gc.undelete import plan_undelete
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import decode_gc_plan, gc_plan_to_json, metadata
from tests.gc_jobs import (
    JOB,
    PATHS,
    Clock,
    Hiding,
    begun,
    data_files,
    dead,
    expiry,
    orphans,
    reachable,
    restorable,
    whole,
    without_ours,
)
from tests.internals import (
    Pace,
    UndeleteOptions,
    list_runs,
    purge,
    read_journal,
    read_pins,
    run_undelete,
)
from tests.jobs import copied, run_word_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")

QUICK = Pace(sleep=lambda seconds: None)
SMALL: dict[str, Any] = {"sinks": 0, "parallelism": 1}


def expired(store: Any, clock: Clock, keep: int = 2, **options: Any) -> Any:
    return run_gc(store, PATHS, expiry(keep), GcOptions(clock=clock, pace=QUICK, **options))


# ---- pins ----------------------------------------------------------------------------------------


def test_a_pinned_epoch_stays_restorable_whoever_expires_its_neighbours(clock: Clock) -> None:
    store = begun(9, clock, sinks=1, parallelism=1)
    pin_epoch(store, PATHS, Epoch(3), reason="before the migration", clock=clock)
    outcome = expired(store, clock)
    assert outcome.plan.epochs == (1, 4, 5, 6, 7)
    restorable(store, PATHS, 3, 8, 9)
    again = expired(store, clock)
    assert again.plan.objects == 0
    # The job's own expiry honours it as well.
    run_word_job(store, **{**JOB, "sinks": 1, "parallelism": 1, "keep_epochs": 2}, max_epochs=2)
    assert 3 in ParquetBackend(store, PATHS).epochs()
    ParquetBackend(store, PATHS).cleanup_checkpoint(Epoch(10))
    restorable(store, PATHS, 3, 10, 11)
    unpin_epochs(store, PATHS, [Epoch(3)], clock=clock)
    expired(store, clock)
    assert ParquetBackend(store, PATHS).epochs() == [10, 11]
    assert data_files(store, PATHS) == reachable(store, PATHS)


def test_only_a_whole_epoch_can_be_pinned(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    with pytest.raises(NotFoundError, match="epoch 9 does not exist"):
        pin_epoch(store, PATHS, Epoch(9), clock=clock)
    lost = ParquetBackend(store, PATHS).load(Epoch(2)).paths[0]
    pinned_before = copied(store)
    pin_epoch(pinned_before, PATHS, Epoch(2), clock=clock)
    for one in (store, pinned_before):
        one.delete_many([lost])
        with pytest.raises(FormatError, match="cannot be restored"):
            pin_epoch(one, PATHS, Epoch(2), clock=clock)
    assert read_pins(store, PATHS).pinned == frozenset()
    assert read_pins(pinned_before, PATHS).pinned == {2}  # what is left of it may be needed
    with pytest.raises(NotFoundError, match="not pinned"):
        unpin_epochs(store, PATHS, [Epoch(3)], clock=clock)


def test_an_older_epoch_that_nothing_leads_to_is_a_gap(clock: Clock) -> None:
    store = begun(8, clock, **SMALL)
    pin_epoch(store, PATHS, Epoch(2), clock=clock)
    expired(store, clock)
    store.delete_many([PATHS.job_pins])
    for asked in (expiry(2), orphans()):
        with pytest.raises(ProtocolError, match="exists, but no later epoch refers to it"):
            run_gc(store, PATHS, asked, GcOptions(clock=clock))
    whole(store, PATHS, 2, 7, 8)


# ---- quarantine ----------------------------------------------------------------------------------


def test_a_purge_waits_for_its_time_and_can_be_stopped_anywhere(clock: Clock) -> None:
    start = begun(4, clock, **SMALL)
    expired(start, clock, quarantine=True)
    assert purge(start, PATHS, yes=True, clock=clock) == []
    with pytest.raises(InputError, match="below an hour"):
        purge(start, PATHS, older_than_micros=5, clock=clock)
    clock.days(8)
    assert len(purge(start, PATHS, clock=clock)) == 1
    counted = FaultInjecting(copied(start, clock=clock))
    reports: list[Progress] = []
    purge(counted, PATHS, yes=True, clock=clock, on_progress=reports.append)
    assert (reports[-1].step, reports[-1].share) == ("purged objects", 1.0)
    assert read_pins(counted, PATHS).quarantines == ()
    assert not [one.path for one in counted.list(PATHS.quarantine)]
    assert {entry.outcome for entry in read_journal(counted, PATHS) if entry.kind == "purge"} == {
        "deleted"
    }
    for at in range(1, counted.changes + 1):
        store = copied(start, clock=clock)
        with contextlib.suppress(Crash):
            purge(FaultInjecting(store, fail_at=at, crash=True), PATHS, yes=True, clock=clock)
        whole(store, PATHS, 3, 4)
        clock.micros += 120_000_000
        purge(store, PATHS, yes=True, clock=clock)
        assert read_pins(store, PATHS).quarantines == (), f"crash at change {at}"
        expired(store, clock)


@pytest.mark.parametrize("hides", ["part-", "00000", ""], ids=["parts", "copies", "all"])
def test_what_a_listing_hides_of_a_quarantine_comes_back_and_goes_with_the_rest(hides: str) -> None:
    clock = Clock()
    store = begun(6, clock, **SMALL)
    before = without_ours(store)
    aside = str(expired(store, clock, quarantine=True).quarantine)
    hidden = f"{PATHS.quarantine}/{aside}/{hides}"
    cut = Hiding(store, lambda path: path.startswith(hidden))
    assert without_ours(store) != before
    run_undelete(cut, PATHS, aside, UndeleteOptions(clock=clock))
    assert without_ours(store) == before
    clock.days(8)
    assert [one.name for one in purge(cut, PATHS, yes=True, clock=clock)] == [aside]
    assert not [info.path for info in store.list(PATHS.quarantine)]


def test_what_lies_where_it_was_is_not_overwritten(clock: Clock) -> None:
    store = begun(4, clock, **SMALL)
    outcome = expired(store, clock, quarantine=True)
    moved = list(plan_undelete(store, PATHS, str(outcome.quarantine)).objects)
    store.put(moved[0].path, b"somebody else's")
    with pytest.raises(ConflictError, match="another object exists"):
        run_undelete(store, PATHS, str(outcome.quarantine), UndeleteOptions(clock=clock))
    assert store.read(moved[0].path) == b"somebody else's"
    assert store.head(moved[1].path) is None
    with pytest.raises(NotFoundError, match="no such quarantine"):
        list(plan_undelete(store, PATHS, "none").objects)


def test_a_copy_that_was_changed_does_not_come_back(clock: Clock) -> None:
    store = begun(4, clock, **SMALL)
    outcome = expired(store, clock, quarantine=True)
    moved = list(plan_undelete(store, PATHS, str(outcome.quarantine)).objects)
    store.put(moved[0].copy, b"rotten")
    with pytest.raises(FormatError, match="not match the object that was moved"):
        run_undelete(store, PATHS, str(outcome.quarantine), UndeleteOptions(clock=clock))


# ---- journal, orphans, dead jobs -----------------------------------------------------------------


def test_the_journal_names_who_when_what_and_what_became_of_it(clock: Clock) -> None:
    store = begun(6, clock, **SMALL)
    before = {info.path: info for info in store.list()}
    outcome = expired(store, clock, owner="ada")
    entries = list(read_journal(store, PATHS))
    assert len(entries) == outcome.deleted
    for entry in entries:
        info = before[entry.path]
        assert (entry.size_bytes, entry.etag) == (info.size_bytes, info.etag)
        assert (entry.owner, entry.kind, entry.outcome) == ("ada", "expire", "deleted")
        assert entry.plan == outcome.plan.digest
        assert entry.run == outcome.run
    (run,) = list_runs(store, PATHS)
    assert (run.objects, run.size_bytes, run.ended) == (outcome.deleted, outcome.size_bytes, True)
    order = [entry.path.name for entry in entries]
    last_data = max(at for at, name in enumerate(order) if name.startswith("table-"))
    assert all("table-" not in name for name in order[last_data + 1 :])
    manifests = [at for at, name in enumerate(order) if name == "checkpoint-manifest.pb"]
    assert manifests == list(range(len(order) - 4, len(order)))


def lose_an_attempt(store: MemoryStore, epoch: int, generation: int = 1) -> Any:
    path = PATHS.data_file(
        OperatorId("count"),
        TableName("counts"),
        0,
        Epoch(epoch),
        WorkerGeneration(generation),
        attempt=f"lost{generation}",
    )
    store.put(path, b"x" * 100)
    return path


def test_orphans_of_a_job_of_ours_go_once_they_are_old_and_an_epoch_is_newer(clock: Clock) -> None:
    store = begun(4, clock, **SMALL)
    lost = lose_an_attempt(store, 3)
    store.put(PATHS.root / "notes.txt", b"of a person")

    def plan() -> Any:
        return plan_gc(store, PATHS, orphans(), now_micros=clock())

    assert plan().stays["young"][0] >= 1
    clock.days(4)
    assert plan().objects == 0, "the newest epoch began before it was written"
    assert plan().stays["in_flight"][0] == 1
    run_word_job(store, **{**JOB, **SMALL}, max_epochs=1)
    ref = ParquetBackend(store, PATHS).load().ref
    manifest = metadata.decode_manifest(store.read(ref), ref)
    now = clock()
    store.put(
        ref,
        metadata.encode_manifest(replace(manifest, start_time_micros=now, finish_time_micros=now)),
    )
    found = plan()
    assert list(found.data.paths) == [lost]
    assert found.foreign == ("words/main/notes.txt",)
    outcome = run_gc(store, PATHS, orphans(), GcOptions(clock=clock, pace=QUICK))
    old = PATHS.generation_manifest(WorkerGeneration(1))
    assert {one.path for one in read_journal(store, PATHS)} == {lost, old}
    assert outcome.deleted == 2
    assert store.head(PATHS.root / "notes.txt") is not None
    restorable(store, PATHS, 4, 5)


def test_a_dead_job_goes_whole_and_can_come_back(clock: Clock) -> None:
    store = begun(4, clock, sinks=0, parallelism=1)
    store.put(PATHS.root / "notes.txt", b"of a person")
    before = without_ours(store)
    root = str(PATHS.root)
    with pytest.raises(ProtocolError, match="within the grace period"):
        run_gc(store, PATHS, dead(**{root: "gone"}), GcOptions(clock=clock))
    clock.days(4)
    for said, why in ({}, "nothing proves|no Arroyo server"), ({root: "stopped"}, "the job exists"):
        with pytest.raises(ProtocolError, match=why):
            run_gc(store, PATHS, dead(**said), GcOptions(clock=clock))
    assert without_ours(store) == before
    outcome = run_gc(
        store, PATHS, dead(**{root: "gone"}), GcOptions(quarantine=True, clock=clock, pace=QUICK)
    )
    assert list(without_ours(store)) == ["words/main/notes.txt"]
    assert outcome.plan.proof.condition == "gone (the user)"
    run_undelete(store, PATHS, str(outcome.quarantine), UndeleteOptions(clock=clock))
    assert without_ours(store) == before
    restorable(store, PATHS, 1, 2, 3, 4)
    clock.days(4)
    with pytest.raises(ProtocolError, match="pinned"):
        run_gc(store, PATHS, dead(**{root: "gone"}), GcOptions(clock=clock))


def test_what_is_written_after_a_removal_began_stops_it(clock: Clock) -> None:
    store = begun(3, clock, **SMALL)
    clock.days(4)
    asked = dead(**{str(PATHS.root): "gone"})
    with contextlib.suppress(Crash):
        faulty = FaultInjecting(store, fail_at=9, mode="before", crash=True)
        run_gc(faulty, PATHS, asked, GcOptions(clock=clock, pace=QUICK))
    assert store.head(PATHS.removal) is not None
    clock.micros += 120_000_000
    fence = store.read(PATHS.current_generation)
    store.put(PATHS.current_generation, fence)
    with pytest.raises(ProtocolError, match="after the deletion of the job began"):
        run_gc(store, PATHS, asked, GcOptions(clock=clock, pace=QUICK))


def test_a_stored_plan_is_carried_out_if_it_still_fits_and_refused_if_not(clock: Clock) -> None:
    store = begun(6, clock, **SMALL)
    plan = plan_gc(store, PATHS, expiry(3), now_micros=clock())
    text = json.dumps(gc_plan_to_json(plan)).encode()
    assert decode_gc_plan(text, "plan.json") == plan
    changed = json.loads(text)
    changed["data"].append([ParquetBackend(store, PATHS).load().paths[0], 1, 1, "e"])
    with pytest.raises(FormatError, match="digest"):
        decode_gc_plan(json.dumps(changed).encode(), "plan.json")
    run_word_job(store, **{**JOB, **SMALL}, max_epochs=2)
    outcome = run_gc(
        store, PATHS, expiry(3), GcOptions(clock=clock, pace=QUICK), plan=decode_gc_plan(text, "p")
    )
    assert outcome.plan.epochs == (1, 2, 3)
    assert ParquetBackend(store, PATHS).epochs() == [4, 5, 6, 7, 8]
    # Whatever is pinned since then refuses it.
    plan = plan_gc(store, PATHS, expiry(3), now_micros=clock())
    pin_epoch(store, PATHS, Epoch(5), clock=clock)
    before = without_ours(store)
    with pytest.raises(ConflictError, match="no longer matches"):
        run_gc(store, PATHS, expiry(3), GcOptions(clock=clock, pace=QUICK), plan=plan)
    assert without_ours(store) == before


def quarantine_objects(store: Any, paths: JobPaths, asked: GcRequest, clock: Clock) -> str | None:
    """Move what a request is about into quarantine."""
    options = GcOptions(quarantine=True, clock=clock, pace=Pace(sleep=lambda seconds: None))
    return run_gc(store, paths, asked, options).quarantine


def test_each_run_that_ended_has_a_quarantine_of_its_own(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    first = quarantine_objects(store, PATHS, expiry(3), clock)
    run_word_job(store, **{**JOB, **SMALL}, max_epochs=2)
    second = quarantine_objects(store, PATHS, expiry(3), clock)
    assert first
    assert second
    assert first != second
    run_undelete(store, PATHS, second, UndeleteOptions(clock=clock, sleep=clock.seconds))
    assert ParquetBackend(store, PATHS).epochs() == [3, 4, 5, 6, 7]
    # What was brought back, and moved aside once more, is in both: each is enough.
    unpin_epochs(store, PATHS, [Epoch(3), Epoch(4)], clock=clock)
    third = quarantine_objects(store, PATHS, expiry(3), clock)
    assert third not in (None, first, second)


def test_no_more_comes_back_than_was_planned(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    name = quarantine_objects(store, PATHS, expiry(3), clock)
    assert name
    plan, options = plan_undelete(store, PATHS, name), UndeleteOptions(clock=clock)
    less, before = replace(plan, objects=plan.objects[:-1]), without_ours(store)
    with pytest.raises(ConflictError, match="1 other objects would come back now") as caught:
        run_undelete(store, PATHS, name, options, plan=less)
    assert caught.value.facts["path"] == plan.objects[-1].path
    assert without_ours(store) == before
    assert not read_pins(store, PATHS).pinned
    assert run_undelete(store, PATHS, name, options, plan=plan) == list(plan.objects)


def test_a_quarantine_of_which_a_purge_has_begun_is_refused(clock: Clock) -> None:
    store = begun(8, clock, **SMALL)
    name = quarantine_objects(store, PATHS, expiry(2), clock)
    assert name is not None
    clock.micros += 3_600_000_000
    counted = FaultInjecting(copied(store, clock=clock, keep_times=True))
    purge(counted, PATHS, older_than_micros=3_600_000_000, yes=True, clock=clock)
    told = set()
    for at in range(1, counted.changes + 1):
        twin = copied(store, clock=clock, keep_times=True)
        faulty = FaultInjecting(twin, fail_at=at, mode="partial", crash=True)
        with contextlib.suppress(Crash):
            purge(faulty, PATHS, older_than_micros=3_600_000_000, yes=True, clock=clock)
        clock.micros += 3_600_000_000
        before = without_ours(twin)
        try:
            run_undelete(twin, PATHS, name, UndeleteOptions(clock=clock, sleep=clock.seconds))
        except (ConflictError, NotFoundError) as error:
            told.add(error.message)
            assert without_ours(twin) == before
            assert not read_pins(twin, PATHS).pinned
        else:
            whole(twin, PATHS, *range(1, 9))
    assert told == {
        "the quarantine holds no object: it was purged, or nothing was moved to it",
        "a purge of this quarantine has begun; nothing was restored",
        "there is no such quarantine",
    }
