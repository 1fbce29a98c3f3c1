"""What a declared bootstrap may say, where its mistakes are, and the SQL that its tables become."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.cli.surgery.documents import read_yaml
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.surgery.declared import (
    DeclaredBootstrap,
    DeclaredTable,
    EventSource,
)
from arroyo_dagster.state.model.surgery.edits import NewPosition
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.operations.surgery.declared import parse_declared_bootstrap
from arroyo_dagster.state.planning.surgery.declared_columns import table_query
from tests.documentation import blocks
from tests.evolved_jobs import COUNT, LEAST, SUM, SUMS, Sql

EVENTS = {"format": "parquet", "path": "/lake/orders", "time": "at"}
WHOLE: dict[str, Any] = {
    "events": EVENTS,
    "watermark": "2026-11-24T10:00:00Z",
    "positions": {"0": 12, "source_orders_0": {"1": "13"}},
    "tables": {"tumbling_4": {"t": {"where": "v > 0"}}},
}
SOURCE = EventSource(name="events", time="at", format="parquet")
MARK = 1_000_000_000


def with_changes(**changes: Any) -> dict[str, Any]:
    found = copy.deepcopy(WHOLE)
    for name, value in changes.items():
        if value is None:
            del found[name]
        else:
            found[name] = value
    return found


def test_a_declaration_is_read() -> None:
    found = parse_declared_bootstrap(WHOLE)
    assert found.watermark_micros == 1_795_514_400_000_000
    assert found.positions == (
        (None, NewPosition(partition="0", position="12")),
        (OperatorId("source_orders_0"), NewPosition(partition="1", position="13")),
    )
    assert [(one.source, one.where) for one in found.tables] == [("events", "v > 0")]
    assert found.source("events").path == "/lake/orders"


@pytest.mark.parametrize(
    "changes",
    [
        {"events": {**EVENTS, "where": "v > 0"}},
        {"watermark": "2026-11-24T10:00:01Z"},
        {"positions": {"0": 13, "source_orders_0": {"1": "13"}}},
        {"tables": {"tumbling_4": {"t": {"where": "v > 1"}}}},
    ],
)
def test_the_digest_changes_with_what_is_declared(changes: dict[str, Any]) -> None:
    found = parse_declared_bootstrap(WHOLE).digest
    assert found == parse_declared_bootstrap(copy.deepcopy(WHOLE)).digest
    assert found != parse_declared_bootstrap(with_changes(**changes)).digest


def documented(name: str, folder: Path) -> DeclaredBootstrap:
    """A declaration of the docs, as the command line reads it."""
    (text,) = [one for one in blocks("docs/change-sql.md", "yaml") if name in one]
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return parse_declared_bootstrap(read_yaml(file, "the bootstrap"))


def test_the_documented_declarations_are_read(tmp_path: Path) -> None:
    found = documented("history.yaml", tmp_path)
    assert [(one.operator, one.table) for one in found.tables] == [
        ("updating_aggregate_4", "a"),
        ("updating_aggregate_4", "b"),
        ("tumbling_7", "t"),
    ]
    (topic,) = documented("topic.yaml", tmp_path).sources
    assert (topic.partition, topic.offset) == ("partition", "offset")
    assert topic.until_micros == 1_795_514_400_000_000
    (lake,) = documented("lake.yaml", tmp_path).sources
    assert (lake.format, lake.version, lake.in_lake) == ("delta", 12, True)


TOPIC = {
    "format": "kafka",
    "options": {"kafka.bootstrap.servers": "h:1", "subscribe": "orders"},
    "time": "timestamp",
}
TOPICS: dict[str, tuple[dict[str, Any], str]] = {
    "no cut": ({"events": TOPIC}, "expected either `positions` of its partitions or `until`"),
    "two cuts": (
        {"events": {**TOPIC, "until": "2026-11-24T10:00:00Z"}, "positions": {"0": 1}},
        "expected either `positions` of its partitions or `until`",
    ),
    "two topics": (
        {"events": {**TOPIC, "options": {"subscribe": "a,b"}}, "positions": {"0": 1}},
        "expected one topic",
    ),
    "another end": (
        {
            "events": {**TOPIC, "options": {"subscribe": "a", "endingOffsets": "latest"}},
            "positions": {"0": 1},
        },
        "`endingOffsets` would end the events elsewhere",
    ),
    "a name": ({"events": TOPIC, "positions": {"a.json": 1}}, "partitions of Kafka are numbers"),
    "a file until": (
        {"events": {**EVENTS, "until": "2026-11-24T10:00:00Z"}, "positions": {"0": 1}},
        "only the offsets of a topic of Kafka",
    ),
    "two sources": (
        {
            "sources": {"a": {**TOPIC, "until": "2026-11-24T10:00:00Z"}, "b": EVENTS},
            "tables": {"agg_1": {"a": {"from": "a"}}},
        },
        "expected `operator`",
    ),
}


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_without_one_cut_is_refused(name: str) -> None:
    changes, expected = TOPICS[name]
    document = {"lateness_seconds": 5, "tables": {"agg_1": {"a": {}}}, **changes}
    with pytest.raises(InputError, match=re.escape(expected)):
        parse_declared_bootstrap(document)


LAKE = {"format": "iceberg", "path": "/lake/orders", "time": "at"}


def test_a_table_of_a_lake_is_at_one_version() -> None:
    def source(**events: Any) -> EventSource:
        return parse_declared_bootstrap(with_changes(events=events)).sources[0]

    by_name = {"format": "iceberg", "table": "db.orders", "time": "at"}
    assert source(**LAKE).version is None
    assert source(**LAKE, snapshot=8123456789012345678).version == 8123456789012345678
    assert source(**by_name, catalog="lake").catalog == "lake"
    assert source(**by_name).table == "db.orders"
    assert source(**{**LAKE, "format": "delta"}, version=0).version == 0
    digests = {
        parse_declared_bootstrap(with_changes(events={**LAKE, **one})).digest
        for one in ({}, {"snapshot": 1}, {"snapshot": 2})
    }
    assert len(digests) == 3


SEVERAL = {"orders": EVENTS, "payments": EVENTS}
LAKES: dict[str, tuple[Any, str]] = {
    "a version of another format": ({**LAKE, "version": 3}, "`version` is that of a Delta table"),
    "a snapshot of another format": ({**EVENTS, "snapshot": 3}, "`snapshot` that of an"),
    "no number": ({**LAKE, "snapshot": "main"}, "events.snapshot: expected a number"),
    "a catalog without a table": ({**LAKE, "catalog": "c"}, "events.catalog: expected"),
    "no place": ({"format": "delta", "time": "at"}, "events: expected `path`, the folder"),
    "two places": ({**LAKE, "table": "db.t"}, "expected either `format` or `table`"),
    "a table of Delta": (
        {"format": "delta", "table": "db.t", "time": "at"},
        "expected either `format` or `table`",
    ),
}


@pytest.mark.parametrize("name", LAKES)
def test_a_table_of_a_lake_without_one_place_or_version_is_refused(name: str) -> None:
    events, expected = LAKES[name]
    with pytest.raises(InputError, match=re.escape(expected)):
        parse_declared_bootstrap(with_changes(events=events))


WRONG: dict[str, tuple[Any, str]] = {
    "no mapping": ([], "the bootstrap: expected a mapping"),
    "a member that does not exist": (with_changes(evens=EVENTS), "did you mean `events`?"),
    "no source": (with_changes(events=None), "either `events` or `sources`"),
    "both": (with_changes(sources=SEVERAL), "either `events` or `sources`"),
    "no table": (with_changes(tables={}), "tables: expected at least one"),
    "no time": (with_changes(events={"format": "parquet"}), "events: expected `time`"),
    "no place": (with_changes(events={"time": "at"}), "events: expected either `format` or"),
    "half a cut": (with_changes(events={**EVENTS, "offset": "o"}), "both `partition` and `offset`"),
    "a wrong member of a source": (
        with_changes(sources={"orders": {**EVENTS, "tme": "x"}}, events=None),
        "sources.orders has no 'tme'",
    ),
    "which source": (
        with_changes(sources=SEVERAL, events=None),
        "tables.tumbling_4.t.from: expected one of the sources (orders, payments)",
    ),
    "no watermark": (with_changes(watermark=None), "either `watermark` or `lateness_seconds`"),
    "two watermarks": (with_changes(lateness_seconds=5), "either `watermark` or"),
    "a watermark that is no time": (
        with_changes(watermark="soon"),
        "watermark: expected a time in ISO 8601",
    ),
    "a time before 1970": (with_changes(watermark="1969-12-31T10:00:00Z"), "a time after 1970"),
    "seconds that are none": (
        with_changes(watermark=None, lateness_seconds="5s"),
        "lateness_seconds: expected seconds",
    ),
    "a position that is none": (with_changes(positions={"0": True}), "positions.0: expected a"),
    "a position of an operator": (
        with_changes(positions={"source_orders_0": {"1": ""}}),
        "positions.source_orders_0.1: expected a position",
    ),
    "a place in the SELECT that is none": (
        with_changes(tables={"agg_5": {"b": {"distinct": {"x": "k"}}}}),
        "tables.agg_5.b.distinct: expected positions in the SELECT",
    ),
    "an expression that is none": (
        with_changes(tables={"agg_5": {"a": {"columns": {"k": ["k"]}}}}),
        "tables.agg_5.a.columns.k: expected a text",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_place(name: str) -> None:
    document, expected = WRONG[name]
    with pytest.raises(InputError) as caught:
        parse_declared_bootstrap(document)
    assert expected in str(caught.value)


# ---- the SQL of a table --------------------------------------------------------------------------


def query(table: str, sql: Sql | None = None, known: str = "k v at item price", **more: Any) -> str:
    config = (sql or Sql()).config(table).config
    assert isinstance(config, ExpiringTimeKeyConfig)
    declared = DeclaredTable(
        operator=OperatorId("op_1"), table=TableName(table), source="events", **more
    )
    return table_query(declared, config, SOURCE, known.split(), MARK).text("events")


def test_a_window_is_one_row_for_each_key_and_open_bin() -> None:
    start = "timestamp_micros(unix_micros(at) div 40000000 * 40000000)"
    assert query("t", where="v > 0") == (
        "select `k` as `k`, count(1) as `count(Int64(1))[count]`, sum(`v`) as `sum(v)[sum]`, "
        f"{start} as `_timestamp` from events where (v > 0) and {start} >= "
        f"timestamp_micros(960000000) group by `k`, {start}"
    )


def test_an_aggregate_is_one_row_for_each_group_within_the_time_to_live() -> None:
    sql = Sql(totals=(COUNT, SUM, SUMS, LEAST), ttl_seconds=600)
    assert query("a", sql) == (
        "select `k` as `k`, count(1) as `count(Int64(1))[count]`, sum(`v`) as `sum(v)[sum]`, "
        "count(`v`) as `sum(v)[count]`, min(`v`) as `min(v)[value]`, max(at) as `_timestamp`, "
        "count(*) as `_generation` from events group by `k` "
        "having max(at) >= timestamp_micros(400000000)"
    )


def test_a_side_of_a_join_is_its_events() -> None:
    assert query("left", Sql(ttl_seconds=600), columns={"item": "upper(item)"}) == (
        "select `k` as `k`, upper(item) as `item`, `price` as `price`, at as `_timestamp` "
        "from events where at >= timestamp_micros(400000000)"
    )


def test_tuples_have_the_keys_of_their_group() -> None:
    assert query("b", distinct={1: "item"}) == "select `k` as `k` from events group by `k`"


def test_sessions_are_the_events_that_the_watermark_has_not_closed() -> None:
    t = "unix_micros(at)"
    assert query("s", Sql(gap_seconds=4), where="v > 0") == (
        "select `k` as `k`, `item` as `item`, `price` as `price`, at as `_timestamp` from "
        f"(select *, max(case when (`__arroyo_next` is null or `__arroyo_next` - {t} > 4000000) "
        f"and {t} + 4000000 < 1000000000 then {t} end) over (partition by `k`) as `__arroyo_closed`"
        f" from (select *, lead({t}) over (partition by `k` order by {t}) as `__arroyo_next` "
        f"from events where v > 0)) where `__arroyo_closed` is null or {t} > `__arroyo_closed`"
    )


class Described(Sql):
    """The window has another description."""

    description = ""

    def config(self, name: str) -> TableConfig:
        found = super().config(name)
        return replace(found, config=replace(found.config, description=self.description))


class Unknown(Described):
    description = "a table of a later release"


class Sliding(Described):
    description = "Sliding_intermediate"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a column that is not there": (
        {"table": "t", "columns": {"cont": "1"}},
        "op_1.t.columns: the job's table has no column 'cont'",
    ),
    "a column that does not follow": ({"table": "t", "known": "k at"}, "columns=sum(v)[sum]"),
    "a table that is not known": (
        {"table": "t", "sql": Unknown()},
        "is not computed from a declaration",
    ),
    "values of no aggregate": ({"table": "b"}, "`distinct` belongs to table `b`"),
    "values of another table": ({"table": "a", "distinct": {1: "k"}}, "`distinct` belongs to"),
    "a slide of a tumbling window": (
        {"table": "t", "every_micros": 5},
        "slide of a sliding window",
    ),
    "a slide that does not divide the window": (
        {"table": "t", "sql": Sliding(), "every_micros": 7_000_000},
        "the window is 40 s long, and `every_seconds` does not divide it",
    ),
    "no slide": (
        {"table": "t", "sql": Sliding(), "every_micros": 0},
        "the window is 40 s long, and `every_seconds` does not divide it",
    ),
    "a windowed join": (
        {"table": "left", "sql": Sql(ttl_seconds=0)},
        "leave it out: at the cut it is empty",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_table_cannot_be_is_refused(name: str) -> None:
    given, expected = REFUSED[name]
    with pytest.raises(InputError) as caught:
        query(**given)
    assert expected in str(caught.value)
