"""Checkpoints as values: what metadata objects and protocol records say, once decoded.

Times are microseconds since the Unix epoch. `unknown` holds the encoded fields that this release
does not know (of a JSON record: one object), so that re-encoding loses none of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.tables import (
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TableKind,
    TimeFile,
)

RECORD_VERSION = 1
ROLLBACK = "rollback"
"""The query id of an epoch that a rollback published. Its batch id is the epoch it restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamProgress:
    """Which micro-batch of which streaming query an epoch holds (ours; Arroyo ignores it).

    Attributes:
        offsets: JSON text of where the source stands behind this epoch.
        checkpoint_location: where the streaming engine keeps its own log; empty in process.
        final: the epoch was written with `then_stop`.
        exhausted: the source was bounded and had ended.
    """

    query_id: str
    batch_id: int
    offsets: str
    checkpoint_location: str = ""
    final: bool = False
    exhausted: bool = False
    unknown: bytes = b""

    @property
    def rolled_back_to(self) -> Epoch | None:
        """The epoch that a rollback restored; None for an epoch that no rollback published."""
        return Epoch(self.batch_id) if self.query_id == ROLLBACK else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalKeyedReport:
    """What one subtask wrote of a global keyed table since the last barrier; None = nothing."""

    file: StatePath | None = None
    removals: StatePath | None = None
    commit_data: bytes | None = None
    unknown: bytes = b""
    table_unknown: bytes = b""

    kind = TableKind.GLOBAL_KEYED

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """Removals first: a key removed and inserted since the last barrier is in `file` alone."""
        return tuple(path for path in (self.removals, self.file) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiringTimeKeyReport:
    """The files one subtask lists for an expiring table: carried forward, then new ones."""

    watermark_micros: int | None = None
    files: tuple[TimeFile, ...] = ()
    unknown: bytes = b""
    table_unknown: bytes = b""

    kind = TableKind.EXPIRING_TIME_KEY

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """The files it names, in replay order."""
        return tuple(file.path for file in self.files)


TableReport = GlobalKeyedReport | ExpiringTimeKeyReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskCheckpoint:
    """The report of one subtask at a barrier: "this subtask is done".

    Source: crates/arroyo-rpc/proto/rpc.proto, `SubtaskCheckpointMetadata`.
    """

    subtask_index: int
    start_time_micros: int
    finish_time_micros: int
    watermark_micros: int | None
    size_bytes: int
    tables: Mapping[TableName, TableReport] = field(default_factory=dict)
    configs: Mapping[TableName, TableConfig] = field(default_factory=dict)
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCheckpoint:
    """One operator at one epoch. `tables` and `configs` have the same keys.

    Attributes:
        epoch: becomes the flusher's epoch minus one at restore.
        min_watermark_micros, max_watermark_micros: over the subtasks; None if any had none.
        subtask: set in the object that one subtask wrote for itself.

    Source: crates/arroyo-rpc/proto/rpc.proto, `OperatorCheckpointMetadata`.
    """

    job: JobId
    operator: OperatorId
    epoch: Epoch
    parallelism: int
    min_watermark_micros: int | None = None
    max_watermark_micros: int | None = None
    start_time_micros: int = 0
    finish_time_micros: int = 0
    tables: Mapping[TableName, TableFiles] = field(default_factory=dict)
    configs: Mapping[TableName, TableConfig] = field(default_factory=dict)
    subtask: SubtaskCheckpoint | None = None
    unknown: bytes = b""
    operator_unknown: bytes = b""

    @property
    def needs_commit(self) -> bool:
        """By the flag of the tables, not by whether anybody left commit data.

        Source: crates/arroyo-worker/src/job_controller/checkpoint_state.rs.
        """
        return any(
            self.configs[name].uses_two_phase_commit for name in self.tables if name in self.configs
        )

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """Every data file that its tables list; one listed twice comes twice."""
        return tuple(path for files in self.tables.values() for path in files.paths)

    def commit_data(self) -> dict[TableName, Mapping[int, bytes]]:
        """Commit data by table, for every table of this operator that commits in two phases."""
        return {
            name: files.commit_data_by_subtask
            for name, files in self.tables.items()
            if isinstance(files, GlobalKeyedFiles)
            and name in self.configs
            and self.configs[name].uses_two_phase_commit
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyCheckpoint:
    """The checkpoint-level object of the legacy layout; operators lie in objects of their own."""

    job: JobId
    epoch: Epoch
    min_epoch: Epoch
    start_time_micros: int
    finish_time_micros: int
    operators: tuple[OperatorId, ...]
    progress: StreamProgress | None = None
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint of the protocol layout, all operators embedded.

    Source: crates/arroyo-rpc/proto/rpc.proto, `CheckpointManifest`.
    """

    pipeline: PipelineId
    job: JobId
    worker_generation: WorkerGeneration
    epoch: Epoch
    min_epoch: Epoch
    start_time_micros: int
    finish_time_micros: int
    needs_commit: bool
    operators: tuple[OperatorCheckpoint, ...]
    parent_ref: StatePath | None = None
    progress: StreamProgress | None = None
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One restorable epoch of a job, whichever layout it came from.

    Attributes:
        ref: the object that makes it exist.
        parent_ref: of the protocol layout; None for the first epoch of a job.
        worker_generation: None in the legacy layout.
        state: as known to the reader; legacy epochs with metadata count as ready.
        record_version: of its epoch record or commit marker, if one is not `RECORD_VERSION`.
    """

    pipeline: PipelineId | None
    job: JobId
    worker_generation: WorkerGeneration | None
    epoch: Epoch
    min_epoch: Epoch
    start_time_micros: int
    finish_time_micros: int
    state: CheckpointState
    operators: tuple[OperatorCheckpoint, ...]
    ref: StatePath
    parent_ref: StatePath | None = None
    progress: StreamProgress | None = None
    record_version: int = RECORD_VERSION

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """Every data file that its operators list; one listed twice comes twice."""
        return tuple(path for operator in self.operators for path in operator.paths)

    @property
    def needs_commit(self) -> bool:
        """Whether some table commits in two phases."""
        return any(operator.needs_commit for operator in self.operators)

    @property
    def rolled_back_to(self) -> Epoch | None:
        """As `StreamProgress.rolled_back_to`."""
        return None if self.progress is None else self.progress.rolled_back_to

    def operator(self, operator: str) -> OperatorCheckpoint | None:
        """One operator by its id; None if the epoch has no such operator."""
        return next((o for o in self.operators if o.operator == operator), None)


class CheckpointState(enum.Enum):
    """What the objects of a checkpoint add up to; see `planning.recovery.checkpoint_state`."""

    INVISIBLE = "invisible"
    UNCLAIMED = "unclaimed"
    ORPHANED = "orphaned"
    COMMITTING = "committing"
    READY = "ready"
    PARTIALLY_COLLECTED = "partially collected"
    """Some of what it lists is gone: a cleanup ran half way. See `planning.collected`."""
    ROLLED_BACK = "rolled back"
    """A rollback went back behind it: the newest epoch does not build on it."""

    @property
    def canonical(self) -> bool:
        """Whether the epoch belongs to this checkpoint."""
        return self in (CheckpointState.COMMITTING, CheckpointState.READY)


# ---- protocol records (JSON) ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentGeneration:
    """The fence: the newest worker generation that was started."""

    pipeline: PipelineId
    job: JobId
    worker_generation: WorkerGeneration
    generation_manifest_ref: StatePath
    updated_at_micros: int
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationManifest:
    """Where a worker generation started from, and a hint to what it published last."""

    pipeline: PipelineId
    job: JobId
    worker_generation: WorkerGeneration
    base_ref: StatePath | None
    latest_ref: StatePath | None
    updated_at_micros: int
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """The claim: which checkpoint owns an epoch. Alone gives ownership."""

    pipeline: PipelineId
    job: JobId
    epoch: Epoch
    worker_generation: WorkerGeneration
    parent_ref: StatePath | None
    checkpoint_ref: StatePath
    created_at_micros: int
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedMarker:
    """Both phases of an epoch's commit are done."""

    pipeline: PipelineId
    job: JobId
    epoch: Epoch
    checkpoint_worker_generation: WorkerGeneration
    writer_worker_generation: WorkerGeneration
    checkpoint_ref: StatePath
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNote:
    """Legacy layout, ours: both phases of the commit of one checkpoint are done.

    `finish_time_micros` is the checkpoint's: an epoch that is attempted again is another one.
    """

    job: JobId
    epoch: Epoch
    finish_time_micros: int
    version: int = RECORD_VERSION
