"""Compaction as values: how much to merge, what was planned, what came of it.

A merge takes files that lie side by side in the replay order of one table, and gives files that
hold the same in their place.
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
from arroyo_dagster.state.model.keys import KeyRange, key_range_size
from arroyo_dagster.state.model.settings import Setting
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, GlobalKeyedFiles, TimeFile

MEBIBYTE = 1 << 20


class CompactionPolicy(enum.Enum):
    """Which files of a table are merged.

    Attributes:
        BIN_PACK: neighbours smaller than a share of the target, until they fill it.
        LEVELS: so many neighbours of one level become one file of the next.
        WINDOW: of an expiring table, neighbours whose newest rows lie in one window of event time,
            so that what is old expires together.
        FULL: all of them.
    """

    BIN_PACK = "bin-pack"
    LEVELS = "levels"
    WINDOW = "window"
    FULL = "full"


class SortOrder(enum.Enum):
    """The order of the rows in a merged file of an expiring table.

    Attributes:
        REPLAY: as they were.
        TIME: by event time. Arroyo's window operators then split their batches less often.
        KEY: by routing key, with a Bloom filter over them: readers of few keys open less.
    """

    REPLAY = "replay"
    TIME = "time"
    KEY = "key"


class Generations(enum.Enum):
    """What a merge does to the row generations of a generational table.

    Attributes:
        ALL: keeps every one; also said of tables that have none.
        NEWEST: keeps of each storage key the newest, as a restore of Arroyo's would.
        NEWEST_AT_ANY_CUTOFF: keeps of each storage key those that are the newest now, or will be
            once younger ones have expired: in jobs of ours rows expire one by one.
    """

    ALL = "all"
    NEWEST = "newest"
    NEWEST_AT_ANY_CUTOFF = "newest at any cutoff"


class MergeOrder(enum.Enum):
    """Which merges come first where a budget does not last for all.

    Attributes:
        GAIN: the one after which the most files are gone for each byte that is read.
        SMALLEST: the one that reads the fewest bytes.
        LISTED: as the job lists its operators and tables.
    """

    GAIN = "gain"
    SMALLEST = "smallest"
    LISTED = "listed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much one compaction may take on; None = no bound.

    Attributes:
        size_bytes, files, tables: of the inputs of all merges together.

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

    def __post_init__(self) -> None:
        for name in ("size_bytes", "files", "tables", "min_gain_files"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError("a budget is at least 1, or None for no bound", **{name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """How much to merge, and what comes of it.

    Attributes:
        target_bytes: a merged file is closed at the latest when it has twice as many.
        small_share: a file below this share of the target is small.
        min_files: a bin-pack merge also takes at least as many files that were never merged as
            merged ones: what it gave is not taken up at once again.
        memory_bytes: how many bytes of rows a merge keeps in memory, decoded. What needs all rows
            of a key range at once takes the range in pieces of that size.
        part_bytes: a merge of more bytes is carried out in parts: by files, or by key range where
            all rows of a key are needed at once.

    Raises:
        InputError: a number out of its range.
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
        Setting(minimum=1, help="Split files for a restart with this parallelism."),
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
    """A file that a plan takes, as it was when the plan was made.

    Attributes:
        stamp: its etag, else when it was written; changes whenever the object does. None where
            nobody asked the store.
    """

    path: StatePath
    size_bytes: int
    stamp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """What the files of a merge look like.

    Attributes:
        file_bytes: a file is closed once it has so many.
        row_group_rows: at most so many rows in a row group.
        memory_bytes: rows kept in memory, decoded.
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
        from_oldest: nothing older is listed before them, so removals may disappear.
        sizes: of the inputs, in their order; empty where not known.
        level: how often what comes of it was merged.
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
    """Files of an expiring table to merge, or those of their rows that lie in some key ranges.

    Attributes:
        inputs: neighbours in the replay order of their key ranges.
        ranges: the key ranges to write a file of each; together they hold every row, unless this
            is one part of several.
        cutoff_micros: rows older than this are dropped, as a restore would; 0 = none.
        from_oldest: nothing older of these ranges is listed, so that deletes may be applied.
        sizes: of the inputs, in their order; empty where not known.
        level: how often what comes of it was merged.
        parallelism: whose key ranges these are; None = the operator's own.
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
    """Files that are not merged, and why.

    Attributes:
        operator, table: None for the whole job.
        files: none where the reason is the table's.
    """

    operator: OperatorId | None = None
    table: TableName | None = None
    reason: str
    files: tuple[StatePath, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a restore reads.

    Attributes:
        files, size_bytes: each file once.
        opens: of each subtask how often it opens a file, over all operators.
    """

    files: int = 0
    size_bytes: int = 0
    opens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """What to merge at one epoch of a job.

    Attributes:
        ref: the checkpoint that was looked at.
        pending: how many compactions wait to be taken over; the plan counts them as done.
        inputs: the files that the merges take.
        before, after: what a restore reads at that epoch, and the most that it would read once
            this is done.
        parallelism: of the restore that is forecast; None = each operator's own.
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
        """How many files a restore reads at that epoch."""
        return self.before.files

    @property
    def files_after(self) -> int:
        """How many it would read once this is done; the most there can be."""
        return self.after.files

    @property
    def size_bytes_before(self) -> int:
        """How many bytes these are."""
        return self.before.size_bytes


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

    @property
    def output_metadata(self) -> GlobalKeyedFiles:
        """The outputs as checkpoint metadata of the table lists them."""
        return GlobalKeyedFiles(files=self.outputs)


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

    @property
    def output_metadata(self) -> ExpiringTimeKeyFiles:
        """The outputs as checkpoint metadata of the table lists them."""
        return ExpiringTimeKeyFiles(files=self.outputs)


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
        input_rows: how many rows each input was found to have, whichever ranges they lie in.
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
        """Whether a restore loads the same, and every row is accounted for."""
        kept = self.rows_in - sum(self.dropped.values())
        return self.before == self.after and kept == self.rows_out
