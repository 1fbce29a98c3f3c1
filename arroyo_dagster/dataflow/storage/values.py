"""Check values of SDF's scalar types, and map these types to Arrow and bincode.

Source: sdf-states.md 2.5, 6.2 and 7; error E41.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.errors import StateValueError
from arroyo_dagster.state.model.types import Primitive

Check = Callable[[Any], Any]
"""Returns a value as it is stored; raises ValueError if the type cannot hold it."""

_ARROW: dict[ScalarType, pa.DataType] = {
    ScalarType.BOOL: pa.bool_(),
    ScalarType.U8: pa.uint8(),
    ScalarType.U16: pa.uint16(),
    ScalarType.U32: pa.uint32(),
    ScalarType.U64: pa.uint64(),
    ScalarType.I8: pa.int8(),
    ScalarType.I16: pa.int16(),
    ScalarType.I32: pa.int32(),
    ScalarType.I64: pa.int64(),
    ScalarType.F32: pa.float32(),
    ScalarType.F64: pa.float64(),
    ScalarType.STRING: pa.string(),
    ScalarType.TIMESTAMP: pa.timestamp("ms", "UTC"),
}
_PYTHON = {
    ScalarType.TIMESTAMP: "an int of epoch milliseconds",
    ScalarType.STRING: "valid Unicode text",
    ScalarType.BOOL: "True or False",
    ScalarType.F32: "a finite number that 32 bits hold",
    ScalarType.F64: "a finite number",
}
_F32 = struct.Struct("<f")


def arrow_type(scalar: ScalarType) -> pa.DataType:
    """Return the Arrow type of a column."""
    return _ARROW[scalar]


def bincode_type(scalar: ScalarType) -> Primitive:
    """Return the bincode type of a primitive state's value."""
    return Primitive(scalar.value)


def checked(scalar: ScalarType, value: Any, **facts: Any) -> Any:
    """Return a value as it is stored: f32 is rounded, an int in a float column becomes a float.

    Raises:
        StateValueError: out of range, None, not finite, or of the wrong type (E41).
    """
    try:
        return check_of(scalar)(value)
    except ValueError:
        raise value_error(scalar, value, **facts) from None


def value_error(scalar: ScalarType, value: Any, **facts: Any) -> StateValueError:
    """Return the error for a value that a type cannot hold (E41)."""
    bounds = scalar.bounds
    expected = _PYTHON.get(scalar) or f"an int from {bounds[0]} to {bounds[1]}"  # type: ignore[index]
    column, state, key = (facts.get(name) for name in ("column", "state", "key"))
    named = [
        *([] if column is None else [f"column `{column}`"]),
        *([] if state is None else [f"state `{state}`"]),
    ]
    of = " of ".join(named) + ("" if key is None else f", key {key!r}")
    said = f"{_render_value(value)} is no {scalar.value}: expected {expected}"
    return StateValueError(
        f"{of}: {said}" if of else said,
        number="E41",
        found=type(value).__name__,
        **facts,
    )


def _render_value(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_of(scalar: ScalarType) -> Check:
    """Return the check of one type."""
    return _CHECKS[scalar]


def _integer(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        # In Python a bool is an int; here it is not accepted as one.
        if type(value) is int and low <= value <= high:
            return value
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return int(value)
        raise ValueError

    return check


def _float(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise ValueError from None
        if math.isfinite(number):
            return number
    raise ValueError


def _float32(value: Any) -> float:
    number = _float(value)
    try:
        rounded: float = _F32.unpack(_F32.pack(number))[0]
    except OverflowError:
        raise ValueError from None
    return rounded


def _text(value: Any) -> str:
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
        return value if type(value) is str else str.__str__(value)
    raise ValueError


def _bool(value: Any) -> bool:
    if value is True or value is False:
        return value
    raise ValueError


_CHECKS: dict[ScalarType, Check] = {
    ScalarType.BOOL: _bool,
    ScalarType.F32: _float32,
    ScalarType.F64: _float,
    ScalarType.STRING: _text,
} | {one: _integer(*one.bounds) for one in ScalarType if one.bounds is not None}


# ---- keys ----------------------------------------------------------------------------------------

Key = str | int | bool


def key_text(key: Key) -> str:
    """Return a key as text, as tables have it: itself, decimal digits, `true` or `false`."""
    if isinstance(key, str):
        return key
    if isinstance(key, bool):
        return "true" if key else "false"
    return str(key)


def native_key(text: str, scalar: ScalarType) -> Key:
    """Convert the result of `key_text` back to a key of the declared type."""
    if scalar is ScalarType.STRING:
        return text
    return text == "true" if scalar is ScalarType.BOOL else int(text)


def key_for(scalar: ScalarType, key: Key, **facts: Any) -> Key:
    """Convert a result of assign-key to the declared type: text to numbers and back (spec 2.5).

    Raises:
        StateValueError: the declared type cannot hold it (E41).
    """
    if scalar is ScalarType.STRING:
        return checked(scalar, key_text(key), **facts)  # type: ignore[no-any-return]
    if scalar is ScalarType.BOOL and isinstance(key, str) and key in ("true", "false"):
        return key == "true"
    if scalar.is_integer and isinstance(key, str) and _is_decimal(key):
        return checked(scalar, int(key), **facts)  # type: ignore[no-any-return]
    return checked(scalar, key, **facts)  # type: ignore[no-any-return]


def _is_decimal(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= 20 and text == str(int(text))
