"""JSON forms of what we leave beside a job of Arroyo's while, or after, we change it."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, FormatError
from arroyo_dagster.state.codec.records import decode_json, encode_json
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.maintenance_window import WindowRecord
from arroyo_dagster.state.model.rewrite import RewriteRecord


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
            "before": {
                path: base64.b64encode(data).decode() for path, data in record.before.items()
            },
            "after": dict(record.after),
            "inputs": list(record.inputs),
        }
    )


def decode_rewrite_record(data: bytes, path: str) -> RewriteRecord:
    """Raises FormatError when `data` is no such record, or one of a later release."""
    fields = _fields(data, path)
    try:
        pipeline, generation = fields["pipeline_id"], fields["generation"]
        return RewriteRecord(
            pipeline=None if pipeline is None else PipelineId(_text(pipeline)),
            job=JobId(_text(fields["job_id"])),
            epoch=Epoch(_number(fields["epoch"])),
            worker_generation=None if generation is None else WorkerGeneration(_number(generation)),
            run_id=_optional_number(fields["run_id"]),
            token=_number(fields["token"]),
            created_at_micros=_number(fields["created_at_micros"]),
            before={
                StatePath(_text(name)): base64.b64decode(_text(text), validate=True)
                for name, text in fields["before"].items()
            },
            after={StatePath(_text(name)): _text(text) for name, text in fields["after"].items()},
            inputs=tuple(StatePath(_text(one)) for one in fields["inputs"]),
        )
    except (KeyError, TypeError, AttributeError, binascii.Error, ArroyoStateError) as error:
        raise _broken(path, error) from error


def encode_window_record(record: WindowRecord) -> bytes:
    return encode_json(
        {
            "version": record.version,
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "run_id": record.run_id,
            "owner": record.owner,
            "opened_at_micros": record.opened_at_micros,
        }
    )


def decode_window_record(data: bytes, path: str) -> WindowRecord:
    """Raises FormatError when `data` is no such record, or one of a later release."""
    fields = _fields(data, path)
    try:
        return WindowRecord(
            pipeline=PipelineId(_text(fields["pipeline_id"])),
            job=JobId(_text(fields["job_id"])),
            run_id=_optional_number(fields["run_id"]),
            owner=_text(fields["owner"]),
            opened_at_micros=_number(fields["opened_at_micros"]),
        )
    except (KeyError, TypeError) as error:
        raise _broken(path, error) from error


def _fields(data: bytes, path: str) -> dict[str, Any]:
    fields = decode_json(data, path)
    if fields.get("version") != 1:
        raise FormatError(
            "a record of a version that this release does not know",
            path=path,
            version=fields.get("version"),
            next_step="use the release that wrote it, or a later one",
        )
    return fields


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no whole number from 0")
    return value


def _optional_number(value: object) -> int | None:
    return None if value is None else _number(value)


def _broken(path: str, error: Exception) -> FormatError:
    return FormatError(
        f"not a record of this package ({type(error).__name__}: {error})",
        path=path,
        next_step="keep it and report it; nothing was changed",
    )
