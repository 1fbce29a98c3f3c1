"""Dead letters: records on which a step failed, kept with their position and the reason.

A letter is a JSON object in a record of the topic `dead-letters`, which every service writes to its
own job, with the epoch in which the record failed. `sdf replay` reads them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.runtime.converters import json_bytes
from arroyo_dagster.dataflow.storage.boundary import SINK_SCHEMA
from arroyo_dagster.errors import FormatError

DEAD_LETTERS = "dead-letters"
"""The topic of dead letters. Each service has its own."""

_BASE64 = "-base64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One record on which a step failed.

    Attributes:
        service, step: where it failed.
        topic, partition, offset: the position of the record that was read; an empty topic and -1
            for a result that no single record led to, such as that of a flush.
        file: the file that the record was read from; None = the source is not made of files.
        key, record: the raw key and the raw value that were read; None = there is none.
        time_ms: the timestamp of the record; None = unknown.
        value: the value that the step was given, as JSON or text.
        reason: why it failed, with the number of the error if it has one.
        partial: whether parts of the record had effects: others that it was split into, a state
            that an earlier step changed, another sink. To replay the record repeats these.
    """

    service: str
    step: str
    topic: str
    partition: int
    offset: int
    file: str | None = None
    key: bytes | None = None
    record: bytes | None = None
    time_ms: int | None = None
    value: Any = None
    reason: str
    partial: bool = False

    @property
    def place(self) -> str:
        """The position of the record: topic, file if there is one, partition and offset."""
        file = "" if self.file is None else f" {self.file}"
        return f"{self.topic}{file} {self.partition}/{self.offset}"

    def encode(self) -> bytes:
        """Return it as JSON; bytes that are no UTF-8 as base64."""
        document: dict[str, Any] = {
            "service": self.service,
            "step": self.step,
            "reason": self.reason,
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "file": self.file,
            "timestamp": self.time_ms,
            **_text_of("key", self.key),
            **_text_of("record", self.record),
            "value": _json_of(self.value),
            "partial": self.partial,
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(
            errors="backslashreplace"
        )

    @classmethod
    def decode(cls, data: bytes) -> Letter:
        """Read what `encode` returned.

        Raises:
            FormatError: it is not a letter.
        """
        try:
            document = json.loads(data)
            return cls(
                service=str(document["service"]),
                step=str(document["step"]),
                topic=str(document["topic"]),
                partition=int(document["partition"]),
                offset=int(document["offset"]),
                file=document.get("file"),
                key=_bytes_of(document, "key"),
                record=_bytes_of(document, "record"),
                time_ms=document.get("timestamp"),
                value=document.get("value"),
                reason=str(document["reason"]),
                partial=bool(document.get("partial")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"a record of {DEAD_LETTERS} is not a letter ({error!r})") from error


def _text_of(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name + _BASE64: base64.b64encode(data).decode()}


def _bytes_of(found: Mapping[str, Any], name: str) -> bytes | None:
    if name + _BASE64 in found:
        return base64.b64decode(found[name + _BASE64])
    text = found.get(name)
    return None if text is None else str(text).encode()


def _json_of(value: Any) -> Any:
    try:
        return json.loads(json_bytes(value))
    except (ValueError, RecursionError):
        try:
            return repr(value)[:2000]
        except Exception:
            return f"a {type(value).__name__}"


def letter_rows(letters: Sequence[Letter]) -> pa.RecordBatch:
    """Return letters as rows for a sink."""
    return pa.RecordBatch.from_arrays(
        [
            pa.nulls(len(letters), pa.binary()),
            pa.array([letter.encode() for letter in letters], pa.binary()),
            pa.array([letter.time_ms for letter in letters], pa.timestamp("ms")),
        ],
        schema=SINK_SCHEMA,
    )
