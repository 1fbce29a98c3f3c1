"""Compaction as values: how much to merge, what was planned, what came of it.

A merge takes files that lie side by side in the replay order of one table, and gives files that
hold the same in their place.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
)
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import TimeFile

MEBIBYTE = 1 << 20


class CompactionPolicy(enum.Enum):
    """Which files of a table are merged.

    Attributes:
        BIN_PACK: neighbours smaller than a share of the target, until they fill it.
        FULL: all of them.
    """

    BIN_PACK = "bin-pack"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """How much to merge.

    Attributes:
        target_bytes: a bin-pack merge takes files of so many bytes together.
        small_share: a file below this share of the target is small.
        min_files: a bin-pack merge takes at least so many files that were never merged, and at
            least as many of them as of merged ones: what it gave is not taken up at once again.

    Raises:
        InputError: a number out of its range.
    """

    policy: CompactionPolicy = CompactionPolicy.BIN_PACK
    target_bytes: int = 128 * MEBIBYTE
    small_share: float = 0.75
    min_files: int = 4

    def __post_init__(self) -> None:
        if self.target_bytes < 1 or not 0 < self.small_share <= 1 or self.min_files < 2:
            raise InputError(
                "compaction needs target_bytes >= 1, 0 < small_share <= 1 and min_files >= 2",
                target_bytes=self.target_bytes,
                small_share=self.small_share,
                min_files=self.min_files,
            )


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsMerge:
    """Files of a global keyed table to merge.

    Attributes:
        inputs: neighbours in replay order.
        from_oldest: nothing older is listed before them, so removals may disappear.
    """

    operator: OperatorId
    table: TableName
    inputs: tuple[StatePath, ...]
    size_bytes: int
    from_oldest: bool

    @property
    def paths(self) -> tuple[StatePath, ...]:
        return self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMerge:
    """Files of an expiring table to merge.

    Attributes:
        inputs: neighbours in the replay order of their key ranges.
        ranges: the key ranges to write a file of each; together they hold every row.
        cutoff_micros: rows older than this are dropped, as a restore would; 0 = none.
        from_oldest: nothing older of these ranges is listed, so that deletes may be applied.
    """

    operator: OperatorId
    table: TableName
    inputs: tuple[TimeFile, ...]
    ranges: tuple[KeyRange, ...]
    cutoff_micros: int
    size_bytes: int
    from_oldest: bool

    @property
    def paths(self) -> tuple[StatePath, ...]:
        return tuple(file.path for file in self.inputs)


Merge = PairsMerge | RowsMerge


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A table that is not merged, and why. `operator` and `table` are None for the whole job."""

    operator: OperatorId | None = None
    table: TableName | None = None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """What to merge at one epoch of a job.

    Attributes:
        ref: the checkpoint that was looked at.
        pending: how many compactions wait to be taken over; the plan counts them as done.
        files_before, size_bytes_before: what a restore reads at that epoch.
        files_after: how many files it would read once this is done; the most there can be.
    """

    pipeline: PipelineId | None
    job: JobId
    epoch: Epoch
    ref: StatePath
    merges: tuple[Merge, ...]
    left_out: tuple[LeftOut, ...] = ()
    pending: int = 0
    files_before: int = 0
    files_after: int = 0
    size_bytes_before: int = 0


# ---- what came of it -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPairs:
    """Files of a global keyed table, and what holds the same in their place."""

    operator: OperatorId
    table: TableName
    inputs: tuple[StatePath, ...]
    outputs: tuple[StatePath, ...]

    @property
    def input_paths(self) -> tuple[StatePath, ...]:
        return self.inputs

    @property
    def output_paths(self) -> tuple[StatePath, ...]:
        return self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRows:
    """Files of an expiring table, and what holds the same in their place."""

    operator: OperatorId
    table: TableName
    inputs: tuple[TimeFile, ...]
    outputs: tuple[TimeFile, ...]

    @property
    def input_paths(self) -> tuple[StatePath, ...]:
        return tuple(file.path for file in self.inputs)

    @property
    def output_paths(self) -> tuple[StatePath, ...]:
        return tuple(file.path for file in self.outputs)


Merged = MergedPairs | MergedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRecord:
    """Merges that wait for the job's writer to take them over at its next checkpoint.

    What Arroyo sends as `LoadCompactedData`, stored.

    Attributes:
        epoch: the epoch that was looked at.
        token: the lease under which they were made.
    """

    pipeline: PipelineId
    job: JobId
    epoch: Epoch
    token: int
    created_at_micros: int
    merged: tuple[Merged, ...]
    version: int = 1


@dataclass(frozen=True, slots=True)
class RowsDigest:
    """A multiset of rows: how many, and the sum of their hashes modulo 2**64."""

    rows: int = 0
    hash_sum: int = 0

    def __add__(self, other: RowsDigest) -> RowsDigest:
        return RowsDigest(self.rows + other.rows, (self.hash_sum + other.hash_sum) % 2**64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOutcome:
    """One merge, done and read back.

    Attributes:
        rows_in: rows in the inputs; pairs and removals of a global keyed table.
        rows_out: rows in the outputs.
        dropped: how many rows are in no output, by reason.
        before, after: what a restore would load of the inputs, and of the outputs read back.
    """

    merged: Merged
    rows_in: int
    rows_out: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    size_bytes_in: int = 0
    size_bytes_out: int = 0
    before: RowsDigest = RowsDigest()
    after: RowsDigest = RowsDigest()

    @property
    def same(self) -> bool:
        """Whether a restore loads the same, and every row is accounted for."""
        kept = self.rows_in - sum(self.dropped.values())
        return self.before == self.after and kept == self.rows_out
