"""The rows of an expiring table that a restore at one epoch holds, over all subtasks.

For tables of Arroyo jobs the rules are those of Arroyo, which differ from view to view; for managed
jobs they are those of this package (`arroyo-state.md` 5.4 and 5.7; `design.md` 5). Files are read
piece by piece. Memory holds only the requested rows; for generational tables, and tables with
deletes, all rows that a restore holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import TableName
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.restore.reads import ALL_KEYS, ReadPlan, plan_read
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.generational import (
    Role,
    RowLayout,
    accumulators,
    first_of_batches,
    newest_of,
    restored,
    role_of,
    tuples,
)
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, StoredRows, not_older


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """The rows of a table.

    Attributes:
        rows: the requested rows, as the operator sees them.
        count: the number of all rows.
        upstream: the rows from which Arroyo itself would continue, if they are fewer or older; None
            = the same.
    """

    rows: pa.Table
    count: int
    upstream: pa.Table | None = None


def restored_rows(
    store: ObjectStore,
    operator: OperatorCheckpoint,
    name: TableName,
    *,
    managed: bool,
    history: bool = False,
    limit: int | None = None,
    keys: KeyRange = ALL_KEYS,
) -> RestoredRows:
    """Read the rows that a restore would hold of one expiring table.

    Of generational tables these are the newest row of each key, without deleted ones; of Arroyo's
    table `b`, only the rows that belong to a key of its table `a`.

    Args:
        managed: whether a managed job wrote it. Arroyo treats every row as an insert.
        history: return all row generations of every key.
        limit: return only the first rows, this many; None = all.
        keys: the routing keys of the subtask that restores.

    Raises:
        InputError: not an expiring table of this operator.
        FormatError, NotFoundError: a file is broken, or missing.
    """
    opened = _Opened.of(store, operator, name, managed=managed, keys=keys)
    if history or not opened.config.generational:
        if limit is None:
            rows = opened.rows()
            return RestoredRows(rows, rows.num_rows)
        times = (opened.table.timestamp_index,)
        count = 0
        for part in opened.stream(times, batches=True):
            if opened.managed and part.deletes:
                rows = opened.rows()
                return RestoredRows(rows.slice(0, limit), rows.num_rows)
            count += opened.fresh(part, timestamp_index=0).num_rows
        return RestoredRows(_first(opened, limit), count)
    role = role_of(opened.config, managed=managed)
    if role is Role.ROWS or opened.config.schema.hashed_indices:
        kept = _newest(opened, operator, role)
        return RestoredRows(kept.slice(0, limit), kept.num_rows)
    # Without GROUP BY there is one key, so the other table is not needed.
    layout = opened.layout
    kept = restored(newest_of(opened.slices(), layout), layout, role)
    parts = opened.stream(batches=True)
    inspected = (first_of_batches(part.rows, _batches_of(part)) for part in parts)
    none = opened.table.memory_schema.empty_table()  # a subtask may have no rows
    upstream = restored(newest_of(itertools.chain([none], inspected), layout), layout, role)
    same = upstream.equals(kept)
    return RestoredRows(kept.slice(0, limit), kept.num_rows, None if same else upstream)


def _first(opened: _Opened, limit: int) -> pa.Table:
    parts, left = [opened.table.memory_schema.empty_table()], limit
    for part in opened.stream(batches=True) if limit else ():
        parts.append(opened.fresh(part).slice(0, left))
        left -= parts[-1].num_rows
        if not left:
            break
    return pa.concat_tables(parts)


def _newest(opened: _Opened, operator: OperatorCheckpoint, role: Role) -> pa.Table:
    rows = newest_of(opened.slices(), opened.layout)
    if role is not Role.TUPLES:
        return restored(rows, opened.layout, role)
    keys = accumulator_tables(operator, managed=opened.managed)
    if len(keys) != 1:
        return rows.slice(0, 0)  # tuples of keys that are not in table `a` are left out
    groups = _Opened.of(
        opened.store, operator, keys[0], managed=opened.managed, keys=opened.plan.keys
    )
    kept = accumulators(newest_of(groups.slices(), groups.layout), groups.layout)
    key_columns = [kept.column(index) for index in groups.layout.keys]
    return tuples(rows, opened.layout, key_columns)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A table at one epoch, and the plan of its reads for a restore."""

    store: ObjectStore
    table: ExpiringTimeKeyTable
    plan: ReadPlan
    managed: bool

    @classmethod
    def of(
        cls,
        store: ObjectStore,
        operator: OperatorCheckpoint,
        name: TableName,
        *,
        managed: bool,
        keys: KeyRange,
    ) -> _Opened:
        files, config = operator.tables.get(name), operator.configs.get(name)
        if not isinstance(files, ExpiringTimeKeyFiles) or config is None:
            raise InputError(
                "not an expiring table of the operator", operator=operator.operator, table=name
            )
        table = ExpiringTimeKeyTable(config, store)
        watermark = operator.min_watermark_micros
        plan = plan_read(table.config, files, watermark, keys, managed=managed)
        return cls(store, table, plan, managed)

    @property
    def config(self) -> ExpiringTimeKeyConfig:
        return self.table.config

    @property
    def layout(self) -> RowLayout:
        return RowLayout.of(self.config, self.table.memory_schema, managed=self.managed)

    def rows(self) -> pa.Table:
        """Return every row generation of every row."""
        plan = self.plan
        if self.managed:
            return self.table.load(plan.files, plan.keys, cutoff_micros=plan.cutoff_micros)
        return pa.concat_tables([self.table.memory_schema.empty_table(), *self.slices()])

    def slices(self) -> Iterator[pa.Table]:
        """Yield rows as `rows`, in pieces; the first is empty, so that there is at least one."""
        yield self.table.memory_schema.empty_table()
        if self.managed and any(part.deletes for part in self.stream(())):
            yield self.rows()
            return
        yield from map(self.fresh, self.stream(batches=True))

    def stream(
        self, columns: Sequence[int] | None = None, *, batches: bool = False
    ) -> Iterator[StoredRows]:
        """Yield the rows as stored, in pieces."""
        plan = self.plan
        return self.table.stream(
            plan.files,
            plan.keys,
            columns=columns,
            cutoff_micros=plan.cutoff_micros,
            batches=batches,
        )

    def fresh(self, part: StoredRows, timestamp_index: int | None = None) -> pa.Table:
        """Return the rows of a piece that are within the retention; `timestamp_index`: of event
        time, if not all columns were read.
        """
        index = self.table.timestamp_index if timestamp_index is None else timestamp_index
        return fresh_rows(part, self.plan, index)


def accumulator_tables(operator: OperatorCheckpoint, *, managed: bool) -> list[TableName]:
    """Return the tables `a` of an updating aggregate; normally one."""
    return [
        name
        for name, config in operator.configs.items()
        if isinstance(config.config, ExpiringTimeKeyConfig)
        and config.config.generational
        and role_of(config.config, managed=managed) is Role.ACCUMULATORS
        and name in operator.tables
    ]


def fresh_rows(part: StoredRows, plan: ReadPlan, timestamp_index: int) -> pa.Table:
    """Return the stored rows that are within the retention.

    Args:
        timestamp_index: of event time among the columns of `part`, if the plan has a cutoff.
    """
    cutoff = plan.cutoff_micros
    if cutoff <= 0 or not part.rows.num_rows:
        return part.rows
    if plan.whole_batches:
        return fresh_batches(part, timestamp_index, cutoff)
    return part.rows.filter(not_older(part.rows.column(timestamp_index), cutoff))


def _batches_of(part: StoredRows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    assert part.batches is not None
    return part.batches


def fresh_batches(part: StoredRows, timestamp_index: int, cutoff_micros: int) -> pa.Table:
    """Return the rows of those record batches that have a row at or after the cutoff."""
    batches = _batches_of(part)
    times = part.rows.column(timestamp_index).cast(pa.int64()).fill_null(0).to_numpy()
    starts = np.flatnonzero(np.append(True, batches[1:] != batches[:-1]))
    fresh = np.maximum.reduceat(times, starts) >= cutoff_micros * NANOS_PER_MICRO
    lengths = np.diff(np.append(starts, len(batches)))
    return part.rows.filter(pa.array(np.repeat(fresh, lengths)))
