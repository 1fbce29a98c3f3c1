"""What a restore of an epoch would cost, also at another parallelism.

Seconds, rows and memory are estimates; files and bytes are exact. Of data files only the footers
are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, TimeFile
from arroyo_dagster.state.operations.catalog.metadata_only import stored_sizes
from arroyo_dagster.state.operations.query.state import StateEpoch
from arroyo_dagster.state.planning.restore.reads import TableRead, restore_plan
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.data_files import open_data_file

FILE_SECONDS, MANAGED_FILE_SECONDS, BYTES_A_SECOND = 0.060, 0.003, 30_000_000
"""To open a file of an Arroyo job, which reads one after the other, and of a managed job, which
opens many at once; and what a subtask reads and decodes. `docs/operate/sizing.md` says which were
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEstimate:
    """What one subtask reads of one table in a restore.

    Attributes:
        rows: that it keeps, about.
        memory_bytes: the decoded size of these rows, about.
        seconds: to open and read the files.
    """

    read: TableRead
    rows: int
    memory_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _File:
    rows: int
    decoded_bytes: int


def estimate_restore(epoch: StateEpoch, parallelism: int | None = None) -> Iterator[ReadEstimate]:
    """Estimate what a restore of an epoch reads: by operator, table and subtask.

    Args:
        parallelism: of the restored job; None = each operator's own.

    Raises:
        InputError: the parallelism is out of its range.
        FormatError, NotFoundError: a file is broken or missing.
    """
    store, checkpoint = epoch.job.catalog.store, epoch.checkpoint
    plan = restore_plan(checkpoint, parallelism, sizes=stored_sizes(store, checkpoint.paths))
    files, bounds = _footers(store, plan.files), _bounds(checkpoint)
    file_seconds = MANAGED_FILE_SECONDS if checkpoint.progress is not None else FILE_SECONDS
    for read in plan.reads:
        shares = [(files[path], _share(read, bounds.get(path))) for path in read.files]
        yield ReadEstimate(
            read=read,
            rows=round(sum(share * file.rows for file, share in shares)),
            memory_bytes=round(sum(share * file.decoded_bytes for file, share in shares)),
            seconds=len(read.files) * file_seconds + read.size_bytes / BYTES_A_SECOND,
        )


def _footers(store: ObjectStore, paths: tuple[StatePath, ...]) -> dict[StatePath, _File]:
    def read(path: StatePath) -> _File:
        with closing(open_data_file(store, path)) as data:
            return _File(sum(data.footer.rows), sum(data.footer.encoded_bytes))

    return dict(zip(paths, concurrently(read, paths), strict=True))


def _bounds(checkpoint: Checkpoint) -> dict[StatePath, TimeFile]:
    return {
        file.path: file
        for operator in checkpoint.operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for file in files.files
    }


def _share(read: TableRead, file: TimeFile | None) -> float:
    """Return the share of a file's rows that a subtask keeps: keys are hashes, so they are spread
    evenly over the range of a file.
    """
    if file is None or read.keys.covers(file.min_routing_key, file.max_routing_key):
        return 1.0
    low = max(read.keys.start, file.min_routing_key)
    high = min(read.keys.end, file.max_routing_key)
    return (high - low + 1) / (file.max_routing_key - file.min_routing_key + 1)
