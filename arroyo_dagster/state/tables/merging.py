"""One merge of a compaction plan: read, merged, written under fresh names, read back.

The same code runs in process and in Spark's workers.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from arroyo_dagster.state.codec.digest import digest_rows
from arroyo_dagster.state.model.compaction import (
    Merge,
    MergedPairs,
    MergedRows,
    MergeOutcome,
    PairsMerge,
    RowsDigest,
    RowsMerge,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.keys import KeyRange, server_for_hash
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import TableConfig, TimeFile
from arroyo_dagster.state.storage.store import ObjectStore, read_many
from arroyo_dagster.state.storage.wrappers import Wrapper
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable
from arroyo_dagster.state.tables.table import Compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTask:
    """A merge, and all that is needed to carry it out somewhere else.

    Attributes:
        epoch, worker_generation: the checkpoint whose directory gets the new files.
    """

    paths: JobPaths
    epoch: Epoch
    worker_generation: WorkerGeneration | None
    parallelism: int
    config: TableConfig
    merge: Merge

    def namer(self, subtask: int) -> Callable[[str], StatePath]:
        """Names files that no other attempt has: tasks are tried again, and go on beside it."""

        def name(suffix: str) -> StatePath:
            return self.paths.data_file(
                self.merge.operator,
                self.merge.table,
                subtask,
                self.epoch,
                self.worker_generation,
                attempt=uuid.uuid4().hex[:16] + suffix,
            )

        return name


def run_merge(store: ObjectStore, task: MergeTask) -> MergeOutcome:
    """Carry out one merge and read its outputs back.

    Raises:
        FormatError: an input is broken, or has other columns than its table.
        NotFoundError: an input is gone; the job has let it expire since.
    """
    store = _Prefetched(store, task.merge.paths)
    if isinstance(task.merge, PairsMerge):
        return _merge_pairs(GlobalKeyedTable(task.config, store), task, task.merge)
    return _merge_rows(ExpiringTimeKeyTable(task.config, store), task, task.merge)


def _merge_pairs(table: GlobalKeyedTable, task: MergeTask, merge: PairsMerge) -> MergeOutcome:
    done = table.compact_data(merge.inputs, task.namer(0), from_oldest=merge.from_oldest)
    oldest = merge.from_oldest
    return MergeOutcome(
        merged=MergedPairs(
            operator=merge.operator, table=merge.table, inputs=merge.inputs, outputs=done.outputs
        ),
        rows_in=done.rows_in,
        rows_out=done.rows_out,
        dropped=done.dropped,
        size_bytes_in=merge.size_bytes,
        size_bytes_out=done.size_bytes,
        before=_digest_of_writes(table, merge.inputs, from_oldest=oldest),
        after=_digest_of_writes(table, done.outputs, from_oldest=oldest),
    )


def _digest_of_writes(
    table: GlobalKeyedTable, files: Sequence[StatePath], *, from_oldest: bool
) -> RowsDigest:
    """What a restore would take from `files`: last values with their versions, and removals."""
    writes = list(table.last_writes(files).items())
    if from_oldest:
        writes = [(key, last) for key, last in writes if last is not None]
    rows = pa.table(
        {
            "key": pa.array([key for key, _ in writes], pa.binary()),
            "version": pa.array([last and last[0] for _, last in writes], pa.int64()),
            "value": pa.array([last and last[1] for _, last in writes], pa.binary()),
        }
    )
    return digest_rows(rows)


def _merge_rows(table: ExpiringTimeKeyTable, task: MergeTask, merge: RowsMerge) -> MergeOutcome:
    parts = [_part(table, task, merge, keys) for keys in merge.ranges]
    outputs = tuple(file for part in parts for file in part.outputs)
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, count in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return MergeOutcome(
        merged=MergedRows(
            operator=merge.operator, table=merge.table, inputs=merge.inputs, outputs=outputs
        ),
        rows_in=sum(part.rows_in for part in parts),
        rows_out=sum(part.rows_out for part in parts),
        dropped=dropped,
        size_bytes_in=merge.size_bytes,
        size_bytes_out=sum(part.size_bytes for part in parts),
        before=_digest_of_rows(table, merge, merge.inputs),
        after=_digest_of_rows(table, merge, outputs),
    )


def _digest_of_rows(
    table: ExpiringTimeKeyTable, merge: RowsMerge, files: Sequence[TimeFile]
) -> RowsDigest:
    """What a restore would take from `files`, hashes included."""
    total = RowsDigest()
    for keys in merge.ranges:
        total += digest_rows(
            table.live_rows(
                files, keys, cutoff_micros=merge.cutoff_micros, from_oldest=merge.from_oldest
            ).rows()
        )
    return total


def _part(
    table: ExpiringTimeKeyTable, task: MergeTask, merge: RowsMerge, keys: KeyRange
) -> Compaction[TimeFile]:
    owner = server_for_hash(keys.start, task.parallelism)
    return table.compact_data(
        merge.inputs,
        task.namer(owner),
        keys,
        cutoff_micros=merge.cutoff_micros,
        from_oldest=merge.from_oldest,
    )


class _Prefetched(Wrapper):
    """Reads the inputs of a merge once, all together, however often they are decoded."""

    def __init__(self, store: ObjectStore, paths: Sequence[StatePath]) -> None:
        super().__init__(store)
        self._data = read_many(store, paths)

    def read(self, path: StatePath) -> bytes:
        return self._data[path] if path in self._data else self.inner.read(path)

    def open_input(self, path: StatePath) -> BinaryIO:
        return io.BytesIO(self._data[path]) if path in self._data else super().open_input(path)
