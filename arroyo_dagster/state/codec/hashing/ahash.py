"""The hash function ahash 0.8.7 over many values at once, with Arroyo's seeds.

The build of Arroyo determines which of its three forms is used; all of them differ. This module has
the form without AES instructions, as in the official builds; the other two are in `ahash_aes`.

Source: ahash 0.8.7, `AHasher` of `fallback_hash.rs`; crates/arroyo-types/src/lib.rs, `HASH_SEEDS`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

U64Array: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = npt.NDArray[np.int64]

SEEDS = (0x0398DE1C8C83F7FD, 0xA7C36364ED09B486, 0xAF18AC566EFEA448, 0xC77B0AD1D14D0FE1)
"""HASH_SEEDS exclusive-or ahash's PI2, as `RandomState::with_seeds` stores them."""

_K0, _K1, _K2, _K3 = map(np.uint64, SEEDS)
_MULTIPLE = np.uint64(6364136223846793005)
_LOW_HALF = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_ANY = 2**62


class HashVariant(enum.Enum):
    """The form of ahash that a build of Arroyo contains.

    `FALLBACK`: the default targets of Linux and of macOS on Intel, so all official images.
    `AES`: Apple silicon, and other builds with AES instructions but without SSSE3.
    `AES_SSSE3`: builds for x86 processors with both, such as `-C target-cpu=native`.
    """

    FALLBACK = "fallback"
    AES = "aes"
    AES_SSSE3 = "aes-ssse3"

    @property
    def label(self) -> str:
        """The variant and the builds that have it, for display."""
        return _LABELS[self]


_LABELS = {
    HashVariant.FALLBACK: "ahash 0.8.7, fallback (official builds for Linux and for Intel Macs)",
    HashVariant.AES: "ahash 0.8.7, AES (builds for Apple silicon)",
    HashVariant.AES_SSSE3: "ahash 0.8.7, AES with SSSE3 (x86 builds for processors with both)",
}

_State = TypeVar("_State")


class Engine(Protocol[_State]):
    """A hash function over rows, with a state for each row."""

    def start(self, rows: int) -> _State:
        """Return the initial state."""

    def word(self, state: _State, words: U64Array | np.uint64) -> _State:
        """Feed an integer of at most 64 bits."""

    def wide(self, state: _State, low: U64Array, high: U64Array) -> _State:
        """Feed an integer of 128 bits."""

    def write(self, state: _State, runs: Runs) -> _State:
        """Feed a run of bytes, without its length."""

    def finish(self, state: _State) -> U64Array:
        """Return the hashes."""


# --- runs of bytes -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Runs:
    """A run of bytes for each row, anywhere in `raw`."""

    raw: npt.NDArray[np.uint8]
    starts: Rows
    lengths: Rows

    def of(self, rows: Rows) -> Runs:
        """Return the runs of some rows."""
        return Runs(self.raw, self.starts[rows], self.lengths[rows])

    def words_at(self, at: Rows, width: int) -> U64Array:
        """Read little-endian words of `width` bytes at any byte positions of `raw`."""
        # A word begins at every byte, so the words overlap: a view, not a copy.
        raw = self.raw
        words = np.ndarray((len(raw) - width + 1,), f"<u{width}", raw, strides=(1,))
        return words[at].astype(np.uint64)

    def edges(self) -> tuple[U64Array, U64Array]:
        """Return two words that cover a run of up to 16 bytes, or the last 16 of a longer one."""
        low = np.zeros(len(self.starts), dtype=np.uint64)
        high = np.zeros(len(self.starts), dtype=np.uint64)
        for shortest, longest, width in ((1, 1, 1), (2, 3, 2), (4, 8, 4), (9, _ANY, 8)):
            rows = self._between(shortest, longest)
            if rows is None:
                continue
            begins, ends = self.starts[rows], self.starts[rows] + self.lengths[rows]
            if width == 8:
                begins = np.where(self.lengths[rows] > 16, ends - 16, begins)
            tail = 1 if width == 2 else width
            low[rows] = self.words_at(begins, width)
            high[rows] = self.words_at(ends - tail, tail)
        return low, high

    def _between(self, shortest: int, longest: int) -> Rows | slice | None:
        mask = (self.lengths >= shortest) & (self.lengths <= longest)
        count = np.count_nonzero(mask)
        if count == len(mask):
            return slice(None)
        return np.flatnonzero(mask) if count else None


# --- the variant without AES ---------------------------------------------------------------------


class _Fallback:
    """The form with folded multiplications; the state of a row is one number."""

    def start(self, rows: int) -> U64Array:
        # A scalar, which numpy broadcasts to all rows without allocating a column.
        return _K0  # type: ignore[return-value]

    def word(self, state: U64Array, words: U64Array | np.uint64) -> U64Array:
        mixed: U64Array = np.bitwise_xor(words, state)
        return _folded_multiply(mixed, _MULTIPLE)

    def wide(self, state: U64Array, low: U64Array, high: U64Array) -> U64Array:
        mixed = _folded_multiply(low ^ _K2, high ^ _K3)
        mixed ^= state + _K1
        return (mixed << np.uint64(23)) | (mixed >> np.uint64(41))

    def write(self, state: U64Array, runs: Runs) -> U64Array:
        fed = self.wide((runs.lengths.astype(np.uint64) + state) * _MULTIPLE, *runs.edges())
        # Longer than 16: after the last 16 bytes, the blocks follow from the start.
        rows = np.flatnonzero(runs.lengths > 16)
        done = 0
        while len(rows):
            begins = runs.starts[rows] + done
            low, high = runs.words_at(begins, 8), runs.words_at(begins + 8, 8)
            fed[rows] = self.wide(fed[rows], low, high)
            done += 16
            rows = rows[runs.lengths[rows] - done > 16]
        return fed

    def finish(self, state: U64Array) -> U64Array:
        mixed = _folded_multiply(state, _K1)
        left = state & np.uint64(63)
        right = (np.uint64(64) - left) & np.uint64(63)
        turned: U64Array = np.bitwise_or(mixed << left, mixed >> right)
        return turned


FALLBACK = _Fallback()


def _folded_multiply(left: U64Array, right: U64Array | np.uint64) -> U64Array:
    """Return the exclusive-or of the two halves of the 128-bit product."""
    left_low, left_high = left & _LOW_HALF, left >> _HALF
    right_low, right_high = right & _LOW_HALF, right >> _HALF
    low_low = left_low * right_low
    low_high = left_low * right_high
    middle = left_high * right_low
    # At most 2^64 - 1: a product of two 32-bit numbers plus two 32-bit numbers does not overflow.
    middle += low_low >> _HALF
    middle += low_high & _LOW_HALF
    high = left_high * right_high
    high += low_high >> _HALF
    high += middle >> _HALF
    high ^= left * right
    return high
