"""Execution of a plan's merges in this process, and their progress."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from arroyo_dagster.errors import ProtocolError, StorageError
from arroyo_dagster.state.metadata.interrupts import wait_until_done
from arroyo_dagster.state.model.compaction import MEBIBYTE, MergeOutcome
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit
from arroyo_dagster.state.planning.verify.checks import row_parity
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.rows import OnBytes
from arroyo_dagster.state.tables.merge.task import (
    MergeTask,
    combined,
    run_merge,
    run_shard,
    split_task,
)

RunMerges = Callable[[ObjectStore, Sequence[MergeTask], OnBytes], Iterable[MergeOutcome]]
"""Executes merges, yields outcomes in the order of the tasks, and reports every byte it has read.
"""

_SIDE_BY_SIDE_BYTES = 16 * MEBIBYTE
_ATTEMPTS = 3
_EVERY_SECONDS = 0.5


def merge_here(
    store: ObjectStore, tasks: Sequence[MergeTask], on_bytes: OnBytes = lambda count: None
) -> Iterable[MergeOutcome]:
    """Execute merges in this process: one after the other, or on all cores if they are large."""
    workers = os.cpu_count() or 1
    shards = [split_task(task) for task in tasks]
    big = sum(task.merge.size_bytes for task in tasks) >= _SIDE_BY_SIDE_BYTES
    if not big or workers < 2 or sum(map(len, shards)) < 2:
        return (_tried(lambda merge: run_merge(store, merge, on_bytes), task) for task in tasks)
    return _side_by_side(store, tasks, shards, workers, on_bytes)


def _tried(run: Callable[[MergeTask], MergeOutcome], task: MergeTask) -> MergeOutcome:
    """Return the result of `run`; retry this task alone if the store fails temporarily."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return run(task)
        except StorageError as error:
            if not error.retryable:
                raise
    return run(task)


def _side_by_side(
    store: ObjectStore,
    tasks: Sequence[MergeTask],
    shards: Sequence[Sequence[MergeTask]],
    workers: int,
    on_bytes: OnBytes,
) -> Iterator[MergeOutcome]:
    ended = threading.Event()

    def read(count: int) -> None:
        if ended.is_set():
            raise _EndedError
        on_bytes(count)

    with ThreadPoolExecutor(workers, "arroyo-merge") as pool:
        begun = [
            [pool.submit(_tried, lambda part: run_shard(store, part, read), task) for task in piece]
            for piece in shards
        ]
        try:
            for task, waiting in zip(tasks, begun, strict=True):
                yield combined(task, [wait_until_done(future) for future in waiting])
        finally:
            # An error or an interrupt does not wait for the remaining merges.
            ended.set()
            for waiting in begun:
                for future in waiting:
                    future.cancel()


class _EndedError(Exception):
    """The outcome of a merge is no longer needed."""


def check_same(paths: JobPaths, epoch: Epoch, outcome: MergeOutcome) -> None:
    """Refuse to publish new files whose rows differ from those of the files they replace.

    Raises:
        ProtocolError: a restore would load other rows from them.
    """
    verdict = row_parity([outcome])
    if not verdict.passed:
        raise ProtocolError(
            (
                "the new files would not restore the rows of the files they replace, so nothing "
                "was published:"
            )
            + verdict.findings[0].evidence,
            job=paths.root,
            epoch=epoch,
            path=verdict.findings[0].object,
            next_step="keep the files and report it; the job is unchanged",
        )


# ---- progress ------------------------------------------------------------------------------------


class Meter:
    """Counts the bytes that merges read, from any thread, and reports them at intervals.

    Bytes that are read again, because a key range is processed in parts, count again, but the sum
    never exceeds the total.
    """

    def __init__(
        self,
        total_bytes: int,
        report: OnProgress,
        *,
        every_seconds: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_bytes
        self._report = report
        self._every = every_seconds
        self._clock = clock
        self._begun = clock()
        self._last = self._begun
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add a number of bytes read."""
        with self._lock:
            self._done = min(self._total, self._done + count)
            now = self._clock()
            if now - self._last < self._every and self._done < self._total:
                return
            self._last = now
            progress = Progress(
                step="merge",
                done=self._done,
                total=self._total,
                unit=ProgressUnit.BYTES,
                seconds=now - self._begun,
            )
        self._report(progress)
