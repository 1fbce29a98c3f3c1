"""What the rows of generational tables come to: which row of a key counts, and which are history.

Every change of a key is one more row with a higher row generation (`_generation`); files are never
rewritten, so older rows stay until their file goes. Pure functions on Arrow tables, all rows in
replay order; used by whatever reads, and by whatever merges.

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

ACCUMULATORS = "accumulator_state"
BATCHES = "batch_state"
_COUNT = "count"
_WAITING_ROWS = 1 << 18
"""How many rows of older generations may wait in memory until they are told apart."""
_NEVER = 2**63 - 1


class Role(enum.Enum):
    """What the rows of a generational table are."""

    ROWS = "rows"
    """Of our jobs: one row a storage key, its newest."""

    ACCUMULATORS = "accumulators"
    """Table `a` of an updating aggregate: the whole state of one key."""

    TUPLES = "tuples"
    """Table `b`: how often a key has had one tuple of arguments."""


def role_of(config: ExpiringTimeKeyConfig, *, ours: bool) -> Role:
    """Tell the role of a generational table.

    Args:
        ours: whether a job of ours wrote it.
    """
    if not ours and config.description == ACCUMULATORS:
        return Role.ACCUMULATORS
    if not ours and config.description == BATCHES:
        return Role.TUPLES
    return Role.ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where the columns of a generational table are that decide, by position.

    Attributes:
        keys: the storage key; empty for an aggregate without GROUP BY.
        routing: the columns that are hashed: of table `b` the keys of its groups.
        timestamp: null in a row of table `a` says that nothing is left of its key (a tombstone).
        generation: `_generation`.
        count: of table `b`; None in the others.
    """

    keys: tuple[int, ...]
    routing: tuple[int, ...]
    timestamp: int
    generation: int
    count: int | None = None

    @classmethod
    def of(cls, config: ExpiringTimeKeyConfig, memory: pa.Schema, *, ours: bool) -> RowLayout:
        """The layout of a table whose memory schema is `memory`."""
        is_tuples = role_of(config, ours=ours) is Role.TUPLES
        return cls(
            keys=config.schema.key_indices or (),
            routing=config.schema.hashed_indices,
            timestamp=config.schema.timestamp_index,
            generation=len(memory) - 1,
            count=memory.get_field_index(_COUNT) if is_tuples else None,
        )


# ---- which rows count ----------------------------------------------------------------------------


def newest(rows: pa.Table, layout: RowLayout) -> pa.Table:
    """Of each storage key the row of the largest generation; of equals the first.

    What is left stays in replay order. Tombstones and counts of 0 are rows like any others: they
    hide what an older file holds, so a merge of some of the files must keep them.
    """
    return rows.take(_newest_at(rows, layout))


def newest_of(pieces: Iterable[pa.Table], layout: RowLayout) -> pa.Table:
    """As `newest`, of rows that come in pieces, one at least.

    What a later piece makes history of is forgotten as soon as enough has come.
    """
    kept: list[pa.Table] = []
    rows, limit = 0, _WAITING_ROWS
    for piece in pieces:
        kept.append(piece)
        rows += piece.num_rows
        if rows > limit:
            kept = [newest(pa.concat_tables(kept), layout)]
            rows = kept[0].num_rows
            limit = max(_WAITING_ROWS, 2 * rows)
    return newest(pa.concat_tables(kept), layout)


def _newest_at(rows: pa.Table, layout: RowLayout) -> npt.NDArray[np.int64]:
    order, codes = _by_generation(rows, layout)
    first_of_key = np.ones(len(order), bool)
    first_of_key[1:] = codes[order][1:] != codes[order][:-1]
    return np.sort(order[first_of_key])


def _by_generation(
    rows: pa.Table, layout: RowLayout
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The places of the rows by key, newest first; and the number of each row's key."""
    codes = group_codes([rows.column(index) for index in layout.keys], rows.num_rows)
    generations = rows.column(layout.generation).to_numpy().astype(np.uint64)
    # Stable: of equal generations the first row stays first.
    return np.lexsort((~generations, codes)), codes


def newest_at_any_cutoff(rows: pa.Table, layout: RowLayout) -> pa.Table:
    """Of each storage key the rows that `newest` gives, now or after rows have expired one by one.

    A row goes if another of its key has a larger generation (of equals: comes before it) and is not
    older: whenever this one is kept, so is that one. What is left stays in replay order.
    """
    if not rows.num_rows:
        return rows
    order, codes = _by_generation(rows, layout)
    # A row without event time never expires, so it counts as the latest.
    times = rows.column(layout.timestamp).cast(pa.int64()).fill_null(_NEVER).to_numpy()
    ranks = np.unique(times, return_inverse=True)[1].astype(np.int64)[order]
    # Numbers of keys ascend, so the latest time so far begins anew with every key.
    of_key = codes[order] * len(ranks)
    latest = np.maximum.accumulate(of_key + ranks)
    kept = np.ones(len(order), bool)
    kept[1:] = of_key[1:] + ranks[1:] > latest[:-1]
    return rows.take(np.sort(order[kept]))


def accumulators(rows: pa.Table, layout: RowLayout) -> pa.Table:
    """What a restore keeps of table `a`: the newest row of each key, unless it is a tombstone.

    A key whose count has come down to 0 is kept: Arroyo goes on from it, and puts it out.
    """
    kept = newest(rows, layout)
    return kept.filter(pc.is_valid(kept.column(layout.timestamp)))


def tuples(
    rows: pa.Table, layout: RowLayout, keys: Sequence[pa.ChunkedArray] | None = None
) -> pa.Table:
    """What a restore keeps of table `b`: the newest row of each tuple, unless its count is 0.

    Args:
        keys: the key columns of what a restore keeps of table `a`: tuples of any other key are
            left out. None = of all keys.
    """
    kept = newest(rows, layout)
    if layout.count is not None:
        kept = kept.filter(pc.greater(kept.column(layout.count), 0))
    return kept if keys is None else _of_keys(kept, layout, keys)


def _of_keys(rows: pa.Table, layout: RowLayout, keys: Sequence[pa.ChunkedArray]) -> pa.Table:
    """The rows whose routing key is among `keys`; without key columns all of them."""
    if not layout.routing:
        return rows
    both = [
        pa.chunked_array([*known.chunks, *rows.column(index).cast(known.type).chunks], known.type)
        for known, index in zip(keys, layout.routing, strict=True)
    ]
    known_rows = len(keys[0])
    codes = group_codes(both, known_rows + rows.num_rows)
    return rows.filter(pa.array(np.isin(codes[known_rows:], codes[:known_rows])))


def restored(rows: pa.Table, layout: RowLayout, role: Role) -> pa.Table:
    """What a restore keeps of one table, whatever its role; table `b` by itself."""
    if role is Role.ACCUMULATORS:
        return accumulators(rows, layout)
    if role is Role.TUPLES:
        return tuples(rows, layout)
    return newest(rows, layout)


# ---- aggregates without GROUP BY -----------------------------------------------------------------


def first_of_batches(rows: pa.Table, batches: npt.NDArray[np.int64]) -> pa.Table:
    """The rows at which Arroyo looks when it restores an aggregate without GROUP BY.

    That is the first of each record batch, in both tables: the others are lost to it, though the
    files hold them. `restored` of these rows is what such a job goes on from.

    Args:
        batches: for each row the number of its record batch, ascending.
    """
    first = np.ones(len(batches), bool)
    first[1:] = batches[1:] != batches[:-1]
    return rows.filter(pa.array(first))
