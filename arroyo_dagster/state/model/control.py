"""What Arroyo's coordinator and workers tell each other about state, as values.

Times are microseconds since the Unix epoch. `unknown` holds the encoded fields that this release
does not know. Never stored by Arroyo: they are read where somebody recorded them, and written to
talk to a worker.

Source: crates/arroyo-rpc/proto/rpc.proto.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.state.model.checkpoints import SubtaskCheckpoint
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.tables import TableFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Which worker of which run speaks."""

    machine: str
    worker: int
    job: JobId
    worker_generation: WorkerGeneration
    pipeline: PipelineId
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCompacted:
    """`LoadCompactedDataReq`: files that were merged, for a worker's next barrier.

    Attributes:
        tables: of each table, the whole new list.
        node: sent by v0.13 to v0.15 only.
    """

    operator: OperatorId
    tables: Mapping[TableName, TableFiles]
    node: int | None = None
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedLoaded:
    """`LoadCompactedDataRes`: a worker has taken merged files over. It says nothing else."""

    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """`CheckpointReq`: put a barrier into the sources, or commit."""

    epoch: Epoch
    min_epoch: Epoch
    timestamp_micros: int
    then_stop: bool = False
    is_commit: bool = False
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCommit:
    """What each subtask left for the second phase of one table's commit."""

    data_by_subtask: Mapping[int, bytes] = field(default_factory=dict)
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommit:
    """The commits of the tables of one operator."""

    tables: Mapping[TableName, TableCommit] = field(default_factory=dict)
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """`CommitReq`: do the second phase of an epoch's commit."""

    epoch: Epoch
    operators: Mapping[OperatorId, OperatorCommit] = field(default_factory=dict)
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartExecution:
    """`StartExecutionReq`: what a worker is started with.

    Attributes:
        program, tasks: encoded as they came; they are no state.
        restore_epoch: legacy layout; None = without state.
        manifest_ref: protocol layout; None = without state.
        wait_for_leader, is_leader: either makes the worker use the protocol layout.
    """

    program: bytes | None = None
    restore_epoch: Epoch | None = None
    tasks: tuple[bytes, ...] = ()
    job_controller_address: str | None = None
    is_leader: bool = False
    start_epoch: Epoch
    min_epoch: Epoch
    wait_for_leader: bool = False
    checkpoint_interval_micros: int = 0
    manifest_ref: StatePath | None = None
    unknown: bytes = b""


class CheckpointStep(enum.IntEnum):
    """How far a subtask is with a checkpoint."""

    STARTED_ALIGNMENT = 0
    STARTED_CHECKPOINTING = 1
    FINISHED_OPERATOR_SETUP = 2
    FINISHED_SYNC = 3
    FINISHED_COMMIT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent:
    """`TaskCheckpointEventReq`: a subtask has come a step further. `step` is a `CheckpointStep`,
    or the number of one that this release does not know."""

    context: WorkerContext | None
    time_micros: int
    operator: OperatorId
    subtask_index: int
    epoch: Epoch
    step: int
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCompleted:
    """`TaskCheckpointCompletedReq`: a subtask has written its part of a checkpoint."""

    context: WorkerContext | None
    time_micros: int
    operator: OperatorId
    epoch: Epoch
    subtask: SubtaskCheckpoint | None
    needs_commit: bool = False
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpoint:
    """`JobCheckpointMetadata`: a checkpoint as a leader lists it.

    Attributes:
        finish_time_micros: None while it is not finished.
        event_spans: encoded as they came.
    """

    epoch: Epoch
    backend: str
    start_time_micros: int
    finish_time_micros: int | None = None
    event_spans: tuple[bytes, ...] = ()
    is_stopping: bool = False
    unknown: bytes = b""


ControlMessage = (
    LoadCompacted
    | CompactedLoaded
    | CheckpointRequest
    | CommitRequest
    | StartExecution
    | CheckpointEvent
    | CheckpointCompleted
    | JobCheckpoint
)
