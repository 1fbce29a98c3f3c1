"""A table of a table format at one version: which files it has, and what their columns mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.names import ForeignName
from arroyo_dagster.state.storage.urls import CheckpointUrl, parse_url

ColumnKey = int | str
"""How a file names a column: a field id, or a name."""
PART_BYTES = 128 << 20
"""A file larger than twice this is read by several tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeColumn:
    """A column, or a field of one.

    Attributes:
        name: in the table.
        key: in files that have field ids, or do not need them.
        names: in files without field ids, if `key` is one.
        kind: the type in the table, with its names.
        children: the fields of a struct; the elements of a list; keys and values of a map.
        nullable: whether a file may lack it.
        default: its value in files that lack it.
    """

    name: str
    key: ColumnKey
    kind: pa.DataType
    names: tuple[str, ...] = ()
    children: tuple[LakeColumn, ...] = ()
    nullable: bool = True
    default: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFile:
    """A data file, or a part of one.

    Attributes:
        root: the bucket, or `/` of local disk.
        key: the name below it, as the store has it.
        constants: the value of each column that the file does not hold, by `LakeColumn.key`.
        begin, end: its row groups that begin within these bytes.
    """

    root: CheckpointUrl
    key: str
    size_bytes: int
    constants: Mapping[ColumnKey, Any] = field(default_factory=dict)
    begin: int = 0
    end: int = 1 << 62

    @property
    def path(self) -> StatePath:
        """The name of the object below `root`."""
        return ForeignName(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeSnapshot:
    """A table at one version.

    Attributes:
        name: of the table, for people: its format and where it is.
        version: for people.
        pin: what a declaration says to read this version again; None = there is none yet.
        columns: those that can be read.
        unreadable: the types of the others, by name.
        unknown: what could not be checked, for people.
        options: of the client of the store that holds the files.
    """

    name: str
    version: str
    columns: tuple[LakeColumn, ...]
    files: tuple[LakeFile, ...]
    pin: str | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def summary(self) -> str:
        """The version, for people; equal texts are equal rows."""
        return f"{self.version} of {self.name}, {len(self.files)} files"

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(one.size_bytes for one in self.files)

    def tasks(self, at_least: int) -> list[list[LakeFile]]:
        """Divide the files into tasks of about equal size.

        Args:
            at_least: how many tasks there should be, if there are as many parts of files.
        """
        limit = min(PART_BYTES, max(1, self.size_bytes // max(1, at_least)))
        found: list[list[LakeFile]] = []
        size = limit
        for one in _parts(self.files):
            if size >= limit:
                found.append([])
                size = 0
            found[-1].append(one)
            size += min(one.size_bytes, one.end - one.begin)
        return found


def _parts(files: Iterable[LakeFile]) -> Iterator[LakeFile]:
    for one in files:
        if one.size_bytes <= 2 * PART_BYTES:
            yield one
            continue
        for begin in range(0, one.size_bytes, PART_BYTES):
            last = begin + PART_BYTES >= one.size_bytes
            yield replace(one, begin=begin, end=one.end if last else begin + PART_BYTES)


def located(url: str | CheckpointUrl) -> tuple[CheckpointUrl, str]:
    """Return the bucket of a URL, or `/` of local disk, and the name below it.

    Raises:
        InputError: it is no URL of a store.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    return replace(parsed, key_prefix=""), parsed.key_prefix


def columns_schema(columns: Sequence[LakeColumn]) -> pa.Schema:
    """Return columns as rows have them."""
    return pa.schema([pa.field(one.name, one.kind) for one in columns])
