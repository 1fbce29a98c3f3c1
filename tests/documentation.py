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


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in the order of the page."""
    text = (PROJECT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@contextlib.contextmanager
def first_program(folder: Path) -> Iterator[None]:
    """The program of docs/checkpoints.md in a folder; forgotten afterwards, as by a new process."""
    (program,) = blocks("docs/checkpoints.md", "python")
    (folder / "shop.py").write_text(program)
    try:
        yield
    finally:
        sys.modules.pop("shop", None)
