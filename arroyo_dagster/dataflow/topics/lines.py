"""Records that are lines of text: JSON lines, plain text, CSV. Positions are bytes."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from arroyo_dagster.dataflow.topics.folders import Folder, FolderEntry
from arroyo_dagster.dataflow.topics.records import MAX_SPLITS, Found, record_batches
from arroyo_dagster.errors import FormatError, ProtocolError

BLOCK_BYTES = 1 << 20
LONGEST_BYTES = 1 << 26
"""How long one record may be: a file without line ends must not fill the memory."""

MIN_SPLIT_BYTES = 1 << 20
"""What is shorter is not worth a task of its own."""

HEAD_BYTES = 1024
"""How much of a file's beginning tells it from another of the same name."""

_BOM = b"\xef\xbb\xbf"
_NEWLINE, _QUOTE = 10, 34
_PROBE_BYTES = 1 << 14


def record_ends(data: bytes, *, quoted: bool) -> np.ndarray:
    """The position behind each line end that ends a record.

    Args:
        data: begins with a record.
        quoted: whether a line end between double quotes belongs to the record, as in CSV.
    """
    letters = np.frombuffer(data, dtype=np.uint8)
    ends = letters == _NEWLINE
    if quoted:
        ends &= (np.cumsum(letters == _QUOTE, dtype=np.int64) & 1) == 0
    return np.flatnonzero(ends) + 1


@dataclass(frozen=True, slots=True)
class Lines:
    """A record a line; blank lines are none. The bytes of the line are the value."""

    def length(self, folder: Folder, entry: FolderEntry) -> int:
        """The position behind the last byte."""
        return entry.size_bytes

    def check(self, folder: Folder, entry: FolderEntry, position: int, fingerprint: int) -> None:
        """Prove that the file is the one that was read up to `position`, only longer.

        Raises:
            ProtocolError: it is another, or the line that was its last has been continued.
        """
        facts: dict[str, Any] = {"path": folder.where, "file": entry.name, "position": position}
        if self.fingerprint(folder, entry, position) != fingerprint:
            raise ProtocolError(
                "the beginning of a partly read file has changed",
                next_step="give a file of other records another name; nothing was written",
                **facts,
            )
        around = folder.read(entry.name, position - 1, 2)
        if around[:1] not in (b"\n", b"\r") and around[1:] not in (b"\n", b"\r"):
            raise ProtocolError(
                "the last line of a file was read without a line end, and was continued later",
                next_step="begin appended data with a line end, or read such a file with follow",
                **facts,
            )

    def fingerprint(self, folder: Folder, entry: FolderEntry, position: int) -> int:
        """What tells the file from another, once it was read up to `position`."""
        return zlib.crc32(folder.read(entry.name, 0, min(position, HEAD_BYTES)))

    def extent(
        self, folder: Folder, entry: FolderEntry, start: int, room: int, *, final: bool
    ) -> tuple[int, int]:
        """How far one epoch may read.

        Args:
            room: how many records at most.
            final: whether a last line without its line end is a record.

        Returns:
            The position behind the last record, and how many lines there are up to it.

        Raises:
            FormatError: a record is too long.
        """
        end, count, data = start, 0, b""
        while count < room:
            block = folder.read(
                entry.name,
                end + len(data),
                min(BLOCK_BYTES, entry.size_bytes - end - len(data)),
            )
            data += block
            ends = record_ends(data, quoted=self._quoted)[: room - count]
            if len(ends):
                count += len(ends)
                end, data = end + int(ends[-1]), data[int(ends[-1]) :]
            if not block:
                return (end + len(data), count + 1) if final and data else (end, count)
            if len(data) > LONGEST_BYTES and not len(ends):
                raise too_long(folder, entry.name, end)
        return end, count

    def read(self, folder: Folder, name: str, start: int, end: int) -> Iterator[Found]:
        """The records from `start` (included) to `end` (excluded)."""
        for at, line in self._lines(folder, name, start, end):
            if line.strip():
                yield Found(at, line)

    def batches(
        self, folder: Folder, name: str, number: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """As `read`, as rows; `number`: their partition."""
        return record_batches(self.read(folder, name, start, end), number)

    def cuts(self, folder: Folder, name: str, start: int, end: int) -> Sequence[int]:
        """Where parts begin that may be read apart; none where a line end may be none."""
        step = max(MIN_SPLIT_BYTES, -(-(end - start) // MAX_SPLITS))
        found: list[int] = []
        at = start + step
        while at < end and not self._quoted:
            at = self._behind_line(folder, name, at - 1, end)
            if at < end:
                found.append(at)
            at += step
        return found

    def _behind_line(self, folder: Folder, name: str, at: int, end: int) -> int:
        """The position behind the first line end at or behind `at`; `end` if there is none."""
        while at < end:
            block = folder.read(name, at, min(_PROBE_BYTES, end - at))
            found = block.find(b"\n")
            if found >= 0:
                return at + found + 1
            if not block:
                break
            at += len(block)
        return end

    @property
    def _quoted(self) -> bool:
        return False

    def _lines(
        self, folder: Folder, name: str, start: int, end: int
    ) -> Iterator[tuple[int, bytes]]:
        """Each line with its position, without its end and a byte order mark."""
        data, at = b"", start
        while at < end:
            block = folder.read(name, at + len(data), min(BLOCK_BYTES, end - at - len(data)))
            data += block
            ends = record_ends(data, quoted=self._quoted).tolist()
            if not block:
                ends = [*ends, len(data)] if data else ends
            begin = 0
            for stop in ends:
                line = data[begin:stop].rstrip(b"\r\n")
                yield at + begin, line.removeprefix(_BOM) if at + begin == 0 else line
                begin = stop
            data, at = data[begin:], at + begin
            if not block:
                return


@dataclass(frozen=True, slots=True)
class CsvRows(Lines):
    """A record a row below a header; a cell in double quotes may hold line ends.

    Args:
        encode: the value of a row, given its cells by column.
    """

    encode: Callable[[dict[str, str]], bytes]

    @property
    def _quoted(self) -> bool:
        return True

    def read(self, folder: Folder, name: str, start: int, end: int) -> Iterator[Found]:
        """The rows from `start` (included) to `end` (excluded), the header left out.

        Raises:
            FormatError: a row has not the columns of the header, or is no UTF-8.
        """
        rows = self._lines(folder, name, start, end)
        header = self._header(folder, name)
        for at, line in rows:
            if at == 0 or not line.strip():
                continue
            cells = _cells(line, folder, name, at)
            if len(cells) != len(header):
                raise FormatError(
                    f"a row has {len(cells)} cells, its header {len(header)} columns",
                    path=folder.where,
                    file=name,
                    position=at,
                )
            yield Found(at, self.encode(dict(zip(header, cells, strict=True))))

    def _header(self, folder: Folder, name: str) -> list[str]:
        end, _ = self.extent(folder, FolderEntry(name, LONGEST_BYTES), 0, 1, final=True)
        for _, line in self._lines(folder, name, 0, end):
            return _cells(line, folder, name, 0)
        return []


def _cells(line: bytes, folder: Folder, name: str, at: int) -> list[str]:
    try:
        text = line.decode()
        return next(csv.reader([text], strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(
            f"a row is not CSV in UTF-8 ({error})", path=folder.where, file=name, position=at
        ) from error


def too_long(folder: Folder, name: str, at: int) -> FormatError:
    """The error for a record without an end in sight."""
    return FormatError(
        f"a record is longer than {LONGEST_BYTES >> 20} MiB",
        path=folder.where,
        file=name,
        position=at,
        next_step="check that its lines end and its quotes are closed",
    )
