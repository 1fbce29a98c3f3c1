"""Values of dicts, lists and scalars to YAML, always in the same way.

Every text is written so that the core schema of YAML 1.2 reads it back, whatever it looks like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*\Z")
_KEYWORDS = {"null", "true", "false"}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_LITERAL = re.compile(
    r"[\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\U00010000-\U0010ffff]+\Z"
)


def emit(value: Any) -> str:
    """YAML of a value: block style, keys in the order given, text over lines as a literal."""
    return "\n".join(_lines(value, 0)) + "\n"


def _lines(value: Any, indent: int) -> Iterator[str]:
    pad = " " * indent
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _entry(f"{pad}{_text(str(key))}:", one, indent)
    elif isinstance(value, list) and value:
        for one in value:
            yield from _item(pad, one, indent)
    else:
        yield pad + _scalar(value)


def _entry(head: str, value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, dict | list) and value:
        yield head
        yield from _lines(value, indent + 2)
    elif isinstance(value, str) and _is_literal(value):
        yield f"{head} |2"
        # Blank lines stay without indentation: trailing blanks would be content.
        yield from (
            f"{' ' * (indent + 2)}{line}" if line else "" for line in value.split("\n")[:-1]
        )
    else:
        yield f"{head} {_scalar(value)}"


def _item(pad: str, value: Any, indent: int) -> Iterator[str]:
    first = True
    for line in _lines(value, indent + 2):
        yield f"{pad}- {line[indent + 2 :]}" if first else line
        first = False


def _is_literal(text: str) -> bool:
    return (
        text.endswith("\n")
        and not text.endswith("\n\n")
        and bool(text.strip())
        and not text.startswith("\n")
        and _LITERAL.match(text) is not None
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        if math.isnan(value):
            return ".nan"
        return repr(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}.inf"
    if isinstance(value, dict | list):
        return "{}" if isinstance(value, dict) else "[]"
    return str(value)


def _text(text: str) -> str:
    if _PLAIN.match(text) and text.lower() not in _KEYWORDS:
        return text
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isprintable() and letter != "\ufeff":
        return letter
    code = ord(letter)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
