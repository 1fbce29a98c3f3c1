"""A topic with records in files: one file or a directory, fixed or growing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.dataflow.storage.boundary import FILE_METADATA
from arroyo_dagster.dataflow.topics.folders import Folder, FolderEntry, refuse_compressed
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.errors import ArroyoStateError, InputError, ProtocolError
from arroyo_dagster.state.runtime.operators import Offset, Source
from arroyo_dagster.state.storage.concurrency import concurrently

ROWS_PER_EPOCH = 100_000

FILE = "file:"
"""The prefix of files in an offset. Members without it belong to an earlier binding of the topic;
they are kept, so that a later run with that binding continues at its position."""

FileProgress = tuple[int, int, int]
"""The read position in a file, its fingerprint, and its number in the order of discovery."""


class Format(Protocol):
    """A file format with records; see the methods of `Lines` for details."""

    def length(self, folder: Folder, entry: FolderEntry) -> int:
        """Return the end position of the file."""

    def check(self, folder: Folder, entry: FolderEntry, position: int, fingerprint: int) -> None:
        """Check that the file is the one that was read up to `position`."""

    def fingerprint(self, folder: Folder, entry: FolderEntry, position: int) -> int:
        """Return a checksum that identifies a file that was read up to `position`."""

    def extent(
        self, folder: Folder, entry: FolderEntry, start: int, room: int, *, final: bool
    ) -> tuple[int, int]:
        """Return the end position of one epoch, and the number of its records."""

    def cuts(self, folder: Folder, name: str, start: int, end: int) -> Sequence[int]:
        """Return positions between `start` and `end`, both exclusive, at which to split."""

    def batches(
        self, folder: Folder, name: str, number: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records from `start` (inclusive) to `end` (exclusive); `number`: partition."""


@dataclass(frozen=True, slots=True, order=True)
class FileSplit:
    """A range of one file that one epoch reads. `number`: the partition of its records."""

    number: int
    name: str
    start: int
    end: int


class FileSource(Source):
    """Records of a file, or of all files directly in a directory, in the order of their names.

    The offset has the read position and a fingerprint of every file. A file that is shorter than
    before or has another fingerprint is an error, so that no record is skipped silently. A file
    that appears later is read completely, whatever its name.

    Args:
        topic: the topic, for messages.
        folder: the files.
        holds: the format of the files.
        follow: whether files may grow or appear. A last line without a line end is then not read
            until it has one.
        rows_per_epoch: the maximum number of records per epoch.

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
            entries = self._folder.entries()
            for entry in entries:
                refuse_compressed(self._folder.where, entry.name)
        except ArroyoStateError as error:
            error.facts.setdefault("topic", self._topic)
            raise
        return entries

    def initial_offset(self) -> Offset:
        """Return the offset before all files."""
        return {}

    def check_offset(self, offset: Offset) -> None:
        """Check the files that were read.

        Raises:
            ProtocolError: a file is shorter than the part that was read, or was replaced.
        """

        def check(entry: FolderEntry) -> None:
            position, fingerprint, _ = self._progress(offset, entry.name)
            length = self._format.length(self._folder, entry)
            if length < position:
                raise self._shorter(entry, position, length)
            if position and self._format.fingerprint(self._folder, entry, position) != fingerprint:
                raise ProtocolError(
                    "the beginning of a file that was read has changed",
                    topic=self._topic,
                    path=self._folder.where,
                    file=entry.name,
                    next_step="give a file of other records another name; nothing was written",
                )

        concurrently(check, self._entries())

    def latest_offset(self, start: Offset) -> Offset:
        """Return the offset after at most `rows_per_epoch` more records.

        Raises:
            ProtocolError: a file is shorter than the part that was read, or was replaced.
            FormatError: a file is invalid.
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
        """Return one split, or several for a large range, for each file that the epoch reads."""
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
        """Yield the records of one split, with the name of the file as metadata."""
        name = {FILE_METADATA: partition.name.encode()}
        for batch in self._format.batches(
            self._folder, partition.name, partition.number, partition.start, partition.end
        ):
            yield batch.replace_schema_metadata(name)

    def exhausted(self, offset: Offset) -> bool:
        """Return whether every file was read to its end; with `follow`, always False."""
        return not self._follow and all(
            self._progress(offset, entry.name)[0] >= self._format.length(self._folder, entry)
            for entry in self._entries()
        )
