"""One merge of a compaction plan: read, merge, write under new names, read back.

The same code runs in process and in Spark's workers, on whole merges and on their shards.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.model.compaction import (
    MEBIBYTE,
    Merge,
    MergedRows,
    MergeOutcome,
    PairsMerge,
    RowsDigest,
    RowsMerge,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.keys import KeyRange, server_for_hash
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.planning.compaction.policies import shards_of
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.merge.pairs import merge_pairs
from arroyo_dagster.state.tables.merge.rows import OnBytes, merge_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTask:
    """A merge, and all that is needed to execute it in another process.

    Attributes:
        epoch, worker_generation: the checkpoint in whose directory the new files are written.
        parallelism: determines the subtask that owns a key range, for the names of files.
        shard_bytes: a merge of more bytes is executed in shards; see `split_task`.
    """

    paths: JobPaths
    epoch: Epoch
    worker_generation: WorkerGeneration | None
    parallelism: int
    config: TableConfig
    merge: Merge
    shard_bytes: int = 256 * MEBIBYTE

    def namer(self, subtask: int) -> Callable[[str], StatePath]:
        """Return a function that names files uniquely: attempts of one task may overlap."""

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


def run_merge(
    store: ObjectStore, task: MergeTask, on_bytes: OnBytes = lambda count: None
) -> MergeOutcome:
    """Execute one merge and read its outputs back.

    Args:
        on_bytes: called for every input with the number of its bytes that were read.

    Raises:
        FormatError: an input is broken, or has other columns than its table.
        NotFoundError: an input no longer exists because the job has let it expire.
    """
    return combined(task, [run_shard(store, task, on_bytes)])


def run_shard(
    store: ObjectStore, task: MergeTask, on_bytes: OnBytes = lambda count: None
) -> MergeOutcome:
    """Execute one shard of a task, as returned by `split_task`; otherwise as `run_merge`."""
    merge = task.merge
    if isinstance(merge, PairsMerge):
        return merge_pairs(task.config, store, merge, task.namer(0), on_bytes)
    table = ExpiringTimeKeyTable(task.config, store)

    def name(keys: KeyRange, suffix: str) -> StatePath:
        return task.namer(server_for_hash(keys.start, task.parallelism))(suffix)

    return merge_rows(table, store, merge, name, on_bytes)


def split_task(task: MergeTask) -> list[MergeTask]:
    """Split a task that is too large into shards for several executors; see `combined`."""
    config = task.config.config
    divisible = isinstance(config, ExpiringTimeKeyConfig) and set(
        config.schema.hashed_indices
    ) <= set(config.schema.key_indices or ())
    shards = shards_of(task.merge, task.shard_bytes, divisible=divisible)
    return [replace(task, merge=merge) for merge in shards]


def combined(task: MergeTask, outcomes: Sequence[MergeOutcome]) -> MergeOutcome:
    """Combine the outcomes of a task's shards into that of one merge.

    Args:
        outcomes: of all shards, in their order.

    Raises:
        FormatError: inputs have rows outside the key ranges in their metadata.
    """
    first = outcomes[0]
    rows_of: dict[StatePath, int] = {}
    dropped: Counter[str] = Counter()
    for outcome in outcomes:
        rows_of.update(outcome.input_rows)
        dropped.update(outcome.dropped)
    rows_in = sum(outcome.rows_in for outcome in outcomes)
    if sum(rows_of.values()) != rows_in:
        raise FormatError(
            f"{sum(rows_of.values()) - rows_in} of {sum(rows_of.values())} rows have keys "
            "outside of the bounds that metadata gives for their files",
            operator=task.merge.operator,
            table=task.merge.table,
            path=task.merge.paths[0],
            next_step="nothing was published; verify the epoch, which names the file",
        )
    merged = first.merged
    if isinstance(merged, MergedRows):
        of_rows = [outcome.merged for outcome in outcomes if isinstance(outcome.merged, MergedRows)]
        merged = MergedRows(
            operator=merged.operator,
            table=merged.table,
            inputs=task.merge.inputs if isinstance(task.merge, RowsMerge) else (),
            outputs=tuple(file for rows in of_rows for file in rows.outputs),
        )
    return MergeOutcome(
        merged=merged,
        rows_in=rows_in,
        rows_out=sum(outcome.rows_out for outcome in outcomes),
        dropped=dict(dropped),
        size_bytes_in=task.merge.size_bytes,
        size_bytes_out=sum(outcome.size_bytes_out for outcome in outcomes),
        before=sum((outcome.before for outcome in outcomes), RowsDigest()),
        after=sum((outcome.after for outcome in outcomes), RowsDigest()),
        input_rows=rows_of,
    )
