"""The messages about state between Arroyo's coordinator and workers: values, and their bytes.

Arroyo never stores these messages: they are read from recordings, and written to communicate with a
worker. Times are microseconds since 1970. `unknown` contains the encoded fields that this release
does not know, at every level; encoding writes them again.

Source: crates/arroyo-rpc/proto/rpc.proto; `proto/state.proto` is our copy of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from google.protobuf.message import Message

from arroyo_dagster.state.codec.metadata import files_from, files_to, subtask_from, subtask_to
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.codec.wire import decoded, encoded, fitting, unknown_of, with_unknown
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

_T = TypeVar("_T")


class _At(NamedTuple):
    """The message field of a value, and the conversions from and to it."""

    name: str
    read: Callable[[Any], Any] = lambda found: found
    write: Callable[[Any], Any] = lambda value: value


def _messages(kind: str) -> _At:
    return _At(
        "committing_data",
        lambda found: {key: _decode(_KINDS[kind], one) for key, one in sorted(found.items())},
        lambda value: {key: _encode(one) for key, one in value.items()},
    )


_CONTEXT = _At(
    "worker_context",
    lambda found: _decode(WorkerContext, found),
    lambda value: _encode(value),
)
_FILES = _At(
    "compacted_metadata",
    lambda found: {name: files_from(name, table) for name, table in sorted(found.items())},
    lambda value: {name: files_to(files) for name, files in value.items()},
)
_COMMITS = _At("commit_data_by_subtask", lambda found: dict(sorted(found.items())))
_TABLES, _OPERATORS = _messages("TableCommit"), _messages("OperatorCommit")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker, and its run, that sent a message."""

    machine: Annotated[str, _At("machine_id")]
    worker: Annotated[int, _At("worker_id")]
    job: Annotated[JobId, _At("job_id")]
    worker_generation: Annotated[WorkerGeneration, _At("generation")]
    pipeline: Annotated[PipelineId, _At("pipeline_id")]
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCompacted:
    """`LoadCompactedDataReq`: merged files, for a worker's next barrier.

    Attributes:
        tables: for each table the complete new list of files.
        node: sent by v0.13 to v0.15 only.
    """

    operator: Annotated[OperatorId, _At("operator_id")]
    tables: Annotated[Mapping[TableName, TableFiles], _FILES]
    node: Annotated[int | None, _At("node_id")] = None
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedLoaded:
    """`LoadCompactedDataRes`: a worker has adopted merged files. The message has no fields."""

    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """`CheckpointReq`: inject a barrier into the sources, or commit."""

    epoch: Epoch
    min_epoch: Epoch
    timestamp_micros: Annotated[int, _At("timestamp")]
    then_stop: bool = False
    is_commit: bool = False
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCommit:
    """The commit data of each subtask for the second phase of one table's commit."""

    data_by_subtask: Annotated[Mapping[int, bytes], _COMMITS] = field(default_factory=dict)
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommit:
    """The commits of the tables of one operator."""

    tables: Annotated[Mapping[TableName, TableCommit], _TABLES] = field(default_factory=dict)
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """`CommitReq`: execute the second phase of an epoch's commit."""

    epoch: Epoch
    operators: Annotated[Mapping[OperatorId, OperatorCommit], _OPERATORS] = field(
        default_factory=dict
    )
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartExecution:
    """`StartExecutionReq`: the start of a worker.

    Attributes:
        program, tasks: kept encoded, since they are not state.
        restore_epoch: legacy layout; None = without state.
        manifest_ref: protocol layout; None = without state.
        wait_for_leader, is_leader: either makes the worker use the protocol layout.
    """

    program: bytes | None = None
    restore_epoch: Epoch | None = None
    tasks: Annotated[tuple[bytes, ...], _At("tasks", tuple)] = ()
    job_controller_address: Annotated[str | None, _At("job_controller_addr")] = None
    is_leader: bool = False
    start_epoch: Epoch
    min_epoch: Epoch
    wait_for_leader: bool = False
    checkpoint_interval_micros: int = 0
    manifest_ref: Annotated[StatePath | None, _At("checkpoint_manifest_ref", StatePath)] = None
    unknown: bytes = b""


class CheckpointStep(enum.IntEnum):
    """The progress of a subtask with a checkpoint."""

    STARTED_ALIGNMENT = 0
    STARTED_CHECKPOINTING = 1
    FINISHED_OPERATOR_SETUP = 2
    FINISHED_SYNC = 3
    FINISHED_COMMIT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent:
    """`TaskCheckpointEventReq`: a subtask has reached a step. `step` is a `CheckpointStep`, or the
    number of a step that this release does not know."""

    context: Annotated[WorkerContext | None, _CONTEXT]
    time_micros: Annotated[int, _At("time")]
    operator: Annotated[OperatorId, _At("operator_id")]
    subtask_index: Annotated[int, _At("subtask_idx")]
    epoch: Epoch
    step: Annotated[int, _At("event_type")]
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCompleted:
    """`TaskCheckpointCompletedReq`: a subtask has written its part of a checkpoint."""

    context: Annotated[WorkerContext | None, _CONTEXT]
    time_micros: Annotated[int, _At("time")]
    operator: Annotated[OperatorId, _At("operator_id")]
    epoch: Epoch
    subtask: Annotated[SubtaskCheckpoint | None, _At("metadata", subtask_from, subtask_to)]
    needs_commit: bool = False
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpoint:
    """`JobCheckpointMetadata`: a checkpoint in a leader's list.

    Attributes:
        finish_time_micros: None while it is not finished.
        event_spans: kept encoded.
    """

    epoch: Epoch
    backend: Annotated[str, _At("state_backend")]
    start_time_micros: Annotated[int, _At("start_time")]
    finish_time_micros: Annotated[int | None, _At("finish_time")] = None
    event_spans: Annotated[tuple[bytes, ...], _At("event_spans", tuple)] = ()
    is_stopping: bool = False
    unknown: bytes = b""


_MESSAGES: dict[type[Any], type[Message]] = {
    WorkerContext: pb.WorkerContext,
    LoadCompacted: pb.LoadCompactedDataReq,
    CompactedLoaded: pb.LoadCompactedDataRes,
    CheckpointRequest: pb.CheckpointReq,
    TableCommit: pb.TableCommitData,
    OperatorCommit: pb.OperatorCommitData,
    CommitRequest: pb.CommitReq,
    StartExecution: pb.StartExecutionReq,
    CheckpointEvent: pb.TaskCheckpointEventReq,
    CheckpointCompleted: pb.TaskCheckpointCompletedReq,
    JobCheckpoint: pb.JobCheckpointMetadata,
}
_KINDS = {kind.__name__: kind for kind in _MESSAGES}
_PLACES: dict[type[Any], dict[str, _At]] = {
    kind: {
        name: getattr(hint, "__metadata__", (_At(name),))[0]
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if name != "unknown"
    }
    for kind in _MESSAGES
}
"""The message fields of the values of each class, by attribute name."""


def encode_control(value: Any) -> bytes:
    """Encode one of the messages above; equal values have equal bytes.

    Raises:
        InputError: a number or a text does not fit its field.
    """
    with fitting(kind=_MESSAGES[type(value)].DESCRIPTOR.name):
        return encoded(_encode(value))


def decode_control(kind: type[_T], data: bytes, name: str) -> _T:
    """Decode a message.

    Args:
        kind: one of the classes above.
        name: the name of the bytes in errors.

    Raises:
        FormatError: it does not parse, or contains a reference outside of the checkpoint URL.
    """
    return decoded(data, name, _MESSAGES[kind], lambda message: _decode(kind, message))


def _encode(value: Any) -> Message:
    given = {
        place.name: place.write(getattr(value, name))
        for name, place in _PLACES[type(value)].items()
        if getattr(value, name) is not None
    }
    return with_unknown(_MESSAGES[type(value)](**given), value.unknown)


def _decode(kind: type[_T], message: Message) -> _T:
    known = message.DESCRIPTOR.fields_by_name
    found: dict[str, Any] = {"unknown": unknown_of(message)}
    for name, place in _PLACES[kind].items():
        absent = known[place.name].has_presence and not message.HasField(place.name)
        found[name] = None if absent else place.read(getattr(message, place.name))
    return kind(**found)
