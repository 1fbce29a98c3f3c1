"""Draw the plots of docs/state-by-key.md and docs/operate/scale.md as SVG, and print their tables.

The figures are those of `python -m tests.benchmarks.test_keyed_state` and `make bench-scale`. Run
`python docs/site/plots.py` after a change; a test compares pictures and pages with the figures.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "keyed_state.csv"
PICTURE = Path(__file__).parents[1] / "pictures" / "keyed-state.svg"
SCALE_SOURCE = Path(__file__).parent / "scale.csv"
SCALE_PICTURE = Path(__file__).parents[1] / "pictures" / "scale.svg"

WIDTH, HEIGHT = 344, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 34, 44


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, colour, and values by size."""

    name: str
    color: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Chart:
    """A chart with logarithmic axes from `low` to `high`; a limit is a dashed line.

    Names stand at the beginning of their lines, or with `legend` one below the other at the top.
    """

    title: str
    lines: tuple[Line, ...]
    low: float
    high: float
    limit: float | None = None
    sizes: tuple[float, ...] = ()
    below: str = "keys of the subtask"
    legend: bool = False


def figures() -> dict[str, tuple[float, ...]]:
    """Return the columns of the figures by name."""
    with SOURCE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: tuple(float(row[name]) for row in rows) for name in rows[0]}


def charts(found: dict[str, tuple[float, ...]]) -> tuple[Chart, Chart]:
    """Return the two charts of the picture."""
    keys = found["keys"]

    def line(name: str, color: str, column: str) -> Line:
        return Line(name, color, tuple(zip(keys, found[column], strict=True)))

    times = (
        line("one key", "#4a6fc4", "one_micros"),
        line("in an epoch", "#c78a1f", "epoch_micros"),
        line("in a batch", "#3d9154", "batch_micros"),
    )
    memory = (line("bytes a key", "#4a6fc4", "memory_bytes"),)
    return (
        Chart("µs for each key that changes", times, 0.1, 10_000, sizes=keys),
        Chart("memory beyond key and value", memory, 10, 1000, limit=150, sizes=keys),
    )


def draw() -> str:
    """Return the picture of keyed state."""
    return _picture("keyed-state", charts(figures()))


def _picture(name: str, drawn: Sequence[Chart]) -> str:
    width = WIDTH * len(drawn)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" role="img" aria-label="{name}" font-family="system-ui, '
        'sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
    ]
    for place, chart in enumerate(drawn):
        parts.append(f'<g transform="translate({place * WIDTH} 0)">')
        parts.extend(_chart(chart))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart) -> list[str]:
    """Return the elements of one chart."""
    keys = chart.sizes

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
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, chart.below))
    if chart.limit is not None:
        at = y(chart.limit)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#999999", ' stroke-dasharray="4 3"'))
        parts.append(_text(WIDTH - RIGHT, at - 5, f"limit {chart.limit:g}", "end"))
    for place, line in enumerate(chart.lines):
        points = [(x(key), y(value)) for key, value in line.points]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2"/>'
        )
        parts.extend(
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{line.color}"/>'
            for across, down in points
        )
        across, down = (LEFT + 4, TOP + 18 + 13 * place) if chart.legend else points[0]
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


# ---- cost beside size ----------------------------------------------------------------------------

COLORS = ("#4a6fc4", "#c78a1f", "#3d9154", "#a8457c")
NOT_REACHED = "not reached"
Operation = tuple[str, str]
"""The axis, and the name of the operation."""

Scale = dict[Operation, dict[float, tuple[float, float, float] | None]]


def scale() -> Scale:
    """Return seconds by operation and size: median, least and most; None = not reached."""
    found: Scale = {}
    with SCALE_SOURCE.open(newline="") as file:
        for row in csv.DictReader(file):
            values = [row[name] for name in ("seconds", "low", "high")]
            seconds = tuple(float(value) for value in values) if all(values) else None
            by_size = found.setdefault((row["axis"], row["operation"]), {})
            by_size[float(row["size"])] = seconds  # type: ignore[assignment]
    return found


def draw_scale() -> str:
    """Return the picture of cost beside size."""
    found = scale()
    drawn = []
    for axis in dict.fromkeys(axis for axis, _ in found):
        mine = {name: by_size for (of, name), by_size in found.items() if of == axis}
        lines = tuple(
            Line(name, color, tuple((size, one[0]) for size, one in by_size.items() if one))
            for color, (name, by_size) in zip(COLORS, mine.items(), strict=False)
        )
        sizes = tuple(sorted({size for by_size in mine.values() for size in by_size}))
        title = f"processor seconds by {axis}"
        drawn.append(Chart(title, lines, 0.001, 1000, sizes=sizes, below=axis, legend=True))
    return _picture("scale", drawn)


def scale_table(axis: str) -> str:
    """Return the table of one axis."""
    found = {name: by_size for (of, name), by_size in scale().items() if of == axis}
    sizes = sorted({size for by_size in found.values() for size in by_size})
    lines = [
        f"| Processor seconds by {axis} | {' | '.join(f'{size:,.0f}' for size in sizes)} |",
        f"|---|{'---|' * len(sizes)}",
    ]
    for name, by_size in found.items():
        cells = [_cell(by_size.get(size)) for size in sizes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(seconds: tuple[float, float, float] | None) -> str:
    if seconds is None:
        return NOT_REACHED
    median, low, high = seconds
    return f"{median:.2g}" if low == high else f"{median:.2g} ({low:.2g}–{high:.2g})"


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(table())
    SCALE_PICTURE.write_text(draw_scale())
    for name in ("files", "epochs", "rows"):
        print("\n" + scale_table(name))
