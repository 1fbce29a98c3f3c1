"""The checkpoint URL that a catalogue belongs to: written in it, and checked whenever it is opened.

Rows are found by job name, and jobs of two checkpoint URLs may have the same name.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.storage.remote.credentials import resolved
from arroyo_dagster.state.storage.remote.options import normalised
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import parse_url

OWNER = StatePath("catalogue.json")
_VERSION = 1
_DIGEST_LETTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueOwner:
    """The owner of a catalogue.

    Attributes:
        identity: drawn at random when the catalogue was created; two hosts that read the same
            identity read the same catalogue.
        checkpoint_url: the location of its jobs, as `checkpoint_place` returns it.
    """

    identity: str
    checkpoint_url: str


def checkpoint_place(url: str, options: Mapping[str, Any]) -> str:
    """Return the location of checkpoints without credentials, equal for all URLs of one location.

    Args:
        options: of the store's client; they and the environment may name the endpoint.

    Raises:
        InputError: `url` is not a checkpoint URL, or an option is invalid.
    """
    parsed = parse_url(url)
    place = str(replace(parsed, region=None))
    if parsed.backend in ("file", "memory") or parsed.endpoint:
        return place
    endpoint = resolved(parsed, normalised(options, parsed.backend)).get("endpoint")
    if not endpoint or parsed.account:
        return place
    return f"{place} at {redact_url(str(endpoint)).rstrip('/')}"


def place_digest(place: str) -> str:
    """Return a short name of a location, for directories."""
    return hashlib.sha256(place.encode()).hexdigest()[:_DIGEST_LETTERS]


def read_owner(catalogue: ObjectStore) -> CatalogueOwner | None:
    """Read the owner of a catalogue; None if it names none, as catalogues of older releases.

    Raises:
        FormatError: the owner record cannot be read.
    """
    try:
        data = catalogue.read(OWNER)
    except NotFoundError:
        return None
    try:
        document = parse_json(data)
        return CatalogueOwner(
            identity=str(document["id"]), checkpoint_url=str(document["checkpoint_url"])
        )
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            "the catalogue does not name its checkpoint URL: expected a JSON object with id and "
            "checkpoint_url",
            path=OWNER,
            url=catalogue.url,
            next_step="delete the catalogue: it is rebuilt from the existing epochs",
        ) from error


def claim_catalogue(catalogue: ObjectStore, place: str) -> CatalogueOwner:
    """Check that a catalogue belongs to `place`; write the owner into a catalogue that names none.

    Raises:
        InputError: it belongs to another checkpoint URL.
        FormatError: the owner record cannot be read.
    """
    owner = read_owner(catalogue)
    if owner is None:
        made = CatalogueOwner(identity=uuid.uuid4().hex, checkpoint_url=place)
        document = {"v": _VERSION, "id": made.identity, "checkpoint_url": place}
        # If two processes claim it at the same time, the first one wins.
        owner = made if catalogue.create(OWNER, _encoded(document)) else read_owner(catalogue)
    if owner is None or owner.checkpoint_url != place:
        raise InputError(
            "the catalogue belongs to another checkpoint URL",
            catalogue=catalogue.url,
            catalogue_of=None if owner is None else owner.checkpoint_url,
            checkpoint_url=place,
            next_step="set another catalogue_url for each checkpoint URL",
        )
    return owner


def check_apart(catalogue: ObjectStore, checkpoints: ObjectStore) -> None:
    """Refuse a catalogue within a checkpoint URL, where reading commands write nothing.

    Raises:
        InputError: it is the checkpoint URL, or a place below it.
    """
    if f"{catalogue.url}/".startswith(f"{checkpoints.url}/"):
        raise InputError(
            "the catalogue cannot be stored below the checkpoint URL, where read-only steps write "
            "nothing",
            url=catalogue.url,
            next_step="choose another place for the catalogue",
        )


def _encoded(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"
