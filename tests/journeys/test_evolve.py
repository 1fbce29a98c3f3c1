"""A stopped Arroyo job takes over the state of a job of other SQL: each operator loads what its
counterpart held, in the columns of its own tables, or the evolve is refused and says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Literal

import pyarrow as pa
import pytest

from arroyo_dagster import Layout, OperatorId, ParquetBackend, WriteProtected
from arroyo_dagster.errors import InputError
from tests.arroyo_jobs import stopped, table_rows
from tests.evolved_jobs import (
    COUNT,
    EXPIRING,
    ITEM,
    LEAST,
    MOST,
    PRICE,
    SHIFTED,
    SUM,
    SUMS,
    TIME,
    Column,
    Rows,
    Sql,
    as_suggested,
    in_order,
    loaded,
    renamed,
    schema_of,
    sql_job,
)
from tests.formats import EditOutcome, EditPlan, Overrides, TableAction
from tests.internals import (
    EditOptions,
    StateSource,
    parse_overrides,
    plan_evolve,
    run_evolve,
    run_fork,
)
from tests.jobs import listing
from tests.journeys.test_surgery import MODES, either_state_and_undone, errors_of, others, state_of
from tests.shares import Share, everywhere
from tests.surgery_jobs import BEGAN, NANOS, SurgeryJob, global_config, held_rows

pytestmark = pytest.mark.usefixtures("one_at_a_time")

WAS = Sql()
NOW = EditOptions(quiet_seconds=0)


def two_jobs(
    layout: Layout,
    now: Sql,
    was: Sql = WAS,
    *,
    apart: bool = True,
    into: Layout | None = None,
    parallelism: int = 2,
    more: Sequence[str] = (),
    source_more: Sequence[str] = (),
) -> tuple[SurgeryJob, SurgeryJob]:
    """Job A, and B of other SQL, with rows of its own that must not stay."""
    source = sql_job(layout, "job_a", was, more=source_more)
    target = {"parallelism": parallelism, "more": more}
    store = None if apart else source.store
    job = sql_job(into or layout, "job_b", now, epochs=2, base=7, store=store, **target)
    return source, job


def taken(source: SurgeryJob) -> StateSource:
    return StateSource(store=WriteProtected(source.store), paths=source.paths)


def plan(source: SurgeryJob, job: SurgeryJob, overrides: Any = None) -> EditPlan:
    store, at = WriteProtected(job.store), stopped(job.paths)
    return as_suggested(
        lambda chosen: plan_evolve(taken(source), store, job.paths, at, chosen), overrides
    )


def run(source: SurgeryJob, job: SurgeryJob, overrides: Any = None, **options: Any) -> EditOutcome:
    store = options.pop("store", job.store)
    directory = options.pop("directory", stopped(job.paths))
    how = EditOptions(**{"quiet_seconds": 0.0, **options})
    return as_suggested(
        lambda chosen: run_evolve(taken(source), store, job.paths, directory, chosen, how),
        overrides,
    )


# ---- the truth -----------------------------------------------------------------------------------


def filled(table: str, column: Column) -> Any:
    """What the rules say of a column that the source does not have."""
    name, _, nullable = column
    if table == "t":
        return None if nullable else 0
    return 0 if name.endswith(("[sum]", "[count]")) else None


def expected(
    was: Mapping[tuple[str, str], Rows], before: Sql, now: Sql, numbers: Mapping[int, int]
) -> dict[tuple[str, str], Rows]:
    """The rows of A by column name, as B's operators must load them."""
    found = {}
    for table, name in EXPIRING.items():
        rows = was.get((before.ids[name], table), [])
        if table == "b":
            moved = [r | {"accumulator": numbers[r["accumulator"]]} for r in rows
                     if r["accumulator"] in numbers]  # fmt: skip
        else:
            middle = {"t": now.window, "a": now.totals, "right": (PRICE,)}.get(table, now.left)
            fills = {one[0]: filled(table, one) for one in middle}
            ends = ["_timestamp", *(["_generation"] if table == "a" else [])]
            names = [now.key[0], *fills, *ends]
            moved = [{c: r.get(c, fills.get(c)) for c in names} for r in rows]
        if moved:
            found[now.ids[name], table] = in_order(moved)
    return found


@dataclass(frozen=True)
class Change:
    """A change of SQL.

    Attributes:
        numbers: the new positions of aggregates that keep their arguments.
        filled: the tables with columns that the source does not have.
    """

    now: Sql
    was: Sql = WAS
    numbers: Mapping[int, int] = None  # type: ignore[assignment]
    filled: tuple[str, ...] = ()
    overrides: Any = None


SAME = {1: 1}
CHANGES = {
    "statements reordered": Change(Sql(ids=SHIFTED), numbers=SAME),
    "a projection and a sink renamed": Change(renamed(WAS, sink="sink_other_6"), numbers=SAME),
    "aggregates added behind": Change(
        Sql(ids=SHIFTED, window=(COUNT, SUM, LEAST), totals=(COUNT, MOST, SUM, SUMS)),
        numbers=SAME,
        filled=("t", "a"),
    ),
    "aggregates added before": Change(
        Sql(
            ids=SHIFTED, window=(LEAST, SUM, COUNT), totals=(SUM, SUMS, COUNT, MOST), distinct=(2,)
        ),
        numbers={1: 2},
        filled=("t", "a"),
    ),
    "a count added to a window": Change(
        Sql(window=(COUNT, SUM)), was=Sql(window=(SUM,)), numbers=SAME, filled=("t",)
    ),
    "aggregates removed": Change(
        Sql(ids=SHIFTED, window=(SUM,), totals=(MOST,), distinct=(0,)), numbers={1: 0}
    ),
    "distinct aggregate removed": Change(Sql(distinct=(), without=("b",)), numbers={}),
    "distinct aggregate added": Change(
        Sql(distinct=(1,)), was=Sql(distinct=(), without=("b",)), numbers={}
    ),
    "one of two distinct removed": Change(
        Sql(distinct=(1,)),
        was=Sql(distinct=(1, 3)),
        numbers={3: 1},
        overrides={"accumulators": {WAS.ids["totals"]: {3: 1}}},
    ),
    "two distinct swap places with others": Change(
        Sql(distinct=(0, 3)),
        was=Sql(distinct=(1, 2)),
        numbers={1: 0, 2: 3},
        overrides={"accumulators": {WAS.ids["totals"]: {1: 0, 2: 3}}},
    ),
    "a column less in join and session": Change(Sql(ids=SHIFTED, left=(PRICE,)), numbers=SAME),
    "columns in another order": Change(
        Sql(window=(SUM, COUNT), totals=(MOST, COUNT), left=(PRICE, ITEM)), numbers=SAME
    ),
    "a column may be NULL now": Change(Sql(left=(ITEM, (*PRICE[:2], True))), numbers=SAME),
    "a column may not be NULL now": Change(
        Sql(left=(ITEM, PRICE)), was=Sql(left=(ITEM, (*PRICE[:2], True))), numbers=SAME
    ),
    "a window with nothing open": Change(Sql(ids=SHIFTED), was=Sql(without=("t",)), numbers=SAME),
}


@pytest.mark.parametrize(("name", "layout"), [*zip(CHANGES, cycle(Layout), strict=False)])
def test_each_operator_loads_the_state_of_its_counterpart(name: str, layout: Layout) -> None:
    change = CHANGES[name]
    source, job = two_jobs(layout, change.now, change.was)
    was, ours = loaded(source.store, source.paths), state_of(job.store, job.paths)
    theirs, untouched = state_of(source.store, source.paths), listing(source.store)
    shown = plan(source, job, change.overrides)
    outcome = run(source, job, change.overrides, approved=shown.digest)
    assert outcome.plan == shown
    assert loaded(job.store, job.paths) == expected(was, change.was, change.now, change.numbers)
    for table in ("source", "watermark", "session"):
        pairs = {k[1:]: v for k, v in theirs[change.was.ids[table]][2].items()}
        found = state_of(job.store, job.paths)[change.now.ids[table]]
        assert {k[1:]: v for k, v in found[2].items()} == pairs
        assert found[0][:2] == theirs[change.was.ids[table]][0][:2]
    sink = change.now.ids["sink"]
    assert state_of(job.store, job.paths)[sink][2] == ours[sink][2]
    for one in ParquetBackend(job.store, job.paths).load().operators:
        for table, config in one.configs.items():
            assert config == job.configs.get((one.operator, table), config)
    assert errors_of(job.store, job.paths) == set()
    assert listing(source.store) == untouched
    acts = {one.table for one in shown.tables if one.action is TableAction.FILLED}
    assert acts == set(change.filled)


# ---- operators that are alike --------------------------------------------------------------------


def with_second_window(job: SurgeryJob, sql: Sql, operator: str, sink: str, first: int) -> None:
    """A further window of the same keys and columns, before a sink of its own."""
    times = [BEGAN * 1000 + 50 * NANOS]
    rows = table_rows(schema_of((sql.key, *sql.window, TIME)), [["k1"], [first], [first], times])
    job.keep(sink, global_config("f", "file_sink"), {f"/out/{job.job}/{sink}": 1})
    job.write({(operator, sql.config("t")): rows})


def two_windows(now: Sequence[tuple[str, str]], **ids: str) -> tuple[SurgeryJob, SurgeryJob, str]:
    """A with tumbling_4 before sink_x_5, and tumbling_14 before sink_y_15; B with others."""
    was = renamed(WAS, window="tumbling_4", sink="sink_x_5", join="join_21", totals="agg_22", **ids)
    then = renamed(was, window=now[0][0], sink=now[0][1])
    more = [one for pair in now[1:] for one in pair]
    own = ["tumbling_14", "sink_y_15"]
    source, job = two_jobs(Layout.LEGACY, then, was, more=more, source_more=own)
    with_second_window(source, was, "tumbling_14", "sink_y_15", 111)
    for operator, sink in now[1:]:
        with_second_window(job, then, operator, sink, 999)
    return source, job, was.ids["window"]


def test_like_windows_are_distinction_by_their_sinks() -> None:
    source, job, _ = two_windows([("tumbling_14", "sink_x_15"), ("tumbling_4", "sink_y_5")])
    was = loaded(source.store, source.paths)
    run(source, job)
    found = loaded(job.store, job.paths)
    assert found["tumbling_14", "t"] == was["tumbling_4", "t"]
    assert found["tumbling_4", "t"] == was["tumbling_14", "t"]


def test_like_windows_without_a_difference_are_refused() -> None:
    source, job, _ = two_windows([("tumbling_7", "sink_p_8"), ("tumbling_17", "sink_q_18")])
    with pytest.raises(InputError, match="nothing shows which takes which") as refused:
        plan(source, job)
    pairs = {"tumbling_4": "tumbling_7", "tumbling_14": "tumbling_17"}
    step = refused.value.next_step or ""
    assert "--map tumbling_4=tumbling_7 --map tumbling_14=tumbling_17" in step
    assert '"tumbling_4": "tumbling_7", "tumbling_14": "tumbling_17"' in step
    was = loaded(source.store, source.paths)
    run(source, job, {"map": pairs})
    found = loaded(job.store, job.paths)
    assert [found[now, "t"] for now in pairs.values()] == [was[one, "t"] for one in pairs]


def test_more_like_windows_than_before_are_ambiguous_until_a_person_decides() -> None:
    now = [("tumbling_7", "sink_p_8"), ("tumbling_17", "sink_q_18"), ("tumbling_19", "sink_r_20")]
    source, job, _ = two_windows(now)
    with pytest.raises(InputError, match="nothing shows which takes which") as refused:
        plan(source, job)
    assert "--map tumbling_4=tumbling_7 --map tumbling_14=" in (refused.value.next_step or "")
    decided = {"map": {"tumbling_4": "tumbling_19", "tumbling_14": "tumbling_7"}}
    was = loaded(source.store, source.paths)
    found = run(source, job, decided).plan
    rows = loaded(job.store, job.paths)
    assert rows["tumbling_19", "t"] == was["tumbling_4", "t"]
    assert rows["tumbling_7", "t"] == was["tumbling_14", "t"]
    assert ("tumbling_17", "t") not in rows
    assert {one.operator for one in found.tables if one.action is TableAction.EMPTIED} == {
        "tumbling_17"
    }


def test_fewer_like_windows_than_before_are_ambiguous_until_one_is_dropped() -> None:
    source, job, _ = two_windows([("tumbling_7", "sink_p_8")])
    with pytest.raises(InputError, match="nothing shows which takes which"):
        plan(source, job)
    was = loaded(source.store, source.paths)
    found = run(source, job, {"drop": ["tumbling_4"]}).plan
    assert loaded(job.store, job.paths)["tumbling_7", "t"] == was["tumbling_14", "t"]
    dropped = [one for one in found.tables if one.action is TableAction.DROPPED]
    assert [(one.operator, one.reason) for one in dropped] == [("tumbling_4", "dropped, as asked")]
    assert "rows that its state holds are never emitted" in " ".join(found.missing_outputs)


# ---- what cannot be carried ----------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A change of SQL that is refused, and which operator may start empty instead."""

    now: Sql
    message: str
    was: Sql = WAS
    empty: tuple[str, ...] = ("window",)
    overrides: Any = None


REAL: Column = ("price", pa.float64(), False)
STRICT: Column = ("max(w)[value]", pa.int64(), False)
REFUSALS = {
    "another window length": Refusal(
        Sql(window_seconds=50), r"its window is 50 s long, and in the source 40 s"
    ),
    "another gap": Refusal(
        Sql(gap_seconds=5), r"its gap is 5 s, and in the source 4 s", empty=("session",)
    ),
    "a column that joins need": Refusal(
        Sql(), r"left: the rows of the source do not have its column 'item'",
        was=Sql(left=(PRICE,)),
        empty=("join", "session"),
    ),
    "another type": Refusal(
        Sql(left=(ITEM, REAL)), r"its column 'price' has the type \"Float64\"",
        empty=("join", "session"),
    ),
    "no aggregate in common": Refusal(
        Sql(window=(LEAST,)), r"no aggregate in common", was=Sql(window=(SUM,))
    ),
    "an aggregate that may not be NULL": Refusal(
        Sql(window=(SUM, STRICT)), r"does not have its column 'max\(w\)\[value\]', which may not"
    ),
    "columns of one name": Refusal(
        Sql(window=(SUM, SUM)), r"several of its columns are named 'sum\(v\)\[sum\]'"
    ),
    "a distinct aggregate more": Refusal(
        Sql(distinct=(1, 2)),
        r"keeps the arguments of 2 aggregates, and the source of 1; name .*\{\"1\": NEW\}.* 1 or 2",
        empty=("totals",),
    ),
    "positions that rows do not show": Refusal(
        Sql(distinct=(9,)), r"do not show the positions", empty=("totals",)
    ),
    "a moved aggregate that is not there": Refusal(
        Sql(), r"no row of the source has the accumulator 5", empty=("totals",),
        overrides={"accumulators": {WAS.ids["totals"]: {5: 1}}},
    ),
    "two aggregates to one place": Refusal(
        Sql(), r"two accumulators are to be moved to one number", empty=("totals",),
        was=Sql(distinct=(1, 2)),
        overrides={"accumulators": {WAS.ids["totals"]: {1: 1, 2: 1}}},
    ),
    "a table that is not written yet": Refusal(
        Sql(without=("t",)), r"tumbling_4.t: the job has not written it yet"
    ),
    "a fill of another type": Refusal(
        Sql(window=(SUM, STRICT)), r"the value \"x\" does not fit column",
        overrides={"fill": {WAS.ids["window"]: {STRICT[0]: "x"}}},
    ),
    "a fill of NULL": Refusal(
        Sql(window=(SUM, STRICT)), r"column 'max\(w\)\[value\]' may not be NULL",
        overrides={"fill": {WAS.ids["window"]: {STRICT[0]: None}}},
    ),
}  # fmt: skip
OTHER_KEYS = {
    "another key": Refusal(
        Sql(key=("other", pa.string(), True)), r"its keys are \(other .*in the source \(k "
    ),
    "another type of key": Refusal(
        Sql(key=("k", pa.int64(), True)), r"its keys are \(k \"Int64\"\), and in the source"
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_carried_is_refused_and_starts_empty_only_if_asked(name: str) -> None:
    refusal = REFUSALS[name]
    source, job = two_jobs(Layout.LEGACY, refusal.now, refusal.was)
    before = listing(job.store)
    for act in (plan, run):
        with pytest.raises(InputError, match=refusal.message):
            act(source, job, refusal.overrides)
    assert listing(job.store) == before
    empty = {refusal.now.ids[one] for one in refusal.empty}
    had = {key for key in loaded(job.store, job.paths) if key[0] in empty}
    found = run(source, job, {"start_empty": sorted(empty)}).plan
    operators = {key[0] for key in loaded(job.store, job.paths)}
    stateful = {refusal.now.ids[one] for one in EXPIRING.values()}
    assert operators == stateful - empty
    asked = {(one.operator, one.table) for one in found.tables if "as asked" in one.reason}
    assert asked >= had
    assert errors_of(job.store, job.paths) == set()
    assert "rows that its state holds are never emitted" in " ".join(found.missing_outputs)


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_a_job_with_other_keys_takes_only_what_has_none(name: str) -> None:
    refusal = OTHER_KEYS[name]
    source, job = two_jobs(Layout.PROTOCOL, refusal.now)
    with pytest.raises(InputError, match=refusal.message):
        plan(source, job)
    empty = [refusal.now.ids[one] for one in ("window", "totals", "join", "session")]
    run(source, job, {"start_empty": empty})
    assert loaded(job.store, job.paths) == {}
    assert errors_of(job.store, job.paths) == set()


def test_null_in_a_column_that_may_not_be_null_stops_before_anything_is_published() -> None:
    nullable = (*PRICE[:2], True)
    was = Sql(left=(ITEM, nullable))
    source, job = two_jobs(Layout.LEGACY, Sql(), was)
    times = [BEGAN * 1000 + 50 * NANOS]
    schema = schema_of((was.key, ITEM, nullable, TIME))
    rows = table_rows(schema, [["k1"], ["i"], [None], times])
    source.write({(was.ids["join"], was.config("left")): rows})
    before = others(job.store)
    with pytest.raises(InputError, match="'price' may not be NULL, and the source has NULL"):
        run(source, job)
    assert others(job.store) == before


def test_renamed_columns_and_keys_are_carried_if_a_person_says_so() -> None:
    now = Sql(key=("customer", pa.string(), True))
    source, job = two_jobs(Layout.LEGACY, now)
    ids = [now.ids[one] for one in ("window", "totals", "join", "session")]
    run(source, job, {"rename": {one: {"customer": "k"} for one in ids}})
    was, found = loaded(source.store, source.paths), loaded(job.store, job.paths)
    for key, rows in was.items():
        as_now = [{"customer": r["k"], **{k: v for k, v in r.items() if k != "k"}} for r in rows]
        assert found[key] == in_order(as_now)


def test_a_fill_and_equal_columns_can_be_decided() -> None:
    source, job = two_jobs(Layout.LEGACY, Sql(left=(ITEM, PRICE)), Sql(left=(PRICE,)))
    join, session = WAS.ids["join"], WAS.ids["session"]
    run(source, job, {"fill": {one: {"item": "none"} for one in (join, session)}})
    rows = loaded(job.store, job.paths)
    assert {one["item"] for one in (*rows[join, "left"], *rows[session, "s"])} == {"none"}
    source, job = two_jobs(Layout.LEGACY, Sql(without=("t", "left")))
    same = [WAS.ids["window"], join]
    unknown = run(source, job, {"same_columns": same}).plan.unknown
    assert loaded(job.store, job.paths) == loaded(source.store, source.paths)
    assert f"{join}.left: its columns are taken for those of the source" in unknown


def test_another_time_to_live_is_carried_and_the_plan_says_so() -> None:
    source, job = two_jobs(Layout.LEGACY, Sql(ttl_seconds=12 * 3600))
    found = run(source, job).plan
    assert "rows live 43200 s, and 86400 s in the source" in " ".join(found.missing_outputs)
    assert loaded(job.store, job.paths) == loaded(source.store, source.paths)


def test_a_windowed_join_takes_nothing_of_an_updating_one() -> None:
    source, job = two_jobs(Layout.LEGACY, Sql(ttl_seconds=0))
    with pytest.raises(InputError, match="one of both joins windows"):
        plan(source, job)


@pytest.mark.parametrize("fork", [False, True], ids=["evolve", "fork"])
def test_rows_of_a_windowed_join_ahead_of_the_watermark_are_carried(fork: bool) -> None:
    windowed = Sql(ttl_seconds=0)
    source = sql_job(Layout.LEGACY, "job_a", windowed, epochs=6)
    job = sql_job(Layout.PROTOCOL, "job_b", windowed, epochs=5, base=7)
    theirs = held_rows(source.store, source.paths)
    assert [len(theirs[windowed.ids["join"], side]) for side in ("left", "right")] == [15, 15]
    if fork:
        run_fork(taken(source), job.store, job.paths, stopped(job.paths), NOW)
    else:
        run(source, job)
    assert held_rows(job.store, job.paths) == theirs
    assert errors_of(job.store, job.paths, 2) == set()


def test_arguments_of_another_type_are_not_carried() -> None:
    source, job = two_jobs(Layout.LEGACY, WAS)
    config = WAS.config("b")
    job.files[WAS.ids["totals"], "b"] = []
    rows = table_rows(
        schema_of((WAS.key, ("accumulator", pa.uint32(), False), ("args_row", pa.binary(), False),
                   ("count", pa.uint64(), False), ("_timestamp", pa.timestamp("ns"), False))),
        [["k1"], [1], [b"\1\0\0\0\1"], [1], [BEGAN * 1000 + 50 * NANOS], [1]],
    )  # fmt: skip
    job.write({(WAS.ids["totals"], config): rows})
    with pytest.raises(InputError, match="aggregate 1 has arguments of another type"):
        plan(source, job)


# ---- sources and operators that only one job has -------------------------------------------------


def with_source(job: SurgeryJob, operator: str, description: str, table: str, entries: Any) -> None:
    job.keep(operator, global_config(table, description), entries)
    job.write({})


def two_with(theirs: str, ours: str, **more: Any) -> tuple[SurgeryJob, SurgeryJob]:
    return two_jobs(Layout.LEGACY, WAS, more=[ours], source_more=[theirs], **more)


def no_entries(job: SurgeryJob, operator: str) -> bool:
    """Whether a source begins where its connector begins without state; its table stays."""
    (entries,) = state_of(job.store, job.paths)[operator][2].values()
    return not entries


def test_a_source_that_reads_another_file_is_refused() -> None:
    source, job = two_with("source_in_40", "source_in_41")
    with_source(source, "source_in_40", "file_source", "f", {"/in/a": 5})
    with_source(job, "source_in_41", "file_source", "f", {"/in/b": 1})
    with pytest.raises(InputError, match='source_in_41: it reads "/in/b", and "/in/a" in the sour'):
        plan(source, job)
    run(source, job, {"start_empty": ["source_in_41"], "drop": ["source_in_40"]})
    assert no_entries(job, "source_in_41")


def test_a_renamed_source_takes_the_positions_and_the_plan_says_what_is_not_known() -> None:
    source, job = two_jobs(Layout.LEGACY, renamed(WAS, source="source_purchases_0"))
    found = run(source, job).plan
    assert "whether both read the same topic or path is not in the state" in " ".join(found.unknown)
    theirs, ours = state_of(source.store, source.paths), state_of(job.store, job.paths)
    assert [*ours["source_purchases_0"][2].values()] == [*theirs["source_orders_0"][2].values()]


def test_a_new_operator_starts_empty_and_one_of_another_kind_only_if_asked() -> None:
    source, job = two_jobs(Layout.LEGACY, renamed(WAS, window="sliding_window_4"))
    with pytest.raises(InputError, match="and tumbling_4 would be dropped"):
        plan(source, job)
    assert plan(source, job, {"start_empty": ["sliding_window_4"]}).matches
    assert plan(source, job, {"drop": ["tumbling_4"]}).matches
    source, job = two_jobs(Layout.LEGACY, WAS, more=["source_more_50"])
    with_source(job, "source_more_50", "kafka offsets", "k", {})
    found = run(source, job).plan
    twice = " ".join(found.duplicate_outputs)
    assert "source_more_50: it begins where its connector begins" in twice
    assert no_entries(job, "source_more_50")


def test_another_connector_is_no_counterpart() -> None:
    source, job = two_with("source_in_40", "source_in_41")
    with_source(source, "source_in_40", "impulse source state", "i", {})
    with_source(job, "source_in_41", "sse source state", "e", {})
    with pytest.raises(InputError, match="source_in_41: no operator of the source is like it"):
        plan(source, job)


def test_a_table_of_another_version_of_values_is_refused() -> None:
    source, job = two_with("source_n_40", "source_n_40")
    with_source(source, "source_n_40", "kafka offsets", "k", {})
    job.keep("source_n_40", replace(global_config("k", "kafka offsets"), state_version=1), {})
    job.write({})
    with pytest.raises(InputError, match="its kind, description or version of values is another"):
        plan(source, job)


def test_a_table_that_nobody_knows_is_carried_only_with_equal_columns() -> None:
    from arroyo_dagster.state import timestamp_table_config
    from tests.arroyo_jobs import EVENTS, GROUPS

    def unknown(schema: pa.Schema) -> Any:
        return timestamp_table_config("u", "nobody knows", keys=["k"], schema=schema,
                                      retention_micros=10**12)  # fmt: skip

    times = [BEGAN * 1000 + 50 * NANOS]
    source, job = two_with("odd_50", "odd_51")
    source.write({("odd_50", unknown(EVENTS)): table_rows(EVENTS, [["k1"], [5], times])})
    job.write({("odd_51", unknown(EVENTS)): table_rows(EVENTS, [["k2"], [6], times])})
    was = loaded(source.store, source.paths)
    run(source, job)
    assert loaded(job.store, job.paths)["odd_51", "u"] == was["odd_50", "u"]
    source, job = two_with("odd_50", "odd_51")
    source.write({("odd_50", unknown(EVENTS)): table_rows(EVENTS, [["k1"], [5], times])})
    job.write({("odd_51", unknown(GROUPS)): table_rows(GROUPS, [["k2"], [6], times])})
    with pytest.raises(InputError, match="what the table holds is not known"):
        plan(source, job)


# ---- overrides -----------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, str]] = {
    "no operator of the source": ({"map": {"tumbling_99": "tumbling_4"}}, "no operator of the so"),
    "no operator of the job": ({"start_empty": ["tumbling_99"]}, "no operator of the job"),
    "a fill of no operator": ({"fill": {"tumbling_99": {"x": 1}}}, "no operator of the job"),
    "another kind": ({"map": {"tumbling_4": "join_11"}}, "cannot take the state of tumbling_4"),
    "twice in the source": (
        {"map": {"tumbling_4": "tumbling_4"}, "drop": ["tumbling_4"]}, "decide twice",
    ),
    "twice in the job": (
        {"map": {"tumbling_4": "tumbling_4"}, "start_empty": ["tumbling_4"]}, "decide twice",
    ),
    "a column that is not there": (
        {"fill": {"tumbling_4": {"sum": 0}}}, "names the column 'sum', which tumbling_4 does not",
    ),
    "a source column that is not there": (
        {"rename": {"tumbling_4": {"k": "q"}}}, "names the column 'q', which tumbling_4 does not",
    ),
    "an unknown word": ({"maps": {}}, "no 'maps'"),
    "no mapping": ([1], "expected a mapping"),
    "no list": ({"drop": "tumbling_4"}, "expected a list"),
    "no name": ({"map": {"tumbling_4": 4}}, "expected a name"),
    "no arguments": (
        {"accumulators": {"tumbling_4": {1: 2}}}, "tumbling_4, which keeps no arguments",
    ),
    "no position": ({"accumulators": {"updating_aggregate_7": {"one": 1}}}, "expected positions"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_overrides_that_cannot_be_meant_are_refused(name: str) -> None:
    document, message = WRONG[name]
    source, job = two_jobs(Layout.LEGACY, WAS)
    with pytest.raises(InputError, match=message):
        plan(source, job, document)


def test_a_value_that_json_does_not_know_is_no_fill() -> None:
    with pytest.raises(InputError, match="expected a value of JSON"):
        parse_overrides({"fill": {"x": {"y": object()}}})
    assert parse_overrides(None) == Overrides()
    found = parse_overrides({"start_empty": ["a_1"]}, ["a_1", "b_2"])
    assert found.start_empty == (OperatorId("a_1"), OperatorId("b_2"))


# ---- faults and undo -----------------------------------------------------------------------------

FULL = CHANGES["aggregates added before"]


@everywhere("layout")
@MODES
def test_a_fault_at_any_change_leaves_the_own_state_or_the_carried_one(
    layout: Layout, share: Share, mode: Literal["before", "after"], crash: bool
) -> None:
    source, job = two_jobs(layout, FULL.now)
    either_state_and_undone(job, partial(run, source, job), layout, share, (mode, crash))
