"""JSON forms of gc's records below a job: pins, quarantine, plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.records import OWN_VERSION, encode_json, known_fields, read_back
from arroyo_dagster.state.model.garbage import (
    GcPlan,
    JobPins,
    Moved,
    Pin,
    PlanKind,
    Proof,
    Quarantined,
    Root,
    WriteRemains,
)
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.json_fields import MAX_U64, Fields, whole_number
from arroyo_dagster.state.model.objects import Packed, StoredObject


@read_back
def encode_pins(job_pins: JobPins) -> bytes:
    """Encode `retained.json`: pins, quarantines, and names of maintenance records."""
    return encode_json(
        {
            "version": job_pins.version,
            "pins": [
                {
                    "epoch": pin.epoch,
                    "owner": pin.owner,
                    "pinned_at_micros": pin.pinned_at_micros,
                    "reason": pin.reason,
                    "released": pin.released,
                }
                for pin in job_pins.pins
            ],
            "quarantines": list(job_pins.quarantines),
            "rewrites": list(job_pins.rewrites),
            "compactions": list(job_pins.compactions),
            "expired_below": job_pins.expired_below,
        }
    )


def decode_pins(data: bytes, path: str) -> JobPins:
    """Decode `retained.json`. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        return JobPins(
            pins=tuple(
                Pin(
                    epoch=Epoch(pin.number("epoch")),
                    owner=pin.text("owner"),
                    pinned_at_micros=pin.number("pinned_at_micros"),
                    reason=pin.optional_text("reason") or "",
                    released=pin.optional_flag("released") or False,
                )
                for pin in fields.objects("pins")
            ),
            quarantines=fields.texts("quarantines"),
            rewrites=fields.texts("rewrites") if "rewrites" in fields else (),
            compactions=fields.texts("compactions") if "compactions" in fields else (),
            expired_below=Epoch(fields.optional_number("expired_below") or 0),
            version=fields.number("version"),
        )


def encode_quarantined(found: Quarantined, owner: str) -> bytes:
    """Encode the index of one quarantine. Raises InputError: a number does not fit."""
    numbers = {"moved_at_micros": found.moved_at_micros, "parts": found.parts}
    for name, number in numbers.items():
        if not 0 <= number <= MAX_U64:
            raise InputError(f"a quarantine cannot be written: {name} is {number}")
    needs = [str(path) for path in found.needs.paths]
    return encode_json(
        {
            "version": OWN_VERSION,
            "owner": owner,
            "needs": needs,
            **numbers,
            "ended": found.ended,
        }
    )


@read_back
def encode_moved(moved: Iterable[Moved]) -> bytes:
    """Encode a part of the index of a quarantine: the original paths of its copies."""
    lines = [[str(one.path), str(one.copy), one.size_bytes, one.digest] for one in moved]
    return encode_json({"version": OWN_VERSION, "moved": lines})


def decode_moved(data: bytes, path: str) -> list[Moved]:
    """Decode a part of the index of a quarantine. Errors as in `decode_pins`."""
    with known_fields(data, path) as fields:
        return [
            Moved(
                path=StatePath(original),
                copy=StatePath(copy),
                size_bytes=whole_number(size),
                digest=str(digest),
            )
            for original, copy, size, digest in fields.list("moved")
        ]


def decode_quarantined(data: bytes, path: str, name: str) -> Quarantined:
    """Decode the index of a quarantine, without its parts. Errors as in `decode_pins`."""
    with known_fields(data, path) as fields:
        return Quarantined(
            name=name,
            needs=Packed.of_paths(fields.refs("needs")),
            moved_at_micros=fields.number("moved_at_micros"),
            parts=fields.number("parts"),
            ended=fields.flag("ended"),
        )


# ---- plans ---------------------------------------------------------------------------------------


def gc_plan_to_json(plan: GcPlan) -> dict[str, Any]:
    """Convert a plan to JSON values: for printing a dry run, and for storing until approval.

    Objects are lists of path, size in bytes, time and etag.
    """
    proof = plan.proof
    return {
        "version": OWN_VERSION,
        "kind": plan.kind.value,
        "pipeline": plan.pipeline,
        "job": plan.job,
        "made_at_micros": plan.made_at_micros,
        "rule": dict(plan.rule),
        "digest": plan.digest,
        "objects": plan.objects,
        "size_bytes": plan.size_bytes,
        "keep_from": plan.keep_from,
        "epochs": list(plan.epochs),
        "data": stored_to_json(plan.data),
        "records": stored_to_json(plan.records),
        "metadata": stored_to_json(plan.metadata),
        "stays": {reason: list(counts) for reason, counts in plan.stays.items()},
        "foreign": [str(path) for path in plan.foreign],
        "purges": list(plan.purges),
        "remains": [asdict(one) for one in plan.remains],
        "proof": {
            "epochs": proof.epochs,
            "referenced": proof.referenced,
            "digest": proof.digest,
            "head": proof.head,
            "worker_generation": proof.worker_generation,
            "run_id": proof.run_id,
            "condition": proof.condition,
            "listed": proof.listed,
            "roots": [[str(root.path), root.digest, root.time_micros] for root in proof.roots],
        },
    }


def decode_gc_plan(data: bytes, path: str) -> GcPlan:
    """Decode a stored plan.

    Raises:
        FormatError: invalid, of a later release, or its content does not match its digest.
    """
    with known_fields(data, path) as fields:
        pipeline, keep_from = fields.optional_text("pipeline"), fields.optional_number("keep_from")
        plan = GcPlan(
            kind=PlanKind(fields.text("kind")),
            pipeline=None if pipeline is None else PipelineId(pipeline),
            job=JobId(fields.text("job")),
            made_at_micros=fields.number("made_at_micros"),
            rule=dict(fields.value("rule")),
            proof=_proof(fields.object("proof")),
            keep_from=None if keep_from is None else Epoch(keep_from),
            epochs=tuple(Epoch(whole_number(one)) for one in fields.list("epochs")),
            data=Packed(stored_from_json(fields.list("data"))),
            records=Packed(stored_from_json(fields.list("records"))),
            metadata=Packed(stored_from_json(fields.list("metadata"))),
            stays={
                str(reason): (whole_number(count), whole_number(size))
                for reason, (count, size) in fields.value("stays").items()
            },
            foreign=fields.refs("foreign"),
            purges=fields.texts("purges") if "purges" in fields else (),
            # Plans of earlier versions have none.
            remains=tuple(
                WriteRemains(
                    name=one.text("name"),
                    size_bytes=one.number("size_bytes"),
                    modified_micros=one.number("modified_micros"),
                )
                for one in (fields.objects("remains") if "remains" in fields else ())
            ),
        )
        if fields.value("digest") != plan.digest:
            raise FormatError(
                "the plan does not match its digest: it was changed after it was made",
                path=path,
                expected=str(fields.value("digest")),
                found=plan.digest,
                next_step="make a new plan; nothing was deleted",
            )
        return plan


def _proof(fields: Fields) -> Proof:
    generation = fields.optional_number("worker_generation")
    return Proof(
        roots=tuple(
            Root(path=StatePath(one), digest=str(digest), time_micros=_optional_number(time))
            for one, digest, time in fields.list("roots")
        ),
        epochs=fields.number("epochs"),
        referenced=fields.number("referenced"),
        digest=fields.text("digest"),
        head=fields.optional_ref("head"),
        worker_generation=None if generation is None else WorkerGeneration(generation),
        run_id=fields.optional_number("run_id"),
        condition=fields.optional_text("condition"),
        listed=fields.optional_number("listed"),
    )


# ---- objects -------------------------------------------------------------------------------------


def stored_to_json(objects: Iterable[StoredObject]) -> list[list[object]]:
    """Convert objects to lists of path, size, time and etag."""
    return [[str(o.path), o.size_bytes, o.modified_micros, o.etag] for o in objects]


def stored_from_json(lists: Iterable[Sequence[Any]]) -> Iterable[StoredObject]:
    """Convert such lists back. Raises TypeError, ValueError: they are invalid."""
    for path, size, modified, etag in lists:
        yield StoredObject(
            StatePath(path), _optional_number(size), _optional_number(modified), etag
        )


def _optional_number(value: object) -> int | None:
    return None if value is None else whole_number(value)
