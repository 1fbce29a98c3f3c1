"""`sql @fate`: what became of an object is answered from store, quarantine and journal."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster import GcOptions, GcOutcome, MemoryStore, ObjectStore, StatePath, run_gc
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.operations.gc.fate import (
    Fate,
    FateState,
    fate_of_directory,
    fate_of_object,
    job_of_object,
    path_of_object,
)
from arroyo_dagster.state.operations.gc.journal import Journal
from tests.fleets import Written, protocol_job
from tests.formats import StoredObject
from tests.gc_jobs import Clock, orphans
from tests.internals import UndeleteOptions, purge, read_journal, run_undelete

PATHS = protocol_job("p")
STOPPED = {str(PATHS.root): "stopped"}
BEGAN = 1_700_000_000_000_000
DIRECTORY = PATHS.root / "generations/1/checkpoints/checkpoint-0000001/operator-x"
LOST = StatePath(DIRECTORY / "table-y-000-lost")


def job() -> tuple[MemoryStore, Clock]:
    clock = Clock()
    store = MemoryStore(clock=clock)
    Written(store, PATHS, start=clock.micros).epochs(4)
    store.put(LOST, b"lost")
    clock.days(30)
    return store, clock


def fate(store: ObjectStore, path: str = LOST) -> Fate:
    return fate_of_object(store, PATHS, path, orphans(**STOPPED))


def run_orphans(store: ObjectStore, clock: Clock, **options: Any) -> GcOutcome:
    return run_gc(store, PATHS, orphans(**STOPPED), GcOptions(clock=clock, owner="me", **options))


def test_deleted_object_names_time_owner_plan_and_run() -> None:
    store, clock = job()
    done = run_orphans(store, clock)
    found = fate(store)
    assert found.state is FateState.DELETED
    (event,) = found.events
    assert (event.entry.kind, event.entry.outcome) == ("orphans", "deleted")
    assert (event.entry.owner, event.entry.plan) == ("me", done.plan.digest)
    assert event.entry.run == done.run
    store.put(LOST, b"again")
    assert fate(store).state is FateState.PRESENT
    assert fate(store).events == found.events


def test_quarantined_brought_back_and_purged_objects() -> None:
    store, clock = job()
    done = run_orphans(store, clock, quarantine=True)
    assert done.quarantine is not None
    found = fate(store)
    assert found.state is FateState.QUARANTINED
    assert found.quarantine is not None
    assert found.quarantine.name == done.quarantine
    assert found.copy is not None
    assert store.read(found.copy.copy) == b"lost"
    run_undelete(store, PATHS, done.quarantine, UndeleteOptions(clock=clock, sleep=lambda _: None))
    back = fate(store)
    assert back.state is FateState.UNDELETED
    assert [event.entry.outcome for event in back.events] == ["moved", "back"]
    store.delete_many([LOST])
    assert fate(store).state is FateState.LOST
    store.put(LOST, b"lost")
    clock.days(30)
    again = run_orphans(store, clock, quarantine=True)
    clock.days(30)
    purge(store, PATHS, yes=True, clock=clock, owner="purger")
    gone = fate(store)
    assert gone.state is FateState.PURGED
    assert gone.purged is not None
    assert gone.purged.owner == "purger"
    assert again.quarantine == gone.events[-1].quarantine


def test_run_that_has_not_ended_is_in_progress_and_afterwards_gone() -> None:
    store, clock = job()
    run = begin(store, [LOST])
    store.delete_many([LOST])
    assert fate(store).state is FateState.IN_PROGRESS
    run_orphans(store, clock)
    assert fate(store).state is FateState.DELETED
    assert fate(store).events[0].entry.run == run.name


def begin(store: ObjectStore, paths: list[StatePath], number: int = 0) -> Journal:
    run = Journal.begin(
        store,
        PATHS,
        RunHeader(
            kind="orphans",
            plan=f"{number:032x}"[::-1],
            owner="died",
            begun_at_micros=BEGAN + number,
            objects=len(paths),
            size_bytes=0,
        ),
    )
    for at in range(0, len(paths), 1000):
        run.write([(at // 1000 + 1, [StoredObject(path, 7) for path in paths[at : at + 1000]])], {})
    return run


def write(store: ObjectStore, paths: list[StatePath], number: int) -> None:
    run = begin(store, paths, number)
    for at in range(0, len(paths), 1000):
        objects = [StoredObject(path, 7) for path in paths[at : at + 1000]]
        run.write([(at // 1000 + 1, objects)], dict.fromkeys(paths, "deleted"))
    run.end({})


def names(number: int, count: int) -> list[StatePath]:
    return [StatePath(DIRECTORY / f"table-y-{number:03}-{one:06}") for one in range(count)]


def test_answer_is_that_of_brute_force() -> None:
    store, clock = MemoryStore(), Clock()
    Written(store, PATHS, start=clock.micros).epochs(2)
    for number in range(30):
        write(store, names(number % 7, 5), number)
    wanted = [names(3, 5)[2], names(6, 5)[4], names(8, 1)[0]]
    entries = list(read_journal(store, PATHS))
    truth = [[one for one in entries if one.path == path] for path in wanted]
    assert [[event.entry for event in fate(store, path).events] for path in wanted] == truth
    below = fate_of_directory(store, PATHS, DIRECTORY)
    (count,) = below.counts.values()
    assert (count.objects, count.size_bytes) == (150, 150 * 7)


def test_damaged_parts_are_named_and_the_rest_is_answered() -> None:
    store, clock = job()
    run_orphans(store, clock)
    write(store, names(0, 3), 1)
    run = begin(store, [LOST, *names(1, 1_500)], 2)
    part = StatePath(PATHS.journal / run.name / "000001.json.gz")
    store.put(part, store.read(part)[:-5])
    store.put(PATHS.journal / "0--1.parquet", b"broken")
    found = fate(store)
    assert found.state is FateState.DELETED
    assert set(found.unreadable) == {part, PATHS.journal / "0--1.parquet"}
    assert len(fate(store, names(1, 1_500)[-1]).events) == 1


@pytest.mark.parametrize("name", ["a b", "ü", "a%2Fb", 'a"b', "😀"])
def test_names_are_found_as_metadata_and_as_the_store_has_them(name: str) -> None:
    from tests.stores import encode_path

    store, clock = MemoryStore(), Clock()
    Written(store, PATHS, start=clock.micros).epochs(2)
    path = StatePath(DIRECTORY / name)
    write(store, [path], 0)
    for given in {str(path), encode_path(path)}:
        assert len(fate(store, given).events) == 1
    assert fate_of_directory(store, PATHS, f"{DIRECTORY}/").counts
    assert not fate_of_directory(store, PATHS, f"{path}/").counts


def test_job_of_a_path_is_found_and_also_one_that_was_removed() -> None:
    store, clock = job()
    run_orphans(store, clock)
    assert job_of_object(store, LOST) == PATHS
    store.delete_many([i.path for i in store.list(PATHS.root) if "_arroyo" not in i.path])
    assert job_of_object(store, LOST) == PATHS
    assert fate(store).state is FateState.DELETED
    with pytest.raises(InputError, match="job"):
        job_of_object(store, "other/thing/x")
    url = store.url
    assert path_of_object(f"{url}/{LOST}", url, None) == LOST
    relative = LOST.removeprefix(f"{PATHS.root}/")
    assert path_of_object(relative, url, PATHS) == LOST
    assert path_of_object(LOST, url, PATHS) == LOST
    with pytest.raises(InputError, match="path of an object"):
        path_of_object("/", url, None)
