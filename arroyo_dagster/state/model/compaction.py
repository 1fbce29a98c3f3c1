"""Compaction as values: settings, plans and outcomes.

A merge replaces neighbouring files in the replay order of one table by files with the same content.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
)
from arroyo_dagster.state.model.keys import MOST_SUBTASKS, KeyRange, key_range_size
from arroyo_dagster.state.model.leases import MAX_CHECKPOINT_SLOWDOWN, SLOWDOWN_SETTING
from arroyo_dagster.state.model.settings import Setting
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, GlobalKeyedFiles, TimeFile

MEBIBYTE = 1 << 20


class CompactionPolicy(enum.Enum):
    """Which files of a table are merged.

    Attributes:
        BIN_PACK: neighbours smaller than a share of the target, until they reach the target.
        LEVELS: a given number of neighbours of one level become one file of the next.
        WINDOW: in an expiring table, neighbours with their newest rows in the same window of event
            time, so that old rows expire together.
        FULL: all of them.
    """

    BIN_PACK = "bin-pack"
    LEVELS = "levels"
    WINDOW = "window"
    FULL = "full"


class SortOrder(enum.Enum):
    """The order of the rows in a merged file of an expiring table.

    Attributes:
        REPLAY: the order of the inputs.
        TIME: by event time; Arroyo's window operators then split their batches less often.
        KEY: by routing key, with a Bloom filter; readers of few keys then read less.
    """

    REPLAY = "replay"
    TIME = "time"
    KEY = "key"


class Generations(enum.Enum):
    """How a merge treats the row generations of a generational table.

    Attributes:
        ALL: keeps all of them; also used for tables without row generations.
        NEWEST_AT_ANY_CUTOFF: keeps, of each storage key, those that are the newest now or will be
            once younger ones have expired: in managed jobs rows expire one by one.
    """

    ALL = "all"
    NEWEST_AT_ANY_CUTOFF = "newest at any cutoff"


class MergeOrder(enum.Enum):
    """The order in which merges are chosen within a budget.

    Attributes:
        GAIN: largest reduction in files per byte read first.
        SMALLEST: fewest bytes read first.
        LISTED: as the job lists its operators and tables.
    """

    GAIN = "gain"
    SMALLEST = "smallest"
    LISTED = "listed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one compaction; None = unlimited.

    Attributes:
        size_bytes, files, tables: of the inputs of all merges together.
        merges: the number of merges; the others are left for later, as `merges_reason` says.

    Raises:
        InputError: a number below 1.
    """

    size_bytes: Annotated[
        int | None,
        Setting(
            option="max-mb",
            config="max_mb",
            scale=MEBIBYTE,
            minimum=1,
            help="Budget: read at most this many MiB.",
        ),
    ] = None
    files: Annotated[
        int | None,
        Setting(
            option="max-files",
            config="max_files",
            minimum=1,
            help="Budget: merge at most this many files.",
        ),
    ] = None
    tables: Annotated[
        int | None,
        Setting(
            option="max-tables",
            config="max_tables",
            minimum=1,
            help="Budget: merge files of at most this many tables.",
        ),
    ] = None
    order: Annotated[
        MergeOrder,
        Setting(help="Which merges to run first within a budget: gain, smallest or listed."),
    ] = MergeOrder.GAIN
    min_gain_files: Annotated[
        int,
        Setting(
            option="min-gain", minimum=1, help="Skip a merge that removes fewer files than this."
        ),
    ] = 1
    merges: int | None = None
    merges_reason: str = "over the budget of merges"

    def __post_init__(self) -> None:
        for name in ("size_bytes", "files", "tables", "min_gain_files", "merges"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError("a budget is at least 1, or None for no bound", **{name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """Which files to merge, and the form of the merged files.

    Attributes:
        target_bytes: a merged file is closed at the latest when it has twice this size.
        small_share: a file below this share of the target is small.
        min_files: the minimum number of never merged files in a bin-pack merge; they must also be
            at least as many as the merged ones, so that merged files are not merged again at once.
        max_checkpoint_slowdown: once checkpoints of a running job take more than this many times as
            long as before, no further merge is started, and the next run starts with one merge.
        memory_bytes: the decoded bytes of rows that a merge keeps in memory. A merge that needs all
            rows of a key range at once splits the range accordingly.
        part_bytes: a larger merge is split: by files, or by key range where all rows of a key are
            needed at once.

    Raises:
        InputError: a number is out of its range.
    """

    policy: Annotated[
        CompactionPolicy,
        Setting(
            help="bin-pack: merge small neighbouring files. levels: merge {level_files} files of "
            "one level into one of the next. window: merge the files of one window of event time. "
            "full: merge all files of every table. Arroyo jobs support bin-pack and full; the "
            "other policies act as bin-pack.",
        ),
    ] = CompactionPolicy.BIN_PACK
    target_bytes: Annotated[
        int,
        Setting(
            option="target-mb",
            config="target_file_mb",
            scale=MEBIBYTE,
            minimum=1,
            help="With bin-pack, merge files up to a total of this many MiB.",
        ),
    ] = 64 * MEBIBYTE
    small_share: float = 0.75
    min_files: Annotated[
        int,
        Setting(
            minimum=2,
            help="With bin-pack, merge only if at least this many files have never been merged.",
        ),
    ] = 4
    level_files: Annotated[
        int,
        Setting(minimum=2, help="With levels, merge this many neighbouring files of one level."),
    ] = 4
    window_micros: Annotated[
        int | None,
        Setting(
            option="window-seconds",
            config="window_seconds",
            scale=1_000_000,
            fractions=True,
            above=0,
            help="With window, the length of a window in seconds. Default: an eighth of the "
            "table's retention.",
        ),
    ] = None
    parallelism: Annotated[
        int | None,
        Setting(
            minimum=1,
            maximum=MOST_SUBTASKS,
            help="Split files for a restart with this parallelism.",
        ),
    ] = None
    sort: Annotated[
        SortOrder,
        Setting(
            help="Order of rows of expiring tables: replay (as they are), time, or key (with "
            "Bloom filters). Files of Arroyo jobs are always sorted by time.",
        ),
    ] = SortOrder.REPLAY
    deduplicate: Annotated[
        bool,
        Setting(
            option="keep-generations",
            help="Drop rows of generational tables that a newer row generation hides.",
            off="Keep rows of generational tables that a newer row generation hides.",
        ),
    ] = True
    budget: Budget = Budget()
    max_checkpoint_slowdown: Annotated[float, SLOWDOWN_SETTING] = MAX_CHECKPOINT_SLOWDOWN
    memory_bytes: int = 64 * MEBIBYTE
    part_bytes: int = 256 * MEBIBYTE

    def __post_init__(self) -> None:
        if self.target_bytes < 1 or not 0 < self.small_share <= 1 or self.min_files < 2:
            raise InputError(
                "compaction needs target_bytes >= 1, 0 < small_share <= 1 and min_files >= 2",
                target_bytes=self.target_bytes,
                small_share=self.small_share,
                min_files=self.min_files,
            )
        least = {"level_files": 2, "window_micros": 1, "memory_bytes": 1, "part_bytes": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise InputError(f"{name} is at least {smallest}", **{name: value})
        if self.max_checkpoint_slowdown <= 1:
            raise InputError(
                "max_checkpoint_slowdown is above 1",
                max_checkpoint_slowdown=self.max_checkpoint_slowdown,
            )
        if self.parallelism is not None:
            key_range_size(self.parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionSettings:
    """How long a compaction waits for the writer of a running job.

    Attributes:
        wait_seconds: until the writer has adopted the merged files; 0 = do not wait.
    """

    wait_seconds: Annotated[
        float,
        Setting(
            option="wait",
            fractions=True,
            minimum=0,
            metavar="SECONDS",
            help="How many seconds to wait for a running job to adopt the merged files.",
        ),
    ] = 0.0


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file of a plan, as it was when the plan was made.

    Attributes:
        stamp: its etag, or else its modification time; changes whenever the object does. None if
            it was not requested from the store.
    """

    path: StatePath
    size_bytes: int
    stamp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """The form of the files that a merge writes.

    Attributes:
        file_bytes: a file is closed once it has this size.
        row_group_rows: the maximum number of rows in a row group.
        memory_bytes: the decoded bytes of rows kept in memory.
    """

    sort: SortOrder = SortOrder.REPLAY
    file_bytes: int = 128 * MEBIBYTE
    row_group_rows: int = 1 << 19
    memory_bytes: int = 64 * MEBIBYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsMerge:
    """Files of a global keyed table to merge.

    Attributes:
        inputs: neighbours in replay order.
        from_oldest: no older files are listed before them, so removals may be dropped.
        sizes: of the inputs, in their order; empty if unknown.
        level: how many times the outputs will have been merged.
    """

    operator: OperatorId
    table: TableName
    inputs: tuple[StatePath, ...]
    size_bytes: int
    from_oldest: bool
    sizes: tuple[int, ...] = ()
    level: int = 1

    @property
    def paths(self) -> tuple[StatePath, ...]:
        return self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMerge:
    """Files of an expiring table to merge, completely or only the rows in some key ranges.

    Attributes:
        inputs: neighbours in the replay order of their key ranges.
        ranges: one output file is written for each; together they contain every row, unless this
            is one shard of several.
        cutoff_micros: rows older than this are dropped, as in a restore; 0 = none.
        from_oldest: no older files of these ranges are listed, so that deletes may be applied.
        sizes: of the inputs, in their order; empty if unknown.
        level: how many times the outputs will have been merged.
        parallelism: of the subtasks that own the ranges; None = the operator's own.
    """

    operator: OperatorId
    table: TableName
    inputs: tuple[TimeFile, ...]
    ranges: tuple[KeyRange, ...]
    cutoff_micros: int
    size_bytes: int
    from_oldest: bool
    sizes: tuple[int, ...] = ()
    level: int = 1
    parallelism: int | None = None
    generations: Generations = Generations.ALL
    form: OutputForm = OutputForm()

    @property
    def paths(self) -> tuple[StatePath, ...]:
        return tuple(file.path for file in self.inputs)


Merge = PairsMerge | RowsMerge


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Files that are not merged, and the reason.

    Attributes:
        operator, table: None if the reason applies to the whole job.
        files: empty if the reason applies to the whole table.
    """

    operator: OperatorId | None = None
    table: TableName | None = None
    reason: str
    files: tuple[StatePath, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a restore reads.

    Attributes:
        files, size_bytes: each file counted once.
        opens: for each subtask the number of files it opens, over all operators.
        read_bytes: for each subtask the total size of these files.
    """

    files: int = 0
    size_bytes: int = 0
    opens: tuple[int, ...] = ()
    read_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """What to merge at one epoch of a job.

    Attributes:
        ref: the checkpoint that was inspected.
        pending: the number of compactions not yet adopted; the plan counts them as done.
        inputs: the input files of all merges.
        before, after: what a restore reads at that epoch now, and at most after the compaction.
        parallelism: of the forecast restore; None = each operator's own.
    """

    pipeline: PipelineId | None
    job: JobId
    epoch: Epoch
    ref: StatePath
    policy: CompactionPolicy = CompactionPolicy.BIN_PACK
    merges: tuple[Merge, ...]
    inputs: tuple[InputFile, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    pending: int = 0
    before: Forecast = Forecast()
    after: Forecast = Forecast()
    parallelism: int | None = None

    @property
    def files_before(self) -> int:
        """The number of files that a restore reads at that epoch."""
        return self.before.files

    @property
    def files_after(self) -> int:
        """The maximum number of files that a restore reads after the compaction."""
        return self.after.files

    @property
    def size_bytes_before(self) -> int:
        """The number of bytes that a restore reads at that epoch."""
        return self.before.size_bytes


# ---- outcomes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPairs:
    """Merged files of a global keyed table, and their replacements with the same content."""

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

    @property
    def output_metadata(self) -> GlobalKeyedFiles:
        """The outputs in the form of the table's checkpoint metadata."""
        return GlobalKeyedFiles(files=self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRows:
    """Merged files of an expiring table, and their replacements with the same content."""

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

    @property
    def output_metadata(self) -> ExpiringTimeKeyFiles:
        """The outputs in the form of the table's checkpoint metadata."""
        return ExpiringTimeKeyFiles(files=self.outputs)


Merged = MergedPairs | MergedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRecord:
    """Merges that wait for the job's writer, which adopts them at its next checkpoint.

    The stored equivalent of Arroyo's `LoadCompactedData` message.

    Attributes:
        epoch: the epoch that was inspected.
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
    """Rows as a multiset, or in their order: how many, and the sum of hashes modulo 2**64.

    Digests of rows in their order are compared only if one process has made both.
    """

    rows: int = 0
    hash_sum: int = 0

    def __add__(self, other: RowsDigest) -> RowsDigest:
        return RowsDigest(self.rows + other.rows, (self.hash_sum + other.hash_sum) % 2**64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOutcome:
    """One merge, written and read back.

    Attributes:
        rows_in: rows in the inputs; pairs and removals of a global keyed table.
        rows_out: rows in the outputs.
        dropped: the number of rows that are in no output, by reason.
        before, after: what a restore would load from the inputs, and from the outputs read back.
        input_rows: the number of rows read from each input, in any key range.
    """

    merged: Merged
    rows_in: int
    rows_out: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    size_bytes_in: int = 0
    size_bytes_out: int = 0
    before: RowsDigest = RowsDigest()
    after: RowsDigest = RowsDigest()
    input_rows: Mapping[StatePath, int] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether a restore loads the same rows, and every row is accounted for."""
        kept = self.rows_in - sum(self.dropped.values())
        return self.before == self.after and kept == self.rows_out
