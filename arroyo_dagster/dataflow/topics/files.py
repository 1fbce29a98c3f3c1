"""A topic whose records lie in files: one file or a directory, as it is or as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.dataflow.topics.folders import Folder, FolderEntry, refuse_compressed
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.errors import ArroyoStateError, InputError, ProtocolError
from arroyo_dagster.state.runtime.operators import Offset, Source

ROWS_PER_EPOCH = 100_000

FILE = "file:"
"""What begins the members of an offset that are files. Others are of what the topic was bound to
before, and stay: bound to it again, it goes on where it was."""

FileProgress = tuple[int, int, int]
"""How far a file was read, what tells it from another, and its number: which was seen when."""


class Format(Protocol):
    """How a file holds records; `Lines` says what each method promises."""

    def length(self, folder: Folder, entry: FolderEntry) -> int:
        """The position at which nothing is left."""

    def check(self, folder: Folder, entry: FolderEntry, position: int, fingerprint: int) -> None:
        """Prove that the file is the one that was read up to `position`."""

    def fingerprint(self, folder: Folder, entry: FolderEntry, position: int) -> int:
        """What tells the file from another, once it was read up to `position`."""

    def extent(
        self, folder: Folder, entry: FolderEntry, start: int, room: int, *, final: bool
    ) -> tuple[int, int]:
        """How far one epoch may read, and how many records that are."""

    def cuts(self, folder: Folder, name: str, start: int, end: int) -> Sequence[int]:
        """Positions between `start` and `end` at which parts begin that may be read apart."""

    def batches(
        self, folder: Folder, name: str, number: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """The records from `start` to `end`; `number`: their partition."""


@dataclass(frozen=True, slots=True, order=True)
class FileSplit:
    """What one epoch takes of one file. `number`: the partition of its records."""

    number: int
    name: str
    start: int
    end: int


class FileSource(Source):
    """Records of a file, or of all files directly in a directory, in the order of
    their names as they are found.

    The offset says of every file how far it was read, and what tells it from another of its name:
    one that is shorter or begins otherwise than before is refused, so that nothing is skipped
    silently. A file that appears later is read whole, whatever its name.

    Args:
        topic: for messages.
        folder: where the files are.
        holds: how they hold records.
        follow: whether more may come: a last line without its end is then left until it has one.
        rows_per_epoch: how many records one epoch takes at most.

    Raises:
        NotFoundError: there is no such file or directory.
        InputError: a file is compressed, or `rows_per_epoch` is below 1.
    """

    schema = RECORDS

    def __init__(
        self,
        topic: str,
        folder: Folder,
        holds: Format,
        *,
        follow: bool = False,
        rows_per_epoch: int = ROWS_PER_EPOCH,
    ) -> None:
        if rows_per_epoch < 1:
            raise InputError("rows_per_epoch is at least 1", topic=topic, given=rows_per_epoch)
        self._topic = topic
        self._folder = folder
        self._format = holds
        self._follow = follow
        self._rows_per_epoch = rows_per_epoch
        self._entries()

    def _entries(self) -> list[FolderEntry]:
        try:
            found = self._folder.entries()
            for entry in found:
                refuse_compressed(self._folder.where, entry.name)
        except ArroyoStateError as error:
            error.facts.setdefault("topic", self._topic)
            raise
        return found

    def initial_offset(self) -> Offset:
        """Nothing was read of any file."""
        return {}

    def latest_offset(self, start: Offset) -> Offset:
        """At most `rows_per_epoch` records on.

        Raises:
            ProtocolError: a file is shorter than what was read of it, or another.
            FormatError: a file is not what its format says.
        """
        end, room = dict(start), self._rows_per_epoch
        for entry in self._entries():
            position, fingerprint, number = self._progress(end, entry.name)
            length = self._format.length(self._folder, entry)
            if length < position:
                raise self._shorter(entry, position, length)
            if length == position or not room:
                continue
            if position:
                self._format.check(self._folder, entry, position, fingerprint)
            stop, count = self._format.extent(
                self._folder, entry, position, room, final=not self._follow
            )
            room -= count
            if stop > position:
                end[FILE + entry.name] = [
                    stop,
                    self._format.fingerprint(self._folder, entry, stop),
                    number,
                ]
        return end

    @staticmethod
    def _progress(offset: Offset, name: str) -> FileProgress:
        seen = sum(member.startswith(FILE) for member in offset)
        position, fingerprint, number = offset.get(FILE + name, (0, 0, seen))
        return position, fingerprint, number

    def _shorter(self, entry: FolderEntry, position: int, length: int) -> ProtocolError:
        return ProtocolError(
            "a file is shorter than the part of it that was already read",
            topic=self._topic,
            path=self._folder.where,
            file=entry.name,
            read=position,
            found=length,
            next_step="give a file of other records another name; nothing was written",
        )

    def partitions(self, start: Offset, end: Offset) -> Sequence[FileSplit]:
        """For each file of which the epoch takes something one split, or some of a large part."""
        splits: list[FileSplit] = []
        names = (member.removeprefix(FILE) for member in end if member.startswith(FILE))
        for name in names:
            (first, _, _), (last, _, number) = (
                self._progress(start, name),
                self._progress(end, name),
            )
            if first != last:
                places = [first, *self._format.cuts(self._folder, name, first, last), last]
                splits += (FileSplit(number, name, *part) for part in pairwise(places))
        return sorted(splits)

    def read(self, partition: FileSplit) -> Iterator[pa.RecordBatch]:
        """The records of one split."""
        return self._format.batches(
            self._folder, partition.name, partition.number, partition.start, partition.end
        )

    def exhausted(self, offset: Offset) -> bool:
        """Whether every file was read to its end, unless more may come."""
        return not self._follow and all(
            self._progress(offset, entry.name)[0] >= self._format.length(self._folder, entry)
            for entry in self._entries()
        )
