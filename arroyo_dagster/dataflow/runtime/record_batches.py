"""Encode records between the operators of one service: Python values in Arrow columns, and back.

Text is encoded as text, other values are in payloads.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import Window
from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.converters import json_bytes
from arroyo_dagster.dataflow.runtime.service_source import CLOCK, FILE, SOURCE, epoch_column
from arroyo_dagster.dataflow.runtime.steps import Place
from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.storage.columns import KEY, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.storage.payloads import (
    PAYLOAD,
    PAYLOAD_TYPE,
    PLACE,
    Groups,
    decode_frame,
    decode_values,
    encode_frame,
    encode_values,
    frame_of,
    no_values,
)
from arroyo_dagster.dataflow.storage.values import Key, native_key

TEXT_KEY, INT_KEY, BOOL_KEY, MARK = 0, 1, 2, 3
"""The kinds of a row's key. A row of kind MARK is not a record: it carries the watermark."""

KIND, TEXT, KEY_TEXT, KEY_PICKLED = "_kind", "text", "key_text", "key_pickled"
ORIGIN = ("partition", "offset", "timestamp", SOURCE)
RAW, RAW_KEY = "_raw", "_raw_key"
"""The raw value and key of the record that was read, for dead letters."""


@dataclass(frozen=True, slots=True)
class Travel:
    """The columns of records between two operators.

    Attributes:
        owners: the services with an epoch column.
        keyed: whether records have the key of a partition, which replaces the record's own key.
        windowed: whether records have a window.
        raw: the type of the raw values that records carry for dead letters; None = they do not.
    """

    owners: tuple[str, ...]
    keyed: bool = False
    windowed: bool = False
    raw: pa.DataType | None = None

    @property
    def schema(self) -> pa.Schema:
        keyed = [pa.field(KEY, pa.string(), nullable=False), pa.field(KIND, pa.int8())]
        own_key = [pa.field(KEY_TEXT, pa.string()), pa.field(KEY_PICKLED, pa.binary())]
        windowed = [pa.field(WINDOW_START, pa.int64()), pa.field(WINDOW_END, pa.int64())]
        text = pa.field(FILE, pa.string())
        raw = [pa.field(RAW, self.raw), pa.field(RAW_KEY, pa.binary()), text] if self.raw else ()
        return pa.schema(
            [
                *(keyed if self.keyed else own_key),
                *(windowed if self.windowed else ()),
                pa.field(TEXT, pa.string()),
                pa.field(PAYLOAD, PAYLOAD_TYPE),
                pa.field(PLACE, pa.int32()),
                pa.field("partition", pa.int32(), nullable=False),
                pa.field("offset", pa.int64(), nullable=False),
                pa.field("timestamp", pa.timestamp("ms")),
                *(() if self.raw is None else raw),
                pa.field(SOURCE, pa.int32(), nullable=False),
                *(pa.field(epoch_column(owner), pa.int64()) for owner in self.owners),
                pa.field(CLOCK, pa.timestamp("ms"), nullable=False),
            ]
        )

    def batch(self, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """Return a batch of these columns; absent ones are null."""
        schema = self.schema
        rows = len(next(iter(columns.values())))
        arrays = [columns[f.name] if f.name in columns else pa.nulls(rows, f.type) for f in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def from_origin(
        self, origin: pa.RecordBatch, at: Sequence[int], columns: Mapping[str, pa.Array]
    ) -> pa.RecordBatch:
        """Return a batch of new columns and the origin's position, source, epoch and clock columns.

        Args:
            origin: the batch that the records were made from.
            at: for each new row, the index of its row in `origin`.
            columns: the new columns by name.
        """
        everything = isinstance(at, range) and len(at) == origin.num_rows
        indexes = None if everything else pa.array(at, pa.int64())
        names = [*ORIGIN, *(epoch_column(owner) for owner in self.owners), CLOCK]
        carried = {name: column(origin, name) for name in names}
        if self.raw is not None:
            carried |= _raw_columns(origin)
        if indexes is not None:
            carried = {name: column.take(indexes) for name, column in carried.items()}
        return self.batch({**carried, **columns})


def encode(
    values: Sequence[Any], groups: Groups | None = None, *, shared: bool = False
) -> dict[str, pa.Array]:
    """Return the columns of values, one per record. Arguments and errors as in `encode_values`."""
    if set(map(type, values)) <= {str}:
        try:
            return {TEXT: pa.array(values, pa.string()), **no_values(len(values))}
        except UnicodeEncodeError:
            pass  # a lone surrogate: it can be pickled, and fails later where it is written
    text = pa.nulls(len(values), pa.string())
    return {TEXT: text, **encode_values(values, groups, shared=shared)}


def encode_rows(frame: pl.DataFrame, groups: Groups | None = None) -> dict[str, pa.Array]:
    """Return the columns of records that are rows of a frame. Arguments as in `encode_values`."""
    return {TEXT: pa.nulls(frame.height, pa.string()), **encode_frame(frame, groups)}


def encode_keys(keys: Sequence[Any] | None, rows: int) -> dict[str, pa.Array]:
    """Return the columns of the records' own keys; None = they have none."""
    if keys is None:
        return {KEY_TEXT: pa.nulls(rows, pa.string()), KEY_PICKLED: pa.nulls(rows, pa.binary())}
    text, pickled = _encoded(keys)
    return {KEY_TEXT: text, KEY_PICKLED: pickled}


def _encoded(values: Sequence[Any]) -> tuple[pa.Array, pa.Array]:
    if set(map(type, values)) <= {str}:
        try:
            return pa.array(values, pa.string()), pa.nulls(len(values), pa.binary())
        except UnicodeEncodeError:
            pass  # a lone surrogate: it can be pickled, and fails later where it is written
    pickled = [None if value is None else pickle.dumps(value, protocol=5) for value in values]
    return pa.nulls(len(values), pa.string()), pa.array(pickled, pa.binary())


def check_travels(value: Any) -> None:
    """Check that a value can be sent to another process.

    Raises:
        OperatorResultError: it cannot be pickled (E42).
    """
    if type(value) in _SURE:
        return
    try:
        pickle.dumps(value, protocol=5)
    except Exception as error:
        raise OperatorResultError(
            f"a function returned a {type(value).__name__}, which cannot be passed on: {error}",
            number="E42",
            next_step="return text, numbers, bools, bytes, lists or dicts",
        ) from error


_SURE = {str, int, float, bool, bytes}


def decode(batch: pa.RecordBatch) -> list[Any]:
    """Return the values that `encode` or `encode_rows` encoded."""
    texts, payloads = column(batch, TEXT), column(batch, PAYLOAD)
    if payloads.null_count == len(payloads):
        return texts.to_pylist()  # type: ignore[no-any-return]
    values = decode_values(payloads, column(batch, PLACE))
    if texts.null_count == len(texts):
        return values
    return [
        value if text is None else text
        for text, value in zip(texts.to_pylist(), values, strict=True)
    ]


def decode_keys(batch: pa.RecordBatch) -> list[Any] | None:
    """Return the records' own keys; None = no record has one."""
    names = (KEY_TEXT, KEY_PICKLED)
    if all(column(batch, name).null_count == batch.num_rows for name in names):
        return None
    texts, pickled = (column(batch, name).to_pylist() for name in names)
    return [
        text if data is None else pickle.loads(data)
        for text, data in zip(texts, pickled, strict=True)
    ]


def column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column by its name."""
    return batch.column(batch.schema.get_field_index(name))


@dataclass
class ReceivedRecords:
    """A batch of keyed records as Python values; each column is decoded at its first use."""

    batch: pa.RecordBatch
    topics: Sequence[str]
    key_type: ScalarType | None

    @cached_property
    def keys(self) -> list[str]:
        """The text of each key."""
        return column(self.batch, KEY).to_pylist()  # type: ignore[no-any-return]

    @cached_property
    def native_keys(self) -> Sequence[Key]:
        """Each key in the states' key type; without states, in the type assign-key returned."""
        declared = self.key_type
        if declared is ScalarType.STRING:
            return self.keys
        if declared is not None:
            return [native_key(text, declared) for text in self.keys]
        kinds = column(self.batch, KIND).to_pylist()
        return [native_key(text, _KINDS[kind]) for text, kind in zip(self.keys, kinds, strict=True)]

    @cached_property
    def values(self) -> list[Any]:
        return decode(self.batch)

    @cached_property
    def _frame(self) -> pl.DataFrame | None:
        return decode_frame(column(self.batch, PAYLOAD), column(self.batch, PLACE))

    def columns(self, rows: slice | npt.NDArray[np.int64]) -> pl.DataFrame:
        """Return some records as a frame. Errors as in `frame_of`."""
        if self._frame is not None:
            return self._frame[rows if isinstance(rows, slice) else rows.tolist()]
        if isinstance(rows, slice):
            return frame_of(self.values[rows])
        return frame_of([self.values[row] for row in rows.tolist()])

    @cached_property
    def windows(self) -> list[Window]:
        starts, ends = (column(self.batch, name).to_pylist() for name in (WINDOW_START, WINDOW_END))
        return [Window(start, end) for start, end in zip(starts, ends, strict=True)]

    def place(self, at: int) -> Place:
        return place_in(self.batch, self.topics, at)


_KINDS = {TEXT_KEY: ScalarType.STRING, INT_KEY: ScalarType.I64, BOOL_KEY: ScalarType.BOOL}


def place_in(batch: pa.RecordBatch, topics: Sequence[str], at: int) -> Place:
    """Return the position of a row's record in its topic; the record itself if rows carry it."""
    source = column(batch, SOURCE)[at].as_py()
    topic = topics[source] if 0 <= source < len(topics) else ""
    partition, offset = (column(batch, name)[at].as_py() for name in ("partition", "offset"))
    if FILE not in batch.schema.names:
        return Place(topic, partition, offset)
    raw = {name: values[at] for name, values in _raw_columns(batch).items()}
    return Place(
        topic,
        partition,
        offset,
        file=raw[FILE].as_py(),
        key=raw[RAW_KEY].as_py(),
        record=_record_bytes(raw[RAW].as_py()),
        time_ms=column(batch, "timestamp").cast(pa.int64())[at].as_py(),
    )


def _raw_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the raw columns of rows: as rows of the source have them, or as they were carried."""
    is_source = RAW not in batch.schema.names
    names = {RAW: VALUE, RAW_KEY: "key"} if is_source else {RAW: RAW, RAW_KEY: RAW_KEY}
    return {name: column(batch, stored) for name, stored in {**names, FILE: FILE}.items()}


def _record_bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json_bytes(value)


def epochs_in(batch: pa.RecordBatch, owners: Sequence[str]) -> dict[str, Any]:
    """Return the epoch of each owner that the records of a batch read."""
    return {owner: column(batch, epoch_column(owner))[0].as_py() for owner in owners}


def clock_in(batch: pa.RecordBatch) -> int:
    """Return the engine's clock in the epoch of a batch, in epoch milliseconds."""
    return int(column(batch, CLOCK)[0].value)
