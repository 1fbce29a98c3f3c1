"""Tables: a program gets every column, a terminal as much as its width holds, one line per row."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

GAP = "  "
NARROWEST = 20
"""The first column of a table, or the text of a record, is not made narrower."""

COLOURS = {
    **dict.fromkeys(("ready", "running", "ok", "passed", "advances"), "green"),
    **dict.fromkeys(("failed", "gone", "unreadable", "broken", "error", "orphaned"), "red"),
    **dict.fromkeys(("committing", "changing", "stopped", "invisible", "warning"), "yellow"),
    **dict.fromkeys(("unclaimed", "partially collected", "rolled back", "stalled"), "yellow"),
}
_STATES = ("state", "condition", "status", "result", "action")


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell that a terminal shows in another form than the text that a program gets.

    Attributes:
        forms: from wide to narrow. An empty one shows nothing: the text is part of another cell.
    """

    text: str | None
    forms: tuple[str, ...] = ("",)

    def __str__(self) -> str:
        return "-" if self.text is None else self.text


@dataclass(slots=True)
class _TableColumn:
    """A column of a terminal: its header and cells in each form that is left, the widest first."""

    name: str
    is_number: bool
    forms: list[list[str]]

    @property
    def width(self) -> int:
        return max(map(cell_width, self.forms[0]))

    def format(self, index: int, *, coloured: bool = False) -> str:
        text = self.forms[0][index]
        spaces = " " * (self.width - cell_width(text))
        if coloured and index and self.name in _STATES:
            text = colour(text)
        return spaces + text if self.is_number else text + spaces


def cell_width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def colour(text: str, word: str | None = None) -> str:
    """Colour a text as a state, by its last word or the `word` given."""
    state = text.rpartition(", ")[2] if word is None else word
    return click.style(text, COLOURS[state]) if state in COLOURS else text


def format_table(
    columns: Sequence[object],
    lines: Sequence[Sequence[object]],
    width: int | None,
    *,
    narrow: Sequence[str] = (),
    notes: str | None = None,
    coloured: bool = False,
) -> Iterator[str]:
    """Yield the lines of a table; on a terminal one per row, and no word of a cell is broken.

    Args:
        width: of the terminal; None: every column in full, no rule below the header.
        narrow: columns that give way on a terminal, the first one first: each mention takes their
            next form, and then leaves them out. If that does not suffice, a long cell of the first
            column has a line of its own. Without `narrow`, the last column continues on the next
            line, or every row becomes a record.
        notes: a column of sentences: on a terminal each is printed once, below the table.
        coloured: print states in colours.
    """
    if width is None:
        whole = [
            _column(name, [row[index] for row in lines], plain=True)
            for index, name in enumerate(columns)
        ]
        yield from _rows(whole)
        return
    cells = [list(row) for row in lines]
    sentences = _number(cells, [str(name) for name in columns].index(notes)) if notes else []
    shown = [
        _column(name, [row[index] for row in cells], plain=False)
        for index, name in enumerate(columns)
    ]
    shown = [column for column in shown if column.name not in narrow or _has_values(column)]
    left_out = _fit(shown, narrow, width)
    missing = max(_length(shown) - width, 0)
    first, last = shown[0].width - missing, shown[-1].width - missing
    rule = _length(shown) - missing
    if not missing or narrow:
        first = max(first, NARROWEST)
        yield from _rows(shown, rule=rule, first=first, coloured=coloured)
    elif last >= NARROWEST and not shown[-1].is_number:
        yield from _rows(shown, rule=rule, last=last, coloured=coloured)
    else:
        yield from _records(shown, width)
    for number, sentence in enumerate(sentences, 1):
        yield from wrap(f"{notes} {number}: {sentence}", width)
    if left_out:
        yield from wrap(f"not shown: {', '.join(left_out)}; --wide prints every column", width)


def wrap(text: str, width: int | None, indent: str = "  ") -> list[str]:
    """Break a text into lines between words; None: one line."""
    if width is None:
        return [text]
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _one_line(cell: object) -> str:
    """Return a cell as text in which no character moves the cursor."""
    text = "-" if cell is None else str(cell)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _column(name: object, cells: Sequence[object], *, plain: bool) -> _TableColumn:
    forms = [
        tuple(_one_line(form or None) for form in cell.forms)
        if isinstance(cell, TableCell) and not plain
        else (_one_line(cell),)
        for cell in (name, *cells)
    ]
    return _TableColumn(
        name=str(name),
        is_number=all(isinstance(cell, int | None) for cell in cells),
        forms=[
            [form[min(index, len(form) - 1)] for form in forms]
            for index in range(max(map(len, forms)))
        ],
    )


def _has_values(column: _TableColumn) -> bool:
    return any(text != "-" for text in column.forms[0][1:])


def _number(lines: Sequence[list[object]], index: int) -> list[str]:
    """Replace the sentences of a column by numbers; return the sentences in their order."""
    sentences: dict[str, int] = {}
    for row in lines:
        cell = row[index]
        text = cell.forms[0] if isinstance(cell, TableCell) else cell
        row[index] = None if text is None else sentences.setdefault(str(text), len(sentences) + 1)
    return list(map(_one_line, sentences))


def _length(columns: Sequence[_TableColumn]) -> int:
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)


def _fit(columns: list[_TableColumn], narrow: Sequence[str], width: int) -> list[str]:
    """Narrow the columns until they fit; remove those that have no form left, and return them."""
    left_out = []
    for name in narrow:
        column = next((column for column in columns if column.name == name), None)
        if column is not None and _length(columns) > width:
            column.forms.pop(0)
            if not column.forms:
                columns.remove(column)
                left_out.append(name)
    return left_out


def _rows(
    columns: Sequence[_TableColumn],
    *,
    rule: int = 0,
    first: int | None = None,
    last: int | None = None,
    coloured: bool = False,
) -> Iterator[str]:
    """Yield the header and the rows.

    Args:
        rule: the length of the line below the header.
        first: the width of the first column; a longer cell has a line of its own.
        last: the width of the last column; a longer text continues on the next line.
    """
    head, continued = columns[0], list[str]()
    for index in range(len(head.forms[0])):
        cells = [column.format(index, coloured=coloured) for column in columns]
        if first is not None and first < head.width:
            text = head.forms[0][index]
            if cell_width(text) > first:
                yield text
                text = ""
            cells[0] = text + " " * (first - cell_width(text))
        if last is not None:
            cells[-1], *continued = wrap(columns[-1].forms[0][index], last, "")
        yield GAP.join(cells).rstrip()
        yield from (" " * (rule - (last or 0)) + line for line in continued)
        if index == 0 and rule:
            yield "─" * rule


def _records(columns: Sequence[_TableColumn], width: int) -> Iterator[str]:
    """Yield a block of lines for each row: one line per column."""
    label = max(cell_width(column.forms[0][0]) for column in columns) + len(GAP)
    for index in range(1, len(columns[0].forms[0])):
        if index > 1:
            yield ""
        for column in columns:
            name, text = column.forms[0][0], column.forms[0][index]
            begin = name + " " * (label - cell_width(name))
            line, *rest = wrap(text, max(width - label, NARROWEST), "")
            yield f"{begin}{line}".rstrip()
            yield from (" " * label + line for line in rest)
