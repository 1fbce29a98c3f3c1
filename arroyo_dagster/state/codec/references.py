"""The references in metadata, decoded without the rest: gc reads tens of thousands of objects.

File lists are checked as in `codec.metadata`. Subtask reports and the configurations of a manifest
are not decoded, so that damage in them is not found.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.metadata import rolled_back_to, table_kind
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.codec.wire import decoded, parse_message
from arroyo_dagster.state.model.garbage import References
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.tables import TableKind


def manifest_references(data: bytes, path: str) -> References:
    """Decode a `checkpoint-manifest.pb`. Errors as in `codec.metadata.decode_manifest`."""
    return decoded(data, path, pb.CheckpointManifest, _of_manifest)


def operator_references(data: bytes, path: str) -> References:
    """Decode an operator's `metadata`. Errors as in `codec.metadata.decode_manifest`."""
    return decoded(data, path, pb.OperatorCheckpointMetadata, _of_operator)


def _of_manifest(message: pb.CheckpointManifest) -> References:
    for operator in message.operators:
        _check_operator(operator, managed=message.HasField("progress"))
    return References(
        pipeline=PipelineId(message.pipeline_id),
        job=JobId(message.job_id),
        worker_generation=WorkerGeneration(message.generation),
        epoch=Epoch(message.epoch),
        min_epoch=Epoch(message.min_epoch),
        start_time_micros=message.start_time,
        finish_time_micros=message.finish_time,
        needs_commit=message.needs_commit,
        parent_ref=StatePath(message.parent_checkpoint_ref)
        if message.HasField("parent_checkpoint_ref")
        else None,
        operators=tuple(_named(operator) for operator in message.operators),
        tables=tuple(_tables(operator) for operator in message.operators),
        managed=message.HasField("progress"),
        rolled_back_to=rolled_back_to(message.progress),
        dropped=tuple(message.progress.dropped),
        files=_checked(message.operators),
    )


def _of_operator(message: pb.OperatorCheckpointMetadata) -> References:
    _check_operator(message)
    inner = message.operator_metadata
    return References(
        job=JobId(inner.job_id),
        epoch=Epoch(inner.epoch),
        min_epoch=Epoch(0),
        start_time_micros=message.start_time,
        finish_time_micros=message.finish_time,
        needs_commit=_commits(message),
        operators=(_named(message),),
        tables=(_tables(message),),
        files=_checked([message]),
    )


def _check_operator(message: pb.OperatorCheckpointMetadata, *, managed: bool = False) -> None:
    if not message.HasField("operator_metadata"):
        raise FormatError("operator metadata without its part operator_metadata")
    bare = [name for name in message.table_checkpoint_metadata if name not in message.table_configs]
    if (
        bare and not managed
    ):  # configurations come last: the object was cut between two of its fields
        raise FormatError(f"table {bare[0]} without its configuration")


def _named(message: pb.OperatorCheckpointMetadata) -> tuple[OperatorId, int]:
    inner = message.operator_metadata
    return OperatorId(inner.operator_id), inner.parallelism


def _tables(message: pb.OperatorCheckpointMetadata) -> tuple[OperatorId, frozenset[str]]:
    names = (*message.table_checkpoint_metadata, *message.table_configs)
    return OperatorId(message.operator_metadata.operator_id), _shared(frozenset(names))


@functools.lru_cache(maxsize=1000)
def _shared(names: frozenset[str]) -> frozenset[str]:
    """Return equal sets as one object, since all epochs of a job have much the same tables."""
    return names


def _commits(message: pb.OperatorCheckpointMetadata) -> bool:
    for name in message.table_checkpoint_metadata:
        config = message.table_configs.get(name)
        if config is None or table_kind(name, config.table_type) is not TableKind.GLOBAL_KEYED:
            continue
        if parse_message(pb.GlobalKeyedTableConfig, config.config, name).uses_two_phase_commit:
            return True
    return False


def _checked(operators: Iterable[pb.OperatorCheckpointMetadata]) -> tuple[StatePath, ...]:
    texts: dict[str, None] = {}
    for operator in operators:
        tables = operator.table_checkpoint_metadata
        for name in tables:  # items() also looks each one up, and is slower
            texts |= dict.fromkeys(_listed(name, tables[name]))
    return tuple(map(_path, texts))


@functools.lru_cache(maxsize=20_000)
def _path(text: str) -> StatePath:
    """Return a checked path, cached because consecutive epochs share most files."""
    return StatePath(text)


def _listed(name: str, table: pb.TableCheckpointMetadata) -> Iterable[str]:
    if table.table_type == pb.GLOBAL_KEY_VALUE:
        return parse_message(pb.GlobalKeyedTableTaskCheckpointMetadata, table.data, name).files
    table_kind(name, table.table_type)  # refuses an unknown kind
    message = parse_message(pb.ExpiringKeyedTimeTableCheckpointMetadata, table.data, name)
    return [file.file for file in message.files]
