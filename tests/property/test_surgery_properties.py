"""Random SQL, changed at random: each operator of the job that takes the state loads the rows of
its counterpart, by rules written down here once more, from `state-surgery.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import Layout, MemoryStore, ParquetBackend, verify_job
from tests.evolved_jobs import (
    COUNT,
    EXPIRING,
    ITEM,
    LEAST,
    MOST,
    PRICE,
    SUM,
    SUMS,
    Column,
    Sql,
    loaded,
    sql_job,
    table_schema,
)
from tests.formats import ExpiringTimeKeyConfig
from tests.jobs import listing
from tests.journeys.test_evolve import expected, run
from tests.journeys.test_fork import run as fork
from tests.journeys.test_rescale import run as rescale
from tests.journeys.test_surgery import errors_of, state_of
from tests.shares import fewer_examples
from tests.surgery_jobs import BEGAN, NANOS, SurgeryJob

KEYS = st.sampled_from([None, "", "a", "b", "c", "d", "e"])
SECONDS = st.sampled_from([10, 19, 20, 21, 40, 60, 61, 90])
"""Around the 20 s before which a window of 40 s is closed at the watermark of 60 s."""

VALUES = {
    pa.string(): st.sampled_from(["", "x", "ü", "y" * 70]),
    pa.int64(): st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]),
    pa.uint64(): st.sampled_from([0, 1, 2**63, 2**64 - 1]),
}


def some(columns: Sequence[Column]) -> st.SearchStrategy[tuple[Column, ...]]:
    """Some of the columns, in any order."""
    chosen = st.lists(st.sampled_from(columns), unique=True, min_size=1, max_size=len(columns))
    return chosen.map(tuple)


def with_one_of(draw: st.DrawFn, columns: Sequence[Column], shared: Column) -> tuple[Column, ...]:
    """Some of the columns, in any order, and one that both jobs have."""
    found = draw(some(columns))
    return found if shared in found else (*found, shared)


@dataclass(frozen=True, repr=False)
class Pair:
    """Two jobs of random SQL, and how aggregates with arguments move between them."""

    source: SurgeryJob
    job: SurgeryJob
    was: Sql
    now: Sql

    def __repr__(self) -> str:
        jobs = (self.source, self.job)
        return f"{self.was} becomes {self.now}: {[(one.layout, one.parallelism) for one in jobs]}"

    @property
    def numbers(self) -> dict[int, int]:
        return dict(zip(sorted(self.was.distinct), sorted(self.now.distinct), strict=True))


def ids(draw: st.DrawFn) -> dict[str, str]:
    """Operator ids with numbers as another order of the statements gives them."""
    numbers = draw(st.permutations(range(1, 30)))
    kinds = [one for one in Sql().ids if one not in ("session", "value")]
    return {
        **Sql().ids,
        **{
            kind: f"{Sql().ids[kind].rpartition('_')[0]}_{number}"
            for kind, number in zip(kinds, numbers, strict=False)
        },
    }


def rows(draw: st.DrawFn, sql: Sql, table: str, count: int) -> pa.Table:
    """Random rows of a table; the generation of a key grows from row to row."""
    schema = table_schema(sql, table)
    columns: list[list[Any]] = []
    for field in schema:
        if field.name == sql.key[0]:
            strategy: Any = KEYS
        elif pa.types.is_timestamp(field.type):
            strategy = SECONDS.map(lambda at: BEGAN * 1000 + at * NANOS)
        elif field.name == "accumulator":
            strategy = st.sampled_from(sql.distinct or (0,))
        elif pa.types.is_binary(field.type):
            strategy = st.sampled_from([b"\0", b"\1" + bytes(8), b"\1" + b"\x80" * 8])
        else:
            values = VALUES[field.type]
            strategy = (st.none() | values) if field.nullable else values
        columns.append(draw(st.lists(strategy, min_size=count, max_size=count)))
    return pa.table(
        [pa.array(one, field.type) for one, field in zip(columns, schema, strict=True)],
        schema=schema,
    )


def write(draw: st.DrawFn, job: SurgeryJob, sql: Sql) -> None:
    """One more epoch of random rows."""
    given_rows = {}
    for table, name in EXPIRING.items():
        if table in sql.without:
            continue
        found = rows(draw, sql, table, draw(st.integers(0, 6)))
        if table in ("a", "b"):
            first = 1000 * job.epoch
            numbers = pa.array(range(first, first + found.num_rows), pa.uint64())
            found = found.append_column("_generation", numbers)
        given_rows[sql.ids[name], sql.config(table)] = found
    job.write(given_rows, whole=draw(st.booleans()))


@st.composite
def pairs(draw: st.DrawFn, *, changed: bool) -> Pair:
    """Two jobs, each of any layout and parallelism.

    Args:
        changed: their SQL differs; else only their rows do.
    """
    kept = draw(st.integers(0, 2))
    columns = (COUNT, SUM, SUMS, LEAST, MOST)

    def sql(**more: Any) -> Sql:
        totals = with_one_of(draw, columns, COUNT)
        # Those that keep their arguments stand anywhere among those of table `a` in the SELECT.
        positions = range(len({name.partition("[")[0] for name, _, _ in totals}) + kept)
        chosen = st.lists(st.sampled_from(positions), unique=True, min_size=kept, max_size=kept)
        return Sql(
            distinct=tuple(sorted(draw(chosen))),
            window=with_one_of(draw, columns, SUM),
            totals=totals,
            without=() if kept else ("b",),
            **more,
        )

    was = sql(left=(ITEM, PRICE))
    now = was
    if changed:
        now = sql(ids=ids(draw), left=draw(some((ITEM, PRICE))))
    layouts, parallelism = st.sampled_from(list(Layout)), st.integers(1, 3)
    made = []
    store = MemoryStore()
    for name, one, base in (("job_a", was, 0), ("job_b", now, 7)):
        job = sql_job(
            draw(layouts),
            name,
            one,
            epochs=1,
            base=base,
            parallelism=draw(parallelism),
            store=store if draw(st.booleans()) else MemoryStore(),
        )
        for _ in range(draw(st.integers(0, 2))):
            write(draw, job, one)
        made.append(job)
    return Pair(made[0], made[1], was, now)


@settings(fewer_examples(4), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(pair=pairs(changed=True))
def test_each_operator_loads_the_rows_of_its_counterpart(pair: Pair) -> None:
    source, job = pair.source, pair.job
    was, theirs = loaded(source.store, source.paths), state_of(source.store, source.paths)
    untouched = {path: found for path, found in listing(source.store).items() if "job_a" in path}
    ours = state_of(job.store, job.paths)
    guess: InputError | None = None
    try:
        run(source, job)
    except InputError as error:
        guess = error
    if guess is not None:  # what a person must decide
        assert "the state cannot be carried" in guess.message
        assert state_of(job.store, job.paths) == ours
        return
    assert loaded(job.store, job.paths) == expected(was, pair.was, pair.now, pair.numbers)
    found = state_of(job.store, job.paths)
    for name in ("source", "watermark", "session"):
        before, after = theirs[pair.was.ids[name]], found[pair.now.ids[name]]
        assert after[0][:2] == before[0][:2]
        if name != "session":
            assert _entries(after) == _entries(before)
    assert found[pair.now.ids["sink"]][2] == ours[pair.now.ids["sink"]][2]
    assert errors_of(job.store, job.paths) == set()
    left = listing(source.store)
    assert {path: one for path, one in left.items() if "job_a" in path} == untouched


def _entries(state: Any) -> Any:
    return {key[1:]: value for key, value in state[2].items()}


@settings(fewer_examples(4), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(pair=pairs(changed=False))
def test_a_fork_loads_what_the_source_loads(pair: Pair) -> None:
    source, job = pair.source, pair.job
    theirs, ours = state_of(source.store, source.paths), state_of(job.store, job.paths)
    fork(source, job)
    sink = pair.was.ids["sink"]
    truth = {
        name: ((*theirs[name][0][:2], *head[2:]), *(held if name == sink else theirs[name][1:]))
        for name, (head, *held) in ours.items()
    }
    assert state_of(job.store, job.paths) == truth
    assert errors_of(job.store, job.paths) == set()


@settings(fewer_examples(4), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(pair=pairs(changed=False), parallelism=st.integers(1, 9))
def test_a_rescale_keeps_what_is_loaded(pair: Pair, parallelism: int) -> None:
    """Rows of joins beyond the retention depend on record batches: none comes, some may go."""
    job = pair.source
    before, cutoffs = loaded(job.store, job.paths), join_cutoffs(job)
    assert len(cutoffs) == 2
    rescale(job.store, job, parallelism)
    after = loaded(job.store, job.paths)
    for at, rows in before.items():
        now = after.get(at, [])
        if at not in cutoffs:
            assert now == rows, at
            continue
        gone = Counter(map(repr, rows)) - Counter(map(repr, now))
        assert not Counter(map(repr, now)) - Counter(map(repr, rows))
        assert gone <= Counter(repr(one) for one in rows if one["_timestamp"] < cutoffs[at])
    verdict = verify_job(job.store, job.paths, parallelism=parallelism).verdict
    assert verdict.errors == ()


def join_cutoffs(job: SurgeryJob) -> dict[tuple[str, str], int]:
    """By table of a join, the oldest event time within its retention, in nanoseconds."""
    found = {}
    for operator in ParquetBackend(job.store, job.paths).load().operators:
        for name, one in operator.configs.items():
            if str(name) in ("left", "right"):
                assert isinstance(one.config, ExpiringTimeKeyConfig)
                assert operator.min_watermark_micros is not None
                oldest = operator.min_watermark_micros - one.config.retention_micros
                found[str(operator.operator), str(name)] = oldest * 1000
    return found
