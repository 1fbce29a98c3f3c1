"""One value for each key of a batch, by Arrow's kernels: sum, minimum, maximum, number of rows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError

Aggregate: TypeAlias = Literal["sum", "min", "max", "count"]
"""How the values of one key become one value."""

AnyArray: TypeAlias = "pa.Array | pa.ChunkedArray"

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "count": operator.add,
    "min": lambda old, new: new if new < old or old != old else old,
    "max": lambda old, new: new if new > old or old != old else old,
}
_INT64_LIMIT = 1 << 63
_EXACT = pa.decimal128(38)


def aggregated(
    keys: AnyArray, values: AnyArray | None, how: Aggregate, table: str
) -> tuple[pa.Array, list[Any]]:
    """Return the distinct keys of a batch in the order of their first rows, and a value for each.

    Nulls among the values are ignored; a key that has only nulls is left out. Sums of whole numbers
    are exact. NaN is ignored by "min" and "max" where a key has other values.

    Args:
        values: as many as keys; None for "count", which counts rows.

    Raises:
        InputError: a key is null, or the numbers of keys and values differ, or Arrow cannot combine
            values of this type.
    """
    if how not in _COMBINE:
        raise InputError("values are combined by sum, min, max or count", found=how)
    if (values is None) != (how == "count"):
        raise InputError("count takes no values, and every other aggregate takes some", how=how)
    if keys.null_count:
        raise InputError("a key is null", table=table, nulls=keys.null_count)
    if values is None:
        values = pa.repeat(pa.scalar(1, pa.int64()), len(keys))
    if len(values) != len(keys):
        raise InputError(f"{len(keys)} keys were given, and {len(values)} values", table=table)
    kernel = "sum" if how == "count" else how
    try:
        rows = pa.table({"key": keys, "value": _summable(values) if kernel == "sum" else values})
        # One thread: sums of floats depend on the order, and both runtimes have equal tables.
        groups = rows.group_by("key", use_threads=False).aggregate([("value", kernel)])
    except (pa.ArrowException, OverflowError) as error:
        raise InputError(
            f"values of type {values.type} cannot be combined ({error})", table=table, how=how
        ) from error
    column = groups[f"value_{kernel}"]
    if column.null_count:
        groups = groups.filter(column.is_valid())
        column = groups[f"value_{kernel}"]
    results = column.to_pylist()
    if pa.types.is_decimal(column.type) and not pa.types.is_decimal(values.type):
        results = [int(value) for value in results]
    return groups["key"].combine_chunks(), results


def combine(how: Aggregate) -> Callable[[Any, Any], Any]:
    """Return the function that combines a stored value with that of a batch."""
    return _COMBINE[how]


def _summable(values: AnyArray) -> AnyArray:
    """Return whole numbers in a type in which their sum fits: kernels wrap around."""
    if not pa.types.is_integer(values.type) or not len(values):
        return values
    bounds = pc.min_max(values).as_py()
    largest = max(abs(bounds["min"] or 0), abs(bounds["max"] or 0))
    return values if largest * len(values) < _INT64_LIMIT else values.cast(_EXACT)
