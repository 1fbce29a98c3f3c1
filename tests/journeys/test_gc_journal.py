"""The journal of gc: written ahead of each deletion, readable wherever a run was killed, and never
skipped where it cannot be read. A run that is missing or was changed is reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from arroyo_dagster import (
    GcOptions,
    HealthLimits,
    MemoryStore,
    ObjectStore,
    StatePath,
    run_gc,
    verify_job,
)
from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.state.operations.catalog.health import check_health
from arroyo_dagster.state.operations.gc.fate import FateState, fate_of_object
from arroyo_dagster.state.planning.verify.findings import Finding
from tests.faulty_stores import Crash, FaultInjecting
from tests.fleets import Written
from tests.gc_jobs import Clock, expiry, orphans, without_ours
from tests.internals import (
    JobDirectory,
    Pace,
    UndeleteOptions,
    list_runs,
    purge,
    read_journal,
    run_undelete,
)
from tests.jobs import copied
from tests.journals import PATHS, begin_run, lines_of, of_lines, write_run
from tests.stores import Wrapper

STOPPED = {str(PATHS.root): "stopped"}
DIRECTORY = PATHS.root / "generations/1/checkpoints/checkpoint-0000001/operator-x"


def lost_file(number: int) -> StatePath:
    return DIRECTORY / f"table-y-000-{number}"


def job(runs: int = 0) -> tuple[MemoryStore, Clock]:
    """A job with orphans; of its runs of gc each deleted two other files."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    Written(store, PATHS, start=clock.micros).epochs(3)
    for number in range(3):
        store.put(lost_file(number), b"lost")
    for number in range(runs):
        write_run(store, number)
    clock.days(30)
    return store, clock


def run_orphans(store: ObjectStore, clock: Clock, **options: Any) -> None:
    quick = Pace(sleep=lambda seconds: None)
    run_gc(store, PATHS, orphans(**STOPPED), GcOptions(clock=clock, pace=quick, **options))


def objects_of(store: ObjectStore) -> list[StatePath]:
    return [info.path for info in store.list(PATHS.journal)]


def findings(store: ObjectStore) -> list[Finding]:
    """What `health` says of the journal; `verify` says the same."""
    verified = verify_job(store, PATHS).verdict.findings
    of_verify = [one for one in verified if one.code.startswith("journal-")]
    limits, directory = HealthLimits(), JobDirectory([])
    (found,) = check_health(store, [PATHS], directory, limits)
    verdict = found.verdicts["journal_complete"]
    assert list(verdict.findings) == of_verify
    return of_verify


def said(store: ObjectStore) -> list[tuple[str, str]]:
    below = f"{PATHS.journal}/"
    return [(one.object.removeprefix(below), one.evidence) for one in findings(store)]


# ---- written ahead -------------------------------------------------------------------------------


class Witness(Wrapper):
    """Before each deletion, a store whose journal names the objects as not yet decided."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.deleted: set[StatePath] = set()

    def delete_many(self, paths: Any) -> Any:
        """Delete, and remember what the journal said before."""
        asked = [path for path in paths if "_arroyo_dagster/" not in path]
        open_now = {e.path for e in read_journal(self.inner, PATHS) if e.outcome == "unknown"}
        assert open_now.issuperset(asked)
        self.deleted |= set(asked)
        return self.inner.delete_many(paths)


@pytest.mark.parametrize("aside", [False, True])
def test_each_object_is_in_the_journal_before_it_is_deleted(aside: bool) -> None:
    store, clock = job()
    witness = Witness(store)
    run_orphans(witness, clock, quarantine=aside)
    assert {lost_file(number) for number in range(3)} <= witness.deleted
    outcomes = {entry.path: entry.outcome for entry in read_journal(store, PATHS)}
    assert outcomes == dict.fromkeys(witness.deleted, "moved" if aside else "deleted")
    (run,) = list_runs(store, PATHS)
    assert run.ended
    assert [path.parent for path in objects_of(store)] == [PATHS.journal], "one object per run"


@pytest.mark.parametrize("crash", [True, False], ids=["crash", "failure"])
@pytest.mark.parametrize("mode", ["before", "after", "partial"])
def test_a_run_that_was_stopped_anywhere_is_readable_and_ended_by_the_next(
    mode: Any, crash: bool
) -> None:
    start, clock = job(2)
    counted = FaultInjecting(copied(start, clock=clock, keep_times=True))
    run_orphans(counted, clock)
    before = set(without_ours(start))
    for at in range(1, counted.changes + 1):
        store = copied(start, clock=clock, keep_times=True)
        with contextlib.suppress(Crash, StorageError):
            run_orphans(FaultInjecting(store, fail_at=at, mode=mode, crash=crash), clock)
        assert findings(store) == [], at
        gone = before - set(without_ours(store))
        assert gone <= {entry.path for entry in read_journal(store, PATHS)}, at
        clock.seconds(120)
        run_orphans(store, clock)
        assert findings(store) == [], at
        assert all(run.ended for run in list_runs(store, PATHS)), at
        entries = list(read_journal(store, PATHS))
        assert not [entry for entry in entries if entry.outcome == "unknown"], at
        last = {entry.path: entry.outcome for entry in entries}
        assert {last[lost_file(number)] for number in range(3)} <= {"deleted", "gone"}, at
        assert {path.parent for path in objects_of(store)} == {PATHS.journal}, at


def test_every_run_that_changes_something_is_one_object() -> None:
    store, clock = job(2)
    quick = Pace(sleep=lambda seconds: None)
    options = GcOptions(quarantine=True, clock=clock, pace=quick)
    aside = run_gc(store, PATHS, expiry(keep=2, **STOPPED), options).quarantine
    assert aside is not None
    run_undelete(store, PATHS, aside, UndeleteOptions(clock=clock, sleep=lambda _: None))
    clock.days(30)
    assert purge(store, PATHS, yes=True, clock=clock)
    assert [run.kind for run in list_runs(store, PATHS)][2:] == ["expire", "undelete", "purge"]
    assert len(objects_of(store)) == 5
    assert findings(store) == []


def test_names_ascend_whatever_the_clocks_are() -> None:
    store, _ = job()
    names = [write_run(store, number) for number in (9, 4, 4, 2)]
    assert names == sorted(set(names))
    assert findings(store) == []


# ---- missing, changed, inserted ------------------------------------------------------------------


def damages(data: bytes) -> Iterator[tuple[bytes | None, str]]:
    yield None, "this run is missing"
    yield data[: len(data) // 2], "is damaged"
    yield b"", "is damaged"
    yield data[:-20] + bytes([data[-20] ^ 1]) + data[-19:], "is damaged"
    header, *others = lines_of(data)
    yield of_lines([{**header, "owner": "somebody else"}, *others]), "this run was changed"


def test_a_run_that_was_removed_or_changed_is_named() -> None:
    start, clock = job(4)
    names = [run.name for run in list_runs(start, PATHS)]
    for name in names[:-1]:
        path = PATHS.journal / f"{name}.json.gz"
        for data, evidence in damages(start.read(path)):
            store = copied(start, clock=clock, keep_times=True)
            store.delete_many([path]) if data is None else store.put(path, data)
            ((at, why),) = said(store)
            assert at == path.name
            assert evidence in why
            run_orphans(store, clock)  # gc goes on
            assert store.head(lost_file(0)) is None


def test_an_inserted_run_is_named() -> None:
    store, _ = job(4)
    names = [run.name for run in list_runs(store, PATHS)]
    path = PATHS.journal / f"{names[1]}x.json.gz"
    store.put(path, store.read(PATHS.journal / f"{names[3]}.json.gz"))
    ((at, evidence), *_) = said(store)
    assert at == path.name
    assert "does not follow this run" in evidence


def test_what_arrives_after_a_run_was_ended_stays_and_is_named() -> None:
    store, clock = job(1)
    zombie = begin_run(store, 1)
    zombie.write([(1, [])], {})
    run_orphans(store, clock)  # it took the lease, and ended the other run
    zombie.write([(2, [])], {})
    run_orphans(store, clock)
    ((at, evidence),) = said(store)
    assert at == f"{zombie.name}/000002.json.gz"
    assert "two processes" in evidence


# ---- records of another form ---------------------------------------------------------------------

OTHERS: dict[str, bytes] = {
    "head.json": b'{"version":1,"run":"x","digest":"0","ended":true}',
    "00001764328872000-x--00001764328872001-y.parquet": b"PAR1",
    "01764328872000000-5d41402abc4b/plan.json": b'{"version":1}',
    "01964328872000000-5d41402abc4b.json.gz": b"",
    "01764328872000000-5d41402abc4b/000001.json.gz": b"",
    "notes.txt": b"of a person",
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("act", ["gc", "undelete", "purge"])
def test_a_record_of_another_form_stops_what_deletes_and_is_named(name: str, act: str) -> None:
    store, clock = job()
    quick = Pace(sleep=lambda seconds: None)
    aside = run_gc(
        store, PATHS, expiry(2, **STOPPED), GcOptions(quarantine=True, clock=clock, pace=quick)
    ).quarantine
    assert aside is not None
    clock.days(9)
    path = PATHS.journal / name
    store.put(path, OTHERS[name])
    calls: dict[str, Callable[[], object]] = {
        "gc": lambda: run_orphans(store, clock),
        "undelete": lambda: run_undelete(store, PATHS, aside, UndeleteOptions(clock=clock)),
        "purge": lambda: purge(store, PATHS, yes=True, clock=clock),
    }
    before = {info.path: info.etag for info in store.list(PATHS.root) if "leases" not in info.path}
    with pytest.raises(FormatError) as caught:
        calls[act]()
    assert str(caught.value.facts["path"]).startswith(str(path).rpartition("/")[0])
    assert caught.value.next_step
    after = {info.path: info.etag for info in store.list(PATHS.root) if "leases" not in info.path}
    assert after.keys() - before.keys() <= {PATHS.job_pins}
    assert all(after[one] == before[one] for one in before if one != PATHS.job_pins)
    assert [one.code for one in findings(store)] == ["journal-unreadable"]


def test_a_damaged_part_of_a_killed_run_stops_gc_and_is_named() -> None:
    store, clock = job(1)
    run = begin_run(store, 1)
    run.write([(1, []), (2, [])], {})
    part = PATHS.journal / run.name / "000002.json.gz"
    whole = store.read(part)
    store.put(part, whole[:-9])
    before = without_ours(store)
    with pytest.raises(FormatError) as caught:
        run_orphans(store, clock)
    assert caught.value.facts["path"] == part
    assert without_ours(store) == before
    assert [at for at, _ in said(store)] == [f"{run.name}/{part.name}"]
    store.put(part, whole)
    run_orphans(store, clock)
    assert findings(store) == []


# ---- kept for ever, or for some days -------------------------------------------------------------


def test_runs_are_kept_for_ever_unless_their_age_is_limited() -> None:
    store, clock = job(3)
    old = [run.name for run in list_runs(store, PATHS)]
    run_orphans(store, clock)
    assert [run.name for run in list_runs(store, PATHS)][:3] == old
    assert fate_of_object(store, PATHS, lost_file(0), orphans()).state is FateState.DELETED
    clock.days(30)
    store.put(lost_file(8), b"lost")
    clock.days(30)
    run_orphans(store, clock, journal_micros=90 * 86_400_000_000)
    assert list_runs(store, PATHS)[0].name not in old
    assert findings(store) == []
    # What is removed by hand is reported all the same.
    store.put(lost_file(9), b"lost")
    clock.days(30)
    run_orphans(store, clock)
    assert findings(store) == []
    store.delete_many([PATHS.journal / f"{list_runs(store, PATHS)[1].name}.json.gz"])
    assert len(findings(store)) == 1


def test_old_runs_that_were_deleted_in_part_are_no_finding() -> None:
    start, clock = job(4)
    counted = FaultInjecting(copied(start, clock=clock, keep_times=True))
    run_orphans(counted, clock, journal_micros=1)
    for at in range(1, counted.changes + 1):
        store = copied(start, clock=clock, keep_times=True)
        with contextlib.suppress(Crash):
            faulty = FaultInjecting(store, fail_at=at, mode="partial", crash=True)
            run_orphans(faulty, clock, journal_micros=1)
        assert findings(store) == [], at
        clock.seconds(120)
        run_orphans(store, clock)
        assert findings(store) == [], at
