"""Two Arrow types that pyarrow supports but cannot construct: intervals of months, and of days.

They are imported through Arrow's C data interface, as from any other library.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pyarrow as pa

_FORMATS = {"YearMonth": b"tiM", "DayTime": b"tiD"}
"""By the unit's name in the JSON form of a schema."""


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
    # Releasing a structure means clearing its callback; no memory was allocated for it.
    schema.contents.release = _Release()


_RELEASE = _Release(_take_out)


@functools.cache
def interval_type(unit: str) -> pa.DataType | None:
    """Return the interval type of a unit (`YearMonth`, `DayTime`, `MonthDayNano`), or None."""
    if unit == "MonthDayNano":
        return pa.month_day_nano_interval()
    if unit not in _FORMATS:
        return None
    schema = _CSchema(format=_FORMATS[unit], name=b"", release=_RELEASE)
    return pa.DataType._import_from_c(ctypes.addressof(schema))


def interval_unit(kind: pa.DataType) -> str | None:
    """Return the unit of an interval type; None for any other type."""
    for unit in ("MonthDayNano", *_FORMATS):
        if kind == interval_type(unit):
            return unit
    return None
