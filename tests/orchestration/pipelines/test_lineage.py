"""Sources and sinks of pipelines: what SQL and state say, and how users name them."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.pipelines.lineage import (
    End,
    endpoints_of,
    ends_of_arroyo,
    ends_of_managed,
    mapped,
    tables_of,
    without_cycles,
    without_secrets,
)
from arroyo_dagster.orchestration.pipelines.model import Key, LineageEndpoint, ListedPipeline
from arroyo_dagster.state import TableName, global_table_config

KAFKA = global_table_config(TableName("k"), "kafka offsets", key=int, value=bytes)
COMMITS = global_table_config(
    TableName("p"), "pre-commit data", two_phase_commit=True, key=str, value=str
)
SOURCE, SINK = End("source", "source_t_0", "t"), End("sink", "sink_t_1", "t")


def source_key(options: str) -> Key:
    ((source,), _) = endpoints_of(("p",), [SOURCE], f"CREATE TABLE t (a INT) WITH ({options});")
    return source.key


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("connector = 'kafka', topic = 'orders', type='source'", ("kafka", "orders")),
        ("'connector'='kafka', 'topic'='or.ders', format='json'", ("kafka", "or--2eders")),
        ("connector='KAFKA', \"topic\"='it''s'", ("kafka", "it--27s")),
        ("connector='kinesis', stream_name='s'", ("kinesis", "s")),
        ("connector='iceberg', namespace='lake', table_name='t'", ("iceberg", "lake", "t")),
        (
            "connector='single_file', path='/data/in/x.json'",
            ("single_file", "data", "in", "x--2ejson"),
        ),
        ("connector='filesystem', path='file:///data/x/'", ("filesystem", "data", "x")),
        ("connector='delta', path='s3://lake/orders'", ("delta", "s3", "lake", "orders")),
        ("connector='delta', path='s3://KEY:SECRET@lake/o?sig=x'", ("delta", "s3", "lake", "o")),
        (
            "connector='sse', endpoint='https://u:p@h.example:8/a/token?t=1'",
            ("sse", "h--2eexample--3a8"),
        ),
        ("connector='nats', servers='n1:4222', subject='s'", ("nats", "s")),
        ("connector='redis', address='redis://h:6379'", ("redis", "h--3a6379")),
        ("connector='impulse', event_rate='1'", ("impulse", "p", "t")),
        ("connector='kafka', topic=", ("kafka", "p", "t")),
        ("format='json'", ("table", "p", "t")),
    ],
)
def test_the_key_of_a_source_is_its_connector_and_its_place(options: str, key: Key) -> None:
    assert source_key(options) == key


SQL = """
-- CREATE TABLE no WITH (connector='kafka', topic='no');
/* CREATE TABLE neither WITH (connector='kafka', topic='no'); */
CREATE OR REPLACE TEMPORARY table "In Put"
  (a TEXT DEFAULT 'WITH (x=''y'')', b DECIMAL(1, 2) METADATA FROM 'k')
  WITH (connector = 'kafka', topic = 'in;put', rolling_policy.interval = '4 seconds');
CREATE TABLE IF NOT EXISTS unused (a INT) WITH (connector='kafka', topic='unused');
CREATE TEMPORARY TABLE memory (a INT);
CREATE VIEW v AS SELECT * FROM "In Put";
CREATE TABLE out_3 WITH (connector='kafka', topic='out');
INSERT INTO memory SELECT a FROM v; insert into OUT_3 select a from memory
"""


def test_sql_is_scanned_with_comments_quotes_and_letters_of_both_cases() -> None:
    tables = tables_of(SQL)
    assert [*tables.options] == ["in put", "unused", "memory", "out_3"]
    assert tables.options["in put"]["topic"] == "in;put"
    assert tables.options["in put"]["rolling_policy.interval"] == "4 seconds"
    assert tables.written == {"memory", "out_3"}
    # Without state, the SQL tells alone what is read and written; `memory` has no connector.
    sources, sinks = endpoints_of(("p",), None, SQL)
    assert [end.key for end in sources] == [("kafka", "in--3bput")]
    assert [end.key for end in sinks] == [("kafka", "out")]
    ends = ends_of_arroyo({"source_In Put_0": [], "sink_out_3_5": [], "join_7": []})
    assert endpoints_of(("p",), ends, SQL)[1][0].key == ("kafka", "out")
    # The sink of a preview has another number behind.
    assert endpoints_of(("p",), ends_of_arroyo({"sink_out_3_5_1": []}), SQL)[1][0].key[1] == "out"


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "'",
        "CREATE TABLE",
        "CREATE TABLE '' WITH (connector='kafka'); SELECT ''",
        "CREATE TABLE t WITH (",
        "(((",
        ";;",
        "WITH = )",
        "/*" * 9,
        "é" * 2_000_000,
    ]
    + [SQL[:at] for at in range(0, len(SQL), 7)],
)
def test_sql_that_is_not_understood_is_no_error(sql: str) -> None:
    endpoints_of(("p",), None, sql)
    endpoints_of(("p",), [SOURCE, SINK], sql)
    without_secrets(sql)


def test_values_of_secret_options_are_hidden_in_sql() -> None:
    sql = """CREATE TABLE a WITH (connector='kafka', 'auth.password' = 'one', topic = 't');
    CREATE TABLE b WITH (connector='sse', endpoint='https://u:two@h/x', token='three');"""
    shown = without_secrets(sql)
    assert not any(secret in shown for secret in ("one", "two", "three"))
    assert tables_of(shown).options["a"]["topic"] == "t"
    assert without_secrets(SQL) == SQL


def test_sinks_that_go_nowhere_are_left_out() -> None:
    sql = "CREATE TABLE t WITH (connector='blackhole');"
    assert endpoints_of(("p",), [SINK], sql) == ((), ())


def test_without_sql_the_state_names_the_connector_and_tables_are_not_shared() -> None:
    ends = ends_of_arroyo({"source_orders_0": [KAFKA], "sink_out_3": [], "key_1": []})
    sources, sinks = endpoints_of(("pl", "job"), ends, None)
    assert sources == (
        LineageEndpoint(("kafka", "pl", "job", "orders"), "source_orders_0", "kafka"),
    )
    assert sinks == (LineageEndpoint(("table", "pl", "job", "out"), "sink_out_3", None),)


def test_topics_of_a_dataflow_connect_its_services() -> None:
    offsets = '{"topics": {"topics": {"words": {"epoch": 1}}, "clock_ms": 1}}'
    ends = ends_of_managed({"count": [], "sink.counts": [COMMITS]}, offsets)
    sources, sinks = endpoints_of(("tests--2estory", "count"), ends, None)
    assert [end.key for end in sources] == [("topic", "tests--2estory", "words")]
    assert [end.key for end in sinks] == [("topic", "tests--2estory", "counts")]


@pytest.mark.parametrize("offsets", ["", "{", "[]", '"x"', '{"topics": 1}', "null"])
def test_offsets_that_are_not_understood_are_no_error(offsets: str) -> None:
    assert ends_of_managed({}, offsets) == []


# ---- mapping and edges ---------------------------------------------------------------------------

ENDS = (
    LineageEndpoint(("kafka", "a"), "source_a_0"),
    LineageEndpoint(("kafka", "b"), "source_b_1"),
)


def test_users_name_sources_otherwise_or_leave_them_out() -> None:
    assert mapped(ENDS, True) == ENDS
    assert mapped(ENDS, False) == ()
    found = mapped(ENDS, {"kafka/a": "lake/raw orders", "kafka/b": None, "kafka/c": "x"})
    assert [end.key for end in found] == [("lake", "raw orders")]
    with pytest.raises(InputError, match="one of its parts is empty"):
        mapped(ENDS, {"kafka/a": "/lake"})


def pipeline(root: str, reads: str, writes: str) -> ListedPipeline:
    return ListedPipeline(
        root,
        (root,),
        sources=tuple(LineageEndpoint((name,), f"source_{name}_0") for name in reads),
        sinks=tuple(LineageEndpoint((name,), f"sink_{name}_1") for name in writes),
    )


def test_a_sink_of_two_pipelines_has_both_as_writers() -> None:
    lineage = without_cycles([pipeline("b", "x", "z"), pipeline("a", "y", "z")])
    assert lineage.sinks == {("z",): ("a", "b")}
    assert lineage.sources == {"a": (("y",),), "b": (("x",),)}
    assert lineage.left_out == {}


def test_the_edge_that_closes_a_ring_is_left_out() -> None:
    lineage = without_cycles([pipeline("b", "y", "x"), pipeline("a", "x", "y")])
    assert lineage.sources == {"a": (("x",),), "b": (("y",),)}
    assert lineage.sinks == {("y",): ("a",)}
    assert lineage.left_out == {"b": (("x",),)}
    own = without_cycles([pipeline("a", "x", "x")])
    assert (own.sources, own.sinks, own.left_out) == ({"a": (("x",),)}, {}, {"a": (("x",),)})
