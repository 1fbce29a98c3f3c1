"""A runtime without Spark whose subtasks are held by processes, as those of Spark's workers are."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from arroyo_dagster.engine import Pipeline
from arroyo_dagster.engine.exchange import ExchangeChunk, read_split, source_chunks
from arroyo_dagster.engine.pipeline_run import EpochReports, PipelineRun, SourceSplit
from arroyo_dagster.engine.task import EpochPlan, merged_watermarks
from arroyo_dagster.spark.engine.chunks import FAILURE, PLACE, ChunkStream, chunk_batches, chunks_of
from arroyo_dagster.spark.engine.holders import slot as slots
from arroyo_dagster.spark.engine.holders.messages import Meeting, Placed, Secret
from arroyo_dagster.spark.engine.holders.slot import ProcessId, WorkerSlot
from arroyo_dagster.spark.engine.holders.subtasks import LevelWork, RunId, TaskReport
from arroyo_dagster.spark.engine.packed_pipeline import PackedPipeline
from arroyo_dagster.spark.engine.pipeline import Placement
from arroyo_dagster.spark.engine.worker import run_level
from arroyo_dagster.state import ObjectStore
from tests.internals import JobRun

Ask = Callable[["HeldRun", LevelWork, int, pa.Buffer, Meeting], list[pa.RecordBatch]]


def ask_once(
    run: HeldRun, work: LevelWork, subtask: int, rows: pa.Buffer, meeting: Meeting
) -> list[pa.RecordBatch]:
    placed = run.placement.of_level(work.level).get(subtask)
    return run_level(work.level, pickle.dumps(work), subtask, rows, placed, meeting)


class HeldRun(PipelineRun):
    """One run whose tasks this process plays, one after the other. Created by `start_held`."""

    def __init__(self, job: JobRun, workers: Workers, ask: Ask = ask_once) -> None:
        super().__init__(job)
        self._packed = PackedPipeline.pack(job.pipeline)
        self._workers = workers
        self._run_id = RunId(uuid.uuid4().hex, job.pipeline.paths.root)
        self.ask = ask
        self.placement = Placement(workers.secret, job.pipeline.parallelism, 2, None)
        self.placed: list[list[Placed]] = []

    def process(self, plan: EpochPlan, splits: Sequence[SourceSplit]) -> EpochReports:
        meeting = self._workers.meeting(then_stop=plan.then_stop)
        waiting: dict[tuple[int, int], list[ExchangeChunk]] = {}
        for one in splits:
            node = self.pipeline.sources[one.source]
            for chunk in source_chunks(self.pipeline, node, read_split(node, one.split), one.index):
                waiting.setdefault((chunk.level, chunk.subtask), []).append(chunk)
        reports: list[TaskReport] = []
        places: list[Placed] = []
        for level in range(1, self.pipeline.levels + 1):
            work = LevelWork(self._packed, self.job.store, self._run_id, level, plan)
            for subtask in range(self.pipeline.parallelism):
                stream = ChunkStream()
                for batch in chunk_batches(waiting.pop((level, subtask), [])):
                    stream.write(batch)
                with self._workers.worker(subtask):
                    output = self.ask(self, work, subtask, stream.close(), meeting)
                for chunk in [one for batch in output for one in chunks_of(batch)]:
                    if chunk.edge == FAILURE:
                        raise pickle.loads(chunk.payload)
                    if chunk.level:
                        sent = replace(chunk, payload=bytes(chunk.payload))
                        waiting.setdefault((chunk.level, chunk.subtask), []).append(sent)
                    elif chunk.edge == PLACE:
                        places.append(pickle.loads(chunk.payload))
                    else:
                        reports.append(pickle.loads(chunk.payload))
        self.placement.learn(places)
        self.placed.append(places)
        subtasks = [pair for report in reports for pair in report.reports.items()]
        marks = [report.watermarks_micros for report in reports]
        return EpochReports(subtasks, merged_watermarks(marks))


class Workers:
    """The places of Python workers, which this process plays in turn, and their holders.

    Their owner is a process that only waits.
    """

    def __init__(self, count: int, silence_seconds: float) -> None:
        self.secret = Secret.new()
        self.silence_seconds = silence_seconds
        self.idle_seconds = 600.0
        self.owner = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        meeting = self.meeting()
        owner = ProcessId.of(self.owner.pid)
        # A fork of pytest's process would have all that it has.
        self._may_fork, slots.may_fork = slots.may_fork, lambda: False
        self.slots = [WorkerSlot.claim(meeting, owner) for _ in range(count)]

    def meeting(self, *, then_stop: bool = False) -> Meeting:
        return Meeting(self.secret, None, self.idle_seconds, True, self.silence_seconds)

    @contextlib.contextmanager
    def worker(self, number: int) -> Iterator[WorkerSlot]:
        """Be a worker."""
        chosen = self.slots[number % len(self.slots)]
        slots._SLOTS[self.secret] = chosen
        try:
            yield chosen
        finally:
            slots._SLOTS.pop(self.secret, None)

    def processes(self) -> list[int]:
        """The processes of the holders that this process knows."""
        return [slot._process for slot in self.slots if slot._process is not None]

    def close(self) -> None:
        slots.may_fork = self._may_fork
        processes = self.processes()
        assert self.owner.stdin is not None
        self.owner.stdin.close()
        self.owner.wait()
        for slot in self.slots:
            slot._claim.close()
        for process in processes:
            wait_until_ended(process)


def wait_until_ended(process: int, seconds: float = 60.0) -> None:
    """Wait for the end of a process, a child or not."""
    until = time.monotonic() + seconds
    known = ProcessId.of(process)
    while known.started and known.is_alive():
        assert time.monotonic() < until, f"process {process} goes on"
        time.sleep(0.02)


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    wait_until_ended(process)


@contextlib.contextmanager
def started_workers(count: int = 1, *, silence_seconds: float = 60.0) -> Iterator[Workers]:
    workers = Workers(count, silence_seconds)
    try:
        yield workers
    finally:
        workers.close()


@contextlib.contextmanager
def held_run(
    pipeline: Pipeline, store: ObjectStore, workers: Workers, ask: Ask = ask_once
) -> Iterator[HeldRun]:
    job = JobRun.start(store, pipeline)
    with contextlib.closing(job):
        yield HeldRun(job, workers, ask)
