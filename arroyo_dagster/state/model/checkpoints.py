"""Checkpoints as values: the decoded metadata objects and protocol records.

Times are microseconds since the Unix epoch. `unknown` contains the encoded fields that this release
does not know (of a JSON record: one object), so that re-encoding preserves them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.json_fields import JsonName
from arroyo_dagster.state.model.tables import (
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TableKind,
    TimeFile,
)

RECORD_VERSION = 1
OFFSETS = "offsets"  # the table of a managed job's source: how far it has read
CONTENT = "_content"
"""The member of a source's offset that is no position: it identifies the rows that were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far the sources of a managed job are at an epoch. Arroyo ignores it.

    Attributes:
        offsets: JSON text of the sources' offsets after this epoch.
        final: whether the epoch was written with `then_stop`.
        exhausted: whether the sources were bounded and had ended.
        rolled_back_to: the epoch that a rollback restored; None for an epoch that no rollback
            published.
        revises: the epoch before, of which a user's command removed, renamed or converted tables;
            None for an epoch that no such command published.
        dropped: operators, and tables as `operator/table`, that older epochs list and this one does
            not, because a start renamed them or left them behind on purpose; sorted. Later epochs
            repeat the names until the pipeline has such an operator or table again.
    """

    offsets: str
    final: bool = False
    exhausted: bool = False
    rolled_back_to: Epoch | None = None
    revises: Epoch | None = None
    dropped: tuple[str, ...] = ()
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalKeyedReport:
    """What one subtask wrote to a global keyed table since the last barrier; None = nothing."""

    file: StatePath | None = None
    removals: StatePath | None = None
    commit_data: bytes | None = None
    unknown: bytes = b""
    table_unknown: bytes = b""

    kind = TableKind.GLOBAL_KEYED

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """Removals first: a key removed and inserted since the last barrier is in `file` only."""
        return tuple(path for path in (self.removals, self.file) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiringTimeKeyReport:
    """The files one subtask lists for an expiring table: carried forward ones, then new ones."""

    watermark_micros: int | None = None
    files: tuple[TimeFile, ...] = ()
    unknown: bytes = b""
    table_unknown: bytes = b""

    kind = TableKind.EXPIRING_TIME_KEY

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """The files it lists, in replay order."""
        return tuple(file.path for file in self.files)


TableReport = GlobalKeyedReport | ExpiringTimeKeyReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskCheckpoint:
    """The report of one subtask at a barrier; it declares the subtask's checkpoint finished.

    Attributes:
        next_alarm_micros: when the engine's clock makes the next of its timers due, or a time
            before; None = it has none. Not stored.
        epoch_report: what `Operator.epoch_report` returned. Not stored.

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
    next_alarm_micros: int | None = None
    epoch_report: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCheckpoint:
    """One operator at one epoch. `tables` and `configs` have the same keys.

    Attributes:
        epoch: becomes the flusher's epoch minus one at restore.
        min_watermark_micros, max_watermark_micros: over the subtasks; None if any had none.
        subtask: the report of one subtask, in its own object; None in merged metadata.

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
        """Whether any table's configuration says so; independent of existing commit data.

        Source: crates/arroyo-worker/src/job_controller/checkpoint_state.rs.
        """
        return any(
            self.configs[name].uses_two_phase_commit for name in self.tables if name in self.configs
        )

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """Every data file that its tables list; a file listed twice occurs twice."""
        return tuple(path for files in self.tables.values() for path in files.paths)

    def commit_data(self) -> dict[TableName, Mapping[int, bytes]]:
        """Return commit data by table, for every table of this operator with a two-phase commit."""
        return {
            name: files.commit_data_by_subtask
            for name, files in self.tables.items()
            if isinstance(files, GlobalKeyedFiles)
            and name in self.configs
            and self.configs[name].uses_two_phase_commit
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyCheckpoint:
    """The checkpoint-level object of the legacy layout; operators have objects of their own."""

    job: JobId
    epoch: Epoch
    min_epoch: Epoch
    start_time_micros: int
    finish_time_micros: int
    operators: tuple[OperatorId, ...]
    progress: RunProgress | None = None
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint of the protocol layout, with all operators embedded.

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
    progress: RunProgress | None = None
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One restorable epoch of a job, in either layout.

    Attributes:
        ref: the object that makes it exist.
        parent_ref: of the protocol layout; None for the first epoch of a job.
        worker_generation: None in the legacy layout.
        state: as far as the reader knows; legacy epochs with metadata count as ready.
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
    progress: RunProgress | None = None
    record_version: int = RECORD_VERSION

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """Every data file that its operators list; a file listed twice occurs twice."""
        return tuple(path for operator in self.operators for path in operator.paths)

    @property
    def needs_commit(self) -> bool:
        """Whether some table commits in two phases."""
        return any(operator.needs_commit for operator in self.operators)

    @property
    def rolled_back_to(self) -> Epoch | None:
        """Same as `RunProgress.rolled_back_to`."""
        return None if self.progress is None else self.progress.rolled_back_to

    def operator(self, operator: str) -> OperatorCheckpoint | None:
        """Return one operator by its id; None if the epoch has no such operator."""
        return next((o for o in self.operators if o.operator == operator), None)


class CheckpointState(enum.Enum):
    """The state of a checkpoint, derived from its objects; see `recovery.checkpoint_state`."""

    INVISIBLE = "invisible"
    UNCLAIMED = "unclaimed"
    ORPHANED = "orphaned"
    COMMITTING = "committing"
    READY = "ready"
    PARTIALLY_COLLECTED = "partially collected"
    """Some objects it lists are missing: a cleanup was interrupted. See `partially_collected`."""
    METADATA_ONLY = "metadata only"
    """It expired; its metadata stays for the epoch that follows it. See `metadata_only`."""
    ROLLED_BACK = "rolled back"
    """A rollback restored an older epoch: the newest epoch does not build on this one."""

    @property
    def canonical(self) -> bool:
        """Whether this checkpoint owns its epoch."""
        return self in (CheckpointState.COMMITTING, CheckpointState.READY)


@dataclass(frozen=True, slots=True)
class LostObject:
    """A metadata object that is missing, damaged, or does not name all that it must.

    Attributes:
        reason: what is wrong with it, without its path.
        operator: the operator that it should name; None if something else is wrong.
    """

    epoch: Epoch
    path: StatePath
    reason: str
    operator: OperatorId | None = None


# ---- protocol records (JSON) ---------------------------------------------------------------------

_Pipeline = Annotated[PipelineId, JsonName("pipeline_id")]
_Job = Annotated[JobId, JsonName("job_id")]
_Generation = Annotated[WorkerGeneration, JsonName("generation")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentGeneration:
    """The fence: the newest worker generation that was started."""

    pipeline: _Pipeline
    job: _Job
    worker_generation: _Generation
    generation_manifest_ref: StatePath
    updated_at_micros: int
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationManifest:
    """The start of a worker generation, and a hint to its latest published checkpoint."""

    pipeline: _Pipeline
    job: _Job
    worker_generation: _Generation
    base_ref: Annotated[StatePath | None, JsonName("base_checkpoint_ref")]
    latest_ref: Annotated[StatePath | None, JsonName("latest_checkpoint_ref")]
    updated_at_micros: int
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """The claim: which checkpoint owns an epoch. Only this record decides ownership."""

    pipeline: _Pipeline
    job: _Job
    epoch: Epoch
    worker_generation: _Generation
    parent_ref: Annotated[StatePath | None, JsonName("parent_checkpoint_ref")]
    checkpoint_ref: StatePath
    created_at_micros: int
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedMarker:
    """The commit of an epoch is finished in both phases."""

    pipeline: _Pipeline
    job: _Job
    epoch: Epoch
    checkpoint_worker_generation: Annotated[WorkerGeneration, JsonName("checkpoint_generation")]
    writer_worker_generation: Annotated[WorkerGeneration, JsonName("writer_generation")]
    checkpoint_ref: StatePath
    version: int = RECORD_VERSION
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNote:
    """Commit note of a managed job in the legacy layout: one checkpoint's commit is finished.

    `finish_time_micros` is the checkpoint's: another attempt at the epoch is another checkpoint.
    """

    job: _Job
    epoch: Epoch
    finish_time_micros: int
    version: int = RECORD_VERSION
