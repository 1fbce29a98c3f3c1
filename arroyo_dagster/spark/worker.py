"""Code that runs in Spark's Python workers: reads of source splits, and levels of subtasks."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.chunks import PLACE, ChunkStream, chunk_batches, decode_stream
from arroyo_dagster.spark.holders.channel import HolderAddress
from arroyo_dagster.spark.holders.conversation import (
    BlockedError,
    Conversation,
    HungError,
    Request,
)
from arroyo_dagster.spark.holders.messages import (
    Meeting,
    Placed,
    RemoteFailure,
    RemoteTraceback,
    Work,
)
from arroyo_dagster.spark.holders.slot import own_slot, start_early
from arroyo_dagster.spark.holders.subtasks import HeldSubtasks, failure
from arroyo_dagster.spark.packing import PackedPipeline
from arroyo_dagster.spark.small_epochs import ReadRows
from arroyo_dagster.spark.workers import DiskProbe
from arroyo_dagster.state.runtime.exchange import (
    ExchangeChunk,
    every_watermark,
    read_split,
    source_chunks,
)
from arroyo_dagster.state.runtime.pipeline_run import SourceSplit

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
