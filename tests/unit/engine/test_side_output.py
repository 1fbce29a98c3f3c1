"""Side outputs reach their readers with the epoch; a check refuses an epoch before it exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    ParquetSink,
    Pipeline,
    TableSource,
    run_pipeline,
)
from arroyo_dagster.errors import InputError
from arroyo_dagster.state import MemoryStore, OperatorId, StateBackend, open_store
from tests.jobs import output_of


class OddAside(Operator):
    """Emits even numbers, and odd ones as its side output; reports how many it had."""

    output_schema = pa.schema([pa.field("even", pa.int64())])
    side_schema = pa.schema([pa.field("odd", pa.int64())])

    def on_start(self, ctx: OperatorContext) -> None:
        self.rows = 0

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        numbers = batch.column(0)
        odd = pc.equal(pc.bit_wise_and(numbers, 1), 1)
        self.rows += len(numbers)
        collector.collect(pa.record_batch({"even": numbers.filter(pc.invert(odd))}))
        ctx.side_output.collect(pa.record_batch({"odd": numbers.filter(odd)}))

    def epoch_report(self) -> int:
        rows, self.rows = self.rows, 0
        return rows


def pipeline(store: MemoryStore, parallelism: int, **options: Any) -> Pipeline:
    numbers = pa.table({"n": range(10), "at": pa.array(range(10), pa.timestamp("ms"))})
    made = Pipeline("sides", parallelism=parallelism, **options)
    source = TableSource(numbers, rows_per_epoch=4, splits=2)
    split = made.source("numbers", source, timestamp="at").key_by("n").apply("split", OddAside())
    split.sink("even", ParquetSink(f"{store.url}-even"))
    again = split.key_by("even").apply("again", Passing())
    both = [split.side_output().key_by(), again.side_output().key_by()]
    made.apply("odd", ParquetSink(f"{store.url}-odd"), both)
    return made


def written(store: MemoryStore, column: str) -> list[int]:
    """The numbers in a sink's folder."""
    found = output_of(open_store(f"{store.url}-{column}"))
    return sorted(dict(row)[column] for row in found.elements())


class Passing(OddAside):
    """Another level, whose side output joins the first one."""

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        ctx.side_output.collect(pa.record_batch({"odd": pc.negate(batch.column(0))}))


@pytest.mark.parametrize("parallelism", [1, 3])
def test_side_outputs_of_several_levels_reach_one_sink(parallelism: int) -> None:
    store = MemoryStore()
    assert run_pipeline(pipeline(store, parallelism), store).exhausted
    assert written(store, "even") == [0, 2, 4, 6, 8]
    assert written(store, "odd") == [
        -8, -6, -4, -2, 0, 1, 3, 5, 7, 9,
    ]  # fmt: skip


def test_an_operator_without_side_schema_has_no_side_output() -> None:
    made, sink = pipeline(MemoryStore(), 1), ParquetSink("memory://x")
    empty = TableSource(pa.table({"at": pa.array([], pa.timestamp("ms"))}), rows_per_epoch=1)
    with pytest.raises(InputError, match="takes rows from one that emits none"):
        made.source("more", empty, timestamp="at").side_output().sink("x", sink)


def test_a_refused_epoch_does_not_exist_and_is_written_by_the_next_run() -> None:
    store, seen = MemoryStore(), []

    def refuse_second() -> Any:
        def check(last: bool, reports: Mapping[OperatorId, Sequence[Any]]) -> None:
            seen.append((last, sum(reports[OperatorId("split")])))
            if len(seen) == 2:
                raise InputError("no more")

        return check

    made = pipeline(store, 2, epoch_check=refuse_second)
    with pytest.raises(InputError, match="no more"):
        run_pipeline(made, store)
    assert StateBackend(store, made.paths).epochs() == [1]
    assert len(written(store, "even")) == 2
    run_pipeline(made, store)
    assert seen == [(False, 4), (False, 4), (False, 4), (True, 2)]
    assert written(store, "even") == [0, 2, 4, 6, 8]
