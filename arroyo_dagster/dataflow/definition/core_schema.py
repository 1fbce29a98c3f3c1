"""The values of plain scalars in YAML 1.2.

Source: yaml.org/spec/1.2.2, 10.3.2, the core schema; sdf-states.md 2.2 (L1).
"""

from __future__ import annotations

import re
from collections.abc import Callable

Scalar = str | int | float | bool | None

TAG_PREFIX = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?[0-9]+\Z")
_BASED = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_INFINITE = re.compile(r"[-+]?(?:\.inf|\.Inf|\.INF)\Z")
_NAN = re.compile(r"(?:\.nan|\.NaN|\.NAN)\Z")


def core_scalar(text: str) -> Scalar:
    """Resolve a plain scalar by the core schema, in the order of its table."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text) and len(text) < 64:  # a longer one is read as a float
        return int(text, 10)
    if _BASED.match(text) and len(text) < 64:
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    if _INFINITE.match(text):
        return float(text.replace(".", ""))
    return float("nan") if _NAN.match(text) else text


BY_TAG: dict[str, Callable[[str], Scalar]] = {
    "str": lambda text: text,
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
}
