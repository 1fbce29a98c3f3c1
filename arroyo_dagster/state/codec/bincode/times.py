"""Durations and points in time in bincode: seconds, then nanoseconds.

Source: the crate bincode 2, its implementations for `Duration` and `SystemTime`.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.scalars import (
    check_int,
    decode_length,
    varint,
    varint_decoder,
)
from arroyo_dagster.state.codec.bincode.shapes import Broken, Decoder, Encoder, named_value
from arroyo_dagster.state.model.types import TimeOf

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
NANOS = 10**9
# Rust's SystemTime counts seconds in a signed 64-bit number, its Duration in an unsigned one.
MAX_SECONDS = {"duration": 2**64 - 1, "system_time": 2**63 - 1}


def _check_micros(value: object, attribute: str) -> None:
    # Subclasses, such as those of pandas, may have a finer resolution than their base class.
    if getattr(value, attribute, 0):
        raise InputError(
            "expected a time that ends at microseconds; declare SystemTimeNanos or DurationNanos",
            found=named_value(value),
        )


def time_encoder(described: TimeOf) -> Encoder:
    """Return the encoder of a duration or a point in time, as nanoseconds or Python's own types."""
    name = described.name
    high = (MAX_SECONDS[name] + 1) * NANOS - 1

    def encode_nanos(value: Any) -> bytes:
        nanos = check_int(value, f"nanoseconds of {name}", 0, high)
        return varint(nanos // NANOS) + varint(nanos % NANOS)

    def encode_duration(value: Any) -> bytes:
        if not isinstance(value, dt.timedelta) or value < dt.timedelta():
            raise InputError("expected a timedelta that is not negative", found=named_value(value))
        _check_micros(value, "nanoseconds")
        return encode_nanos(dt.timedelta.__floordiv__(value, _MICROSECOND) * 1000)

    def encode_system_time(value: Any) -> bytes:
        if not isinstance(value, dt.datetime) or value.utcoffset() is None or value < _EPOCH:
            raise InputError(
                "expected a datetime with a time zone, not before 1970", found=named_value(value)
            )
        _check_micros(value, "nanosecond")
        return encode_nanos(dt.datetime.__sub__(value, _EPOCH) // _MICROSECOND * 1000)

    if described.as_nanos:
        return encode_nanos
    return encode_duration if name == "duration" else encode_system_time


def time_decoder(described: TimeOf) -> Decoder:
    """Return the decoder of a duration or a point in time; values are never truncated."""
    name = described.name
    limit = (MAX_SECONDS[name] + 1) * NANOS
    decode_u32 = varint_decoder("nanoseconds", 32)

    def decode_nanos(data: bytes, at: int) -> tuple[int, int]:
        seconds, end = decode_length(data, at)
        nanos, end = decode_u32(data, end)
        # Rust also carries a second or more of nanoseconds into the seconds.
        total = seconds * NANOS + nanos
        if total >= limit:
            raise Broken(f"{total} nanoseconds do not fit {name}", at)
        return total, end

    def decode_python(data: bytes, at: int) -> tuple[Any, int]:
        nanos, end = decode_nanos(data, at)
        return _python_time(nanos, name, at), end

    return decode_nanos if described.as_nanos else decode_python


def _python_time(nanos: int, name: str, at: int) -> dt.timedelta | dt.datetime:
    alias = "DurationNanos" if name == "duration" else "SystemTimeNanos"
    if nanos % 1000:
        raise Broken(
            f"{nanos} nanoseconds end between two microseconds, where Python's types cannot; "
            f"declare the type {alias}",
            at,
        )
    try:
        span = dt.timedelta(microseconds=nanos // 1000)
        return span if name == "duration" else _EPOCH + span
    except OverflowError as error:
        raise Broken(
            f"{nanos} nanoseconds are more than Python's types hold; declare the type {alias}", at
        ) from error
