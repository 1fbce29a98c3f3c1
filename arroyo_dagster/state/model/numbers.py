"""Numbers in the names of objects: one number has one name.

Every path builder formats a number as `format(number, "03")` does, and every parser of names takes
that form only. Any other spelling (`01`, `checkpoint-3`, digits that are not ASCII) would give one
object a second name, under which garbage collection does not find it referenced.
"""

from __future__ import annotations

import functools
import re

_MAX_DIGITS = 19
"""Enough for every number of 63 bits."""


def number_pattern(width: int = 1) -> str:
    """A regular expression for a number in a name.

    Args:
        width: to how many digits the name pads it with zeros; a longer number is not cut.
    """
    return rf"(?:[0-9]{{{width}}}|[1-9][0-9]{{{width},{_MAX_DIGITS - 1}}})"


@functools.cache
def _whole(width: int) -> re.Pattern[str]:
    return re.compile(number_pattern(width))


def parse_number(text: str, width: int = 1) -> int | None:
    """The number that is written as `text`; None unless `format(number, f"0{width}") == text`."""
    return int(text) if _whole(width).fullmatch(text) else None


def parse_numbered(name: str, width: int, suffix: str = ".json") -> int | None:
    """The number of an object that is named by its number alone, `0000000007.json`."""
    return parse_number(name.removesuffix(suffix), width) if name.endswith(suffix) else None
