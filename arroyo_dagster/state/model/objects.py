"""What the name of an object below a job says of it, and many objects kept small in memory."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
"""How many objects one request deletes, and one pack holds."""


class ObjectKind(enum.Enum):
    """What an object is, by its name alone. `FOREIGN` is every name that nobody here gives."""

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
    """The name of an object, taken apart.

    Attributes:
        epoch: the number of its directory, which need not be the epoch of what wrote it.
        worker_generation: of its directory; None in the legacy layout.
        compacted: a data file that was merged of others.
    """

    kind: ObjectKind
    epoch: Epoch | None = None
    worker_generation: WorkerGeneration | None = None
    compacted: bool = False


# A placeholder is one segment: `operator-{id}/my-backup/table-t-000` is a user's. An id that holds
# a slash (arroyo-state.md 1.3) is known by metadata alone: its files are referenced, or foreign.
_SUBTASK = number_pattern(3)
_IN_CHECKPOINT = (
    # Nor does a name end in a dot or a space, which some file systems drop.
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
    """Say what an object below the job at `paths` is; `FOREIGN` for every other path."""
    root = f"{paths.root}/"
    if not path.startswith(root):
        return _FOREIGN
    rest = path[len(root) :]
    if rest.startswith(f"{OUR_DIRECTORY}/"):
        return _of_maintenance(rest)
    found = _DIRECTORY.fullmatch(rest)
    if found is not None:
        return _in_checkpoint(paths.layout, found)
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
    """Neighbours in a listing have the same name, taken apart."""
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
    found = _GENERATION.fullmatch(rest)
    if found is not None:
        number = WorkerGeneration(int(found[1]))
        return ObjectName(kind=ObjectKind.GENERATION, worker_generation=number)
    found = _RECORD.fullmatch(rest)
    if found is not None:
        return ObjectName(kind=ObjectKind.RECORD, epoch=Epoch(int(found[1])))
    return _FOREIGN


# ---- many of them --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was listed. None: the store does not say, or nobody has looked."""

    path: StatePath
    size_bytes: int | None = None
    modified_micros: int | None = None
    etag: str | None = None


_Pack = tuple[bytes, bytes | None]
_END = "\0"


class Packed:
    """A sequence of objects in their order, packed by the thousand: some 20 bytes each.

    Plans over millions of objects are values like any other, and small.
    """

    __slots__ = ("_count", "_packs", "size_bytes")

    def __init__(self, objects: Iterable[StoredObject] = ()) -> None:
        self._packs: tuple[_Pack, ...]
        packs, count, size = [], 0, 0
        for batch in batched(objects):
            packs.append(_pack(batch))
            count += len(batch)
            size += sum(one.size_bytes or 0 for one in batch)
        self._packs, self._count = tuple(packs), count
        self.size_bytes = size

    @classmethod
    def of_paths(cls, paths: Iterable[StatePath]) -> Packed:
        """Objects of which the path alone is known."""
        whole, waiting = cls(), iter(paths)
        packs = []
        while batch := list(itertools.islice(waiting, BATCH)):
            packs.append(_pack_columns(batch, None, None, None))
            whole._count += len(batch)
        whole._packs = tuple(packs)
        return whole

    @classmethod
    def joined(cls, parts: Iterable[Packed]) -> Packed:
        """Several, one after the other; nothing is packed anew."""
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
        """Up to a thousand objects at a time."""
        return (_unpacked(pack) for pack in self._packs)

    @property
    def batch_count(self) -> int:
        """How many batches there are."""
        return len(self._packs)

    @property
    def paths(self) -> Iterator[StatePath]:
        """Their paths, in order."""
        new = str.__new__  # checked when they were packed
        return (new(StatePath, text) for text in self.texts)

    @property
    def texts(self) -> Iterator[str]:
        """Their paths, in order, as plain text: several times as fast."""
        for pack in self._packs:
            yield from _paths_in(pack)


def batched(objects: Iterable[StoredObject], size: int = BATCH) -> Iterator[list[StoredObject]]:
    """Lists of up to `size` objects, in order."""
    batch: list[StoredObject] = []
    for one in objects:
        batch.append(one)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _pack(batch: list[StoredObject]) -> _Pack:
    return _pack_columns(
        [one.path for one in batch],
        _column([one.size_bytes for one in batch]),
        _column([one.modified_micros for one in batch]),
        _column([one.etag for one in batch]),
    )


def _pack_columns(paths: Sequence[str], *others: list[Any] | None) -> _Pack:
    """Paths joined by what none of them holds; other columns, null if nothing is known of one, as
    JSON; each compressed.
    """
    joined = _END.join(paths)
    if joined.count(_END) != len(paths) - 1:
        raise InputError("a path holds a NUL", next_step="report it: no store has such names")
    known = any(column is not None for column in others)
    return (
        zlib.compress(joined.encode("utf-8", "surrogatepass"), 1),
        zlib.compress(json.dumps(others, separators=(",", ":")).encode(), 1) if known else None,
    )


def _paths_in(pack: _Pack) -> list[str]:
    return zlib.decompress(pack[0]).decode("utf-8", "surrogatepass").split(_END)


def _column(values: list[Any]) -> list[Any] | None:
    return None if values.count(None) == len(values) else values


def _unpacked(pack: _Pack) -> list[StoredObject]:
    new = str.__new__
    found = [new(StatePath, path) for path in _paths_in(pack)]
    if pack[1] is None:
        return [*map(StoredObject, found)]
    nothing = [None] * len(found)
    others = json.loads(zlib.decompress(pack[1]))
    return [*map(StoredObject, found, *(column or nothing for column in others))]


NOTHING = Packed()
