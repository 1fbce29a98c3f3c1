"""The purge of a key: nothing that a job stores holds it afterwards, the job continues without it,
and nothing is deleted that an epoch, a pin or another job needs."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import ConflictError, InputError, StorageError
from arroyo_dagster.state.metadata import lease as leases
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.garbage import PlanKind, Retention
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.job_facts import CheckpointFacts, JobCondition
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.model.surgery.edits import KeyDeletion
from arroyo_dagster.state.model.surgery.purge import PurgeOutcome
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.job import run_compaction
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.journal import read_journal
from arroyo_dagster.state.operations.gc.pins import pin_epoch, read_pins, unpin_epochs
from arroyo_dagster.state.operations.gc.plan import GcRequest
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines
from arroyo_dagster.state.operations.surgery.execute import EditOptions, run_edit
from arroyo_dagster.state.operations.surgery.find_key import QUARANTINE, UNLISTED, find_key
from arroyo_dagster.state.operations.surgery.managed.execute import run_managed_edit
from arroyo_dagster.state.operations.surgery.purge import plan_purge, run_purge
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.runtime.in_process import LocalRun, run_pipeline
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage import MemoryStore, ObjectStore, configure, open_store
from arroyo_dagster.state.storage.wrappers import WriteProtected
from tests.arroyo_jobs import Telling, facts_of, stopped
from tests.faulty_stores import Crash, FaultInjecting
from tests.jobs import copied, listing, state_of, word_job, written_by_word_job
from tests.surgery_jobs import SurgeryJob, surgery_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")

KEY = KeyDeletion(values=("d",))
NOBODY = JobDirectory()
OPTIONS: dict[str, Any] = {"rows": 60, "rows_per_epoch": 2, "keep_epochs": None}
SMALL: dict[str, Any] = {**OPTIONS, "rows": 30, "rows_per_epoch": 6, "parallelism": 1}


def job(store: ObjectStore, layout: Layout = Layout.PROTOCOL, **options: Any) -> Pipeline:
    made = word_job(store, **{**OPTIONS, **options})
    made.layout = layout
    return made


def written(epochs: int = 8, layout: Layout = Layout.PROTOCOL, **options: Any) -> MemoryStore:
    return written_by_word_job(max_epochs=epochs, layout=layout, **{**OPTIONS, **options})


def purge(store: ObjectStore, pipeline: Pipeline, **options: Any) -> PurgeOutcome:
    chosen = EditOptions(**{"sleep": lambda _: None, **options})
    return run_purge(store, pipeline.paths, NOBODY, KEY, chosen)


def places(store: ObjectStore, pipeline: Pipeline) -> set[str]:
    return {one.place for one in find_key(store, pipeline.paths, KEY.values).found}


def holds(store: ObjectStore, word: bytes) -> list[StatePath]:
    """The objects with the word `d` as a stored text, read without our reader."""
    import io

    import pyarrow.parquet as pq

    found = []
    for info in store.list():
        if "/table-" not in info.path and "/quarantine/" not in info.path:
            continue
        with contextlib.suppress(Exception):
            rows = pq.read_table(io.BytesIO(store.read(info.path)))
            for column in rows.columns:
                values = column.to_pylist()
                texts = (one.encode() if isinstance(one, str) else one for one in values)
                if any(isinstance(one, bytes) and one.endswith(word) for one in texts):
                    found.append(info.path)
                    break
    return found


def test_nothing_holds_the_key_afterwards_and_the_certificate_names_every_object() -> None:
    store = written(merge_files_after=100)
    pipeline = job(store, merge_files_after=100)
    before = state_of(store, pipeline)
    was = listing(store)
    plan = plan_purge(WriteProtected(store), pipeline.paths, NOBODY, KEY)
    assert listing(store) == was
    assert {one.path for one in plan.objects} == set(holds(store, b"d"))
    assert (plan.expires, plan.keep_from, plan.settles) == (tuple(range(1, 9)), 9, True)
    assert {(one.operator, one.epoch) for one in plan.delivered} == {
        ("out", epoch) for epoch in range(1, 9)
    }
    outcome = purge(store, pipeline, approved=plan.digest)
    assert outcome.done
    assert outcome.plan == plan
    assert set(outcome.deleted) == {one.path for one in plan.objects}
    assert outcome.remaining == ()
    assert holds(store, b"d") == []
    assert not places(store, pipeline)
    assert ParquetBackend(store, pipeline.paths).every_epoch() == [9, 10]
    assert read_pins(store, pipeline.paths).pinned == frozenset()
    logged = {
        one.path: one.outcome
        for one in read_journal(store, pipeline.paths)
        if one.run in outcome.journal_runs
    }
    assert {logged[path] for path in outcome.deleted} == {"deleted"}
    after = state_of(store, pipeline)
    for operator, table in (("count", "counts"), ("keep", "rows")):
        stays = {
            key: value
            for key, value in before[operator][table].items()
            if (key if operator == "count" else key[0]) != "d"
        }
        assert after[operator][table] == stays
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    run_pipeline(pipeline, store)
    assert verify_job(store, pipeline.paths).verdict.findings == ()


def test_quarantine_and_unlisted_files_are_searched_and_emptied() -> None:
    """Also: `find-key` names rows in quarantine."""
    store = written(merge_files_after=2)
    pipeline = job(store, merge_files_after=2)
    expire = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=3))
    run_gc(store, pipeline.paths, expire, GcOptions(quarantine=True))
    found = find_key(store, pipeline.paths, KEY.values)
    aside = [one for one in found.found if one.place == QUARANTINE]
    assert aside
    assert all(one.rows and not one.epochs and "/quarantine/" in one.path for one in aside)
    _, moved = list_quarantines(store, pipeline.paths)[0]
    assert {one.path for one in aside} <= {one.copy for one in moved}
    held = next(one for one in found.found if one.place == "epochs")
    lost = StatePath(f"{held.path}-again")
    store.copy(held.path, lost)
    assert places(store, pipeline) == {"epochs", UNLISTED, QUARANTINE}
    outcome = purge(store, pipeline)
    assert len(outcome.plan.quarantines) == 1
    assert list_quarantines(store, pipeline.paths) == []
    assert lost in outcome.deleted
    assert outcome.remaining == ()
    assert holds(store, b"d") == []
    assert verify_job(store, pipeline.paths).verdict.findings == ()


def test_files_of_a_table_that_vanishes_with_its_last_rows_are_found_all_the_same() -> None:
    options: dict[str, Any] = {"letters": "d", "retention_micros": 600_000_000}
    store = written(**options)
    pipeline = job(store, **options)
    found = find_key(store, pipeline.paths, KEY.values).found
    held = next(one for one in found if one.table == "rows")
    lost = StatePath(f"{held.path}-again")
    store.copy(held.path, lost)
    outcome = purge(store, pipeline)
    newest = ParquetBackend(store, pipeline.paths).load()
    assert [one.operator for one in newest.operators if "rows" in one.tables] == []
    assert lost in outcome.deleted
    assert (outcome.remaining, holds(store, b"d")) == ((), [])
    assert verify_job(store, pipeline.paths).verdict.findings == ()
    run_pipeline(job(store, **options), store, max_epochs=1)
    assert verify_job(store, pipeline.paths).verdict.findings == ()


def test_older_epochs_are_purged_of_a_key_that_no_table_has_any_more() -> None:
    """The edit has emptied the only tables with such a key; a purge was cut off behind it."""
    made = surgery_job(Layout.PROTOCOL, epochs=3)
    edit, directory = KeyDeletion(values=("k1",)), stopped(made.paths)
    newest = ParquetBackend(made.store, made.paths).load()
    made.files = {key: [] for key in made.files}
    made.configs = {}
    for _ in range(2):
        made.write({})
    assert newest.operators != ParquetBackend(made.store, made.paths).load().operators
    plan = plan_purge(made.store, made.paths, directory, edit)
    assert (plan.why_not, plan.edit.empty, plan.expires) == (None, True, (1, 2, 3))
    options = EditOptions(quiet_seconds=0.0, sleep=lambda _: None)
    outcome = run_purge(made.store, made.paths, directory, edit, options)
    assert (outcome.remaining, holds(made.store, b"k1")) == ((), [])


def test_earlier_edits_and_waiting_compactions_are_given_up() -> None:
    store = MemoryStore()
    pipeline = job(store, merge_files_after=100)
    alive = LocalRun.start(pipeline, store)
    for _ in range(6):
        alive.step()
    settings = CompactionSettings(policy=CompactionPolicy.FULL, min_files=2)
    assert run_compaction(store, pipeline.paths, settings).published == "record"
    options = EditOptions(sleep=lambda _: None)
    run_managed_edit(store, pipeline.paths, stopped(pipeline.paths), KEY, options)
    plan = plan_purge(store, pipeline.paths, NOBODY, KEY)
    assert plan.edit.empty
    assert plan.releases == (6,)
    outcome = purge(store, pipeline)
    assert (outcome.edit, outcome.remaining) == (None, ())
    assert holds(store, b"d") == []
    run_pipeline(pipeline, store, max_epochs=1)
    assert verify_job(store, pipeline.paths).verdict.findings == ()


def test_a_purge_is_done_once() -> None:
    store = written()
    pipeline = job(store)
    purge(store, pipeline)
    assert plan_purge(store, pipeline.paths, NOBODY, KEY).empty
    was = {path: etag for path, etag in listing(store).items() if "/leases/" not in path}
    assert not purge(store, pipeline).done
    assert {path: etag for path, etag in listing(store).items() if "/leases/" not in path} == was


# ---- what is needed stays ------------------------------------------------------------------------


def test_a_pinned_epoch_with_the_key_is_refused_and_one_without_it_stays() -> None:
    store = written()
    pipeline = job(store)
    pin_epoch(store, pipeline.paths, Epoch(6), reason="audit", sleep=lambda _: None)
    was = listing(store)
    plan = plan_purge(store, pipeline.paths, NOBODY, KEY)
    assert plan.why_not is not None
    assert "epoch 6 is pinned by arroyo-state pin (audit)" in plan.why_not
    with pytest.raises(InputError, match="cannot be purged now: epoch 6 is pinned"):
        purge(store, pipeline)
    changed = {path for path, etag in listing(store).items() if was.get(path) != etag}
    assert all("/leases/" in path for path in changed)
    unpin_epochs(store, pipeline.paths, [Epoch(6)])
    assert purge(store, pipeline).remaining == ()


def test_a_running_job_is_refused() -> None:
    store = written()
    pipeline = job(store)
    LocalRun.start(job(store), store).step()
    with pytest.raises(InputError, match="may be alive"):
        purge(store, pipeline)
    assert places(store, pipeline) == {"epochs"}


def test_another_plan_than_the_approved_one_and_a_named_operator_are_refused() -> None:
    store = written()
    pipeline = job(store)
    was = places(store, pipeline)
    with pytest.raises(ConflictError, match="review the new plan"):
        purge(store, pipeline, approved="0" * 32)
    named = KeyDeletion(values=("d",), operator=OperatorId("count"))
    with pytest.raises(InputError, match="from all operators"):
        plan_purge(store, pipeline.paths, NOBODY, named)
    assert places(store, pipeline) == was


def test_epochs_that_a_legacy_start_may_need_are_refused_until_later_ones_exist() -> None:
    store = written(layout=Layout.LEGACY)
    pipeline = job(store, Layout.LEGACY)
    with pytest.raises(InputError, match="purge once epoch 19 exists"):
        purge(store, pipeline)
    assert ParquetBackend(store, pipeline.paths).load().epoch == 8


@pytest.mark.parametrize("layout", list(Layout), ids=[one.value for one in Layout])
def test_an_arroyo_job_is_purged_of_what_recovery_does_not_need(layout: Layout) -> None:
    made = surgery_job(layout, epochs=3)
    edit, directory = KeyDeletion(values=("k1",)), stopped(made.paths)
    options = EditOptions(quiet_seconds=0.0, sleep=lambda _: None)
    plan = plan_purge(made.store, made.paths, directory, edit)
    assert plan.why_not is not None
    assert "a start may need it" in plan.why_not
    was = listing(made.store)
    with pytest.raises(InputError, match="a start may need it"):
        run_purge(made.store, made.paths, directory, edit, options)
    changed = {path for path, etag in listing(made.store).items() if was.get(path) != etag}
    assert all("/leases/" in path for path in changed)
    unknown = plan_purge(made.store, made.paths, NOBODY, edit)
    assert unknown.why_not is not None
    assert "unknown" in unknown.why_not


@pytest.mark.parametrize("layout", list(Layout), ids=[one.value for one in Layout])
def test_an_arroyo_job_is_purged_once_later_epochs_exist(layout: Layout) -> None:
    made = surgery_job(layout, epochs=3)
    edit, directory = KeyDeletion(values=("k1",)), stopped(made.paths)
    options = EditOptions(quiet_seconds=0.0, sleep=lambda _: None)
    run_edit(made.store, made.paths, directory, edit, options)
    edited = ParquetBackend(made.store, made.paths).load()
    made.files = {
        (str(one.operator), str(name)): list(files.files)
        for one in edited.operators
        for name, files in one.tables.items()
        if isinstance(files, ExpiringTimeKeyFiles)
    }
    for _ in range(12 if layout is Layout.LEGACY else 2):
        made.write({})
    plan = plan_purge(made.store, made.paths, directory, edit)
    assert (plan.why_not, plan.edit.empty) == (None, True)
    assert plan.expires == (1, 2)
    assert plan.sinks == {"sink_6": ("/out/job_x.json",)}
    outcome = run_purge(made.store, made.paths, directory, edit, options)
    assert outcome.remaining == ()
    assert holds(made.store, b"k1") == []
    verdict = verify_job(made.store, made.paths).verdict
    assert verdict.errors == ()
    assert min(ParquetBackend(made.store, made.paths).every_epoch()) == 3


# ---- Arroyo's own database -----------------------------------------------------------------------


def purgeable(layout: Layout) -> tuple[SurgeryJob, KeyDeletion]:
    """An Arroyo job whose newest epochs no longer hold the key; epochs 1 and 2 do."""
    made = surgery_job(layout, epochs=3)
    edit = KeyDeletion(values=("k1",))
    options = EditOptions(quiet_seconds=0.0, sleep=lambda _: None)
    run_edit(made.store, made.paths, stopped(made.paths), edit, options)
    made.start()
    for _ in range(12 if layout is Layout.LEGACY else 2):
        made.write({})
    return made, edit


def rows_of(*epochs: int) -> tuple[CheckpointFacts, ...]:
    return tuple(CheckpointFacts(epoch=Epoch(one), ready=True, state="ready") for one in epochs)


def test_rows_of_purged_epochs_in_arroyos_database_are_named_with_the_statement() -> None:
    made, edit = purgeable(Layout.LEGACY)
    known = facts_of(made.paths, JobCondition.STOPPED, checkpoints=rows_of(2, 3, 15))
    said = JobDirectory([Telling(known)])
    plan = plan_purge(made.store, made.paths, said, edit)
    assert plan.catalogue is not None
    assert (plan.catalogue.below, plan.catalogue.states) == (3, {2: "ready"})
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE checkpoints (job_id TEXT, epoch INTEGER)")
        rows = [("job_x", 1), ("job_x", 2), ("job_x", 3), ("job_y", 1)]
        database.executemany("INSERT INTO checkpoints VALUES (?, ?)", rows)
        database.execute(plan.catalogue.statement)
        left = database.execute("SELECT * FROM checkpoints").fetchall()
    assert left == [("job_x", 3), ("job_y", 1)]
    options = EditOptions(quiet_seconds=0.0, sleep=lambda _: None)
    outcome = run_purge(made.store, made.paths, said, edit, options)
    assert (outcome.remaining, outcome.plan.catalogue) == ((), plan.catalogue)
    # They are named until they are deleted, although nothing is left to purge.
    again = plan_purge(made.store, made.paths, said, edit)
    assert (again.empty, again.catalogue) == (True, plan.catalogue)
    gone = facts_of(made.paths, JobCondition.STOPPED, checkpoints=rows_of(3, 15))
    assert plan_purge(made.store, made.paths, JobDirectory([Telling(gone)]), edit).catalogue is None


def test_without_the_database_the_rows_to_look_for_are_named() -> None:
    made, edit = purgeable(Layout.LEGACY)
    found = plan_purge(made.store, made.paths, stopped(made.paths), edit).catalogue
    assert found is not None
    assert (found.states, found.below) == (None, 3)
    protocol, edit = purgeable(Layout.PROTOCOL)
    plan = plan_purge(protocol.store, protocol.paths, stopped(protocol.paths), edit)
    assert (plan.expires, plan.catalogue) == ((1, 2), None)
    managed = job(written())
    assert plan_purge(written(), managed.paths, NOBODY, KEY).catalogue is None


def test_the_certificate_names_the_rows(tmp_path: Path) -> None:
    made, _ = purgeable(Layout.LEGACY)
    target = open_store(str(tmp_path))
    for info in made.store.list():
        target.put(info.path, made.store.read(info.path))
    given = ["edit", "delete-key", "job_x", "k1", "--purge", "--url", str(tmp_path)]
    given += ["--assume", "job_x=stopped"]
    dry = CliRunner().invoke(cli.main, given)
    assert dry.exit_code == 0, dry.output
    statement = "DELETE FROM checkpoints WHERE job_id = 'job_x' AND epoch < 3"
    assert f"to do by hand: once the purge is done: {statement}" in dry.output
    assert "no source lists them (--arroyo-db does)" in dry.output
    done = CliRunner().invoke(cli.main, [*given, "--yes", "--quiet", "0", "--json"])
    found = json.loads(done.stdout)["catalogue"]
    assert found == {
        "table": "checkpoints",
        "below_epoch": 3,
        "states": None,
        "statement": statement,
    }


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True], ids=["fails", "dies"])
def test_purge_interrupted_anywhere_leaves_a_restorable_job_and_is_finished_by_the_next(
    crash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_check_free", lambda *_: None)
    begun = written(3, **SMALL)
    pipeline = job(begun, **SMALL)
    counted = FaultInjecting(copied(begun))
    purge(counted, pipeline)
    assert counted.changes > 20
    for at in range(1 + crash, counted.changes + 1, 7):
        store = copied(begun)
        faulty = FaultInjecting(store, fail_at=at, mode="after" if crash else "before", crash=crash)
        with contextlib.suppress(Crash, StorageError):
            purge(faulty, pipeline)
        backend = ParquetBackend(store, pipeline.paths)
        newest = backend.epochs()[-1]
        assert backend.prepare_checkpoint_load(newest).epoch == newest, at
        said = stopped(pipeline.paths)
        chosen = EditOptions(sleep=lambda _: None)
        outcome = run_purge(store, pipeline.paths, said, KEY, chosen)
        assert outcome.remaining == (), at
        assert holds(store, b"d") == [], at
        run_pipeline(job(store, **SMALL), store, max_epochs=1)
        errors = verify_job(store, pipeline.paths, level=1).verdict.errors
        assert errors == (), at


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_the_plan_and_the_certificate(tmp_path: Any) -> None:
    store = MemoryStore(f"purge-{tmp_path.name}")
    source = written()
    for info in source.list():
        store.put(info.path, source.read(info.path))
    name = job(store).paths.root
    args = ["edit", "delete-key", name, "d", "--purge", "--url", store.url]
    shown = CliRunner().invoke(cli.main, args, catch_exceptions=False)
    assert "deleted: epochs 1-8, with the files that no later epoch lists" in shown.stdout
    assert "delivered downstream, and stays: sink out, epoch 8: " in shown.stdout
    digest = shown.stdout.partition(": purge ")[2].split()[0]
    done = CliRunner().invoke(
        cli.main, [*args, "--yes", "--approve", digest, "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0
    certificate = json.loads(done.stdout)
    assert (certificate["complete"], certificate["digest"]) == (True, digest)
    assert all(one["deleted"] and len(one["sha256"]) == 64 for one in certificate["objects"])
    assert certificate["remaining"] == []
    assert certificate["edit"]["epoch"] == 9
    configure(None)
