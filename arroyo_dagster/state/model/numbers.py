"""Numbers in the names of objects: every number has exactly one spelling.

Every path builder formats a number as `format(number, "03")` does, and every name parser accepts
only that form. Any other spelling (`01`, `checkpoint-3`, non-ASCII digits) would be a second name
of an object, under which garbage collection would not find it referenced.
"""

from __future__ import annotations

import functools
import re

LONGEST_POSITION = 128  # of a source, in digits; a sequence number of Kinesis has 56
_MAX_DIGITS = 19
"""Sufficient for every 63-bit number."""


def number_pattern(width: int = 1) -> str:
    """Return a regular expression for a number in a name.

    Args:
        width: the digits to which the name pads it with zeros; longer numbers are allowed.
    """
    return rf"(?:[0-9]{{{width}}}|[1-9][0-9]{{{width},{_MAX_DIGITS - 1}}})"


@functools.cache
def _whole(width: int) -> re.Pattern[str]:
    return re.compile(number_pattern(width))


def parse_number(text: str, width: int = 1) -> int | None:
    """Return the number written as `text`; None unless `format(number, f"0{width}") == text`."""
    return int(text) if _whole(width).fullmatch(text) else None


def parse_numbered(name: str, width: int, suffix: str = ".json") -> int | None:
    """Return the number of an object named by its number only, `0000000007.json`; else None."""
    return parse_number(name.removesuffix(suffix), width) if name.endswith(suffix) else None
