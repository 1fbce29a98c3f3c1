"""Read records from lines of text: JSON lines, plain text, CSV. Positions are in bytes."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.topics.folders import Folder, FolderEntry
from arroyo_dagster.dataflow.topics.records import (
    BATCH_RECORDS,
    MAX_SPLITS,
    RECORDS,
    Found,
    record_batches,
)
from arroyo_dagster.errors import FormatError, ProtocolError
from arroyo_dagster.state.storage.concurrency import read_ahead

Positions = npt.NDArray[np.int64]

BLOCK_BYTES = 1 << 20
LONGEST_BYTES = 1 << 26
"""The maximum size of one record, which bounds the memory for a file without line ends."""

MIN_SPLIT_BYTES = 1 << 20
"""The minimum size of a split, so that a task is worth its cost."""

HEAD_BYTES = 1024
"""The size of the beginning of a file that its fingerprint covers."""

_BOM = b"\xef\xbb\xbf"
_NEWLINE, _SPACE, _QUOTE = 10, 32, 34
_READ_AHEAD_BYTES = 8 * BLOCK_BYTES
_PROBE_BYTES = 1 << 14


def record_ends(data: bytes, *, quoted: bool) -> Positions:
    """Return the position after each line end that ends a record.

    Args:
        data: bytes that begin with a record.
        quoted: whether a line end inside double quotes is part of the record, as in CSV.
    """
    return np.flatnonzero(_is_end(data, quoted=quoted)) + 1


def _is_end(data: bytes, *, quoted: bool) -> npt.NDArray[np.bool_]:
    """Return whether each byte is a line end that ends a record."""
    letters = np.frombuffer(data, dtype=np.uint8)
    ends: npt.NDArray[np.bool_] = letters == _NEWLINE
    if quoted:
        ends &= (np.cumsum(letters == _QUOTE, dtype=np.int64) & 1) == 0
    return ends


def _batches_of_lines(
    at: int, data: bytes, begins: Positions, ends: Positions, partition: int
) -> list[pa.RecordBatch]:
    """Return lines that are not blank as rows, without line ends and a byte order mark.

    Args:
        at: the position of `data` in the file.
        data: whole lines.
        begins, ends: where each line begins and ends in `data`.
        partition: of the rows.
    """
    first = begins
    if at == 0 and data.startswith(_BOM):
        first = begins.copy()
        first[0] = len(_BOM)
    offsets = pa.py_buffer(np.append(first[:1], ends).astype(np.int32))
    # The kernels for ASCII take any bytes; nothing here needs them to be text.
    lines = pa.Array.from_buffers(pa.string(), len(ends), [None, offsets, pa.py_buffer(data)])
    rows = pa.RecordBatch.from_arrays(
        [pc.ascii_rtrim(lines, "\r\n").cast(pa.binary()), pa.array(begins + at, pa.int64())],
        ["value", "offset"],
    )
    letters = np.frombuffer(data, dtype=np.uint8)
    if first[-1] == len(data) or (letters[first] <= _SPACE).any():  # a line may be blank
        rows = rows.filter(pc.not_equal(pc.ascii_trim_whitespace(lines), ""))
    count = rows.num_rows
    whole = pa.RecordBatch.from_arrays(
        [
            pa.nulls(count, pa.binary()),
            rows.column(0),
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            rows.column(1),
            pa.nulls(count, pa.timestamp("ms")),
        ],
        schema=RECORDS,
    )
    return [whole.slice(row, BATCH_RECORDS) for row in range(0, count, BATCH_RECORDS)]


@dataclass(frozen=True, slots=True)
class Lines:
    """One record per line; the bytes of the line are the value. Blank lines are skipped."""

    def length(self, folder: Folder, entry: FolderEntry) -> int:
        """Return the position after the last byte."""
        return entry.size_bytes

    def check(self, folder: Folder, entry: FolderEntry, position: int, fingerprint: int) -> None:
        """Check that the file is the one that was read up to `position`, with data appended.

        Raises:
            ProtocolError: its beginning has changed, or its last read line was continued.
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
        """Return a checksum of the first `HEAD_BYTES` bytes, up to `position`."""
        return zlib.crc32(folder.read(entry.name, 0, min(position, HEAD_BYTES)))

    def extent(
        self, folder: Folder, entry: FolderEntry, start: int, room: int, *, final: bool
    ) -> tuple[int, int]:
        """Return the end of the range that one epoch reads.

        Args:
            folder: the folder of the file.
            entry: the file.
            start: the first byte.
            room: the maximum number of records.
            final: whether a last line without a line end is a record.

        Returns:
            The position after the last record, and the number of lines from `start`.

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
            added, size = self._records(data, room - count)
            count, end, data = count + added, end + size, data[size:]
            if not block:
                return (end + len(data), count + 1) if final and data else (end, count)
            if len(data) > LONGEST_BYTES and not added:
                raise too_long(folder, entry.name, end)
        return end, count

    def _records(self, data: bytes, most: int) -> tuple[int, int]:
        """Return the number of whole records in `data`, up to `most`, and their size in bytes."""
        is_end = _is_end(data, quoted=self._quoted)
        count = int(np.count_nonzero(is_end))
        if not count:
            return 0, 0
        if count <= most:
            return count, len(is_end) - int(is_end[::-1].argmax())
        return most, int(np.flatnonzero(is_end)[most - 1]) + 1

    def batches(
        self, folder: Folder, name: str, number: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records from `start` (inclusive) to `end` (exclusive) as rows.

        Args:
            folder: the folder of the file.
            name: the file.
            number: the partition of the records.
            start, end: bytes.
        """

        def rows_of(block: tuple[int, bytes, Positions]) -> list[pa.RecordBatch]:
            offset, data, ends = block
            return _batches_of_lines(offset, data, np.append(0, ends[:-1]), ends, number)

        blocks = ((block, len(block[1])) for block in self._blocks(folder, name, start, end))
        for batches in read_ahead(rows_of, blocks, _READ_AHEAD_BYTES):
            yield from batches

    def cuts(self, folder: Folder, name: str, start: int, end: int) -> Sequence[int]:
        """Return positions at which to split; none for CSV, since a line end can be quoted."""
        step = max(MIN_SPLIT_BYTES, -(-(end - start) // MAX_SPLITS))
        cuts: list[int] = []
        cut = start + step
        while cut < end and not self._quoted:
            cut = self._behind_line(folder, name, cut - 1, end)
            if cut < end:
                cuts.append(cut)
            cut += step
        return cuts

    def _behind_line(self, folder: Folder, name: str, at: int, end: int) -> int:
        """Return the position after the first line end at or after `at`; `end` if there is none."""
        while at < end:
            block = folder.read(name, at, min(_PROBE_BYTES, end - at))
            newline = block.find(b"\n")
            if newline >= 0:
                return at + newline + 1
            if not block:
                break
            at += len(block)
        return end

    @property
    def _quoted(self) -> bool:
        return False

    def _blocks(
        self, folder: Folder, name: str, start: int, end: int
    ) -> Iterator[tuple[int, bytes, Positions]]:
        """Yield whole lines: their position in the file, their bytes, and the end of each."""
        data, pos = b"", start
        while pos < end:
            block = folder.read(name, pos + len(data), min(BLOCK_BYTES, end - pos - len(data)))
            data += block
            ends = record_ends(data, quoted=self._quoted)
            if not block and data and not (len(ends) and ends[-1] == len(data)):
                ends = np.append(ends, len(data))
            if len(ends):
                yield pos, data, ends
                data, pos = data[int(ends[-1]) :], pos + int(ends[-1])
            if not block:
                return


@dataclass(frozen=True, slots=True)
class CsvRows(Lines):
    """One record per row below a header; a cell in double quotes may contain line ends.

    Args:
        encode: returns the value of a row from its cells by column.
    """

    encode: Callable[[dict[str, str]], bytes]

    @property
    def _quoted(self) -> bool:
        return True

    def read(self, folder: Folder, name: str, start: int, end: int) -> Iterator[Found]:
        """Yield the rows from `start` (inclusive) to `end` (exclusive), without the header.

        Raises:
            FormatError: a row has another number of cells than the header, or is not CSV in UTF-8.
        """
        rows = self._lines(folder, name, start, end)
        header = self._header(folder, name)
        for position, line in rows:
            if position == 0 or not line.strip():
                continue
            cells = _cells(line, folder, name, position)
            if len(cells) != len(header):
                raise FormatError(
                    f"a row has {len(cells)} cells, its header {len(header)} columns",
                    path=folder.where,
                    file=name,
                    position=position,
                )
            yield Found(position, self.encode(dict(zip(header, cells, strict=True))))

    def _lines(
        self, folder: Folder, name: str, start: int, end: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield each line with its position, without its line end and byte order mark."""
        for position, data, ends in self._blocks(folder, name, start, end):
            begin = 0
            for stop in ends.tolist():
                line = data[begin:stop].rstrip(b"\r\n")
                yield position + begin, line.removeprefix(_BOM) if position + begin == 0 else line
                begin = stop

    def batches(
        self, folder: Folder, name: str, number: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of `read` as rows; `number`: their partition."""
        return record_batches(self.read(folder, name, start, end), number)

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
    """Return the error for a record above `LONGEST_BYTES`."""
    return FormatError(
        f"a record is longer than {LONGEST_BYTES >> 20} MiB",
        path=folder.where,
        file=name,
        position=at,
        next_step="check that its lines end and its quotes are closed",
    )
