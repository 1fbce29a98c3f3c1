"""Run items of a plan in Spark's Python workers, several items per task.

Items and results are pickled into an Arrow column, which works on classic sessions and on Spark
Connect. A task has an overhead of about 25 ms, so small items share one.
"""

from __future__ import annotations

import heapq
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.redaction import redact_text
from arroyo_dagster.spark.jobs import fetch_rows, slots
from arroyo_dagster.spark.versions import frame_of_rows, in_partitions
from arroyo_dagster.spark.workers import DiskProbe, check_workers
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_DDL = "item int, payload binary"
_SCHEMA = pa.schema([("task", pa.int32()), ("item", pa.int32()), ("payload", pa.binary())])
_RESULTS = pa.schema([("item", pa.int32()), ("payload", pa.binary())])
ATTEMPTS = 3
TASKS_PER_SLOT = 3
BYTES_OF_A_FILE = 4096
"""The cost of opening a file, as the equivalent number of bytes read."""

BYTES_OF_A_TASK = 256 << 10
"""Less to read or copy, by bytes and files, is not worth a task of its own."""

_STOP_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _TaskResult(Generic[R]):
    result: R


def run_items(
    session: SparkSession,
    function: Callable[[I], R],
    items: Sequence[I],
    weights: Sequence[int],
    on_weight: Callable[[int], None] = lambda weight: None,
    *,
    store: ObjectStore,
    least_weight: int = 1,
) -> list[R]:
    """Run `[function(item) for item in items]` on Spark's workers.

    Args:
        session: the session.
        function: a module-level function, or a `functools.partial` of one. Items that raise a
            retryable `ArroyoStateError` are run again, up to `ATTEMPTS` times in total.
        items: the items.
        weights: the amount of work of each item; heavy items start first, in separate tasks.
        on_weight: called with the weight that was completed since the last call, as tasks end; on
            Spark Connect, called once at the end.
        store: the store that the function uses; the workers must reach it as this process does.
        least_weight: tasks are so few that each has about this weight: further ones would cost more
            than they save.

    Returns:
        The results in the order of `items`.

    Raises:
        InputError: a worker cannot run this package, or is on another disk; see `check_workers`.
        ArroyoStateError: an item failed; the error of the first one in the order of `items`.
        StorageError: tasks failed or were lost, and Spark gave up.
    """
    results: dict[int, R] = {}
    run = _worker(function, check_workers(session, store) if items else None)
    for attempt in range(1, ATTEMPTS + 1):
        left = [index for index in range(len(items)) if index not in results]
        if not left:
            break
        pending = {index: items[index] for index in left}
        ended: dict[int, _TaskResult[R] | ArroyoStateError] = _attempt(
            session, run, pending, weights, on_weight, least_weight
        )
        failures = {i: error for i, error in ended.items() if isinstance(error, ArroyoStateError)}
        for index, done in ended.items():
            if isinstance(done, _TaskResult):
                results[index] = done.result
        for index in sorted(failures):
            if attempt == ATTEMPTS or not failures[index].retryable:
                raise failures[index]
    return [results[index] for index in range(len(items))]


def _attempt(
    session: SparkSession,
    run: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    items: dict[int, I],
    weights: Sequence[int],
    on_weight: Callable[[int], None],
    least_weight: int,
) -> dict[int, _TaskResult[R] | ArroyoStateError]:
    weighed = {index: weights[index] for index in items}
    total = sum(weighed.values())
    tasks = assigned(weighed, slots(session) * TASKS_PER_SLOT, least_weight)
    rows = [
        (task, index, pickle.dumps(items[index]))
        for task, indices in enumerate(tasks)
        for index in indices
    ]
    columns = [list(column) for column in zip(*rows, strict=True)]
    frame = frame_of_rows(session, pa.table(columns, schema=_SCHEMA))
    spread = in_partitions(frame, len(tasks), "task")
    with _watched(session, len(tasks), total, on_weight):
        collected = fetch_rows(session, spread.mapInArrow(run, _DDL))
    return {row.item: pickle.loads(row.payload) for row in collected}


@contextmanager
def _watched(
    session: SparkSession, tasks: int, weight: int, on_weight: Callable[[int], None]
) -> Iterator[None]:
    """Report progress as tasks end, each with an equal share of the weight."""
    reported, ended = [0], threading.Event()

    def report(done: int) -> None:
        now = weight * min(done, tasks) // tasks
        if now > reported[0]:
            on_weight(now - reported[0])
            reported[0] = now

    def watch() -> None:
        while not ended.wait(_STOP_POLL_SECONDS):
            report(_ended_tasks(tracker, tasks))

    try:
        tracker = session.sparkContext.statusTracker()
    except Exception:  # Spark Connect has no context
        yield
    else:
        thread = threading.Thread(target=watch, name="arroyo-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
    report(tasks)


def _ended_tasks(tracker: Any, tasks: int) -> int:
    """Return the number of completed tasks of the active stage with this number of tasks."""
    infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return max((one.numCompletedTasks for one in infos if one and one.numTasks == tasks), default=0)


def assigned(weights: dict[int, int], tasks: int, least_weight: int = 1) -> list[list[int]]:
    """Distribute items over at most `tasks` tasks, heaviest first, each to the lightest task.

    Args:
        weights: the weight of each item, by its index.
        tasks: the maximum number of tasks.
        least_weight: tasks are so few that each has about this weight.

    Returns:
        The indexes of the items of each task.
    """
    worth = max(1, sum(weights.values()) // least_weight)
    heap: list[tuple[int, int]] = [(0, task) for task in range(min(tasks, len(weights), worth))]
    by_task: list[list[int]] = [[] for _ in heap]
    for index in sorted(weights, key=lambda index: (-weights[index], index)):
        total, task = heapq.heappop(heap)
        by_task[task].append(index)
        heapq.heappush(heap, (total + max(1, weights[index]), task))
    return by_task


def _worker(
    function: Callable[[I], R], probe: DiskProbe | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def checked(item: I) -> R:
        if probe is not None:
            probe.check()
        return function(item)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            payloads = batch.column("payload").to_pylist()
            for index, payload in zip(batch.column("item").to_pylist(), payloads, strict=True):
                result = pickle.dumps(_carried_out(checked, payload))
                yield pa.record_batch([[index], [result]], schema=_RESULTS)

    return run


def _carried_out(function: Callable[[I], R], payload: bytes) -> _TaskResult[R] | ArroyoStateError:
    try:
        return _TaskResult(function(pickle.loads(payload)))
    except ArroyoStateError as error:
        return error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return ArroyoStateError(
            f"a task failed ({type(error).__name__}: {redact_text(str(error))})",
            at=f"{where.filename}:{where.lineno}",
            next_step="report this; nothing was published or deleted",
        )
