"""The journal is a hash chain: what was changed, removed or inserted is found, wherever it lies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.codec.journal import decode_archive, encode_archive
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.operations.gc import journal_archive
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.journal import Journal, list_runs, read_journal
from arroyo_dagster.state.operations.gc.journal_archive import archive_runs
from arroyo_dagster.state.operations.gc.journal_chain import finish_open_runs
from arroyo_dagster.state.operations.gc.journal_check import JournalCheck, check_journal
from arroyo_dagster.state.operations.gc.quarantine import purge
from arroyo_dagster.state.operations.gc.undelete import UndeleteOptions, run_undelete
from arroyo_dagster.state.storage import MemoryStore, ObjectStore
from tests.faulty_stores import Crash, FaultInjecting
from tests.fleets import Written
from tests.gc_jobs import Clock, Hiding, expiry, orphans
from tests.jobs import copied
from tests.journals import BEGAN, PATHS, begin_run

STOPPED = {str(PATHS.root): "stopped"}


def planned_run(store: ObjectStore, number: int, *, batches: int = 2) -> Journal:
    run = begin_run(store, number, batches=batches)
    for batch in range(1, batches + 1):
        run.write([(batch, objects_of(number, batch))], {})
    return run


def objects_of(number: int, batch: int) -> list[StoredObject]:
    return [StoredObject(PATHS.root / f"{number}-{batch}-{name}", 7, None, "etag") for name in "ab"]


def write_run(store: ObjectStore, number: int, *, batches: int = 2) -> Journal:
    run = planned_run(store, number, batches=batches)
    for batch in range(1, batches + 1):
        objects = objects_of(number, batch)
        run.write([(batch, objects)], dict.fromkeys((one.path for one in objects), "deleted"))
    run.end({"deleted": 2 * batches})
    return run


def journal_of(runs: int, clock: Clock | None = None) -> MemoryStore:
    store = MemoryStore(clock=clock or Clock())
    for number in range(runs):
        write_run(store, number, batches=number % 3)
    return store


def without_digests(store: ObjectStore, number: int) -> None:
    """A run as a release without a chain wrote it."""
    directory = PATHS.journal / f"{BEGAN + number:017}-old"
    fields = {"owner": "old", "begun_at_micros": BEGAN, "kind": "expire", "plan": "x"}
    sizes: dict[str, Any] = {"objects": 1, "size_bytes": 1, "quarantine": None, "version": 1}
    store.put(directory / "plan.json", json.dumps({**fields, **sizes}).encode())
    lines = [[str(PATHS.root / f"old-{number}"), 1, None, "deleted"]]
    batch = {"version": 1, "at_micros": BEGAN, "objects": lines}
    store.put(directory / "000001.json", json.dumps(batch).encode())
    store.put(directory / "end.json", b'{"version":1,"deleted":1}')


def shards_of(store: ObjectStore) -> list[StatePath]:
    return [info.path for info in store.list(PATHS.journal)]


def first(found: JournalCheck) -> str:
    assert not found.whole
    return found.findings[0].path.removeprefix(f"{PATHS.journal}/")


def test_journal_as_written_is_whole() -> None:
    store = journal_of(6)
    found = check_journal(store, PATHS)
    assert found.whole, found.findings
    assert (found.runs, found.parts) == (6, 2 * 6 + 2 * (0 + 1 + 2))
    assert (found.unchained, found.open_runs) == (0, ())
    assert found.head is not None
    assert found.head.run == list_runs(store, PATHS)[-1].name


def damages(data: bytes) -> Iterator[bytes | None]:
    yield None  # removed
    yield data[: len(data) // 2]
    yield b""
    yield data.replace(b"etag", b"etah").replace(b'"owner":"run', b'"owner":"ran') + b" "
    yield data.replace(b'"deleted"', b'"there: x"').replace(b'"version":1', b'"version": 1')


def test_every_part_changed_truncated_or_removed_is_the_first_that_is_named() -> None:
    start = journal_of(5)
    parts = [path for path in shards_of(start) if path.name != "head.json"]
    for path in parts:
        for data in damages(start.read(path)):
            store = copied(start)
            if data is None:
                store.delete_many([path])
            else:
                store.put(path, data)
            found = check_journal(store, PATHS)
            assert first(found) == path.removeprefix(f"{PATHS.journal}/"), (data, found.findings)


def test_head_of_another_run_is_found() -> None:
    store = journal_of(5)
    head = PATHS.journal / "head.json"
    data = store.read(head)
    write_run(store, 5)
    store.put(head, data)
    found = check_journal(store, PATHS)
    assert first(found) == list_runs(store, PATHS)[5].name
    store.put(head, data.replace(b'"digest":"', b'"digest":"0'))
    assert not check_journal(store, PATHS).whole


@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_a_run_that_was_removed_is_named(at: int) -> None:
    store = journal_of(5)
    name = list_runs(store, PATHS)[at].name
    store.delete_many([path for path in shards_of(store) if f"/{name}/" in path])
    assert first(check_journal(store, PATHS)) == name


def test_inserted_parts_and_runs_are_named() -> None:
    start = journal_of(5)
    names = [run.name for run in list_runs(start, PATHS)]
    inserted = {
        f"{names[2]}/000003.json": start.read(PATHS.journal / names[2] / "000002.json"),
        f"{names[1]}/notes.txt": b"x",
        "notes.txt": b"x",
    }
    for name, data in inserted.items():
        store = copied(start)
        store.put(PATHS.journal / name, data)
        assert first(check_journal(store, PATHS)) == name
    between = f"{names[2]}x"
    for source in (names[2], names[4], names[0]):
        store = copied(start)
        for path in shards_of(start):
            if f"/{source}/" in path:
                store.put(PATHS.journal / between / path.name, start.read(path))
        found = check_journal(store, PATHS)
        assert first(found) == between
        assert "fork" in found.findings[0].problem
    store = copied(start)
    without_digests(store, 3)
    assert first(check_journal(store, PATHS)).endswith("-old")


def test_a_chain_goes_through_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_archive, "ARCHIVE_AFTER", 8)
    store = journal_of(30)
    before = check_journal(store, PATHS)
    assert archive_runs(store, PATHS, store.list_dir(PATHS.journal)) == 14
    assert check_journal(store, PATHS) == before
    (path,) = (path for path in shards_of(store) if path.endswith(".parquet"))
    runs = decode_archive(store.read(path), path)
    changed = (*runs[5].lines[0][:4], "there: x")
    edits: dict[str, list[Any]] = {
        f"{path.name}/{runs[5].name}/000001.json": [
            *runs[:5],
            type(runs[5])(name=runs[5].name, plan=runs[5].plan, end=runs[5].end, lines=(changed,)),
            *runs[6:],
        ],
        runs[3].name: [*runs[:3], *runs[4:]],
        path.name: [],
    }
    for name, kept in edits.items():
        store.put(path, encode_archive(kept) if kept else b"PAR1")
        found = check_journal(store, PATHS)
        assert name in [one.path.removeprefix(f"{PATHS.journal}/") for one in found.findings]


def test_a_run_that_was_changed_is_not_archived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_archive, "ARCHIVE_AFTER", 4)
    store = journal_of(30)
    name = list_runs(store, PATHS)[2].name
    part = PATHS.journal / name / "000002.json"
    store.put(part, store.read(part).replace(b"deleted", b"moved"))
    assert archive_runs(store, PATHS, store.list_dir(PATHS.journal)) == 13
    assert first(check_journal(store, PATHS)) == f"{name}/000002.json"


def test_runs_without_digests_are_readable_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_archive, "ARCHIVE_AFTER", 4)
    store = MemoryStore()
    for number in range(20):
        without_digests(store, number)
    found = check_journal(store, PATHS)
    assert found.whole
    assert (found.unchained, found.unchained_before) == (20, None)
    for number in range(20, 30):
        write_run(store, number)
    found = check_journal(store, PATHS)
    assert found.whole, found.findings
    assert found.unchained == 20
    assert found.unchained_before == list_runs(store, PATHS)[20].name
    entries = list(read_journal(store, PATHS))
    assert archive_runs(store, PATHS, store.list_dir(PATHS.journal))
    assert check_journal(store, PATHS) == found
    assert list(read_journal(store, PATHS)) == entries


def test_names_ascend_along_the_chain_and_never_collide() -> None:
    store = MemoryStore()
    names = [write_run(store, number).name for number in (9, 4, 4, 2)]
    assert names == sorted(set(names))
    assert check_journal(store, PATHS).whole


# ---- crashes, weak listings, two maintainers -----------------------------------------------------


def lost_file(number: int) -> StatePath:
    name = f"generations/1/checkpoints/checkpoint-0000001/operator-x/table-y-000-{number}"
    return PATHS.root / name


def job_to_collect() -> tuple[MemoryStore, Clock]:
    clock = Clock()
    store = journal_of(3, clock)
    Written(store, PATHS, start=clock.micros).epochs(3)
    for number in range(3):
        store.put(lost_file(number), b"lost")
    clock.days(30)
    return store, clock


def run_orphans(store: ObjectStore, clock: Clock) -> None:
    run_gc(store, PATHS, orphans(**STOPPED), GcOptions(clock=clock))


@pytest.mark.parametrize("crash", [True, False], ids=["crash", "failure"])
@pytest.mark.parametrize("mode", ["before", "after"])
def test_stopped_anywhere_the_chain_is_whole(mode: Any, crash: bool) -> None:
    start, clock = job_to_collect()
    counted = FaultInjecting(copied(start, clock=clock, keep_times=True))
    run_orphans(counted, clock)
    for at in range(1, counted.changes + 1):
        store = copied(start, clock=clock, keep_times=True)
        with contextlib.suppress(Crash, StorageError):
            run_orphans(FaultInjecting(store, fail_at=at, mode=mode, crash=crash), clock)
        found = check_journal(store, PATHS)
        assert found.whole, (at, found.findings)
        clock.seconds(120)
        store.put(lost_file(9), b"lost")
        clock.days(30)
        run_orphans(store, clock)
        found = check_journal(store, PATHS)
        assert found.whole, (at, found.findings)
        assert found.open_runs == ()


def test_quarantine_undelete_and_purge_keep_the_chain() -> None:
    store, clock = job_to_collect()
    done = run_gc(store, PATHS, expiry(keep=2, **STOPPED), GcOptions(quarantine=True, clock=clock))
    assert done.quarantine is not None
    run_undelete(store, PATHS, done.quarantine, UndeleteOptions(clock=clock, sleep=lambda _: None))
    clock.days(30)
    assert purge(store, PATHS, yes=True, clock=clock)
    found = check_journal(store, PATHS)
    assert found.whole, found.findings
    assert found.runs == 6


def test_a_listing_that_hides_runs_does_not_fork_the_chain() -> None:
    store = journal_of(4)
    died = planned_run(store, 4)
    hiding = Hiding(store, lambda path: "/journal/" in path)
    finish_open_runs(hiding, PATHS, hiding.list_dir(PATHS.journal).prefixes)
    write_run(hiding, 5)
    found = check_journal(store, PATHS)
    assert found.whole, found.findings
    assert (found.runs, found.open_runs) == (6, ())
    assert {entry.outcome for entry in read_journal(store, PATHS, died.name)} == {"gone"}


@pytest.mark.parametrize("late", ["end", "write", "begin"])
def test_two_maintainers_are_reported_and_both_collect(late: str) -> None:
    store = journal_of(3)
    first_one = planned_run(store, 3)
    if late == "begin":
        stale = copied(store)
        write_run(store, 4)
        for path in ("head.json",):
            store.put(PATHS.journal / path, stale.read(PATHS.journal / path))
    else:
        write_run(store, 4)  # it took the lease, and gave the first one its end
    objects = objects_of(3, 2)
    if late != "begin":
        first_one.write([(2, objects)], dict.fromkeys((one.path for one in objects), "deleted"))
    if late == "end":
        first_one.end({"deleted": 4})
    write_run(store, 5)
    found = check_journal(store, PATHS)
    assert not found.whole
    assert len(list(read_journal(store, PATHS))) == 2 * (0 + 1 + 2 + 2 + 2 + 2)
    write_run(store, 6)


@pytest.mark.parametrize("data", [None, b"", b'{"version":1,"run":"../x","digest":"","ended":0}'])
def test_without_head_runs_go_on_and_it_is_reported(data: bytes | None) -> None:
    store, clock = job_to_collect()
    head = PATHS.journal / "head.json"
    if data is None:
        store.delete_many([head])
    else:
        store.put(head, data)
    assert first(check_journal(store, PATHS)) == "head.json"
    run_orphans(store, clock)
    found = check_journal(store, PATHS)
    assert first(found).endswith("/plan.json")
    assert "head.json was missing" in found.findings[0].problem
    assert len(found.findings) == 1


def test_a_damaged_part_of_a_run_that_died_stops_no_collection() -> None:
    store, clock = job_to_collect()
    run = planned_run(store, 3, batches=3)
    part = PATHS.journal / run.name / "000002.json"
    store.put(part, b"{")
    run_orphans(store, clock)
    assert first(check_journal(store, PATHS)) == f"{run.name}/000002.json"


def test_requests_in_flight_when_a_run_died_are_no_finding_but_missing_outcomes_are() -> None:
    store = journal_of(2)
    run = planned_run(store, 2, batches=4)
    gap = copied(store)
    gap.delete_many([PATHS.journal / run.name / "000002.json"])
    assert check_journal(gap, PATHS).whole
    write_run(gap, 3)
    assert check_journal(gap, PATHS).whole
    last = objects_of(2, 4)
    run.write([(4, last)], dict.fromkeys((one.path for one in last), "deleted"))
    store.delete_many([PATHS.journal / run.name / "000002.json"])
    assert first(check_journal(store, PATHS)) == f"{run.name}/000002.json"


def test_a_run_in_progress_is_no_finding() -> None:
    store = journal_of(2)
    run = planned_run(store, 2)
    found = check_journal(store, PATHS)
    assert found.whole
    assert found.open_runs == (run.name,)
