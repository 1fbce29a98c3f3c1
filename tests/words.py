"""Pipelines that the Spark tests share: small, and sensitive to order, loss and doubling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    ParquetSink,
    Pipeline,
    TableSource,
)
from arroyo_dagster.state import (
    Checkpoint,
    ExpiringTimeKeyTable,
    GlobalKeyedTable,
    ObjectStore,
    ParquetBackend,
    TableConfig,
    codec_for,
    global_table_config,
    range_for_server,
    timestamp_table_config,
)
from tests.formats import ExpiringTimeKeyFiles, GlobalKeyedFiles

TIMESTAMP = pa.field("_timestamp", pa.timestamp("ns"), nullable=False)
COUNTED = pa.schema([("word", pa.string()), ("n", pa.int64()), TIMESTAMP])
SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Seen:
    """How often, and what came last: depends on every row and on their order."""

    count: int
    last: int
    trail: int


class Count(Operator):
    """Counts each word, forgets every word whose number is a multiple of seven, puts counts out."""

    output_schema = COUNTED

    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config("counts", key=str, value=Seen)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.counts = ctx.table_manager.get_global_keyed_state("counts", str, Seen)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        counts = []
        for word, number in zip(
            batch["word"].to_pylist(), batch["number"].to_pylist(), strict=True
        ):
            before = self.counts.get(word) or Seen(0, 0, 0)
            trail = (before.trail * 31 + number) % 1_000_003
            seen = Seen(before.count + 1, number, trail)
            if number % 7 == 0:
                self.counts.remove(word)
            else:
                self.counts.insert(word, seen)
            counts.append(seen.count)
        collector.collect(
            pa.RecordBatch.from_arrays(
                [batch["word"], pa.array(counts, pa.int64()), batch["_timestamp"]], schema=COUNTED
            )
        )


class Keep(Operator):
    """Keeps the rows of the last seconds, and deletes those of a word that comes as a multiple."""

    def tables(self) -> Sequence[TableConfig]:
        return [
            timestamp_table_config(
                "recent", retention_micros=20 * SECOND, schema=COUNTED, keys=["word"]
            )
        ]

    def on_start(self, ctx: OperatorContext) -> None:
        self.recent = ctx.table_manager.get_expiring_time_key_table("recent")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        self.recent.insert(batch.select(COUNTED.names))
        for word, n in zip(batch["word"].to_pylist(), batch["n"].to_pylist(), strict=True):
            if n % 11 == 0:
                self.recent.delete_key(word)


def random_words(rows: int, seed: int) -> pa.Table:
    """A stream of words, numbered, a second apart."""
    chance = random.Random(seed)
    words = [f"word-{chance.randrange(12)}" for _ in range(rows)]
    times = pa.array([(1_700_000_000 + at) * SECOND for at in range(rows)], pa.timestamp("us"))
    numbers = pa.array([chance.randrange(1_000) for _ in range(rows)], pa.int64())
    return pa.table({"word": words, "number": numbers, "at": times})


def words_pipeline(
    rows: pa.Table, output: str, *, rows_per_epoch: int, parallelism: int = 2, **options: Any
) -> Pipeline:
    """Two levels: words counted by word, the counts kept by word again, and put out."""
    pipeline = Pipeline("words", parallelism=parallelism, **options)
    source = TableSource(rows, rows_per_epoch=rows_per_epoch, splits=2)
    counted = pipeline.source("source", source, timestamp="at").key_by("word")
    counts = counted.apply("count", Count())
    counts.key_by("word").apply("keep", Keep())
    counts.sink("output", ParquetSink(output))
    return pipeline


def newest(store: ObjectStore, pipeline: Pipeline) -> Checkpoint:
    """The newest checkpoint, proved to be restorable."""
    backend = ParquetBackend(store, pipeline.paths)
    return backend.prepare_checkpoint_load(backend.epochs()[-1])


def decode_pair(config: TableConfig, key: bytes, value: bytes) -> tuple[object, object] | None:
    """Decode one pair by the stored types; None if the job stored none."""
    if config.key_type is None or config.value_type is None:
        return None
    return codec_for(config.key_type).decode(key), codec_for(config.value_type).decode(value)


def tables_of(store: ObjectStore, checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """Every table's rows as a restore would load them, in an order of their own."""
    found: dict[str, list[Any]] = {}
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            config = operator.configs[name]
            rows: list[Any]
            if isinstance(files, GlobalKeyedFiles):
                table = GlobalKeyedTable(config, store)
                pairs = table.load(files.files).items()
                rows = [decode_pair(config, key, value) for key, value in pairs]
            else:
                assert isinstance(files, ExpiringTimeKeyFiles)
                rows = _live(ExpiringTimeKeyTable(config, store), files, operator)
            found[f"{operator.operator}.{name}"] = sorted(rows, key=repr)
    return found


def _live(table: ExpiringTimeKeyTable, files: ExpiringTimeKeyFiles, operator: Any) -> list[Any]:
    from arroyo_dagster.state import ExpiringTimeKeyView

    rows: list[Any] = []
    cutoff = (operator.min_watermark_micros or 0) - table.config.retention_micros
    for index in range(operator.parallelism):
        view = ExpiringTimeKeyView(table, lambda message: None)
        view.replay(table.read(files.files, range_for_server(index, operator.parallelism)))
        view.evict(cutoff)
        rows.extend(tuple(row.values()) for row in view.rows().to_pylist())
    return rows


def output_of(folder: Any) -> list[tuple[Any, ...]]:
    """Every row a sink has put out for readers, in an order of its own."""
    rows: list[tuple[Any, ...]] = []
    for file in sorted(folder.glob("*.parquet")):
        rows.extend(tuple(row.values()) for row in pq.read_table(file).to_pylist())
    return sorted(rows)
