"""SQL over states, and frames: names, dialect, what is refused, typed reads."""

from __future__ import annotations

import datetime as dt
from typing import Any

import polars as pl
import pytest

from arroyo_dagster.dataflow.errors import SqlError, StateAccessError
from arroyo_dagster.dataflow.views.frames import Frame
from arroyo_dagster.dataflow.views.sql import StateTable, Tables
from arroyo_dagster.sdf import col, lit

UTC = dt.UTC
HITS = pl.DataFrame(
    {
        "_key": ["/a", "/b", "it's"],
        "hits": [1, 4, 2],
        "pu-zone": [10, 20, 30],
        "share": [0.5, None, 2.0],
        "_updated_at": [dt.datetime(2026, 1, 5, hour, tzinfo=UTC) for hour in range(3)],
    },
    schema_overrides={
        "hits": pl.UInt32,
        "pu-zone": pl.Int64,
        "share": pl.Float32,
        "_updated_at": pl.Datetime("ms", "UTC"),
    },
)
NAMES = pl.DataFrame({"_key": ["/a", "/c"], "title": ["Start", "End"]})


def tables(**options: Any) -> Tables:
    return Tables(
        [StateTable("hits_per_page", HITS, ("hits-per-page",)), StateTable("names", NAMES)],
        **options,
    )


def ask(text: str, params: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
    return tables().sql(text, params).rows()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("select hits from hits_per_page where _key = '/b'", [(4,)]),
        ("SELECT hits FROM `hits-per-page` WHERE _key = 'it''s';", [(2,)]),
        ("select `pu-zone` from hits_per_page order by hits desc limit 1", [(20,)]),
        ('select "pu-zone" from "hits-per-page" where _key = \'/a\' and hits > 5', []),
        ("select count(*) from hits_per_page where _key = 'nothing'", [(0,)]),
        ("select sum(hits) s, avg(hits) from hits_per_page where hits > 1", [(6, 3.0)]),
        ("select coalesce(n.title, h._key) t from hits_per_page h full outer join names n "
         "on h._key = n._key order by t", [("/b",), ("End",), ("Start",), ("it's",)]),
        ("with big as (select * from hits_per_page where hits > 1) select count(*) from big",
         [(2,)]),
        ("select _key from hits_per_page union select _key from names order by _key",
         [("/a",), ("/b",), ("/c",), ("it's",)]),
        ("select case when hits > 3 then 'many' else 'few' end c from hits_per_page "
         "where _key in ('/a', '/b') order by c", [("few",), ("many",)]),
        ("select hits from hits_per_page where _key like '/%' and hits between 1 and 3", [(1,)]),
        ("select hits, count(*) c from hits_per_page group by hits having c > 0 order by hits "
         "limit 1 offset 1", [(2, 1)]),
        ("select distinct 1 x from hits_per_page -- a comment with 'quotes", [(1,)]),
        ("select (select max(hits) from hits_per_page) m from names where _key = '/a'", [(4,)]),
        # Near to a look-up of one key.
        ("select hits from hits_per_page where _key = '/a' or hits > 3 order by hits",
         [(1,), (4,)]),
        ("select hits from hits_per_page where _key = '/a' and (hits > 1 or hits < 1)", []),
        ("select hits from hits_per_page where _key = lower('/A')", [(1,)]),
        ("select hits from hits_per_page where _key = '/' || 'b'", [(4,)]),
    ],
)  # fmt: skip
def test_queries_are_answered(text: str, rows: list[tuple[Any, ...]]) -> None:
    assert ask(text) == rows


@pytest.mark.parametrize(
    "text",
    [
        "insert into names values ('a', 'b')",
        "update names set title = 'x'",
        "delete from names",
        "create table x as select 1",
        "drop table names",
        "truncate table names",
        "alter table names add c int",
        "set x = 1",
        "with x as (select 1) delete from names",
        "explain delete from names",
        "select 1; drop table names",
        "/* select */ drop table names",
        "",
        "  ;",
    ],
)
def test_what_is_no_query_is_refused_as_read_only(text: str) -> None:
    scope = tables()
    with pytest.raises(SqlError) as error:
        scope.sql(text)
    assert error.value.facts["number"] == "E46"
    assert scope.sql("select count(*) from names").item() == 2


def test_parameters_become_literals_and_nothing_else() -> None:
    evil = "x' or '1' = '1"
    assert ask("select hits from hits_per_page where _key = :page", {"page": evil}) == []
    assert ask("select hits from hits_per_page where _key = :p", {"p": "it's"}) == [(2,)]
    assert ask("select hits from hits_per_page where hits > :n and true = :b order by hits",
               {"n": 1.5, "b": True}) == [(2,), (4,)]  # fmt: skip
    assert ask("select ':p' as x from names limit 1") == [(":p",)]
    with pytest.raises(SqlError, match=":q"):
        ask("select :q from names", {"p": 1})
    with pytest.raises(SqlError, match="list"):
        ask("select :q from names", {"q": [1]})


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("select sum(hits) as total from hits_per_page where hits > 10000", (0,)),
        (
            "select SUM ( hits + (1) ) as total, count(*) as rows from hits_per_page where false",
            (0, 0),
        ),
        ("select 1 + sum(hits) as more from hits_per_page where false", (1,)),
        ("select coalesce(sum(hits), 7) as total from hits_per_page where false", (0,)),
        ("select sum(hits) as sum from hits_per_page having sum(hits) > 100", None),
        ("select 'sum(' || 'x)' as text from hits_per_page limit 1", ("sum(x)",)),
    ],
)
def test_a_sum_of_nothing_is_0_as_in_sdf(text: str, row: Any) -> None:
    assert ask(text) == ([] if row is None else [row])


def test_sums_of_something_keep_name_type_and_windows() -> None:
    frame = pl.DataFrame({"_key": ["a", "b"], "n": [1, 2], "f": [0.5, 1.0]}).with_columns(
        pl.col("n").cast(pl.UInt32)
    )
    tables = Tables([StateTable("t", frame)])
    found = tables.sql("select sum(n) as n, sum(f) as f, avg(n) as a from t")
    assert found.row(0) == (3, 1.5, 1.5)
    assert found.schema["f"] == pl.Float64
    assert found.schema["n"].is_integer()
    assert tables.sql("select sum(n) from t").columns == ["n"]
    assert tables.sql("select sum(n) over (partition by _key) as s from t").height == 2
    ordered = tables.sql("select _key from t group by _key order by sum(n) desc")
    assert ordered["_key"].to_list() == ["b", "a"]


# ---- frames --------------------------------------------------------------------------------------


def frame() -> Frame:
    return Frame(tables().by_name["hits_per_page"].plain, tables(), "hits_per_page")


def test_select_filter_sort_and_head() -> None:
    found = frame().filter(col("hits").gt(1)).select(["_key", "hits"]).sort("hits", [True])
    assert list(found.head(1)) == [{"_key": "/b", "hits": 4}]
    assert len(frame().filter(col("hits").lt_eq(lit(2)).and_(col("pu-zone").eq(10)))) == 1
    sums = frame().filter(col("hits").plus(col("pu-zone")).minus(1).gt_eq(23))
    assert len(sums.filter(col("hits").neq(4).or_(col("hits").lt(5)))) == 2
    for wrong in (
        lambda: frame().select("nothing"),
        lambda: frame().sort("nothing"),
        lambda: frame().filter(col("nothing").eq(1)),
    ):
        with pytest.raises(StateAccessError, match="nothing") as error:
            wrong()
        assert error.value.facts["number"] == "E44"


def test_rows_are_read_one_after_the_other_by_typed_getters() -> None:
    rows = frame().rows()
    with pytest.raises(StateAccessError, match="next"):
        rows.u32("hits")
    assert (rows.index(), rows.end()) == (-1, False)
    assert rows.next()
    assert (rows.str(frame().key()), rows.u32("hits"), rows.i8("hits")) == ("/a", 1, 1)
    assert (rows.f32("share"), rows.f64("share"), rows.i64("pu-zone")) == (0.5, 0.5, 10)
    for wrong in (lambda: rows.str("hits"), lambda: rows.f32("hits"), lambda: rows.bool("_key"),
                  lambda: rows.u8("share")):  # fmt: skip
        with pytest.raises(StateAccessError) as error:
            wrong()
        assert error.value.facts["number"] == "E45"
    assert rows.next()
    with pytest.raises(StateAccessError, match="null") as error:
        rows.f32("share")
    assert (error.value.facts["number"], rows.f32("share", default=9.0)) == ("E45", 9.0)
    assert rows.skip(1)
    assert rows.end()
    assert not rows.next()
    with pytest.raises(StateAccessError, match="behind"):
        rows.u32("hits")
    cursor = frame().rows()
    cursor.next()
    with pytest.raises(StateAccessError, match="nothing"):
        cursor.u32("nothing")
