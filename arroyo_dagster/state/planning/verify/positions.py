"""Findings about how far sources have read, from one epoch to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.planning.verify.findings import Finding, error, warning

Positions = Mapping[tuple[str, str, str], int]
"""By operator, table and partition: an offset, or a number of records, lines or events."""

_LARGEST = 2**63 - 1
_A_SECOND = 10**10
"""No source reads so many records, or bytes, of one partition in a second."""
_STEP = (
    "compare it with the source and with `arroyo-state sql @offsets JOB`; restore the file from "
    "a backup, or set the position with `arroyo-state edit offsets`"
)


def absurd_positions(now: Checkpoint, positions: Positions) -> Iterator[Finding]:
    """Find positions that no source can have."""
    for key, position in positions.items():
        if not 0 <= position <= _LARGEST:
            evidence = f"{_named(key)} is read to {position}; expected 0 to 2^63 - 1"
            yield error("position-absurd", now.ref, evidence, _STEP)


def position_steps(
    before: Checkpoint, now: Checkpoint, old: Positions, new: Positions
) -> Iterator[Finding]:
    """Find positions that go backwards, or further ahead than a source can read.

    Args:
        before, old: the epoch that `now` goes on from, and its positions.
        now, new: an epoch that no edit, rollback or start without state has set.
    """
    micros = max(1_000_000, now.finish_time_micros - before.finish_time_micros)
    most = _A_SECOND * micros // 1_000_000
    for key, position in new.items():
        if key not in old or not 0 <= position <= _LARGEST:
            continue
        step = f"{_named(key)} was read to {old[key]} at epoch {before.epoch}"
        if position < old[key]:
            evidence = f"{step}, and only to {position} at {now.epoch}: its rows come again"
            yield warning("position-backwards", now.ref, evidence, _STEP)
        elif position - old[key] > most:
            evidence = f"{step}, and to {position} at {now.epoch}, which no source can reach"
            yield warning("position-absurd", now.ref, evidence, _STEP)


def _named(key: tuple[str, str, str]) -> str:
    operator, _, partition = key
    return f"partition {partition} of {operator}"
