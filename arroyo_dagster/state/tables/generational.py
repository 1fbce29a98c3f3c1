"""Current rows of generational tables: which row of a key is valid, and which are history.

Every change of a key adds a row with a higher row generation (`_generation`). Files are never
rewritten, so older rows exist until their file is deleted. Pure functions on Arrow tables, all rows
in replay order; used by all readers and merges.

Source: crates/arroyo-worker/src/arrow/incremental_aggregator.rs (`arroyo-state.md` 5.7).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig
from arroyo_dagster.state.tables.grouping import group_codes
from arroyo_dagster.state.tables.key_index import Hashes, KeyIndex, can_index, hashes_of

ACCUMULATORS = "accumulator_state"
BATCHES = "batch_state"
_COUNT = "count"
_WAITING_ROWS = 1 << 18
"""How many rows of older row generations may stay in memory until they are dropped."""
_NEVER = 2**63 - 1
_NO_HASHES: Hashes = np.zeros(0, np.uint64)


class Role(enum.Enum):
    """The meaning of a generational table's rows."""

    ROWS = "rows"
    """In managed jobs: one row per storage key, its newest."""

    ACCUMULATORS = "accumulators"
    """Table `a` of an updating aggregate: the whole state of one key."""

    TUPLES = "tuples"
    """Table `b`: how often a key has had one tuple of arguments."""


def role_of(config: ExpiringTimeKeyConfig, *, managed: bool) -> Role:
    """Return the role of a generational table.

    Args:
        managed: whether a managed job wrote it.
    """
    if not managed and config.description == ACCUMULATORS:
        return Role.ACCUMULATORS
    if not managed and config.description == BATCHES:
        return Role.TUPLES
    return Role.ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The positions of the columns of a generational table that determine the current rows.

    Attributes:
        keys: the storage key; empty for an aggregate without GROUP BY.
        routing: the columns that are hashed; in table `b` the keys of its groups.
        timestamp: in table `a`, null marks a tombstone: nothing is left of the row's key.
        generation: `_generation`.
        count: in table `b`; None in the others.
    """

    keys: tuple[int, ...]
    routing: tuple[int, ...]
    timestamp: int
    generation: int
    count: int | None = None

    @classmethod
    def of(cls, config: ExpiringTimeKeyConfig, memory: pa.Schema, *, managed: bool) -> RowLayout:
        """Return the layout of a table with the memory schema `memory`."""
        is_tuples = role_of(config, managed=managed) is Role.TUPLES
        return cls(
            keys=config.schema.key_indices or (),
            routing=config.schema.hashed_indices,
            timestamp=config.schema.timestamp_index,
            generation=len(memory) - 1,
            count=memory.get_field_index(_COUNT) if is_tuples else None,
        )


# ---- current rows --------------------------------------------------------------------------------


def newest(rows: pa.Table, layout: RowLayout) -> pa.Table:
    """Return the row of the largest row generation of each storage key; of equals the first.

    The result stays in replay order. Tombstones and counts of 0 are rows like any others: they hide
    rows of older files, so a merge of only some of the files must keep them.
    """
    return newest_of([rows], layout)


def newest_of(pieces: Iterable[pa.Table], layout: RowLayout) -> pa.Table:
    """Return the rows as `newest`, from one or more pieces.

    Rows that a later piece supersedes are dropped once enough rows have come.
    """
    kept = Newest(layout)
    for piece in pieces:
        kept.add(piece)
    return kept.rows()


class Newest:
    """Rows in replay order, reduced to the newest of each storage key.

    Args:
        waiting_rows: at least this many rows of older row generations may stay in memory.
    """

    def __init__(self, layout: RowLayout, waiting_rows: int = _WAITING_ROWS) -> None:
        self._layout = layout
        self._waiting = waiting_rows
        self._limit = waiting_rows
        self._pieces: list[pa.Table] = []
        self._hashes: list[Hashes] = []
        self._rows = 0
        self._settled = False

    def add(self, rows: pa.Table, hashes: Hashes | None = None) -> None:
        """Append rows; `hashes`: as `hashes` returns them, computed here if None."""
        self._settled = self._settled and not rows.num_rows
        self._pieces.append(rows)
        self._hashes.append(self.hashes(rows) if hashes is None else hashes)
        self._rows += rows.num_rows
        if self._rows > self._limit:
            self.rows()
            self._limit = max(self._waiting, 2 * self._rows)

    def hashes(self, rows: pa.Table) -> Hashes:
        """Return the hash of each row's key; empty if such keys cannot be indexed."""
        keys = self._keys(rows)
        return hashes_of(keys) if can_index([key.type for key in keys]) else _NO_HASHES

    def rows(self) -> pa.Table:
        """Return each key's row of the largest generation, of equals the first, in replay order."""
        if not self._settled:
            whole = pa.concat_tables(self._pieces)
            places = self._newest_at(whole)
            hashes = np.concatenate(self._hashes)
            self._pieces = [whole.take(places)]
            self._hashes = [hashes[places] if len(hashes) else hashes]
            self._rows, self._settled = len(places), True
        return pa.concat_tables(self._pieces)

    def index(self) -> tuple[pa.Table, KeyIndex]:
        """Return all rows, including older ones, and an index of the current row of each key.

        Only for keys that `can_index` accepts.
        """
        rows = pa.concat_tables(self._pieces).combine_chunks()
        generations = _generations(rows, self._layout)
        # In managed jobs rows come by generation, so this hardly sorts. Stable for equals.
        order = np.argsort(~generations, kind="stable")
        return rows, KeyIndex(self._keys(rows), np.concatenate(self._hashes), order)

    def _keys(self, rows: pa.Table) -> list[pa.ChunkedArray]:
        return [rows.column(index) for index in self._layout.keys]

    def _newest_at(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        if can_index([key.type for key in self._keys(rows)]):
            return self.index()[1].newest()
        order, codes = _by_generation(rows, self._layout)
        first_of_key = np.ones(len(order), bool)
        first_of_key[1:] = codes[order][1:] != codes[order][:-1]
        return np.sort(order[first_of_key])


def _generations(rows: pa.Table, layout: RowLayout) -> npt.NDArray[np.uint64]:
    values: npt.NDArray[np.uint64] = rows.column(layout.generation).to_numpy()
    return values.astype(np.uint64, copy=False)


def _by_generation(
    rows: pa.Table, layout: RowLayout
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the places of the rows by key, newest first; and the number of each row's key."""
    codes = group_codes([rows.column(index) for index in layout.keys], rows.num_rows)
    generations = _generations(rows, layout)
    # Stable: of equal generations, the first row stays first.
    return np.lexsort((~generations, codes)), codes


def newest_at_any_cutoff(rows: pa.Table, layout: RowLayout) -> pa.Table:
    """Return the rows of each key that `newest` returns now or after rows have expired one by one.

    A row is dropped if another row of its key has a larger generation (of equals: comes before it)
    and is not older: whenever the row is kept, so is the other one. The result stays in replay
    order.
    """
    if not rows.num_rows:
        return rows
    order, codes = _by_generation(rows, layout)
    # A row without event time never expires, so it ranks as the latest.
    times = rows.column(layout.timestamp).cast(pa.int64()).fill_null(_NEVER).to_numpy()
    ranks = np.unique(times, return_inverse=True)[1].astype(np.int64)[order]
    # Numbers of keys ascend, so the running maximum restarts with every key.
    of_key = codes[order] * len(ranks)
    latest = np.maximum.accumulate(of_key + ranks)
    kept = np.ones(len(order), bool)
    kept[1:] = of_key[1:] + ranks[1:] > latest[:-1]
    return rows.take(np.sort(order[kept]))


def accumulators(rows: pa.Table, layout: RowLayout) -> pa.Table:
    """Return the rows of table `a` that a restore keeps: the newest of each key, without
    tombstones.

    A key whose count has decreased to 0 is kept: Arroyo continues from it, and emits it.
    """
    kept = newest(rows, layout)
    return kept.filter(pc.is_valid(kept.column(layout.timestamp)))


def tuples(
    rows: pa.Table, layout: RowLayout, keys: Sequence[pa.ChunkedArray] | None = None
) -> pa.Table:
    """Return the rows of table `b` that a restore keeps: the newest of each tuple, without counts
    of 0.

    Args:
        keys: the key columns of the rows that a restore keeps of table `a`: tuples of any other key
            are left out. None = of all keys.
    """
    kept = newest(rows, layout)
    if layout.count is not None:
        counts = kept.column(layout.count)
        # The 0 is of the column's type: Arrow compares an unsigned and a signed number as signed.
        kept = kept.filter(pc.greater(counts, pa.scalar(0, counts.type)))
    return kept if keys is None else _of_keys(kept, layout, keys)


def _of_keys(rows: pa.Table, layout: RowLayout, keys: Sequence[pa.ChunkedArray]) -> pa.Table:
    """Return the rows whose routing key is among `keys`; without key columns all rows."""
    if not layout.routing:
        return rows
    columns = [
        pa.chunked_array([*key.chunks, *rows.column(index).cast(key.type).chunks], key.type)
        for key, index in zip(keys, layout.routing, strict=True)
    ]
    known_rows = len(keys[0])
    codes = group_codes(columns, known_rows + rows.num_rows)
    return rows.filter(pa.array(np.isin(codes[known_rows:], codes[:known_rows])))


def restored(rows: pa.Table, layout: RowLayout, role: Role) -> pa.Table:
    """Return the rows that a restore keeps of one table, for any role; table `b` on its own."""
    if role is Role.ACCUMULATORS:
        return accumulators(rows, layout)
    if role is Role.TUPLES:
        return tuples(rows, layout)
    return newest(rows, layout)


# ---- aggregates without GROUP BY -----------------------------------------------------------------


def first_of_batches(rows: pa.Table, batches: npt.NDArray[np.int64]) -> pa.Table:
    """Return the rows that Arroyo reads when it restores an aggregate without GROUP BY.

    These are the first rows of each record batch, in both tables: it loses the others, although the
    files contain them. Such a job continues from `restored` of these rows.

    Args:
        batches: for each row the number of its record batch, ascending.
    """
    first = np.ones(len(batches), bool)
    first[1:] = batches[1:] != batches[:-1]
    return rows.filter(pa.array(first))
