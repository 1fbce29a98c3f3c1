"""What changed in a table between two epochs, of one job or of two.

Rows that only moved to another file, by a compaction or a rescale, are no change. Files that both
epochs list are not read, unless rows in them have expired in between.

A table whose rows are unique by key is compared by key: rows are inserted, updated, removed or
expired. Any other table is compared as a multiset of rows: none is updated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.hashing.routing import key_hashes, subtasks_for_hashes
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.tables import TIMESTAMP_COLUMN
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from arroyo_dagster.state.operations.query.global_scan import KEY, GlobalScan
from arroyo_dagster.state.operations.query.scans import ScanRequest
from arroyo_dagster.state.operations.query.state import StateEpoch
from arroyo_dagster.state.operations.query.table import EpochTable
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.tables.data_files import open_data_file
from arroyo_dagster.state.tables.grouping import group_codes
from arroyo_dagster.state.tables.key_index import KeySet
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, nanos

CHANGE = "_change"
_Rows = npt.NDArray[np.int64]


class Change(enum.Enum):
    """What happened to a row. An update has its row before and its row after."""

    INSERTED = "inserted"
    UPDATED_FROM = "updated_from"
    UPDATED_TO = "updated_to"
    REMOVED = "removed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDiff:
    """The changes of one table.

    Attributes:
        operator, table: their names.
        changes: the rows that changed, with `_change` as the last column: first those before.
        key_columns: the columns of the key; empty = it has none.
        skipped_files: files that both epochs list and that were not read.
        by_subtask: how many rows changed in the key range of each subtask after; empty = the rows
            are not routed by key.
    """

    operator: str
    table: str
    changes: pa.Table
    key_columns: tuple[str, ...] = ()
    skipped_files: int = 0
    by_subtask: tuple[int, ...] = ()

    def count(self, change: Change) -> int:
        """Return how many rows changed so."""
        return int(pc.sum(pc.equal(self.changes.column(CHANGE), change.value)).as_py() or 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not len(self.changes)


def diff_epochs(
    before: StateEpoch, after: StateEpoch, operator: str | None = None, table: str | None = None
) -> list[TableDiff]:
    """Compare the tables of two epochs, in the order of operators after.

    A table that one of them does not have is empty there.

    Args:
        operator, table: compare only these; None = all.

    Raises:
        NotFoundError: neither epoch has them.
        InputError: the columns of a table differ.
        FormatError: a file is broken.
    """
    earlier = {(entry.name.operator, entry.name.table): entry for entry in before.tables()}
    later = {(entry.name.operator, entry.name.table): entry for entry in after.tables()}
    names = [
        name
        for name in dict.fromkeys([*later, *earlier])
        if operator in (None, name[0]) and table in (None, name[1])
    ]
    if not names and operator is not None:
        after.table(operator, table or "")  # raises, and names the nearest
    return [diff_tables(earlier.get(name), later.get(name)) for name in names]


def diff_tables(before: EpochTable | None, after: EpochTable | None) -> TableDiff:
    """Compare two tables of the same columns; None = an empty one.

    Raises:
        InputError: their columns differ, or both are None.
        NotFoundError, FormatError: as reading them.
    """
    table = after or before
    if table is None:
        raise InputError("there is no table to compare")
    if before is None or after is None:
        return _compared(before, after, _rows(before, None), _rows(after, None), skipped=0)
    if not before.schema.equals(after.schema):
        raise InputError(
            "the columns of the two tables differ",
            table=str(after.name),
            before=_columns(before),
            after=_columns(after),
            next_step="read both, and compare the columns that they share",
        )
    shared = _same_files(before, after)
    if len(shared) == len({*before.scan.paths, *after.scan.paths}):
        empty = after.schema.empty_table()
        return _compared(before, after, empty, empty, skipped=len(shared))
    changed = None
    if not (before.scan.divisible_by_file and after.scan.divisible_by_file):
        changed = _changed_keys(before, after, shared)
        shared = frozenset()  # rows of one file decide which rows of another are current
    rows = [_rows(table, shared, changed) for table in (before, after)]
    return _compared(before, after, rows[0], rows[1], skipped=len(shared))


def _columns(table: EpochTable) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in table.schema)


def _rows(
    table: EpochTable | None,
    without: frozenset[StatePath] | None,
    keys: KeySet | None = None,
) -> pa.Table | None:
    """Return the rows of a table; `without`: files that are left out; `keys`: other rows are."""
    if table is None:
        return None
    request = ScanRequest(columns=tuple(range(len(table.schema))), key_set=keys)
    if without:
        request = replace(request, files=frozenset(table.scan.paths) - without)
    return pa.concat_tables([table.schema.empty_table(), *table.read(request)])


def _changed_keys(
    before: EpochTable, after: EpochTable, same: frozenset[StatePath]
) -> KeySet | None:
    """Return the keys whose rows may differ: those in files that one of the two does not list, and
    of rows that expire in between. None if that is unknown, or if they share no file.

    Args:
        same: as of `_same_files`.
    """
    scans = [table.scan for table in (before, after) if isinstance(table.scan, ExpiringScan)]
    shared = frozenset(before.scan.paths) & frozenset(after.scan.paths)
    isolated = len(scans) == 2 and all(scan.divisible_by_key_set for scan in scans)
    if not shared or not isolated or before.store.url != after.store.url:
        return None
    hashes = [part for scan in scans for part in scan.key_hashes_in({*scan.paths} - shared)]
    cutoffs = [scan.cutoff_micros for scan in scans]
    if cutoffs[0] != cutoffs[1]:
        hashes += scans[1].key_hashes_in(shared - same, max(cutoffs))
    return KeySet(hashes)


def _same_files(before: EpochTable, after: EpochTable) -> frozenset[StatePath]:
    """Return the files that both list, and of whose rows both restore the same."""
    if before.store.url != after.store.url:
        return frozenset()  # a path names another object there
    shared = frozenset(before.scan.paths) & frozenset(after.scan.paths)
    cutoffs = [_cutoff_micros(table) for table in (before, after)]
    if cutoffs[0] == cutoffs[1]:
        return shared
    listed = sorted(shared)
    oldest = concurrently(lambda path: _oldest_nanos(after, path), listed)
    limit = max(cutoffs) * NANOS_PER_MICRO
    return frozenset(
        path for path, ns in zip(listed, oldest, strict=True) if ns is not None and ns >= limit
    )


def _cutoff_micros(table: EpochTable) -> int:
    return table.scan.cutoff_micros if isinstance(table.scan, ExpiringScan) else 0


def _oldest_nanos(table: EpochTable, path: StatePath) -> int | None:
    """Return the smallest event time in a file, by its statistics; None = they do not say."""
    assert isinstance(table.scan, ExpiringScan)
    with closing(open_data_file(table.store, path)) as data:
        names = data.schema.names
        name = TIMESTAMP_COLUMN
        return data.smallest(names.index(name)) if names.count(name) == 1 else None


# ---- comparing rows ------------------------------------------------------------------------------


def _compared(
    before: EpochTable | None,
    after: EpochTable | None,
    old: pa.Table | None,
    new: pa.Table | None,
    *,
    skipped: int,
) -> TableDiff:
    table = after or before
    assert table is not None
    schema = table.schema
    parts = [schema.empty_table() if rows is None else rows for rows in (old, new)]
    keys = _unique_key(table)
    earlier, later = parts
    changes = _by_key(earlier, later, keys) if keys else _as_multisets(earlier, later)
    combined = pa.concat_tables(
        [
            schema.empty_table().append_column(CHANGE, pa.array([], pa.string())),
            *(
                rows.append_column(CHANGE, pa.repeat(kind.value, rows.num_rows))
                for kind, rows in _expired_apart(changes, after)
                if rows.num_rows
            ),
        ]
    )
    return TableDiff(
        operator=table.name.operator or "",
        table=table.name.table,
        changes=combined,
        key_columns=table.key_columns,
        skipped_files=skipped,
        by_subtask=_by_subtask(table, combined),
    )


def _by_subtask(table: EpochTable, changes: pa.Table) -> tuple[int, ...]:
    scan = table.scan
    if not isinstance(scan, ExpiringScan) or not scan.routing_columns or table.mask:
        return ()
    columns = [changes.column(index) for index in scan.routing_columns]
    try:
        hashes = key_hashes(columns, changes.num_rows, variant=scan.variant)
    except InputError:
        return ()  # a type that is not hashed here
    parallelism = scan.operator.parallelism
    subtasks = subtasks_for_hashes(hashes, parallelism)
    return tuple(np.bincount(subtasks, minlength=parallelism).tolist())


def _unique_key(table: EpochTable) -> tuple[str, ...]:
    """Return the columns of a key that no two rows share; empty = there is none."""
    if isinstance(table.scan, GlobalScan):
        return (KEY,)
    return table.key_columns if table.scan.is_generational else ()


def _by_key(old: pa.Table, new: pa.Table, keys: Sequence[str]) -> list[tuple[Change, pa.Table]]:
    of_key, of_row = (_codes(old, new, names) for names in (keys, old.schema.names))
    rows = old.num_rows
    places = np.full(int(of_key.max(initial=-1)) + 1, -1)
    places[of_key[:rows]] = np.arange(rows)
    partners = places[of_key[rows:]]  # for each new row the old one of its key, or -1
    matched = partners >= 0
    changed = matched.copy()
    changed[matched] = of_row[rows:][matched] != of_row[partners[matched]]
    kept = np.zeros(rows, bool)
    kept[partners[matched]] = True
    return [
        (Change.REMOVED, _take(old, ~kept)),
        (Change.UPDATED_FROM, old.take(pa.array(partners[changed]))),
        (Change.UPDATED_TO, _take(new, changed)),
        (Change.INSERTED, _take(new, ~matched)),
    ]


def _as_multisets(old: pa.Table, new: pa.Table) -> list[tuple[Change, pa.Table]]:
    codes = _codes(old, new, old.schema.names)
    rows = old.num_rows
    return [
        (Change.REMOVED, _take(old, _surplus(codes[:rows], codes[rows:]))),
        (Change.INSERTED, _take(new, _surplus(codes[rows:], codes[:rows]))),
    ]


def _codes(old: pa.Table, new: pa.Table, names: Sequence[str]) -> _Rows:
    columns = [
        pa.chunked_array(
            [*old.column(name).chunks, *new.column(name).chunks], old.column(name).type
        )
        for name in names
    ]
    return group_codes(columns, old.num_rows + new.num_rows)


def _surplus(mine: _Rows, others: _Rows) -> npt.NDArray[np.bool_]:
    """Return which of `mine` have no partner of equal code among `others`, each used once."""
    width = int(max(mine.max(initial=-1), others.max(initial=-1))) + 1
    counts = np.bincount(others, minlength=width)
    order = np.argsort(mine, kind="stable")
    ordered = mine[order]
    first = np.searchsorted(ordered, ordered, side="left")
    number = np.arange(len(ordered)) - first  # of a row among the rows of its code
    surplus = np.zeros(len(mine), bool)
    surplus[order] = number >= counts[ordered]
    return surplus


def _take(rows: pa.Table, mask: npt.NDArray[np.bool_]) -> pa.Table:
    return rows.filter(pa.array(mask))


def _expired_apart(
    changes: Sequence[tuple[Change, pa.Table]], after: EpochTable | None
) -> list[tuple[Change, pa.Table]]:
    """Divide removed rows into removed ones and those that the retention left out."""
    cutoff = 0 if after is None else _cutoff_micros(after)
    if after is None or cutoff <= 0:
        return list(changes)
    assert isinstance(after.scan, ExpiringScan)
    divided: list[tuple[Change, pa.Table]] = []
    for kind, rows in changes:
        if kind is not Change.REMOVED:
            divided.append((kind, rows))
            continue
        times = rows.column(after.scan.timestamp_name)
        old = pc.fill_null(pc.less(times, nanos(cutoff * NANOS_PER_MICRO)), False)
        divided.append((Change.EXPIRED, rows.filter(old)))
        divided.append((Change.REMOVED, rows.filter(pc.invert(old))))
    return divided
