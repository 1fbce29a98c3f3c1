"""JSON forms of the records that are stored beside an Arroyo job when this package changes it."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from arroyo_dagster.state.codec.records import encode_json, known_fields, read_back
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.json_fields import Fields
from arroyo_dagster.state.model.maintenance_window import WindowRecord
from arroyo_dagster.state.model.rewrite import RewriteRecord
from arroyo_dagster.state.model.surgery.plans import EditRecord
from arroyo_dagster.state.model.surgery.rebuild import JobHead, RebuildRecord


def _texts(objects: Mapping[StatePath, bytes]) -> dict[StatePath, str]:
    return {path: base64.b64encode(data).decode() for path, data in objects.items()}


def _bytes(objects: Fields, path: str) -> bytes:
    return base64.b64decode(objects.text(path), validate=True)


@read_back
def encode_rewrite_record(record: RewriteRecord) -> bytes:
    return encode_json(
        {
            "version": record.version,
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "generation": record.worker_generation,
            "run_id": record.run_id,
            "token": record.token,
            "created_at_micros": record.created_at_micros,
            "before": _texts(record.before),
            "after": dict(record.after),
            "inputs": list(record.inputs),
            # Absent for a compaction, as earlier releases wrote it.
            **({} if record.operation is None else {"operation": record.operation}),
        }
    )


def decode_rewrite_record(data: bytes, path: str) -> RewriteRecord:
    """Decode such a record. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        pipeline = fields.optional_text("pipeline_id")
        generation = fields.optional_number("generation")
        before, after = fields.object("before"), fields.object("after")
        return RewriteRecord(
            pipeline=None if pipeline is None else PipelineId(pipeline),
            job=JobId(fields.text("job_id")),
            epoch=Epoch(fields.number("epoch")),
            worker_generation=None if generation is None else WorkerGeneration(generation),
            run_id=fields.optional_number("run_id"),
            token=fields.number("token"),
            created_at_micros=fields.number("created_at_micros"),
            before={StatePath(name): _bytes(before, name) for name in before},
            after={StatePath(name): after.text(name) for name in after},
            inputs=fields.refs("inputs"),
            operation=fields.optional_text("operation"),
        )


@read_back
def encode_edit_record(record: EditRecord) -> bytes:
    return encode_json(
        {
            "version": record.version,
            "operation": record.operation,
            "digest": record.digest,
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "generation": record.worker_generation,
            "finish_time_micros": record.finish_time_micros,
            "token": record.token,
            "created_at_micros": record.created_at_micros,
            "objects": {path: list(digests) for path, digests in record.objects.items()},
            "unlisted": list(record.unlisted),
            "request": record.request,
        }
    )


def decode_edit_record(data: bytes, path: str) -> EditRecord:
    """Decode such a record. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        pipeline = fields.optional_text("pipeline_id")
        generation = fields.optional_number("generation")
        objects = fields.object("objects")
        return EditRecord(
            operation=fields.text("operation"),
            digest=fields.text("digest"),
            pipeline=None if pipeline is None else PipelineId(pipeline),
            job=JobId(fields.text("job_id")),
            epoch=Epoch(fields.number("epoch")),
            worker_generation=None if generation is None else WorkerGeneration(generation),
            finish_time_micros=fields.number("finish_time_micros"),
            token=fields.number("token"),
            created_at_micros=fields.number("created_at_micros"),
            objects={StatePath(name): _two_texts(objects.texts(name)) for name in objects},
            unlisted=fields.refs("unlisted"),
            request=fields.optional_text("request"),
        )


def _two_texts(found: tuple[str, ...]) -> tuple[str, str]:
    before, after = found
    return before, after


@read_back
def encode_rebuild_record(record: RebuildRecord) -> bytes:
    return encode_json(
        {
            "version": record.version,
            "operation": record.operation,
            "digest": record.digest,
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "token": record.token,
            "created_at_micros": record.created_at_micros,
            "newest_epoch": record.head.epoch,
            "generation": record.head.worker_generation,
            # Absent from `before`: the object was missing.
            "before": _texts({at: data for at, data in record.before.items() if data is not None}),
            "after": _texts(record.after),
            "doubts": list(record.doubts),
            "unlisted": list(record.unlisted),
        }
    )


def decode_rebuild_record(data: bytes, path: str) -> RebuildRecord:
    """Decode such a record. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        pipeline = fields.optional_text("pipeline_id")
        generation = fields.optional_number("generation")
        before, after = fields.object("before"), fields.object("after")
        return RebuildRecord(
            operation=fields.text("operation"),
            digest=fields.text("digest"),
            pipeline=None if pipeline is None else PipelineId(pipeline),
            job=JobId(fields.text("job_id")),
            epoch=Epoch(fields.number("epoch")),
            token=fields.number("token"),
            created_at_micros=fields.number("created_at_micros"),
            before={
                StatePath(name): _bytes(before, name) if name in before else None for name in after
            },
            after={StatePath(name): _bytes(after, name) for name in after},
            head=JobHead(
                epoch=Epoch(fields.number("newest_epoch")),
                worker_generation=None if generation is None else WorkerGeneration(generation),
            ),
            doubts=fields.texts("doubts"),
            unlisted=fields.refs("unlisted"),
        )


@read_back
def encode_window_record(record: WindowRecord) -> bytes:
    return encode_json(
        {
            "version": record.version,
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "run_id": record.run_id,
            "owner": record.owner,
            "opened_at_micros": record.opened_at_micros,
            # Absent for a compaction, as earlier releases wrote it.
            **({"edits": True} if record.edits else {}),
        }
    )


def decode_window_record(data: bytes, path: str) -> WindowRecord:
    """Decode such a record. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        return WindowRecord(
            pipeline=PipelineId(fields.text("pipeline_id")),
            job=JobId(fields.text("job_id")),
            run_id=fields.optional_number("run_id"),
            owner=fields.text("owner"),
            opened_at_micros=fields.number("opened_at_micros"),
            edits=fields.optional_flag("edits") or False,
        )
