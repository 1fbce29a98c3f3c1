"""Fetch the rows of a Spark job, on classic sessions and over Spark Connect."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.spark.versions import session_thread
from arroyo_dagster.state.metadata.interrupts import check_interrupt

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, SparkSession

ENDED_STEP = (
    "a function that calls `os._exit`, a native library that crashes, or a lack of memory "
    "(signal 9) ends a process: correct the function, or give the workers more memory; nothing of "
    "the epoch was published"
)


class WorkerEndedError(StorageError):
    """The process that held a subtask ended while it ran a function of the user."""


_PYTHON_ERROR = re.compile(r"(?!(org|java|scala|com|io)\.)[A-Za-z_.]+(Error|Exception): ")
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_OTHER_PYTHON = re.compile(r"[^\n]*\bPYTHON_VERSION_MISMATCH\b[^\n]*")
_WORKER_ENDED = re.compile(rf"{WorkerEndedError.__name__}: (.*?)\. Next: ")
_TYPED_ERROR = re.compile(r"arroyo_dagster\.errors\.(InputError|FormatError|NotFoundError): (.+)")
_KINDS: Mapping[str, type[ArroyoStateError]] = {
    kind.__name__: kind for kind in (InputError, FormatError, NotFoundError)
}
_SPARKS_WORKER_ENDED = "Python worker exited unexpectedly"
_LOCAL_CORES = re.compile(r"local\[(\d+).*\]")
_UNKNOWN_SLOTS = 8
_INTERRUPT_POLL_SECONDS = 0.5
_CANCEL_SECONDS = 10.0


def fetch_rows(session: SparkSession, frame: DataFrame | RDD[Any]) -> list[Any]:
    """Fetch the rows of a frame or an RDD. An interrupt during the wait cancels its jobs.

    Another thread fetches: an interrupt in the middle of a response of the JVM would leave the
    rest of the response to the next caller. A worker's pending writes to the store may still
    arrive, as after a crash.

    Raises:
        InputError: a worker lacks a module, or runs another Python.
        InputError, FormatError, NotFoundError: a task raised it: the next attempt would, too.
        StorageError: tasks failed or were lost, and Spark gave up.
    """
    tag, context = f"arroyo-{uuid.uuid4().hex}", context_of(session)
    rows: list[Any] = []
    failed: list[BaseException] = []

    def collect() -> None:
        try:
            (session.addTag if context is None else context.addJobTag)(tag)
            rows.extend(frame.collect())
        except BaseException as error:
            failed.append(error)

    thread = session_thread(session, collect)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(_INTERRUPT_POLL_SECONDS)
            check_interrupt()  # of a thread that works for the main thread, which gets signals
    except BaseException:  # an interrupt
        with suppress(Exception):  # raise the interrupt, not this error
            (session.interruptTag if context is None else context.cancelJobsWithTag)(tag)
        thread.join(_CANCEL_SECONDS)
        raise
    for error in failed:
        _raise_typed(error)
    return rows


def _raise_typed(error: BaseException) -> NoReturn:
    """Raise the error of this package that a failed job stands for; another one as it is."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not isinstance(error, PySparkException | Py4JError):
        raise error
    if (lacking := _what_workers_lack(str(error))) is not None:
        raise InputError(
            f"Spark's workers cannot run this: {lacking}",
            next_step="install it on the workers, with the driver's versions of Python and "
            "pyarrow; `ship` sends this package",
        ) from redacted_cause(error)
    if (ended := _WORKER_ENDED.search(str(error))) is not None:
        raise StorageError(
            redact_text(ended[1]), retryable=True, next_step=ENDED_STEP
        ) from redacted_cause(error)
    if typed := _TYPED_ERROR.findall(redact_text(str(error))):
        kind, text = typed[-1]  # what it was raised from comes before it
        message, _, step = text.partition(". Next: ")
        raise _KINDS[kind](message, next_step=step or None) from redacted_cause(error)
    raise StorageError(
        f"tasks failed, and Spark gave up ({failure_reason(error)})",
        retryable=True,
        next_step="check Spark's log, then run it again; files that were written are not listed",
    ) from redacted_cause(error)


def _what_workers_lack(message: str) -> str | None:
    """Return what makes every attempt on such a worker fail; None if another may succeed."""
    if (missing := _MISSING_MODULE.search(message)) is not None:
        return f"one has no {missing[1]}"
    if (other := _OTHER_PYTHON.search(message)) is not None:
        return redact_text(other[0])
    return None


def failure_reason(error: Exception) -> str:
    """Return the useful line of a Java and Python stack trace: the Python error, or the cause."""
    if _SPARKS_WORKER_ENDED in str(error):
        return "a Python worker ended: it crashed, ran out of memory, or a function ended it"
    lines = [line.strip() for line in redact_text(str(error)).splitlines() if line.strip()]
    python = [line for line in lines if _PYTHON_ERROR.match(line)]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (python[-1:] or causes or lines or ["no message"])[0][:300]


def context_of(session: SparkSession) -> SparkContext | None:
    """Return the context of a session; None on Spark Connect, which has no local context."""
    try:
        return session.sparkContext
    except Exception:
        return None


def slots(session: SparkSession) -> int:
    """Return how many tasks run at a time; over Spark Connect, what the server's settings say."""
    context = context_of(session)
    if context is not None:
        return max(1, context.defaultParallelism)

    def setting(name: str) -> str:
        return session.conf.get(name, "") or ""

    if (local := _LOCAL_CORES.fullmatch(setting("spark.master"))) is not None:
        return int(local[1])
    executors, cores = setting("spark.executor.instances"), setting("spark.executor.cores")
    values = [setting("spark.default.parallelism"), setting("spark.cores.max")]
    if executors.isdecimal():
        values.append(str(int(executors) * int(cores if cores.isdecimal() else "1")))
    numbers = (int(number) for number in values if number.isdecimal())
    return max(1, next(numbers, _UNKNOWN_SLOTS))
