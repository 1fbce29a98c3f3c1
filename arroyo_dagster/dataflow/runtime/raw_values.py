"""The converter `raw`: text, bool, numbers and bytes; and what converters share with it.

Source: sdf-states.md 2.9.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from arroyo_dagster.dataflow.definition.types import PlainType, ScalarType, TypeDef
from arroyo_dagster.dataflow.runtime.record import Record
from arroyo_dagster.dataflow.storage.values import check_of, value_error
from arroyo_dagster.errors import InputError

Convert = Callable[[Any], Any]
"""Converts one value into another, or raises ValueError (InputError is one) with the reason."""
_FORMATS = {ScalarType.F32: ">f", ScalarType.F64: ">d"}


def raw_reader(declared: TypeDef | None) -> Convert:
    if declared in (None, PlainType.BYTES):
        return lambda data: data
    if declared is ScalarType.STRING:
        return lambda data: data if isinstance(data, str) else data.decode()
    if declared is ScalarType.BOOL:
        return lambda data: bool(data[-1] & 1) if data else False
    if not isinstance(declared, ScalarType):
        raise InputError(
            "the raw converter takes text, bool, numbers and bytes only",
            next_step="use the converter `json`",
        )
    if declared.is_float:
        return _number_reader(struct.Struct(_FORMATS[declared]))
    width, signed = _width(declared)

    def convert(data: bytes) -> int:
        if len(data) != width:
            raise ValueError(f"expected {width} bytes, found {len(data)}")
        return int.from_bytes(data, "big", signed=signed)

    return convert


def _number_reader(form: struct.Struct) -> Convert:
    def convert(data: bytes) -> Any:
        if len(data) != form.size:
            raise ValueError(f"expected {form.size} bytes, found {len(data)}")
        return form.unpack(data)[0]

    return convert


def _width(declared: ScalarType) -> tuple[int, bool]:
    low, high = declared.bounds or (0, 0)
    return (high - low).bit_length() // 8, low < 0


def raw_writer(declared: TypeDef | None) -> Convert:
    if declared in (None, PlainType.BYTES):
        return raw_key
    if not isinstance(declared, ScalarType):
        raise InputError(
            "the raw converter writes text, bool, numbers and bytes only",
            next_step="use the converter `json`",
        )
    check = scalar_converter(declared)
    if declared is ScalarType.STRING:
        return lambda value: check(value).encode()
    if declared is ScalarType.BOOL:
        return lambda value: b"\x01" if check(value) else b"\x00"
    if declared.is_float:
        form = struct.Struct(_FORMATS[declared])
        return lambda value: form.pack(check(value))
    width, signed = _width(declared)
    return lambda value: check(value).to_bytes(width, "big", signed=signed)


def raw_key(value: Any) -> bytes:
    """Encode text, bytes, an int or a bool of an undeclared type."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, str | int):
        return str(value).encode()
    raise ValueError(f"expected text, bytes, an int or a bool, found {kind_of(value)}")


def scalar_converter(scalar: ScalarType) -> Convert:
    check = check_of(scalar)

    def convert(value: Any) -> Any:
        try:
            return check(value)
        except ValueError:
            raise ValueError(value_error(scalar, value).message) from None

    return convert


_KINDS = {dict: "an object", Record: "an object", list: "a list", str: "text", bool: "a bool"}


def kind_of(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")
