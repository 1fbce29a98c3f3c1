"""The state of stopped jobs of Arroyo's, rewritten in place: whatever goes wrong, and wherever, the
job restores the same rows, and nobody's file is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import ConflictError, FormatError, InputError, ProtocolError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    JobId,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    RewriteOptions,
    RewriteOutcome,
    StatePath,
    UndoOptions,
    WriteProtected,
    plan_rewrite,
    plan_undo,
    run_gc,
    run_rewrite,
    run_undo,
    verify_job,
)
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import ListedJob, list_objects
from tests.arroyo_jobs import (
    EVENTS,
    SECOND,
    WINDOW,
    ArroyoJob,
    Telling,
    begun,
    content,
    expect_whole,
    facts_of,
    join_config,
    stopped,
    table_rows,
)
from tests.formats import (
    CheckpointFacts,
    JobCondition,
    LeftOut,
    RewriteShard,
    RowsDigest,
    decode_change_record,
    is_rewritten,
)
from tests.gc_jobs import Clock, Hiding, orphans
from tests.internals import (
    AssumedJobs,
    JobDirectory,
    LeaseOptions,
    RewriteTask,
    lease,
    rewrite_here,
)
from tests.jobs import copied, listing
from tests.shares import LAYOUTS

pytestmark = pytest.mark.usefixtures("one_at_a_time")

FULL = CompactionSettings(policy=CompactionPolicy.FULL)


def rewrite(store: ObjectStore, job: ArroyoJob, **options: Any) -> RewriteOutcome:
    said = options.pop("directory", stopped(job.paths))
    chosen = RewriteOptions(**{"quiet_seconds": 0.0, **options})
    return run_rewrite(store, job.paths, said, FULL, chosen)


Parts = Iterable[RewriteShard | LeftOut]


def with_parts(change: Callable[[list[Any]], Parts | None]) -> Callable[..., Parts]:
    """A rewrite, and what happens to its parts, or meanwhile, before they are published."""

    def run(store: ObjectStore, tasks: Sequence[RewriteTask]) -> Parts:
        parts = list(rewrite_here(store, tasks))
        return change(parts) or parts

    return run


def others(store: MemoryStore) -> dict[StatePath, bytes]:
    """Everything but what is ours."""
    return {
        info.path: store.read(info.path)
        for info in store.list()
        if "_arroyo_dagster" not in info.path and not is_rewritten(info.path)
    }


# ---- what it does --------------------------------------------------------------------------------


@LAYOUTS
def test_a_stopped_job_gets_few_files_of_the_same_rows(layout: Layout) -> None:
    job = begun(layout)
    before, was = content(job.store, job.paths), others(job.store)
    plan = plan_rewrite(WriteProtected(job.store), job.paths, stopped(job.paths), FULL)
    assert plan.why_not is None
    outcome = rewrite(job.store, job)
    assert outcome.published
    assert replace(outcome.plan, tables=()) == replace(plan, tables=())
    assert (outcome.after.files, outcome.after.opens) == (plan.after.files, plan.after.opens)
    listed = set(ParquetBackend(job.store, job.paths).load().paths)
    assert outcome.after.files == len(listed) == 5 < plan.before.files
    sizes = {info.path: info.size_bytes for info in job.store.list()}
    assert outcome.after.size_bytes == sum(sizes[path] for path in listed)
    expect_whole(job.store, job, before, "rewritten")
    now = others(job.store)
    changed = {path for path in was if now[path] != was[path]}
    assert now.keys() == was.keys()
    assert {path.name for path in changed} == (
        {"metadata"} if layout is Layout.LEGACY else {"checkpoint-manifest.pb"}
    )
    assert all("source" not in path and "checkpoint-0000004" in path for path in changed)


@LAYOUTS
def test_what_arroyo_would_lose_is_repaired_and_that_is_said(layout: Layout) -> None:
    job = begun(layout)
    found = {one.code for one in verify_job(job.store, job.paths).verdict.findings}
    assert found - {"table-unknown"} == {"unkeyed-aggregate"}
    plan = plan_rewrite(job.store, job.paths, stopped(job.paths), FULL)
    assert [(one.table, one.lost_rows) for one in plan.repairs] == [("a", 4), ("b", 8)]
    outcome = rewrite(job.store, job)
    # Arroyo would have gone on from the first row of each file: total 31, tuple x.
    assert {p.merged.table: p.repaired for p in outcome.parts} == {"t": 0, "a": 1, "b": 2}
    assert outcome.repaired == 3
    found = {one.code for one in verify_job(job.store, job.paths).verdict.findings}
    assert found == {"table-unknown"}
    assert not plan_rewrite(job.store, job.paths, stopped(job.paths), FULL).repairs


@LAYOUTS
def test_a_job_that_went_on_is_rewritten_again(layout: Layout) -> None:
    job = begun(layout)
    rewrite(job.store, job)
    # The next run carries on what the rewritten epoch lists.
    newest = ParquetBackend(job.store, job.paths).load()
    for operator in newest.operators:
        for name, files in operator.tables.items():
            if (operator.operator, name) in job.files:
                job.files[operator.operator, name] = list(files.files)  # type: ignore[union-attr]
    for _ in range(4):
        times = [99 * SECOND * 1000] * 2
        job.write({("tumbling_1", WINDOW): table_rows(EVENTS, [["k1", "k2"], [7, 7], times])})
    before = content(job.store, job.paths)
    outcome = rewrite(job.store, job)
    assert outcome.published
    expect_whole(job.store, job, before, "again")
    records = job.store.list_dir(job.paths.changes).objects
    assert [info.path for info in records] == [outcome.record]


@LAYOUTS
def test_a_copy_under_another_name_puts_nothing_back_in_the_original(layout: Layout) -> None:
    job = begun(layout)
    rewrite(job.store, job)
    copy = replace(job.paths, job=JobId(f"{job.paths.job}-copy"))
    for info in list(job.store.list(job.paths.root)):
        inside = info.path.removeprefix(job.paths.root)
        job.store.put(StatePath(copy.root + inside), job.store.read(info.path))
    before = listing(job.store)
    for undo in (plan_undo, run_undo):
        with pytest.raises(ProtocolError, match=r"another job|outside|not below") as caught:
            undo(job.store, copy, stopped(copy))
        assert caught.value.facts["job"]
    assert listing(job.store) == before


@LAYOUTS
def test_nothing_is_put_back_once_a_file_of_the_old_lists_is_gone(layout: Layout) -> None:
    job = begun(layout)
    outcome = rewrite(job.store, job)
    assert outcome.record is not None
    record = decode_change_record(job.store.read(outcome.record), outcome.record)
    lost = record.inputs[-1]
    data = job.store.read(lost)
    job.store.delete_many([lost])
    rewritten = others(job.store)
    for undo in (plan_undo, run_undo):
        with pytest.raises(FormatError, match="files of the original lists are missing") as error:
            undo(job.store, job.paths, stopped(job.paths))
        assert error.value.facts == {"job": job.paths.root, "path": lost}
    assert others(job.store) == rewritten
    job.store.put(lost, data)
    assert run_undo(job.store, job.paths, stopped(job.paths)).done


@LAYOUTS
def test_nothing_is_put_back_over_what_somebody_else_has_changed(layout: Layout) -> None:
    job = begun(layout)
    rewrite(job.store, job)
    planned = plan_undo(job.store, job.paths, stopped(job.paths))
    assert planned.objects
    changed = planned.objects[-1]
    managed = job.store.read(changed)
    job.store.put(changed, managed + b"\xf2\x3f\x01x")  # a field that nobody knows
    now = others(job.store)
    with pytest.raises(ConflictError, match="of the job after the rewrite") as error:
        run_undo(job.store, job.paths, stopped(job.paths))
    assert error.value.facts == {"job": job.paths.root, "path": changed}
    assert others(job.store) == now
    job.store.put(changed, managed)
    assert run_undo(job.store, job.paths, stopped(job.paths)).objects == planned.objects


def rewritten_a_month_ago(layout: Layout) -> tuple[ArroyoJob, dict[StatePath, bytes], Clock]:
    """A job that was rewritten, and what it was before."""
    clock = Clock()
    job = begun(layout)
    job.store = copied(job.store, clock=clock)
    was = others(job.store)
    rewrite(job.store, job, clock=clock)
    clock.days(30)
    return job, was, clock


@LAYOUTS
@pytest.mark.parametrize("hidden", ["nothing", "the records", "the names of the records"])
def test_what_putting_back_needs_is_not_collected_and_goes_once_it_is_of_no_use(
    layout: Layout, hidden: str
) -> None:
    """Names are missing as those of a rewrite that died at that very moment."""
    job, was, clock = rewritten_a_month_ago(layout)
    records = "" if hidden != "the records" else str(job.paths.changes)
    cut = Hiding(job.store, lambda path: bool(records) and path.startswith(records))
    if hidden == "the names of the records":
        job.store.delete_many([job.paths.job_pins])
    asked, options = orphans(**{str(job.paths.root): "stopped"}), GcOptions(clock=clock)
    assert hidden == "nothing" or not run_gc(cut, job.paths, asked, options).deleted
    run_gc(cut, job.paths, asked, options)
    assert run_undo(cut, job.paths, stopped(job.paths), UndoOptions(clock=clock)).done
    assert others(job.store) == was
    assert not job.store.list_dir(job.paths.changes).objects
    assert not run_undo(job.store, job.paths, stopped(job.paths), UndoOptions(clock=clock)).done
    clock.days(30)
    assert run_gc(job.store, job.paths, asked, options).deleted  # what the rewrite had made
    assert others(job.store) == was


def test_what_putting_back_needs_is_not_collected_where_the_record_of_the_epoch_is_lost() -> None:
    """The epoch before it counts as the newest one then."""
    job, was, clock = rewritten_a_month_ago(Layout.PROTOCOL)
    record = job.paths.epoch_record(ParquetBackend(job.store, job.paths).load().epoch)
    data = job.store.read(record)
    job.store.delete_many([record])
    asked = orphans(**{str(job.paths.root): "stopped"})
    with contextlib.suppress(ProtocolError):
        run_gc(job.store, job.paths, asked, GcOptions(clock=clock))
    job.store.put(record, data)
    assert run_undo(job.store, job.paths, stopped(job.paths), UndoOptions(clock=clock)).done
    assert others(job.store) == was


@LAYOUTS
def test_nobody_puts_back_beside_a_collector_whatever_a_listing_hides(layout: Layout) -> None:
    clock = Clock()
    job = begun(layout)
    rewrite(job.store, job, clock=clock)
    for _ in range(3):
        with lease(job.store, job.paths, "somebody", LeaseOptions(clock=clock)):
            pass
    cut = Hiding(job.store, lambda path: path.startswith(f"{job.paths.leases}"))
    with (
        lease(job.store, job.paths, "collector", LeaseOptions(clock=clock)),
        pytest.raises(ConflictError, match="the job is leased by"),
    ):
        run_undo(cut, job.paths, stopped(job.paths), UndoOptions(clock=clock))
    assert run_undo(cut, job.paths, stopped(job.paths), UndoOptions(clock=clock)).done


# ---- the job is not at rest ----------------------------------------------------------------------


RUNNING = {"condition": JobCondition.RUNNING, "state": "Running", "run_id": 7}


@LAYOUTS
@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"condition": JobCondition.RUNNING}, "the job runs"),
        ({"condition": JobCondition.CHANGING, "state": "Stopping"}, "Stopping"),
        ({"condition": JobCondition.GONE}, "gone"),
        (
            {"condition": JobCondition.UNKNOWN, "state": "Draining"},
            "the status of the job is unknown",
        ),
        ({"condition": JobCondition.STOPPED, "action_in_progress": True}, "about to be started"),
        ({"condition": JobCondition.STOPPED, "running_desired": True}, "about to be started"),
        (
            {"condition": JobCondition.STOPPED, "ignore_state_before_epoch": Epoch(9)},
            "ignores the epochs",
        ),
        (
            {
                "condition": JobCondition.STOPPED,
                "checkpoints": (CheckpointFacts(epoch=Epoch(5), ready=False, state="committing"),),
                "newest_ready_epoch": Epoch(4),
            },
            "may still have to be committed",
        ),
    ],
)
def test_only_a_job_at_rest_is_rewritten_and_the_plan_says_why_not(
    layout: Layout, facts: dict[str, Any], message: str
) -> None:
    job = begun(layout)
    store = WriteProtected(job.store)
    said = JobDirectory([Telling(facts_of(job.paths, **facts))])
    plan = plan_rewrite(store, job.paths, said, FULL)
    assert plan.tables
    assert plan.why_not is not None
    assert message in plan.why_not
    with pytest.raises(InputError, match=message) as caught:
        rewrite(store, job, directory=said)
    assert caught.value.next_step


def test_a_job_of_which_nobody_speaks_is_refused_and_told_how_to_say_it() -> None:
    job = begun(Layout.LEGACY)
    with pytest.raises(InputError, match="the status of the job is unknown") as caught:
        rewrite(WriteProtected(job.store), job, directory=JobDirectory())
    assert "--assume JOB=stopped" in str(caught.value)


def test_sources_that_disagree_are_not_believed() -> None:
    job = begun(Layout.LEGACY)
    said = JobDirectory(
        [Telling(facts_of(job.paths, JobCondition.STOPPED)), AssumedJobs({"job_x": "running"})]
    )
    with pytest.raises(InputError, match="sources disagree"):
        rewrite(WriteProtected(job.store), job, directory=said)


@LAYOUTS
def test_a_job_that_is_started_at_any_moment_restores_the_same(layout: Layout) -> None:
    """From its k-th answer on the source says that the job runs, as another run."""
    job = begun(layout)
    before = content(job.store, job.paths)
    rest = facts_of(job.paths, JobCondition.STOPPED, run_id=6)
    telling = Telling(rest)
    rewrite(copied(job.store), job, directory=JobDirectory([telling]))
    for later in (facts_of(job.paths, **RUNNING), replace(rest, run_id=7)):
        for at in range(1, telling.asked + 1):
            store = copied(job.store)
            said = JobDirectory([Telling(rest, later=later, at=at)])
            try:
                outcome = rewrite(store, job, directory=said)
            except (ConflictError, InputError):
                # With the new lists Arroyo's cleanup would delete what a run with the old ones has.
                assert others(store) == others(job.store), f"started at answer {at}"
            else:
                # Stopped again as another run before anything was looked at twice.
                assert outcome.plan.run_id == 7
            expect_whole(store, job, before, f"started at answer {at}")


@LAYOUTS
def test_a_start_that_only_the_store_shows_is_noticed(layout: Layout) -> None:
    job = begun(layout)
    store = job.store

    def start_the_job(parts: list[Any]) -> None:
        backend = ParquetBackend(store, job.paths)
        guard = backend.load().ref if layout is Layout.LEGACY else job.paths.current_generation
        data = store.read(guard)  # a restore writes the first anew, a start raises the second
        store.put(guard, data.replace(b'"generation":3', b'"generation":4'))

    before = content(store, job.paths)
    with pytest.raises(ConflictError, match="changed meanwhile"):
        rewrite(store, job, run=with_parts(start_the_job))
    assert content(store, job.paths) == before


# ---- two at once ---------------------------------------------------------------------------------


@LAYOUTS
def test_of_two_executors_one_wins_and_the_other_ends_cleanly(layout: Layout) -> None:
    job = begun(layout)
    before = content(job.store, job.paths)
    refused: list[ConflictError] = []

    def meanwhile(parts: list[Any]) -> None:
        with pytest.raises(ConflictError, match=r"leased by .*the nightly run") as caught:
            rewrite(job.store, job, owner="another")
        refused.append(caught.value)

    assert rewrite(job.store, job, owner="the nightly run", run=with_parts(meanwhile)).published
    assert refused[0].retryable
    expect_whole(job.store, job, before, "one won")
    assert not rewrite(job.store, job, owner="another").changed


@LAYOUTS
def test_who_was_thought_dead_publishes_nothing_over_who_took_over(layout: Layout) -> None:
    job = begun(layout)
    before = content(job.store, job.paths)
    now = [1_000_000_000]
    job.store = copied(job.store, clock=lambda: now[0])
    won: list[RewriteOutcome] = []

    def sleeps_for_long(parts: list[Any]) -> None:
        now[0] += 3600 * 1_000_000
        won.append(rewrite(job.store, job, owner="another", clock=lambda: now[0]))

    with pytest.raises(ConflictError):
        rewrite(job.store, job, run=with_parts(sleeps_for_long), clock=lambda: now[0])
    assert won[0].published
    expect_whole(job.store, job, before, "the second one's")


# ---- verified before published -------------------------------------------------------------------


@LAYOUTS
def test_a_part_that_would_not_restore_the_same_stops_everything(layout: Layout) -> None:
    job = begun(layout)
    was = others(job.store)

    reported: list[RewriteShard | LeftOut] = []

    def lose_a_row(parts: list[Any]) -> Parts:
        return [replace(one, after=RowsDigest(one.after.rows - 1, 7)) for one in parts]

    run = with_parts(lose_a_row)
    with pytest.raises(ProtocolError, match="nothing was published") as caught:
        rewrite(job.store, job, run=run, on_shard=lambda part, _: reported.append(part))
    assert len(reported) == 1
    assert caught.value.facts["job"] == job.paths.root
    assert caught.value.facts["epoch"] == 4
    assert others(job.store) == was


@LAYOUTS
def test_a_new_file_that_vanishes_before_it_is_listed_stops_everything(layout: Layout) -> None:
    job = begun(layout)
    was = others(job.store)

    def lose_a_file(parts: list[Any]) -> None:
        job.store.delete_many(parts[0].merged.output_paths)

    with pytest.raises(ProtocolError, match="does not pass"):
        rewrite(job.store, job, run=with_parts(lose_a_file))
    assert others(job.store) == was


@LAYOUTS
def test_an_epoch_that_is_damaged_already_stays_as_it_is(layout: Layout) -> None:
    """Rows that an upstream compaction doubled would be doubled for good."""
    job = begun(layout)
    twice = replace(
        job.files["tumbling_1", "t"][0],
        path=StatePath(f"{job.files['tumbling_1', 't'][0].path}-compacted"),
        compaction_generation=1,
        epoch=Epoch(4),
    )
    job.store.put(twice.path, job.store.read(job.files["tumbling_1", "t"][0].path))
    job.files["tumbling_1", "t"].append(twice)
    job.write({})
    was = others(job.store)
    assert "file-doubled" in {
        one.code for one in verify_job(job.store, job.paths, level=1).verdict.errors
    }
    # Merged, nobody could tell any more.
    with pytest.raises(ProtocolError, match="doubled"):
        rewrite(job.store, job)
    assert others(job.store) == was


@LAYOUTS
def test_a_missing_file_stops_everything(layout: Layout) -> None:
    job = begun(layout)
    gone = job.files["tumbling_1", "t"][0].path
    job.store.delete_many([gone])
    with pytest.raises(FormatError, match="nothing is rewritten") as caught:
        rewrite(job.store, job)
    assert caught.value.facts["path"] == gone


@LAYOUTS
def test_who_changes_objects_of_the_job_meanwhile_is_noticed(layout: Layout) -> None:
    """A controller's cleanup goes on for a while after a stop."""
    job = begun(layout)
    was, gone = others(job.store), job.files["agg_2", "a"][0].path
    slept: list[float] = []

    def clean_up(seconds: float) -> None:
        slept.append(seconds)
        job.store.delete_many([gone])

    with pytest.raises(ConflictError, match="changed meanwhile") as caught:
        rewrite(job.store, job, quiet_seconds=60.0, sleep=clean_up)
    assert caught.value.retryable
    assert 50 < slept[0] <= 60
    assert others(job.store) == {path: data for path, data in was.items() if path != gone}


@LAYOUTS
def test_a_job_that_changed_since_an_earlier_listing_is_waited_for(layout: Layout) -> None:
    """The change may be a cleanup of Arroyo's that goes on."""
    job = begun(layout)
    now = 1_900_000_000_000_000
    listed = ListedJob(now - 61 * SECOND, list_objects(job.store, job.paths))
    job.store.put(job.paths.root / "left-by-somebody", b"")
    slept: list[float] = []
    outcome = rewrite(
        *(job.store, job),
        quiet_seconds=60.0,
        quiet_since=listed,
        clock=lambda: now,
        sleep=slept.append,
    )
    assert outcome.published
    assert slept == [60.0]


def test_a_job_that_has_gone_on_is_not_put_back() -> None:
    job = begun(Layout.LEGACY)
    rewrite(job.store, job)
    job.write({})
    with pytest.raises(ConflictError, match="would now restore epoch 5"):
        run_undo(job.store, job.paths, stopped(job.paths))


def test_the_epoch_that_arroyo_names_is_rewritten_not_a_later_one() -> None:
    """The database may be one behind: a crash between object and row."""
    job = begun(Layout.LEGACY)
    before = {epoch: content(job.store, job.paths, epoch) for epoch in (3, 4)}
    named = facts_of(job.paths, JobCondition.STOPPED, newest_ready_epoch=Epoch(3))
    outcome = rewrite(job.store, job, directory=JobDirectory([Telling(named)]))
    assert outcome.plan.epoch == 3
    assert {epoch: content(job.store, job.paths, epoch) for epoch in (3, 4)} == before
    missing = facts_of(job.paths, JobCondition.STOPPED, newest_ready_epoch=Epoch(9))
    with pytest.raises(InputError, match="epoch 9, which does not exist"):
        rewrite(job.store, job, directory=JobDirectory([Telling(missing)]))


@pytest.mark.parametrize("key", ["a", "b", "c", "d"])
@LAYOUTS
def test_files_without_rows_in_the_newest_epochs_are_not_taken_for_lost(
    layout: Layout, key: str
) -> None:
    """Their part leaves no output: those of other parts must be as new as they are."""
    job, config = ArroyoJob(layout, parallelism=3), join_config(EVENTS, ["k"])
    rows = table_rows(EVENTS, [[key] * 2, [1, 2], [20 * SECOND * 1000] * 2])
    for written in (rows, rows.slice(0, 0), rows.slice(0, 0)):
        job.write({("join_2", config): written})
    before = content(job.store, job.paths)
    assert rewrite(job.store, job).published
    expect_whole(job.store, job, before, "rewritten")
