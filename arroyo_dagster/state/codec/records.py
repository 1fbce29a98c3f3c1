"""Readers of the JSON records of the protocol layout, and of this package's own small records.

Source: crates/arroyo-state-protocol/src/types.rs: compact JSON, fields in the order of the classes,
`version` 1, absent references null. Fields unknown to this release are preserved, after the known
ones. `codec.derived.encode` writes all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.derived import decoder, encode_json
from arroyo_dagster.state.model.checkpoints import (
    CommitNote,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
)
from arroyo_dagster.state.model.types import Type, from_json, to_json

decode_current_generation = decoder(CurrentGeneration)
decode_generation_manifest = decoder(GenerationManifest)
decode_epoch_record = decoder(EpochRecord)
decode_committed_marker = decoder(CommittedMarker)
decode_commit_note = decoder(CommitNote)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The request that the run of this number stops with a checkpoint."""

    generation: int
    requested_at_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMarker:
    """From which URL a job is being copied."""

    source: str


decode_stop_request = decoder(StopRequest)
decode_copy_marker = decoder(CopyMarker)


def encode_type(described: Type) -> str:
    """Return the JSON text of a type description, as stored with a table's configuration."""
    return encode_json(to_json(described)).decode()


def decode_type(text: str) -> Type:
    """Parse a type description. Raises FormatError: the text is none."""
    try:
        return from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise FormatError("a stored type description is not JSON", text=text[:200]) from error
