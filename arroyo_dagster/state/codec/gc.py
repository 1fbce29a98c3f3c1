"""JSON forms of gc's records below a job, where they are not those of their classes: plans, and the
indexes of quarantines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.derived import (
    OWN_VERSION,
    decode,
    decode_json,
    decode_values,
    decoder,
    encode,
    plain_values,
)
from arroyo_dagster.state.model.garbage import GcPlan, JobPins, Moved, Quarantined
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.objects import Packed

decode_pins = decoder(JobPins)
"""Decode `retained.json`: pins, quarantines, and names of maintenance records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """The index of one quarantine, without its parts."""

    owner: str
    needs: tuple[StatePath, ...]
    moved_at_micros: int
    parts: int
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexPart:
    """A part of such an index: the original paths of copies."""

    moved: tuple[Moved, ...]


def encode_quarantined(found: Quarantined, owner: str) -> bytes:
    """Encode the index of one quarantine. Raises InputError: a number does not fit."""
    needs = tuple(found.needs.paths)
    index = _Index(
        owner=owner,
        needs=needs,
        moved_at_micros=found.moved_at_micros,
        parts=found.parts,
        ended=found.ended,
    )
    return encode(index)


def decode_quarantined(data: bytes, path: str, name: str) -> Quarantined:
    """Decode the index of a quarantine, without its parts. Errors as in `decode`."""
    index = decode(_Index, data, path)
    return Quarantined(
        name=name,
        needs=Packed.of_paths(index.needs),
        moved_at_micros=index.moved_at_micros,
        parts=index.parts,
        ended=index.ended,
    )


def encode_moved(moved: Iterable[Moved]) -> bytes:
    """Encode a part of the index of a quarantine: the original paths of its copies."""
    return encode(_IndexPart(moved=tuple(moved)))


def decode_moved(data: bytes, path: str) -> list[Moved]:
    """Decode a part of the index of a quarantine. Errors as in `decode`."""
    return list(decode(_IndexPart, data, path).moved)


def gc_plan_to_json(plan: GcPlan) -> dict[str, Any]:
    """Convert a plan to JSON values: for printing a dry run, and for storing until approval.

    Objects are lists of path, size in bytes, time and etag.
    """
    summary = {"digest": plan.digest, "objects": plan.objects, "size_bytes": plan.size_bytes}
    return {"version": OWN_VERSION, **summary, **plain_values(plan)}


def decode_gc_plan(data: bytes, path: str) -> GcPlan:
    """Decode a stored plan.

    Raises:
        FormatError: as `decode`, or its content does not match its digest.
    """
    values = decode_json(data, path)
    digest, _, _ = (values.pop(name, None) for name in ("digest", "objects", "size_bytes"))
    plan = decode_values(GcPlan, values, path)
    if digest != plan.digest:
        raise FormatError(
            "the plan does not match its digest: it was changed after it was made",
            path=path,
            expected=str(digest),
            found=plan.digest,
            next_step="make a new plan; nothing was deleted",
        )
    return plan
