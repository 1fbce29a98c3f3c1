"""JSON forms of what garbage collection keeps below a job: pins, quarantine, journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.records import decode_json, encode_json
from arroyo_dagster.state.model.garbage import (
    GcPlan,
    JobPins,
    Moved,
    Pin,
    PlanKind,
    Proof,
    Quarantined,
    Root,
)
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.objects import Packed, StoredObject

VERSION = 1


def encode_pins(job_pins: JobPins) -> bytes:
    """What stays besides the newest epochs."""
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
        }
    )


def decode_pins(data: bytes, path: str) -> JobPins:
    """Read `job_pins.json`. Raises FormatError: it is none, or of a later release."""
    with known_fields(data, path) as fields:
        return JobPins(
            pins=tuple(
                Pin(
                    epoch=Epoch(number_of(pin["epoch"])),
                    owner=str(pin["owner"]),
                    pinned_at_micros=number_of(pin["pinned_at_micros"]),
                    reason=str(pin.get("reason", "")),
                    released=bool(pin.get("released", False)),
                )
                for pin in fields["pins"]
            ),
            quarantines=tuple(str(name) for name in fields["quarantines"]),
            rewrites=tuple(str(name) for name in fields.get("rewrites", ())),
            version=number_of(fields["version"]),
        )


def encode_quarantined(found: Quarantined, owner: str) -> bytes:
    """The index of one quarantine."""
    return encode_json(
        {
            "version": VERSION,
            "owner": owner,
            "moved_at_micros": found.moved_at_micros,
            "needs": [str(path) for path in found.needs.paths],
            "parts": found.parts,
        }
    )


def encode_moved(moved: Iterable[Moved]) -> bytes:
    """A part of the index of a quarantine: where its copies came from."""
    lines = [[str(one.path), str(one.copy), one.size_bytes, one.digest] for one in moved]
    return encode_json({"version": VERSION, "moved": lines})


def moved_from_json(fields: Mapping[str, Any]) -> Iterable[Moved]:
    """The same back. Raises TypeError, ValueError: it is none."""
    for path, copy, size, digest in fields["moved"]:
        yield Moved(
            path=StatePath(path),
            copy=StatePath(copy),
            size_bytes=number_of(size),
            digest=str(digest),
        )


def decode_quarantined(data: bytes, path: str, name: str) -> Quarantined:
    """Read what the index of a quarantine says that must stay. Errors as `decode_pins`."""
    with known_fields(data, path) as fields:
        return Quarantined(
            name=name,
            needs=Packed.of_paths(StatePath(one) for one in fields["needs"]),
            moved_at_micros=number_of(fields["moved_at_micros"]),
            parts=number_of(fields.get("parts", 0)),
        )


# ---- plans ---------------------------------------------------------------------------------------


def gc_plan_to_json(plan: GcPlan) -> dict[str, Any]:
    """A plan as JSON values: printing it is the dry run, storing it lets somebody approve it.

    Objects are lists of path, size in bytes, time and etag.
    """
    proof = plan.proof
    return {
        "version": VERSION,
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
    """Read a stored plan.

    Raises:
        FormatError: it is none, of a later release, or not what its digest says.
    """
    with known_fields(data, path) as fields:
        plan = GcPlan(
            kind=PlanKind(fields["kind"]),
            pipeline=None if fields["pipeline"] is None else PipelineId(str(fields["pipeline"])),
            job=JobId(str(fields["job"])),
            made_at_micros=number_of(fields["made_at_micros"]),
            rule=dict(fields["rule"]),
            proof=_proof(fields["proof"]),
            keep_from=_epoch(fields["keep_from"]),
            epochs=tuple(Epoch(number_of(one)) for one in fields["epochs"]),
            data=Packed(stored_from_json(fields["data"])),
            records=Packed(stored_from_json(fields["records"])),
            metadata=Packed(stored_from_json(fields["metadata"])),
            stays={
                str(reason): (number_of(count), number_of(size))
                for reason, (count, size) in fields["stays"].items()
            },
            foreign=tuple(StatePath(one) for one in fields["foreign"]),
        )
        if fields["digest"] != plan.digest:
            raise FormatError(
                "the plan is not what its digest says: somebody changed it",
                path=path,
                expected=str(fields["digest"]),
                found=plan.digest,
                next_step="make a new plan; nothing was deleted",
            )
        return plan


def _epoch(value: object) -> Epoch | None:
    return None if value is None else Epoch(number_of(value))


def _proof(fields: Mapping[str, Any]) -> Proof:
    generation = optional_number(fields["worker_generation"])
    return Proof(
        roots=tuple(
            Root(path=StatePath(one), digest=str(digest), time_micros=optional_number(time))
            for one, digest, time in fields["roots"]
        ),
        epochs=number_of(fields["epochs"]),
        referenced=number_of(fields["referenced"]),
        digest=str(fields["digest"]),
        head=None if fields["head"] is None else StatePath(fields["head"]),
        worker_generation=None if generation is None else WorkerGeneration(generation),
        run_id=optional_number(fields["run_id"]),
        condition=None if fields["condition"] is None else str(fields["condition"]),
        listed=optional_number(fields["listed"]),
    )


# ---- objects -------------------------------------------------------------------------------------


def stored_to_json(objects: Iterable[StoredObject]) -> list[list[object]]:
    """Objects as lists of path, size, time and etag."""
    return [[str(o.path), o.size_bytes, o.modified_micros, o.etag] for o in objects]


def stored_from_json(lists: Iterable[Sequence[Any]]) -> Iterable[StoredObject]:
    """The same back. Raises TypeError, ValueError: they are none."""
    for path, size, modified, etag in lists:
        yield StoredObject(StatePath(path), optional_number(size), optional_number(modified), etag)


# ---- fields --------------------------------------------------------------------------------------


class known_fields:  # noqa: N801 - a context manager, used as a function
    """The fields of a JSON object of a version that is known; what is wrong in it, told once."""

    def __init__(self, data: bytes, path: str) -> None:
        self._fields = decode_json(data, path)
        self._path = path

    def __enter__(self) -> dict[str, Any]:
        if self._fields.get("version") != VERSION:
            raise FormatError(
                f"an object of version {self._fields.get('version')!r}: this release knows "
                f"version {VERSION}",
                path=self._path,
                next_step="use a release of arroyo-dagster that knows it; nothing was deleted",
            )
        return self._fields

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        wrong = (KeyError, TypeError, ValueError, AttributeError, InputError)
        if isinstance(error, wrong) and not isinstance(error, FormatError):
            raise FormatError(
                f"not what its name says ({type(error).__name__}: {error})",
                path=self._path,
                next_step="keep the object and report it; nothing was deleted",
            ) from error


def number_of(value: object) -> int:
    """A whole number from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0")
    return value


def optional_number(value: object) -> int | None:
    return None if value is None else number_of(value)
