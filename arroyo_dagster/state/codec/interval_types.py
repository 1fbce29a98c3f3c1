"""Two Arrow types that pyarrow knows and has no function to make: intervals of months, of days.

They come over Arrow's C data interface, the way any other library would hand them in.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pyarrow as pa

_FORMATS = {"YearMonth": b"tiM", "DayTime": b"tiD"}
"""By the unit in the JSON form of a schema."""


class _CSchema(ctypes.Structure):
    """`struct ArrowSchema` of the C data interface."""


_Release = ctypes.CFUNCTYPE(None, ctypes.POINTER(_CSchema))
_CSchema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_char_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.c_void_p),
    ("dictionary", ctypes.c_void_p),
    ("release", _Release),
    ("private_data", ctypes.c_void_p),
]


def _take_out(schema: Any) -> None:
    # A structure is released by taking its callback out; nothing was allocated for it.
    schema.contents.release = _Release()


_RELEASE = _Release(_take_out)


@functools.cache
def interval_type(unit: str) -> pa.DataType | None:
    """The interval type of a unit (`YearMonth`, `DayTime`, `MonthDayNano`); None if unknown."""
    if unit == "MonthDayNano":
        return pa.month_day_nano_interval()
    if unit not in _FORMATS:
        return None
    schema = _CSchema(format=_FORMATS[unit], name=b"", release=_RELEASE)
    return pa.DataType._import_from_c(ctypes.addressof(schema))


def interval_unit(kind: pa.DataType) -> str | None:
    """The unit of an interval type; None for any other type."""
    for unit in ("MonthDayNano", *_FORMATS):
        if kind == interval_type(unit):
            return unit
    return None
