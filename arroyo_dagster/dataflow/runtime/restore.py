"""Keep the rows of a restored epoch as Arrow columns; make entries only for keys that occur.

A state may have millions of keys, and an epoch uses few of them. As Python values they would take
ten times the memory, and every restore would have to create them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import StateDef
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.state_tables import entry_values, updated_at_ms
from arroyo_dagster.state.tables.key_index import KeyIndex

RowIndexes = npt.NDArray[np.int64]
StateEntry = tuple[Any, ...]


class UnreadRows:
    """The restored rows of an unwindowed arrow-row state that no entry has replaced yet.

    Args:
        state: the definition of the state.
        rows: the rows of the state's table, possibly with older rows of the same keys.
        index: the index of the newest row per `_key`.
    """

    def __init__(self, state: StateDef, rows: pa.Table, index: KeyIndex) -> None:
        self._state = state
        self._rows = rows
        self._index = index
        self._left = np.ones(rows.num_rows, bool)
        self._any_left = rows.num_rows > 0
        self._updated_ms: RowIndexes | None = None
        if state.ttl_ms is not None:  # expired keys are counted: each once
            self._left[:] = False
            self._left[index.newest()] = True
            self._updated_ms = updated_at_ms(state, rows).to_numpy()

    def find(self, keys: pa.Array) -> tuple[RowIndexes, dict[str, StateEntry]]:
        """Return the sorted indexes of the rows of `keys` that are left, and these as entries."""
        places, rows = self.find_rows(keys)
        entries = zip(rows.column(KEY).to_pylist(), entry_values(self._state, rows), strict=True)
        return places, dict(entries)

    def find_rows(self, keys: pa.Array) -> tuple[RowIndexes, pa.Table]:
        """Return the sorted indexes of the rows of `keys` that are left, and these rows."""
        if not self._any_left:
            return np.zeros(0, np.int64), self._rows.slice(0, 0)
        places = self._index.find([keys])
        places = np.unique(places[places >= 0])
        places = places[self._left[places]]
        return places, self._rows.take(pa.array(places))

    def drop(self, places: RowIndexes) -> None:
        """Remove rows that are replaced by entries."""
        self._left[places] = False
        self._any_left = bool(self._left.any())

    def expire(self, now_ms: int) -> int:
        """Remove the rows with an expired TTL, and return their number."""
        ttl, updated = self._state.ttl_ms, self._updated_ms
        if ttl is None or updated is None:
            return 0
        expired = np.flatnonzero(self._left & (now_ms - updated >= ttl))
        self.drop(expired)
        return len(expired)
