"""Typed access to the fields of a JSON object, by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.errors import FormatError

MAX_U64 = 2**64 - 1
MAX_I64 = 2**63 - 1
MAX_TIME_MICROS = (2**63 - 1) // 1000
"""2262-04-11: the last time that nanoseconds since 1970 hold, as Arroyo and Arrow count them."""
MAX_NESTING = 100
"""How deep lists and objects of a document may lie in each other."""
KEEP = "keep the object and report it; nothing was changed"

_MAX_VALUE_CHARS = 200
"""The maximum number of characters of a wrong value in an error message."""


@dataclass(frozen=True, slots=True)
class JsonName:
    """The name of a field in JSON, as an annotation of the field."""

    name: str


NOT_STORED = object()
"""The annotation of a field that is not in JSON: who decodes the record knows it."""


class Fields:
    """The fields of one object: required ones, and optional ones, which are None if absent or null.

    In a `with` block, any other error caused by the object is raised as a FormatError too.

    Args:
        values: the decoded object.
        next_step: what to do if a field is wrong.
        **facts: identify the object, for example by its path.

    Raises:
        FormatError: `values` is no object. Every method raises it as well if the field is missing
            or of another type; the error names object and field.
    """

    def __init__(self, values: object, *, next_step: str = KEEP, **facts: object) -> None:
        self._facts: dict[str, Any] = facts
        self._next_step = next_step
        if not isinstance(values, Mapping):
            raise self._error(f"expected a JSON object, found {shortened(values)}")
        self._values: Mapping[str, Any] = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __enter__(self) -> Fields:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError):
            detail = f"{type(error).__name__}: {shortened(str(error))}"
            raise self._error(f"the object is not what its name says ({detail})") from error

    # ---- one value -------------------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """Return the value, of any type; None if it is absent."""
        return self._values.get(name)

    def text(self, name: str, *, empty: bool = True) -> str:
        """Return a valid Unicode string; with `empty` False, refuse the empty string."""
        value = self.value(name)
        if not isinstance(value, str) or not is_unicode(value) or not (value or empty):
            raise self.wrong(name, "a string" if empty else "a string that is not empty", value)
        return value

    def number(self, name: str, *, largest: int = MAX_U64) -> int:
        """Return a whole number from 0 to `largest`."""
        value = self.value(name)
        try:
            return whole_number(value, largest)
        except ValueError as error:
            raise self.wrong(name, f"a whole number from 0 to {largest}", value) from error

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def optional_text(self, name: str, *, empty: bool = True) -> str | None:
        return None if self.value(name) is None else self.text(name, empty=empty)

    def optional_number(self, name: str, *, largest: int = MAX_U64) -> int | None:
        return None if self.value(name) is None else self.number(name, largest=largest)

    def optional_flag(self, name: str) -> bool | None:
        return None if self.value(name) is None else self.flag(name)

    # ---- several values --------------------------------------------------------------------------

    def list(self, name: str) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list):
            raise self.wrong(name, "a list", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.list(name)
        if not all(isinstance(value, str) and is_unicode(value) for value in values):
            raise self.wrong(name, "a list of strings", values)
        return tuple(values)

    def object(self, name: str) -> Fields:
        value = self.value(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object", value)
        return self._of(value)

    def objects(self, name: str) -> tuple[Fields, ...]:
        values = self.list(name)
        if not all(isinstance(value, Mapping) for value in values):
            raise self.wrong(name, "a list of objects", values)
        return tuple(self._of(value) for value in values)

    # ---- errors ----------------------------------------------------------------------------------

    def wrong(self, name: str, expected: str, found: Any) -> FormatError:
        """Return the error for a field of the wrong type or value."""
        return self._error(f"field {name} should be {expected}, found {shortened(found)}")

    def _of(self, values: Mapping[str, Any]) -> Fields:
        return Fields(values, next_step=self._next_step, **self._facts)

    def _error(self, message: str) -> FormatError:
        return FormatError(message, next_step=self._next_step, **self._facts)


def whole_number(value: object, largest: int = MAX_U64) -> int:
    """Return a whole number from 0 to `largest`. Raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise ValueError(f"{shortened(value)} is no whole number from 0 to {largest}")
    return value


def is_unicode(text: str) -> bool:
    """Return whether a text can be stored: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shortened(value: object) -> str:
    """Return a value as it is shown in an error message."""
    text = ascii(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def parse_json(text: str | bytes, decoder: json.JSONDecoder | None = None) -> Any:
    """Parse JSON that a person, or another program, wrote.

    Raises:
        ValueError: it is no JSON in UTF-8, has a number of more than 4,300 digits, or is nested
            deeper than `MAX_NESTING`.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value = json.loads(text) if decoder is None else decoder.decode(text)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MAX_NESTING:
        _check_nesting(value)
    return value


def _check_nesting(value: object) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING + 1):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {MAX_NESTING} levels")


def plain_number(value: float) -> float | str:
    """Return a number, or the text of one that JSON does not have."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
