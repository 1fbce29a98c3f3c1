"""Curves of the largest tables of a job, from the catalogue: size by epoch, bytes by subtask."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.table_sizes import bytes_by_subtask, skew

if TYPE_CHECKING:
    from arroyo_dagster.state.model.catalog import EpochRow, FileRow
    from arroyo_dagster.state.operations.catalog.epochs import JobHistory

TABLES = 3
FORECAST_DAYS = 30
_EPOCHS = 120


def table_curves(history: "JobHistory", newest: "EpochRow") -> dict[str, Any]:
    """Return metadata of the three largest tables of a job at its newest epoch.

    A table has its size by epoch, the size in 30 days if it goes on so, and the bytes in the key
    range of each subtask, with the largest as a multiple of the average.
    """
    tables: dict[tuple[str, str], dict[int, list[FileRow]]] = defaultdict(lambda: defaultdict(list))
    for row in history.files:
        tables[row.operator, row.table][row.epoch].append(row)
    finished = {row.epoch: row.finished_micros for row in history.epochs}
    forecasts = _forecasts(tables, finished)
    present = [(name, ones) for name, ones in tables.items() if newest.epoch in ones]
    present.sort(key=lambda one: -_size(one[1][newest.epoch]))
    found: dict[str, Any] = {}
    for (operator, table), ones in present[:TABLES]:
        name = f"{operator} {table}"
        forecast = forecasts.get((operator, table))
        found |= _growth(name, ones, finished, forecast) | _shares(name, ones[newest.epoch])
    return found


def _forecasts(
    tables: "Mapping[tuple[str, str], Mapping[int, Sequence[FileRow]]]",
    finished: Mapping[int, int | None],
) -> dict[tuple[str, str], int | None]:
    """Return the sizes after 30 days, as `sql @growth` forecasts them."""
    from arroyo_dagster.state.operations.query.sql import saved_over

    rows = [
        {
            "job": "",
            "operator": operator,
            "table": table,
            "epoch": epoch,
            "finished_at": finished[epoch],
            "size_bytes": _size(files[epoch]),
        }
        for (operator, table), files in tables.items()
        for epoch in sorted(files)[-_EPOCHS:]
        if finished.get(epoch) is not None
    ]
    grown = saved_over("growth", "tables", rows, {"days": str(FORECAST_DAYS)})
    return {(row["operator"], row["table"]): row["forecast_bytes"] for row in grown.to_dicts()}


def _growth(
    name: str,
    files: "Mapping[int, Sequence[FileRow]]",
    finished: Mapping[int, int | None],
    forecast: int | None,
) -> dict[str, Any]:
    epochs = sorted(files)[-_EPOCHS:]
    sizes = [_size(files[epoch]) for epoch in epochs if finished.get(epoch) is not None]
    return {
        f"size of {name}": shown.sparkline(sizes, _format_size),
        f"size of {name} in {FORECAST_DAYS} days": None
        if forecast is None
        else format_bytes(forecast),
    }


def _shares(name: str, files: "Sequence[FileRow]") -> dict[str, Any]:
    shares = bytes_by_subtask(files, files[0].parallelism)
    largest = skew(shares)
    return {
        f"size by subtask of {name}": None
        if largest is None
        else shown.sparkline(shares, _format_size),
        f"largest subtask of {name}": None if largest is None else f"{largest:.1f} × the average",
    }


def _size(files: "Sequence[FileRow]") -> int:
    return sum(row.size_bytes or 0 for row in files)


def _format_size(count: float) -> str:
    return format_bytes(int(count))
