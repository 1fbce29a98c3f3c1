"""What a collector refuses, with the evidence, and what it must not take for garbage."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    StatePath,
    TableName,
    WorkerGeneration,
    WriteProtected,
    plan_gc,
    run_gc,
)
from arroyo_dagster.errors import ConflictError, FormatError, InputError, ProtocolError
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.formats import GRACE_FLOOR_MICROS, GlobalKeyedFiles, metadata
from tests.gc_jobs import (
    PATHS,
    Clock,
    begun,
    data_files,
    dead,
    directory,
    expiry,
    orphans,
    reachable,
    whole,
    without_ours,
)
from tests.internals import AssumedJobs, JobDirectory, Pace, read_roots
from tests.stores import Listing, ObjectInfo, Wrapper

QUICK = Pace(sleep=lambda seconds: None)
SMALL: dict[str, Any] = {"sinks": 0, "parallelism": 1}


def arroyo(
    paths: JobPaths, epochs: int, clock: Clock, store: MemoryStore | None = None, **options: Any
) -> tuple[MemoryStore, Written]:
    """A job of Arroyo's with so many epochs, a second apart."""
    found = store or MemoryStore(clock=clock)
    job = Written(found, paths, start=clock.micros, **options)
    for _ in range(epochs):
        clock.micros += 1_000_000
        job.write()
    return found, job


def planned(store: Any, paths: JobPaths, asked: GcRequest, clock: Clock) -> Any:
    return plan_gc(WriteProtected(store), paths, asked, now_micros=clock())


def refused(store: Any, paths: JobPaths, asked: GcRequest, clock: Clock, match: str) -> None:
    """Nothing is planned and nothing goes, and the error says why and what to do."""
    whole_store = getattr(store, "inner", store)
    before = without_ours(whole_store)
    for act in (
        lambda: planned(store, paths, asked, clock),
        lambda: run_gc(store, paths, asked, GcOptions(clock=clock, pace=QUICK)),
    ):
        kinds = (ProtocolError, FormatError, InputError, ConflictError)
        with pytest.raises(kinds, match=match) as found:
            act()
        assert found.value.next_step
    assert without_ours(whole_store) == before


STOPPED = {"p/main": "stopped", "j": "stopped"}
PROTOCOL = protocol_job("p")
LEGACY = legacy_job("j")


# ---- lost metadata -------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [0, 1])
def test_what_lost_operator_metadata_of_the_newest_epochs_may_have_listed_stays(
    behind: int,
) -> None:
    """A rebuild needs it; an older epoch may be one that a cleanup has begun to remove."""
    clock = Clock()
    store, _ = arroyo(LEGACY, 8, clock)
    clock.days(30)
    lost = LEGACY.operator_metadata(OPERATOR, Epoch(8 - behind))
    store.delete_many([lost])
    for asked in (orphans(**STOPPED), expiry(2, **STOPPED)):
        refused(store, LEGACY, asked, clock, "missing")


@pytest.mark.parametrize("record", [False, True], ids=["manifest", "manifest and record"])
def test_what_a_lost_manifest_of_the_newest_epoch_may_have_listed_stays(record: bool) -> None:
    clock = Clock()
    store, _ = arroyo(PROTOCOL, 8, clock)
    clock.days(30)
    newest = ParquetBackend(store, PROTOCOL).load()
    store.delete_many([newest.ref])
    if record:
        store.delete_many([PROTOCOL.epoch_record(Epoch(8))])
    for asked in (orphans(**STOPPED), expiry(2, **STOPPED)):
        refused(store, PROTOCOL, asked, clock, "missing|has no manifest")


# ---- the condition of a job ----------------------------------------------------------------------


@pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
def test_a_job_of_arroyo_s_in_unknown_condition_is_not_touched(paths: JobPaths) -> None:
    clock = Clock()
    store, _ = arroyo(paths, 15, clock)
    clock.days(5)
    for asked in (expiry(2), orphans()):
        refused(store, paths, asked, clock, "unknown: no job-status source")
    said = {str(paths.root): "Recovering"}
    refused(store, paths, expiry(2, **said), clock, "changing its state")
    refused(store, paths, orphans(**said), clock, "changing its state")
    refused(
        store, paths, expiry(2, **{str(paths.root): "running"}), clock, "Arroyo expires them itself"
    )
    refused(
        store,
        paths,
        expiry(2, **{str(paths.root): "gone"}),
        clock,
        "reports that its pipeline is gone",
    )


def test_a_job_that_starts_while_it_is_collected_stops_the_collection(clock: Clock) -> None:
    store, _ = arroyo(PROTOCOL, 8, clock)
    words = iter(["stopped"] * 3 + ["running"] * 9)

    class Changing:
        source = "the controller"

        def look_up(self, jobs: Any, *, checkpoints: bool = False) -> Any:
            word = next(words)
            return directory(**{"p/main": word}).sources[0].look_up(jobs)

    asked = expiry(2)
    asked = replace(asked, directory=type(asked.directory)([Changing()]))
    with pytest.raises(ProtocolError, match="is now running"):
        run_gc(store, PROTOCOL, asked, GcOptions(clock=clock, pace=QUICK))
    whole(store, PROTOCOL, 7, 8)
    assert ParquetBackend(store, PROTOCOL).epochs() == [1, 2, 3, 4, 5, 6, 7, 8]


# ---- what cannot be read, or does not add up -----------------------------------------------------


def garble(store: MemoryStore, path: StatePath) -> None:
    store.put(path, b"\xff\xff\xff")


@pytest.mark.parametrize("epoch", [2, 5])
def test_metadata_that_does_not_decode_is_refused_whether_it_expires_or_stays(epoch: int) -> None:
    clock = Clock()
    store = begun(5, clock, **SMALL)
    garble(store, ParquetBackend(store, PATHS).load_checkpoint_metadata(Epoch(epoch)).ref)
    for asked in (expiry(2), orphans()):
        refused(store, PATHS, asked, clock, "does not match its format")


@pytest.mark.parametrize("number", [2, 14])
def test_operator_metadata_that_does_not_decode_is_refused(number: int, clock: Clock) -> None:
    store, _ = arroyo(LEGACY, 15, clock)
    garble(store, LEGACY.operator_metadata(OPERATOR, Epoch(number)))
    for asked in (expiry(2, **STOPPED), orphans(**STOPPED)):
        refused(store, LEGACY, asked, clock, "does not match its format")


def test_a_newer_version_is_refused(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    path = PATHS.epoch_record(Epoch(2))
    fields = json.loads(store.read(path)) | {"version": 2}
    store.put(path, json.dumps(fields).encode())
    refused(store, PATHS, expiry(2), clock, "version 2")


class Cut(Wrapper):
    """A store whose listings end early, as one behind a broken proxy: 200, and garbage."""

    def __init__(self, store: MemoryStore, after: int) -> None:
        super().__init__(store)
        self._after = after

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        found = [*self.inner.list(prefix, start_after=start_after)]
        return iter(found[: self._after])

    def list_dir(self, prefix: str = "") -> Listing:
        found = self.inner.list_dir(prefix)
        return Listing(objects=found.objects[: self._after], prefixes=found.prefixes[: self._after])


@pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_a_listing_that_is_cut_short_is_refused(paths: JobPaths, after: int, clock: Clock) -> None:
    store, _ = arroyo(paths, 15, clock)
    said = {str(paths.root): "stopped"}
    clock.days(5)
    for asked in (expiry(2, **said), orphans(**said)):
        refused(Cut(store, after), paths, asked, clock, r"gc refused:|leased by")


def test_two_deployments_below_one_url_are_refused(clock: Clock) -> None:
    store, _ = arroyo(LEGACY, 15, clock)
    arroyo(protocol_job("j", "inner"), 2, clock, store)
    refused(store, LEGACY, expiry(2, **STOPPED), clock, "two deployments overlap")


@pytest.mark.parametrize("hostile", ["../x/table-a-000", "/etc/passwd", "p/main/%2e%2e/table-a"])
def test_a_hostile_reference_is_refused(hostile: str, clock: Clock) -> None:
    store, _ = arroyo(PROTOCOL, 8, clock)
    ref = PROTOCOL.manifest(WorkerGeneration(1), Epoch(2))
    path = PROTOCOL.data_file(OPERATOR, TABLE, 0, Epoch(2), WorkerGeneration(1), attempt="x")
    data = store.read(ref)
    assert len(hostile) < len(path)
    evil = hostile + "x" * (len(path) - len(hostile))
    store.put(ref, data.replace(path.encode(), evil.encode()))
    refused(store, PROTOCOL, expiry(2, **STOPPED), clock, "does not match its format")


# ---- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [-1, 0, GRACE_FLOOR_MICROS - 1])
def test_a_grace_period_in_the_future_or_below_the_floor_is_refused(grace: int) -> None:
    with pytest.raises(InputError, match=r"future|below an hour:"):
        orphans(grace)
    with pytest.raises(InputError):
        expiry(micros=-1)


def test_a_collector_whose_clock_is_not_the_store_s_refuses(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    ahead = Clock()
    ahead.micros = clock.micros + 5 * 86_400_000_000
    with pytest.raises(ProtocolError, match="clocks of the store and of this machine"):
        run_gc(store, PATHS, orphans(), GcOptions(clock=ahead))


# ---- what is not garbage -------------------------------------------------------------------------


def test_names_used_again_after_ignore_state_are_never_taken(clock: Clock) -> None:
    """The new run writes into old directories, under old names, while it runs."""
    store, _ = arroyo(LEGACY, 8, clock)
    second = Written(store, LEGACY, start=clock.micros, keep=12)
    for number in range(9, 21):
        clock.micros += 1_000_000
        second.epoch = Epoch(number - 9)  # the worker counts from 1 again…
        legacy_path = LEGACY.data_file(OPERATOR, TABLE, 0, Epoch(number - 8), None, attempt="x")
        store.put(legacy_path, b"written again")
        second._listed = [*second._listed, legacy_path]
        second.epoch = Epoch(number - 1)  # …the coordinator does not
        second._files = False
        listed = second._listed
        second.write()
        second._listed = listed
        ref = LEGACY.operator_metadata(OPERATOR, Epoch(number))
        operator = metadata.decode_operator(store.read(ref), ref)
        tables = {TABLE: GlobalKeyedFiles(files=tuple(listed))}
        store.put(ref, metadata.encode_operator(replace(operator, tables=tables)))
    leftover = LEGACY.data_file(OPERATOR, TABLE, 7, Epoch(13), None, attempt="x")
    store.put(leftover, b"of the old run, in a directory that the new one will reach")
    clock.days(30)
    store.put(LEGACY.legacy_metadata(Epoch(20)), store.read(LEGACY.legacy_metadata(Epoch(20))))
    plan = planned(store, LEGACY, orphans(j="running"), clock)
    assert plan.objects == 0
    assert reachable(store, LEGACY) <= data_files(store, LEGACY)
    stopped = planned(store, LEGACY, expiry(2, **STOPPED), clock)
    kept = read_roots(store, LEGACY)
    staying = {p for one in kept.epochs if one.epoch not in stopped.epochs for p in one.files.paths}
    assert not staying & set(stopped.data.paths)


def test_while_a_job_runs_whose_epochs_nobody_names_nothing_goes_that_it_may_write_again() -> None:
    """It may have ignored its state, and be about to write its first names once more."""
    clock = Clock()
    store, job = arroyo(LEGACY, 8, clock)
    lost = LEGACY.data_file(OPERATOR, TABLE, 7, Epoch(2), None, attempt="x")
    store.put(lost, b"of an attempt that died")
    clock.days(30)
    job._start = clock.micros
    job.epochs(1)
    assert planned(store, LEGACY, orphans(j="running"), clock).objects == 0
    for newest, expected in ((9, [lost]), (8, [lost]), (7, [])):
        said: Any = {"j": {"condition": "running", "epoch": newest}}
        asked = replace(orphans(), directory=JobDirectory([AssumedJobs(said)]))
        assert [*planned(store, LEGACY, asked, clock).data.paths] == expected


def test_jobs_whose_names_begin_alike_do_not_touch_each_other(clock: Clock) -> None:
    store, _ = arroyo(legacy_job("job_1"), 15, clock)
    arroyo(legacy_job("job_10"), 15, clock, store)
    arroyo(protocol_job("pl", "job_1"), 6, clock, store)
    arroyo(protocol_job("pl", "job_10"), 6, clock, store)
    clock.days(9)
    before = without_ours(store)
    for paths in (legacy_job("job_1"), protocol_job("pl", "job_1")):
        said = {str(paths.root): "stopped"}
        assert planned(store, paths, orphans(**said), clock).objects == 0
        assert run_gc(store, paths, expiry(2, **said), GcOptions(clock=clock, pace=QUICK)).done
        dying = replace(dead(), directory=directory(**{str(paths.root): "gone"}))
        assert run_gc(store, paths, dying, GcOptions(clock=clock, pace=QUICK)).done
        assert not data_files(store, paths)
    after = without_ours(store)
    others = {p: d for p, d in before.items() if p.startswith(("job_10/", "pl/job_10/"))}
    assert after == others


def test_names_that_are_percent_encoded_in_the_store_are_the_same_files(clock: Clock) -> None:
    store = begun(4, clock, **SMALL)
    operator = OperatorId("SessionWindow<30s>")
    lost = PATHS.data_file(
        operator, TableName("s"), 0, Epoch(2), WorkerGeneration(1), attempt="lost"
    )
    store.put(lost, b"x")
    assert "%3C" not in lost
    ref = ParquetBackend(store, PATHS).load(Epoch(3)).ref
    listed = PATHS.data_file(
        operator, TableName("s"), 0, Epoch(3), WorkerGeneration(1), attempt="l"
    )
    store.put(listed, b"x")
    manifest = metadata.decode_manifest(store.read(ref), ref)
    tables = {**manifest.operators[0].tables, TableName("s"): GlobalKeyedFiles(files=(listed,))}
    changed = replace(manifest.operators[0], tables=tables)
    store.put(
        ref,
        metadata.encode_manifest(replace(manifest, operators=(changed, *manifest.operators[1:]))),
    )
    clock.days(9)
    store.put(ref, store.read(ref))
    head = ParquetBackend(store, PATHS).load(Epoch(4))
    fresh = metadata.decode_manifest(store.read(head.ref), head.ref)
    now = replace(fresh, start_time_micros=clock(), finish_time_micros=clock())
    store.put(head.ref, metadata.encode_manifest(now))
    record = PATHS.epoch_record(Epoch(4))
    store.put(record, store.read(record))
    plan = planned(store, PATHS, orphans(), clock)
    assert list(plan.data.paths) == [lost]
    run_gc(store, PATHS, orphans(), GcOptions(clock=clock, pace=QUICK))
    assert store.head(lost) is None
    assert store.head(listed) is not None
