"""Names of objects: conversion between raw paths, as in metadata, and names as stores hold them."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import unquote_to_bytes

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import StatePath, path_error

_ENCODED = re.compile(rb'[\x00-\x1f\x7f-\xff\\{^}%`\]">\[~<#|*?]')
_PLAIN = re.compile(r"[A-Za-z0-9_\-./]+")
_STAGING = re.compile(r"#[0-9]+$")


class StoredName(StatePath):
    """The name of an object that no raw path encodes to; it is listed, but cannot be used.

    Foreign programs write such names (`a%3c`, `a//b`, `a<b`). Every method that reads or changes an
    object refuses such a name; listing below or after one works.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        return str.__new__(cls, text)

    def __reduce__(self) -> tuple[type[StoredName], tuple[str]]:
        return (type(self), (str(self),))


class LinkName(StoredName):
    """The name of a symbolic link below the root, whatever its target is."""

    __slots__ = ()


class ForeignName(StatePath):
    """The name of an object of another program, exactly as the store has it.

    Only for reading: such a name may be one that this package would not write (`p=a%3Db`).
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not text or {"", ".", ".."} & {*text.split("/")} or "\0" in text:
            raise InputError("not the name of an object", path=ascii(text))
        return str.__new__(cls, text)

    def __reduce__(self) -> tuple[type[ForeignName], tuple[str]]:
        return (type(self), (str(self),))


def encode_path(path: str) -> str:
    """Return the name under which a store holds the object at the raw path `path`.

    A `ForeignName` is that name already.

    Not idempotent (`%` becomes `%25`): always pass the raw path.

    Raises:
        InputError: `path` is no path below the checkpoint URL, no valid Unicode, or a `StoredName`.

    Source: object_store `path::Path::from`, as called in crates/arroyo-storage/src/lib.rs
        (arroyo-state.md 1.3).
    Differs: segments that are empty, `.` or `..` are refused, not dropped or encoded; Arroyo
        never writes them, so a path with one is damaged.
    """
    if isinstance(path, StoredName):
        raise InputError(
            "this object's stored name is not the encoding of a path, so it cannot be addressed",
            path=str(path),
            next_step="keep it: another program wrote it",
        )
    if isinstance(path, ForeignName):
        return str(path)
    raw = StatePath(path)
    if _PLAIN.fullmatch(raw):
        return str(raw)
    try:
        data = raw.encode()
    except UnicodeEncodeError as error:
        raise InputError("a path must be valid Unicode", path=ascii(path)) from error
    return _ENCODED.sub(lambda match: b"%%%02X" % match[0][0], data).decode("ascii")


def decode_path(stored: str) -> StatePath | None:
    """Return the raw path of the object stored as `stored`; None if no raw path encodes to it."""
    if _PLAIN.fullmatch(stored):
        return None if path_error(stored) else StatePath(stored)
    try:
        raw = unquote_to_bytes(stored).decode()
    except UnicodeError:
        return None
    if path_error(raw) or encode_path(raw) != stored:
        return None
    return StatePath(raw)


def listed_path(stored: str) -> StatePath:
    """Return the path under which to list an object: raw if there is one, else a `StoredName`."""
    return decode_path(stored) or StoredName(stored)


def stored_prefix(prefix: str) -> str:
    """Return the stored form of a directory to list: "" for the root, else ending in `/`.

    Args:
        prefix: whole segments of a raw path, with or without a final `/`; or a `StoredName`.
    """
    if isinstance(prefix, StoredName):
        if ".." in prefix.split("/"):
            raise InputError("this stored name would lead out of the store", path=str(prefix))
        return f"{prefix}/"
    trimmed = prefix.removesuffix("/")
    return f"{encode_path(trimmed)}/" if trimmed else ""


def stored_start(start_after: str | None) -> str:
    """Return the stored name after which a listing begins; "" for a complete listing."""
    if not start_after:
        return ""
    return str(start_after) if isinstance(start_after, StoredName) else encode_path(start_after)


def is_staging(stored: str) -> bool:
    """Return whether a file name on local disk is left over from an interrupted write.

    Source: object_store `LocalFileSystem`, which writes `name#N` first (arroyo-state.md 1.3).
    """
    return _STAGING.search(stored) is not None
