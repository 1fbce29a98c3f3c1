"""Tables of a stopped Arroyo job computed from events: what a restore loads is what the events say,
and the job goes on from the cut. Whatever goes wrong, it has its own state or the computed one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster import (
    Layout,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    TableName,
    WriteProtected,
    open_state,
    run_undo,
)
from arroyo_dagster.errors import ConflictError, InputError, ProtocolError
from arroyo_dagster.state.operations.query.operator_state import sessions
from arroyo_dagster.state.operations.surgery import bootstrap as bootstrapping
from arroyo_dagster.state.operations.surgery.bootstrap import BootstrapJob
from arroyo_dagster.state.operations.surgery.computed_rows import RowFacts, TableTarget
from tests.arroyo_jobs import GROUPS as GROUPS_SCHEMA
from tests.arroyo_jobs import (
    SECOND,
    TUPLES,
    accumulators_config,
    stopped,
    table_rows,
    tuples_config,
    without_keys,
)
from tests.compat.test_surgery import positions
from tests.evolved_jobs import SESSIONS, Rows, Sql, in_order, loaded, sql_job
from tests.formats import EditOutcome, NewPosition, TableAction, TimeFile
from tests.internals import EditOptions, restored_rows
from tests.jobs import listing
from tests.journeys.test_surgery import either_state_and_undone, errors_of, others, state_of
from tests.shares import LAYOUTS, Share, everywhere
from tests.surgery_jobs import BEGAN, NANOS, WATERMARK, SurgeryJob

pytestmark = pytest.mark.usefixtures("one_at_a_time")

SQL = Sql()
NOW = WATERMARK + 5 * SECOND
IDS = SQL.ids
EVENTS = {
    "k": [f"k{n % 7}" for n in range(60)],
    "v": [n * n % 101 - 20 for n in range(60)],
    "at": [BEGAN // SECOND + 30 + n // 2 for n in range(60)],
}
"""Key, value and event time in seconds."""


# ---- the truth, computed from the events ---------------------------------------------------------


def windows_of(watermark_micros: int, retention_seconds: int = 40) -> Rows:
    """Bins of 10 seconds that a restore loads."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for k, v, at in zip(*EVENTS.values(), strict=True):
        found[k, at - at % 10].append(v)
    oldest = watermark_micros // SECOND - retention_seconds
    return in_order(
        [
            {
                "k": k,
                "count(Int64(1))[count]": len(values),
                "sum(v)[sum]": sum(values),
                "_timestamp": at * NANOS,
            }
            for (k, at), values in found.items()
            if at >= oldest
        ]
    )


def groups_of() -> Rows:
    """The state of each group."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for k, v, at in zip(*EVENTS.values(), strict=True):
        found[k].append((v, at))
    return in_order(
        [
            {
                "k": k,
                "count(Int64(1))[count]": len(rows),
                "max(v)[value]": max(v for v, _ in rows),
                "_timestamp": max(at for _, at in rows) * NANOS,
                "_generation": len(rows),
            }
            for k, rows in found.items()
        ]
    )


@dataclass(frozen=True, slots=True)
class RowsHere:
    """Rows in the memory of this process."""

    rows: pa.Table

    @property
    def schema(self) -> pa.Schema:
        """See `ComputedRows`."""
        return self.rows.schema

    def facts(self, target: TableTarget) -> RowFacts:
        """See `ComputedRows`."""
        return target.facts(target.stored(self.rows))

    def doubled(self, target: TableTarget) -> bool:
        """See `ComputedRows`."""
        if not target.keys:
            return bool(self.rows.num_rows > 1)
        found = self.rows.group_by(list(target.keys)).aggregate([([], "count_all")])
        return bool(found.num_rows < self.rows.num_rows)

    def write(self, target: TableTarget, store: ObjectStore) -> tuple[RowFacts, Sequence[TimeFile]]:
        """See `ComputedRows`."""
        stored = target.stored(self.rows)
        return target.facts(stored), target.write(store, stored)


def computed(rows: Rows) -> RowsHere:
    """As a program would have them: integers of 64 bits, times of microseconds."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    table = pa.table(columns)
    at = table.schema.get_field_index("_timestamp")
    times = pa.array([one // 1000 for one in columns["_timestamp"]], pa.timestamp("us", "UTC"))
    return RowsHere(table.set_column(at, "_timestamp", times))


def key(name: str, table: str) -> tuple[OperatorId, TableName]:
    return OperatorId(IDS[name]), TableName(table)


def bootstrap(job: SurgeryJob, **changes: Any) -> BootstrapJob:
    found = BootstrapJob(
        paths=job.paths,
        directory=stopped(job.paths),
        tables={
            key("window", "t"): computed(windows_of(NOW)),
            key("totals", "a"): computed(groups_of()),
        },
        watermark_micros=NOW,
        positions=((None, NewPosition(partition="0", position="4711")),),
    )
    return replace(found, **changes)


def options(**more: Any) -> EditOptions:
    return EditOptions(quiet_seconds=0, **more)


@LAYOUTS
def test_a_restore_loads_what_the_events_say_and_sources_go_on_from_the_cut(layout: Layout) -> None:
    job = sql_job(layout, "job_b")
    before = listing(job.store)
    sink = state_of(job.store, job.paths)[IDS["sink"]]
    plan = bootstrap(job).plan(WriteProtected(job.store))
    assert listing(job.store) == before
    outcome = bootstrap(job).run(job.store, options(approved=plan.digest))
    assert outcome.plan == plan
    assert loaded(job.store, job.paths) == {
        key("window", "t"): windows_of(NOW),
        key("totals", "a"): groups_of(),
    }
    state = state_of(job.store, job.paths)
    assert positions(job.store, job.paths)[IDS["source"], "0"] == 4711
    assert state[IDS["window"]][0][:2] == (NOW, NOW)
    assert state[IDS["sink"]][1:] == sink[1:]
    emptied = {one.table for one in plan.tables if one.action is TableAction.EMPTIED}
    assert emptied == {"b", "left", "right", "s", "e"}
    assert errors_of(job.store, job.paths) == set()
    held = loaded(job.store, job.paths)
    job.start()
    job.files = {one: job.files.get(one, []) for one in job.configs}
    job.write({})
    assert loaded(job.store, job.paths) == held


@LAYOUTS
def test_files_hold_one_key_range_in_order_and_with_exact_bounds(layout: Layout) -> None:
    job = sql_job(layout, "job_b", parallelism=3)
    bootstrap(job).run(job.store, options())
    # The verifier restores each subtask, and compares bounds, hashes and schema of each file.
    assert errors_of(job.store, job.paths) == set()
    operator = ParquetBackend(job.store, job.paths).load().operator(IDS["window"])
    assert operator is not None
    files = operator.tables[TableName("t")].files
    assert len(files) == 3
    assert [one.owners(3) for one in files] == [range(at, at + 1) for at in range(3)]  # type: ignore[union-attr]


@everywhere("layout")
def test_a_fault_at_any_change_leaves_the_own_state_or_the_computed_one(
    layout: Layout, share: Share
) -> None:
    job = sql_job(layout, "job_b")

    def take(store: ObjectStore) -> EditOutcome:
        return bootstrap(job).run(store, options())

    either_state_and_undone(job, take, layout, share, ("after", True), sparse=3)


def test_a_bootstrap_that_is_repeated_is_undone_step_by_step() -> None:
    job = sql_job(Layout.LEGACY, "job_b")
    was = others(job.store)
    bootstrap(job).run(job.store, options())
    once = state_of(job.store, job.paths)
    bootstrap(job).run(job.store, options())
    assert state_of(job.store, job.paths) == once
    assert errors_of(job.store, job.paths) == set()
    run_undo(job.store, job.paths, stopped(job.paths))
    assert state_of(job.store, job.paths) == once
    run_undo(job.store, job.paths, stopped(job.paths))
    assert others(job.store) == was


# ---- refusals ------------------------------------------------------------------------------------


def rows(table: RowsHere, name: str, values: list[Any]) -> RowsHere:
    at = table.rows.schema.get_field_index(name)
    return RowsHere(table.rows.set_column(at, name, pa.array(values)))


WINDOWS = computed(windows_of(NOW))
GROUPS = computed(groups_of())
COUNTED = "count(Int64(1))[count]"
WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "another order": (
        lambda: {"tables": {key("window", "t"): RowsHere(WINDOWS.rows.select([1, 0, 2, 3]))}},
        "have other columns than the table",
    ),
    "a value that does not fit": (
        lambda: {"tables": {key("totals", "a"): rows(GROUPS, "_generation", [-1] * 7)}},
        "'_generation' does not fit the type uint64",
    ),
    "a fraction": (
        lambda: {"tables": {key("totals", "a"): rows(GROUPS, COUNTED, [1.5] * 7)}},
        "does not fit the type int64",
    ),
    "NULL": (
        lambda: {"tables": {key("totals", "a"): rows(GROUPS, COUNTED, [1, None] + [1] * 5)}},
        "has 1 NULL, and may have none",
    ),
    "no event time": (
        lambda: {"tables": {key("totals", "a"): rows(GROUPS, "_timestamp", [None] * 7)}},
        "'_timestamp' has 7 NULL",
    ),
    "two rows of a group": (
        lambda: {"tables": {key("totals", "a"): RowsHere(pa.concat_tables([GROUPS.rows] * 2))}},
        r"several rows have the same key \(k\)",
    ),
    "no such table": (lambda: {"tables": {key("window", "x"): WINDOWS}}, "no such table of rows"),
    "entries": (lambda: {"tables": {key("source", "k"): WINDOWS}}, "no such table of rows"),
    "a number for text": (
        lambda: {"tables": {key("totals", "a"): rows(GROUPS, "k", [1] * 7)}},
        "'k' does not fit the type string",
    ),
    "a relative position": (
        lambda: {"positions": ((None, NewPosition(partition="0", position="+5", relative=True)),)},
        "takes absolute positions",
    ),
    "a partition that is not there": (
        lambda: {"positions": ((None, NewPosition(partition="99", position="5")),)},
        "99",
    ),
    "a watermark of 1970": (lambda: {"watermark_micros": SECOND}, "cutoff would wrap"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_the_job_is_refused_and_nothing_changes(name: str) -> None:
    changes, message = WRONG[name]
    job = sql_job(Layout.LEGACY, "job_b")
    before = listing(job.store)
    wanted = bootstrap(job, **changes())
    with pytest.raises(InputError, match=message) as caught:
        wanted.plan(job.store)
    assert caught.value.next_step
    with pytest.raises(InputError, match=message):
        wanted.run(job.store, options())
    assert listing(job.store) == before


class NotComputed(RowsHere):
    """Rows that must not be computed to be described: a plan says what they are."""

    def facts(self, target: TableTarget) -> RowFacts:
        raise AssertionError("the rows were computed")


def test_columns_that_do_not_fit_are_found_together_before_any_row_is_computed() -> None:
    job = sql_job(Layout.LEGACY, "job_b")
    tables = {
        key("window", "t"): NotComputed(WINDOWS.rows),
        key("totals", "a"): NotComputed(rows(GROUPS, COUNTED, [1.5] * 7).rows),
        key("join", "left"): NotComputed(WINDOWS.rows),
    }
    with pytest.raises(InputError, match="the bootstrap has 2 errors") as caught:
        bootstrap(job, tables=tables).plan(job.store)
    _, first, second = str(caught.value).splitlines()
    assert "updating_aggregate_7.a: column 'count(Int64(1))[count]' does not fit" in first
    assert "join_11.left: computed rows have other columns" in second


# ---- sessions, and aggregates without GROUP BY ---------------------------------------------------


def sessions_of(first: int) -> RowsHere:
    """Two rows of a session, from a second on."""
    return computed(
        [
            {"k": "k1", "item": "x", "price": 5, "_timestamp": (first + at) * NANOS}
            for at in range(2)
        ]
    )


@LAYOUTS
def test_rows_of_sessions_are_loaded_since_the_earliest_of_them(layout: Layout) -> None:
    job = sql_job(layout, "job_b")
    at, first = key("session", "s"), NOW // SECOND - 3
    wanted = bootstrap(job, tables={at: sessions_of(first)})
    plan = wanted.plan(job.store)
    actions = {one.table: one.action for one in plan.tables if one.operator == at[0]}
    assert actions == {"s": TableAction.CHANGED, "e": TableAction.CHANGED}
    assert wanted.run(job.store, options(), plan=plan).published
    epoch = open_state(job.store).job("job_b").epoch()
    starts = epoch.table(at[0], "e").to_arrow().column("value").cast(pa.int64())
    assert starts.to_pylist() == [first * NANOS] * 2
    assert [row["price"] for row in loaded(job.store, job.paths)[at]] == [5, 5]
    (session,) = sessions(epoch)
    assert (session.starts_at_micros, session.rows) == (first * SECOND, 2)
    assert errors_of(job.store, job.paths) == set()


def test_no_session_is_open_without_rows() -> None:
    job = sql_job(Layout.LEGACY, "job_b")
    at = key("session", "s")
    empty = RowsHere(sessions_of(5).rows.slice(0, 0))
    bootstrap(job, tables={at: empty}).run(job.store, options())
    epoch = open_state(job.store).job("job_b").epoch()
    starts = epoch.table(at[0], "e").to_arrow().column("value")
    assert starts.null_count == len(starts) == 2


def test_rows_of_sessions_need_the_starts_that_a_restore_looks_for() -> None:
    job = sql_job(Layout.LEGACY, "job_b")
    job.keep(IDS["session"], SESSIONS, {}, {})
    job.write({})
    with pytest.raises(InputError, match="has not stored which sessions are open"):
        bootstrap(job, tables={key("session", "s"): sessions_of(5)}).plan(job.store)


AGGREGATE = OperatorId("agg_9")


def unkeyed_job(layout: Layout) -> SurgeryJob:
    """A job with an aggregate without GROUP BY, of which Arroyo would lose rows."""
    job = sql_job(layout, "job_b", epochs=2, more=[AGGREGATE])
    groups, tuples = without_keys(GROUPS_SCHEMA), without_keys(TUPLES)
    times = [BEGAN * 1000] * 2
    job.write(
        {
            (AGGREGATE, accumulators_config(groups, [])): table_rows(
                groups, [[1, 2], times, [1, 2]]
            ),
            (AGGREGATE, tuples_config(tuples, [])): table_rows(
                tuples, [[0, 0], [b"x", b"y"], [1, 1], times, [1, 2]]
            ),
        }
    )
    return job


def unkeyed_rows(values: int) -> dict[Any, RowsHere]:
    time = BEGAN * 1000
    a = [{"sum": 7, "_timestamp": time, "_generation": values}]
    b = [
        {"accumulator": 0, "args_row": bytes([1, n]), "count": n + 1, "_timestamp": time}
        | {"_generation": 1}
        for n in range(values)
    ]
    return {(AGGREGATE, TableName("a")): computed(a), (AGGREGATE, TableName("b")): computed(b)}


@LAYOUTS
def test_an_aggregate_without_group_by_is_restored_whole_by_arroyo(layout: Layout) -> None:
    job = unkeyed_job(layout)
    assert bootstrap(job, tables=unkeyed_rows(5)).run(job.store, options()).published
    operator = ParquetBackend(job.store, job.paths).load().operator(AGGREGATE)
    assert operator is not None
    for name, count in (("a", 1), ("b", 5)):
        found = restored_rows(job.store, operator, TableName(name), managed=False)
        # None: Arroyo, which reads the first row of each batch, finds the same.
        assert (found.count, found.upstream) == (count, None)
        (file,) = operator.tables[TableName(name)].files  # type: ignore[union-attr]
        assert (file.min_routing_key, file.max_routing_key) == (0, 0)  # type: ignore[union-attr]
    assert errors_of(job.store, job.paths) == set()


def test_an_aggregate_without_group_by_has_one_row_and_not_too_many_tuples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, tables = unkeyed_job(Layout.LEGACY), unkeyed_rows(5)
    (a, b), (one, many) = tables.keys(), tables.values()
    twice = RowsHere(pa.concat_tables([one.rows] * 2))
    with pytest.raises(InputError, match="an aggregate without GROUP BY has one"):
        bootstrap(job, tables={a: twice}).plan(job.store)
    monkeypatch.setattr(bootstrapping, "MAX_UNKEYED_ROWS", 4)
    with pytest.raises(InputError, match=r"5 rows .* would need a row group each; 4 are the most"):
        bootstrap(job, tables={b: many}).plan(job.store)


def test_the_plan_counts_rows_that_a_restore_may_not_load_and_names_sources_that_stay() -> None:
    job = sql_job(Layout.LEGACY, "job_b")
    late = NOW + 20 * SECOND
    found = bootstrap(job, watermark_micros=late, positions=()).plan(job.store)
    text = " ".join(found.missing_outputs)
    expired = len(windows_of(NOW)) - len(windows_of(late))
    assert expired > 0
    assert f"{expired} of {len(windows_of(NOW))} rows are older than the retention" in text
    assert "source_orders_0 keeps its positions" in text
    assert "updating_aggregate_7.b starts empty beside computed rows of its operator" in text


class Unsteady(RowsHere):
    """Rows that are others when they are computed again."""

    def write(self, target: TableTarget, store: ObjectStore) -> tuple[RowFacts, Any]:
        return RowsHere(self.rows.slice(1)).write(target, store)


def test_rows_that_change_between_plan_and_execution_are_not_published() -> None:
    job = sql_job(Layout.LEGACY, "job_b")
    was = others(job.store)
    wanted = bootstrap(job, tables={key("window", "t"): Unsteady(WINDOWS.rows)})
    with pytest.raises(ProtocolError, match="are not those of the plan"):
        wanted.run(job.store, options())
    assert others(job.store) == was


def test_a_reviewed_plan_is_executed_with_its_rows_computed_once() -> None:
    job = sql_job(Layout.PROTOCOL, "job_b")
    at = key("window", "t")
    plan = bootstrap(job, tables={at: WINDOWS}).plan(job.store)
    once = bootstrap(job, tables={at: NotComputed(WINDOWS.rows)})
    assert once.run(job.store, options(), plan=plan).plan.digest == plan.digest
    assert loaded(job.store, job.paths)[at] == windows_of(NOW)


def test_records_that_are_read_again_count_once() -> None:
    """Tables hold computed rows or start empty: none holds a record that JOB has read before."""
    job = sql_job(Layout.LEGACY, "job_b")
    first = NewPosition(partition="0", position="0")
    plan = bootstrap(job, positions=((None, first),)).plan(job.store)
    (text,) = plan.duplicate_outputs
    assert text.endswith(
        "are read again; their outputs are seen twice, and no table counts them twice"
    )
    given = {key("window", "t"), *bootstrap(job).tables}
    kept = [one for one in plan.tables if one.action is TableAction.KEPT]
    assert not [one for one in kept if (one.operator, one.table) in given or one.rows]


def test_a_reviewed_plan_is_refused_for_other_rows_tables_or_positions() -> None:
    job = sql_job(Layout.PROTOCOL, "job_b")
    at = key("window", "t")
    plan = bootstrap(job, tables={at: WINDOWS}).plan(job.store)
    was = others(job.store)
    fewer = RowsHere(WINDOWS.rows.slice(1))
    for changes, kind, message in (
        ({"tables": {at: fewer}}, ProtocolError, "are not those of the plan"),
        ({}, InputError, "the plan is not of this bootstrap"),
        ({"tables": {at: WINDOWS}, "positions": ()}, ConflictError, "was approved"),
    ):
        with pytest.raises(kind, match=message):
            bootstrap(job, **changes).run(job.store, options(), plan=plan)
        assert others(job.store) == was
