"""Check that the sections of all docstrings can be read, for `make docs`.

An entry of `Args:`, `Attributes:` or `Raises:` has the form `name: description`; a line that
continues it is indented. A line of another form would be missing on the site. Run it with the
Python of `.venv-docs`; it imports nothing of the package.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

PACKAGE = "arroyo_dagster"
WRONG_FORM = "Failed to get"
"""How griffe begins its warning about an entry without `name:`."""


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if WRONG_FORM in message:
            self.found.append(message)


def _objects(found: Any, seen: set[str]) -> Iterator[Any]:
    if found.is_alias or found.path in seen:
        return
    seen.add(found.path)
    yield found
    for member in found.members.values():
        yield from _objects(member, seen)


def main() -> int:
    """Print what cannot be read, and return how much that is."""
    warnings = _Warnings()
    logging.getLogger("griffe").addHandler(warnings)
    logging.getLogger("griffe").propagate = False
    project = Path(__file__).parents[2]
    package = griffe.load(PACKAGE, search_paths=[project], allow_inspection=False)
    parsed = 0
    for found in _objects(package, set()):
        if found.docstring is not None:
            found.docstring.parse("google")
            parsed += 1
    for message in warnings.found:
        print(message)
    print(f"{parsed} docstrings, {len(warnings.found)} with an entry that cannot be read")
    return len(warnings.found)


if __name__ == "__main__":
    sys.exit(min(1, main()))
