"""Code that runs in Spark's Python workers: reads of source splits, and levels of subtasks."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.engine.exchange import (
    ExchangeChunk,
    every_watermark,
    read_split,
    source_chunks,
)
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import SourceSplit
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.engine.chunks import PLACE, ChunkStream, chunk_batches, decode_stream
from arroyo_dagster.spark.engine.holders.conversation import (
    BlockedError,
    Conversation,
    HungError,
    Request,
)
from arroyo_dagster.spark.engine.holders.messages import (
    HolderAddress,
    Meeting,
    Placed,
    RemoteFailure,
    RemoteTraceback,
    Work,
)
from arroyo_dagster.spark.engine.holders.slot import own_slot, start_early
from arroyo_dagster.spark.engine.holders.subtasks import HeldSubtasks, failure
from arroyo_dagster.spark.engine.packed_pipeline import PackedPipeline
from arroyo_dagster.spark.workers import DiskProbe

BatchFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A function for `mapInArrow`."""


@dataclass(frozen=True, slots=True)
class SplitReader:
    """Reads splits of sources in a worker, as the function of `mapInArrow` over task numbers.

    Attributes:
        splits: the splits of each task, by its number.
        early: how many of the tasks start the holders of their workers.
    """

    packed: PackedPipeline
    splits: Sequence[Sequence[SourceSplit]]
    meeting: Meeting
    early: int

    def function(self) -> BatchFunction:
        """Return a function for `mapInArrow`, which accepts plain functions only."""

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            self.packed.unpack()  # before a fork, which then has the modules too
            for batch in batches:
                for task in batch.column(0).to_pylist():
                    if task < self.early:
                        start_early(self.meeting)
                    yield from chunk_batches(self._chunks(self.splits[task]))

        return run

    def _chunks(self, splits: Sequence[SourceSplit]) -> Iterator[ExchangeChunk]:
        pipeline = self.packed.unpack()
        for split in splits:
            node = pipeline.sources[split.source]
            try:
                rows = read_split(node, split.split)
                yield from source_chunks(pipeline, node, rows, split.index)
            except ArroyoStateError as error:
                yield failure(error, split.index)
        if not splits:
            yield from every_watermark(pipeline)


@dataclass(frozen=True, slots=True)
class LevelRunner:
    """Runs one level of one epoch in a worker, as the function of `mapInArrow`.

    Attributes:
        work: the pickled `LevelWork`.
        placed: by subtask, the process that holds it.
        probe: what a worker must see before it writes, if the state is on disk.
    """

    level: int
    work: bytes
    placed: Mapping[int, HolderAddress]
    meeting: Meeting
    probe: DiskProbe | None

    def run_read(
        self, read: ReadRows, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Run as `run`, with what the driver has read and the numbers of subtasks as rows.

        Chunks of later levels are passed on by subtask 0.
        """
        for batch in batches:
            for subtask in batch.column(0).to_pylist():
                if subtask == 0 and read.later is not None:
                    yield from pa.ipc.open_stream(read.later)
                yield from self._level(subtask, pa.py_buffer(read.first[subtask]))

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass on the rows of later levels, run this level, and yield its report."""
        stream, subtask = ChunkStream(), None
        for batch in batches:
            mask = pc.equal(batch.column(0), self.level)
            later = batch.filter(pc.invert(mask))
            if later.num_rows:
                batch = batch.filter(mask)
                yield later
            if batch.num_rows:
                stream.write(batch)
                subtask = batch.column(1)[0].as_py()
        if subtask is not None:
            yield from self._level(subtask, stream.close())

    def _level(self, subtask: int, rows: pa.Buffer) -> Iterator[pa.RecordBatch]:
        try:
            if self.probe is not None:
                self.probe.check()
        except ArroyoStateError as error:
            return chunk_batches([failure(error, subtask)])
        placed = self.placed.get(subtask)
        return iter(run_level(self.level, self.work, subtask, rows, placed, self.meeting))


def level_function(runners: Sequence[LevelRunner], read: ReadRows | None = None) -> BatchFunction:
    """Return a function for `mapInArrow`, which accepts plain functions only.

    Args:
        runners: the levels to run, one after the other in each task.
        read: what the driver has read for the first of them; its rows are then the numbers of
            subtasks. None = its rows are chunks.
    """
    first, *later = runners

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        output = first.run(batches) if read is None else first.run_read(read, batches)
        for runner in later:
            output = runner.run(output)
        return output

    return run


def chunk_function(
    function: BatchFunction, batches_of: Callable[[Iterable[Any]], Iterator[pa.RecordBatch]]
) -> Callable[[Iterable[Any]], Iterator[ExchangeChunk]]:
    """Return a function for `mapPartitions` of an RDD, which yields chunks.

    Args:
        batches_of: makes what `function` takes of the rows of the RDD.
    """

    def run(rows: Iterable[Any]) -> Iterator[ExchangeChunk]:
        for batch in function(batches_of(rows)):
            columns = (column.to_pylist() for column in batch.columns)  # bytes, for a pickle
            yield from map(ExchangeChunk, *columns)

    return run


def number_batches(numbers: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """Yield numbers as `SparkSession.range` gives them."""
    for number in numbers:
        yield pa.record_batch([[number]], ["id"])


def receiver(chunk: ExchangeChunk) -> int:
    """Return the subtask that a chunk is for."""
    return chunk.subtask


# ---- what a task does to have an epoch of its subtask written where the subtask is held ----------

_HERE = HeldSubtasks()
"""Of a worker that cannot start a process."""


def run_level(
    level: int,
    work: bytes,
    subtask: int,
    rows: pa.Buffer,
    placed: HolderAddress | None,
    meeting: Meeting,
) -> list[pa.RecordBatch]:
    """Write one epoch of a subtask where it is held; return its output, its report, and its place.

    If the holder is gone, the holder of this worker takes the subtask over. What a holder sent
    before it ended half way is not used.

    Args:
        work: a pickled `LevelWork`.
        rows: the chunks of this level and subtask, as a `ChunkStream`.
        placed: the holder of the subtask; None = none yet.

    Raises:
        StorageError: the holder of this worker ended while it worked.
        Exception: user code or the store failed; the text is that of the original error.
    """
    request = Request(pickle.dumps(Work(work, subtask, meeting.idle_seconds)), rows)
    slot, lost, blocked = own_slot(meeting), None, False
    holder: HolderAddress | None = None
    output: list[pa.RecordBatch] | RemoteFailure | None = None
    if slot is not None and placed is not None:
        try:
            with contextlib.closing(Conversation.begin(placed, meeting)) as conversation:
                holder, output = conversation.address, conversation.run(request)
            if holder != placed:
                lost = placed  # another process has its place
        except OSError as error:
            lost, blocked = placed, isinstance(error, BlockedError)
            if slot.name == placed.name:
                slot.forget(hung=isinstance(error, HungError))
    if slot is not None and output is None:
        opened = slot.begin()
        if opened is not None:
            with contextlib.closing(opened):
                holder, output = opened.address, slot.run(opened, request)
    if output is None:
        holder, chunks = None, decode_stream(rows)
        output = list(
            chunk_batches(_HERE.run(pickle.loads(work), subtask, chunks, meeting.idle_seconds))
        )
    if isinstance(output, RemoteFailure):
        raise output.as_error() from RemoteTraceback(output.text)
    if slot is not None and meeting.start:
        slot.address()
    own = None if slot is None else slot.known_address()
    place = Placed(level, subtask, holder, own, lost, blocked)
    chunk = ExchangeChunk(0, subtask, PLACE, level, pickle.dumps(place))
    return [*output, *chunk_batches([chunk])]


# ---- small epochs --------------------------------------------------------------------------------
# Read the splits of a small epoch in the driver: its job then has one stage less, and no exchange
# before the first operators.
#
# See docs/decisions/spark-runtime.md, "Small epochs".

MOST_BYTES = 256 << 10
"""More rows do not travel with each task: Spark shuffles them."""

MOST_SPLITS = 8
MOST_SECONDS = 0.25
"""What takes longer to read is read by several workers at a time."""

LEFT_TO_WORKERS = 16
"""So many epochs are read by workers after one that the driver could not read, or not quickly."""


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The rows of an epoch, read by the driver.

    Attributes:
        first: by subtask, the chunks of the first level as a `ChunkStream`.
        later: the chunks of later levels likewise; None if there are none.
    """

    first: Mapping[int, bytes]
    later: bytes | None


@dataclass(slots=True)
class SmallEpochs:
    """Decides by what earlier epochs were whether the driver reads the next one."""

    pipeline: Pipeline
    _left_to_workers: int = field(default=0)

    def read(self, splits: Sequence[SourceSplit]) -> ReadRows | None:
        """Read the splits of an epoch; None if workers must read them.

        They must if the epoch is not small, and if a source fails here: workers may reach what the
        driver does not, and Spark tries them again.
        """
        if self._left_to_workers > 0:
            self._left_to_workers -= 1
            return None
        if len(splits) > MOST_SPLITS:
            return None
        try:
            parts = self._few_rows(splits)
        except Exception:  # of a source, which may be a user's
            parts = None
        if parts is None:
            self._left_to_workers = LEFT_TO_WORKERS
            return None
        return self._rows(splits, parts)

    def _few_rows(self, splits: Sequence[SourceSplit]) -> list[list[pa.RecordBatch]] | None:
        """Return the rows of each split; None if they are many, or reading takes long."""
        size, until = 0, time.monotonic() + MOST_SECONDS
        parts: list[list[pa.RecordBatch]] = []
        for split in splits:
            parts.append([])
            for batch in read_split(self.pipeline.sources[split.source], split.split):
                size += batch.nbytes
                if size > MOST_BYTES or time.monotonic() > until:
                    return None
                parts[-1].append(batch)
        return parts

    def _rows(
        self, splits: Sequence[SourceSplit], parts: Sequence[Sequence[pa.RecordBatch]]
    ) -> ReadRows:
        chunks = [
            chunk
            for split, part in zip(splits, parts, strict=True)
            for chunk in source_chunks(
                self.pipeline, self.pipeline.sources[split.source], part, split.index
            )
        ]
        if not splits:
            chunks = list(every_watermark(self.pipeline))
        first: dict[int, list[ExchangeChunk]] = {}
        for chunk in chunks:
            if chunk.level == 1:
                first.setdefault(chunk.subtask, []).append(chunk)
        later = [chunk for chunk in chunks if chunk.level > 1]
        return ReadRows(
            first={subtask: _stream(group) for subtask, group in first.items()},
            later=_stream(later) if later else None,
        )


def _stream(chunks: Sequence[ExchangeChunk]) -> bytes:
    stream = ChunkStream()
    for batch in chunk_batches(chunks):
        stream.write(batch)
    return bytes(stream.close())
