"""How the tables of a job grow over its newest epochs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from arroyo_dagster.state.operations.catalog.stored_files import stored_sizes
from arroyo_dagster.state.operations.query.advance import EPOCHS, newest_epochs
from arroyo_dagster.state.operations.query.state import StateJob
from arroyo_dagster.state.planning.table_sizes import Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGrowth:
    """How one table grows; `growth.sizes` are of the epochs that have it."""

    operator: str
    table: str
    growth: Growth


def table_growth(job: StateJob, epochs: int = EPOCHS) -> list[TableGrowth]:
    """Return how the tables of a job grow, largest first. Only metadata and listings are read.

    Args:
        epochs: the number of the newest visible epochs to compare; 1 or more.

    Raises:
        NotFoundError: the job has no epoch.
        InputError: fewer than one epoch.
        FormatError: an object of an epoch is missing or does not decode.
    """
    found = newest_epochs(job, epochs)
    paths = {
        (epoch.number, operator.operator, name): tuple(dict.fromkeys(files.paths))
        for epoch in found
        for operator in epoch.operators
        for name, files in operator.tables.items()
    }
    sizes = stored_sizes(job.catalog.store, {path for files in paths.values() for path in files})
    points: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    finished = {epoch.number: epoch.checkpoint.finish_time_micros for epoch in found}
    for (epoch, operator, table), files in paths.items():
        size_bytes = sum(sizes.get(path, 0) for path in files)
        points[operator, table].append((finished[epoch], size_bytes))
    grown = [
        TableGrowth(operator=operator, table=table, growth=Growth(sizes=tuple(ones)))
        for (operator, table), ones in points.items()
    ]
    return sorted(grown, key=lambda one: -one.growth.sizes[-1][1])
