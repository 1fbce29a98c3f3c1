"""Draw the diagrams of docs/concepts.md as SVG, from the text in docs/site/diagrams.txt.

The text has one diagram per section `[name]`:

    box ID COLUMN,ROW KIND: first line | second line
    arrow ID -> ID: label

Run `python docs/site/diagrams.py` after a change; a test compares the files with the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

SOURCE = Path(__file__).parent / "diagrams.txt"
PICTURES = Path(__file__).parents[1] / "pictures"

WIDTH, HEIGHT = 168, 52
GAP_X, GAP_Y = 92, 44
MARGIN = 16
FILLS = {"thing": "#e8eefc", "data": "#e9f6ec", "gone": "#f4f4f4", "act": "#fff3df"}
STROKES = {"thing": "#4a6fc4", "data": "#3d9154", "gone": "#999999", "act": "#c78a1f"}

_BOX = re.compile(r"box (\w+) (\d+),(\d+) (\w+): (.+)")
_ARROW = re.compile(r"arrow (\w+) -> (\w+):(.*)")


@dataclass(frozen=True)
class Box:
    """A box of a diagram, by column and row."""

    column: int
    row: int
    kind: str
    lines: tuple[str, ...]

    @property
    def center(self) -> tuple[float, float]:
        """The middle of the box."""
        x = MARGIN + self.column * (WIDTH + GAP_X) + WIDTH / 2
        return x, MARGIN + self.row * (HEIGHT + GAP_Y) + HEIGHT / 2

    def border(self, toward: tuple[float, float]) -> tuple[float, float]:
        """The point where a line from the middle to another point leaves the box."""
        x, y = self.center
        dx, dy = toward[0] - x, toward[1] - y
        ratios = [WIDTH / 2 / abs(dx)] if dx else []
        ratios += [HEIGHT / 2 / abs(dy)] if dy else []
        part = min(ratios)
        return x + dx * part, y + dy * part


@dataclass
class Diagram:
    """Boxes by name, and arrows between them."""

    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[tuple[str, str, str]] = field(default_factory=list)


def parse(text: str) -> dict[str, Diagram]:
    """Return the diagrams of a text, by name.

    Raises:
        ValueError: a line has none of the forms above.
    """
    found: dict[str, Diagram] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            found[line.strip("[]")] = diagram = Diagram()
        elif box := _BOX.fullmatch(line):
            lines = tuple(one.strip() for one in box[5].split("|"))
            diagram.boxes[box[1]] = Box(int(box[2]), int(box[3]), box[4], lines)
        elif arrow := _ARROW.fullmatch(line):
            diagram.arrows.append((arrow[1], arrow[2], arrow[3].strip()))
        else:
            raise ValueError(f"neither a box nor an arrow: {line}")
    return found


def render(name: str, diagram: Diagram) -> str:
    """Return a diagram as SVG, on white, with the fonts of the system."""
    columns = 1 + max(box.column for box in diagram.boxes.values())
    rows = 1 + max(box.row for box in diagram.boxes.values())
    width = 2 * MARGIN + columns * WIDTH + (columns - 1) * GAP_X
    height = 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP_Y
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(name)}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#555555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    for start, end, label in diagram.arrows:
        lines += _arrow(diagram.boxes[start], diagram.boxes[end], label)
    for box in diagram.boxes.values():
        lines += _box(box)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(box: Box) -> list[str]:
    x, y = box.center
    found = [
        f'<rect x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" '
        f'rx="5" fill="{FILLS[box.kind]}" stroke="{STROKES[box.kind]}"/>'
    ]
    first = y + 4 - 8 * (len(box.lines) - 1)
    for number, line in enumerate(box.lines):
        weight = ' font-weight="600"' if number == 0 else ""
        found.append(
            f'<text x="{x:g}" y="{first + 16 * number:g}" text-anchor="middle" '
            f'fill="#222222"{weight}>{escape(line)}</text>'
        )
    return found


def _arrow(start: Box, end: Box, label: str) -> list[str]:
    (x1, y1), (x2, y2) = start.border(end.center), end.border(start.center)
    found = [
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#555555" '
        'marker-end="url(#tip)"/>'
    ]
    if label:
        x, y = (x1 + x2) / 2, (y1 + y2) / 2 - 4
        found.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="#444444" font-size="11" '
            f'stroke="#ffffff" stroke-width="3" paint-order="stroke">{escape(label)}</text>'
        )
    return found


def draw() -> dict[Path, str]:
    """Return the content of every picture, by its file."""
    diagrams = parse(SOURCE.read_text())
    return {PICTURES / f"{name}.svg": render(name, found) for name, found in diagrams.items()}


if __name__ == "__main__":
    for path, content in draw().items():
        path.write_text(content)
