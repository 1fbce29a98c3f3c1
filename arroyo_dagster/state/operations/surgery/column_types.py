"""Whether computed columns fit the table of a job, as far as types show it: before any row is
computed."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from arroyo_dagster.errors import InputError


def column_errors(place: str, found: pa.Schema, wanted: pa.Schema) -> Iterator[InputError]:
    """Yield what is wrong with computed columns, each column of another type with both types.

    Args:
        place: the operator and the table, for people.
        found: the columns as they will be computed.
        wanted: the columns of the job's table.
    """
    if found.names != wanted.names:
        yield InputError(
            f"{place}: computed rows have other columns than the table of the job",
            expected=", ".join(f"{column.name} {column.type}" for column in wanted),
            found=", ".join(f"{column.name} {column.type}" for column in found),
            next_step="select these columns in this order",
        )
        return
    for have, want in zip(found, wanted, strict=True):
        if not fits(have.type, want.type):
            yield InputError(
                f"{place}: column {want.name!r} does not fit the type {want.type} of the job: it "
                f"is {have.type}",
                next_step="give another expression, or cast it; of an aggregate cast the argument: "
                "sum(cast(price as double))",
            )


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a type may be those of another one: each is converted or refused.

    Text is never a number, and a fraction never a whole one, whatever the values are.
    """
    is_ = pa.types
    if found.equals(wanted) or is_.is_null(found):
        return True
    if _is_list(wanted):
        return _is_list(found) and fits(found.value_type, wanted.value_type)
    if is_.is_struct(wanted):
        return (
            is_.is_struct(found)
            and [field.name for field in found] == [field.name for field in wanted]
            and all(fits(a.type, b.type) for a, b in zip(found, wanted, strict=True))
        )
    if is_.is_integer(wanted):
        whole = is_.is_integer(found) or (is_.is_decimal(found) and found.scale == 0)
        return bool(whole)
    if is_.is_floating(wanted) and is_.is_floating(found):
        return bool(found.bit_width <= wanted.bit_width)
    return any(is_kind(wanted) and is_source(found) for is_kind, is_source in _CONVERTED)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


_CONVERTED = (
    (pa.types.is_floating, pa.types.is_integer),
    (pa.types.is_decimal, pa.types.is_decimal),
    (pa.types.is_timestamp, pa.types.is_timestamp),
    (pa.types.is_fixed_size_binary, _is_binary),
    (_is_binary, _is_binary),
    (_is_text, _is_text),
)
"""The kind of a column of the job, and a kind whose values are checked when they are converted."""
