"""Edits of the state of managed jobs: whatever goes wrong, the job has the old state or the new
one, continues from it, and can go back; gc, verify and compaction understand the new epoch."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from arroyo_dagster import (
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    Layout,
    LeaseHeldError,
    MemoryStore,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    Pipeline,
    TableName,
    WriteProtected,
    list_epochs,
    pin_epoch,
    plan_rollback,
    run_compaction,
    run_pipeline,
    run_rollback,
    verify_job,
)
from arroyo_dagster.errors import ArroyoStateError, ConflictError, InputError
from arroyo_dagster.state.model.checkpoints import CONTENT
from arroyo_dagster.state.operations.restore.revision import (
    BEFORE_CLEAN,
    RevisedContent,
    publish_revision,
    restore_revised,
)
from arroyo_dagster.state.operations.surgery.managed import entries
from arroyo_dagster.state.operations.surgery.managed.execute import ManagedUndo
from tests.arroyo_jobs import Telling, facts_of
from tests.dataflows import Flow, builder, definition
from tests.faulty_stores import FaultInjecting
from tests.formats import (
    Edit,
    EditOutcome,
    JobCondition,
    KeyDeletion,
    NewPosition,
    RetainRows,
    SetEntry,
    SetOffsets,
    SetWatermark,
    decode_change_record,
)
from tests.internals import (
    EditOptions,
    JobDirectory,
    LocalRun,
    find_key,
    lease,
    plan_managed_edit,
    plan_managed_undo,
    read_pins,
    run_managed_edit,
    run_managed_undo,
)
from tests.jobs import copied, listing, output_of, state_of, word_job, written_by_word_job
from tests.journeys.test_keyed_state import keyed_job
from tests.keyed_jobs import keyed_content
from tests.shares import LAYOUTS, all_but

pytestmark = pytest.mark.usefixtures("one_at_a_time")

ROWS = 36
SECONDS = 1_000_000
START = 1_704_067_200 * SECONDS
NOBODY = JobDirectory()
KEY = KeyDeletion(values=("d",))


def entry(operator: str, table: str, key: str, value: str) -> SetEntry:
    return SetEntry(operator=OperatorId(operator), table=TableName(table), key=key, value=value)


ENTRY = entry("count", "counts", '"a"', "1000")


def offsets(*texts: str, operator: str | None = None) -> SetOffsets:
    found = []
    for text in texts:
        name, _, position = text.partition("=")
        found.append(NewPosition(partition=name, position=position, relative=position[0] in "+-"))
    named = None if operator is None else OperatorId(operator)
    return SetOffsets(positions=tuple(found), operator=named)


EDITS: dict[str, Edit] = {
    "offsets": offsets("row=-3"),
    "watermark": SetWatermark(at_micros=START + 14 * SECONDS),
    "set": ENTRY,
    "delete-key": KEY,
    "retain": RetainRows(since_micros=START + 12 * SECONDS),
}
EACH_EDIT = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)


def options(layout: Layout, **more: Any) -> dict[str, Any]:
    return {"rows": ROWS, "rows_per_epoch": 2, "keep_epochs": None, **more}


def job(store: ObjectStore, layout: Layout = Layout.PROTOCOL, **more: Any) -> Pipeline:
    made = word_job(store, **options(layout, **more))
    made.layout = layout
    return made


def written(layout: Layout = Layout.PROTOCOL, epochs: int = 8, **more: Any) -> MemoryStore:
    return written_by_word_job(max_epochs=epochs, layout=layout, **options(layout, **more))


def run(store: ObjectStore, pipeline: Pipeline, edit: Edit, **more: Any) -> EditOutcome:
    directory = more.pop("directory", NOBODY)
    chosen = EditOptions(**{"sleep": lambda _: None, **more})
    return run_managed_edit(store, pipeline.paths, directory, edit, chosen)


def undo(store: ObjectStore, pipeline: Pipeline) -> ManagedUndo | None:
    chosen = EditOptions(sleep=lambda _: None)
    return run_managed_undo(store, pipeline.paths, NOBODY, chosen)


def content(store: ObjectStore, pipeline: Pipeline) -> dict[str, Any]:
    """Everything that a restart finds, but for the number of the epoch."""
    found = state_of(store, pipeline)
    newest = ParquetBackend(store, pipeline.paths).load()
    assert newest.progress is not None
    found[""] = {
        "offsets": {
            name: {member: one for member, one in offset.items() if member != CONTENT}
            for name, offset in json.loads(newest.progress.offsets).items()
        },
        "watermarks": {
            one.operator: (one.min_watermark_micros, one.max_watermark_micros)
            for one in newest.operators
        },
    }
    return found


def findings(store: ObjectStore, pipeline: Pipeline) -> tuple[Any, ...]:
    return verify_job(WriteProtected(store), pipeline.paths).verdict.findings


def stopped(pipeline: Pipeline, condition: JobCondition = JobCondition.STOPPED) -> JobDirectory:
    return JobDirectory([Telling(facts_of(pipeline.paths, condition=condition))])


# ---- what an edit does ---------------------------------------------------------------------------


@LAYOUTS
@EACH_EDIT
def test_edit_is_planned_published_as_an_epoch_of_its_own_and_undone_by_another(
    layout: Layout, edit: Edit
) -> None:
    store = written(layout)
    pipeline = job(store, layout)
    before, objects = content(store, pipeline), {i.path: i.etag for i in store.list()}
    plan = plan_managed_edit(WriteProtected(store), pipeline.paths, NOBODY, edit)
    newest = ParquetBackend(store, pipeline.paths).load()
    assert [(one.operator, one.table) for one in plan.tables] == [
        (one.operator, name) for one in newest.operators for name in one.tables
    ]
    assert all(one.reason for one in plan.tables)
    assert (plan.epoch, plan.publishes, plan.why_not, plan.empty) == (8, 9, None, False)
    assert all(one.met and one.evidence for one in plan.preconditions)
    outcome = run(store, pipeline, edit, approved=plan.digest)
    assert (outcome.plan, outcome.published) == (plan, True)
    newest = ParquetBackend(store, pipeline.paths).load()
    assert newest.progress is not None
    assert (newest.epoch, newest.progress.revises) == (9, 8)
    after = content(store, pipeline)
    assert after != before
    assert findings(store, pipeline) == ()
    now = listing(store)
    kept = {path: etag for path, etag in objects.items() if "_arroyo_dagster" not in path}
    hints = ("current-generation", "latest", "hint")
    assert all(
        now.get(path) == etag for path, etag in kept.items() if not any(h in path for h in hints)
    )
    assert outcome.record is not None
    record = decode_change_record(store.read(outcome.record), outcome.record)
    assert (record.epoch, record.operation, record.digest) == (9, edit.name, outcome.plan.digest)
    assert record.objects == outcome.objects
    assert read_pins(store, pipeline.paths).pinned == {8}
    done = undo(store, pipeline)
    assert done is not None
    assert (done.operation, done.rollback.epoch, done.rollback.publishes) == (edit.name, 8, 10)
    assert content(store, pipeline) == before
    assert findings(store, pipeline) == ()
    assert read_pins(store, pipeline.paths).pinned == frozenset()
    assert undo(store, pipeline) is None
    states = {
        one.epoch: one.state and one.state.value for one in list_epochs(store, pipeline.paths)
    }
    assert (states[8], states[9], states[10]) == ("ready", "rolled back", "ready")


@functools.cache
def undisturbed(layout: Layout) -> tuple[Any, Any]:
    """Return the content and the output of the job that no edit disturbs, at its end."""
    store = written(layout, 100)
    return content(store, job(store, layout)), output_of(store)


CONTINUED = [
    (name, undone, layout) for name in EDITS for undone in (False, True) for layout in Layout
]


@pytest.mark.parametrize(
    ("name", "undone", "layout"),
    all_but(CONTINUED, [one for one in CONTINUED if one[1] is not (one[2] is Layout.LEGACY)]),
)
def test_job_continues_from_the_edit_and_as_undisturbed_once_it_is_undone(
    name: str, undone: bool, layout: Layout
) -> None:
    store, edit = written(layout), EDITS[name]
    pipeline = job(store, layout)
    run(store, pipeline, edit)
    if undone:
        undo(store, pipeline)
    run_pipeline(pipeline, store)
    assert findings(store, pipeline) == ()
    end, (expected, whole_output) = content(store, pipeline), undisturbed(layout)
    missing = whole_output - output_of(store)
    if undone:
        assert end == expected
        assert not missing
        return
    assert end[""]["offsets"] == expected[""]["offsets"]
    counts, usual = end["count"]["counts"], expected["count"]["counts"]
    rows, usual_rows = end["keep"]["rows"], expected["keep"]["rows"]
    if isinstance(edit, SetEntry):
        assert counts["a"] >= 1000
        assert {**counts, "a": 0} == {**usual, "a": 0}
    elif isinstance(edit, KeyDeletion):
        others = {key: value for key, value in counts.items() if key != "d"}
        assert others == {key: value for key, value in usual.items() if key != "d"}
        assert rows == usual_rows
    elif isinstance(edit, SetOffsets):
        assert counts != usual
        assert not missing
    else:
        assert (counts, rows) == (usual, usual_rows)


def test_positions_change_in_the_source_and_in_the_progress() -> None:
    store = written()
    pipeline = job(store)
    outcome = run(store, pipeline, offsets("row=+5", operator="lines"))
    assert "5 records from position 16 to 21 are never read" in outcome.plan.missing_outputs[0]
    after = content(store, pipeline)
    assert after[""]["offsets"] == {"lines": {"row": 21}}
    assert after["lines"]["offsets"] == {"row": "21"}
    with pytest.raises(ConflictError, match="already edited by these relative positions"):
        run(store, pipeline, offsets("row=+5", operator="lines"))
    run(store, pipeline, offsets("all=4"))
    assert content(store, pipeline)["lines"]["offsets"] == {"row": "4"}


@pytest.mark.parametrize("pinned", [False, True])
def test_relative_positions_are_refused_while_the_record_of_an_edit_is_not_listed(
    pinned: bool,
) -> None:
    """Also where the pin of a person stands in place of that of the edit."""
    store = written()
    pipeline = job(store)
    if pinned:
        pin_epoch(store, pipeline.paths, ParquetBackend(store, pipeline.paths).load().epoch)
    run(store, pipeline, offsets("row=+5", operator="lines"))
    for one in store.list(f"{pipeline.paths.changes}/"):
        store.delete_many([one.path])
    with pytest.raises(ConflictError, match="an edit whose record is not listed"):
        run(store, pipeline, offsets("row=+5", operator="lines"))
    assert content(store, pipeline)["lines"]["offsets"] == {"row": "21"}
    run(store, pipeline, offsets("all=4"))
    assert content(store, pipeline)["lines"]["offsets"] == {"row": "4"}


def test_positions_of_staged_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a source of Spark, whose offset has one member."""
    store = written()
    monkeypatch.setattr(entries, "STAGED", {"row", CONTENT})
    for edit in (offsets("row=-3"), offsets("all=0")):
        with pytest.raises(InputError, match="rows that were read are deleted"):
            plan_managed_edit(store, job(store).paths, NOBODY, edit)


def test_the_plan_says_that_a_watermark_of_ended_sources_has_no_effect() -> None:
    store = written(epochs=100)
    pipeline = job(store)
    plan = run(store, pipeline, EDITS["watermark"]).plan
    assert any("sources of the job have ended" in one for one in plan.unknown)
    assert run_pipeline(job(store), store).epochs == 0


def test_a_key_is_deleted_with_its_deletes_and_from_every_table_of_its_form() -> None:
    store = written(merge_files_after=100)
    pipeline = job(store, merge_files_after=100)
    before = content(store, pipeline)
    held = find_key(store, pipeline.paths, ["d"])
    assert {(one.operator, one.table) for one in held.found} == {
        ("count", "counts"),
        ("keep", "rows"),
    }
    outcome = run(store, pipeline, KEY)
    after = content(store, pipeline)
    for operator, table in (("count", "counts"), ("keep", "rows")):
        stays = {
            key: value
            for key, value in before[operator][table].items()
            if (key if operator == "count" else key[0]) != "d"
        }
        assert after[operator][table] == stays
    assert (after["sum"], after[""]) == (before["sum"], before[""])
    found = find_key(store, pipeline.paths, ["d"])
    assert all(9 not in one.epochs for one in found.found)
    assert {one.path for one in found.found} == {one.path for one in held.found}
    assert set(outcome.unlisted) <= {one.path for one in held.found}
    assert run(store, pipeline, KEY).published is False


def test_old_rows_go_and_old_deletes_stay() -> None:
    store = written(retention_micros=600 * SECONDS, merge_files_after=100)
    pipeline = job(store, retention_micros=600 * SECONDS, merge_files_after=100)
    before = content(store, pipeline)["keep"]["rows"]
    since = START + 6 * SECONDS
    run(store, pipeline, RetainRows(since_micros=since))
    after = content(store, pipeline)["keep"]["rows"]
    assert after == {row: n for row, n in before.items() if row[1] >= since * 1000}
    assert 0 < sum(after.values()) < sum(before.values())


@pytest.mark.parametrize(
    ("key", "epochs", "held"),
    [("a", 2, {"lists", "timers"}), ("a", 4, {"values", "fleeting", "lists", "maps"})],
)
def test_keyed_state_and_timers_of_a_key_are_deleted_and_others_stay(
    key: str, epochs: int, held: set[str]
) -> None:
    store = MemoryStore()
    pipeline = keyed_job(store)
    run_pipeline(pipeline, store, max_epochs=epochs)
    before = keyed_content(store, pipeline, 2)
    assert {name for name, kept in before.items() if without(kept, key) != kept} == held
    outcome = run(store, pipeline, KeyDeletion(values=(key,)))
    assert {one.operator for one in outcome.plan.changed} == {"keep"}
    after = keyed_content(store, pipeline, 2)
    assert after == {name: without(kept, key) for name, kept in before.items()}
    run_pipeline(keyed_job(store), store)
    assert findings(store, pipeline) == ()


def without(kept: Any, key: str) -> Any:
    """Values by key, or timers as pairs of a key and a time, without those of a key."""
    if isinstance(kept, dict):
        return {one: value for one, value in kept.items() if one != key}
    return {one for one in kept if one[0] != key}


def test_a_key_of_a_dataflow_is_deleted_and_its_offsets_are_refused() -> None:
    flow = Flow(definition(builder("counts().increment(1)"), converter="raw"))
    flow.send("words", ["ann", "bob", "ann", "cid"])
    (pipeline,) = flow.pipelines
    for edit in (offsets("clock_ms=+5"), EDITS["watermark"]):
        with pytest.raises(InputError, match="SDF service cannot be set"):
            plan_managed_edit(flow.store, pipeline.paths, NOBODY, edit)
    for name, kept in {"ann": {"bob": 1, "cid": 1}, "bob": {"cid": 1}}.items():
        flow.restart()
        edit = KeyDeletion(values=(name,))
        run(flow.store, pipeline, edit, directory=stopped(pipeline))
        assert flow.cells("build.counts") == kept
        assert findings(flow.store, pipeline) == ()
    undo(flow.store, pipeline)
    assert flow.cells("build.counts") == {"bob": 1, "cid": 1}
    assert flow.send("words", ["ann"]).cells("build.counts") == {"ann": 1, "bob": 1, "cid": 1}
    assert findings(flow.store, pipeline) == ()


# ---- undo ----------------------------------------------------------------------------------------


@LAYOUTS
def test_each_undo_takes_back_one_edit_the_newest_first(layout: Layout) -> None:
    store = written(layout)
    pipeline = job(store, layout)
    seen = [content(store, pipeline)]
    for edit in EDITS.values():
        run(store, pipeline, edit)
        seen.append(content(store, pipeline))
    for expected, name in zip(reversed(seen[:-1]), reversed(EDITS), strict=True):
        done = undo(store, pipeline)
        assert done is not None
        assert done.operation == name
        assert content(store, pipeline) == expected
        assert findings(store, pipeline) == ()
    assert undo(store, pipeline) is None
    assert read_pins(store, pipeline.paths).pinned == frozenset()
    run(store, pipeline, KEY)
    assert (found := undo(store, pipeline)) is not None
    assert found.operation == "delete-key"


def test_an_undo_leaves_a_pin_that_a_person_has_set() -> None:
    for before in (True, False):
        store = written()
        pipeline = job(store)
        if before:
            pin_epoch(store, pipeline.paths, Epoch(8), owner="ada", reason="audit")
        run(store, pipeline, KEY)
        if not before:
            pin_epoch(store, pipeline.paths, Epoch(8), owner="ada", reason="audit")
        assert undo(store, pipeline) is not None
        assert read_pins(store, pipeline.paths).pinned == {8}, before


@pytest.mark.parametrize("pinned", [frozenset(), frozenset({8})], ids=["no pin", "a pin"])
def test_undoing_a_revision_leaves_a_pin_that_a_person_has_set(pinned: frozenset[int]) -> None:
    """As `sdf clean --undo` does."""
    store = written()
    paths = job(store).paths
    for epoch in pinned:
        pin_epoch(store, paths, Epoch(epoch), owner="ada", reason="before lunch")
    base = ParquetBackend(store, paths).load()
    publish_revision(
        store,
        paths,
        base,
        lambda base, writer: RevisedContent(base.operators),
        reason=BEFORE_CLEAN,
        owner="sdf clean",
    )
    restore_revised(store, paths, ParquetBackend(store, paths).load(), owner="sdf clean --undo")
    assert read_pins(store, paths).pinned == pinned


def test_nothing_is_undone_once_the_job_ran_or_went_back_on_its_own() -> None:
    store = written()
    pipeline = job(store)
    assert undo(store, pipeline) is None
    run(store, pipeline, KEY)
    ran = copied(store)
    run_pipeline(job(ran), ran, max_epochs=1)
    assert undo(ran, pipeline) is None
    run_rollback(store, plan_rollback(store, pipeline.paths, 5), sleep=lambda _: None)
    assert undo(store, pipeline) is None


def test_an_undo_is_refused_while_a_run_may_be_alive() -> None:
    store = written()
    pipeline = job(store)
    run(store, pipeline, KEY)
    LocalRun.start(job(store), store)
    found = plan_managed_undo(WriteProtected(store), pipeline.paths, NOBODY)
    assert found is not None
    assert found.why_not is not None
    was = content(store, pipeline)
    with pytest.raises(InputError, match="may be alive"):
        undo(store, pipeline)
    assert content(store, pipeline) == was


# ---- who else is there ---------------------------------------------------------------------------


def test_an_edit_needs_evidence_that_no_run_is_active_and_fences_one_all_the_same() -> None:
    store = written()
    pipeline = job(store)
    alive = LocalRun.start(job(store), store)
    alive.step()
    plan = plan_managed_edit(store, pipeline.paths, NOBODY, KEY)
    assert plan.why_not is not None
    assert f"arroyo-state stop {pipeline.paths.root}" in plan.why_not
    for directory in (NOBODY, stopped(pipeline, JobCondition.RUNNING)):
        was = listing(store)
        with pytest.raises(InputError, match="cannot be edited now"):
            run(store, pipeline, KEY, directory=directory)
        assert listing(store) == was
    assert run(store, pipeline, KEY, directory=stopped(pipeline)).published
    with pytest.raises(ConflictError, match="fenced"):
        alive.step()
    assert ParquetBackend(store, pipeline.paths).load().epoch == 10
    run_pipeline(job(store), store)
    assert findings(store, pipeline) == ()


def test_a_legacy_job_is_not_edited_while_a_run_holds_its_lease() -> None:
    store = written(Layout.LEGACY)
    pipeline = job(store, Layout.LEGACY)
    alive = LocalRun.start(job(store, Layout.LEGACY), store)
    was = content(store, pipeline)
    with pytest.raises(LeaseHeldError):
        run(store, pipeline, KEY)
    assert content(store, pipeline) == was
    alive.job.close()
    assert run(store, pipeline, KEY).published


def test_two_tools_at_once_one_edits_and_the_other_is_refused() -> None:
    store = written()
    pipeline = job(store)
    with lease(store, pipeline.paths, "another"), pytest.raises(LeaseHeldError):
        run(store, pipeline, KEY)

    class Meanwhile(FaultInjecting):
        """Runs another edit right before the first change of this one."""

        done = False

        def _call(self, verb: str, path: Any, action: Any, data: bytes = b"") -> Any:
            if verb in ("put", "create") and not self.done:
                self.done = True
                run(store, pipeline, ENTRY)
            return super()._call(verb, path, action, data)

    with pytest.raises(ConflictError, match="the current plan is"):
        run(Meanwhile(store), pipeline, KEY)
    assert content(store, pipeline)["count"]["counts"]["a"] == 1000
    assert ParquetBackend(store, pipeline.paths).load().epoch == 9


# ---- gc and compaction ---------------------------------------------------------------------------


def test_compaction_right_behind_an_edit_keeps_its_rows() -> None:
    store = written(merge_files_after=100)
    pipeline = job(store, merge_files_after=100)
    run(store, pipeline, KEY)
    edited = content(store, pipeline)
    settings = CompactionSettings(policy=CompactionPolicy.FULL, min_files=2)
    assert run_compaction(store, pipeline.paths, settings).epoch == 10
    assert content(store, pipeline) == edited
    assert findings(store, pipeline) == ()
    assert undo(store, pipeline) is None
    run_pipeline(pipeline, store, max_epochs=1)
    assert findings(store, pipeline) == ()


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (offsets("line=3"), "no sources have a partition 'line'"),
        (offsets("row=3", operator="count"), "the job has no such source"),
        (offsets("row=-99"), "before the first record"),
        (offsets("row=soon"), "not a position"),
        (entry("lines", "offsets", '"row"', '"3"'), "the position of a source"),
        (entry("out", "p", '"x"', '"3"'), "a commit in two phases"),
        (entry("count", "counts", '"zzz"', "3"), "no entry with the key"),
        (entry("count", "counts", '"a"', '"x"'), "not a value of"),
        (entry("keep", "rows", '"a"', "3"), "no such global keyed table"),
        (KeyDeletion(values=("a", "b")), "no table of the job has a key of 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_choices(edit: Edit, message: str) -> None:
    store = written()
    pipeline = job(store)
    was = listing(store)
    with pytest.raises(ArroyoStateError, match=message):
        plan_managed_edit(WriteProtected(store), pipeline.paths, NOBODY, edit)
    assert listing(store) == was
