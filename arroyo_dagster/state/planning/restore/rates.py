"""How long a restore takes, estimated: subtasks restore at the same time, and the slowest decides.

The rates are settings, since stores and machines differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from arroyo_dagster.state.model.compaction import Forecast
from arroyo_dagster.state.model.settings import Setting

_MICROS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRates:
    """How fast a restore is. `docs/operate/sizing.md` says which defaults were measured."""

    start_micros: Annotated[
        int,
        Setting(
            config="start_seconds",
            scale=_MICROS,
            fractions=True,
            minimum=0,
            help="Seconds until a worker begins to read: scheduling, compilation, metadata.",
        ),
    ] = 5 * _MICROS
    file_micros: Annotated[
        int,
        Setting(
            config="file_millis",
            scale=1000,
            fractions=True,
            minimum=0,
            help="Milliseconds to open a file of an Arroyo job, which reads one after the other.",
        ),
    ] = 60_000
    managed_file_micros: Annotated[
        int,
        Setting(
            config="managed_file_millis",
            scale=1000,
            fractions=True,
            minimum=0,
            help="Milliseconds to open a file of a managed job, which opens many at once.",
        ),
    ] = 3_000
    bytes_a_second: Annotated[
        int,
        Setting(
            config="mb_per_second",
            scale=1_000_000,
            fractions=True,
            above=0,
            help="Megabytes (10^6 bytes) that a subtask reads and decodes per second.",
        ),
    ] = 30 * _MICROS

    def of_job(self, *, managed: bool) -> RestoreRates:
        """Return the rates of a job, in whose `file_micros` is that of its kind."""
        return replace(self, file_micros=self.managed_file_micros) if managed else self

    def restore_seconds(self, forecast: Forecast) -> float:
        """Return how long the slowest subtask of a restore takes."""
        reads = zip(forecast.opens, forecast.read_bytes, strict=True)
        slowest = max(self.read_seconds(opens, size) for opens, size in ((0, 0), *reads))
        return self.start_micros / _MICROS + slowest

    def read_seconds(self, opens: int, size_bytes: int) -> float:
        """Return how long a subtask opens and reads files, without the start."""
        return opens * self.file_micros / _MICROS + size_bytes / self.bytes_a_second


DEFAULT_RATES = RestoreRates()
