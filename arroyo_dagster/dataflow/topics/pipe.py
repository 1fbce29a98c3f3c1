"""A topic with records from a pipe or terminal: lines that can be read only once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.dataflow.topics.records import RECORDS, Found, record_batches
from arroyo_dagster.engine.operators import Offset, Source
from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.store import ObjectStore

_WAITING_LINES = 100_000
"""The maximum number of lines in memory; at the limit, the writer of the pipe blocks."""

_FLUSH_SECONDS = 0.02
_BLOCK_BYTES = 1 << 16
_SEGMENT_BITS = 24
_LINES = pa.schema([pa.field("line", pa.binary(), nullable=False)])


class ByteStream(Protocol):
    """A readable stream of bytes."""

    def read(self, size: int, /) -> bytes | None:
        """Wait for bytes and return up to `size` of them; empty at the end."""


@dataclass(frozen=True, slots=True)
class PipeSplit:
    """The lines of one segment."""

    segment: int


class PipeSource(Source):
    """Lines of a pipe, which are stored before they are processed.

    The lines of an epoch are first written to a segment in the store, then read from it. The
    segment is removed after the epoch is ready. A stored line is therefore processed exactly once,
    even if processes are killed. Lines in the pipe, or in the memory of a killed process, are lost,
    since a pipe cannot be read twice.

    Args:
        topic: the topic, for messages.
        store, directory: where the segments are stored while they are needed.
        stream: the pipe; its `read` returns the available bytes and `b""` at the end, as unbuffered
            files do.
        rows_per_epoch: the maximum number of lines per epoch.

    Raises:
        InputError: `rows_per_epoch` is below 1.
    """

    schema = RECORDS

    def __init__(
        self,
        topic: str,
        store: ObjectStore,
        directory: StatePath,
        stream: ByteStream,
        *,
        rows_per_epoch: int,
    ) -> None:
        if rows_per_epoch < 1:
            raise InputError("rows_per_epoch is at least 1", topic=topic, given=rows_per_epoch)
        self._topic = topic
        self._store = store
        self._directory = directory
        self._stream = stream
        self._rows_per_epoch = rows_per_epoch
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING_LINES)
        self._reader: threading.Thread | None = None
        self._kept: list[bytes] = []
        self._forgotten = 0
        self._ended = False
        self._taken = 0

    def initial_offset(self) -> Offset:
        """Return the offset before the first segment."""
        return {"segment": 0}

    def latest_offset(self, start: Offset) -> Offset:
        """Store the available lines as the next segment, and return the offset after it.

        Without new lines, return `start`.

        Raises:
            ConflictError: another run stores lines of this topic.
        """
        before = self._taken = int(start.get("segment", 0))
        # Remove the segments of ready epochs: an epoch is ready when the next one is requested.
        if self._forgotten < before:
            self._store.delete_many(
                self._path(segment) for segment in range(max(1, before - 1), before + 1)
            )
            self._forgotten = before
        path = self._path(before + 1)
        if self._store.head(path) is not None:
            self._taken = before + 1  # stored by a run that was killed before it used it
            return {**start, "segment": before + 1}
        self._kept.extend(self._waiting(self._rows_per_epoch - len(self._kept)))
        if not self._kept:
            return start
        self._keep(before + 1)
        self._taken = before + 1
        return {**start, "segment": before + 1}

    def close(self) -> None:
        """Store the lines that were received but not processed; the next run begins with them."""
        if self._reader is None:
            return
        segment = self._taken + 1
        while self._store.head(self._path(segment)) is not None:
            segment += 1
        self._kept.extend(self._waiting(_WAITING_LINES))
        if self._kept:
            self._keep(segment)

    def _keep(self, segment: int) -> None:
        """Write the received lines to a segment."""
        path, data = self._path(segment), encode_rows(pa.table({"line": self._kept}, _LINES))
        if not self._store.create(path, data) and self._store.read(path) != data:
            raise ConflictError(
                "another run reads the standard input of this topic",
                topic=self._topic,
                path=path,
                next_step="run one reader of the topic at a time",
            )
        self._kept = []

    def _waiting(self, room: int) -> list[bytes]:
        """Return up to `room` available lines; wait `_FLUSH_SECONDS` for each next one."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._take_lines, daemon=True)
            self._reader.start()
        lines: list[bytes] = []
        while len(lines) < room and not self._ended:
            try:
                line = self._lines.get(timeout=_FLUSH_SECONDS)
            except queue.Empty:
                break
            if line is None:
                self._ended = True
            else:
                lines.append(line)
        return lines

    def _take_lines(self) -> None:
        rest = b""
        while block := self._stream.read(_BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            self._put(lines)
        self._put([rest])
        self._lines.put(None)

    def _put(self, lines: list[bytes]) -> None:
        for line in lines:
            if text := line.rstrip(b"\r"):
                self._lines.put(text)

    def _path(self, segment: int) -> StatePath:
        return self._directory / f"{segment:012}.parquet"

    def partitions(self, start: Offset, end: Offset) -> Sequence[PipeSplit]:
        """Return one split per segment."""
        return [
            PipeSplit(number + 1)
            for number in range(int(start.get("segment", 0)), int(end.get("segment", 0)))
        ]

    def read(self, partition: PipeSplit) -> Iterator[pa.RecordBatch]:
        """Yield the lines of one segment."""
        path, first = self._path(partition.segment), partition.segment << _SEGMENT_BITS
        rows, _ = decode_file(self._store.read(path), path)
        lines = enumerate(rows.column("line").to_pylist(), start=first)
        yield from record_batches((Found(position, line) for position, line in lines), 0)

    def exhausted(self, offset: Offset) -> bool:
        """Return whether the pipe has ended and all of its lines were read."""
        return (
            self._ended
            and not self._kept
            and self._store.head(self._path(int(offset.get("segment", 0)) + 1)) is None
        )
