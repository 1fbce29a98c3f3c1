"""Which sessions of a session window are open: its table `e`, beside the rows in `s`.

Source: docs/spec/arroyo-state.md 5.6. A restore takes the earliest start of all subtasks, loads the
rows since then, and closes the sessions that the watermark has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.surgery.bootstrap import BootstrapTable
from arroyo_dagster.state.operations.surgery.entries import (
    ChangedEntries,
    GlobalTable,
    changed_entries,
)
from arroyo_dagster.state.planning.surgery.columns import SESSION

SESSION_START = "earliest start time of all active batches."
"""The description of table `e`."""


def session_starts(
    given: Sequence[BootstrapTable], checkpoint: Checkpoint, tables: Sequence[GlobalTable]
) -> tuple[ChangedEntries, ...]:
    """Set the earliest start of each session window that gets computed rows, in every subtask.

    Args:
        given: the computed tables.
        tables: the global keyed tables of the job.

    Raises:
        InputError: the job has stored no start yet.
    """
    changed = []
    for table in given:
        operator = checkpoint.operator(table.operator)
        assert operator is not None
        if operator.configs[table.table].config.description == SESSION:
            starts = _starts_of(table.operator, tables)
            changed.append(changed_entries(starts, partial(_start, table)))
    return tuple(changed)


def _start(given: BootstrapTable, key: int, value: int | None) -> int | None:
    return given.oldest_nanos


def _starts_of(operator: OperatorId, tables: Sequence[GlobalTable]) -> GlobalTable:
    for table in tables:
        is_starts = table.config.config.description == SESSION_START
        if is_starts and table.operator.operator == operator and any(f.pairs for f in table.files):
            return table
    raise InputError(
        "the job has not stored which sessions are open, so the rows of sessions are not loaded",
        operator=operator,
        next_step="let the job process rows, and stop it with a checkpoint again",
    )
