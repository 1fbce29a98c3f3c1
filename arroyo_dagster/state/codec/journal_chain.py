"""The hash chain of a journal: digests of its parts, and the JSON that contains them. No I/O.

`plan.json` contains the digest of the previous run, each batch that of the part before it,
`end.json` those of all batches as completed, `head.json` that of the newest run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.state.codec.records import OWN_VERSION, encode_json, known_fields, read_back
from arroyo_dagster.state.model.garbage import digest_of
from arroyo_dagster.state.model.json_fields import Fields, whole_number

FOLLOWS, PREVIOUS, PARTS = "follows", "previous", "parts"
LISTING = "listing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Follows:
    """The previous run, as `plan.json` names it.

    Attributes:
        digest: of its `end.json`, or of its `plan.json` if it has no `end.json`.
        by_listing: whether `head.json` was missing or damaged, so that a listing found the run.
    """

    run: str
    digest: str
    by_listing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest run, as `head.json` names it.

    Attributes:
        digest: of its `end.json` if it has ended, otherwise of its `plan.json`.
    """

    run: str
    digest: str
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSeal:
    """One batch, as `end.json` lists it.

    Attributes:
        objects: the number of its objects.
        first, last: its smallest and its largest path.
        digest: of its bytes.
    """

    number: int
    objects: int
    first: str
    last: str
    digest: str


def link_after(previous: str, lines: Iterable[Sequence[object]]) -> str:
    """Return the digest that the part after a batch contains.

    It covers what does not change when the batch is completed: its objects, not their outcomes.

    Args:
        previous: the digest that the batch itself contains.
        lines: path, size in bytes and etag of each object; further values are ignored.
    """
    return digest_of(encode_json([previous, [list(line[:3]) for line in lines]]))


def encode_batch(at_micros: int, lines: Sequence[Sequence[object]], previous: str | None) -> bytes:
    """Encode a batch; `previous` is None in a journal that began without digests."""
    fields: dict[str, object] = {"version": OWN_VERSION, "at_micros": at_micros, "objects": lines}
    return encode_json(fields if previous is None else {**fields, PREVIOUS: previous})


def seal_of(number: int, lines: Sequence[Sequence[Any]], data: bytes) -> BatchSeal:
    """Return the entry of a batch in `end.json`."""
    paths = [str(line[0]) for line in lines]
    return BatchSeal(
        number=number,
        objects=len(paths),
        first=min(paths, default=""),
        last=max(paths, default=""),
        digest=digest_of(data),
    )


def seals_to_json(seals: Iterable[BatchSeal], previous: str) -> dict[str, object]:
    """Return the fields of `end.json` that seal the run."""
    listed = [[one.number, one.objects, one.first, one.last, one.digest] for one in seals]
    return {PREVIOUS: previous, PARTS: listed}


def decode_end(data: bytes, path: str) -> tuple[str, tuple[BatchSeal, ...]] | None:
    """Return the digest in `end.json` and the batches it lists; None if it has no digests.

    Raises:
        FormatError: invalid, or of a later release.
    """
    with known_fields(data, path) as fields:
        if PARTS not in fields:
            return None
        seals = tuple(_seal_from_json(*one) for one in fields.list(PARTS))
        return fields.text(PREVIOUS), seals


def _seal_from_json(number: object, objects: object, *texts: object) -> BatchSeal:
    first, last, digest = map(str, texts)
    return BatchSeal(
        number=whole_number(number),
        objects=whole_number(objects),
        first=first,
        last=last,
        digest=digest,
    )


def follows_to_json(follows: Follows | None) -> dict[str, object]:
    """Return the field of `plan.json` that names the previous run; null in a chain's first run."""
    if follows is None:
        return {FOLLOWS: None}
    found = {"run": follows.run, "digest": follows.digest}
    return {FOLLOWS: {**found, "found": LISTING} if follows.by_listing else found}


def is_chained(fields: Fields) -> bool:
    """Return whether the run with these `plan.json` fields is part of a chain."""
    return FOLLOWS in fields


def follows_of(fields: Fields) -> Follows | None:
    """Return the previous run; None for the first run of a chain, and for one without digests."""
    found = fields.optional_object(FOLLOWS)
    if found is None:
        return None
    by_listing = found.optional_text("found") == LISTING
    return Follows(run=_run(found), digest=found.text("digest"), by_listing=by_listing)


def _run(fields: Fields) -> str:
    """Return the name of a run, which must be a single path segment."""
    name = fields.ref("run")
    if "/" in name:
        raise fields.wrong("run", "the name of a run", name)
    return str(name)


@read_back
def encode_head(head: Head) -> bytes:
    """Encode `head.json`."""
    fields = {"version": OWN_VERSION, "run": head.run, "digest": head.digest, "ended": head.ended}
    return encode_json(fields)


def decode_head(data: bytes, path: str) -> Head:
    """Decode `head.json`. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        return Head(run=_run(fields), digest=fields.text("digest"), ended=fields.flag("ended"))
