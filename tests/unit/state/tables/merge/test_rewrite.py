"""One part of a table of Arroyo's written anew: every type comes back exactly, every rule of 5.4 to
5.7 is kept, and what cannot be done is said."""

from __future__ import annotations

import pyarrow as pa
import pytest

from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    Layout,
    RewriteOptions,
    RewriteOutcome,
    plan_rewrite,
    run_rewrite,
    timestamp_table_config,
)
from arroyo_dagster.state.tables.merge import rewrite as rewriting
from tests.arroyo_jobs import (
    EVENTS,
    GROUPS,
    SECOND,
    TUPLES,
    ArroyoJob,
    accumulators_config,
    as_stored,
    content,
    stopped,
    table_rows,
    tuples_config,
    window_config,
    without_keys,
)
from tests.formats import TimeFile, encode_rows

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
TIME = pa.field("_timestamp", pa.timestamp("ns"), nullable=False)
NOW = 50 * SECOND * 1000


def rewritten(job: ArroyoJob, settings: CompactionSettings = FULL) -> RewriteOutcome:
    before = content(job.store, job.paths)
    outcome = run_rewrite(
        job.store, job.paths, stopped(job.paths), settings, RewriteOptions(quiet_seconds=0)
    )
    assert content(job.store, job.paths) == before
    return outcome


def files(outcome: RewriteOutcome, table: str) -> list[TimeFile]:
    return [
        file
        for part in outcome.parts
        if part.merged.table == table
        for file in part.merged.outputs
        if isinstance(file, TimeFile)
    ]


def test_aggregate_with_too_many_tuples_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "MAX_UNKEYED_ROWS", 2)
    config, groups = (
        tuples_config(without_keys(TUPLES), []),
        accumulators_config(without_keys(GROUPS), []),
    )
    job = ArroyoJob(Layout.LEGACY)
    for at in range(3):
        tuples = [[0] * 3, [b"x", b"y", b"z"], [1] * 3, [NOW] * 3, [at] * 3]
        job.write(
            {
                ("agg_1", config): table_rows(without_keys(TUPLES), tuples),
                ("agg_1", groups): table_rows(
                    without_keys(GROUPS), [[1, 2], [NOW] * 2, [2 * at, 2 * at + 1]]
                ),
            }
        )
    outcome = rewritten(job)
    # Both tables of an aggregate belong together.
    assert not outcome.published
    reasons = {one.table: one.reason for one in outcome.left_out}
    assert "would need a row group each" in reasons["b"]


def test_anything_but_an_insert_is_refused_and_the_other_tables_go_on() -> None:
    config = window_config(EVENTS, ["k"], retention=600)
    job = ArroyoJob(Layout.LEGACY, parallelism=1)
    for at in range(3):
        rows = table_rows(EVENTS, [["a"], [at], [NOW]])
        job.write({("tumbling_1", config): rows, ("tumbling_2", config): rows})
    path = job.files["tumbling_1", "t"][1].path
    stored = as_stored(config, table_rows(EVENTS, [["a"], [1], [NOW]]))
    deletes = pa.array([b"\2"], pa.binary())
    stored = stored.set_column(4, stored.schema.field(4), deletes)
    job.store.put(path, encode_rows(stored))
    outcome = run_rewrite(
        job.store, job.paths, stopped(job.paths), FULL, RewriteOptions(quiet_seconds=0)
    )
    assert outcome.published
    assert {one.merged.operator for one in outcome.parts} == {"tumbling_2"}
    (left,) = (one for one in outcome.left_out if one.operator == "tumbling_1")
    assert path in left.reason
    assert "operations other than Insert" in left.reason


def test_a_file_with_other_columns_than_its_table_stays_and_says_why() -> None:
    """Arroyo's schemas never change: such a file is nobody's to rewrite."""
    config = window_config(EVENTS, ["k"], retention=600)
    job = ArroyoJob(Layout.LEGACY, parallelism=1)
    for at in range(3):
        job.write({("tumbling_1", config): table_rows(EVENTS, [["a"], [at], [NOW]])})
    path = job.files["tumbling_1", "t"][1].path
    stored = as_stored(config, table_rows(EVENTS, [["a"], [1], [NOW]]))
    other = stored.schema.set(1, pa.field("n", pa.uint64(), nullable=True))
    job.store.put(path, encode_rows(stored.cast(other)))
    outcome = run_rewrite(
        job.store,
        job.paths,
        stopped(job.paths),
        FULL,
        RewriteOptions(quiet_seconds=0, verify_level=0),
    )
    assert not outcome.published
    assert any("has other columns than its table" in one.reason for one in outcome.left_out)


@pytest.mark.parametrize(
    ("description", "generational", "reason"),
    [("final_table", True, "no known operator"), ("rows of mine", False, "no known operator")],
)
def test_unknown_table_is_left_alone(description: str, generational: bool, reason: str) -> None:
    config = timestamp_table_config(
        "t",
        description,
        retention_micros=SECOND,
        schema=EVENTS,
        keys=["k"],
        generational=generational,
    )
    job = ArroyoJob(Layout.LEGACY, parallelism=1)
    more = [[1]] if generational else []
    for _ in range(3):
        job.write({("op_1", config): table_rows(EVENTS, [["a"], [1], [NOW], *more])})
    plan = plan_rewrite(job.store, job.paths, stopped(job.paths), FULL)
    assert not plan.tables
    assert any(reason in one.reason for one in plan.left_out)


def test_columns_that_cannot_be_written_back_exactly_are_left_alone() -> None:
    """pyarrow reads every dictionary with indices of 32 bits."""
    kind = pa.dictionary(pa.int8(), pa.string())
    schema = pa.schema([("k", pa.string()), ("v", kind), TIME])
    config = window_config(schema, ["k"], retention=600)
    reason = rewriting.unwritable(config.config)  # type: ignore[arg-type]
    job = ArroyoJob(Layout.LEGACY, parallelism=1)
    for _ in range(3):
        job.write({("tumbling_1", config): table_rows(schema, [["a"], ["x"], [NOW]])})
    plan = plan_rewrite(job.store, job.paths, stopped(job.paths), FULL)
    if reason is None:
        assert plan.tables
    else:
        assert not plan.tables
        assert any("cannot be written back exactly" in one.reason for one in plan.left_out)
