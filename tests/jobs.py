"""A small job that uses everything: two levels, three kinds of table change, a sink in two phases.

Its rows are fixed, so what any run must end with is known; `state_of` and `output_of` read what a
restart would find, and nothing a run keeps in memory.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import pyarrow as pa

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    ParquetSink,
    Pipeline,
    TableSource,
    run_pipeline,
)
from arroyo_dagster.state import (
    ExpiringTimeKeyTable,
    ExpiringTimeKeyView,
    GlobalKeyedTable,
    JobPaths,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    ParquetBackend,
    StatePath,
    TableConfig,
    global_table_config,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.model.checkpoints import CONTENT
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros
from tests.formats import ExpiringTimeKeyFiles, GlobalKeyedFiles, decode_file
from tests.internals import LocalRun
from tests.words import decode_pair

StoreT = TypeVar("StoreT", bound=ObjectStore)

START = dt.datetime(2024, 1, 1)
TIMED = pa.schema(
    [("word", pa.string()), pa.field("_timestamp", pa.timestamp("ns"), nullable=False)]
)


class CountWords(Operator):
    """Counts per word; a word seen four times is forgotten and begins anew."""

    output_schema = pa.schema([("word", pa.string()), ("n", pa.int64())])

    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config("counts", key=str, value=int)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.counts = ctx.table_manager.get_global_keyed_state("counts", str, int)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        words = batch.column("word").to_pylist()
        seen = []
        for word in words:
            seen.append((self.counts.get(word) or 0) + 1)
            if seen[-1] == 4:
                self.counts.remove(word)
            else:
                self.counts.insert(word, seen[-1])
        collector.collect(pa.record_batch([words, seen], schema=self.output_schema))


class KeepWords(Operator):
    """Keeps rows for a while; a word that begins with `d` deletes its earlier rows."""

    def __init__(self, retention_micros: int = 6_000_000) -> None:
        self._retention_micros = retention_micros

    def tables(self) -> Sequence[TableConfig]:
        return [
            timestamp_table_config(
                "rows", retention_micros=self._retention_micros, schema=TIMED, keys=["word"]
            )
        ]

    def on_start(self, ctx: OperatorContext) -> None:
        self.rows = ctx.table_manager.get_expiring_time_key_table("rows")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        for word in dict.fromkeys(batch.column("word").to_pylist()):
            if word.startswith("d"):
                self.rows.delete_key(word)
        self.rows.insert(batch.select(["word", "_timestamp"]))


class SumByCount(Operator):
    """Second level: how often each count was reached."""

    output_schema = pa.schema([("n", pa.int64()), ("times", pa.int64())])

    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config("times", key=int, value=int)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.times = ctx.table_manager.get_global_keyed_state("times", int, int)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        out = []
        for n in batch.column("n").to_pylist():
            self.times.insert(n, (self.times.get(n) or 0) + 1)
            out.append((n, self.times.get(n)))
        columns = [list(column) for column in zip(*out, strict=True)]
        collector.collect(pa.record_batch(columns, schema=self.output_schema))


_SINK_STORES: WeakValueDictionary[int, ObjectStore] = WeakValueDictionary()
_SINKS = itertools.count()


class SinkInto(ParquetSink):
    """A Parquet sink that writes through this very store object, in every copy of it."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.url)
        self._number = next(_SINKS)
        _SINK_STORES[self._number] = store

    @property
    def _store(self) -> ObjectStore:
        return _SINK_STORES[self._number]


def words(count: int, letters: str = "abcdefg") -> pa.Table:
    """Rows a second apart, of so many words as there are letters."""
    many = len(letters)
    return pa.table(
        {
            "word": pa.array([letters[(i * 3 + i // 5) % many] for i in range(count)]),
            "at": pa.array(
                [START + dt.timedelta(seconds=i) for i in range(count)], pa.timestamp("us")
            ),
        }
    )


def word_job(
    store: ObjectStore,
    *,
    rows: int = 24,
    rows_per_epoch: int = 4,
    parallelism: int = 2,
    keep_epochs: int | None = 2,
    merge_files_after: int = 3,
    sinks: int = 1,
    retention_micros: int = 6_000_000,
    letters: str = "abcdefg",
    job: str = "main",
) -> Pipeline:
    """The job. Its sink writes to the root of `store`, so that one fault plan covers both."""
    pipeline = Pipeline(
        "words",
        job=job,
        parallelism=parallelism,
        keep_epochs=keep_epochs,
        merge_files_after=merge_files_after,
    )
    source = TableSource(words(rows, letters), rows_per_epoch=rows_per_epoch, splits=2)
    stream = pipeline.source("lines", source, timestamp="at")
    counted = stream.key_by("word").apply("count", CountWords())
    stream.key_by("word").apply("keep", KeepWords(retention_micros))
    summed = counted.key_by("n").apply("sum", SumByCount())
    if sinks > 0:
        summed.sink("out", SinkInto(store))
    if sinks > 1:
        counted.sink("chained", SinkInto(store))
    return pipeline


def run_word_job(store: ObjectStore, **options: Any) -> None:
    """Run it to its end."""
    max_epochs = options.pop("max_epochs", None)
    run_pipeline(word_job(store, **options), store, max_epochs=max_epochs)


def written_by_word_job(*, killed: bool = False, **options: Any) -> MemoryStore:
    """A store of its own that the job was run on; a job of the same options was run once.

    Args:
        killed: the run was killed right behind its last epoch; it did not stop with one.
        options: of `word_job`, `max_epochs`, and `layout`.
    """
    return copied(_written_by_word_job(killed, tuple(sorted(options.items()))))


@functools.cache
def _written_by_word_job(killed: bool, given: tuple[tuple[str, Any], ...]) -> MemoryStore:
    store, options = MemoryStore(), dict(given)
    max_epochs, layout = options.pop("max_epochs", None), options.pop("layout", None)
    job = word_job(store, **options)
    job.layout = layout or job.layout
    if not killed:
        run_pipeline(job, store, max_epochs=max_epochs)
        return store
    run = LocalRun.start(job, store)
    for _ in range(max_epochs):
        run.step()
    return store


# ---- what a restart would find -------------------------------------------------------------------


def state_of(store: ObjectStore, pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """The content of every table of the newest epoch, proven restorable.

    Offsets are positions only: how many rows a source has at all is no state.
    """
    backend = ParquetBackend(store, pipeline.paths)
    checkpoint = backend.prepare_checkpoint_load(backend.epochs()[-1])
    assert checkpoint.state.canonical
    found: dict[str, dict[str, Any]] = {"": {"epoch": checkpoint.epoch}}
    for operator in checkpoint.operators:
        tables = {name: table_content(store, operator, name) for name in operator.tables}
        found[operator.operator] = {name: rows for name, rows in tables.items() if rows}
        tables.get("offsets", {}).pop(CONTENT, None)
    return found


def table_content(store: ObjectStore, operator: OperatorCheckpoint, name: Any) -> Any:
    """A dict of a global table, a multiset of the rows of an expiring one."""
    files = operator.tables[name]
    config = operator.configs[name]
    if isinstance(files, GlobalKeyedFiles):
        stored = GlobalKeyedTable(config, store).load(files.files)
        pairs = [decode_pair(config, key, value) for key, value in stored.items()]
        return dict(pair for pair in pairs if pair is not None)
    assert isinstance(files, ExpiringTimeKeyFiles)
    return expiring_rows(store, operator, name)


def expiring_rows(store: ObjectStore, operator: OperatorCheckpoint, name: Any) -> Counter[Any]:
    """The rows every subtask would restore, together."""
    config, files = operator.configs[name], operator.tables[name]
    assert isinstance(files, ExpiringTimeKeyFiles)
    table = ExpiringTimeKeyTable(config, store)
    found: Counter[Any] = Counter()
    for index in range(operator.parallelism):
        view = ExpiringTimeKeyView(table, lambda _: None)
        view.replay(table.read(files.files, range_for_server(index, operator.parallelism)))
        view.evict(cutoff_micros(operator.min_watermark_micros, table.config.retention_micros))
        found.update(as_multiset(view.rows()))
    return found


def own(store: ObjectStore, paths: JobPaths) -> dict[str, bytes]:
    """The objects of a job that Arroyo would write, too."""
    return {
        str(info.path): store.read(info.path)
        for info in store.list(paths.root)
        if "_arroyo_dagster" not in info.path
    }


def as_multiset(rows: pa.Table) -> Counter[Any]:
    """Rows as tuples, times in nanoseconds."""
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in rows.columns
    ]
    return Counter(zip(*(column.to_pylist() for column in columns), strict=True))


def output_of(store: ObjectStore) -> Counter[Any]:
    """Every row that readers of the sinks' folder see, with the columns it came under."""
    found: Counter[Any] = Counter()
    for info in store.list_dir().objects:
        rows, _ = decode_file(store.read(info.path), info.path)
        for row in rows.to_pylist():
            found[tuple(row.items())] += 1
    return found


def copied(
    store: MemoryStore, *, clock: Callable[[], int] | None = None, keep_times: bool = False
) -> MemoryStore:
    """A new store with the same objects.

    Args:
        clock: of the new store; the usual one unless given.
        keep_times: whether objects were written when those they are copies of were.
    """
    times: list[int] = []
    usual = clock or (lambda: time.time_ns() // 1000)
    twin = MemoryStore(clock=lambda: times.pop() if times else usual())
    for info in store.list():
        if keep_times and info.modified_micros is not None:
            times.append(info.modified_micros)
        twin.put(info.path, store.read(info.path))
    return twin


def copy_into(target: StoreT, source: ObjectStore) -> StoreT:
    """Put every object of a store into another one, and return that."""
    for info in source.list():
        target.put(info.path, source.read(info.path))
    return target


def listing(store: ObjectStore) -> dict[StatePath, str | None]:
    """Every object and its etag: equal listings = nothing was written."""
    return {info.path: info.etag for info in store.list()}
