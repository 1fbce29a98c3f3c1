"""Rows of the catalogue: facts about one epoch, and about one file of one epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One epoch of one job.

    Attributes:
        pipeline, worker_generation: None in the legacy layout.
        state: `ready`, `committing`, `rolled back`, `metadata only` (then without files), or
            `unreadable`, then with the reason in `problem`.
        new_files, new_size_bytes: listed by this epoch and not by the one before it; None where
            that one is unknown.
        rows: as stored, in all files; None if a file is missing or broken.
        present: False once the epoch expired.
        recorded_micros: when the object that makes the epoch exist was written, by the store's
            clock.
        rolled_back_to: the epoch whose content it holds, if a rollback published it.
    """

    job: str
    pipeline: str | None = None
    worker_generation: int | None = None
    epoch: int
    state: str
    started_micros: int | None = None
    finished_micros: int | None = None
    duration_micros: int | None = None
    watermark_micros: int | None = None
    operators: int | None = None
    files: int | None = None
    new_files: int | None = None
    size_bytes: int | None = None
    new_size_bytes: int | None = None
    rows: int | None = None
    min_epoch: int | None = None
    final: bool | None = None
    ref: str | None = None
    problem: str | None = None
    present: bool = True
    recorded_micros: int | None = None
    rolled_back_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One data file in the list of one table of one operator at one epoch.

    Attributes:
        table_kind: `global keyed` or `expiring time-key`.
        place: position in replay order, from 0.
        written_epoch: the epoch that wrote the file; for expiring tables only.
        columns: name and type of each column, in order.
        problem: why its footer cannot be read; rows and columns are then None.
    """

    job: str
    pipeline: str | None = None
    worker_generation: int | None = None
    epoch: int
    operator: str
    parallelism: int
    table: str
    table_kind: str
    place: int
    path: str
    rows: int | None = None
    size_bytes: int | None = None
    written_epoch: int | None = None
    min_routing_key: int | None = None
    max_routing_key: int | None = None
    max_timestamp_micros: int | None = None
    compaction_generation: int | None = None
    columns: str | None = None
    problem: str | None = None
