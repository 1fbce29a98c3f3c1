"""Names and numbers that identify state: jobs, operators, tables, epochs, paths."""

from __future__ import annotations

import re
from typing import NewType
from urllib.parse import unquote

from arroyo_dagster.errors import InputError

PipelineId = NewType("PipelineId", str)
JobId = NewType("JobId", str)
OperatorId = NewType("OperatorId", str)
TableName = NewType("TableName", str)
Epoch = NewType("Epoch", int)
WorkerGeneration = NewType("WorkerGeneration", int)
"""The number that fences writers: it increases at every start of a job; the first is 1."""

OUR_DIRECTORY = "_arroyo_dagster"
"""The subdirectory of a job that only this package writes; never a job or an operator itself."""

_MAX_PATH_BYTES = 1024
_MAX_DECODINGS = 8
_MAX_QUOTED_CHARS = 200
_PLAIN = re.compile(r"[\w\-=<>][\w\-=<>.]*(?:/[\w\-=<>][\w\-=<>.]*)*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")


class StatePath(str):
    """A path below the checkpoint URL: relative, `/` between segments, names as in metadata.

    Stores percent-encode it; metadata never does.

    Raises:
        InputError: empty, absolute, ending in `/`, a backslash or NUL, an empty, `.` or `..`
            segment, or longer than 1024 bytes of UTF-8.

    Source: crates/arroyo-state-protocol/src/types.rs, `CheckpointRef::new`.
    Differs: also refuses a path that leaves the checkpoint URL once `%2e` or `%2f` in it is
        decoded, however often. This package does not decode paths and Arroyo writes no such path:
        it can only target a reader that decodes.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> StatePath:
        if type(text) is cls:
            return text
        problem = path_error(text)
        if problem is not None:
            raise InputError(
                f"not a path below the checkpoint URL: {problem}",
                path=text if len(text) <= _MAX_PATH_BYTES else f"{text[:_MAX_QUOTED_CHARS]}…",
                next_step="check the metadata that holds this path; nothing was read or written",
            )
        return super().__new__(cls, text)

    def __truediv__(self, rest: str) -> StatePath:
        return StatePath(f"{self}/{rest}")

    def __reduce__(self) -> tuple[type[StatePath], tuple[str]]:
        return (StatePath, (str(self),))

    @property
    def name(self) -> str:
        """The last segment."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> StatePath | None:
        """The path without its last segment; None for a single segment."""
        head = self.rpartition("/")[0]
        return StatePath(head) if head else None


def path_error(text: str) -> str | None:
    """Return why `text` is no valid path below the checkpoint URL; None if it is valid."""
    if _PLAIN.fullmatch(text) and len(text) <= _MAX_PATH_BYTES:
        return None  # fast path for nearly every path
    if not text:
        return "it is empty"
    if text.startswith("/") or text.endswith("/"):
        return "it starts or ends with '/'"
    if "\\" in text:
        return "it holds a backslash"
    if "\0" in text:
        return "it holds a NUL"
    if len(text.encode("utf-8", "surrogatepass")) > _MAX_PATH_BYTES:
        return f"it is longer than {_MAX_PATH_BYTES} bytes"
    for segment in text.split("/"):
        if segment in ("", ".", ".."):
            return f"it has the segment {segment!r}"
    return _encoding_error(text) if "%" in text else None


def _encoding_error(text: str) -> str | None:
    """Return the error of a path that a reader decodes; metadata never encodes percent signs."""
    decoded = text
    for _ in range(_MAX_DECODINGS):
        before, decoded = decoded, unquote(decoded)
        if decoded.startswith("/") or "\0" in decoded:
            return "decoded, it is absolute or holds a NUL"
        if any(segment in (".", "..") for segment in re.split(r"[/\\]", decoded)):
            return "decoded, it has the segment '.' or '..'"
        if decoded == before:
            return None
    return "it is percent-encoded over and over"


def checked_name(text: str, what: str) -> str:
    """Return a name chosen by a user, if it is safe in every path.

    Raises:
        InputError: it contains anything but letters, digits, `_`, `-` and `.`, does not begin with
            a letter or digit, or has more than 128 characters.
    """
    if not is_name(text):
        raise InputError(f"not a name for a {what}: {NAME_RULE}", name=text)
    return text


NAME_RULE = "letters, digits, '_', '-' and '.' are allowed, first a letter or digit, at most 128"
"""What a name that a user chooses may consist of."""


def is_name(text: str) -> bool:
    """Return whether a name chosen by a user is safe in every path."""
    return _NAME.fullmatch(text) is not None and len(text) <= 128
