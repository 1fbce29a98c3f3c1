"""Decode JSON records of a declared type together, where the result is that of decoding each.

Whatever is doubtful (a record that does not decode, a member that is missing, a number that is not
finite) gives None: the records are then decoded one by one, and each that fails is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from arroyo_dagster.dataflow.definition.types import CompositeType, ScalarType
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.storage.values import arrow_type

ReadColumns = Callable[[pa.Array], pl.DataFrame | None]
_BLOCK_BYTES = 1 << 20


def column_reader(converter: Converter) -> ReadColumns | None:
    """Return a function that decodes raw values (binary) as columns; None = the type has none.

    The type must be an object of scalars. Columns have the names of its members.
    """
    declared = converter.resolved(converter.type)
    if converter.name != "json" or not isinstance(declared, CompositeType):
        return None
    if declared.kind != "object" or not declared.members:
        return None
    members: dict[str, tuple[str, ScalarType, bool]] = {}
    for member in declared.members:
        scalar = converter.resolved(member.type)
        if not isinstance(scalar, ScalarType) or scalar is ScalarType.TIMESTAMP:
            return None
        members[member.name] = (converter.name_in_json(member), scalar, member.optional)
    # A double is read for an f32, too, so that it is rounded as it is elsewhere.
    kinds = {
        written: pa.float64() if scalar is ScalarType.F32 else arrow_type(scalar)
        for written, scalar, _ in members.values()
    }
    if len(kinds) < len(members):
        return None
    parse = pj.ParseOptions(
        explicit_schema=pa.schema(list(kinds.items())), unexpected_field_behavior="ignore"
    )

    def read(raw: pa.Array) -> pl.DataFrame | None:
        table = _parsed(raw, parse)
        if table is None:
            return None
        columns: dict[str, pa.ChunkedArray] = {}
        for name, (written, scalar, optional) in members.items():
            column = table.column(written)
            if column.null_count and not optional:
                return None
            if pa.types.is_floating(column.type):
                if scalar is ScalarType.F32:
                    column = column.cast(pa.float32(), safe=False).cast(pa.float64())
                if not pc.all(pc.is_finite(column.drop_null())).as_py():
                    return None
                column = pc.add(column, 0.0)  # -0 is an int of JSON, and so 0
            columns[name] = column
        return cast(pl.DataFrame, pl.from_arrow(pa.table(columns)))

    return read


def reads_records(converter: Converter) -> bool:
    """Return whether records made of what `column_reader` reads, without nulls, are what the
    converter gives: the type is an object of text, bools and whole numbers.
    """
    declared = converter.resolved(converter.type)
    if column_reader(converter) is None or not isinstance(declared, CompositeType):
        return False
    scalars = [converter.resolved(member.type) for member in declared.members]
    return all(isinstance(scalar, ScalarType) and scalar in _AS_READ for scalar in scalars)


_AS_READ = {
    scalar
    for scalar in ScalarType
    if scalar in (ScalarType.STRING, ScalarType.BOOL) or scalar.is_integer
}
"""The types whose values in Python are the same whoever decodes them."""


def _parsed(raw: pa.Array, parse: pj.ParseOptions) -> pa.Table | None:
    if not len(raw) or raw.null_count or not _are_objects(raw):
        return None
    whole = pa.ListArray.from_arrays(pa.array([0, len(raw)], pa.int32()), raw)
    data = pc.binary_join(whole, b"\n")[0].as_buffer()
    # A record that is longer than a block would be refused.
    longest = pc.max(pc.binary_length(raw)).as_py() + 1
    options = pj.ReadOptions(block_size=max(_BLOCK_BYTES, longest))
    try:
        table = pj.read_json(pa.BufferReader(data), options, parse)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return table if table.num_rows == len(raw) else None


def _are_objects(raw: pa.Array) -> bool:
    """Return whether each value begins and ends with a brace.

    Then no value ends in another's line, so that as many rows as values are one of each. And the
    parser ends the process at a `null` that is not in an object.
    """
    first = pc.binary_slice(raw, 0, 1)
    last = pc.binary_slice(raw, -1)
    braces = pc.and_(pc.equal(first, b"{"), pc.equal(last, b"}"))
    return bool(pc.all(braces).as_py())
