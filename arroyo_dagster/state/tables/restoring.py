"""The rows of an expiring table that a restore at one epoch holds, over all subtasks.

Of Arroyo's tables what Arroyo does, which differs from view to view; of ours what they promise
(`arroyo-state.md` 5.4 and 5.7; `design.md` 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import TableName
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.query import ReadPlan, plan_read
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.generational import (
    Role,
    RowLayout,
    accumulators,
    first_of_batches,
    restored,
    role_of,
    tuples,
)
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, StoredRows


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """The rows that a table holds.

    Attributes:
        rows: as the operator sees them.
        upstream: what Arroyo itself would go on from, where that is less or older; None = the same.
    """

    rows: pa.Table
    upstream: pa.Table | None = None


def restored_rows(
    store: ObjectStore,
    operator: OperatorCheckpoint,
    name: TableName,
    *,
    ours: bool,
    history: bool = False,
) -> RestoredRows:
    """Read what a restore would hold of one expiring table.

    Of generational tables the newest row of each key, less what is deleted; of Arroyo's table `b`
    only what belongs to a key of its table `a`.

    Args:
        ours: whether a job of ours wrote it.
        history: give all generations of every key.

    Raises:
        InputError: not an expiring table of this operator.
        FormatError, NotFoundError: a file is broken, or missing.
    """
    opened = _Opened.of(store, operator, name, ours=ours)
    if history or not opened.config.generational:
        return RestoredRows(opened.rows())
    role = role_of(opened.config, ours=ours)
    if role is Role.ROWS or opened.config.schema.hashed_indices:
        return RestoredRows(_newest(opened, operator, role))
    # Without GROUP BY there is one key, and nothing to look up in the other table.
    layout = opened.layout
    parts = opened.parts(batches=True)
    kept = restored(pa.concat_tables([part.rows for part in parts]), layout, role)
    seen = pa.concat_tables([first_of_batches(part.rows, _batches_of(part)) for part in parts])
    upstream = restored(seen, layout, role)
    return RestoredRows(kept, None if upstream.equals(kept) else upstream)


def _newest(opened: _Opened, operator: OperatorCheckpoint, role: Role) -> pa.Table:
    rows = opened.rows()
    if role is not Role.TUPLES:
        return restored(rows, opened.layout, role)
    keys = [
        name
        for name, config in operator.configs.items()
        if isinstance(config.config, ExpiringTimeKeyConfig)
        and config.config.generational
        and role_of(config.config, ours=opened.ours) is Role.ACCUMULATORS
        and name in operator.tables
    ]
    if len(keys) != 1:
        return rows.slice(0, 0)  # tuples of keys that table `a` does not have are left out
    groups = _Opened.of(opened.store, operator, keys[0], ours=opened.ours)
    kept = accumulators(groups.rows(), groups.layout)
    known = [kept.column(index) for index in groups.layout.keys]
    return tuples(rows, opened.layout, known)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A table at one epoch, and what a restore reads of it."""

    store: ObjectStore
    table: ExpiringTimeKeyTable
    plan: ReadPlan
    ours: bool

    @classmethod
    def of(
        cls, store: ObjectStore, operator: OperatorCheckpoint, name: TableName, *, ours: bool
    ) -> _Opened:
        files, config = operator.tables.get(name), operator.configs.get(name)
        if not isinstance(files, ExpiringTimeKeyFiles) or config is None:
            raise InputError(
                "not an expiring table of the operator", operator=operator.operator, table=name
            )
        table = ExpiringTimeKeyTable(config, store)
        plan = plan_read(table.config, files, operator.min_watermark_micros, ours=ours)
        return cls(store, table, plan, ours)

    @property
    def config(self) -> ExpiringTimeKeyConfig:
        return self.table.config

    @property
    def layout(self) -> RowLayout:
        return RowLayout.of(self.config, self.table.memory_schema, ours=self.ours)

    def rows(self) -> pa.Table:
        """Every generation of every row."""
        plan = self.plan
        if not (plan.whole_batches and plan.cutoff_micros > 0):
            return self.table.load(plan.files, plan.keys, cutoff_micros=plan.cutoff_micros)
        parts = self.parts(batches=True)
        at = self.table.timestamp_index
        kept = [_fresh_batches(part, at, plan.cutoff_micros) for part in parts]
        return pa.concat_tables([self.table.memory_schema.empty_table(), *kept])

    def parts(self, *, batches: bool) -> Sequence[StoredRows]:
        plan = self.plan
        return self.table.read(
            plan.files, plan.keys, cutoff_micros=plan.cutoff_micros, batches=batches
        )


def _batches_of(part: StoredRows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    assert part.batches is not None
    return part.batches


def _fresh_batches(part: StoredRows, timestamp_index: int, cutoff_micros: int) -> pa.Table:
    """The rows of those record batches that have a row at the cutoff, or behind it."""
    batches = _batches_of(part)
    if not len(batches):
        return part.rows
    times = part.rows.column(timestamp_index).cast(pa.int64()).fill_null(0).to_numpy()
    starts = np.flatnonzero(np.append(True, batches[1:] != batches[:-1]))
    fresh = np.maximum.reduceat(times, starts) >= cutoff_micros * NANOS_PER_MICRO
    lengths = np.diff(np.append(starts, len(batches)))
    return part.rows.filter(pa.array(np.repeat(fresh, lengths)))
