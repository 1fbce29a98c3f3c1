"""JSON records of the protocol layout, and the JSON forms of this package's own small objects.

Source: crates/arroyo-state-protocol/src/types.rs: compact JSON, fields in the order written here,
`version` 1, absent references null. Fields unknown to this release are preserved, after the known
ones.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    CommitNote,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
)
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    WorkerGeneration,
)
from arroyo_dagster.state.model.json_fields import Fields, parse_json
from arroyo_dagster.state.model.types import Type, from_json, to_json

OWN_VERSION = 1
"""The version of this package's own small objects."""

_F = TypeVar("_F", bound=Callable[..., bytes])


def read_back(encode: _F) -> _F:
    """Let an encoder raise an InputError for a record that its reader would refuse: a negative
    number, for example. The reader of `encode_NAME` is `decode_NAME` in the same module.
    """

    @functools.wraps(encode)
    def checked(*given: Any) -> bytes:
        data = encode(*given)
        decode = encode.__globals__[encode.__name__.replace("encode_", "decode_")]
        try:
            decode(data, "the new record")
        except FormatError as error:
            raise InputError(f"a record cannot be written: {error.message}") from error
        return data

    return cast(_F, checked)


@read_back
def encode_current_generation(record: CurrentGeneration) -> bytes:
    return _with_unknown(
        {
            "version": writable_version(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "generation": record.worker_generation,
            "generation_manifest_ref": record.generation_manifest_ref,
            "updated_at_micros": record.updated_at_micros,
        },
        record.unknown,
    )


def decode_current_generation(data: bytes, path: str) -> CurrentGeneration:
    fields = decode_fields(data, path)
    return CurrentGeneration(
        version=fields.number("version"),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        worker_generation=WorkerGeneration(fields.number("generation")),
        generation_manifest_ref=fields.ref("generation_manifest_ref"),
        updated_at_micros=fields.number("updated_at_micros"),
        unknown=_unknown(fields),
    )


@read_back
def encode_generation_manifest(record: GenerationManifest) -> bytes:
    return _with_unknown(
        {
            "version": writable_version(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "generation": record.worker_generation,
            "base_checkpoint_ref": record.base_ref,
            "latest_checkpoint_ref": record.latest_ref,
            "updated_at_micros": record.updated_at_micros,
        },
        record.unknown,
    )


def decode_generation_manifest(data: bytes, path: str) -> GenerationManifest:
    fields = decode_fields(data, path)
    return GenerationManifest(
        version=fields.number("version"),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        worker_generation=WorkerGeneration(fields.number("generation")),
        base_ref=fields.optional_ref("base_checkpoint_ref"),
        latest_ref=fields.optional_ref("latest_checkpoint_ref"),
        updated_at_micros=fields.number("updated_at_micros"),
        unknown=_unknown(fields),
    )


@read_back
def encode_epoch_record(record: EpochRecord) -> bytes:
    return _with_unknown(
        {
            "version": writable_version(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "generation": record.worker_generation,
            "parent_checkpoint_ref": record.parent_ref,
            "checkpoint_ref": record.checkpoint_ref,
            "created_at_micros": record.created_at_micros,
        },
        record.unknown,
    )


def decode_epoch_record(data: bytes, path: str) -> EpochRecord:
    fields = decode_fields(data, path)
    return EpochRecord(
        version=fields.number("version"),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        epoch=Epoch(fields.number("epoch")),
        worker_generation=WorkerGeneration(fields.number("generation")),
        parent_ref=fields.optional_ref("parent_checkpoint_ref"),
        checkpoint_ref=fields.ref("checkpoint_ref"),
        created_at_micros=fields.number("created_at_micros"),
        unknown=_unknown(fields),
    )


@read_back
def encode_committed_marker(record: CommittedMarker) -> bytes:
    return _with_unknown(
        {
            "version": writable_version(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "checkpoint_generation": record.checkpoint_worker_generation,
            "writer_generation": record.writer_worker_generation,
            "checkpoint_ref": record.checkpoint_ref,
        },
        record.unknown,
    )


def decode_committed_marker(data: bytes, path: str) -> CommittedMarker:
    fields = decode_fields(data, path)
    return CommittedMarker(
        version=fields.number("version"),
        pipeline=PipelineId(fields.text("pipeline_id")),
        job=JobId(fields.text("job_id")),
        epoch=Epoch(fields.number("epoch")),
        checkpoint_worker_generation=WorkerGeneration(fields.number("checkpoint_generation")),
        writer_worker_generation=WorkerGeneration(fields.number("writer_generation")),
        checkpoint_ref=fields.ref("checkpoint_ref"),
        unknown=_unknown(fields),
    )


# ---- commit notes of the legacy layout (of this package) -----------------------------------------


@read_back
def encode_commit_note(note: CommitNote) -> bytes:
    return encode_json(
        {
            "version": writable_version(note.version),
            "job_id": note.job,
            "epoch": note.epoch,
            "finish_time_micros": note.finish_time_micros,
        }
    )


def decode_commit_note(data: bytes, path: str) -> CommitNote:
    """Decode a commit note. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        return CommitNote(
            version=fields.number("version"),
            job=JobId(fields.text("job_id")),
            epoch=Epoch(fields.number("epoch")),
            finish_time_micros=fields.number("finish_time_micros"),
        )


# ---- stop requests, and markers of copies --------------------------------------------------------


@read_back
def encode_stop_request(number: int, requested_at_micros: int) -> bytes:
    """Encode the request that the run of this number stops."""
    fields = {"generation": number, "requested_at_micros": requested_at_micros}
    return encode_json({"version": OWN_VERSION, **fields})


def decode_stop_request(data: bytes, path: str) -> int:
    """Return the number of the run that shall stop. Errors as `decode_commit_note`."""
    with known_fields(data, path) as fields:
        return fields.number("generation")


@read_back
def encode_copy_marker(source: str) -> bytes:
    """Encode from which URL a job is being copied."""
    return encode_json({"version": OWN_VERSION, "source": source})


def decode_copy_marker(data: bytes, path: str) -> str:
    """Return from which URL a job is being copied. Errors as `decode_commit_note`."""
    with known_fields(data, path) as fields:
        return fields.text("source")


# ---- JSON ----------------------------------------------------------------------------------------


def encode_type(described: Type) -> str:
    """Return the JSON text of a type description, as stored with a table's configuration."""
    return encode_json(to_json(described)).decode()


def decode_type(text: str) -> Type:
    """Parse a type description. Raises FormatError: the text is none."""
    try:
        return from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise FormatError("a stored type description is not JSON", text=text[:200]) from error


def encode_json(value: object) -> bytes:
    """Encode compact JSON, fields in the order given, without a final newline.

    Raises:
        InputError: a text is not valid Unicode, or a number has more than 4,300 digits.
    """
    try:
        return _ENCODER.encode(value).encode()
    except ValueError as error:
        raise InputError(f"a record cannot be written ({error!s:.200})") from error


def decode_json(data: bytes, path: str) -> dict[str, Any]:
    """Decode an object.

    Raises:
        FormatError: the bytes are no JSON object in UTF-8, or contain NaN or an infinity.
    """
    try:
        value = parse_json(data, _DECODER)
    except ValueError as error:
        raise FormatError(
            f"{len(data)} bytes that should be JSON are not; the object may be truncated",
            path=path,
            next_step="keep the object and report it",
        ) from error
    if not isinstance(value, Mapping):
        raise FormatError("JSON, but not an object", path=path)
    return dict(value)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def known_fields(data: bytes, path: str) -> Fields:
    """Return the fields of one of this package's own objects, for use in a `with` block.

    Raises:
        FormatError: the bytes are no JSON object, or of a version that this release does not know.
    """
    fields = decode_fields(data, path)
    version = fields.value("version")
    if version != OWN_VERSION:
        raise FormatError(
            f"an object of version {version!r:.20}: this release knows version {OWN_VERSION}",
            path=path,
            next_step="use the release that wrote it, or a later one; nothing was changed",
        )
    return fields


def decode_fields(data: bytes, path: str) -> Fields:
    """Return the fields of a JSON object, of any version. Errors as `decode_json`."""
    return Fields(decode_json(data, path), path=path)


def _unknown(fields: Fields) -> bytes:
    """Return the fields unknown to this release as one JSON object; empty if there are none."""
    rest = fields.unread()
    try:
        return encode_json(rest) if rest else b""
    except InputError as error:
        raise fields.wrong("of a later release", "text in Unicode", rest) from error


def _with_unknown(fields: Mapping[str, object], unknown: bytes) -> bytes:
    known = encode_json(fields)
    return known[:-1] + b"," + unknown[1:] if unknown else known


def writable_version(version: int) -> int:
    """Return the version of a record; raise an InputError if this release cannot write it."""
    if version != RECORD_VERSION:
        raise InputError(
            f"records of version {version} can be read but not written, only {RECORD_VERSION}",
            next_step="use a release of arroyo-dagster that knows this version",
        )
    return version
