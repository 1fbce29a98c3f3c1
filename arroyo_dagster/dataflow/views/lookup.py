"""Look rows of a frame up by key: by binary search first, by a dict once it is worth its cost.

A reader of a state with a million keys gets a new frame with every epoch of the owner, and may need
one key of it, or all. Few look-ups must not pay for an index of
all keys, and many must not each search.

Source: the project's design, section 9: look-ups at any number of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.values import Key, key_text

_SEARCHES_PER_KEY = 1 / 16
"""After this many searches per key of the frame, they have cost as much as a dict of all keys."""


class KeyLookup:
    """The rows of a frame by the text of their key.

    Args:
        frame: has the column `_key`; if keys are equal, the first row counts.
        is_sorted: whether the frame is in order of `_key`; None = unknown.
    """

    def __init__(self, frame: pl.DataFrame, *, is_sorted: bool | None = None) -> None:
        self._frame = frame
        self._keys = frame.get_column(KEY)
        self._is_sorted = is_sorted
        self._searches = 0
        self._places: dict[str, int] | None = None

    def find(self, key: Key) -> int | None:
        """Return the index of a key's row; None = there is none."""
        text = key_text(key)
        if self._places is None and self._is_searched():
            return self._search(text)
        if self._places is None:
            keys = self._keys.to_list()
            # From the end, so that the first of equal keys stays.
            self._places = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        return self._places.get(text)

    def _is_searched(self) -> bool:
        if self._is_sorted is None:
            self._is_sorted = self._keys.is_sorted()
        self._searches += 1
        return self._is_sorted and self._searches <= len(self._keys) * _SEARCHES_PER_KEY

    def _search(self, text: str) -> int | None:
        # `Series.search_sorted` takes 60 µs for one value, this loop 4 to 8.
        keys, low, high = self._keys, 0, len(self._keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] < text:
                low = middle + 1
            else:
                high = middle
        return low if low < len(keys) and keys[low] == text else None


class Pairs(Sequence[tuple[str, Any]]):
    """The pairs of key and value of a primitive state, in order of key. Immutable.

    Iteration and indexes yield `(key, value)`; `get` and `in` look one key up.

    Args:
        frame: `_key` and `value`, in order of `_key`.
    """

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame.select(KEY, "value")
        self._values = frame.get_column("value")
        self._lookup = KeyLookup(frame, is_sorted=True)

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the value of a key, or `default`. Takes the same time at any number of keys."""
        index = self._lookup.find(key)
        return default if index is None else self._values[index]

    def to_polars(self) -> pl.DataFrame:
        """Return the pairs as a Polars frame of `_key` and `value`."""
        return self._frame

    def to_arrow(self) -> pa.Table:
        """Return the pairs as an Arrow table of `_key` and `value`."""
        return self._frame.to_arrow()

    def __contains__(self, key: object) -> bool:
        if isinstance(key, tuple):
            return len(key) == 2 and key[0] in self and self.get(key[0]) == key[1]
        return isinstance(key, str | int) and self._lookup.find(key) is not None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._frame.iter_rows()

    def __len__(self) -> int:
        return self._frame.height

    @overload
    def __getitem__(self, at: int) -> tuple[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[tuple[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return self._frame[at].rows()
        return self._frame.row(range(len(self))[at])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pairs | list):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
