"""The metadata tree of one job: written, read, proven, cleaned up, in both layouts."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from arroyo_dagster.errors import ConflictError, FormatError, InputError, ProtocolError
from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    BackingStore,
    Checkpoint,
    CheckpointState,
    Epoch,
    JobId,
    JobPaths,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    PipelineId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.metadata.backing_store import Published
from arroyo_dagster.state.model.sizes import OBJECT, SizeLimit
from arroyo_dagster.state.storage import store as object_store
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import (
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    LegacyCheckpoint,
    Manifest,
    encode_manifest,
    encode_pairs,
    encode_rows,
)
from tests.jobs import copied, listing, run_word_job, word_job
from tests.stores import Wrapper

T = TypeVar("T")

PATHS = JobPaths(JobId("j"), PipelineId("p"))
LEGACY = JobPaths(JobId("j"))
OP, G = OperatorId("op"), TableName("g")
DATA = encode_pairs([b"k"], [b"v"], GLOBAL_KEY_VALUE_SCHEMA, version=0)


def operator(
    store: ObjectStore, paths: JobPaths, epoch: int, carried: int = 2
) -> OperatorCheckpoint:
    """An operator that lists a file of this epoch and of the epochs before it."""
    files = tuple(
        StatePath(f"{paths.root}/data/{e}") for e in range(max(1, epoch - carried), epoch + 1)
    )
    store.put(files[-1], DATA)
    return OperatorCheckpoint(
        job=paths.job,
        operator=OP,
        epoch=Epoch(epoch),
        parallelism=2,
        tables={G: GlobalKeyedFiles(files=files)},
        configs={G: TableConfig(config=GlobalKeyedConfig(table=G))},
    )


def manifest_of(
    backend: ParquetBackend, epoch: int, base: Checkpoint | None, *, needs_commit: bool = False
) -> Manifest:
    assert backend.generation is not None
    assert backend.paths.pipeline is not None
    return Manifest(
        pipeline=backend.paths.pipeline,
        job=backend.paths.job,
        worker_generation=backend.generation,
        epoch=Epoch(epoch),
        min_epoch=Epoch(1),
        start_time_micros=1,
        finish_time_micros=2,
        needs_commit=needs_commit,
        operators=(operator(backend.store, backend.paths, epoch),),
        parent_ref=base.ref if base else None,
    )


@pytest.mark.parametrize("paths", [PATHS, LEGACY])
def test_a_backend_that_was_sent_to_another_process_is_of_the_same_layout(paths: JobPaths) -> None:
    backend = ParquetBackend(MemoryStore(), paths)
    assert isinstance(backend, BackingStore)
    assert type(pickle.loads(pickle.dumps(backend))) is type(backend) is not ParquetBackend


def started(store: ObjectStore) -> ParquetBackend:
    backend = ParquetBackend(store, PATHS)
    backend.start()
    return backend


def publish(backend: ParquetBackend, count: int) -> list[Published]:
    done: list[Published] = []
    base: Checkpoint | None = None
    for epoch in range(1, count + 1):
        done.append(backend.publish(manifest_of(backend, epoch, base)))
        base = backend.load(Epoch(epoch))
    return done


def write_legacy(store: ObjectStore, count: int) -> ParquetBackend:
    backend = ParquetBackend(store, LEGACY)
    for epoch in range(1, count + 1):
        backend.write_operator_checkpoint_metadata(operator(store, LEGACY, epoch))
        backend.write_checkpoint_metadata(
            LegacyCheckpoint(
                job=LEGACY.job,
                epoch=Epoch(epoch),
                min_epoch=Epoch(1),
                start_time_micros=0,
                finish_time_micros=0,
                operators=(OP,),
            )
        )
    return backend


# ---- reading and writing -------------------------------------------------------------------------


def test_a_legacy_epoch_without_its_checkpoint_metadata_does_not_exist() -> None:
    store = MemoryStore()
    backend = write_legacy(store, 2)
    backend.write_operator_checkpoint_metadata(operator(store, LEGACY, 3))
    assert backend.epochs() == [1, 2]


# ---- proving that an epoch can be restored -------------------------------------------------------


def test_a_file_of_another_table_is_found_before_anything_starts() -> None:
    store = MemoryStore()
    publish(started(store), 2)
    reader = ParquetBackend(store, PATHS)
    other = reader.load().paths[-1]
    store.put(other, encode_rows(pa.table({"a": [1]})))
    with pytest.raises(FormatError, match="not belong to its table: has the columns a") as caught:
        reader.prepare_checkpoint_load(Epoch(2))
    assert (caught.value.facts["table"], caught.value.facts["path"]) == (G, other)


def test_a_record_that_leads_out_of_its_job_is_refused() -> None:
    store = MemoryStore()
    publish(started(store), 1)
    record = PATHS.epoch_record(Epoch(1))
    store.put(
        record, store.read(record).replace(b'"checkpoint_ref":"p/j/', b'"checkpoint_ref":"p/k/')
    )
    with pytest.raises(ProtocolError, match="out of its job"):
        ParquetBackend(store, PATHS).load()


# ---- publishing ----------------------------------------------------------------------------------


def test_another_manifest_at_the_same_place_is_a_conflict_and_stays() -> None:
    store = MemoryStore()
    backend = started(store)
    manifest = manifest_of(backend, 1, None)
    ref = backend.publish(manifest).ref
    with pytest.raises(ConflictError, match="another object"):
        backend.publish(replace(manifest, finish_time_micros=99))
    assert store.read(ref) == encode_manifest(manifest)


def test_a_run_fenced_while_it_made_the_record_stops_before_it_commits() -> None:
    store = MemoryStore()
    old = started(store)
    manifest = manifest_of(old, 1, None, needs_commit=True)
    passed = iter([True, False])
    check = old.check_fence
    old.check_fence = lambda: None if next(passed) else check()  # type: ignore[method-assign]
    started(store)
    with pytest.raises(ConflictError, match="fenced"):
        old.publish(manifest)
    replayed = ParquetBackend(store, PATHS).start()
    assert replayed.replay_commit


def test_an_epoch_whose_parent_has_not_committed_is_not_published() -> None:
    store = MemoryStore()
    backend = started(store)
    backend.publish(manifest_of(backend, 1, None, needs_commit=True))
    base = backend.load()
    assert base.state is CheckpointState.COMMITTING
    with pytest.raises(ProtocolError, match="parent"):
        backend.publish(manifest_of(backend, 2, base))
    assert backend.epochs() == [1]
    backend.mark_committed(base)
    backend.mark_committed(base)
    assert backend.load().state is CheckpointState.READY
    backend.publish(manifest_of(backend, 2, base))


def test_only_a_started_writer_publishes_and_only_its_own() -> None:
    store = MemoryStore()
    backend = started(store)
    manifest = manifest_of(backend, 1, None)
    with pytest.raises(InputError, match="another job or worker generation"):
        started(store).publish(manifest)
    with pytest.raises(InputError, match="started"):
        ParquetBackend(store, PATHS, generation=manifest.worker_generation).publish(manifest)
    with pytest.raises(InputError, match="protocol layout only"):
        ParquetBackend(store, LEGACY).start()


def test_starts_take_numbers_without_gaps_even_where_the_fence_is_old() -> None:
    store = MemoryStore()
    assert [started(store).generation for _ in range(3)] == [1, 2, 3]
    store.delete_many([PATHS.current_generation])
    assert started(store).generation == 4


class _Calls(Wrapper):
    """A store where something happens just before the k-th call; it notes what is created."""

    def __init__(self, store: ObjectStore, at: int, then: Callable[[], object]) -> None:
        super().__init__(store)
        self.calls = 0
        self.created_at: dict[str, int] = {}
        self._at = at
        self._then = then

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        self.calls += 1
        if verb == "create":
            self.created_at[path] = self.calls
        if self.calls == self._at:
            self._then()
        return action()


def test_a_start_claims_no_epoch_that_a_newer_run_has_let_expire() -> None:
    """It has seen the manifest, and then no record: there is none any more."""
    unclaimed = MemoryStore()
    publish(started(unclaimed), 3)
    record = PATHS.epoch_record(Epoch(3))
    unclaimed.delete_many([record])

    def run(at: int) -> tuple[_Calls, MemoryStore]:
        store = copied(unclaimed)

        def newer_run() -> None:
            newer = ParquetBackend(store, PATHS)
            base = newer.start().restored
            for epoch in (4, 5):
                newer.publish(manifest_of(newer, epoch, base))
                base = newer.load(Epoch(epoch))
            newer.cleanup_checkpoint(Epoch(5))

        seen = _Calls(store, at, newer_run)
        with contextlib.suppress(ConflictError):
            started(seen)
        return seen, store

    claimed = run(0)[0].created_at[record]
    for at in range(1, claimed):
        seen, store = run(at)
        assert record not in seen.created_at, f"the newer run came before call {at} of {claimed}"
        assert ParquetBackend(store, PATHS).epochs() == [4, 5]


class _Dying(Wrapper):
    """A store that something happens to just before the fence is put; then its process may die."""

    def __init__(self, store: ObjectStore, then: Callable[[], object], *, dies: bool) -> None:
        super().__init__(store)
        self._then, self._dies, self._dead = then, dies, False

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if self._dead:
            raise Crash("it died")
        if verb != "put" or path != PATHS.current_generation:
            return action()
        self._then()
        self._dead = self._dies
        return action()


@pytest.mark.parametrize("dies", [False, True])
def test_a_start_that_stood_still_before_it_raised_the_fence_starts_nothing(dies: bool) -> None:
    """Newer runs have ended meanwhile, and gc has deleted the manifests of all but the last one."""
    store = MemoryStore()
    publish(started(store), 3)
    newer: list[ParquetBackend] = []

    def newer_runs() -> None:
        for epoch in () if newer else (4, 5, 6):
            newer.append(ParquetBackend(store, PATHS))
            base = newer[-1].start().restored
            newer[-1].publish(manifest_of(newer[-1], epoch, base))
        old = (PATHS.generation_manifest(WorkerGeneration(one)) for one in range(1, 5))
        store.delete_many(list(old))

    with pytest.raises(Crash if dies else ConflictError):
        started(_Dying(store, newer_runs, dies=dies))
    assert newer[-1].generation == 5
    if not dies:
        newer[-1].check_fence()
    after = ParquetBackend(store, PATHS).start()
    assert after.worker_generation == 6
    assert after.restored is not None
    assert after.restored.epoch == 6


# ---- cleaning up ---------------------------------------------------------------------------------


def kept_are_restorable(store: ObjectStore, paths: JobPaths, kept: range) -> None:
    reader = ParquetBackend(store, paths)
    for epoch in kept:
        assert reader.prepare_checkpoint_load(Epoch(epoch)).epoch == epoch


@pytest.mark.parametrize("mode", ["before", "after", "partial"])
@pytest.mark.parametrize("paths", [PATHS, LEGACY], ids=["protocol", "legacy"])
def test_crash_at_any_delete_is_completed_by_the_next_call(paths: JobPaths, mode: str) -> None:
    whole = MemoryStore()
    # In the legacy layout ten epochs before the newest stay whatever is asked for.
    newest, kept = (7, range(5, 8)) if paths is PATHS else (15, range(5, 16))
    if paths is PATHS:
        publish(started(whole), newest)
    else:
        write_legacy(whole, newest)
    done = copied(whole)
    asked = Epoch(5 if paths is PATHS else 14)
    plan = ParquetBackend(done, paths).cleanup_checkpoint(asked)
    assert plan.epochs == (1, 2, 3, 4)
    kept_are_restorable(done, paths, kept)
    assert ParquetBackend(done, paths).epochs() == [*kept]
    changes = 1
    while True:
        store = copied(whole)
        faulty = FaultInjecting(store, fail_at=changes, mode=mode, crash=True)  # type: ignore[arg-type]
        try:
            ParquetBackend(faulty, paths).cleanup_checkpoint(asked)
        except Crash:
            kept_are_restorable(store, paths, kept)
            ParquetBackend(store, paths).cleanup_checkpoint(asked)
            kept_are_restorable(store, paths, kept)
            assert set(listing(store)) == set(listing(done)), changes
            changes += 1
            continue
        break
    assert changes > 5


def test_nothing_is_deleted_while_a_kept_epoch_cannot_be_read_in_full() -> None:
    store = MemoryStore()
    write_legacy(store, 17)
    store.delete_many([LEGACY.operator_metadata(OP, Epoch(8))])
    before = listing(store)
    with pytest.raises(
        ProtocolError, match="epoch 8 is to be kept, but 1 of its objects are missing"
    ):
        ParquetBackend(store, LEGACY).cleanup_checkpoint(Epoch(17))
    assert listing(store) == before
    store = MemoryStore()
    publish(started(store), 7)
    ref = ParquetBackend(store, PATHS).load(Epoch(6)).ref
    store.put(ref, store.read(ref)[:-3])
    before = listing(store)
    with pytest.raises(FormatError):
        ParquetBackend(store, PATHS).cleanup_checkpoint(Epoch(5))
    assert listing(store) == before


def test_cleaning_up_newer_than_the_newest_deletes_nothing() -> None:
    store = MemoryStore()
    publish(started(store), 2)
    before = listing(store)
    with pytest.raises(ProtocolError, match="newer"):
        ParquetBackend(store, PATHS).cleanup_checkpoint(Epoch(3))
    assert listing(store) == before


def test_unreadable_manifest_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    options: dict[str, Any] = {"rows": 24, "rows_per_epoch": 4, "parallelism": 1}
    run_word_job(store, **options, max_epochs=2)
    small = SizeLimit("metadata object", 100)

    def limited(path: str) -> SizeLimit:
        return small if path.endswith("checkpoint-0000003/checkpoint-manifest.pb") else OBJECT

    monkeypatch.setattr(object_store, "size_limit", limited)
    with pytest.raises(FormatError, match="larger than the limit of a metadata object"):
        run_word_job(store, **options, max_epochs=1)
    assert ParquetBackend(store, word_job(store).paths).epochs() == [1, 2]
    monkeypatch.undo()
    run_word_job(store, **options, max_epochs=1)
    assert ParquetBackend(store, word_job(store).paths).epochs() == [2, 3]
