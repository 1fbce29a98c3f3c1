"""Arrow rows as a frame of pandas, without loss of digits."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pyarrow as pa


def pandas_frame(rows: pa.Table) -> Any:
    """Convert rows; whole numbers beside nulls become nullable types instead of floats.

    Numbers inside lists, structs and maps, beside nulls of their own, become Python's.
    """
    pd = import_module("pandas")
    nullable = {
        pa.int8(): pd.Int8Dtype(),
        pa.int16(): pd.Int16Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(),
        pa.uint8(): pd.UInt8Dtype(),
        pa.uint16(): pd.UInt16Dtype(),
        pa.uint32(): pd.UInt32Dtype(),
        pa.uint64(): pd.UInt64Dtype(),
    }
    frame = rows.to_pandas()
    for place, column in enumerate(rows.columns):
        if column.type in nullable and column.null_count:
            frame.isetitem(place, column.to_pandas(types_mapper=nullable.get))
        elif pa.types.is_nested(column.type) and _has_whole_numbers(column.type):
            frame.isetitem(place, pd.Series(column.to_pylist(), dtype=object))
    return frame


def _has_whole_numbers(kind: pa.DataType) -> bool:
    if pa.types.is_integer(kind):
        return True
    return any(_has_whole_numbers(kind.field(place).type) for place in range(kind.num_fields))
