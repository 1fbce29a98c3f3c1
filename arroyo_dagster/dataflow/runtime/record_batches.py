"""Encode records between the operators of one service: Python values in Arrow columns, and back.

Text is encoded as text, other values are in payloads.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import Window
from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.records import (
    RAW,
    RAW_KEY,
    OriginRows,
    Records,
    column,
    raw_columns,
)
from arroyo_dagster.dataflow.runtime.service_source import CLOCK, FILE, SOURCE, epoch_column
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
    no_values,
)
from arroyo_dagster.dataflow.storage.values import native_key

TEXT_KEY, INT_KEY, BOOL_KEY, MARK = 0, 1, 2, 3
"""The kinds of a row's key. A row of kind MARK is not a record: it carries the watermark."""

KIND, TEXT, KEY_TEXT, KEY_PICKLED = "_kind", "text", "key_text", "key_pickled"
ORIGIN = ("partition", "offset", "timestamp", SOURCE)


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

    def rows(
        self,
        records: Records,
        columns: Mapping[str, pa.Array] | None = None,
        groups: Groups | None = None,
        *,
        shared: bool,
    ) -> pa.RecordBatch:
        """Return records as rows, with the position, source, epochs and clock of their origin.

        Args:
            records: the records.
            columns: further columns by name.
            groups, shared: see `encode_values`.
        """
        if records.frame is not None and records.windows is None:
            values = encode_rows(records.frame, groups)
        else:
            values = encode(records.values, groups, shared=shared)
        keys = {} if self.keyed else encode_keys(records.keys, len(records))
        origin, rows = records.origin.batch, records.rows
        names = [*ORIGIN, *(epoch_column(owner) for owner in self.owners), CLOCK]
        carried = {name: column(origin, name) for name in names}
        if self.raw is not None:
            carried |= raw_columns(origin)
        if not (isinstance(rows, range) and len(rows) == origin.num_rows):
            indexes = pa.array(rows, pa.int64())
            carried = {name: cells.take(indexes) for name, cells in carried.items()}
        return self.batch({**carried, **values, **keys, **(columns or {})})


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


def received(batch: pa.RecordBatch, topics: Sequence[str]) -> Records:
    """Return the keyed records of a batch that `Travel.rows` made, without their keys.

    Args:
        batch: the rows.
        topics: the topics of the service, by the number in the rows.
    """
    frame = decode_frame(column(batch, PAYLOAD), column(batch, PLACE))
    values = decode(batch) if frame is None else None
    return Records(OriginRows(batch, topics), values, range(batch.num_rows), frame=frame)


def state_keys(batch: pa.RecordBatch, texts: Sequence[str], key_type: ScalarType | None) -> Any:
    """Return the keys of a partition in the states' key type, given their texts.

    Without states (`key_type` is None), in the type that assign-key returned.
    """
    if key_type is ScalarType.STRING:
        return texts
    if key_type is not None:
        return [native_key(text, key_type) for text in texts]
    kinds = column(batch, KIND).to_pylist()
    return [native_key(text, _KINDS[kind]) for text, kind in zip(texts, kinds, strict=True)]


def windows_in(batch: pa.RecordBatch) -> list[Window]:
    """Return the window of each row."""
    starts, ends = (column(batch, name).to_pylist() for name in (WINDOW_START, WINDOW_END))
    return [Window(start, end) for start, end in zip(starts, ends, strict=True)]


_KINDS = {TEXT_KEY: ScalarType.STRING, INT_KEY: ScalarType.I64, BOOL_KEY: ScalarType.BOOL}


def epochs_in(batch: pa.RecordBatch, owners: Sequence[str]) -> dict[str, Any]:
    """Return the epoch of each owner that the records of a batch read."""
    return {owner: column(batch, epoch_column(owner))[0].as_py() for owner in owners}


def clock_in(batch: pa.RecordBatch) -> int:
    """Return the engine's clock in the epoch of a batch, in epoch milliseconds."""
    return int(column(batch, CLOCK)[0].value)
