"""Decoded values as plain JSON values: exact numbers, times as text, bytes in hex.

Numbers keep every digit; NaN and infinities, which JSON does not have, are texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arroyo_dagster.state.codec.bincode.shapes import pick_variant, struct_values
from arroyo_dagster.state.codec.iso_times import format_moment, format_span, nanos_of
from arroyo_dagster.state.model.json_fields import plain_number
from arroyo_dagster.state.model.types import (
    UNIT,
    ArrayOf,
    ListOf,
    MapOf,
    OptionOf,
    Primitive,
    SetOf,
    StructOf,
    TimeOf,
    TupleOf,
    Type,
)

if TYPE_CHECKING:
    import pyarrow as pa

_NANOS = 10**9


# ---- values of a described type ------------------------------------------------------------------


def plain_value(value: Any, described: Type) -> Any:
    """Convert a decoded key or value to JSON values.

    Structs become objects; maps become objects if keys are texts, else lists of pairs; sets are
    lists in the order of their representations; times and durations are texts; bytes are hex.
    """
    if isinstance(described, Primitive):
        if described.name == "bytes":
            return bytes(value).hex()
        return plain_number(value) if described.name in ("f32", "f64") else value
    if isinstance(described, TimeOf):
        return _time(value, described)
    if isinstance(described, OptionOf):
        return None if value is None else plain_value(value, described.item)
    if isinstance(described, ListOf | ArrayOf):
        return [plain_value(item, described.item) for item in value]
    if isinstance(described, SetOf):
        return sorted((plain_value(item, described.item) for item in value), key=repr)
    if isinstance(described, TupleOf):
        return [plain_value(v, kind) for v, kind in zip(value, described.items, strict=True)]
    if isinstance(described, MapOf):
        # A map within a key is a frozenset of pairs.
        items = value.items() if isinstance(value, Mapping) else value
        pairs = [
            (plain_value(key, described.key), plain_value(item, described.value))
            for key, item in items
        ]
        if described.key in (Primitive("string"), Primitive("char")):
            return dict(pairs)
        return [list(pair) for pair in pairs]
    if isinstance(described, StructOf):
        values = struct_values(value, described)
        return {
            field.name: plain_value(item, field.type)
            for field, item in zip(described.fields, values, strict=True)
        }
    index, payload = pick_variant(value, described)
    variant = described.variants[index]
    if variant.payload == UNIT or (
        isinstance(variant.payload, StructOf) and not variant.payload.fields
    ):
        return variant.name
    return {variant.name: plain_value(payload, variant.payload)}


def _time(value: Any, described: TimeOf) -> str:
    nanos = nanos_of(value)
    return (
        format_span(nanos, "ns")
        if described.name == "duration"
        else format_moment(nanos, "ns", "Z")
    )


# ---- rows ----------------------------------------------------------------------------------------


def plain_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """Convert rows to objects by column name; a repeated name gets `_1`, `_2`… in order."""
    names = unique_names(rows.schema.names)
    columns = [[plain_scalar(scalar) for scalar in column] for column in rows.columns]
    return [
        {name: column[row] for name, column in zip(names, columns, strict=True)}
        for row in range(rows.num_rows)
    ]


def unique_names(names: Sequence[str]) -> list[str]:
    """Make names unique; the first occurrence of a name does not change."""
    names_in_use = set(names)
    seen: set[str] = set()
    unique: list[str] = []
    for name in names:
        fresh, number = name, 0
        while fresh in seen or (number and fresh in names_in_use):
            number += 1
            fresh = f"{name}_{number}"
        seen.add(fresh)
        unique.append(fresh)
    return unique


def plain_scalar(scalar: pa.Scalar) -> Any:
    """Convert one Arrow value, possibly nested, to JSON values without loss.

    A text that is not UTF-8 becomes `{"hex": …}`.
    """
    if not scalar.is_valid:
        return None
    from pyarrow import types

    kind = scalar.type
    if types.is_temporal(kind):
        if types.is_interval(kind):
            months, days, nanos = scalar.as_py()
            return {"months": months, "days": days, "nanoseconds": nanos}
        count = scalar.value
        if types.is_timestamp(kind):
            return format_moment(count, kind.unit, "Z" if kind.tz else "")
        if types.is_duration(kind):
            return format_span(count, kind.unit)
        if types.is_time(kind):
            return format_moment(count, kind.unit, "").partition("T")[2]
        days = count // 86_400_000 if types.is_date64(kind) else count
        return format_moment(days * 86_400, "s", "").partition("T")[0]
    if types.is_floating(kind):
        return plain_number(float(scalar.as_py()))
    if types.is_decimal(kind):
        return str(scalar.as_py())
    if types.is_struct(kind):
        names = unique_names([kind.field(i).name for i in range(kind.num_fields)])
        return {name: plain_scalar(scalar[i]) for i, name in enumerate(names)}
    if types.is_map(kind):
        return [[plain_scalar(entry[0]), plain_scalar(entry[1])] for entry in scalar.values]
    if types.is_nested(kind):
        return [plain_scalar(item) for item in scalar.values]
    if types.is_dictionary(kind):
        return plain_scalar(scalar.value)
    try:
        value = scalar.as_py()
    except UnicodeDecodeError:
        return {"hex": scalar.as_buffer().to_pybytes().hex()}
    return value.hex() if isinstance(value, bytes) else value
