"""The three views of an expiring table as an operator's author gets them, in a job that restarts
with another parallelism: what it puts out is what a plain model says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    Pipeline,
    TableSource,
    run_pipeline,
)
from arroyo_dagster.state import (
    MemoryStore,
    TableConfig,
    WriteProtected,
    read_rows,
    timestamp_table_config,
    verify_job,
)
from tests.jobs import TIMED, SinkInto, output_of, words

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
