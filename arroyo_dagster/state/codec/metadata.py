"""Protobuf metadata to model values and back. Fields unknown to this release are preserved.

Source: crates/arroyo-rpc/proto/rpc.proto and api.proto; `proto/state.proto` is our copy of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import Message

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.codec.wire import (
    decoded,
    encoded,
    fitting,
    parse_message,
    unknown_of,
    with_unknown,
)
from arroyo_dagster.state.model.checkpoints import (
    ExpiringTimeKeyReport,
    GlobalKeyedReport,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
    RunProgress,
    SubtaskCheckpoint,
    TableReport,
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
from arroyo_dagster.state.model.layout import operator_metadata_name
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    StoredSchema,
    TableConfig,
    TableFiles,
    TableKind,
    TimeFile,
)

_ROLLBACK, _REVISION = "rollback", "revision"


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Decode a `checkpoint-manifest.pb`.

    Raises:
        FormatError: not protobuf, a required part is absent, an unknown kind of table, or a
            reference outside of the checkpoint URL. Names `path`.
    """
    return decoded(data, path, pb.CheckpointManifest, _manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest; equal values have equal bytes.

    Raises:
        InputError: a number or a text does not fit its field.
    """
    with fitting(job=manifest.job, epoch=manifest.epoch):
        message = pb.CheckpointManifest(
            pipeline_id=manifest.pipeline,
            job_id=manifest.job,
            generation=manifest.worker_generation,
            epoch=manifest.epoch,
            min_epoch=manifest.min_epoch,
            start_time=manifest.start_time_micros,
            finish_time=manifest.finish_time_micros,
            needs_commit=manifest.needs_commit,
            operators=[_operator_message(operator) for operator in manifest.operators],
            parent_checkpoint_ref=manifest.parent_ref,
            progress=_progress_message(manifest.progress),
        )
        return encoded(with_unknown(message, manifest.unknown))


def decode_legacy_checkpoint(data: bytes, path: str) -> LegacyCheckpoint:
    """Decode the checkpoint's `metadata` of the legacy layout. Errors as in `decode_manifest`."""
    return decoded(data, path, pb.CheckpointMetadata, _legacy_checkpoint)


def encode_legacy_checkpoint(checkpoint: LegacyCheckpoint) -> bytes:
    """Encode a legacy checkpoint, whose epochs have 32 bits. Errors as in `encode_manifest`."""
    with fitting(job=checkpoint.job, epoch=checkpoint.epoch):
        message = pb.CheckpointMetadata(
            job_id=checkpoint.job,
            epoch=checkpoint.epoch,
            min_epoch=checkpoint.min_epoch,
            start_time=checkpoint.start_time_micros,
            finish_time=checkpoint.finish_time_micros,
            operator_ids=checkpoint.operators,
            progress=_progress_message(checkpoint.progress),
        )
        return encoded(with_unknown(message, checkpoint.unknown))


def decode_operator(data: bytes, path: str) -> OperatorCheckpoint:
    """Decode the `metadata` of an operator or a subtask. Errors as in `decode_manifest`."""
    return decoded(data, path, pb.OperatorCheckpointMetadata, _operator)


def encode_operator(operator: OperatorCheckpoint) -> bytes:
    """Encode an operator's metadata, whose epochs have 32 bits. Errors as in `encode_manifest`."""
    with fitting(job=operator.job, operator=operator.operator, epoch=operator.epoch):
        return encoded(_operator_message(operator))


# ---- from messages -------------------------------------------------------------------------------


def _manifest(message: pb.CheckpointManifest) -> Manifest:
    return Manifest(
        pipeline=PipelineId(message.pipeline_id),
        job=JobId(message.job_id),
        worker_generation=WorkerGeneration(message.generation),
        epoch=Epoch(message.epoch),
        min_epoch=Epoch(message.min_epoch),
        start_time_micros=message.start_time,
        finish_time_micros=message.finish_time,
        needs_commit=message.needs_commit,
        operators=tuple(_operator(operator) for operator in message.operators),
        parent_ref=StatePath(message.parent_checkpoint_ref)
        if message.HasField("parent_checkpoint_ref")
        else None,
        progress=_progress(message),
        unknown=unknown_of(message),
    )


def _legacy_checkpoint(message: pb.CheckpointMetadata) -> LegacyCheckpoint:
    for name in message.operator_ids:
        # These become parts of paths of objects to read, which must stay within the job.
        StatePath(operator_metadata_name(name))
    return LegacyCheckpoint(
        job=JobId(message.job_id),
        epoch=Epoch(message.epoch),
        min_epoch=Epoch(message.min_epoch),
        start_time_micros=message.start_time,
        finish_time_micros=message.finish_time,
        operators=tuple(OperatorId(name) for name in message.operator_ids),
        progress=_progress(message),
        unknown=unknown_of(message),
    )


def rolled_back_to(progress: pb.RunProgress) -> Epoch | None:
    """Return the epoch that a rollback restored; None if no rollback published the epoch."""
    return Epoch(progress.batch_id) if progress.query_id == _ROLLBACK else None


def _progress(message: pb.CheckpointManifest | pb.CheckpointMetadata) -> RunProgress | None:
    if not message.HasField("progress"):
        return None
    progress = message.progress
    restored = rolled_back_to(progress)
    revised = Epoch(progress.batch_id) if progress.query_id == _REVISION else None
    # What releases before 0.3 recorded of a streaming query is kept, and not used.
    query = pb.RunProgress(checkpoint_location=progress.checkpoint_location)
    if restored is None and revised is None:
        query.query_id, query.batch_id = progress.query_id, progress.batch_id
    return RunProgress(
        offsets=progress.offsets,
        final=progress.final,
        exhausted=progress.exhausted,
        rolled_back_to=restored,
        revises=revised,
        dropped=tuple(progress.dropped),
        unknown=query.SerializeToString() + unknown_of(progress),
    )


def _operator(message: pb.OperatorCheckpointMetadata) -> OperatorCheckpoint:
    if not message.HasField("operator_metadata"):
        raise FormatError("operator metadata without its part operator_metadata")
    inner = message.operator_metadata
    return OperatorCheckpoint(
        job=JobId(inner.job_id),
        operator=OperatorId(inner.operator_id),
        epoch=Epoch(inner.epoch),
        parallelism=inner.parallelism,
        min_watermark_micros=inner.min_watermark if inner.HasField("min_watermark") else None,
        max_watermark_micros=inner.max_watermark if inner.HasField("max_watermark") else None,
        start_time_micros=message.start_time,
        finish_time_micros=message.finish_time,
        tables={
            TableName(name): files_from(name, table)
            for name, table in sorted(message.table_checkpoint_metadata.items())
        },
        configs=_configs(message.table_configs),
        subtask=subtask_from(message.subtask) if message.HasField("subtask") else None,
        unknown=unknown_of(message),
        operator_unknown=unknown_of(inner),
    )


def _configs(messages: Mapping[str, pb.TableConfig]) -> dict[TableName, TableConfig]:
    return {TableName(name): _config(name, message) for name, message in sorted(messages.items())}


def _config(name: str, message: pb.TableConfig) -> TableConfig:
    kind = table_kind(name, message.table_type)
    config: GlobalKeyedConfig | ExpiringTimeKeyConfig
    if kind is TableKind.GLOBAL_KEYED:
        glob = parse_message(pb.GlobalKeyedTableConfig, message.config, name)
        config = GlobalKeyedConfig(
            table=TableName(glob.table_name),
            description=glob.description,
            uses_two_phase_commit=glob.uses_two_phase_commit,
            unknown=unknown_of(glob),
        )
    else:
        expiring = parse_message(pb.ExpiringKeyedTimeTableConfig, message.config, name)
        config = ExpiringTimeKeyConfig(
            table=TableName(expiring.table_name),
            description=expiring.description,
            retention_micros=expiring.retention_micros,
            generational=expiring.generational,
            schema=_schema(expiring.schema),
            unknown=unknown_of(expiring),
        )
    types = message.types
    return TableConfig(
        config=config,
        state_version=message.state_version,
        key_type=records.decode_type(types.key) if types.key else None,
        value_type=records.decode_type(types.value) if types.value else None,
        unknown=unknown_of(message),
        types_unknown=unknown_of(types),
    )


def _schema(message: pb.ArroyoSchema) -> StoredSchema:
    return StoredSchema(
        arrow_schema=message.arrow_schema,
        timestamp_index=message.timestamp_index,
        key_indices=tuple(message.key_indices) if message.has_keys else None,
        routing_key_indices=tuple(message.routing_key_indices)
        if message.has_routing_keys
        else None,
        unknown=unknown_of(message),
    )


def files_from(name: str, message: pb.TableCheckpointMetadata) -> TableFiles:
    if table_kind(name, message.table_type) is TableKind.GLOBAL_KEYED:
        glob = parse_message(pb.GlobalKeyedTableTaskCheckpointMetadata, message.data, name)
        return GlobalKeyedFiles(
            files=tuple(StatePath(path) for path in glob.files),
            commit_data_by_subtask=dict(sorted(glob.commit_data_by_subtask.items())),
            unknown=unknown_of(glob),
            table_unknown=unknown_of(message),
        )
    expiring = parse_message(pb.ExpiringKeyedTimeTableCheckpointMetadata, message.data, name)
    return ExpiringTimeKeyFiles(
        files=tuple(_time_file(file) for file in expiring.files),
        unknown=unknown_of(expiring),
        table_unknown=unknown_of(message),
    )


def _time_file(message: pb.ParquetTimeFile) -> TimeFile:
    return TimeFile(
        epoch=Epoch(message.epoch),
        path=StatePath(message.file),
        min_routing_key=message.min_routing_key,
        max_routing_key=message.max_routing_key,
        max_timestamp_micros=message.max_timestamp_micros,
        compaction_generation=message.generation,
        unknown=unknown_of(message),
    )


def subtask_from(message: pb.SubtaskCheckpointMetadata) -> SubtaskCheckpoint:
    return SubtaskCheckpoint(
        subtask_index=message.subtask_index,
        start_time_micros=message.start_time,
        finish_time_micros=message.finish_time,
        watermark_micros=message.watermark if message.HasField("watermark") else None,
        size_bytes=message.bytes,
        tables={
            TableName(name): _report(name, table)
            for name, table in sorted(message.table_metadata.items())
        },
        configs=_configs(message.table_configs),
        unknown=unknown_of(message),
    )


def _report(name: str, message: pb.TableSubtaskCheckpointMetadata) -> TableReport:
    if table_kind(name, message.table_type) is TableKind.GLOBAL_KEYED:
        glob = parse_message(pb.GlobalKeyedTableSubtaskCheckpointMetadata, message.data, name)
        return GlobalKeyedReport(
            file=StatePath(glob.file) if glob.HasField("file") else None,
            removals=StatePath(glob.removals) if glob.HasField("removals") else None,
            commit_data=glob.commit_data if glob.HasField("commit_data") else None,
            unknown=unknown_of(glob),
            table_unknown=unknown_of(message),
        )
    expiring = parse_message(pb.ExpiringKeyedTimeSubtaskCheckpointMetadata, message.data, name)
    return ExpiringTimeKeyReport(
        watermark_micros=expiring.watermark if expiring.HasField("watermark") else None,
        files=tuple(_time_file(file) for file in expiring.files),
        unknown=unknown_of(expiring),
        table_unknown=unknown_of(message),
    )


def table_kind(name: str, number: int) -> TableKind:
    try:
        return TableKind(number)
    except ValueError as error:
        raise FormatError(
            f"table type {number} is none of "
            + ", ".join(f"{kind.value} ({kind.label})" for kind in TableKind),
            table=name,
            next_step="read it with a newer release of arroyo-dagster, or report the object",
        ) from error


# ---- to messages ---------------------------------------------------------------------------------


def _progress_message(progress: RunProgress | None) -> pb.RunProgress | None:
    if progress is None:
        return None
    message = pb.RunProgress(
        offsets=progress.offsets,
        final=progress.final,
        exhausted=progress.exhausted,
        dropped=progress.dropped,
    )
    if progress.rolled_back_to is not None:
        message.query_id, message.batch_id = _ROLLBACK, progress.rolled_back_to
    elif progress.revises is not None:
        message.query_id, message.batch_id = _REVISION, progress.revises
    return with_unknown(message, progress.unknown)


def _operator_message(operator: OperatorCheckpoint) -> pb.OperatorCheckpointMetadata:
    inner = pb.OperatorMetadata(
        job_id=operator.job,
        operator_id=operator.operator,
        epoch=operator.epoch,
        min_watermark=operator.min_watermark_micros,
        max_watermark=operator.max_watermark_micros,
        parallelism=operator.parallelism,
    )
    message = pb.OperatorCheckpointMetadata(
        operator_metadata=with_unknown(inner, operator.operator_unknown),
        start_time=operator.start_time_micros,
        finish_time=operator.finish_time_micros,
        table_checkpoint_metadata={
            name: files_to(files) for name, files in operator.tables.items()
        },
        table_configs={name: _config_message(c) for name, c in operator.configs.items()},
        subtask=subtask_to(operator.subtask) if operator.subtask else None,
    )
    return with_unknown(message, operator.unknown)


def _config_message(config: TableConfig) -> pb.TableConfig:
    kept = config.config
    inner: Message
    if isinstance(kept, GlobalKeyedConfig):
        inner = pb.GlobalKeyedTableConfig(
            table_name=kept.table,
            description=kept.description,
            uses_two_phase_commit=kept.uses_two_phase_commit,
        )
    else:
        inner = pb.ExpiringKeyedTimeTableConfig(
            table_name=kept.table,
            description=kept.description,
            retention_micros=kept.retention_micros,
            generational=kept.generational,
            schema=_schema_message(kept.schema),
        )
    types = None
    if config.key_type or config.value_type or config.types_unknown:
        types = pb.StoredTypes(
            key=records.encode_type(config.key_type) if config.key_type else "",
            value=records.encode_type(config.value_type) if config.value_type else "",
        )
        types = with_unknown(types, config.types_unknown)
    message = pb.TableConfig(
        table_type=pb.TableEnum.ValueType(config.kind.value),
        config=encoded(with_unknown(inner, kept.unknown)),
        state_version=config.state_version,
        types=types,
    )
    return with_unknown(message, config.unknown)


def _schema_message(schema: StoredSchema) -> pb.ArroyoSchema:
    message = pb.ArroyoSchema(
        arrow_schema=schema.arrow_schema,
        timestamp_index=schema.timestamp_index,
        key_indices=schema.key_indices,
        has_keys=schema.key_indices is not None,
        routing_key_indices=schema.routing_key_indices,
        has_routing_keys=schema.routing_key_indices is not None,
    )
    return with_unknown(message, schema.unknown)


def files_to(files: TableFiles) -> pb.TableCheckpointMetadata:
    inner: Message
    if isinstance(files, GlobalKeyedFiles):
        inner = pb.GlobalKeyedTableTaskCheckpointMetadata(
            files=files.files, commit_data_by_subtask=files.commit_data_by_subtask
        )
    else:
        inner = pb.ExpiringKeyedTimeTableCheckpointMetadata(
            files=[_time_file_message(file) for file in files.files]
        )
    message = pb.TableCheckpointMetadata(
        table_type=pb.TableEnum.ValueType(files.kind.value),
        data=encoded(with_unknown(inner, files.unknown)),
    )
    return with_unknown(message, files.table_unknown)


def _time_file_message(file: TimeFile) -> pb.ParquetTimeFile:
    message = pb.ParquetTimeFile(
        epoch=file.epoch,
        file=file.path,
        min_routing_key=file.min_routing_key,
        max_routing_key=file.max_routing_key,
        max_timestamp_micros=file.max_timestamp_micros,
        generation=file.compaction_generation,
    )
    return with_unknown(message, file.unknown)


def subtask_to(subtask: SubtaskCheckpoint) -> pb.SubtaskCheckpointMetadata:
    message = pb.SubtaskCheckpointMetadata(
        subtask_index=subtask.subtask_index,
        start_time=subtask.start_time_micros,
        finish_time=subtask.finish_time_micros,
        watermark=subtask.watermark_micros,
        bytes=subtask.size_bytes,
        table_metadata={
            name: _report_message(subtask.subtask_index, report)
            for name, report in subtask.tables.items()
        },
        table_configs={name: _config_message(c) for name, c in subtask.configs.items()},
    )
    return with_unknown(message, subtask.unknown)


def _report_message(index: int, report: TableReport) -> pb.TableSubtaskCheckpointMetadata:
    inner: Message
    if isinstance(report, GlobalKeyedReport):
        inner = pb.GlobalKeyedTableSubtaskCheckpointMetadata(
            subtask_index=index,
            file=report.file,
            removals=report.removals,
            commit_data=report.commit_data,
        )
    else:
        inner = pb.ExpiringKeyedTimeSubtaskCheckpointMetadata(
            subtask_index=index,
            watermark=report.watermark_micros,
            files=[_time_file_message(file) for file in report.files],
        )
    message = pb.TableSubtaskCheckpointMetadata(
        subtask_index=index,
        table_type=pb.TableEnum.ValueType(report.kind.value),
        data=encoded(with_unknown(inner, report.unknown)),
    )
    return with_unknown(message, report.table_unknown)
