"""Edits of the state of stopped Arroyo jobs: whatever goes wrong, the job restores the old state or
the new one, says which, and can go back; nobody's file is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from arroyo_dagster import (
    CompactionPolicy,
    CompactionSettings,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    RewriteOptions,
    StatePath,
    TableName,
    WriteProtected,
    plan_undo,
    run_rewrite,
    run_undo,
    verify_job,
)
from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.model.verify import MAX_LEVEL
from arroyo_dagster.state.tables.known.sources import SequenceNumber, ShardState
from tests.arroyo_jobs import (
    EVENTS,
    SECOND,
    ArroyoJob,
    Telling,
    begun,
    facts_of,
    join_config,
    stopped,
    table_rows,
)
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import (
    Edit,
    EditOutcome,
    GlobalKeyedFiles,
    JobCondition,
    KafkaState,
    KeyDeletion,
    LeftOut,
    NewPosition,
    RetainRows,
    RewriteShard,
    SetEntry,
    SetOffsets,
    SetWatermark,
    TableAction,
    decode_change_record,
    encode,
)
from tests.gc_jobs import Hiding
from tests.internals import (
    EditOptions,
    ExpressionWatermarkState,
    JobDirectory,
    RewriteTask,
    find_key,
    forget_changes,
    plan_edit,
    read_inventory,
    rewrite_here,
    run_edit,
)
from tests.jobs import copied, listing
from tests.shares import LAYOUTS, Share, all_but, everywhere
from tests.surgery_jobs import (
    BEGAN,
    GENERATOR,
    KAFKA,
    NANOS,
    WATERMARK,
    SurgeryJob,
    encoded,
    global_config,
    held_rows,
    surgery_job,
)

pytestmark = pytest.mark.usefixtures("one_at_a_time")

KEY = KeyDeletion(values=("k1",))
SINCE = BEGAN + 48 * SECOND
RETAIN = RetainRows(since_micros=SINCE)
TO_WATERMARK = SetWatermark(at_micros=BEGAN + 80 * SECOND)
ENTRY = SetEntry(
    operator=OperatorId("source_kafka_1"),
    table=TableName("k"),
    key="4",
    value='{"partition": 4, "offset": 5}',
)


def positions(*texts: str, operator: str | None = None) -> SetOffsets:
    """`0=+5` as relative, `0=5` as absolute."""
    found = []
    for text in texts:
        partition, _, position = text.rpartition("=")
        relative = position[0] in "+-"
        found.append(NewPosition(partition=partition, position=position, relative=relative))
    named = None if operator is None else OperatorId(operator)
    return SetOffsets(positions=tuple(found), operator=named)


BOTH_SOURCES = positions("0=900", "3=17", "4=+50")
EDITS = {
    "offsets": BOTH_SOURCES,
    "watermark": TO_WATERMARK,
    "set": ENTRY,
    "delete-key": KEY,
    "retain": RETAIN,
}
EACH_EDIT = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)


def run(store: ObjectStore, job: ArroyoJob, edit: Edit, **options: Any) -> EditOutcome:
    directory = options.pop("directory", stopped(job.paths))
    chosen = EditOptions(**{"quiet_seconds": 0.0, **options})
    return run_edit(store, job.paths, directory, edit, chosen)


def entries(store: ObjectStore, paths: JobPaths) -> dict[tuple[str, str, int], dict[Any, Any]]:
    """The entries of each file of each global keyed table, as bytes, read without our reader."""
    import io

    import pyarrow.parquet as pq

    found = {}
    for operator in ParquetBackend(store, paths).load().operators:
        for name, files in operator.tables.items():
            for at, path in enumerate(files.files if isinstance(files, GlobalKeyedFiles) else ()):
                rows = pq.read_table(io.BytesIO(store.read(path)))
                pairs = zip(
                    rows.column("key").to_pylist(), rows.column("value").to_pylist(), strict=True
                )
                found[str(operator.operator), str(name), at] = dict(pairs)
    return found


def state_of(store: ObjectStore, paths: JobPaths) -> dict[str, Any]:
    """Everything that a restore takes from each operator: rows, entries, watermarks."""
    rows, pairs = held_rows(store, paths), entries(store, paths)
    return {
        str(one.operator): (
            (one.min_watermark_micros, one.max_watermark_micros, one.parallelism, one.epoch),
            {key: value for key, value in rows.items() if key[0] == one.operator},
            {key: value for key, value in pairs.items() if key[0] == one.operator},
        )
        for one in ParquetBackend(store, paths).load().operators
    }


def others(store: MemoryStore) -> dict[StatePath, bytes]:
    """Everything but what this package writes."""
    return {
        info.path: store.read(info.path)
        for info in store.list()
        if "_arroyo_dagster" not in info.path and "-ext-" not in info.path
    }


def errors_of(store: ObjectStore, paths: JobPaths, level: int = MAX_LEVEL) -> set[str]:
    verdict = verify_job(WriteProtected(store), paths, level=level).verdict
    return {one.code for one in verdict.errors}


# ---- what an edit does ---------------------------------------------------------------------------


@LAYOUTS
@EACH_EDIT
def test_a_dry_run_says_what_becomes_of_every_table_and_only_operators_that_change_are_overwritten(
    layout: Layout, edit: Edit
) -> None:
    job = surgery_job(layout)
    was = others(job.store)
    plan = plan_edit(WriteProtected(job.store), job.paths, stopped(job.paths), edit)
    assert {(one.operator, one.table) for one in plan.tables} == {
        (str(operator), str(name))
        for operator, names in (
            (one.operator, one.tables)
            for one in ParquetBackend(job.store, job.paths).load().operators
        )
        for name in names
    }
    assert all(one.reason for one in plan.tables)
    assert plan.why_not is None
    assert all(one.met and one.evidence for one in plan.preconditions)
    assert not plan.empty
    outcome = run(job.store, job, edit, approved=plan.digest)
    assert (outcome.plan, outcome.published) == (plan, True)
    now = others(job.store)
    assert now.keys() == was.keys()
    changed = {path for path in was if now[path] != was[path]}
    assert changed == set(outcome.objects)
    for path in changed:
        assert path.startswith(f"{outcome.plan.ref.parent}/")
    if layout is Layout.LEGACY:
        names = {one.operator for one in (*outcome.plan.changed, *outcome.plan.watermarks)}
        assert changed == {job.paths.operator_metadata(one, outcome.plan.epoch) for one in names}
    assert errors_of(job.store, job.paths) == set()


@LAYOUTS
def test_offsets_are_set_by_the_types_of_each_connector(layout: Layout) -> None:
    job = surgery_job(layout)
    before = state_of(job.store, job.paths)
    plan = run(job.store, job, positions("0=+1000", "3=17", "4=-2999")).plan
    after = state_of(job.store, job.paths)
    impulse, kafka = "source_impulse_0", "source_kafka_1"
    assert {name for name in after if after[name] != before[name]} == {impulse, kafka}
    pairs = after[kafka][2]
    assert pairs[kafka, "k", 0] == encoded(
        "kafka offsets", {3: KafkaState(3, 17), 5: KafkaState(5, 20)}
    )
    assert pairs[kafka, "k", 1] == encoded("kafka offsets", {4: KafkaState(4, 1)})
    assert after[impulse][2][impulse, "i", 1] == before[impulse][2][impulse, "i", 1]
    assert after[impulse][2][impulse, "i", 0] == {
        b"\0": b"\xfb\x14\x05" + bytes.fromhex("fc00f1536500")
    }
    assert [one.partition(" partition ")[2].split(":")[0] for one in plan.missing_outputs] == ["0"]
    assert [one.partition(" partition ")[2].split(":")[0] for one in plan.duplicate_outputs] == [
        "3",
        "4",
    ]
    # An impulse source was tried on a real cluster, Kafka was not.
    assert [kafka in one for one in plan.unknown] == [True]


@LAYOUTS
def test_all_partitions_and_one_operator_can_be_named(layout: Layout) -> None:
    job = surgery_job(layout)
    before = state_of(job.store, job.paths)
    plan = run(job.store, job, positions("all=+5", "3=1", operator="source_kafka_1")).plan
    assert [(one.key, one.after) for one in plan.changed[0].entries] == [
        ("3", '{"partition": 3, "offset": 1}'),
        ("5", '{"partition": 5, "offset": 25}'),
        ("4", '{"partition": 4, "offset": 3005}'),
    ]
    after = state_of(job.store, job.paths)
    assert {name for name in after if after[name] != before[name]} == {"source_kafka_1"}


@LAYOUTS
def test_a_watermark_moves_at_generators_and_operators_and_nowhere_else(layout: Layout) -> None:
    job = surgery_job(layout)
    before = state_of(job.store, job.paths)
    at = TO_WATERMARK.at_micros
    plan = run(job.store, job, TO_WATERMARK).plan
    after = state_of(job.store, job.paths)
    moved = ExpressionWatermarkState(at * 1000 + 9 * NANOS, at * 1000)
    assert after["watermark_2"][2] == {
        ("watermark_2", "s", 0): encoded("expression watermark state", {0: moved}),
        ("watermark_2", "s", 1): encoded("expression watermark state", {1: moved}),
    }
    for name in before:
        expected = (at, at) if before[name][0][0] is not None else (None, None)
        assert after[name][0][:2] == expected, name
    # The rows that Arroyo loads at the new watermark, by its rule (5.4): none older than 40 s.
    window = before["window_3"][1]["window_3", "t"]
    loaded = [row for row in window if row[2] >= (at - 40 * SECOND) * 1000]
    assert after["window_3"][1]["window_3", "t"] == loaded
    assert len(loaded) == len(window) - 2
    rows, windows = plan.missing_outputs
    assert rows.startswith("window_3.t: 2 rows are older")
    assert windows.startswith("window_3: 2 of ")


@LAYOUTS
def test_an_entry_is_set_in_the_form_in_which_it_is_printed(layout: Layout) -> None:
    job = surgery_job(layout)
    before = state_of(job.store, job.paths)
    run(job.store, job, ENTRY)
    after = state_of(job.store, job.paths)
    assert {name for name in after if after[name] != before[name]} == {"source_kafka_1"}
    assert after["source_kafka_1"][2]["source_kafka_1", "k", 1] == {b"\x08": b"\x08\x0a"}


def without_key(state: dict[str, Any], key: str) -> dict[str, Any]:
    """The truth of a deletion: the rows of every table whose first column is not the key."""
    return {
        name: (
            head,
            {table: [row for row in found if row[0] != key] for table, found in rows.items()},
            pairs,
        )
        for name, (head, rows, pairs) in state.items()
    }


@LAYOUTS
def test_a_key_is_gone_from_every_table_and_nothing_else_is(layout: Layout) -> None:
    job = surgery_job(layout)
    before = state_of(job.store, job.paths)
    outcome = run(job.store, job, KEY)
    assert state_of(job.store, job.paths) == without_key(before, "k1")
    assert {(one.operator, one.table): one.removed for one in outcome.plan.changed} == {
        ("window_3", "t"): 3,
        ("join_4", "left"): 3,
        ("agg_5", "a"): 3,
        ("agg_5", "b"): 6,
    }
    assert errors_of(job.store, job.paths) == set()
    newest = set(ParquetBackend(job.store, job.paths).load().paths)
    left = find_key(job.store, job.paths, ["k1"])
    assert not newest & {one.path for one in left.found}
    assert not [one for one in left.unknown if "cannot be read" in one]
    # The epochs before, and the files that only the edited one listed, still hold it.
    assert {one.place for one in left.found} == {"epochs", "unlisted"}
    assert {epoch for one in left.found for epoch in one.epochs} == {1, 2}
    assert {one.path for one in left.found} <= set(outcome.unlisted)
    assert outcome.older_epochs == (1, 2)


@LAYOUTS
def test_the_record_of_a_deletion_holds_no_value_of_the_state(layout: Layout) -> None:
    job = surgery_job(layout)
    outcome = run(job.store, job, KEY)
    assert outcome.record is not None
    path = job.paths.changes / outcome.record.name
    data = job.store.read(path)
    assert b"k1" not in data
    record = decode_change_record(data, path)
    assert (record.operation, record.digest) == ("delete-key", outcome.plan.digest)
    assert dict(record.objects) == dict(outcome.objects)
    assert encode(record) == data


@LAYOUTS
def test_a_table_without_a_row_left_vanishes_as_arroyo_lets_it(layout: Layout) -> None:
    job = ArroyoJob(layout, watermark_micros=WATERMARK)
    times = [BEGAN * 1000 + 50 * NANOS] * 2
    rows = table_rows(EVENTS, [["k1", "k1"], [1, 2], times])
    job.write({("join_4", join_config(EVENTS, ["k"])): rows})
    job.write({})
    plan = run(job.store, job, KEY).plan
    assert [one.action for one in plan.changed] == [TableAction.EMPTIED]
    join = ParquetBackend(job.store, job.paths).load().operator("join_4")
    assert join is not None
    assert (dict(join.tables), dict(join.configs)) == ({}, {})
    # Without its record the epoch would look like one that a compaction has damaged.
    assert errors_of(job.store, job.paths) == set()
    for info in job.store.list_dir(job.paths.changes).objects:
        job.store.delete_many([info.path])
    assert errors_of(job.store, job.paths) == {"file-lost"}


@LAYOUTS
def test_old_rows_go_and_young_ones_and_aggregates_stay(layout: Layout) -> None:
    job = surgery_job(layout)
    before = state_of(job.store, job.paths)
    run(job.store, job, RETAIN)
    after = state_of(job.store, job.paths)
    for name, table in (("window_3", "t"), ("join_4", "left")):
        young = [row for row in before[name][1][name, table] if row[2] >= SINCE * 1000]
        assert 0 < len(young) < len(before[name][1][name, table])
        assert after[name][1][name, table] == young
    unchanged = set(after) - {"window_3", "join_4"}
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}


@LAYOUTS
def test_rows_of_a_join_that_lose_the_row_that_kept_them_are_dropped(layout: Layout) -> None:
    """Arroyo keeps a whole record batch while one of its rows is not too old."""
    job = ArroyoJob(layout, watermark_micros=WATERMARK, parallelism=1)
    old, young = BEGAN * 1000, (WATERMARK - 5 * SECOND) * 1000
    rows = table_rows(EVENTS, [["k0", "k1", "k2"], [1, 2, 3], [old, young, old]])
    job.write({("join_4", join_config(EVENTS, ["k"], retention=10)): rows})
    assert len(held_rows(job.store, job.paths)["join_4", "left"]) == 3
    run(job.store, job, KEY)
    assert held_rows(job.store, job.paths) == {}
    assert errors_of(job.store, job.paths) == set()


@LAYOUTS
def test_what_changes_nothing_publishes_nothing(layout: Layout) -> None:
    job = surgery_job(layout)
    before = listing(job.store)
    for edit in (
        KeyDeletion(values=("nobody",)),
        RetainRows(since_micros=BEGAN),
        positions("3=3000"),
        SetWatermark(at_micros=WATERMARK),
    ):
        outcome = run(job.store, job, edit)
        assert outcome.plan.empty, edit
        assert not outcome.published
    assert listing(job.store) == before


# ---- undo ----------------------------------------------------------------------------------------


@LAYOUTS
@EACH_EDIT
def test_an_edit_is_undone_byte_for_byte(layout: Layout, edit: Edit) -> None:
    job = surgery_job(layout)
    was = others(job.store)
    run(job.store, job, edit)
    assert others(job.store) != was
    planned = plan_undo(WriteProtected(job.store), job.paths, stopped(job.paths))
    assert planned.operation == edit.name
    undone = run_undo(job.store, job.paths, stopped(job.paths))
    assert (undone.done, undone.operation) == (True, edit.name)
    assert others(job.store) == was
    assert not job.store.list_dir(job.paths.changes).objects
    assert errors_of(job.store, job.paths) == set()
    assert run(job.store, job, edit).published


@LAYOUTS
def test_edits_and_a_compaction_are_undone_in_their_order(layout: Layout) -> None:
    job = surgery_job(layout)
    states = [others(job.store)]
    run(job.store, job, KEY)
    states.append(others(job.store))
    settings = CompactionSettings(policy=CompactionPolicy.FULL)
    run_rewrite(job.store, job.paths, stopped(job.paths), settings, RewriteOptions(quiet_seconds=0))
    run(job.store, job, BOTH_SOURCES)
    assert errors_of(job.store, job.paths) == set()
    names = []
    while (undone := run_undo(job.store, job.paths, stopped(job.paths))).done:
        names.append(undone.operation)
        if undone.operation is not None:
            states.append(others(job.store))
    assert names in (["offsets", None, "delete-key"], ["offsets", "delete-key"])
    assert others(job.store) == states[0]


@LAYOUTS
@pytest.mark.parametrize("hidden", ["changes", "retained.json"])
def test_relative_positions_are_not_applied_again_where_a_listing_lacks_the_record(
    layout: Layout, hidden: str
) -> None:
    job = surgery_job(layout)
    run(job.store, job, KEY)
    assert run(job.store, job, positions("4=+50")).published
    expected = state_of(job.store, job.paths)
    lagging = Hiding(job.store, lambda path: f"/_arroyo_dagster/{hidden}" in path)
    with pytest.raises(ConflictError, match="already edited by these relative"):
        run(lagging, job, positions("4=+50"))
    assert state_of(job.store, job.paths) == expected
    assert run_undo(lagging, job.paths, stopped(job.paths)).done
    assert run(lagging, job, positions("4=+50")).published


@LAYOUTS
def test_relative_positions_are_refused_where_no_record_of_the_edit_is_left(layout: Layout) -> None:
    job = surgery_job(layout)
    run(job.store, job, positions("4=17"))
    expected = state_of(job.store, job.paths)
    forget_changes(job.store, job.paths, lambda name: True)
    lagging = Hiding(job.store, lambda path: "/changes/" in path)
    with pytest.raises(ConflictError, match="whose record is not listed"):
        run(lagging, job, positions("4=+50"))
    assert state_of(job.store, job.paths) == expected
    assert run(lagging, job, positions("4=60")).published


def test_a_record_that_was_renamed_or_lost_is_named_and_nothing_is_undone() -> None:
    job = surgery_job(Layout.LEGACY)
    record = run(job.store, job, KEY).record
    assert record is not None
    was, data = others(job.store), job.store.read(record)
    job.store.delete_many([record])
    with pytest.raises(NotFoundError, match="the record of the last change is lost") as lost:
        run_undo(job.store, job.paths, stopped(job.paths))
    assert lost.value.facts["path"] == record
    renamed = job.paths.changes / record.name.replace("-edit", "-compaction")
    job.store.put(renamed, data)
    for refused in (read_inventory, lambda store, _: run(store, job, TO_WATERMARK)):
        with pytest.raises(FormatError, match="is that of another change") as error:
            refused(job.store, job.paths)
        assert error.value.facts["path"] == renamed
    assert others(job.store) == was


@LAYOUTS
def test_relative_positions_are_refused_where_a_record_of_the_epoch_does_not_decode(
    layout: Layout,
) -> None:
    job = surgery_job(layout)
    record = run(job.store, job, positions("4=+50")).record
    assert record is not None
    job.store.put(job.paths.changes / record.name, b"{")
    with pytest.raises(ConflictError, match="does not decode"):
        run(job.store, job, positions("4=+50"))
    job.start()
    job.write({})
    with pytest.raises(FormatError, match="a record that this release does not read"):
        run(job.store, job, positions("4=+50"))


def test_an_interrupted_edit_is_found_where_a_listing_lacks_its_record() -> None:
    job = surgery_job(Layout.LEGACY)
    counted = FaultInjecting(copied(job.store))
    run(counted, job, KEY)
    for at in range(counted.changes, 0, -1):
        store = copied(job.store)
        with contextlib.suppress(Crash):
            run(FaultInjecting(store, fail_at=at, crash=True), job, KEY)
        if errors_of(store, job.paths, 0):
            break
    lagging = Hiding(store, lambda path: "/changes/" in path)
    assert errors_of(lagging, job.paths, 0) == {"edit-unfinished"}
    with pytest.raises(ConflictError, match="was interrupted"):
        run(lagging, job, RETAIN)
    assert run_undo(lagging, job.paths, stopped(job.paths)).done
    assert errors_of(lagging, job.paths, 0) == set()


@LAYOUTS
def test_a_later_edit_may_restore_what_an_earlier_one_changed(layout: Layout) -> None:
    """Then some objects have the bytes from before the earlier edit: it is not unfinished."""
    job = surgery_job(layout)
    was = others(job.store)
    run(job.store, job, TO_WATERMARK)
    run(job.store, job, SetWatermark(at_micros=WATERMARK))
    assert errors_of(job.store, job.paths) == set()
    assert run(job.store, job, KEY).published
    while run_undo(job.store, job.paths, stopped(job.paths)).done:
        assert errors_of(job.store, job.paths) == set()
    assert others(job.store) == was


# ---- faults --------------------------------------------------------------------------------------

MODES = pytest.mark.parametrize(
    ("mode", "crash"),
    all_but(
        [("before", False), ("after", False), ("before", True), ("after", True)],
        [("before", False), ("after", True)],
    ),
)
EVERYWHERE = everywhere("layout")


def either_state_and_undone(
    job: SurgeryJob,
    take: Callable[..., Any],
    layout: Layout,
    share: Share,
    fault: tuple[Literal["before", "after"], bool],
    sparse: int = 5,
) -> None:
    """With a fault at any change, each operator has its own state or the taken one; undo restores
    the job's own, and the next call takes the other.

    Args:
        take: executes the change on `store`.
        fault: when it strikes, and whether the process ends there.
        sparse: one of how many points is tried, where not all are.
    """
    mode, crash = fault
    before, was = state_of(job.store, job.paths), others(job.store)
    counted = FaultInjecting(copied(job.store))
    take(store=counted)
    after = state_of(counted, job.paths)
    assert after != before
    for at in share(range(1, counted.changes + 1), sparse=sparse):
        note = f"fault at change {at} of {counted.changes}"
        store = copied(job.store)
        with contextlib.suppress(Crash, OSError):
            take(store=FaultInjecting(store, fail_at=at, mode=mode, crash=crash))
        assert others(store).keys() == was.keys(), note
        found = state_of(store, job.paths)
        for name, one in found.items():
            assert one in (before[name], after[name]), note
        mixed = found not in (before, after)
        assert not mixed or layout is Layout.LEGACY
        assert errors_of(store, job.paths, 1) == ({"edit-unfinished"} if mixed else set()), note
        if mixed:
            with pytest.raises(ConflictError, match="was interrupted"):
                take(store=copied(store))
        run_undo(store, job.paths, stopped(job.paths))
        assert others(store) == was, note
        take(store=store)
        assert state_of(store, job.paths) == after, note


@EVERYWHERE
@MODES
@pytest.mark.parametrize("name", ["offsets", "watermark", "set"])  # the explorer draws the others
def test_a_fault_at_any_change_leaves_the_old_state_or_the_new_one(
    layout: Layout, share: Share, mode: Literal["before", "after"], crash: bool, name: str
) -> None:
    job = surgery_job(layout, epochs=2)

    def take(store: ObjectStore) -> EditOutcome:
        return run(store, job, EDITS[name])

    either_state_and_undone(job, take, layout, share, (mode, crash), sparse=2)


# ---- beside gc and other tools -------------------------------------------------------------------


# ---- refusals ------------------------------------------------------------------------------------

Refusal = tuple[Edit, type[Exception], str]
REFUSED: dict[str, Refusal] = {
    "unknown partition": (positions("9=5"), InputError, "no source has a partition '9'"),
    "no source": (
        positions("0=5", operator="window_3"),
        InputError,
        "the operator is no source whose positions can be set",
    ),
    "before the first record": (
        positions("3=-2001"),
        InputError,
        "the new position would be -1, before the first record",
    ),
    "no number": (positions("3=many"), InputError, "not a position: 'many'"),
    "too large": (positions(f"3={2**63}"), InputError, "not a position"),
    "watermark within the retention of 1970": (
        SetWatermark(at_micros=3599 * SECOND),
        InputError,
        "smaller than the retention of a table",
    ),
    "rows cannot be set": (
        SetEntry(operator=OperatorId("window_3"), table=TableName("t"), key="1", value="1"),
        InputError,
        "no such global keyed table",
    ),
    "no such key": (replace(ENTRY, key="7"), InputError, "no entry with the key 7"),
    "no JSON": (replace(ENTRY, value="{"), InputError, "the value is no JSON"),
    "a field too few": (
        replace(ENTRY, value='{"partition": 4}'),
        InputError,
        "not a value of KafkaState",
    ),
    "a value of another type": (
        replace(ENTRY, value='{"partition": 4, "offset": "5"}'),
        InputError,
        "not a value of i64",
    ),
    "a value that does not fit": (
        replace(ENTRY, value='{"partition": 4, "offset": 9223372036854775808}'),
        InputError,
        "9223372036854775808",
    ),
    "a generator's watermark alone": (
        SetEntry(operator=OperatorId("watermark_2"), table=TableName("s"), key="0", value="{}"),
        InputError,
        "belongs to the operators' watermarks",
    ),
    "a key of two columns": (
        KeyDeletion(values=("k1", "k2")),
        InputError,
        "no table of the job has a key of 2 such values",
    ),
    "a key of another operator": (
        KeyDeletion(values=("k1",), operator=OperatorId("nobody_9")),
        InputError,
        "no table of the job has a key",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_its_object_and_changes_nothing(name: str) -> None:
    edit, kind, message = REFUSED[name]
    job = surgery_job(Layout.LEGACY, epochs=2)
    before = listing(job.store)
    for act in (
        lambda: plan_edit(job.store, job.paths, stopped(job.paths), edit),
        lambda: run(job.store, job, edit),
    ):
        with pytest.raises(kind, match=message):
            act()
    assert listing(job.store) == before


def test_two_sources_with_one_partition_need_the_operator() -> None:
    job = SurgeryJob(Layout.LEGACY)
    for name in ("source_kafka_1", "source_kafka_9"):
        job.keep(name, KAFKA, {3: KafkaState(3, 1)})
    job.write({})
    with pytest.raises(InputError, match="2 sources have a partition '3'") as refused:
        plan_edit(job.store, job.paths, stopped(job.paths), positions("3=1"))
    assert refused.value.facts["operators"] == "source_kafka_1, source_kafka_9"
    assert refused.value.next_step == "name one with --operator"
    run(job.store, job, positions("3=7", operator="source_kafka_9"))
    assert entries(job.store, job.paths)["source_kafka_9", "k", 0] == {b"\x06": b"\x06\x0e"}


def test_a_commit_in_two_phases_is_not_edited() -> None:
    job = surgery_job(Layout.LEGACY)
    job.keep("sink_8", global_config("i", "index for transactional ids", commits=True), {0: 7})
    job.write({})
    edit = SetEntry(operator=OperatorId("sink_8"), table=TableName("i"), key="0", value="8")
    with pytest.raises(InputError, match="commit in two phases"):
        plan_edit(job.store, job.paths, stopped(job.paths), edit)
    back = plan_edit(job.store, job.paths, stopped(job.paths), positions("3=1"))
    assert "committed in two phases" in back.duplicate_outputs[-1]


def test_entries_of_unknown_types_are_not_edited() -> None:
    job = begun(Layout.LEGACY)
    edit = SetEntry(operator=OperatorId("source_0"), table=TableName("s"), key="0", value="8")
    with pytest.raises(FormatError, match="no type is known"):
        plan_edit(job.store, job.paths, stopped(job.paths), edit)
    with pytest.raises(InputError, match="no source whose positions can be set"):
        plan_edit(job.store, job.paths, stopped(job.paths), positions("0=1"))


def test_a_job_without_a_watermark_gets_none() -> None:
    job = surgery_job(Layout.LEGACY)
    job.keep("watermark_2", GENERATOR, {}, {})
    job.write({})
    with pytest.raises(InputError, match="has a watermark yet"):
        plan_edit(job.store, job.paths, stopped(job.paths), TO_WATERMARK)


@LAYOUTS
@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (JobCondition.RUNNING, "the job runs"),
        (JobCondition.CHANGING, "the job is changing"),
        (JobCondition.UNKNOWN, "status of the job is unknown"),
    ],
)
def test_a_job_that_is_not_at_rest_is_planned_and_not_edited(
    layout: Layout, condition: JobCondition, message: str
) -> None:
    job = surgery_job(layout, epochs=2)
    before = listing(job.store)
    said = JobDirectory([Telling(facts_of(job.paths, condition))])
    plan = plan_edit(job.store, job.paths, said, KEY)
    assert plan.why_not is not None
    assert [one.name for one in plan.preconditions if not one.met] == ["the job is stopped"]
    with pytest.raises(InputError, match=message) as refused:
        run(job.store, job, KEY, directory=said)
    assert refused.value.next_step
    assert listing(job.store) == before


@LAYOUTS
def test_another_plan_than_the_approved_one_is_refused(layout: Layout) -> None:
    job = surgery_job(layout)
    approved = plan_edit(job.store, job.paths, stopped(job.paths), KEY).digest
    run(job.store, job, BOTH_SOURCES)  # a source that is edited changes the metadata
    before = listing(job.store)
    for edit in (KEY, KeyDeletion(values=("k2",))):
        with pytest.raises(ConflictError, match="was approved, but the current plan is"):
            run(job.store, job, edit, approved=approved)
    assert listing(job.store) == before


@LAYOUTS
def test_a_missing_file_stops_everything(layout: Layout) -> None:
    job = surgery_job(layout)
    lost = ParquetBackend(job.store, job.paths).load().paths[-1]
    job.store.delete_many([lost])
    before = listing(job.store)
    with pytest.raises(FormatError, match="data files are missing"):
        run(job.store, job, BOTH_SOURCES)
    assert listing(job.store) == before


def test_a_job_without_an_epoch_has_nothing_to_edit() -> None:
    with pytest.raises(NotFoundError):
        plan_edit(MemoryStore(), ArroyoJob(Layout.LEGACY).paths, JobDirectory(), KEY)


@LAYOUTS
def test_rows_that_come_back_wrong_are_never_published(layout: Layout) -> None:
    job = surgery_job(layout)
    was = others(job.store)

    def loses(store: ObjectStore, tasks: Sequence[RewriteTask]) -> Iterable[RewriteShard | LeftOut]:
        for shard in rewrite_here(store, tasks):
            assert isinstance(shard, RewriteShard)
            yield replace(shard, after=replace(shard.after, rows=shard.after.rows + 1))

    def removes_nothing(
        store: ObjectStore, tasks: Sequence[RewriteTask]
    ) -> Iterable[RewriteShard | LeftOut]:
        return rewrite_here(store, [replace(task, removes=None) for task in tasks])

    def gives_up(
        store: ObjectStore, tasks: Sequence[RewriteTask]
    ) -> Iterable[RewriteShard | LeftOut]:
        yield LeftOut(operator=OperatorId("x"), table=TableName("t"), reason="strange rows")

    broken: list[tuple[Callable[..., Any], str]] = [
        (loses, "would not restore the rows"),
        (removes_nothing, "of the rows to remove are in a new file"),
        (gives_up, "strange rows"),
        (lambda store, tasks: (), "shards returned a result"),
    ]
    for act, message in broken:
        with pytest.raises(ProtocolError, match=message):
            run(job.store, job, KEY, run=act)
        assert others(job.store) == was
        assert not job.store.list_dir(job.paths.changes).objects


@LAYOUTS
def test_an_epoch_that_would_not_verify_is_not_published(layout: Layout) -> None:
    job = surgery_job(layout)
    was = others(job.store)

    def breaks(
        store: ObjectStore, tasks: Sequence[RewriteTask]
    ) -> Iterable[RewriteShard | LeftOut]:
        for shard in rewrite_here(store, tasks):
            for path in shard.merged.output_paths if isinstance(shard, RewriteShard) else ():
                rest = store.read(path)[:-9]
                yield shard
                store.put(path, rest)

    with pytest.raises((ProtocolError, FormatError)):
        run(job.store, job, KEY, run=breaks)
    assert others(job.store) == was
    assert not job.store.list_dir(job.paths.changes).objects


@LAYOUTS
def test_a_closed_kinesis_shard_is_not_read_again(layout: Layout) -> None:
    job = surgery_job(layout)
    shards = {
        name: ShardState("events", name, SequenceNumber("17"), closed)
        for name, closed in (("shard-0", True), ("shard-1", False))
    }
    job.keep("source_kinesis_7", global_config("k", "kinesis source state"), shards)
    job.write({})
    was = listing(job.store)
    with pytest.raises(InputError, match="the shard is closed") as caught:
        plan_edit(job.store, job.paths, stopped(job.paths), positions("events/shard-0=latest"))
    assert caught.value.facts["partition"] == "events/shard-0"
    assert listing(job.store) == was
    plan = plan_edit(job.store, job.paths, stopped(job.paths), positions("events/shard-1=latest"))
    (changed,) = (one for step in plan.changed for one in step.entries)
    assert (changed.key, '"closed": false' in changed.after) == ('"shard-1"', True)
