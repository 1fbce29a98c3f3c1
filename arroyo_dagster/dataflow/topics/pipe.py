"""A topic whose records are typed, or piped in: lines that cannot be read a second time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.dataflow.topics.records import RECORDS, Found, record_batches
from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.runtime.operators import Offset, Source
from arroyo_dagster.state.storage.store import ObjectStore

_WAITING_LINES = 100_000
"""How many lines wait in memory at most; then the writer of the pipe blocks."""

_FLUSH_SECONDS = 0.02
_BLOCK_BYTES = 1 << 16
_SEGMENT_BITS = 24
_LINES = pa.schema([pa.field("line", pa.binary(), nullable=False)])


class ByteStream(Protocol):
    """Where bytes come from."""

    def read(self, size: int, /) -> bytes | None:
        """Up to `size` bytes, once there are some; none at the end."""


@dataclass(frozen=True, slots=True)
class PipeSplit:
    """The lines kept as one segment."""

    segment: int


class PipeSource(Source):
    """Lines of a pipe, kept in the store before anyone sees them.

    What an epoch is to take is first written to a segment of its own; only then is it read, and it
    is removed once the epoch is ready. So a line that was taken out of the pipe and kept is
    processed exactly once, whatever is killed. Lines that lie in the pipe, or in the memory of a
    process that is killed, are lost: a pipe gives nothing twice.

    Args:
        topic: for messages.
        store, directory: where the segments are kept, while they are needed.
        stream: where the lines come from; its `read` gives what is there, `b""` at the end, as
            files without a buffer do.
        rows_per_epoch: how many lines one epoch takes at most.

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
        """Before the first segment."""
        return {"segment": 0}

    def latest_offset(self, start: Offset) -> Offset:
        """One segment on, if lines have come.

        Raises:
            ConflictError: another run keeps lines of this topic.
        """
        before = self._taken = int(start.get("segment", 0))
        self._forget(before)
        path = self._path(before + 1)
        if self._store.head(path) is not None:
            self._taken = before + 1  # kept by a run that was killed before it took it
            return {**start, "segment": before + 1}
        self._kept.extend(self._waiting(self._rows_per_epoch - len(self._kept)))
        if not self._kept:
            return start
        self._keep(before + 1)
        self._taken = before + 1
        return {**start, "segment": before + 1}

    def close(self) -> None:
        """Keep the lines that have come but were not taken: the next run begins with them."""
        if self._reader is None:
            return
        segment = self._taken + 1
        while self._store.head(self._path(segment)) is not None:
            segment += 1
        self._kept.extend(self._waiting(_WAITING_LINES))
        if self._kept:
            self._keep(segment)

    def _keep(self, segment: int) -> None:
        """Write what is kept to a segment."""
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
        """Lines that have come; a moment is given to those that come together."""
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

    def _forget(self, up_to: int) -> None:
        """Remove segments whose epoch is ready, which is when the next one is asked for."""
        if self._forgotten < up_to:
            self._store.delete_many(
                self._path(segment) for segment in range(max(1, up_to - 1), up_to + 1)
            )
            self._forgotten = up_to

    def partitions(self, start: Offset, end: Offset) -> Sequence[PipeSplit]:
        """One split a segment."""
        return [
            PipeSplit(at + 1)
            for at in range(int(start.get("segment", 0)), int(end.get("segment", 0)))
        ]

    def read(self, partition: PipeSplit) -> Iterator[pa.RecordBatch]:
        """The lines of one segment."""
        path, first = self._path(partition.segment), partition.segment << _SEGMENT_BITS
        rows, _ = decode_file(self._store.read(path), path)
        lines = enumerate(rows.column("line").to_pylist(), start=first)
        yield from record_batches((Found(at, line) for at, line in lines), 0)

    def exhausted(self, offset: Offset) -> bool:
        """Whether the pipe has ended, and every line of it was taken."""
        return (
            self._ended
            and not self._kept
            and self._store.head(self._path(int(offset.get("segment", 0)) + 1)) is None
        )
