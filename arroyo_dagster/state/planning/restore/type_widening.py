"""Which Arrow types contain every value of another type, compared in their JSON form in metadata.

From | To
---|---
Int8, Int16, Int32, Int64 | a wider one of them; a float that represents all values exactly
UInt8, UInt16, UInt32, UInt64 | a wider one of them, or a wider signed one; a float as above
Float16, Float32 | a wider float
Decimal128, Decimal256 | at least as many digits before and after the decimal point
Utf8, Binary, List | LargeUtf8, LargeBinary, LargeList
FixedSizeBinary | Binary, LargeBinary
Date32 | Date64
Time32, Time64 | a finer unit
Null | any
List, LargeList, FixedSizeList, Map | as before, its elements widened or made nullable
Struct | as before, its fields widened or made nullable; none added, dropped or moved
Dictionary | as before, its indices wider

Instants and durations do not widen: a finer unit has a smaller range.
"""

from __future__ import annotations

from typing import Any

_BITS = (8, 16, 32, 64)
_SIGNED = {f"Int{bits}": bits for bits in _BITS}
_UNSIGNED = {f"UInt{bits}": bits for bits in _BITS}
_FLOATS = {"Float16": 11, "Float32": 24, "Float64": 53}
"""The number of binary digits that each float type represents exactly."""
_LARGER = {"Utf8": "LargeUtf8", "Binary": "LargeBinary", "Date32": "Date64"}
_UNITS = ("Second", "Millisecond", "Microsecond", "Nanosecond")
_NOTES = frozenset({"metadata", "dict_id"})


def bare(data_type: Any) -> Any:
    """Return a type without its metadata and without the names inside lists and maps."""
    if isinstance(data_type, list):
        return [bare(part) for part in data_type]
    if not isinstance(data_type, dict):
        return data_type
    if "data_type" in data_type:  # a field
        return {key: bare(value) for key, value in data_type.items() if key not in _NOTES}
    ((kind, inner),) = data_type.items()
    if kind in ("List", "LargeList"):
        return {kind: bare({**inner, "name": ""})}
    if kind == "FixedSizeList":
        return {kind: [bare({**inner[0], "name": ""}), inner[1]]}
    if kind == "Map":
        key, value = inner[0]["data_type"]["Struct"]
        return {kind: [bare({**key, "name": ""}), bare({**value, "name": ""}), inner[1]]}
    return {kind: bare(inner)}


def type_text(data_type: Any) -> str:
    """Format a type as short text."""
    if isinstance(data_type, str):
        return data_type
    ((kind, inner),) = data_type.items()
    return f"{kind}<{_inner_text(inner)}>"


def _inner_text(inner: Any) -> str:
    if isinstance(inner, dict):
        if "data_type" not in inner:
            return type_text(inner)
        return f"{type_text(inner['data_type'])}{'' if inner['nullable'] else ' not null'}"
    if isinstance(inner, list):
        parts = (
            f"{part['name']}: {_inner_text(part)}"
            if isinstance(part, dict) and "name" in part
            else _inner_text(part)
            for part in inner
        )
        return ", ".join(parts)
    return str(inner)


def fits(before: Any, now: Any) -> bool:
    """Return whether the type `now` contains every value of the type `before`, unchanged."""
    if before == "Null" or bare(before) == bare(now):
        return True
    if isinstance(before, str):
        return isinstance(now, str) and (_LARGER.get(before) == now or _number_fits(before, now))
    ((kind, inner),) = before.items()
    if kind == "FixedSizeBinary":
        return now in ("Binary", "LargeBinary")
    if isinstance(now, str):
        return False
    ((later, parts),) = now.items()
    return _parameters_fit(kind, inner, later, parts)


def _number_fits(before: str, now: str) -> bool:
    if before in _FLOATS and now in _FLOATS:
        return _FLOATS[before] <= _FLOATS[now]
    if before in _SIGNED:
        # The most negative value is a power of two, so it needs no more digits than the others.
        digits = _SIGNED[before] - 1
        return digits <= _SIGNED.get(now, 0) - 1 or digits <= _FLOATS.get(now, 0)
    if before in _UNSIGNED:
        room = max(_UNSIGNED.get(now, 0), _SIGNED.get(now, 0) - 1, _FLOATS.get(now, 0))
        return _UNSIGNED[before] <= room
    return False


def _parameters_fit(kind: str, inner: Any, later: str, parts: Any) -> bool:
    if kind.startswith("Decimal") and later.startswith("Decimal"):
        (precision, scale), (wider, finer) = inner, parts
        return kind <= later and scale <= finer and precision - scale <= wider - finer
    if kind in ("Time32", "Time64") and later in ("Time32", "Time64"):
        return _UNITS.index(inner) <= _UNITS.index(parts)
    if kind in ("List", "LargeList") and later in (kind, "LargeList"):
        return _field_fits(inner, parts)
    if kind != later:
        return False
    if kind == "FixedSizeList":
        return inner[1] == parts[1] and _field_fits(inner[0], parts[0])
    if kind == "Struct":
        return _fields_fit(inner, parts)
    if kind == "Map":
        return inner[1] == parts[1] and _entries_fit(inner[0], parts[0])
    if kind == "Dictionary":
        indices = {**_SIGNED, **_UNSIGNED}
        whole = inner[0] in indices and parts[0] in indices and _number_fits(inner[0], parts[0])
        return whole and bare(inner[1]) == bare(parts[1])
    return False


def _field_fits(before: Any, now: Any) -> bool:
    nullable = now["nullable"] or not before["nullable"]
    return nullable and fits(before["data_type"], now["data_type"])


def _fields_fit(before: Any, now: Any) -> bool:
    same_names = [field["name"] for field in before] == [field["name"] for field in now]
    return same_names and all(map(_field_fits, before, now))


def _entries_fit(before: Any, now: Any) -> bool:
    (key, value), (key_now, value_now) = before["data_type"]["Struct"], now["data_type"]["Struct"]
    return bare(key["data_type"]) == bare(key_now["data_type"]) and _field_fits(value, value_now)
