"""Code that runs in Spark's Python workers: reads of source splits, and levels of subtasks.

A worker process keeps its subtasks between epochs. If Spark assigns the next epoch to another
process, that process restores the subtask, or catches up from the files that were added since.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.spark.workers import DiskProbe
from arroyo_dagster.state.model.checkpoints import SubtaskCheckpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.runtime.exchange import (
    WATERMARK,
    ExchangeChunk,
    arrived,
    read_split,
    source_chunks,
)
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.pipeline_run import SourceSplit
from arroyo_dagster.state.runtime.task import EpochPlan, LevelTask
from arroyo_dagster.state.storage.store import ObjectStore

CHUNK_DDL = "level int, subtask int, edge int, ord bigint, payload binary"
CHUNK_SCHEMA = pa.schema(
    [
        ("level", pa.int32()),
        ("subtask", pa.int32()),
        ("edge", pa.int32()),
        ("ord", pa.int64()),
        ("payload", pa.binary()),
    ]
)
REPORT = -2
"""Instead of an edge: the payload is a pickled `TaskReport`."""

FAILURE = -3
"""Instead of an edge: the payload is a pickled `ArroyoStateError` that is not retryable."""

_ROWS_PER_BATCH = 64


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The report of one task: the level, its subtasks' checkpoints, and the sources' watermarks."""

    level: int
    subtask: int
    reports: dict[OperatorId, SubtaskCheckpoint]
    watermarks_micros: dict[OperatorId, int | None]


_PACKING = threading.Lock()
"""Guards cloudpickle's registry, which is global to the process, against concurrent runs."""


@dataclass(frozen=True, slots=True)
class PackedPipeline:
    """A pipeline with its user code, pickled once per run and unpickled once per process."""

    data: bytes
    digest: str

    @classmethod
    def pack(cls, pipeline: Pipeline) -> PackedPipeline:
        """Pickle a pipeline, including the code of modules that are not installed.

        Raises:
            InputError: a part of it cannot be pickled.
        """
        from pyspark import cloudpickle

        with _PACKING:
            return cls._packed(cloudpickle, pipeline)

    @classmethod
    def _packed(cls, cloudpickle: Any, pipeline: Pipeline) -> PackedPipeline:
        local = _modules_not_installed()
        for module in local:
            cloudpickle.register_pickle_by_value(module)
        try:
            data: bytes = cloudpickle.dumps(pipeline)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InputError(
                f"the pipeline cannot be sent to Spark's workers ({error})",
                pipeline=pipeline.name,
                next_step="open files, connections and locks in on_start, not earlier",
            ) from error
        finally:
            for module in local:
                cloudpickle.unregister_pickle_by_value(module)
        return cls(data, hashlib.sha256(data).hexdigest())

    def unpack(self) -> Pipeline:
        """Return the pipeline; in one process, repeated calls return the same object."""
        found = _PIPELINES.pop(self.digest, None) or pickle.loads(self.data)
        _PIPELINES[self.digest] = found  # keeps the order of use, oldest first
        while len(_PIPELINES) > _REMEMBERED_PIPELINES:
            del _PIPELINES[next(iter(_PIPELINES))]
        return found


def _modules_not_installed() -> list[ModuleType]:
    """Return the loaded modules that workers may be unable to import: the user's own files."""
    installed = tuple(sysconfig.get_paths().values())
    return [
        module
        for name, module in sorted(sys.modules.items())
        # spark-submit puts its own pyspark and py4j on the path, as zip files.
        if not name.startswith(("__main__", "arroyo_dagster", "pyspark.", "py4j."))
        and name not in ("pyspark", "py4j")
        and isinstance(module, ModuleType)
        and module.__name__ == name
        and (file := getattr(module, "__file__", None))
        and not file.startswith(installed)
    ]


class RunId(NamedTuple):
    """One run of one job. `application`: the id that concurrent runs share."""

    application: str
    job: str


_REMEMBERED_PIPELINES = 64
_PIPELINES: dict[str, Pipeline] = {}
_TASKS: dict[tuple[RunId, int, int], LevelTask] = {}


def chunk_batches(chunks: Iterable[ExchangeChunk]) -> Iterator[pa.RecordBatch]:
    """Yield chunks as Arrow batches of at most `_ROWS_PER_BATCH` rows."""
    waiting: list[ExchangeChunk] = []
    for chunk in chunks:
        waiting.append(chunk)
        if len(waiting) == _ROWS_PER_BATCH:
            yield _batch(waiting)
            waiting = []
    if waiting:
        yield _batch(waiting)


def _batch(chunks: list[ExchangeChunk]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([chunk.level for chunk in chunks], pa.int32()),
            pa.array([chunk.subtask for chunk in chunks], pa.int32()),
            pa.array([chunk.edge for chunk in chunks], pa.int32()),
            pa.array([chunk.order for chunk in chunks], pa.int64()),
            pa.array([chunk.payload for chunk in chunks], pa.binary()),
        ],
        schema=CHUNK_SCHEMA,
    )


@dataclass(frozen=True, slots=True)
class SplitReader:
    """Reads splits of sources in a worker, as the function of `mapInArrow` over task numbers.

    Attributes:
        splits: the splits of each task, by its number.
    """

    packed: PackedPipeline
    splits: Sequence[Sequence[SourceSplit]]

    def function(self) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Return a function for `mapInArrow`, which accepts plain functions only."""

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for task in batch.column(0).to_pylist():
                    yield from chunk_batches(self._chunks(self.splits[task]))

        return run

    def _chunks(self, splits: Sequence[SourceSplit]) -> Iterator[ExchangeChunk]:
        pipeline = self.packed.unpack()
        for one in splits:
            node = pipeline.sources[one.source]
            try:
                rows = read_split(node, one.split)
                yield from source_chunks(pipeline, node, rows, one.index)
            except ArroyoStateError as error:
                yield _failure(error, one.index)
        if not splits:
            # An epoch without splits: every subtask writes its checkpoint all the same.
            for level in range(1, pipeline.levels + 1):
                for subtask in range(pipeline.parallelism):
                    yield ExchangeChunk(level, subtask, WATERMARK, 0, b"")


@dataclass(frozen=True, slots=True)
class LevelRunner:
    """Runs one level of one epoch in a worker, as the function of `mapInArrow`.

    Attributes:
        run_id: the run; a worker uses only its subtasks, and drops those of other applications.
        probe: what a worker must see before it writes, if the state is on disk.
    """

    packed: PackedPipeline
    store: ObjectStore
    run_id: RunId
    level: int
    plan: EpochPlan
    probe: DiskProbe | None = None

    def function(self) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Return a function for `mapInArrow`, which accepts plain functions only."""

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return self.run(batches)

        return run

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass on the chunks of later levels, run this level, and yield its report."""
        mine: list[ExchangeChunk] = []
        for batch in batches:
            later: list[ExchangeChunk] = []
            for chunk in _chunks(batch):
                (mine if chunk.level == self.level else later).append(chunk)
            yield from chunk_batches(later)
        if mine:
            yield from chunk_batches(self._level(mine))

    def _level(self, chunks: list[ExchangeChunk]) -> Iterator[ExchangeChunk]:
        index = chunks[0].subtask
        pipeline = self.packed.unpack()
        for known in [key for key in _TASKS if key[0].application != self.run_id.application]:
            del _TASKS[known]
        key = (self.run_id, self.level, index)
        task = _TASKS.pop(key, None) or LevelTask(pipeline, self.level, index, self.store)
        try:
            if self.probe is not None:
                self.probe.check()
            yield from task.run(self.plan, arrived(chunks))
        except ArroyoStateError as error:
            yield _failure(error, index)
            return
        _TASKS[key] = task
        report = TaskReport(self.level, index, task.reports, task.watermarks_micros)
        yield ExchangeChunk(0, index, REPORT, self.level, pickle.dumps(report))


def _failure(error: ArroyoStateError, subtask: int) -> ExchangeChunk:
    if error.retryable:
        raise error  # Spark tries the task again, in this process or another
    return ExchangeChunk(0, subtask, FAILURE, 0, pickle.dumps(error))


def _chunks(batch: pa.RecordBatch) -> Iterator[ExchangeChunk]:
    columns = [batch.column(index).to_pylist() for index in range(batch.num_columns)]
    for level, subtask, edge, order, payload in zip(*columns, strict=True):
        yield ExchangeChunk(level, subtask, edge, order, payload)
