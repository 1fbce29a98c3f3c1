"""Control messages that carry state: bytes to values and back, unknown fields kept at every level.

Source: crates/arroyo-rpc/proto/rpc.proto; `proto/state.proto` is our text of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from google.protobuf.message import Message

from arroyo_dagster.state.codec.metadata import files_from, files_to, subtask_from, subtask_to
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.codec.wire import decoded, encoded, fitting, unknown_of, with_unknown
from arroyo_dagster.state.model.control import (
    CheckpointCompleted,
    CheckpointEvent,
    CheckpointRequest,
    CommitRequest,
    CompactedLoaded,
    ControlMessage,
    JobCheckpoint,
    LoadCompacted,
    OperatorCommit,
    StartExecution,
    TableCommit,
    WorkerContext,
)
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)

_T = TypeVar("_T")


def encode_control(value: ControlMessage) -> bytes:
    """Encode a message: equal values give equal bytes.

    Raises:
        InputError: a number or a text that does not fit its field.
    """
    kind = _KINDS[type(value)]
    with fitting(kind=kind.message.DESCRIPTOR.name):
        return encoded(with_unknown(kind.encode(value), value.unknown))


def decode_control(kind: type[_T], data: bytes, name: str) -> _T:
    """Decode a message.

    Args:
        kind: which one: a class of `model.control`.
        name: what the bytes are called in errors.

    Raises:
        FormatError: it does not parse, or holds a reference that leads out of the checkpoint URL.
    """
    found = _KINDS[kind]
    return cast(_T, decoded(data, name, found.message, found.decode))


class _Kind(NamedTuple):
    message: type[Message]
    decode: Callable[[Any], ControlMessage]
    encode: Callable[[Any], Message]


# ---- who speaks ----------------------------------------------------------------------------------


def _context_from(message: Any) -> WorkerContext | None:
    if not message.HasField("worker_context"):
        return None
    found = message.worker_context
    return WorkerContext(
        machine=found.machine_id,
        worker=found.worker_id,
        job=JobId(found.job_id),
        worker_generation=WorkerGeneration(found.generation),
        pipeline=PipelineId(found.pipeline_id),
        unknown=unknown_of(found),
    )


def _context_to(value: WorkerContext | None) -> pb.WorkerContext | None:
    if value is None:
        return None
    message = pb.WorkerContext(
        machine_id=value.machine,
        worker_id=value.worker,
        job_id=value.job,
        generation=value.worker_generation,
        pipeline_id=value.pipeline,
    )
    return with_unknown(message, value.unknown)


# ---- merged files --------------------------------------------------------------------------------


def _load_from(message: pb.LoadCompactedDataReq) -> LoadCompacted:
    return LoadCompacted(
        operator=OperatorId(message.operator_id),
        tables={
            TableName(name): files_from(name, table)
            for name, table in sorted(message.compacted_metadata.items())
        },
        node=message.node_id if message.HasField("node_id") else None,
        unknown=unknown_of(message),
    )


def _load_to(value: LoadCompacted) -> pb.LoadCompactedDataReq:
    return pb.LoadCompactedDataReq(
        operator_id=value.operator,
        compacted_metadata={name: files_to(files) for name, files in value.tables.items()},
        node_id=value.node,
    )


def _loaded_from(message: pb.LoadCompactedDataRes) -> CompactedLoaded:
    return CompactedLoaded(unknown=unknown_of(message))


def _loaded_to(_: CompactedLoaded) -> pb.LoadCompactedDataRes:
    return pb.LoadCompactedDataRes()


# ---- barriers and commits ------------------------------------------------------------------------


def _request_from(message: pb.CheckpointReq) -> CheckpointRequest:
    return CheckpointRequest(
        epoch=Epoch(message.epoch),
        min_epoch=Epoch(message.min_epoch),
        timestamp_micros=message.timestamp,
        then_stop=message.then_stop,
        is_commit=message.is_commit,
        unknown=unknown_of(message),
    )


def _request_to(value: CheckpointRequest) -> pb.CheckpointReq:
    return pb.CheckpointReq(
        epoch=value.epoch,
        min_epoch=value.min_epoch,
        timestamp=value.timestamp_micros,
        then_stop=value.then_stop,
        is_commit=value.is_commit,
    )


def _commit_from(message: pb.CommitReq) -> CommitRequest:
    return CommitRequest(
        epoch=Epoch(message.epoch),
        operators={
            OperatorId(name): _operator_commit_from(operator)
            for name, operator in sorted(message.committing_data.items())
        },
        unknown=unknown_of(message),
    )


def _operator_commit_from(message: pb.OperatorCommitData) -> OperatorCommit:
    tables = {
        TableName(name): TableCommit(
            data_by_subtask=dict(sorted(table.commit_data_by_subtask.items())),
            unknown=unknown_of(table),
        )
        for name, table in sorted(message.committing_data.items())
    }
    return OperatorCommit(tables=tables, unknown=unknown_of(message))


def _commit_to(value: CommitRequest) -> pb.CommitReq:
    return pb.CommitReq(
        epoch=value.epoch,
        committing_data={
            name: _operator_commit_to(operator) for name, operator in value.operators.items()
        },
    )


def _operator_commit_to(value: OperatorCommit) -> pb.OperatorCommitData:
    tables: dict[str, pb.TableCommitData] = {
        name: with_unknown(
            pb.TableCommitData(commit_data_by_subtask=table.data_by_subtask), table.unknown
        )
        for name, table in value.tables.items()
    }
    return with_unknown(pb.OperatorCommitData(committing_data=tables), value.unknown)


# ---- starting a worker ---------------------------------------------------------------------------


def _start_from(message: pb.StartExecutionReq) -> StartExecution:
    given = {
        name: getattr(message, name)
        for name in ("program", "restore_epoch", "job_controller_addr", "checkpoint_manifest_ref")
        if message.HasField(name)
    }
    restore = given.get("restore_epoch")
    ref = given.get("checkpoint_manifest_ref")
    return StartExecution(
        program=given.get("program"),
        restore_epoch=None if restore is None else Epoch(restore),
        tasks=tuple(message.tasks),
        job_controller_address=given.get("job_controller_addr"),
        is_leader=message.is_leader,
        start_epoch=Epoch(message.start_epoch),
        min_epoch=Epoch(message.min_epoch),
        wait_for_leader=message.wait_for_leader,
        checkpoint_interval_micros=message.checkpoint_interval_micros,
        manifest_ref=None if ref is None else StatePath(ref),
        unknown=unknown_of(message),
    )


def _start_to(value: StartExecution) -> pb.StartExecutionReq:
    return pb.StartExecutionReq(
        program=value.program,
        restore_epoch=value.restore_epoch,
        tasks=value.tasks,
        job_controller_addr=value.job_controller_address,
        is_leader=value.is_leader,
        start_epoch=value.start_epoch,
        min_epoch=value.min_epoch,
        wait_for_leader=value.wait_for_leader,
        checkpoint_interval_micros=value.checkpoint_interval_micros,
        checkpoint_manifest_ref=value.manifest_ref,
    )


# ---- what subtasks report ------------------------------------------------------------------------


def _event_from(message: pb.TaskCheckpointEventReq) -> CheckpointEvent:
    return CheckpointEvent(
        context=_context_from(message),
        time_micros=message.time,
        operator=OperatorId(message.operator_id),
        subtask_index=message.subtask_idx,
        epoch=Epoch(message.epoch),
        step=message.event_type,
        unknown=unknown_of(message),
    )


def _event_to(value: CheckpointEvent) -> pb.TaskCheckpointEventReq:
    return pb.TaskCheckpointEventReq(
        worker_context=_context_to(value.context),
        time=value.time_micros,
        operator_id=value.operator,
        subtask_idx=value.subtask_index,
        epoch=value.epoch,
        event_type=pb.TaskCheckpointEventType.ValueType(value.step),
    )


def _completed_from(message: pb.TaskCheckpointCompletedReq) -> CheckpointCompleted:
    return CheckpointCompleted(
        context=_context_from(message),
        time_micros=message.time,
        operator=OperatorId(message.operator_id),
        epoch=Epoch(message.epoch),
        subtask=subtask_from(message.metadata) if message.HasField("metadata") else None,
        needs_commit=message.needs_commit,
        unknown=unknown_of(message),
    )


def _completed_to(value: CheckpointCompleted) -> pb.TaskCheckpointCompletedReq:
    return pb.TaskCheckpointCompletedReq(
        worker_context=_context_to(value.context),
        time=value.time_micros,
        operator_id=value.operator,
        epoch=value.epoch,
        metadata=None if value.subtask is None else subtask_to(value.subtask),
        needs_commit=value.needs_commit,
    )


def _listed_from(message: pb.JobCheckpointMetadata) -> JobCheckpoint:
    return JobCheckpoint(
        epoch=Epoch(message.epoch),
        backend=message.state_backend,
        start_time_micros=message.start_time,
        finish_time_micros=message.finish_time if message.HasField("finish_time") else None,
        event_spans=tuple(message.event_spans),
        is_stopping=message.is_stopping,
        unknown=unknown_of(message),
    )


def _listed_to(value: JobCheckpoint) -> pb.JobCheckpointMetadata:
    return pb.JobCheckpointMetadata(
        epoch=value.epoch,
        state_backend=value.backend,
        start_time=value.start_time_micros,
        finish_time=value.finish_time_micros,
        event_spans=value.event_spans,
        is_stopping=value.is_stopping,
    )


_KINDS: dict[type[Any], _Kind] = {
    LoadCompacted: _Kind(pb.LoadCompactedDataReq, _load_from, _load_to),
    CompactedLoaded: _Kind(pb.LoadCompactedDataRes, _loaded_from, _loaded_to),
    CheckpointRequest: _Kind(pb.CheckpointReq, _request_from, _request_to),
    CommitRequest: _Kind(pb.CommitReq, _commit_from, _commit_to),
    StartExecution: _Kind(pb.StartExecutionReq, _start_from, _start_to),
    CheckpointEvent: _Kind(pb.TaskCheckpointEventReq, _event_from, _event_to),
    CheckpointCompleted: _Kind(pb.TaskCheckpointCompletedReq, _completed_from, _completed_to),
    JobCheckpoint: _Kind(pb.JobCheckpointMetadata, _listed_from, _listed_to),
}
