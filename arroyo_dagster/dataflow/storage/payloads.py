"""Encode the values of a batch of records together, for the way to another subtask.

A payload holds many values: a pickled list (of records, as dicts, by `marshal` if it can), values
pickled one by one, or columns as Arrow IPC.
Each row of a batch refers to a payload and a place in it. Pickling a list takes half the time of
pickling its values. This is safe: both ends are subtasks of one job, and the data is not stored.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import marshal
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

PAYLOAD, PLACE = "payload", "place"
"""The columns: the payload of a row, null if its value is text, and the place in it."""

PAYLOAD_TYPE = pa.dictionary(pa.int32(), pa.large_binary())
_LIST, _RECORDS, _PLAIN_RECORDS, _SINGLE, _COLUMNS = b"L", b"R", b"M", b"S", b"C"
_COLUMNS_HEAD = _COLUMNS.ljust(8)
"""Keeps the columns behind it aligned, so that they are read where they are."""

Groups = npt.NDArray[np.int64]


def encode_values(
    values: Sequence[Any], groups: Groups | None, *, shared: bool
) -> dict[str, pa.Array]:
    """Return the columns of Python values.

    Args:
        values: one per row.
        groups: a number per row; rows of different groups go to different subtasks. None = one.
        shared: whether values may have objects in common, which each must have its own copy of.

    Raises:
        Exception: a value cannot be pickled.
    """
    from arroyo_dagster.dataflow.runtime.record import Record

    def dump(rows: Groups | None) -> bytes:
        some = values if rows is None else [values[at] for at in rows.tolist()]
        if shared or len({*map(id, some)}) < len(some):
            return _SINGLE + pickle.dumps([pickle.dumps(row, protocol=5) for row in some], 5)
        if {*map(type, some)} == {Record}:
            dicts = [{**row} for row in some]
            try:
                return _PLAIN_RECORDS + marshal.dumps(dicts)  # takes two thirds of pickle's time
            except ValueError:  # a value of a type that is not Python's own
                return _RECORDS + pickle.dumps(dicts, protocol=5)
        return _LIST + pickle.dumps(some, protocol=5)

    return _payloads(len(values), groups, dump)


def encode_frame(frame: pl.DataFrame, groups: Groups | None) -> dict[str, pa.Array]:
    """Return the columns of records that are rows of a frame. Arguments as in `encode_values`."""

    def dump(rows: Groups | None) -> bytes:
        out = io.BytesIO(_COLUMNS_HEAD)
        out.seek(len(_COLUMNS_HEAD))
        (frame if rows is None else frame[rows.tolist()]).write_ipc_stream(out)
        return out.getvalue()

    return _payloads(frame.height, groups, dump)


def _payloads(
    rows: int, groups: Groups | None, dump: Callable[[Groups | None], bytes]
) -> dict[str, pa.Array]:
    if groups is None:
        payloads, which = [dump(None)], np.zeros(rows, np.int32)
        places = np.arange(rows, dtype=np.int32)
    else:
        payloads, which = [], np.zeros(rows, np.int32)
        places = np.zeros(rows, np.int32)
        for number, group in enumerate(np.unique(groups).tolist()):
            at = np.flatnonzero(groups == group)
            payloads.append(dump(at))
            which[at], places[at] = number, np.arange(len(at))
    column = pa.DictionaryArray.from_arrays(
        pa.array(which), pa.array(payloads, PAYLOAD_TYPE.value_type)
    )
    return {PAYLOAD: column, PLACE: pa.array(places)}


def no_values(rows: int) -> dict[str, pa.Array]:
    """Return the columns of rows whose values are in another column."""
    return {PAYLOAD: pa.nulls(rows, PAYLOAD_TYPE), PLACE: pa.nulls(rows, pa.int32())}


def decode_values(payloads: pa.Array, places: pa.Array) -> list[Any]:
    """Return the values of rows; rows without a payload have None."""
    held = {number: _values_in(data) for number, data in _used(payloads).items()}
    at = places.to_pylist()
    if len(held) == 1 and not payloads.null_count:
        (values,) = held.values()
        if at == list(range(len(values))):
            return values
    return [
        None if number is None else held[number][place]
        for number, place in zip(payloads.indices.to_pylist(), at, strict=True)
    ]


def decode_frame(payloads: pa.Array, places: pa.Array) -> pl.DataFrame | None:
    """Return the rows as a frame; None if a row's value did not come in columns."""
    held = _used(payloads)
    if payloads.null_count or any(data[:1] != _COLUMNS for data in held.values()):
        return None
    frames = {number: _frame_in(data) for number, data in held.items()}
    if len({tuple(frame.schema.items()) for frame in frames.values()}) > 1:
        return None
    whole = pl.concat(frames.values()) if len(frames) > 1 else next(iter(frames.values()))
    begins = np.zeros(len(payloads.dictionary), np.int64)
    first = 0
    for number, frame in frames.items():
        begins[number], first = first, first + frame.height
    at = begins[payloads.indices.to_numpy()] + places.to_numpy()
    if np.array_equal(at, np.arange(whole.height)):
        return whole
    return cast(pl.DataFrame, whole[at.tolist()])


def _used(payloads: pa.Array) -> dict[int, memoryview]:
    numbers = payloads.indices.unique().drop_null().to_pylist()
    return {number: memoryview(payloads.dictionary[number].as_buffer()) for number in numbers}


def _values_in(data: memoryview) -> list[Any]:
    from arroyo_dagster.dataflow.runtime.record import Record

    kind, rest = data[:1], data[1:]
    if kind == _COLUMNS:
        return [*records_of(_frame_in(data))]
    values = marshal.loads(rest) if kind == _PLAIN_RECORDS else pickle.loads(rest)
    if kind in (_RECORDS, _PLAIN_RECORDS):
        return [*map(Record, values)]
    return [pickle.loads(pickled) for pickled in values] if kind == _SINGLE else values


def _frame_in(data: memoryview) -> pl.DataFrame:
    columns = data[len(_COLUMNS_HEAD) :]
    with (
        contextlib.suppress(pa.ArrowNotImplementedError),  # a type that only Polars has
        pa.ipc.open_stream(pa.py_buffer(columns)) as stream,
    ):
        # What has the same type in both is read without a copy.
        if all(any(is_one(field.type) for is_one in _PLAIN) for field in stream.schema):
            return cast(pl.DataFrame, pl.from_arrow(stream.read_all()))
    return pl.read_ipc_stream(io.BytesIO(columns))


_PLAIN = (pa.types.is_primitive, pa.types.is_string_view, pa.types.is_binary_view)


# ---- records and frames --------------------------------------------------------------------------

SCALAR = "_value"
"""The only column of a frame of records that are not objects."""


def records_of(frame: pl.DataFrame) -> Iterator[Any]:
    """Yield the rows of a frame as records: objects, or scalars if `_value` is its only column."""
    from arroyo_dagster.dataflow.runtime.record import as_record

    if frame.columns == [SCALAR]:
        return iter(frame[SCALAR].to_list())
    if not frame.width or any(kind.is_nested() or kind == pl.Object for kind in frame.dtypes):
        return map(as_record, frame.iter_rows(named=True))
    return _records_in(frame.columns, [column.to_list() for column in frame])


def _records_in(names: Sequence[str], columns: Sequence[list[Any]]) -> Iterator[Any]:
    """Yield a record for each row of columns without objects and lists."""
    from arroyo_dagster.dataflow.runtime.record import Record

    rows: Any = zip(*columns, strict=True)
    match names:  # this is done for every record; with few members, a display is the fastest
        case [a]:
            return (Record({a: x}) for (x,) in rows)
        case [a, b]:
            return (Record({a: x, b: y}) for x, y in rows)
        case [a, b, c]:
            return (Record({a: x, b: y, c: z}) for x, y, z in rows)
    return map(Record, map(zip, itertools.repeat(names), rows))


def frame_of(values: Sequence[Any]) -> pl.DataFrame:
    """Return records as a frame: a column per member, or `_value` of records that are not objects.

    Raises:
        ValueError: some are objects and some are not, or a member has values of several types.
    """
    from arroyo_dagster.dataflow.runtime.record import plain

    objects = sum(isinstance(value, dict) for value in values)
    try:
        if objects == len(values) and objects:
            return pl.from_dicts([plain(value) for value in values], infer_schema_length=None)
        if objects:
            raise ValueError("some records are objects, and some are not")
        return pl.DataFrame({SCALAR: pl.Series(SCALAR, list(values), strict=True)})
    except (pl.exceptions.PolarsError, TypeError) as error:
        raise ValueError(f"the records have no common columns: {error}") from error


def arrow_of(frame: pl.DataFrame) -> pa.Table:
    """Return a frame as an Arrow table, with its texts as `string`."""
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    texts = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    fields = [field.with_type(texts.get(field.type, field.type)) for field in table.schema]
    return cast(pa.Table, table.cast(pa.schema(fields)))
