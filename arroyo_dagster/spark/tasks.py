"""Run items of a plan in Spark's Python workers, several items per task.

Items and results are pickled into an Arrow column, which works on classic sessions and on Spark
Connect. A task has an overhead of about 25 ms, so small items share one.
"""

from __future__ import annotations

import heapq
import pickle
import re
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.state.metadata.interrupts import check_interrupt

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, Row, SparkSession

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_DDL = "item int, payload binary"
_SCHEMA = pa.schema([("task", pa.int32()), ("item", pa.int32()), ("payload", pa.binary())])
_RESULTS = pa.schema([("item", pa.int32()), ("payload", pa.binary())])
_PYTHON_ERROR = re.compile(r"[A-Za-z_]+(Error|Exception): ")
ATTEMPTS = 3
TASKS_PER_SLOT = 3
_STOP_POLL_SECONDS = 0.5
_CANCEL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _TaskResult(Generic[R]):
    result: R


def run_items(
    session: SparkSession,
    function: Callable[[I], R],
    items: Sequence[I],
    weights: Sequence[int],
    on_weight: Callable[[int], None] = lambda weight: None,
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

    Returns:
        The results in the order of `items`.

    Raises:
        ArroyoStateError: an item failed; the error of the first one in the order of `items`.
        StorageError: tasks failed or were lost, and Spark gave up.
    """
    results: dict[int, R] = {}
    for attempt in range(1, ATTEMPTS + 1):
        left = [index for index in range(len(items)) if index not in results]
        if not left:
            break
        wanted = {index: items[index] for index in left}
        found = _attempt(session, function, wanted, weights, on_weight)
        failures = {i: error for i, error in found.items() if isinstance(error, ArroyoStateError)}
        for index, done in found.items():
            if isinstance(done, _TaskResult):
                results[index] = done.result
        for index in sorted(failures):
            if attempt == ATTEMPTS or not failures[index].retryable:
                raise failures[index]
    return [results[index] for index in range(len(items))]


def _attempt(
    session: SparkSession,
    function: Callable[[I], R],
    items: dict[int, I],
    weights: Sequence[int],
    on_weight: Callable[[int], None],
) -> dict[int, _TaskResult[R] | ArroyoStateError]:
    tasks = assigned({index: weights[index] for index in items}, slots(session) * TASKS_PER_SLOT)
    rows = [
        (task, index, pickle.dumps(items[index]))
        for task, indices in enumerate(tasks)
        for index in indices
    ]
    columns = [list(column) for column in zip(*rows, strict=True)]
    frame = session.createDataFrame(pa.table(columns, schema=_SCHEMA))
    spread = frame.repartitionById(len(tasks), "task")
    total = sum(weights[index] for index in items)
    with _watched(session, len(tasks), total, on_weight):
        collected = fetch_rows(session, spread.mapInArrow(_worker(function), _DDL))
    return {row.item: pickle.loads(row.payload) for row in collected}


def fetch_rows(session: SparkSession, frame: DataFrame) -> list[Row]:
    """Fetch the rows of a frame. An interrupt during the wait cancels the jobs of the frame.

    Another thread fetches: an interrupt in the middle of a response of the JVM would leave the
    rest of the response to the next caller. A worker's pending writes to the store may still
    arrive, as after a crash.

    Raises:
        StorageError: tasks failed or were lost, and Spark gave up.
    """
    from py4j.protocol import Py4JError
    from pyspark import InheritableThread
    from pyspark.errors import PySparkException

    tag, context = f"arroyo-{uuid.uuid4().hex}", _context(session)
    rows: list[Row] = []
    failed: list[BaseException] = []

    def collect() -> None:
        try:
            (session.addTag if context is None else context.addJobTag)(tag)
            rows.extend(frame.collect())
        except BaseException as error:
            failed.append(error)

    thread = InheritableThread(target=collect, session=session, name="arroyo-spark", daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(_STOP_POLL_SECONDS)
            check_interrupt()  # of a thread that works for the main thread, which gets signals
    except BaseException:  # an interrupt
        with suppress(Exception):  # raise the interrupt, not this error
            (session.interruptTag if context is None else context.cancelJobsWithTag)(tag)
        thread.join(_CANCEL_SECONDS)
        raise
    for error in failed:
        if not isinstance(error, PySparkException | Py4JError):
            raise error
        raise StorageError(
            f"tasks failed, and Spark gave up ({_reason(error)})",
            retryable=True,
            next_step="check Spark's log, then run it again; files that were written are not "
            "listed",
        ) from redacted_cause(error)
    return rows


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


def _reason(error: Exception) -> str:
    """Return the useful line of a Java and Python stack trace: the Python error, or the cause."""
    lines = [line.strip() for line in redact_text(str(error)).splitlines() if line.strip()]
    python = [line for line in lines if _PYTHON_ERROR.match(line)]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (python[-1:] or causes or lines or ["no message"])[0][:300]


def _context(session: SparkSession) -> SparkContext | None:
    """Return the context of a session; None on Spark Connect, which has no local context."""
    try:
        return session.sparkContext
    except Exception:
        return None


def slots(session: SparkSession) -> int:
    """Return how many tasks run at a time."""
    context = _context(session)
    if context is not None:
        return max(1, context.defaultParallelism)
    # On Spark Connect, derive the parallelism from the server's setting.
    return max(1, int(session.conf.get("spark.sql.shuffle.partitions") or "8") // 2)


def assigned(weights: dict[int, int], tasks: int) -> list[list[int]]:
    """Distribute items over at most `tasks` tasks, heaviest first, each to the lightest task.

    Args:
        weights: the weight of each item, by its index.
        tasks: the maximum number of tasks.

    Returns:
        The indexes of the items of each task.
    """
    heap: list[tuple[int, int]] = [(0, task) for task in range(min(tasks, len(weights)))]
    found: list[list[int]] = [[] for _ in heap]
    for index in sorted(weights, key=lambda index: (-weights[index], index)):
        total, task = heapq.heappop(heap)
        found[task].append(index)
        heapq.heappush(heap, (total + max(1, weights[index]), task))
    return found


def _worker(function: Callable[[I], R]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.Table]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            payloads = batch.column("payload").to_pylist()
            for index, payload in zip(batch.column("item").to_pylist(), payloads, strict=True):
                result = pickle.dumps(_carried_out(function, payload))
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
