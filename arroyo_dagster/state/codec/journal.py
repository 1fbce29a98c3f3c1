"""The parts of a journal's run: JSON, each a gzip member. No I/O.

A run has a header, batches and an end. Each part is an object of its own while the run goes on;
afterwards the run is one object: its parts, one after the other.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.derived import (
    check_version,
    decode_json,
    decode_values,
    decoder,
    encode,
)
from arroyo_dagster.state.model.garbage import GcPlan
from arroyo_dagster.state.model.ids import StatePath

Line = tuple[int, StatePath, int | None, str | None, str]
"""The time its batch was written, in microseconds; path, size in bytes, etag, outcome."""

MOST_RECORD_BYTES = 1 << 26
"""A batch names a thousand objects, each by less than 2 KB."""

_KEEP = "keep it and report it, move it out of the journal, then run this again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The run before, as a header names it, with the digest of its object."""

    run: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What is known of a run when it begins.

    Attributes:
        kind: the kind of plan, `purge` or `undelete`.
        plan: the digest of the plan, or the name of the quarantine.
        objects, size_bytes: what its plan takes.
        quarantine: the name of the quarantine it moves objects to; None if it deletes them.
        more: further facts of its plan.
        previous: the run before; None if this is the first.
        expired: the newest run whose record was deleted because of its age; None if none was.
    """

    kind: str
    plan: str
    owner: str
    begun_at_micros: int
    objects: int
    size_bytes: int
    quarantine: str | None = None
    more: Mapping[str, object] = field(default_factory=dict)
    previous: Previous | None = None
    expired: str | None = None

    @classmethod
    def of_plan(
        cls, plan: GcPlan, owner: str, now_micros: int, quarantine: str | None
    ) -> RunHeader:
        """Return the header of a run that executes a plan."""
        return cls(
            kind=plan.kind.value,
            plan=plan.digest,
            owner=owner,
            begun_at_micros=now_micros,
            objects=plan.objects,
            size_bytes=plan.size_bytes,
            quarantine=quarantine,
            more={
                "rule": dict(plan.rule),
                "referenced": plan.proof.digest,
                "roots": len(plan.proof.roots),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The objects of a batch, with their outcomes."""

    at_micros: int
    objects: tuple[tuple[StatePath, int | None, str | None, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """The last part: how many objects there were, by outcome."""

    end: Mapping[str, int]


def _encoded(part: object) -> bytes:
    return gzip.compress(encode(part) + b"\n", 6, mtime=0)


def decode_records(data: bytes, path: str) -> Iterator[bytes]:
    """Yield the JSON of each part of an object.

    Raises:
        FormatError: the bytes are no parts, or a part is too large.
    """
    if not data:
        raise _damaged(path)
    try:
        with gzip.open(io.BytesIO(data)) as parts:
            text = parts.readline(MOST_RECORD_BYTES)
            while text.endswith(b"\n"):
                # That there is a next one, or none, shows that this one's checksum is right.
                after = parts.readline(MOST_RECORD_BYTES)
                yield text
                text = after
            if text:
                raise _damaged(path)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path) from error


def _damaged(path: str) -> FormatError:
    return FormatError(
        "a record of the journal is damaged, or not of the form that this release writes",
        path=path,
        next_step=_KEEP,
    )


def encode_header(run: RunHeader) -> bytes:
    """Encode the first part of a run."""
    return _encoded(run)


decode_header = decoder(RunHeader)
"""Decode the JSON of a run's first part. Raises FormatError: invalid, or of a later release."""


def encode_batch(at_micros: int, lines: Iterable[tuple[str, int | None, str | None, str]]) -> bytes:
    """Encode a batch: path, size in bytes, etag and outcome of each object."""
    objects = tuple((StatePath(path), size, etag, text) for path, size, etag, text in lines)
    return _encoded(_Batch(at_micros=at_micros, objects=objects))


def decode_batch(text: bytes, path: str) -> list[Line]:
    """Decode the JSON of a batch; a header and an end have no lines.

    Raises:
        FormatError: invalid, or of a later release.
    """
    values = decode_json(text, path)
    if "end" in values or "kind" in values:
        check_version(values, path)
        return []
    batch = decode_values(_Batch, values, path)
    return [(batch.at_micros, *line) for line in batch.objects]


def encode_end(counts: Mapping[str, int]) -> bytes:
    """Encode the last part of a run."""
    return _encoded(_End(end=counts))


def is_end(text: bytes, path: str) -> bool:
    """Return whether the JSON of a part is that of an end. Errors as `decode_header`."""
    values = decode_json(text, path)
    check_version(values, path)
    return "end" in values
