"""Protects what a rewrite in place reports, records and leaves alone, and the undo of it, step by
step; the stories with faults are in `journeys/test_rewriting.py`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import ConflictError, FormatError, InputError, ProtocolError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    Progress,
    RewriteOptions,
    RewriteOutcome,
    StatePath,
    UndoOptions,
    UndoOutcome,
    UndoPlan,
    WriteProtected,
    plan_rewrite,
    plan_undo,
    run_rewrite,
    run_undo,
)
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.codec.maintenance_records import decode_change_record
from arroyo_dagster.state.metadata.lease import lease, newest_lease
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, JobHead
from arroyo_dagster.state.model.compaction import LeftOut
from arroyo_dagster.state.model.job_facts import JobCondition, SourceAnswer
from arroyo_dagster.state.model.layout import is_rewritten
from arroyo_dagster.state.model.leases import LeaseRecord
from arroyo_dagster.state.model.rewrite import RewriteShard
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite import rewrite_here
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import ListedJob, list_objects
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask
from tests.arroyo_jobs import (
    EVENTS,
    GROUPS,
    SECOND,
    TUPLES,
    UNKEYED_ACCUMULATORS,
    UNKEYED_TUPLES,
    WINDOW,
    ArroyoJob,
    Telling,
    begun,
    content,
    expect_whole,
    facts_of,
    stopped,
    table_rows,
    without_keys,
)
from tests.jobs import copy_into
from tests.shares import LAYOUTS

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
NOW = 1_900_000_000 * SECOND
Parts = Iterable[RewriteShard | LeftOut]


def rewrite(store: ObjectStore, job: ArroyoJob, **options: Any) -> RewriteOutcome:
    said = options.pop("directory", stopped(job.paths))
    settings = options.pop("settings", FULL)
    chosen = RewriteOptions(**{"quiet_seconds": 0.0, **options})
    return run_rewrite(store, job.paths, said, settings, chosen)


def undo(store: ObjectStore, job: ArroyoJob, **options: Any) -> UndoOutcome:
    said = options.pop("directory", stopped(job.paths))
    return run_undo(store, job.paths, said, UndoOptions(**options))


def planned_undo(store: ObjectStore, job: ArroyoJob) -> UndoPlan:
    return plan_undo(store, job.paths, stopped(job.paths))


def arroyos(store: MemoryStore) -> dict[StatePath, bytes]:
    """What Arroyo has written, as it is now."""
    return {
        info.path: store.read(info.path)
        for info in store.list()
        if "_arroyo_dagster" not in info.path and not is_rewritten(info.path)
    }


def tables_of(outcome: RewriteOutcome) -> set[str]:
    return {part.merged.table for part in outcome.parts}


# ---- plans and forecasts -------------------------------------------------------------------------


def test_nothing_given_means_the_default_settings() -> None:
    job, others = begun(Layout.LEGACY, epochs=2), CompactionSettings(parallelism=3)
    said, store = stopped(job.paths), WriteProtected(job.store)
    default = plan_rewrite(store, job.paths, said, CompactionSettings())
    assert plan_rewrite(store, job.paths, said) == default
    assert plan_rewrite(store, job.paths, said, others).parallelism == 3
    options = RewriteOptions(quiet_seconds=0.0)
    assert run_rewrite(job.store, job.paths, said, options=options).plan == default
    assert run_rewrite(job.store, job.paths, said, others, options).plan.parallelism == 3


@LAYOUTS
def test_a_plan_names_the_condition_and_the_run(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    said = JobDirectory([Telling(facts_of(job.paths, JobCondition.FAILED, run_id=7))])
    plan = plan_rewrite(job.store, job.paths, said, FULL)
    assert (plan.condition, plan.run_id, plan.why_not) == (JobCondition.FAILED, 7, None)


@LAYOUTS
def test_a_dry_run_reports_what_a_restore_reads_now(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    plan = plan_rewrite(job.store, job.paths, stopped(job.paths), FULL)
    assert plan.left_out
    assert plan.before.files > plan.after.files
    outcome = RewriteOutcome.of_plan(plan)
    assert outcome == RewriteOutcome(plan=plan, left_out=plan.left_out, after=plan.before)


@LAYOUTS
@pytest.mark.parametrize("parallelism", [None, 3])
def test_sampled_forecast_of_a_small_job_is_exact(layout: Layout, parallelism: int | None) -> None:
    job = begun(layout, epochs=3)
    settings = replace(FULL, parallelism=parallelism)
    store, said = WriteProtected(job.store), stopped(job.paths)
    plain = plan_rewrite(store, job.paths, said, settings)
    told: list[Progress] = []
    sampled = plan_rewrite(store, job.paths, said, settings, sampled=True, on_progress=told.append)
    assert replace(sampled, after=plain.after) == plain
    parts = sum(len(table.parts) for table in sampled.tables)
    assert [(one.step, one.done, one.total) for one in told] == [
        ("rewrites forecast", at, parts) for at in range(1, parts + 1)
    ]
    outcome = rewrite(job.store, job, settings=settings, sampled=True)
    assert outcome.plan == sampled
    assert outcome.after == sampled.after != plain.after


@LAYOUTS
def test_a_plan_is_carried_out_and_refused_once_it_no_longer_fits(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    said, options = stopped(job.paths), RewriteOptions(quiet_seconds=0.0)
    plan = plan_rewrite(job.store, job.paths, said, FULL, sampled=True)
    outcome = run_rewrite(job.store, job.paths, said, FULL, options, plan=plan)
    assert outcome.published
    assert outcome.plan == plan
    assert outcome.after == plan.after
    before = arroyos(job.store)
    with pytest.raises(ConflictError, match="the plan no longer fits"):
        run_rewrite(job.store, job.paths, said, FULL, options, plan=plan)
    assert arroyos(job.store) == before


@LAYOUTS
def test_an_undo_that_was_planned_is_refused_once_it_no_longer_fits(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    said = stopped(job.paths)
    rewrite(job.store, job)
    plan = planned_undo(job.store, job)
    assert run_undo(job.store, job.paths, said, plan=plan).done
    with pytest.raises(ConflictError, match="the plan no longer fits"):
        run_undo(job.store, job.paths, said, plan=plan)


@LAYOUTS
def test_a_job_that_may_not_be_rewritten_gets_a_forecast(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    said = JobDirectory([Telling(facts_of(job.paths, JobCondition.RUNNING))])
    store = WriteProtected(job.store)
    plan = plan_rewrite(store, job.paths, said, FULL)
    assert plan.why_not is not None
    assert plan.tables
    with pytest.raises(InputError):
        rewrite(store, job, directory=said)
    with pytest.raises(InputError):
        run_rewrite(store, job.paths, said, FULL, plan=plan)
    assert rewrite(job.store, job).published
    # There is nothing left to do: nothing is written, not even a lease.
    assert not rewrite(store, job).plan.tables


def test_the_epoch_that_would_be_rewritten_is_checked_first_not_the_newest() -> None:
    """Merged, nobody could tell any more that rows of it came twice."""
    job = begun(Layout.LEGACY, epochs=2)
    listed = job.files["tumbling_1", "t"]
    twice = replace(
        listed[0],
        path=StatePath(f"{listed[0].path}-compacted"),
        compaction_generation=1,
        epoch=Epoch(2),
    )
    job.store.put(twice.path, job.store.read(listed[0].path))
    listed.append(twice)
    job.write({})
    listed.remove(twice)
    job.write({})
    was = arroyos(job.store)
    named = facts_of(job.paths, JobCondition.STOPPED, newest_ready_epoch=Epoch(3))
    with pytest.raises(ProtocolError, match="epoch 3 does not pass"):
        rewrite(job.store, job, directory=JobDirectory([Telling(named)]))
    assert arroyos(job.store) == was


# ---- parts ---------------------------------------------------------------------------------------


def leaving(*tables: str) -> Callable[[ObjectStore, Sequence[RewriteTask]], Parts]:
    """Rewrite all but some tables, of which every part has a reason of its own."""

    def run(store: ObjectStore, tasks: Sequence[RewriteTask]) -> Parts:
        for at, task in enumerate(tasks):
            if task.table.table in tables:
                table = task.table
                yield LeftOut(operator=table.operator, table=table.table, reason=f"part {at}")
            else:
                yield from rewrite_here(store, [task])

    return run


def mixed(layout: Layout) -> ArroyoJob:
    """One operator with the tables of an aggregate and one more, of two subtasks."""
    job = ArroyoJob(layout, watermark_micros=30 * SECOND)
    for at in range(2):
        times = [(20 + 10 * at + n) * SECOND * 1000 for n in range(6)]
        tables = {
            WINDOW: table_rows(EVENTS, [[f"k{n % 4}" for n in range(6)], [at] * 6, times]),
            UNKEYED_ACCUMULATORS: table_rows(
                without_keys(GROUPS), [[at + 1, at + 2], times[:2], [at * 10 + 1, at * 10 + 2]]
            ),
            UNKEYED_TUPLES: table_rows(
                without_keys(TUPLES),
                [[1] * 2, [b"x", b"y"], [at + 1, at + 2], times[:1] * 2, [at + 1, at + 2]],
            ),
        }
        job.write({("agg_2", config): rows for config, rows in tables.items()})
    return job


@LAYOUTS
@pytest.mark.parametrize("stuck", ["a", "b"])
def test_tables_of_an_aggregate_are_rewritten_together(layout: Layout, stuck: str) -> None:
    """Arroyo reads them as one: new accumulators do not go with old tuples."""
    job = begun(layout, epochs=2)
    before = content(job.store, job.paths)
    was = ParquetBackend(job.store, job.paths).load().operator("agg_2")
    outcome = rewrite(job.store, job, run=leaving(stuck))
    assert outcome.published
    assert tables_of(outcome) == {"t"}
    assert ParquetBackend(job.store, job.paths).load().operator("agg_2") == was
    expect_whole(job.store, job, before, "without the aggregate")


@LAYOUTS
def test_a_table_that_is_left_out_holds_no_other_back(layout: Layout) -> None:
    for job in (begun(layout, epochs=2), mixed(layout)):
        before = content(job.store, job.paths)
        outcome = rewrite(job.store, job, run=leaving("t"))
        assert tables_of(outcome) == {"a", "b"}
        reasons = [one for one in outcome.left_out if one.table == "t"]
        assert len(reasons) == 1
        first = min(at for at, one in enumerate(outcome.plan.tables) if one.table == "t")
        parts = sum(len(one.parts) for one in outcome.plan.tables[:first])
        assert reasons[0].reason == f"part {parts}"
        assert outcome.left_out == (*outcome.plan.left_out, *reasons)
        assert content(job.store, job.paths) == before


@LAYOUTS
def test_where_every_part_is_left_out_nothing_is_published(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    was = arroyos(job.store)
    outcome = rewrite(job.store, job, run=leaving("t", "a", "b"), on_published=pytest.fail)
    assert (outcome.published, outcome.parts, outcome.record) == (False, (), None)
    assert outcome.after == outcome.plan.before
    assert {one.table for one in outcome.left_out} == {"s", "t", "a", "b"}
    assert arroyos(job.store) == was
    assert not job.store.list_dir(job.paths.changes).objects


def test_every_part_is_reported_with_how_many_are_left() -> None:
    job = begun(Layout.LEGACY, epochs=2)
    seen: list[tuple[RewriteShard | LeftOut, int]] = []
    outcome = rewrite(
        job.store, job, run=leaving("t"), on_shard=lambda part, left: seen.append((part, left))
    )
    parts = sum(len(one.parts) for one in outcome.plan.tables)
    assert [left for _, left in seen] == list(range(parts - 1, -1, -1))
    assert {type(part) for part, _ in seen} == {RewriteShard, LeftOut}


@LAYOUTS
@pytest.mark.parametrize("left_out", [(), ("t",)])
def test_changed_part_stops_everything(layout: Layout, left_out: tuple[str, ...]) -> None:
    job = begun(layout, epochs=2)
    was = arroyos(job.store)

    def lose_the_last(store: ObjectStore, tasks: Sequence[RewriteTask]) -> Parts:
        yield from list(leaving(*left_out)(store, tasks))[:-1]

    with pytest.raises(ProtocolError, match="parts returned a result"):
        rewrite(job.store, job, run=lose_the_last)
    assert arroyos(job.store) == was


def test_a_caller_may_give_up_between_two_parts() -> None:
    job = begun(Layout.LEGACY, epochs=2)
    was = arroyos(job.store)
    seen: list[Any] = []
    with pytest.raises(ConflictError, match="exceeded its time limit"):
        rewrite(
            *(job.store, job),
            cancelled=lambda: len(seen) == 2,
            on_shard=lambda part, left: seen.append(part),
        )
    assert len(seen) == 2
    assert arroyos(job.store) == was


def test_a_caller_may_give_up_between_two_changes_of_metadata() -> None:
    """In the legacy layout each operator has an object of its own."""
    job = begun(Layout.LEGACY, epochs=2)
    before, was = content(job.store, job.paths), arroyos(job.store)
    with pytest.raises(ConflictError, match="exceeded its time limit"):
        rewrite(job.store, job, cancelled=lambda: arroyos(job.store) != was)
    now = arroyos(job.store)
    assert sum(now[path] != was[path] for path in was) == 1
    expect_whole(job.store, job, before, "half of it")
    assert rewrite(job.store, job).published
    # Each undo takes one rewrite back, the last one first.
    assert undo(job.store, job).done
    assert undo(job.store, job).done
    assert arroyos(job.store) == was


# ---- quiet ---------------------------------------------------------------------------------------


def waited(job: ArroyoJob, **options: Any) -> list[float]:
    slept: list[float] = []
    rewrite(job.store, job, clock=lambda: NOW, sleep=slept.append, **options)
    return slept


@pytest.mark.parametrize(
    ("quiet_seconds", "listed_ago", "waits"),
    [(60.0, 20, [40.0]), (0.5, 0, [0.5]), (0.0, 0, []), (60.0, 60, [])],
)
def test_only_what_is_left_of_the_quiet_time_is_waited(
    quiet_seconds: float, listed_ago: int, waits: list[float]
) -> None:
    job = begun(Layout.LEGACY, epochs=2)
    listed = ListedJob(NOW - listed_ago * SECOND, list_objects(job.store, job.paths))
    assert waited(job, quiet_seconds=quiet_seconds, quiet_since=listed) == waits


@pytest.mark.parametrize(("finished_ago", "waits"), [(600 * SECOND, []), (600 * SECOND - 1, [60])])
def test_stop_is_old_after_ten_quiet_times(finished_ago: int, waits: list[float]) -> None:
    job = begun(Layout.LEGACY, epochs=2)
    facts = facts_of(job.paths, JobCondition.STOPPED, finish_time_micros=NOW - finished_ago)
    assert waited(job, directory=JobDirectory([Telling(facts)]), quiet_seconds=60.0) == waits


# ---- the lease -----------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [rewrite, undo])
def test_who_holds_the_lease_is_not_waited_for_unless_asked_to(act: Any) -> None:
    job = begun(Layout.LEGACY, epochs=2)
    if act is not rewrite:
        rewrite(job.store, job)
    with lease(job.store, job.paths, "somebody"), pytest.raises(ConflictError, match="somebody"):
        act(job.store, job, sleep=pytest.fail)
    held = contextlib.ExitStack()
    held.enter_context(lease(job.store, job.paths, "somebody"))
    outcome = act(
        job.store, job, lease_wait_seconds=5.0, sleep=lambda seconds: held.close(), owner="the test"
    )
    assert outcome.published if act is rewrite else outcome.done


@LAYOUTS
def test_what_somebody_did_while_the_lease_was_waited_for_is_not_done_again(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    held = contextlib.ExitStack()
    held.enter_context(lease(job.store, job.paths, "somebody"))

    def meanwhile(seconds: float) -> None:
        held.close()
        assert rewrite(job.store, job).published

    outcome = rewrite(job.store, job, lease_wait_seconds=5.0, sleep=meanwhile)
    plan = plan_rewrite(job.store, job.paths, stopped(job.paths), FULL)
    assert outcome == RewriteOutcome(plan=plan, left_out=plan.left_out, after=plan.before)


@LAYOUTS
def test_a_job_that_was_started_while_the_lease_was_waited_for_is_refused(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    was = arroyos(job.store)
    held = contextlib.ExitStack()
    held.enter_context(lease(job.store, job.paths, "somebody"))
    said = Telling(facts_of(job.paths, JobCondition.STOPPED))

    def meanwhile(seconds: float) -> None:
        held.close()
        said.now = facts_of(job.paths, JobCondition.RUNNING)

    def never(store: ObjectStore, tasks: Sequence[RewriteTask]) -> Parts:
        raise AssertionError("no part is written")

    with pytest.raises(InputError, match="the job runs"):
        rewrite(
            *(job.store, job),
            directory=JobDirectory([said]),
            lease_wait_seconds=5.0,
            sleep=meanwhile,
            run=never,
        )
    assert arroyos(job.store) == was


# ---- what is published ---------------------------------------------------------------------------


@LAYOUTS
def test_the_record_holds_what_undoes_the_rewrite(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    was, old = arroyos(job.store), ParquetBackend(job.store, job.paths).load()
    said = JobDirectory([Telling(facts_of(job.paths, JobCondition.STOPPED, run_id=7))])
    published: list[RewriteOutcome] = []
    outcome = rewrite(
        job.store, job, directory=said, clock=lambda: NOW, on_published=published.append
    )
    assert published == [outcome]
    now, new = arroyos(job.store), ParquetBackend(job.store, job.paths).load()
    changed = [path for path in was if now[path] != was[path]]
    assert outcome.record is not None
    token = int(outcome.record.name.split("-")[1])
    assert outcome.record == job.paths.changes / f"{2:07}-{token:010}-compaction.json"
    record = decode_change_record(job.store.read(outcome.record), outcome.record)
    gone = set(old.paths) - set(new.paths)
    digests = {
        path: (hashlib.sha256(was[path]).hexdigest(), hashlib.sha256(now[path]).hexdigest())
        for path in changed
    }
    assert record == ChangeRecord(
        kind=ChangeKind.COMPACTION,
        operation=None,
        digest=None,
        pipeline=job.paths.pipeline,
        job=job.paths.job,
        epoch=old.epoch,
        worker_generation=old.worker_generation,
        finish_time_micros=old.finish_time_micros,
        token=token,
        created_at_micros=NOW,
        head=JobHead(epoch=old.epoch, worker_generation=old.worker_generation),
        objects=digests,
        before={path: was[path] for path in changed},
        inputs=tuple(sorted(gone)),
    )
    # Epoch 1 lists the files of its own still.
    assert set(outcome.unlisted) == {path for path in gone if "checkpoint-0000002" in path}
    assert outcome.unlisted
    assert set(outcome.unlisted) != gone


@LAYOUTS
@pytest.mark.parametrize("wrong", ["lossy", "broken"])
def test_metadata_that_would_read_back_different_is_not_published(
    layout: Layout, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begun(layout, epochs=2)
    was = arroyos(job.store)
    name = "encode_operator" if layout is Layout.LEGACY else "encode_manifest"
    encode = getattr(metadata, name)

    def encoded(one: Any) -> bytes:
        return b"\xff" if wrong == "broken" else encode(replace(one, epoch=Epoch(99)))

    monkeypatch.setattr(metadata, name, encoded)
    with pytest.raises((ProtocolError, FormatError)) as caught:
        rewrite(job.store, job)
    assert caught.value.facts["path"] in was
    assert arroyos(job.store) == was


def started_at_the_last_answer(job: ArroyoJob, act: Callable[[JobDirectory], Any]) -> Any:
    """Do something twice; the second time the source changes its mind at its last answer."""
    rest = facts_of(job.paths, JobCondition.STOPPED)
    store, telling = job.store, Telling(rest)
    job.store = MemoryStore()
    copy_into(job.store, store)
    act(JobDirectory([telling]))
    job.store = store
    later = facts_of(job.paths, JobCondition.RUNNING)
    return act(JobDirectory([Telling(rest, later=later, at=telling.asked)]))


@LAYOUTS
def test_a_start_that_is_seen_after_the_last_put_puts_the_old_lists_back(layout: Layout) -> None:
    """A run with the old lists would lose files to Arroyo's cleanup if the new ones were stored."""
    job = begun(layout, epochs=2)
    was = arroyos(job.store)
    with pytest.raises(
        ConflictError, match="changed while it was rewritten: the job runs"
    ) as caught:
        started_at_the_last_answer(job, lambda said: rewrite(job.store, job, directory=said))
    assert caught.value.retryable
    assert arroyos(job.store) == was


@LAYOUTS
def test_an_undo_during_which_the_job_is_started_keeps_its_record(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    before, was = content(job.store, job.paths), arroyos(job.store)
    record = rewrite(job.store, job).record
    assert record is not None
    with pytest.raises(ConflictError, match="after its metadata was put back") as caught:
        started_at_the_last_answer(job, lambda said: undo(job.store, job, directory=said))
    assert not caught.value.retryable
    assert arroyos(job.store) == was
    assert content(job.store, job.paths) == before
    assert job.store.head(record) is not None  # gc keeps what the started run may have loaded


# ---- undo ----------------------------------------------------------------------------------------


@LAYOUTS
def test_an_undo_reports_the_record_and_the_objects(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    assert undo(job.store, job) == UndoOutcome()
    was = arroyos(job.store)
    record = rewrite(job.store, job).record
    now = arroyos(job.store)
    changed = tuple(path for path in was if now[path] != was[path])
    planned = planned_undo(WriteProtected(job.store), job)
    dry = UndoOutcome.of_plan(planned)
    assert (dry.record, dry.objects, dry.deleted) == (record, planned.objects, ())
    assert sorted(dry.objects) == sorted(changed)
    assert undo(job.store, job) == replace(dry, done=True)
    assert arroyos(job.store) == was
    assert planned_undo(job.store, job) == UndoPlan()
    assert undo(job.store, job) == UndoOutcome()
    assert rewrite(job.store, job).published


@LAYOUTS
@pytest.mark.parametrize("planned", [False, True])
def test_undo_waiting_for_the_lease_undoes_nothing_twice(layout: Layout, planned: bool) -> None:
    job = begun(layout, epochs=2)
    rewrite(job.store, job)
    plan = planned_undo(job.store, job) if planned else None
    held = contextlib.ExitStack()
    held.enter_context(lease(job.store, job.paths, "somebody"))

    def meanwhile(seconds: float) -> None:
        held.close()
        assert undo(job.store, job).done

    refused = pytest.raises(ConflictError, match="the plan no longer fits")
    with refused if planned else contextlib.nullcontext():
        options = UndoOptions(lease_wait_seconds=5.0, sleep=meanwhile)
        done = run_undo(job.store, job.paths, stopped(job.paths), options, plan=plan)
        assert done == UndoOutcome()


@LAYOUTS
def test_a_job_that_is_started_at_any_moment_of_an_undo_restores_the_same(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    before = content(job.store, job.paths)
    rewrite(job.store, job)
    rewritten = {info.path: job.store.read(info.path) for info in job.store.list()}
    rest, later = (facts_of(job.paths, one) for one in (JobCondition.STOPPED, JobCondition.RUNNING))
    telling = Telling(rest)
    undo(job.store, job, directory=JobDirectory([telling]))
    for at in range(1, telling.asked + 1):
        for path, data in rewritten.items():
            job.store.put(path, data)
        with pytest.raises((ConflictError, InputError)):
            undo(job.store, job, directory=JobDirectory([Telling(rest, later=later, at=at)]))
        assert content(job.store, job.paths) == before, f"started at answer {at}"


def test_a_record_that_is_broken_is_named() -> None:
    job = begun(Layout.LEGACY, epochs=2)
    record = rewrite(job.store, job).record
    assert record is not None
    job.store.put(record, b"{}")
    with pytest.raises(FormatError) as caught:
        undo(job.store, job)
    assert caught.value.facts["path"] == record


@LAYOUTS
def test_an_undo_that_ended_early_goes_on_with_the_next_object(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    was = arroyos(job.store)
    rewrite(job.store, job)
    first, *others = planned_undo(job.store, job).objects
    job.store.put(first, was[first])
    outcome = undo(job.store, job)
    assert outcome.done
    assert outcome.objects == tuple(others)
    assert arroyos(job.store) == was
    assert undo(job.store, job) == UndoOutcome()


# ---- beside others -------------------------------------------------------------------------------


class Acting(Telling):
    """Somebody does something to a stopped job while a source is asked about it.

    Args:
        at: at which of its answers.
    """

    def __init__(self, job: ArroyoJob, act: Callable[[], object], at: int) -> None:
        super().__init__(facts_of(job.paths, JobCondition.STOPPED))
        self.act, self.at = act, at

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        if self.asked + 1 == self.at:
            self.act()
        return super().look_up(jobs, checkpoints=checkpoints)


@LAYOUTS
def test_lists_whose_files_are_gone_are_not_put_back(layout: Layout) -> None:
    job = begun(layout, epochs=2)
    was = arroyos(job.store)
    objects = 2 if layout is Layout.LEGACY else 1
    gone = next(path for path in was if path.name.startswith("table-t-"))

    def cleaned_up() -> None:
        asked.now = facts_of(job.paths, JobCondition.RUNNING)
        job.store.delete_many([gone])

    asked = Acting(job, cleaned_up, BEFORE_THE_FIRST_CHANGE + objects)
    with pytest.raises(ConflictError, match="could not be put back: 1 files of its") as caught:
        rewrite(job.store, job, directory=JobDirectory([asked]))
    assert caught.value.facts["path"] == gone
    assert "keep a copy of the job" in str(caught.value)
    kept = arroyos(job.store)
    assert {path for path in kept if kept[path] != was[path]}, "the new lists stay"


UNDER_THE_LEASE = 2
BEFORE_THE_FIRST_CHANGE = 3
BOTH = pytest.mark.parametrize("act", [rewrite, undo])


@BOTH
def test_the_lease_tells_who_holds_it_and_by_which_clock(act: Any) -> None:
    job = begun(Layout.LEGACY, epochs=2)
    if act is undo:
        rewrite(job.store, job)
    seen: list[LeaseRecord] = []

    def meanwhile() -> None:
        record = newest_lease(job.store, job.paths.leases)
        assert record is not None
        seen.append(record)

    said = JobDirectory([Acting(job, meanwhile, UNDER_THE_LEASE)])
    act(job.store, job, directory=said, owner="the test", clock=lambda: NOW)
    assert "the test" in seen[0].owner
    assert 0 <= seen[0].expires_at_micros - NOW < 3600 * SECOND


@LAYOUTS
@BOTH
def test_metadata_overwritten_at_the_last_moment_is_left_alone(layout: Layout, act: Any) -> None:
    job = begun(layout, epochs=2)
    if act is undo:
        rewrite(job.store, job)
        path = planned_undo(job.store, job).objects[0]
    else:
        other = begun(layout, epochs=2)
        rewrite(other.store, other)
        path = planned_undo(other.store, other).objects[0]
    theirs = job.store.read(path) + b"\xf2\x3f\x01x"  # a field that nobody knows
    said = Acting(job, lambda: job.store.put(path, theirs), BEFORE_THE_FIRST_CHANGE)
    with pytest.raises(ConflictError) as caught:
        act(job.store, job, directory=JobDirectory([said]))
    assert caught.value.facts["job"] == job.paths.root
    assert job.store.read(path) == theirs
