"""How tables grow, and how their files are spread over subtasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.catalog import FileRow
from arroyo_dagster.state.model.keys import range_for_server

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a size develops.

    Attributes:
        sizes: `(finished_at_micros, size_bytes)` at each epoch, oldest first.
    """

    sizes: tuple[tuple[int, int], ...]

    @property
    def bytes_per_day(self) -> float | None:
        """The slope of the line of least squares; None = all sizes are of one moment."""
        seconds = [(at - self.sizes[0][0]) / 1e6 for at, _ in self.sizes]
        sizes = [float(size) for _, size in self.sizes]
        if not seconds:
            return None
        mean_second, mean_size = sum(seconds) / len(seconds), sum(sizes) / len(sizes)
        spread = sum((one - mean_second) ** 2 for one in seconds)
        if not spread:
            return None
        pairs = zip(seconds, sizes, strict=True)
        moved = sum((at - mean_second) * (size - mean_size) for at, size in pairs)
        return moved / spread * DAY_SECONDS

    def after_days(self, days: float) -> int | None:
        """Return the size so many days after the newest epoch if it goes on so; None = unknown."""
        per_day = self.bytes_per_day
        if per_day is None:
            return None
        return max(0, round(self.sizes[-1][1] + per_day * days))


def bytes_by_subtask(files: Iterable[FileRow], parallelism: int) -> list[float]:
    """Return about how many bytes of expiring tables are in the key range of each subtask.

    Keys are hashes: those of a file are taken as spread evenly over its range.
    """
    ranges = [range_for_server(at, parallelism) for at in range(parallelism)]
    found = [0.0] * parallelism
    for file in files:
        if file.min_routing_key is None or file.max_routing_key is None:
            continue
        width = file.max_routing_key - file.min_routing_key + 1
        for at, keys in enumerate(ranges):
            low, high = max(keys.start, file.min_routing_key), min(keys.end, file.max_routing_key)
            if low <= high:
                found[at] += (file.size_bytes or 0) * ((high - low + 1) / width)
    return found


def skew(shares: Sequence[float]) -> float | None:
    """Return the largest share as a multiple of the average: 1 = even; None = all are 0."""
    total = sum(shares)
    return max(shares) * len(shares) / total if total else None
