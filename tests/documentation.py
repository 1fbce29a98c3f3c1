"""The pages a user reads, and the blocks of code on them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1]
_FOLDERS = (PROJECT / "docs", PROJECT / "docs" / "operate")
PAGES = (
    "README.md",
    "DESCRIPTION.md",
    *sorted(
        path.relative_to(PROJECT).as_posix() for folder in _FOLDERS for path in folder.glob("*.md")
    ),
)
PROGRAMS = {"shop": "docs/checkpoints.md", "hourly": "docs/state-by-key.md"}
"""Modules that the pages tell a user to save, and the page of each."""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in the order of the page."""
    text = (PROJECT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@contextlib.contextmanager
def first_program(folder: Path) -> Iterator[None]:
    """The programs of the pages in a folder; forgotten afterwards, as by a new process."""
    for name, page in PROGRAMS.items():
        program, *_ = blocks(page, "python")
        (folder / f"{name}.py").write_text(program)
    try:
        yield
    finally:
        for name in PROGRAMS:
            sys.modules.pop(name, None)
