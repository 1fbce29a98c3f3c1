"""Draw the plot of docs/state-by-key.md as SVG and print its table, from docs/site/keyed_state.csv.

The figures are those of `python -m tests.benchmarks.test_keyed_state`. Run `python
docs/site/plots.py` after a change; a test compares the picture and the page with the figures.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "keyed_state.csv"
PICTURE = Path(__file__).parents[1] / "pictures" / "keyed-state.svg"

WIDTH, HEIGHT = 344, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 34, 44


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, colour and values, one for each number of keys."""

    name: str
    color: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """A chart with logarithmic axes from `low` to `high`; a limit is a dashed line."""

    title: str
    lines: tuple[Line, ...]
    low: float
    high: float
    limit: float | None = None


def figures() -> dict[str, tuple[float, ...]]:
    """Return the columns of the figures by name."""
    with SOURCE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: tuple(float(row[name]) for row in rows) for name in rows[0]}


def charts(found: dict[str, tuple[float, ...]]) -> tuple[Chart, Chart]:
    """Return the two charts of the picture."""
    times = (
        Line("one key", "#4a6fc4", found["one_micros"]),
        Line("in an epoch", "#c78a1f", found["epoch_micros"]),
        Line("in a batch", "#3d9154", found["batch_micros"]),
    )
    memory = (Line("bytes a key", "#4a6fc4", found["memory_bytes"]),)
    return (
        Chart("µs for each key that changes", times, 0.1, 10_000),
        Chart("memory beyond key and value", memory, 10, 1000, limit=150),
    )


def draw() -> str:
    """Return the picture."""
    found = figures()
    both = charts(found)
    width = WIDTH * len(both)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" role="img" aria-label="keyed-state" font-family="system-ui, '
        'sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
    ]
    for place, chart in enumerate(both):
        parts.append(f'<g transform="translate({place * WIDTH} 0)">')
        parts.extend(_chart(chart, found["keys"]))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart, keys: Sequence[float]) -> list[str]:
    """Return the elements of one chart."""

    def x(value: float) -> float:
        return _scaled(value, min(keys), max(keys), LEFT, WIDTH - RIGHT)

    def y(value: float) -> float:
        return _scaled(value, chart.low, chart.high, HEIGHT - BOTTOM, TOP)

    parts = [f'<text x="{LEFT}" y="18" fill="#222222" font-weight="600">{chart.title}</text>']
    for power in range(round(math.log10(chart.low)), round(math.log10(chart.high)) + 1):
        at = y(10.0**power)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#e4e4e4"))
        parts.append(_text(LEFT - 6, at + 4, f"{10.0**power:,g}", "end"))
    for value in keys:
        parts.append(_text(x(value), HEIGHT - BOTTOM + 16, f"10^{round(math.log10(value))}"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "keys of the subtask"))
    if chart.limit is not None:
        at = y(chart.limit)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#999999", ' stroke-dasharray="4 3"'))
        parts.append(_text(WIDTH - RIGHT, at - 5, f"limit {chart.limit:g}", "end"))
    for line in chart.lines:
        points = [(x(key), y(value)) for key, value in zip(keys, line.values, strict=True)]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2"/>'
        )
        parts.extend(
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{line.color}"/>'
            for across, down in points
        )
        across, down = points[0]
        parts.append(_text(across + 4, down - 8, line.name, "start", line.color))
    return parts


def _scaled(value: float, low: float, high: float, first: float, last: float) -> float:
    share = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
    return first + share * (last - first)


def _line(x1: float, y1: float, x2: float, y2: float, color: str, style: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{style}/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", color: str = "#444444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def table() -> str:
    """Return the table of the page."""
    found = figures()
    lines = [
        "| Keys | One key, µs | In a batch, µs | In an epoch, µs | Memory, bytes a key "
        "| Restore, s | File, bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    names = ("one_micros", "batch_micros", "epoch_micros", "memory_bytes", "restore_seconds")
    for place, keys in enumerate(found["keys"]):
        values = [f"{found[name][place]:,g}" for name in names]
        size = f"{found['epoch_bytes'][place]:,.0f}"
        lines.append(f"| {' | '.join([f'{keys:,.0f}', *values, size])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(table())
