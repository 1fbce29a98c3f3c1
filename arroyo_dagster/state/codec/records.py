"""JSON records of the protocol layout, and the JSON forms of our own small objects.

Source: crates/arroyo-state-protocol/src/types.rs: compact JSON, fields in the order written here,
`version` 1, absent references null. Unknown fields are ignored when read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.types import Type, from_json, to_json


def encode_current_generation(record: CurrentGeneration) -> bytes:
    return encode_json(
        {
            "version": _writable(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "generation": record.worker_generation,
            "generation_manifest_ref": record.generation_manifest_ref,
            "updated_at_micros": record.updated_at_micros,
        }
    )


def decode_current_generation(data: bytes, path: str) -> CurrentGeneration:
    fields = _Fields(data, path)
    return CurrentGeneration(
        version=fields.version(),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        worker_generation=WorkerGeneration(fields.number("generation")),
        generation_manifest_ref=fields.ref("generation_manifest_ref"),
        updated_at_micros=fields.number("updated_at_micros"),
    )


def encode_generation_manifest(record: GenerationManifest) -> bytes:
    return encode_json(
        {
            "version": _writable(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "generation": record.worker_generation,
            "base_checkpoint_ref": record.base_ref,
            "latest_checkpoint_ref": record.latest_ref,
            "updated_at_micros": record.updated_at_micros,
        }
    )


def decode_generation_manifest(data: bytes, path: str) -> GenerationManifest:
    fields = _Fields(data, path)
    return GenerationManifest(
        version=fields.version(),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        worker_generation=WorkerGeneration(fields.number("generation")),
        base_ref=fields.optional_ref("base_checkpoint_ref"),
        latest_ref=fields.optional_ref("latest_checkpoint_ref"),
        updated_at_micros=fields.number("updated_at_micros"),
    )


def encode_epoch_record(record: EpochRecord) -> bytes:
    return encode_json(
        {
            "version": _writable(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "generation": record.worker_generation,
            "parent_checkpoint_ref": record.parent_ref,
            "checkpoint_ref": record.checkpoint_ref,
            "created_at_micros": record.created_at_micros,
        }
    )


def decode_epoch_record(data: bytes, path: str) -> EpochRecord:
    fields = _Fields(data, path)
    return EpochRecord(
        version=fields.version(),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        epoch=Epoch(fields.number("epoch")),
        worker_generation=WorkerGeneration(fields.number("generation")),
        parent_ref=fields.optional_ref("parent_checkpoint_ref"),
        checkpoint_ref=fields.ref("checkpoint_ref"),
        created_at_micros=fields.number("created_at_micros"),
    )


def encode_committed_marker(record: CommittedMarker) -> bytes:
    return encode_json(
        {
            "version": _writable(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "checkpoint_generation": record.checkpoint_worker_generation,
            "writer_generation": record.writer_worker_generation,
            "checkpoint_ref": record.checkpoint_ref,
        }
    )


def decode_committed_marker(data: bytes, path: str) -> CommittedMarker:
    fields = _Fields(data, path)
    return CommittedMarker(
        version=fields.version(),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        epoch=Epoch(fields.number("epoch")),
        checkpoint_worker_generation=WorkerGeneration(fields.number("checkpoint_generation")),
        writer_worker_generation=WorkerGeneration(fields.number("writer_generation")),
        checkpoint_ref=fields.ref("checkpoint_ref"),
    )


def encode_type(described: Type) -> str:
    """The JSON text of a type description, as stored with a table's configuration."""
    return encode_json(to_json(described)).decode()


def decode_type(text: str) -> Type:
    """Raises FormatError when the text is no type description."""
    try:
        return from_json(json.loads(text))
    except ValueError as error:
        raise FormatError("a stored type description is not JSON", text=text[:200]) from error


def encode_json(value: object) -> bytes:
    """Compact JSON, fields in the order given, no final newline."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def decode_json(data: bytes, path: str) -> dict[str, Any]:
    """Decode an object.

    Raises:
        FormatError: the bytes are no JSON object.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise FormatError(
            f"{len(data)} bytes that should be JSON are not; the object may be truncated",
            path=path,
            next_step="keep the object and report it",
        ) from error
    if not isinstance(value, Mapping):
        raise FormatError("JSON, but not an object", path=path)
    return dict(value)


def _writable(version: int) -> int:
    if version != RECORD_VERSION:
        raise InputError(
            f"records of version {version} can be read but not written, only {RECORD_VERSION}",
            next_step="use a release of arroyo-dagster that knows this version",
        )
    return version


class _Fields:
    """Required and optional fields of one record, with errors that name record and field."""

    def __init__(self, data: bytes, path: str) -> None:
        self._path = path
        self._values = decode_json(data, path)

    def version(self) -> int:
        return self.number("version")

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def number(self, name: str) -> int:
        value = self._values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
            raise self._wrong(name, "an unsigned 64-bit number", value)
        return value

    def ref(self, name: str) -> StatePath:
        try:
            return StatePath(self.text(name))
        except InputError as error:
            raise self._wrong(name, "a path below the checkpoint URL", error.message) from error

    def optional_ref(self, name: str) -> StatePath | None:
        return None if self._values.get(name) is None else self.ref(name)

    def _wrong(self, name: str, expected: str, found: object) -> FormatError:
        return FormatError(
            f"field {name} should be {expected}, found {found!r}",
            path=self._path,
            next_step="keep the object and report it",
        )
