"""The maximum size of an object, by its name only; a larger object is damaged and never read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from arroyo_dagster.state.model.ids import OUR_DIRECTORY

_ANYWHERE = r"(?:.*/)?"


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The largest size of one kind of object; `kind` is its name in errors."""

    kind: str
    size_bytes: int


RECORD = SizeLimit("record", 2**20)
"""JSON with about a dozen fields, some of them paths: 200 to 600 bytes were observed. A path has at
most 1 KiB on S3, so 1 MiB leaves room for the fields of later releases."""

METADATA = SizeLimit("metadata object", 2**28)
"""Protobuf that lists data files, 150 to 250 bytes each, and contains commit data of sinks. The
largest observed has 20 KB; 256 MiB are a million files, of which a restore opens every one."""

OBJECT = SizeLimit("object written at once", 5 * 2**30)
"""The limit of one PUT on S3, with which Arroyo and this package write every other object that is
read completely: data files of global keyed tables, plans, journals, staged sink files."""

_KINDS = (
    (
        RECORD,
        re.compile(
            rf"{_ANYWHERE}(?:(?:current-generation|generation-manifest|committed)\.json"
            rf"|epochs/epoch-\d+\.record"
            rf"|{OUR_DIRECTORY}/(?:window|stop-request)\.json"
            rf"|{OUR_DIRECTORY}/(?:leases|writers|windows|commits)/[^/]+)",
            re.DOTALL,
        ),
    ),
    (
        METADATA,
        re.compile(
            rf"{_ANYWHERE}checkpoint-\d+/(?:checkpoint-manifest\.pb|metadata"
            r"|operator-.+/metadata|operator-.+-\d+\.metadata)",
            re.DOTALL,
        ),
    ),
)


def size_limit(path: str) -> SizeLimit:
    """Return the largest size that the object at a path can have."""
    return next((limit for limit, names in _KINDS if names.fullmatch(path)), OBJECT)
