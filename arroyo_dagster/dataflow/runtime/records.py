"""Records of a batch between the steps of an operator: as Python values, or as rows of a frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.windows import Window
from arroyo_dagster.dataflow.runtime.converters import json_bytes
from arroyo_dagster.dataflow.runtime.record import last_change
from arroyo_dagster.dataflow.runtime.service_source import FILE, SOURCE
from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.storage.payloads import frame_of, records_of

RAW, RAW_KEY = "_raw", "_raw_key"
"""The raw value and key of the record that was read, for dead letters."""


@dataclass(slots=True)
class Place:
    """The position of a record in its topic, for messages and dead letters.

    Attributes:
        file: the file that it was read from; None = unknown.
        key, record: its raw key and value, if records carry them for dead letters.
        time_ms: its timestamp, likewise.
    """

    topic: str
    partition: int
    offset: int
    file: str | None = None
    key: bytes | None = None
    record: bytes | None = None
    time_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OriginRows:
    """The rows that the records of a batch come from.

    Attributes:
        batch: the rows, with the columns of a service's source or of `Travel`.
        topics: the topics of the service, by the number in the rows.
    """

    batch: pa.RecordBatch
    topics: Sequence[str]

    def place(self, row: int) -> Place:
        """Return the position of a row's record in its topic; the record itself if it is there."""
        batch = self.batch
        source = column(batch, SOURCE)[row].as_py()
        topic = self.topics[source] if 0 <= source < len(self.topics) else ""
        partition, offset = (column(batch, name)[row].as_py() for name in ("partition", "offset"))
        if FILE not in batch.schema.names:
            return Place(topic, partition, offset)
        raw = {name: values[row] for name, values in raw_columns(batch).items()}
        return Place(
            topic,
            partition,
            offset,
            file=raw[FILE].as_py(),
            key=raw[RAW_KEY].as_py(),
            record=_record_bytes(raw[RAW].as_py()),
            time_ms=column(batch, "timestamp").cast(pa.int64())[row].as_py(),
        )


class Records:
    """Records between steps, as Python values or as a frame; each is made of the other when needed.

    Args:
        origin: the rows that they come from.
        values: the value of each record; None = `frame` has them.
        rows: the index of each record's row in `origin`.
        keys: the key of each record; None = no keys.
        windows: the windows that accepted each record; None outside of windows.
        frame: the records as rows; see `frame_of`.
    """

    def __init__(
        self,
        origin: OriginRows,
        values: list[Any] | None,
        rows: Sequence[int],
        keys: list[Any] | None = None,
        windows: list[tuple[Window, ...]] | None = None,
        *,
        frame: pl.DataFrame | None = None,
    ) -> None:
        self.origin = origin
        self._values = values
        self._frame = frame
        self._change = last_change()
        self.rows = rows
        self.keys = keys
        self.windows = windows

    @property
    def values(self) -> list[Any]:
        """The value of each record."""
        if self._values is None:
            assert self._frame is not None
            self._values, self._change = [*records_of(self._frame)], last_change()
        return self._values

    @property
    def frame(self) -> pl.DataFrame | None:
        """The records as rows; None = there are values only, or a function may have changed one."""
        if self._values is not None and self._change is not last_change():
            self._frame = None
        return self._frame

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        """Yield each value once, for its last use: rows of a frame become values one by one."""
        if self._values is not None:
            return iter(self._values)
        assert self._frame is not None
        return records_of(self._frame)

    def place(self, index: int) -> Place:
        """Return the position of a record in its topic."""
        return self.origin.place(self.rows[index])

    def columns(self, start: int, stop: int) -> pl.DataFrame:
        """Return some records as a frame. Errors as in `frame_of`."""
        frame = self.frame
        if frame is not None:
            return frame.slice(start, stop - start)
        return frame_of(self.values[start:stop])

    def taken(self, kept: list[int], values: list[Any], keys: list[Any] | None) -> Records:
        """Return records with new values and keys, derived from those at the indexes `kept`."""
        if len(kept) == len(self.rows) and kept == list(range(len(kept))):
            return Records(self.origin, values, self.rows, keys, self.windows)
        windows = None if self.windows is None else [self.windows[index] for index in kept]
        rows = [self.rows[index] for index in kept]
        return Records(self.origin, values, rows, keys, windows)

    def picked(self, kept: list[int]) -> Records:
        """Return the records at the indexes `kept` as values."""
        keys = None if self.keys is None else [self.keys[index] for index in kept]
        return self.taken(kept, [self.values[index] for index in kept], keys)

    def chosen(self, kept: list[int], frame: pl.DataFrame | None = None) -> Records:
        """Return the records at the indexes `kept`; with `frame`, with these rows as values."""
        if frame is None and len(kept) == len(self.rows):
            return self
        if frame is None and self.frame is None:
            return self.picked(kept)
        keys = None if self.keys is None else [self.keys[index] for index in kept]
        records = self.taken(kept, [], keys)
        if frame is None and self.frame is not None:
            frame = self.frame[kept]
        return Records(self.origin, None, records.rows, records.keys, records.windows, frame=frame)


def column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column by its name."""
    return batch.column(batch.schema.get_field_index(name))


def raw_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the raw columns of rows: as rows of the source have them, or as they were carried."""
    is_source = RAW not in batch.schema.names
    names = {RAW: VALUE, RAW_KEY: "key"} if is_source else {RAW: RAW, RAW_KEY: RAW_KEY}
    return {name: column(batch, stored) for name, stored in {**names, FILE: FILE}.items()}


def _record_bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json_bytes(value)
