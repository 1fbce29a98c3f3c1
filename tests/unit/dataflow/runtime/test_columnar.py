"""Functions of whole batches: the results are those of a function per record, and of a model."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.types import scope_of
from arroyo_dagster.dataflow.runtime.columnar import call_divided
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.runtime.source_decoding import column_reader, reads_records
from arroyo_dagster.dataflow.storage.payloads import (
    PAYLOAD,
    PLACE,
    Groups,
    decode_frame,
    decode_values,
    encode_frame,
    records_of,
)
from arroyo_dagster.errors import StorageError
from tests.dataflows import Clock, Flow, Topic, builder, definition, row_of
from tests.shares import fewer_examples

WORD = "object, properties: {text: {type: string}, n: {type: u8}}"
STATES = """
      counts:
        type: keyed-state
        properties: {key: {type: string}, value: {type: u16}}
      sums:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, properties: {most: {type: u8}, total: {type: u64}}}"""
ONE_STATE = """
      sums:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, properties: {most: {type: u8}, total: {type: u64}}}"""


def service(states: str, transforms: str, key: str, update: str) -> str:
    def run(body: str, indent: int) -> str:
        return "run: |\n" + "\n".join(" " * indent + line for line in body.strip().splitlines())

    steps = "".join(
        f"\n      - operator: {operator}\n        {run(body, 10)}"
        for operator, body in ast.literal_eval(transforms)
    )
    return f"""
  build:
    sources: [{{type: topic, id: words}}]
    states:{states}
    transforms:{steps}
    partition:
      assign-key:
        {run(key, 10)}
      update-state:
        {run(update, 10)}
"""


PER_RECORD = service(
    STATES,
    repr([
        ("filter", "def wanted(word):\n    return word.n < 200"),
        ("map", "def upper(word):\n    return {'text': word.text.upper(), 'n': word.n + 1}"),
    ]),
    "def key_of(word):\n    return word.text",
    """
def count(word):
    if word.n == 14:
        raise ValueError("thirteen")
    counts().increment(1)
    row = sums()
    row.total += word.n
    row.most = max(row.most, word.n)
    row.update()
""",
)  # fmt: skip
POLARS = service(
    STATES,
    repr([
        ("filter", "import polars\n"
                   "def wanted(words: polars.DataFrame):\n    return words['n'] < 200"),
        ("map", "import polars as pl\ndef upper(words: pl.DataFrame):\n"
                "    return words.select(pl.col('text').str.to_uppercase(), pl.col('n') + 1)"),
    ]),
    "import polars as pl\ndef key_of(words: pl.DataFrame):\n    return words['text']",
    """
import polars as pl
def count(words: pl.DataFrame):
    groups = words.group_by("_key").agg(
        pl.len().alias("more"), pl.col("n").cast(pl.UInt64).sum(), pl.col("n").max().alias("top")
    )
    rows = counts().rows().join(groups, on="_key")
    counts().update(rows.select("_key", pl.col("value") + pl.col("more")))
    rows = sums().rows().join(groups, on="_key")
    sums().update(
        rows.select(
            "_key",
            total=pl.col("total") + pl.col("n"),
            most=pl.max_horizontal("most", "top"),
        )
    )
    if (words["n"] == 14).any():
        raise ValueError("thirteen")
""",
)  # fmt: skip
ARROW = service(
    STATES,
    repr([
        ("filter", "import pyarrow as pa\nimport pyarrow.compute as pc\n"
                   "def wanted(words: pa.Table):\n    return pc.less(words['n'], 200)"),
        ("map", "import pyarrow as pa\nimport pyarrow.compute as pc\ndef upper(words: pa.Table):\n"
                "    text = pc.utf8_upper(words['text'])\n"
                "    return pa.table({'text': text, 'n': pc.add(words['n'], 1)})"),
    ]),
    "import pyarrow as pa\ndef key_of(words: pa.Table):\n    return words['text']",
    """
import pyarrow as pa
def count(words: pa.Table):
    if 14 in words["n"].to_pylist():
        raise ValueError("thirteen")
    most, total, number = {}, {}, {}
    for key, n in zip(words["_key"].to_pylist(), words["n"].to_pylist()):
        most[key], total[key] = max(most.get(key, 0), n), total.get(key, 0) + n
        number[key] = number.get(key, 0) + 1
    before = {row["_key"]: row for row in sums().rows().iter_rows(named=True)}
    keys = list(before)
    sums().update(pa.table({
        "_key": keys,
        "most": [max(before[key]["most"], most[key]) for key in keys],
        "total": [before[key]["total"] + total[key] for key in keys],
    }))
    counts().update(pa.table({
        "_key": keys,
        "value": [n + number[key] for key, n in zip(keys, counts().rows()["value"].to_list())],
    }))
""",
)  # fmt: skip
FORMS = {"per record": PER_RECORD, "polars": POLARS, "arrow": ARROW}

SQL = service(
    ONE_STATE,
    repr([
        ("filter", "select n < 200 from batch"),
        ("map", "select upper(text) as text, n + 1 as n from batch"),
    ]),
    "select text from batch",
    """
select sums._key as _key, greatest(sums.most, more.most) as most, sums.total + more.total as total
from sums join (
  select _key, max(n) as most, sum(n) as total from batch group by _key
) more on sums._key = more._key
""",
)  # fmt: skip

RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "ä"]),
        st.sampled_from([0, 1, 2, 13, 13, 199, 200, 255, 256, -1, "x", 1.0, None, True]),
    ),
    max_size=12,
)


def model(records: list[tuple[str, Any]]) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    counted: Counter[str] = Counter()
    sums: dict[str, dict[str, int]] = {}
    for text, n in records:
        if type(n) is not int or not 0 <= n < 200 or n == 13:
            continue
        key = text.upper()
        counted[key] += 1
        row = sums.setdefault(key, {"most": 0, "total": 0})
        row["most"], row["total"] = max(row["most"], n + 1), row["total"] + n + 1
    return dict(counted), sums


@fewer_examples(2)
@given(st.lists(RECORDS, min_size=1, max_size=4), st.booleans(), st.sampled_from([1, 3]))
def test_every_form_gives_the_states_of_a_model(
    epochs: list[list[tuple[str, Any]]], restarts: bool, parallelism: int
) -> None:
    counted, sums = model([record for records in epochs for record in records])
    metrics = []
    for name, text in FORMS.items():
        flow = Flow(
            definition(text, topics={"words": WORD}),
            clock=Clock(),
            parallelism=parallelism,
            topics={"words": Topic(splits=parallelism)},
            max_errors=1000,
        )
        for records in epochs:
            flow.send("words", [{"text": word, "n": n} for word, n in records])
            if restarts:
                flow.restart()
        assert flow.cells("counts") == counted, name
        assert flow.rows("sums") == sums, name
        if not restarts:
            found = flow.metrics("build")
            metrics.append({one: (found[one].succeeded, found[one].failed) for one in found})
    assert all(one == metrics[0] for one in metrics)


@fewer_examples(3)
@given(st.lists(RECORDS, min_size=1, max_size=3), st.sampled_from([1, 2]))
def test_a_query_gives_the_states_of_a_model(
    epochs: list[list[tuple[str, Any]]], parallelism: int
) -> None:
    records = [[one for one in some if one[1] != 13] for some in epochs]
    flow = Flow(definition(SQL, topics={"words": WORD}), parallelism=parallelism, max_errors=1000)
    for some in records:
        flow.send("words", [{"text": word, "n": n} for word, n in some])
        flow.restart()
    assert flow.rows("sums") == model([one for some in records for one in some])[1]


def test_records_that_fail_are_found_and_kept_as_dead_letters() -> None:
    flow = Flow(definition(POLARS, topics={"words": WORD}), on_error="dead-letter")
    flow.send("words", [{"text": "a", "n": 13 if at in (3, 40) else 1} for at in range(64)])
    assert flow.cells("counts") == {"A": 62}
    assert [(one.offset, one.step) for one in flow.letters("build")] == [
        (3, "count"),
        (40, "count"),
    ]
    assert flow.letters("build")[0].value == {"text": "A", "n": 14}


EXPIRING = """
      counts:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: primitive, ttl: 7s, properties: {value: {type: u32}}}
      sums:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, properties: {total: {type: u64}}, ttl: 10s}"""
ONE_BY_ONE = """
def count(word):
    counts().increment(1)
    row = sums()
    row.total += word.n
    row.update()
    if word.n == 0:
        row.delete()
"""
TOGETHER = """
import polars as pl
def count(words: pl.DataFrame):
    for key, n in words.select("_key", "n").iter_rows():
        of_key = pl.col("_key") == key
        found = counts().rows().filter(of_key)
        counts().update(found.with_columns(pl.col("value") + 1))
        found = sums().rows().filter(of_key)
        sums().update(found.with_columns(total=pl.col("total") + n))
        if n == 0:
            sums().delete([key])
"""


@pytest.mark.parametrize("seed", range(2))
def test_rows_expire_and_are_deleted_in_both_forms(seed: int) -> None:
    found = []
    for update in (ONE_BY_ONE, TOGETHER):
        chance, clock, seen = random.Random(seed), Clock(), []
        text = service(EXPIRING, "[]", "def key_of(word):\n    return word.text", update)
        flow = Flow(definition(text, topics={"words": WORD}), clock=clock, parallelism=1 + seed % 2)
        for _ in range(8):
            clock.ms += chance.randrange(9000)
            records = [(chance.choice("abcdef"), chance.randrange(4)) for _ in range(5)]
            flow.send("words", [{"text": word, "n": n} for word, n in records])
            seen.append((flow.rows("sums"), flow.cells("counts"), flow.metrics("build")))
            if chance.random() < 0.3:
                flow.restart()
        found.append(seen)
    assert found[0] == found[1]


# ---- what a function may do ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ("return words.select('_key')", "several states"),
        ("sums().update(sums().rows().drop('most'))", "most"),
        ("sums().update(sums().rows().with_columns(more=1))", "more"),
        ("counts().update(counts().rows().with_columns(pl.lit(-1).alias('value')))", "E41"),
        ("counts().update(counts().rows().with_columns(pl.lit(1.0).alias('value')))", "E41"),
        ("counts().update(counts().rows().with_columns(pl.lit(None).alias('value')))", "E41"),
        ("counts().update(counts().rows().with_columns(pl.lit('z').alias('_key')))", "E43"),
        ("counts().update(pl.concat([counts().rows()] * 2))", "two rows"),
        ("counts().delete(['z'])", "E43"),
    ],
)
def test_a_wrong_update_fails_and_changes_nothing(
    update: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = f"import polars as pl\ndef count(words: pl.DataFrame):\n    {update}"
    text = service(STATES, "[]", "def key_of(word):\n    return word.text", body)
    flow = Flow(definition(text, topics={"words": WORD}), max_errors=10)
    flow.send("words", [{"text": "a", "n": 1}])
    assert flow.cells("counts") == {}
    assert flow.rows("sums") == {}
    assert said in caplog.text


# ---- parts ---------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.sets(st.integers(0, 39)))
def test_division_finds_exactly_the_rows_that_fail(rows: int, bad: set[int]) -> None:
    failed: list[int] = []

    def call(start: int, stop: int) -> list[int]:
        if bad & set(range(start, stop)):
            raise ValueError
        return list(range(start, stop))

    found = call_divided(rows, call, lambda at, error: failed.append(at))
    good = [at for _, _, listed in found for at in listed]
    assert good == [at for at in range(rows) if at not in bad]
    assert failed == sorted(at for at in bad if at < rows)


def test_a_store_that_fails_is_not_divided() -> None:
    calls = []

    def call(start: int, stop: int) -> None:
        calls.append((start, stop))
        raise StorageError("down")

    with pytest.raises(StorageError):
        call_divided(8, call, lambda at, error: None)
    assert calls == [(0, 8)]


def converter_of_words(kind: str) -> Converter:
    services = service(STATES, "[]", "def k(w): return 'a'", "def u(w): pass")
    found = parse_document(definition(services, topics={"words": kind}), extended=True)
    assert isinstance(found, Dataflow)
    return Converter(type=found.topics["words"].value, types=scope_of(found, {}))


SCALARS = (
    "object, properties: {b: {type: bool}, f: {type: f64}, g: {type: f32}, i: {type: i64}, "
    "s: {type: string}}"
)
WHOLE = "object, properties: {b: {type: bool}, i: {type: i64}, s: {type: string, optional: true}}"
PARTS = ["{", "}", '"b"', '"f"', '"s"', '"i"', ":", ",", "1", "-0", "1e5", "0.1", "null", "true",
         '"a"', '"\\ud800"', "NaN", "Infinity", "[", "]", " ", "\n", "\\", "1e400"]  # fmt: skip
GOOD = {"b": True, "f": 0.5, "g": 0.25, "i": 3, "s": "x"}


@given(
    st.lists(
        st.one_of(
            st.fixed_dictionaries({}, optional={
                "b": st.one_of(st.booleans(), st.integers(0, 1)),
                "f": st.one_of(st.floats(), st.integers()),
                "g": st.one_of(st.floats(width=32), st.floats()),
                "i": st.one_of(st.integers(-(2**65), 2**65), st.floats()),
                "s": st.one_of(st.text(), st.none(), st.integers()),
                "more": st.lists(st.text()),
            }).map(lambda one: json.dumps({**GOOD, **one})),
            st.lists(st.sampled_from(PARTS), max_size=6).map(lambda one: "{" + "".join(one) + "}"),
            st.sampled_from(["null", "", "5", "[1]", '{"i":1} {"i":2}', "\ufeff{}"]),
            st.sampled_from(['{"b":true,"i":1}', '{"b":true,"i":1,"i":2,"s":""}',
                             '{"b":true,"i":1.0,"s":""}', '{"s":"","i":-0,"b":false}']),
        ),
        max_size=5,
    ),
    st.sampled_from([SCALARS, WHOLE]),
)  # fmt: skip
def test_columns_of_json_are_what_the_converter_gives(lines: list[str], kind: str) -> None:
    converter = converter_of_words(kind)
    read, each = column_reader(converter), converter.reader()
    assert read is not None
    raw = [line.encode("utf-8", "surrogatepass") for line in lines]
    frame = read(pa.array(raw, pa.binary()))
    if frame is None:
        return
    expected = [each(one) for one in raw]
    assert frame.to_dicts() == [{**one} for one in expected]
    assert reads_records(converter) == (kind == WHOLE)
    if kind == WHOLE:
        found = [*records_of(frame)]
        assert [*map(repr, found)] == [*map(repr, expected)]
        assert [*map(type, found)] == [*map(type, expected)]


@pytest.mark.parametrize(
    ("change", "text", "n"),
    [
        ("record.n += 1", "a", 2),
        ("record['n'] = 7", "a", 7),
        ("record |= {'text': 'x', 'n': 9}", "x", 9),
        ("record |= [('n', 4)]", "a", 4),
        ("text = record.text; del record['text']; record.text = text * 2", "aa", 1),
        ("del record.n; record.n = 5", "a", 5),
        ("pass", "a", 1),
    ],
)
def test_a_record_that_assign_key_changes_arrives_changed(change: str, text: str, n: int) -> None:
    """Records that were read as columns travel so only if no function changed one."""
    services = builder(
        "row = counts()\nrow.said = record.text\nrow.most = record.n\nrow.update()",
        value=row_of(said="string", most="u32"),
        key_body=f"{change}; return 'k'",
    )
    flow = Flow(definition(services, topics={"words": WORD}))
    flow.send("words", [{"text": "a", "n": 1}] * 2).run()
    assert flow.rows("counts") == {"k": {"said": text, "most": n}}


@pytest.mark.parametrize("groups", [None, np.array([1, 0, 1])])
def test_columns_of_every_type_travel(groups: Groups | None) -> None:
    """Types that Arrow reads as they are, and those that only Polars reads."""
    plain = pl.DataFrame(
        {"s": ["a", None, "long enough for a buffer"], "b": [b"", b"x", None], "n": [1.5, 2, None]}
    ).with_columns(at=pl.lit(7).cast(pl.Datetime("ns")), yes=pl.lit(True))
    others = plain.with_columns(
        kind=pl.Series(["x", "y", "x"], dtype=pl.Enum(["x", "y"])),
        big=pl.Series([1 << 100, 0, -1], dtype=pl.Int128),
        pairs=pl.Series([[1], [], None], dtype=pl.List(pl.UInt8)),
    )
    for frame in (plain, others):
        columns = encode_frame(frame, groups)
        found = decode_frame(columns[PAYLOAD], columns[PLACE])
        assert found is not None
        assert found.schema == frame.schema
        assert found.equals(frame)
        assert decode_values(columns[PAYLOAD], columns[PLACE]) == [*records_of(frame)]
