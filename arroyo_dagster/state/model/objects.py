"""What an object is according to its name, and compact sequences of many objects."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import OUR_DIRECTORY, Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    CHECKPOINT_DIR,
    CHECKPOINT_MANIFEST,
    COMMITTED_MARKER,
    COMPACTED,
    CURRENT_GENERATION,
    EPOCH_RECORD,
    STAGING,
    JobPaths,
    Layout,
    parse_staged_name,
)
from arroyo_dagster.state.model.numbers import number_pattern

BATCH = 1000
"""The number of objects that one request deletes, and that one pack contains."""


class ObjectKind(enum.Enum):
    """The kind of an object, by its name only.

    `FOREIGN` is every name that neither Arroyo nor this package creates.
    """

    DATA = "data file"
    MANIFEST = "checkpoint manifest"
    CHECKPOINT = "checkpoint metadata"
    OPERATOR = "operator metadata"
    SUBTASK = "subtask metadata"
    MARKER = "commit marker"
    RECORD = "epoch record"
    GENERATION = "generation manifest"
    FENCE = "current generation"
    STAGED = "staged sink file"
    MAINTENANCE = "maintenance"
    FOREIGN = "foreign"

    @property
    def lists_files(self) -> bool:
        """Whether objects of this kind list data files, so that each is a root."""
        return self in (ObjectKind.MANIFEST, ObjectKind.CHECKPOINT, ObjectKind.OPERATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectName:
    """The parsed name of an object.

    Attributes:
        epoch: the number of its directory, which may differ from the epoch of its writer.
        worker_generation: of its directory; None in the legacy layout.
        compacted: whether it is a data file that a merge wrote.
    """

    kind: ObjectKind
    epoch: Epoch | None = None
    worker_generation: WorkerGeneration | None = None
    compacted: bool = False


# A placeholder is one segment: `operator-{id}/my-backup/table-t-000` is a user's file. The files of
# an id with a slash (arroyo-state.md 1.3) are known only by metadata: referenced, or foreign.
_SUBTASK = number_pattern(3)
_IN_CHECKPOINT = (
    # No name ends in a dot or a space, because some file systems drop them.
    (ObjectKind.DATA, re.compile(rf"operator-[^/]+/table-[^/]*-{_SUBTASK}(?:-[^/]*[^/. ])?")),
    (ObjectKind.SUBTASK, re.compile(rf"operator-[^/]+-{number_pattern()}\.metadata")),
    (ObjectKind.OPERATOR, re.compile(r"operator-[^/]+/metadata")),
)
_DIRECTORY = re.compile(
    rf"(?:generations/({number_pattern()})/)?checkpoints/{CHECKPOINT_DIR}/(.+)", re.DOTALL
)
_GENERATION = re.compile(rf"generations/({number_pattern()})/generation-manifest\.json")
_RECORD = re.compile(rf"epochs/{EPOCH_RECORD}")
_ALONE = {CHECKPOINT_MANIFEST: ObjectKind.MANIFEST, COMMITTED_MARKER: ObjectKind.MARKER}
_ALONE_IN_LEGACY = {"metadata": ObjectKind.CHECKPOINT}
_WITH_SINKS = ("topics", "spark-sinks")
_FOREIGN = ObjectName(kind=ObjectKind.FOREIGN)


def object_name(paths: JobPaths, path: str) -> ObjectName:
    """Parse the name of an object below the job at `paths`; `FOREIGN` for every other path."""
    root = f"{paths.root}/"
    if not path.startswith(root):
        return _FOREIGN
    rest = path[len(root) :]
    if rest.startswith(f"{OUR_DIRECTORY}/"):
        return _of_maintenance(rest)
    match = _DIRECTORY.fullmatch(rest)
    if match is not None:
        return _in_checkpoint(paths.layout, match)
    return _FOREIGN if paths.layout is Layout.LEGACY else _of_protocol(rest)


def _in_checkpoint(layout: Layout, found: re.Match[str]) -> ObjectName:
    generation, epoch, name = found.groups()
    protocol = layout is Layout.PROTOCOL
    if protocol is (generation is None):
        return _FOREIGN
    kind = _kind(name, protocol)
    return _named(kind, epoch, generation, kind is ObjectKind.DATA and name.endswith(COMPACTED))


@functools.lru_cache(maxsize=1000)
def _named(kind: ObjectKind, epoch: str, generation: str | None, compacted: bool) -> ObjectName:
    """Return a shared object: neighbours in a listing have equal parsed names."""
    return ObjectName(
        kind=kind,
        epoch=Epoch(int(epoch)),
        worker_generation=None if generation is None else WorkerGeneration(int(generation)),
        compacted=compacted,
    )


def _kind(name: str, protocol: bool) -> ObjectKind:
    alone = (_ALONE if protocol else _ALONE_IN_LEGACY).get(name)
    if alone is not None:
        return alone
    for kind, pattern in _IN_CHECKPOINT:
        if pattern.fullmatch(name):
            return kind
    return ObjectKind.FOREIGN


def _of_maintenance(rest: str) -> ObjectName:
    segments = rest.split("/")  # …/{area}/{topic}/_staging/{operator}/{name}
    staged = len(segments) == 6 and segments[1] in _WITH_SINKS and segments[3] == STAGING
    epoch = parse_staged_name(segments[5]) if staged else None
    if epoch is not None:
        return ObjectName(kind=ObjectKind.STAGED, epoch=epoch)
    return ObjectName(kind=ObjectKind.MAINTENANCE)


def _of_protocol(rest: str) -> ObjectName:
    if rest == CURRENT_GENERATION:
        return ObjectName(kind=ObjectKind.FENCE)
    match = _GENERATION.fullmatch(rest)
    if match is not None:
        number = WorkerGeneration(int(match[1]))
        return ObjectName(kind=ObjectKind.GENERATION, worker_generation=number)
    match = _RECORD.fullmatch(rest)
    if match is not None:
        return ObjectName(kind=ObjectKind.RECORD, epoch=Epoch(int(match[1])))
    return _FOREIGN


# ---- sequences of objects ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as listed. None: the store does not report the field, or was not asked."""

    json_as_list: ClassVar[bool] = True
    path: StatePath
    size_bytes: int | None = None
    modified_micros: int | None = None
    etag: str | None = None


_Pack = tuple[bytes, bytes | None]
_END = "\0"


class Packed:
    """An immutable sequence of objects, compressed in packs of a thousand: about 20 bytes each.

    It keeps plans over millions of objects small.
    """

    __slots__ = ("_count", "_packs", "size_bytes")

    def __init__(self, objects: Iterable[StoredObject] = ()) -> None:
        self._packs: tuple[_Pack, ...]
        packs, count, size = [], 0, 0
        for batch in batched(objects):
            packs.append(_pack(batch))
            count += len(batch)
            size += sum(entry.size_bytes or 0 for entry in batch)
        self._packs, self._count = tuple(packs), count
        self.size_bytes = size

    @classmethod
    def of_paths(cls, paths: Iterable[StatePath]) -> Packed:
        """Pack objects of which only the path is known."""
        whole, waiting = cls(), iter(paths)
        packs = []
        while batch := list(itertools.islice(waiting, BATCH)):
            packs.append(_pack_columns(batch, None, None, None))
            whole._count += len(batch)
        whole._packs = tuple(packs)
        return whole

    @classmethod
    def joined(cls, parts: Iterable[Packed]) -> Packed:
        """Concatenate several sequences without packing them again."""
        whole = cls()
        for part in parts:
            whole._packs += part._packs
            whole._count += part._count
            whole.size_bytes += part.size_bytes
        return whole

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StoredObject]:
        for batch in self.batches():
            yield from batch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packed) and self._packs == other._packs

    def __hash__(self) -> int:
        return hash(self._packs)

    def __repr__(self) -> str:
        return f"Packed({self._count} objects, {self.size_bytes} bytes)"

    def batches(self) -> Iterator[list[StoredObject]]:
        """Yield lists of up to a thousand objects."""
        return (_unpacked(pack) for pack in self._packs)

    @property
    def batch_count(self) -> int:
        """The number of batches."""
        return len(self._packs)

    @property
    def paths(self) -> Iterator[StatePath]:
        """The paths of the objects, in order."""
        new = str.__new__  # the paths were checked when they were packed
        return (new(StatePath, text) for text in self.texts)

    @property
    def texts(self) -> Iterator[str]:
        """The paths as plain text, in order; several times faster than `paths`."""
        for pack in self._packs:
            yield from _paths_in(pack)


def batched(objects: Iterable[StoredObject]) -> Iterator[list[StoredObject]]:
    """Yield lists of up to `BATCH` objects, in order."""
    batch: list[StoredObject] = []
    for entry in objects:
        batch.append(entry)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _pack(batch: list[StoredObject]) -> _Pack:
    return _pack_columns(
        [entry.path for entry in batch],
        _column([entry.size_bytes for entry in batch]),
        _column([entry.modified_micros for entry in batch]),
        _column([entry.etag for entry in batch]),
    )


def _pack_columns(paths: Sequence[str], *others: list[Any] | None) -> _Pack:
    """Compress the paths, joined by NUL, and the other columns as JSON.

    A column is null if no value of it is known; if no column is known, the JSON is None.
    """
    joined = _END.join(paths)
    if joined.count(_END) != len(paths) - 1:
        raise InputError("a path holds a NUL", next_step="report it: no store has such names")
    filled = any(column is not None for column in others)
    return (
        zlib.compress(joined.encode("utf-8", "surrogatepass"), 1),
        zlib.compress(json.dumps(others, separators=(",", ":")).encode(), 1) if filled else None,
    )


def _paths_in(pack: _Pack) -> list[str]:
    return zlib.decompress(pack[0]).decode("utf-8", "surrogatepass").split(_END)


def _column(values: list[Any]) -> list[Any] | None:
    return None if values.count(None) == len(values) else values


def _unpacked(pack: _Pack) -> list[StoredObject]:
    new = str.__new__
    paths = [new(StatePath, path) for path in _paths_in(pack)]
    if pack[1] is None:
        return [*map(StoredObject, paths)]
    nothing = [None] * len(paths)
    others = json.loads(zlib.decompress(pack[1]))
    return [*map(StoredObject, paths, *(column or nothing for column in others))]


NOTHING = Packed()
