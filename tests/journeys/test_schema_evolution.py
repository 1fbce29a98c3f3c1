"""A job is restarted with other columns in its table, again and again, and keeps its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arroyo_dagster.engine import Collector, Operator, OperatorContext, Pipeline
from arroyo_dagster.errors import InputError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    ExpiringTimeKeyTable,
    MemoryStore,
    TableConfig,
    TableName,
    WriteProtected,
    range_for_server,
    read_rows,
    run_compaction,
    timestamp_table_config,
    verify_job,
)
from arroyo_dagster.state.planning.restore.schema_evolution import changed_in
from tests.formats import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles
from tests.internals import LocalRun, load_epoch
from tests.jobs import listing
from tests.keyed_jobs import Command, Script

Columns = dict[str, pa.DataType]
FIRST: Columns = {"a": pa.int16(), "b": pa.string()}
ROWS = TableName("rows")
TIME = pa.timestamp("ns")
FULL = CompactionSettings(policy=CompactionPolicy.FULL)


def schema_of(columns: Columns) -> pa.Schema:
    fields = [pa.field("key", pa.string()), *(pa.field(n, kind) for n, kind in columns.items())]
    return pa.schema([*fields, pa.field("_timestamp", TIME, nullable=False)])


def values(number: int, columns: Columns) -> dict[str, Any]:
    known = {"a": number % 2, "b": f"b{number % 3}", "c": [number % 2]}
    return {name: known[name] for name in columns}


class Keep(Operator):
    """Keeps rows with the columns it was told, and deletes some."""

    def __init__(self, columns: Columns, **options: Any) -> None:
        self.columns = columns
        self.options: dict[str, Any] = {"keys": ["key"], **options}

    def tables(self) -> Sequence[TableConfig]:
        schema = schema_of(self.columns)
        return [
            timestamp_table_config("rows", retention_micros=10**9, schema=schema, **self.options)
        ]

    def on_start(self, ctx: OperatorContext) -> None:
        self.rows = ctx.table_manager.get_expiring_time_key_table("rows")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        for number, key, verb, at in zip(
            *(batch[name].to_pylist() for name in ("number", "key", "verb")),
            batch["_timestamp"].cast(pa.int64()).to_pylist(),
            strict=True,
        ):
            row = {"key": key, **values(number, self.columns), "_timestamp": at}
            if verb == "keep":
                self.rows.insert(pa.Table.from_pylist([row], schema_of(self.columns)))
            elif verb == "drop value":
                self.rows.delete_value(pa.Table.from_pylist([row], schema_of(self.columns)))
            elif verb == "drop time":
                self.rows.delete_time_key(at // 1000, key)
            else:
                self.rows.delete_key(key)


class Job:
    """The job, its store, and a plain list of what its table holds."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.commands: list[Command] = []
        self.columns = FIRST
        self.model: list[dict[str, Any]] = []

    def pipeline(self, columns: Columns, parallelism: int = 2, **options: Any) -> Pipeline:
        pipeline = Pipeline("evolving", parallelism=parallelism, keep_epochs=2)
        stream = pipeline.source("script", Script(self.commands), timestamp="at")
        stream.key_by("key").apply("keep", Keep(columns, **options))
        return pipeline

    def run(self, columns: Columns, epochs: list[list[Command]], parallelism: int = 2) -> None:
        """Start it with these columns, write some epochs, and let it die or stop."""
        self.columns = columns
        blank = dict.fromkeys(columns)
        self.model = [
            {k: v for k, v in {**blank, **row}.items() if k in columns or k in ("key", "at")}
            for row in self.model
        ]
        run = LocalRun.start(self.pipeline(columns, parallelism), self.store)
        for commands in epochs:
            for command in commands:
                self.obey(len(self.commands), command)
                self.commands.append(command)
            run.step(even_if_idle=True)
        run.step(then_stop=True, even_if_idle=True)

    def obey(self, number: int, command: Command) -> None:
        key, verb, at = command
        row = {"key": key, **values(number, self.columns), "at": at}
        if verb == "keep":
            self.model.append(row)
        elif verb == "drop value":
            self.model = [other for other in self.model if other != row]
        elif verb == "drop time":
            self.model = [r for r in self.model if (r["key"], r["at"]) != (key, at)]
        else:
            self.model = [r for r in self.model if r["key"] != key]

    def compact(self) -> bool:
        return run_compaction(self.store, self.pipeline(self.columns).paths, FULL).changed

    def expected(self) -> Counter[str]:
        return Counter(
            repr((row["key"], *(row[name] for name in self.columns), row["at"] * 1000))
            for row in self.model
        )

    def found(self) -> Counter[str]:
        checkpoint = load_epoch(self.store, self.pipeline(self.columns).paths)
        (operator,) = (one for one in checkpoint.operators if one.operator == "keep")
        files = operator.tables.get(ROWS)
        if not isinstance(files, ExpiringTimeKeyFiles):
            return Counter()
        table = ExpiringTimeKeyTable(operator.configs[ROWS], self.store)
        found: Counter[str] = Counter()
        for index in range(operator.parallelism):
            keys = range_for_server(index, operator.parallelism)
            rows = table.load(files.files, keys, cutoff_micros=0)
            columns = [c.cast(pa.int64()) if c.type == TIME else c for c in rows.columns]
            found.update(map(repr, zip(*(c.to_pylist() for c in columns), strict=True)))
        return found

    def check(self) -> None:
        assert self.found() == self.expected()
        paths = self.pipeline(self.columns).paths
        assert verify_job(WriteProtected(self.store), paths, history=0).verdict.findings == ()


KEEPS: list[Command] = [(key, "keep", at) for key in "abd" for at in (1, 2)]


def test_a_column_is_added_widened_and_dropped_and_rows_stay() -> None:
    job = Job()
    job.run(FIRST, [KEEPS, KEEPS])
    job.check()
    wider: Columns = {"c": pa.list_(pa.int64()), "a": pa.int64(), "b": pa.string()}
    job.run(wider, [KEEPS])
    job.check()
    assert None in {row["c"] and 1 for row in job.model}
    job.run({"a": pa.int64()}, [KEEPS])
    job.check()
    # Reads of any kind see the table as it is now.
    shown = read_rows(WriteProtected(job.store), job.pipeline(job.columns).paths, "keep", "rows")
    assert shown.count == len(job.model) == 24
    assert shown.rows[0].keys() == {"key", "a", "_timestamp"}


def test_files_of_several_schemas_merge_into_the_newest() -> None:
    job = Job()
    job.run(FIRST, [KEEPS, KEEPS])
    job.run({"a": pa.int64(), "c": pa.list_(pa.int64())}, [KEEPS])
    before = job.found()
    assert job.compact()
    assert job.found() == before == job.expected()
    checkpoint = load_epoch(job.store, job.pipeline(job.columns).paths)
    (operator,) = (one for one in checkpoint.operators if one.operator == "keep")
    config = operator.configs[ROWS].config
    assert isinstance(config, ExpiringTimeKeyConfig)
    assert changed_in(config.schema) > 0
    assert len(operator.paths) == 2  # one for each subtask
    assert not job.compact()
    job.run(FIRST | {"a": pa.int64()}, [KEEPS])
    job.check()


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        ({"a": pa.int8(), "b": pa.string()}, {}, "a: Int16 cannot become a: Int8"),
        ({"a": pa.string()}, {}, "some values would not fit"),
        (FIRST, {"keys": ["a"]}, "the storage key was"),
        (FIRST, {"generational": True}, "row generations"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason_and_nothing_is_written(
    columns: Columns, options: dict[str, Any], reason: str
) -> None:
    job = Job()
    job.run(FIRST, [KEEPS])
    before = {path: etag for path, etag in listing(job.store).items() if "generation" not in path}
    with pytest.raises(InputError, match=reason):
        LocalRun.start(job.pipeline(columns, **options), job.store).step()
    after = {path: etag for path, etag in listing(job.store).items() if "generation" not in path}
    assert after == before
    job.run(FIRST, [KEEPS])
    job.check()


# ---- any history ---------------------------------------------------------------------------------

_COMMAND = st.tuples(
    st.sampled_from("ad"),
    st.sampled_from(["keep", "keep", "keep", "drop value", "drop time", "drop key"]),
    st.integers(1, 2),
)
_EPOCHS = st.lists(st.lists(_COMMAND, max_size=5), max_size=2)
_PHASES = st.lists(
    st.tuples(st.sets(st.sampled_from("abc")), _EPOCHS, st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=4,
)


_X = [("x", "keep", 1)]
_COMES_BACK = [({"a", "b"}, [KEEPS], 2), ({"a"}, [KEEPS], 2), ({"a", "b"}, [KEEPS], 2)]
_DELETED_BEFORE_ITS_COLUMN_GOES = [
    ({"a"}, [_X * 3, [("x", "drop value", 1)]], 2),
    (set(), [], 2),
    ({"b"}, [_X], 2),
]


@given(phases=_PHASES)
@example(phases=[(*one, False) for one in _COMES_BACK])
@example(phases=[(*one, True) for one in _COMES_BACK])
@example(phases=[(*one, False) for one in _DELETED_BEFORE_ITS_COLUMN_GOES])
@example(phases=[(*one, True) for one in _DELETED_BEFORE_ITS_COLUMN_GOES])
def test_any_history_of_schemas_deletes_rescales_and_merges_keeps_the_rows(
    phases: list[tuple[set[str], list[list[Command]], int, bool]],
) -> None:
    job = Job()
    widths = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
    for phase, (names, epochs, parallelism, compacted) in enumerate(phases):
        kinds = {"a": widths[phase], "b": pa.string(), "c": pa.list_(widths[phase])}
        job.run({name: kinds[name] for name in sorted(names)}, epochs, parallelism)
        job.check()
        if compacted:
            job.compact()
            job.check()
