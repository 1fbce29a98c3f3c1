"""Tables for people: as wide as the terminal, with every character of every cell."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len, chop_cells

GAP = 2
NARROWEST = 20
"""A column of texts is not made narrower than a point in time; then rows become records."""


def output_width() -> int | None:
    """Return the width of the terminal; None if the output goes to a file or a program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(
    columns: Sequence[str], lines: Sequence[Sequence[object]], width: int | None
) -> Iterator[str]:
    """Yield the lines of a table that is at most `width` cells wide.

    Texts that are too long continue on the next line. Numbers and names of columns stay whole. If
    the columns do not fit beside each other, every row becomes a record: one line per column.

    Args:
        width: None: no limit, no rule below the header.
    """
    cells = [["-" if cell is None else _one_line(cell) for cell in line] for line in lines]
    numbers = [
        all(isinstance(line[index], int | None) for line in lines) for index in range(len(columns))
    ]
    natural = [
        max(cell_len(columns[index]), *(cell_len(line[index]) for line in cells), 0)
        for index in range(len(columns))
    ]
    widths = _widths(columns, natural, numbers, width)
    if widths is None:
        yield from _records(columns, cells, width or 0)
        return
    yield _row(columns, widths, numbers)
    if width is not None:
        yield "─" * (sum(widths) + GAP * (len(widths) - 1))
    for line in cells:
        folded = [_fold(cell, size) for cell, size in zip(line, widths, strict=True)]
        for parts in zip_longest(*folded, fillvalue=""):
            yield _row(parts, widths, numbers)


def _one_line(cell: object) -> str:
    """Return a cell as text in which no character moves the cursor."""
    text = str(cell)
    return (
        text
        if text.isprintable()
        else "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    )


def _widths(
    columns: Sequence[str], natural: Sequence[int], numbers: Sequence[bool], width: int | None
) -> list[int] | None:
    """Return the width of each column; None if they do not fit beside each other."""
    widths = list(natural)
    if width is None:
        return widths
    least = [
        size if number else min(size, max(cell_len(name), NARROWEST))
        for name, size, number in zip(columns, natural, numbers, strict=True)
    ]
    room = width - GAP * (len(widths) - 1)
    if sum(least) > room:
        return None
    # The widest column gives way first, so that short columns stay on one line.
    while sum(widths) > room:
        widest = max(
            (at for at in range(len(widths)) if widths[at] > least[at]), key=widths.__getitem__
        )
        widths[widest] -= 1
    return widths


def _fold(text: str, width: int) -> list[str]:
    return [text] if cell_len(text) <= width else chop_cells(text, width)


def _row(cells: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> str:
    padded = []
    for cell, width, number in zip(cells, widths, numbers, strict=True):
        spaces = " " * (width - cell_len(cell))
        padded.append(spaces + cell if number else cell + spaces)
    return (" " * GAP).join(padded).rstrip()


def _records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    label = max(cell_len(name) for name in columns)
    room = max(width - label - GAP, NARROWEST)
    for index, line in enumerate(cells):
        if index:
            yield ""
        for name, cell in zip(columns, line, strict=True):
            first, *rest = _fold(cell, room) or [""]
            name = name + " " * (label - cell_len(name) + GAP)
            yield f"{name}{first}".rstrip()
            yield from (" " * (label + GAP) + part for part in rest)
