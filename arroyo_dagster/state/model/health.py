"""Thresholds of the health checks, and the numbers of an epoch that they compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.state.model.settings import Setting

_MINUTE = 60_000_000
_DAY = 24 * 60 * _MINUTE
_MIB = 1 << 20


def _amount(config: str, unit: int, help_text: str) -> Setting:
    """Return the setting of a positive number of units, fractions included."""
    return Setting(config=config, scale=unit, fractions=True, above=0, help=help_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """When a health check reports a job. "Usual" is what the job's own recent epochs show."""

    overdue_intervals: Annotated[
        int,
        Setting(minimum=1, help="An epoch is overdue after this many usual intervals of its job."),
    ] = 5
    overdue_micros: Annotated[
        int,
        _amount("overdue_minutes", _MINUTE, "No epoch is overdue before this many minutes."),
    ] = 2 * _MINUTE
    stalled_micros: Annotated[
        int,
        _amount(
            "stalled_minutes",
            _MINUTE,
            "A watermark is stalled after this many minutes of epochs that do not move it.",
        ),
    ] = 15 * _MINUTE
    commit_micros: Annotated[
        int,
        _amount("commit_minutes", _MINUTE, "A commit is overdue after this many minutes."),
    ] = 10 * _MINUTE
    unusual_factor: Annotated[
        int,
        Setting(
            minimum=2,
            help="A duration, size or row count is unusual if it exceeds the usual one by this "
            "factor.",
        ),
    ] = 3
    slow_micros: Annotated[
        int,
        _amount("slow_seconds", 1_000_000, "A checkpoint that takes fewer seconds is never slow."),
    ] = 10_000_000
    small_table_bytes: Annotated[
        int,
        Setting(
            config="small_table_mb",
            scale=_MIB,
            minimum=0,
            help="Tables and jobs of fewer MiB are never too large, too fragmented or read or "
            "written too often.",
        ),
    ] = 64 * _MIB
    small_table_rows: Annotated[
        int, Setting(minimum=0, help="Row counts and routing keys of smaller tables are ignored.")
    ] = 10_000
    files: Annotated[
        int, Setting(minimum=1, help="The maximum number of files per table of an epoch.")
    ] = 500
    small_file_bytes: Annotated[
        int,
        Setting(
            config="small_file_kb", scale=1024, minimum=1, help="A smaller file, in KiB, is small."
        ),
    ] = _MIB
    small_file_percent: Annotated[
        int,
        Setting(
            minimum=1,
            maximum=100,
            help="The maximum percentage of small files per table of 50 or more.",
        ),
    ] = 90
    skew: Annotated[
        int,
        Setting(
            minimum=2,
            help="The maximum factor between the rows of one subtask and the mean of the others.",
        ),
    ] = 4
    expired_percent: Annotated[
        int,
        Setting(
            minimum=1,
            maximum=100,
            help="The maximum percentage of a table's bytes that a restore drops as expired.",
        ),
    ] = 50
    future_micros: Annotated[
        int,
        _amount(
            "future_hours", 60 * _MINUTE, "Event times may be this many hours ahead of the clock."
        ),
    ] = _DAY
    read_amplification: Annotated[
        int,
        Setting(
            minimum=1, help="The maximum number of subtasks that read the same byte of a table."
        ),
    ] = 4
    write_percent: Annotated[
        int,
        Setting(minimum=1, help="The maximum percentage of the state that an epoch writes again."),
    ] = 50
    space_amplification: Annotated[
        int,
        Setting(minimum=1, help="The maximum factor between stored bytes and the newest epoch."),
    ] = 10
    epochs: Annotated[
        int, Setting(minimum=1, help="The maximum number of unpinned epochs of a job.")
    ] = 1000
    pinned_bytes: Annotated[
        int,
        Setting(
            config="pinned_mb",
            scale=_MIB,
            minimum=0,
            help="The maximum size of files that only pinned epochs list, and of what is in "
            "quarantine, in MiB.",
        ),
    ] = 10 * 1024 * _MIB
    pin_micros: Annotated[
        int,
        _amount("pin_days", _DAY, "The maximum age of a pin, in days."),
    ] = 30 * _DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFigures:
    """The sums over the files that one table of one operator lists at one epoch.

    Attributes:
        rows: as stored, removals included; None if the rows of a file are unknown.
    """

    operator: str
    table: str
    files: int
    size_bytes: int
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFigures:
    """The numbers of one epoch; None = not known.

    Attributes:
        started_micros, finished_micros: as its metadata says, since 1970 in UTC.
        watermark_micros: event time that all operators have reached.
        rows: as stored, in all files, removals included.
        new_files, new_size_bytes: listed by this epoch and not by the one before it.
        tables: of every operator; empty if they are not known.
    """

    epoch: int
    worker_generation: int | None = None
    started_micros: int | None = None
    finished_micros: int
    watermark_micros: int | None = None
    files: int | None = None
    size_bytes: int | None = None
    rows: int | None = None
    new_files: int | None = None
    new_size_bytes: int | None = None
    tables: tuple[TableFigures, ...] = ()

    @property
    def duration_micros(self) -> int | None:
        return None if self.started_micros is None else self.finished_micros - self.started_micros
