"""How the files of tables are spread over subtasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arroyo_dagster.state.model.catalog import FileRow
from arroyo_dagster.state.model.keys import range_for_server


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
