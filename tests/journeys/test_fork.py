"""A stopped Arroyo job takes over the state of another one, which is only read. Whatever goes
wrong, the stopped job has its own state or the other's, and can go back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from arroyo_dagster import (
    HashVariant,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    StatePath,
    WriteProtected,
    key_hashes,
    list_jobs,
)
from arroyo_dagster.errors import ConflictError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.state.tables.known.sources import (
    GeneratorConfig,
    NexmarkConfig,
    NexmarkSourceState,
)
from tests.arroyo_jobs import EVENTS, SECOND, stopped, table_rows, window_config
from tests.faulty_stores import once_before
from tests.formats import EditOutcome, TableAction, is_rewritten, metadata
from tests.internals import EditOptions, StateSource, plan_fork, run_fork
from tests.jobs import listing, run_word_job
from tests.journeys.test_surgery import errors_of, others, state_of
from tests.shares import LAYOUTS, some_of
from tests.surgery_jobs import BEGAN, NANOS, SurgeryJob, global_config, surgery_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")


def two_jobs(
    layout: Layout = Layout.LEGACY,
    into: Layout | None = None,
    *,
    apart: bool = False,
    parallelism: int = 2,
) -> tuple[SurgeryJob, SurgeryJob]:
    """Job A with four epochs, and B with two, whose rows are fewer, of the same SQL."""
    source = surgery_job(layout, epochs=4, name="job_a")
    store = MemoryStore() if apart else source.store
    job = surgery_job(into or layout, epochs=2, name="job_b", store=store, parallelism=parallelism)
    return source, job


def taken(source: SurgeryJob, epoch: int | None = None) -> StateSource:
    return StateSource(store=WriteProtected(source.store), paths=source.paths, epoch=epoch)


def run(source: SurgeryJob, job: SurgeryJob, **options: Any) -> EditOutcome:
    epoch, store = options.pop("epoch", None), options.pop("store", job.store)
    directory = options.pop("directory", stopped(job.paths))
    found = replace(taken(source, epoch), store=options.pop("theirs", taken(source).store))
    chosen = EditOptions(**{"quiet_seconds": 0.0, **options})
    return run_fork(found, store, job.paths, directory, chosen)


def as_forked(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The truth: rows, entries and watermarks of A; epochs, parallelism and sinks of B."""
    return {
        name: ours[name]
        if name == "sink_6"
        else ((*theirs[name][0][:2], *ours[name][0][2:]), *theirs[name][1:])
        for name in ours
    }


def with_watermark_of(state: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    head, rows, pairs = state["sink_6"]
    return {**state, "sink_6": ((*theirs["sink_6"][0][:2], *head[2:]), rows, pairs)}


def below(store: ObjectStore, paths: JobPaths) -> dict[StatePath, bytes]:
    return {info.path: store.read(info.path) for info in store.list(paths.root)}


@pytest.mark.parametrize(
    ("layout", "into", "apart"),
    some_of([(a, b, c) for a in Layout for b in Layout for c in (False, True)], one_in=3),
)
def test_the_job_holds_what_the_source_held_and_keeps_its_sinks(
    layout: Layout, into: Layout, apart: bool
) -> None:
    source, job = two_jobs(layout, into, apart=apart)
    theirs, ours = state_of(source.store, source.paths), state_of(job.store, job.paths)
    was = below(source.store, source.paths)
    plan = plan_fork(taken(source), WriteProtected(job.store), job.paths, stopped(job.paths))
    outcome = run(source, job, approved=plan.digest)
    assert outcome.published
    assert outcome.plan == plan
    expected = with_watermark_of(as_forked(theirs, ours), theirs)
    assert state_of(job.store, job.paths) == expected
    assert below(source.store, source.paths) == was
    assert errors_of(job.store, job.paths) == set()
    assert {(one.operator, one.action) for one in plan.tables if one.table == "f"} == {
        ("sink_6", TableAction.KEPT)
    }
    listed = ParquetBackend(job.store, job.paths).load().paths
    assert all(path.startswith(f"{job.paths.root}/") for path in listed)
    assert sum(not is_rewritten(path) for path in listed) == 1  # the sink's


@LAYOUTS
def test_a_named_epoch_is_taken_and_the_source_may_go_on(layout: Layout) -> None:
    source, job = two_jobs(layout)
    at_two = surgery_job(layout, epochs=2, name="job_a")
    expected = state_of(at_two.store, at_two.paths)
    source.write({})
    run(source, job, epoch=2)
    found = state_of(job.store, job.paths)
    for name in ("window_3", "join_4", "agg_5", "source_kafka_1", "watermark_2"):
        assert found[name][1:] == expected[name][1:], name


@LAYOUTS
def test_a_table_that_the_source_has_no_rows_of_starts_empty(layout: Layout) -> None:
    source, job = two_jobs(layout, apart=True)
    empty = surgery_job(layout, epochs=4, name="job_a", without="window_3")
    plan = run(empty, job).plan
    assert [
        (one.operator, one.table) for one in plan.tables if one.action is TableAction.EMPTIED
    ] == [("window_3", "t")]
    assert ("window_3", "t") not in state_of(job.store, job.paths)["window_3"][1]
    assert errors_of(job.store, job.paths) == set()
    # And the other way: a table that the job does not have yet.
    plan = run(source, job).plan
    assert "the job has none now" in " ".join(one.reason for one in plan.tables)
    theirs = state_of(source.store, source.paths)
    assert state_of(job.store, job.paths)["window_3"][1] == theirs["window_3"][1]
    assert errors_of(job.store, job.paths) == set()


@LAYOUTS
def test_compacted_files_of_late_epochs_do_not_look_doubled(layout: Layout) -> None:
    """The job's epochs are lower than the source's: the order of epochs is lost in its lists."""
    source, job = two_jobs(layout)
    source.files["window_3", "t"] = [
        replace(file, compaction_generation=1 if file.epoch == 1 else 0)
        for file in source.files["window_3", "t"]
    ]
    source.write({})
    theirs = state_of(source.store, source.paths)
    run(source, job)
    assert state_of(job.store, job.paths)["window_3"][1] == theirs["window_3"][1]
    assert errors_of(job.store, job.paths) == set()


# ---- refusals ------------------------------------------------------------------------------------


def fresh_window(job: SurgeryJob, **other: Any) -> None:
    """From its first epoch on the job has another window."""
    times = [BEGAN * 1000 + 50 * NANOS]
    config = window_config(EVENTS, other.pop("keys", ["k"]), **other)
    job.files["window_3", "t"] = []
    job.write({("window_3", config): table_rows(EVENTS, [["k1"], [1], times])})


def add_operator(source: SurgeryJob, job: SurgeryJob) -> None:
    job.keep("sink_9", global_config("f", "file_sink"), {"/out/more": 1})
    job.write({})


def change_retention(source: SurgeryJob, job: SurgeryJob) -> None:
    fresh_window(job, retention=41)


def change_keys(source: SurgeryJob, job: SurgeryJob) -> None:
    fresh_window(job, keys=["n"], retention=40)


def write_one_file(source: SurgeryJob, job: SurgeryJob) -> None:
    job.keep("sink_6", global_config("f", "file_sink"), {"/out/job_a.json": 5})
    job.write({})


def lose_a_file(source: SurgeryJob, job: SurgeryJob) -> None:
    lost = ParquetBackend(source.store, source.paths).load().paths[-1]
    source.store.delete_many([lost])


Damage = Callable[[SurgeryJob, SurgeryJob], None]
REFUSED: dict[str, tuple[Damage, type[Exception], str]] = {
    "other operators": (add_operator, InputError, "not of the same SQL"),
    "another retention": (change_retention, InputError, "its retention is 40000000 microseconds"),
    "other keys": (change_keys, InputError, "its kind, description, keys or version"),
    "one output file": (write_one_file, InputError, "both jobs write the file"),
    "a missing file": (lose_a_file, ProtocolError, "does not pass verification"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_jobs_that_do_not_match_are_refused_and_nothing_changes(name: str) -> None:
    damage, kind, message = REFUSED[name]
    source, job = two_jobs()
    damage(source, job)
    before = listing(job.store)
    for act in (
        lambda: plan_fork(taken(source), job.store, job.paths, stopped(job.paths)),
        lambda: run(source, job),
    ):
        with pytest.raises(kind, match=message):
            act()
    assert listing(job.store) == before


def nexmark() -> NexmarkSourceState:
    config = NexmarkConfig(None, *[1] * 1, 1.5, *[1] * 4, False, False, *[1] * 15, 0.5, 1)
    return NexmarkSourceState(GeneratorConfig(config, 1, 3, 46, 50, 5, 10, 1, 0, 9, 1, 1, 1), 7)


def test_a_table_that_arroyo_restores_at_one_parallelism_only_is_refused_at_another() -> None:
    source = SurgeryJob(Layout.LEGACY, job="job_a")
    job = SurgeryJob(Layout.LEGACY, job="job_b", parallelism=3, store=source.store)
    table = global_config("s", "nexmark source state")
    for one in (source, job):
        one.keep("source_nexmark_0", table, {0: nexmark()}, {1: nexmark()})
        one.write({})
    with pytest.raises(InputError, match="cannot be restored at parallelism 3, only at 2"):
        plan_fork(taken(source), job.store, job.paths, stopped(job.paths))


@LAYOUTS
def test_a_job_is_not_forked_into_itself_nor_from_an_epoch_that_is_not_there(
    layout: Layout,
) -> None:
    source, job = two_jobs(layout)
    with pytest.raises(InputError, match="into itself"):
        plan_fork(taken(job), job.store, job.paths, stopped(job.paths))
    with pytest.raises(NotFoundError, match="no such epoch"):
        plan_fork(taken(source, 99), job.store, job.paths, stopped(job.paths))


@LAYOUTS
def test_a_source_that_changes_while_it_is_copied_stops_the_fork(layout: Layout) -> None:
    source, job = two_jobs(layout, apart=True)
    was = others(job.store)
    epoch = ParquetBackend(source.store, source.paths).load().epoch

    class Rewritten(WriteProtected):
        """A run that attempts the same epoch again, as soon as a data file was read."""

        def read(self, path: StatePath) -> bytes:
            data = super().read(path)
            if "table-" in path and source.watermark_micros == BEGAN + 60 * SECOND:
                source.watermark_micros += SECOND
                source.epoch -= 1
                source.write({})
            return data

    watched = Rewritten(source.store)
    with pytest.raises((ConflictError, NotFoundError, ProtocolError)):
        run(source, job, theirs=watched, epoch=epoch)
    assert others(job.store) == was


# ---- sources that cannot be taken ----------------------------------------------------------------


def refused(source: StateSource, job: SurgeryJob, kind: type[Exception], message: str) -> None:
    was = listing(job.store)
    with pytest.raises(kind, match=message):
        plan_fork(source, WriteProtected(job.store), job.paths, stopped(job.paths))
    assert listing(job.store) == was


@LAYOUTS
def test_a_managed_job_is_no_source(layout: Layout) -> None:
    job = surgery_job(layout, epochs=2, name="job_b")
    source = MemoryStore()
    run_word_job(source, max_epochs=2)
    (paths,) = list_jobs(source)
    taken = StateSource(store=WriteProtected(source), paths=paths)
    refused(taken, job, InputError, "the source is a managed job")


def test_an_epoch_whose_sinks_have_not_committed_is_no_source() -> None:
    source, job = two_jobs(Layout.PROTOCOL)
    ref = ParquetBackend(source.store, source.paths).load().ref
    manifest = metadata.decode_manifest(source.store.read(ref), ref)
    source.store.put(ref, metadata.encode_manifest(replace(manifest, needs_commit=True)))
    refused(taken(source, 4), job, InputError, "epoch 4 of the source is committing")
    assert plan_fork(taken(source, 3), job.store, job.paths, stopped(job.paths)).changed


@LAYOUTS
def test_keys_that_another_build_has_hashed_are_refused(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = surgery_job(layout, epochs=2, name="job_b")
    monkeypatch.setattr(
        "tests.arroyo_jobs.key_hashes", partial(key_hashes, variant=HashVariant.AES_SSSE3)
    )
    other = surgery_job(layout, epochs=4, name="job_a", store=job.store)
    refused(taken(other), job, ProtocolError, "hashed by different builds of Arroyo")


def test_files_that_the_source_writes_again_while_they_are_copied_are_not_taken() -> None:
    """As a legacy run does that ignores the state: its first names are those of old files."""
    source, job = two_jobs(Layout.LEGACY, apart=True)
    was = others(job.store)
    newest = ParquetBackend(source.store, source.paths).load()
    path = next(one for one in reversed(newest.paths) if "/table-k-" in one)
    store = once_before(
        job.store,
        lambda verb, of: is_rewritten(of),
        lambda: source.store.put(path, source.store.read(path)),
    )
    with pytest.raises(ConflictError, match="written anew while it was copied"):
        run(source, job, store=store)
    assert others(job.store) == was
    assert run(source, job).published


def test_files_that_the_source_has_written_again_before_are_named_in_the_plan() -> None:
    """As of a copy, or by a run that ignored the state and has not published an epoch yet."""
    source, job = two_jobs(Layout.LEGACY, apart=True)
    planned = functools.partial(plan_fork, taken(source), job.store, job.paths, stopped(job.paths))
    assert "written after" not in str(planned().unknown)
    newest = ParquetBackend(source.store, source.paths).load()
    path = next(one for one in reversed(newest.paths) if "/table-k-" in one)
    source.store.put(path, source.store.read(path))
    (told,) = (one for one in planned().unknown if "written after its metadata" in one)
    assert f"1 files of epoch {newest.epoch}" in told
    assert str(path) in told
