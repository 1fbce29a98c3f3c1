"""Convert the values of a state to another definition, and find those that do not fit.

Nothing is rounded or cut off: a value fits if the new type holds exactly it.

Source: the decision `sdf-changed-states.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import polars as pl
import polars.exceptions as polars_errors
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.errors import StateSchemaError
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.state_tables import VALUE
from arroyo_dagster.dataflow.storage.values import arrow_type


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that the new definition cannot hold. `key`: of its row."""

    key: str
    column: str
    value: Any
    type: ScalarType

    def __str__(self) -> str:
        return f"key {self.key!r}, `{self.column}`: {self.value!r} is no {self.type.value}"


def converted_columns(frame: pl.DataFrame, state: StateDef) -> dict[str, pl.Series]:
    """Convert the columns of stored rows to those of a definition.

    Args:
        frame: `_key` and the stored columns; of a primitive state, `_key` and `value`.
        state: the definition.

    Returns:
        By name, each value as the definition has it; null where it does not fit. Columns that are
        not stored, and have no `convert`, hold the default. A `convert` counts only where a column
        is not stored yet, or with another type: what it has made is not converted again.

    Raises:
        StateSchemaError: E50, a `convert` cannot be computed.
    """
    if state.value_kind is not ValueKind.ROW:
        assert state.scalar_type is not None
        wanted = [(VALUE, state.scalar_type, state.convert)]
    else:
        wanted = [(column.name, column.type, column.convert) for column in state.columns]
    found = {}
    for name, scalar, convert in wanted:
        if name in frame.columns and frame.schema[name] == _dtype(scalar):
            values = frame[name]
        elif convert is not None:
            values = _computed(frame, state, name, convert)
        elif name in frame.columns:
            values = frame[name]
        else:
            values = pl.Series(name, [scalar.default]).new_from_index(0, frame.height)
        found[name] = fitted(values, scalar).alias(name)
    return found


def misfits(frame: pl.DataFrame, state: StateDef, key_type: ScalarType | None) -> list[Misfit]:
    """Return the values of stored rows that a definition cannot hold.

    Args:
        frame, state: as in `converted_columns`. Null values are defaults, which fit.
        key_type: the type of the keys before; None = unchanged.
    """
    found: list[Misfit] = []
    keys = frame[KEY]
    types = {column.name: column.type for column in state.columns}
    for name, values in converted_columns(frame, state).items():
        scalar = types.get(name) or state.scalar_type
        assert scalar is not None
        wrong = values.is_null()
        if name in frame.columns:
            wrong = wrong & frame[name].is_not_null()
            shown = frame[name]
        else:
            shown = values
        for key, value in zip(keys.filter(wrong), shown.filter(wrong), strict=True):
            found.append(Misfit(key, name, value, scalar))
    if key_type is not None and state.key_type not in (None, key_type, ScalarType.STRING):
        assert state.key_type is not None
        # A key is stored as text: it fits if its text is that of a key of the new type.
        same = (fitted(keys, state.key_type).cast(pl.String) == keys).fill_null(value=False)
        found += [Misfit(key, KEY, key, state.key_type) for key in keys.filter(~same)]
    return found


def fitted(values: pl.Series, scalar: ScalarType) -> pl.Series:
    """Convert values to a type; null where the type does not hold exactly the value."""
    target = _dtype(scalar)
    if values.dtype == target:
        return values
    if isinstance(values.dtype, pl.Decimal):  # of an expression
        values = values.cast(pl.Float64)
    if target == pl.Boolean:
        text = values.cast(pl.String)
        known = {"true": True, "false": False}
        return text.replace_strict(known, default=None, return_dtype=pl.Boolean)
    if values.dtype == pl.Boolean and target != pl.String:
        values = values.cast(pl.UInt8)
    if isinstance(target, pl.Datetime):
        if not values.dtype.is_integer():
            return pl.Series(values.name, [None], dtype=target).new_from_index(0, len(values))
        return values.cast(pl.Int64, strict=False).cast(target)
    if isinstance(values.dtype, pl.Datetime):
        values = values.cast(pl.Int64)
    result = values.cast(target, strict=False)
    if values.dtype.is_numeric() and target.is_numeric():
        back = result.cast(values.dtype, strict=False)
        exact = (back == values).fill_null(value=False)
        if values.dtype.is_float() and target.is_float():
            exact = exact | result.is_finite()  # f32 rounds
        result = _only(result, exact)
    if target.is_float():
        result = _only(result, result.is_finite().fill_null(value=False))
    return result


def _only(values: pl.Series, where: pl.Series) -> pl.Series:
    return pl.select(pl.when(where).then(values)).to_series().alias(values.name)


def _dtype(scalar: ScalarType) -> Any:
    empty = pl.from_arrow(pa.chunked_array([], arrow_type(scalar)))
    return cast(pl.Series, empty).dtype


def _computed(frame: pl.DataFrame, state: StateDef, name: str, convert: str) -> pl.Series:
    try:
        found = frame.select(pl.sql_expr(convert).alias(name))[name]
    except (polars_errors.PolarsError, pl.exceptions.SQLInterfaceError) as error:
        first = str(error).strip().splitlines()[0]
        raise _unusable(frame.columns, state, name, convert, first) from error
    if len(found) == 1 and frame.height != 1:
        return found.new_from_index(0, frame.height)  # a constant
    if len(found) != frame.height:
        raise _unusable(frame.columns, state, name, convert, "it yields not one value per row")
    return found


def _unusable(
    columns: Sequence[str], state: StateDef, name: str, convert: str, why: str
) -> StateSchemaError:
    return StateSchemaError(
        f"`convert` of `{name}` of state `{state.name}` cannot be computed: {why}",
        number="E50",
        path=state.path,
        line=state.line,
        convert=convert,
        next_step=f"give an SQL expression over the stored columns: {', '.join(columns)}",
    )
