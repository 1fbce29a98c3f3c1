"""The three views of an expiring table as an operator's author gets them, in a job that restarts
with another parallelism: what it puts out is what a plain model says.
Restarted with other columns, again and again, a table keeps its rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    Pipeline,
    TableSource,
    run_pipeline,
)
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
from tests.jobs import TIMED, SinkInto, listing, output_of, words
from tests.keyed_jobs import Command, Script

ROWS, ROWS_PER_EPOCH = 40, 4
RETENTION_SECONDS = 9
SEEN = pa.schema([("view", pa.string()), ("word", pa.string()), ("n", pa.int64())])


class Looking(Operator):
    """Puts out a number for each row, from what a view says of its word."""

    output_schema = SEEN
    name = ""
    retention_seconds = 3600
    generational = False

    def tables(self) -> Sequence[TableConfig]:
        schema = TIMED if not self.generational else TIMED.insert(1, pa.field("n", pa.int64()))
        return [
            timestamp_table_config(
                "t",
                retention_micros=self.retention_seconds * 1_000_000,
                schema=schema,
                keys=["word"],
                generational=self.generational,
            )
        ]

    def see(self, word: str, row: pa.RecordBatch) -> int:
        raise NotImplementedError

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        rows = batch.select(["word", "_timestamp"])
        found = rows.column("word").to_pylist()
        seen = [self.see(word, rows.slice(at, 1)) for at, word in enumerate(found)]
        columns = [[self.name] * len(found), found, seen]
        collector.collect(pa.record_batch(columns, schema=SEEN))


class Recent(Looking):
    """How many rows of any of this subtask's words are not older than the retention: at a restart
    with one subtask the sum over all words."""

    name = "recent"
    retention_seconds = RETENTION_SECONDS

    def on_start(self, ctx: OperatorContext) -> None:
        self.view = ctx.table_manager.get_expiring_time_key_table("t")

    def see(self, word: str, row: pa.RecordBatch) -> int:
        self.view.insert(row)
        now = row.column("_timestamp")[0].value // 1000
        between = self.view.rows_between(now - RETENTION_SECONDS * 1_000_000, now + 1)
        return between.column("word").to_pylist().count(word)


class Joined(Looking):
    """How many rows of the word came before; every fifth forgets them."""

    name = "joined"

    def on_start(self, ctx: OperatorContext) -> None:
        self.view = ctx.table_manager.get_key_time_table("t")

    def see(self, word: str, row: pa.RecordBatch) -> int:
        before = self.view.get(word).num_rows
        if before == 4:
            self.view.delete_key(word)
        self.view.insert(row)
        return before


class Totals(Looking):
    """How many rows of the word came, kept by the operator itself and read once at a start."""

    name = "totals"
    generational = True

    def on_start(self, ctx: OperatorContext) -> None:
        self.view = ctx.table_manager.get_uncached_key_value_view("t")
        newest = self.view.get_newest()
        self.totals = dict(
            zip(newest.column("word").to_pylist(), newest.column("n").to_pylist(), strict=True)
        )
        # A generation was written for each row there was.
        every = Counter(
            word for part in self.view.get_all(["word"]) for word in part[0].to_pylist()
        )
        assert every == Counter(self.totals)

    def see(self, word: str, row: pa.RecordBatch) -> int:
        count = self.totals.get(word, 0) + 1
        self.totals[word] = count
        columns = [[word], [count], row.column("_timestamp"), [count]]
        self.view.insert(pa.table(columns, schema=self.view.schema))
        return count


def job(store: MemoryStore, parallelism: int) -> Pipeline:
    pipeline = Pipeline("views", parallelism=parallelism, keep_epochs=3, merge_files_after=3)
    source = TableSource(words(ROWS), rows_per_epoch=ROWS_PER_EPOCH, splits=2)
    stream = pipeline.source("lines", source, timestamp="at").key_by("word")
    for operator in (Recent(), Joined(), Totals()):
        seen = stream.apply(operator.name, operator)
        seen.sink(f"out_{operator.name}", SinkInto(store))
    return pipeline


def expected() -> Counter[Any]:
    """What a loop over all rows, with a list for each word, puts out."""
    found: Counter[Any] = Counter()
    times: dict[str, list[int]] = defaultdict(list)
    joined: Counter[str] = Counter()
    for second, word in enumerate(words(ROWS).column("word").to_pylist()):
        times[word].append(second)
        recent = sum(second - RETENTION_SECONDS <= one for one in times[word])
        for name, n in (("recent", recent), ("joined", joined[word]), ("totals", len(times[word]))):
            found[("view", name), ("word", word), ("n", n)] += 1
        joined[word] = 1 if joined[word] == 4 else joined[word] + 1
    return found


@pytest.mark.parametrize("parallelisms", [(2,), (1, 3), (3, 1, 2), (2, 5, 5, 1)])
def test_every_view_goes_on_at_any_parallelism(parallelisms: tuple[int, ...]) -> None:
    store = MemoryStore()
    epochs = ROWS // ROWS_PER_EPOCH // len(parallelisms)
    for parallelism in parallelisms[:-1]:
        run_pipeline(job(store, parallelism), store, max_epochs=epochs)
    last = job(store, parallelisms[-1])
    assert run_pipeline(last, store).exhausted
    assert output_of(store) == expected()
    shown = read_rows(WriteProtected(store), last.paths, "totals", "t").rows
    assert {row["word"]: row["n"] for row in shown} == Counter(words(ROWS)[0].to_pylist())
    for parallelism in (1, 4):
        assert verify_job(WriteProtected(store), last.paths, parallelism=parallelism).passed


Columns = dict[str, pa.DataType]
FIRST: Columns = {"a": pa.int16(), "b": pa.string()}
EVOLVING = TableName("rows")
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
        files = operator.tables.get(EVOLVING)
        if not isinstance(files, ExpiringTimeKeyFiles):
            return Counter()
        table = ExpiringTimeKeyTable(operator.configs[EVOLVING], self.store)
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
    config = operator.configs[EVOLVING].config
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
