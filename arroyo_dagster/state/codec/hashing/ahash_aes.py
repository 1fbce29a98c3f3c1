"""The two forms of ahash 0.8.7 that use AES rounds.

They differ in how they shuffle the second half of their state: with the SSSE3 instruction, or by
reversing its bytes.

Source: ahash 0.8.7, `AHasher` of `aes_hash.rs`; `operations.rs`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from arroyo_dagster.state.codec.hashing.ahash import SEEDS, Rows, Runs, U64Array

__all__ = ["AES", "AES_SSSE3"]

_Lanes: TypeAlias = npt.NDArray[np.uint64]
"""A 128-bit number for each row, as two words, the lower one first."""
_Tables: TypeAlias = tuple[npt.NDArray[np.uint32], ...]

_ENC, _SUM = np.array(SEEDS, dtype=np.uint64).reshape(2, 2)
_KEY = _ENC ^ _SUM
# For each byte of the new value, the index of the byte of the old value.
_TURNED = np.arange(15, -1, -1)
_SSSE3 = np.frombuffer(0x020A0700_0C01030E_050F0D08_06090B04.to_bytes(16, "little"), np.uint8)


class _State(NamedTuple):
    enc: _Lanes
    sum: _Lanes

    def of(self, rows: Rows) -> _State:
        return _State(self.enc[rows], self.sum[rows])

    def put(self, rows: Rows, other: _State) -> None:
        self.enc[rows], self.sum[rows] = other


class _Aes:
    """The form with AES: each value is fed to an AES round and added to a shuffled sum."""

    def __init__(self, shuffle: npt.NDArray[np.integer]) -> None:
        self._shuffle = shuffle

    def start(self, rows: int) -> _State:
        return _State(np.tile(_ENC, (rows, 1)), np.tile(_SUM, (rows, 1)))

    def word(self, state: _State, words: U64Array | np.uint64) -> _State:
        lanes = np.zeros_like(state.enc)
        lanes[:, 0] = words
        return self._feed(state, lanes)

    def wide(self, state: _State, low: U64Array, high: U64Array) -> _State:
        return self._feed(state, np.stack([low, high], axis=1))

    def finish(self, state: _State) -> U64Array:
        mixed = _encrypt(state.sum, state.enc)
        return np.ascontiguousarray(_decrypt(_decrypt(mixed, _KEY), mixed)[:, 0])

    def write(self, state: _State, runs: Runs) -> _State:
        enc = state.enc.copy()
        enc[:, 0] += runs.lengths.astype(np.uint64)
        whole = _State(enc, state.sum.copy())
        for shortest, longest, feed in (
            (0, 16, self._upto_16),
            (17, 32, self._upto_32),
            (33, 64, self._upto_64),
            (65, 2**62, self._longer),
        ):
            rows = np.flatnonzero((runs.lengths >= shortest) & (runs.lengths <= longest))
            if len(rows):
                whole.put(rows, feed(whole.of(rows), runs.of(rows)))
        return whole

    def _upto_16(self, state: _State, runs: Runs) -> _State:
        return self.wide(state, *runs.edges())

    def _upto_32(self, state: _State, runs: Runs) -> _State:
        state = self._feed(state, _lanes_at(runs, runs.starts))
        return self._feed(state, _lanes_at(runs, runs.starts + runs.lengths - 16))

    def _upto_64(self, state: _State, runs: Runs) -> _State:
        ends = runs.starts + runs.lengths
        for starts in (runs.starts, runs.starts + 16, ends - 32, ends - 16):
            state = self._feed(state, _lanes_at(runs, starts))
        return state

    def _longer(self, state: _State, runs: Runs) -> _State:
        """Feed blocks of 64 bytes to four AES lanes and two separate sums."""
        tails = _block(runs, runs.starts + runs.lengths - 64)
        key = np.tile(_KEY, (len(runs.starts), 1))
        # The tail alternates encryption and decryption rounds; the blocks use decryption only.
        lanes = [_encrypt(key, tails[0]), _decrypt(key, tails[1])]
        lanes += [_encrypt(key, tails[2]), _decrypt(key, tails[3])]
        sums = [self._add(key + tails[0], tails[2]), self._add(~key + tails[1], tails[3])]
        rows, done = np.arange(len(runs.starts)), 0
        while len(rows):
            blocks = _block(runs, runs.starts[rows] + done)
            for lane, block in zip(lanes, blocks, strict=True):
                lane[rows] = _decrypt(lane[rows], block)
            for place, block in enumerate(blocks):
                sums[place % 2][rows] = self._add(sums[place % 2][rows], block)
            done += 64
            rows = rows[runs.lengths[rows] - done > 64]
        for part in (*lanes, *sums):
            state = self._feed(state, part)
        return state

    def _feed(self, state: _State, lanes: _Lanes) -> _State:
        return _State(_decrypt(state.enc, lanes), self._add(state.sum, lanes))

    def _add(self, base: _Lanes, lanes: _Lanes) -> _Lanes:
        shuffled = _bytes(base)[:, self._shuffle]
        return np.ascontiguousarray(shuffled).view(np.uint64) + lanes


AES = _Aes(_TURNED)
AES_SSSE3 = _Aes(_SSSE3)


def _lanes_at(runs: Runs, at: Rows) -> _Lanes:
    return np.stack([runs.words_at(at, 8), runs.words_at(at + 8, 8)], axis=1)


def _block(runs: Runs, at: Rows) -> list[_Lanes]:
    return [_lanes_at(runs, at + place) for place in (0, 16, 32, 48)]


def _bytes(lanes: _Lanes) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(-1, 16)


# --- AES rounds ----------------------------------------------------------------------------------


def _encrypt(lanes: _Lanes, key: _Lanes) -> _Lanes:
    """Apply one round: substitute, shift rows, mix columns; then exclusive-or with the key."""
    return _round(lanes, key, _tables()[0], 5)


def _decrypt(lanes: _Lanes, key: _Lanes) -> _Lanes:
    """Apply one inverse round, then exclusive-or with the key."""
    return _round(lanes, key, _tables()[1], -3)


def _round(lanes: _Lanes, key: _Lanes, tables: _Tables, step: int) -> _Lanes:
    # Row r of column c comes from the column r columns ahead (or behind): `step` bytes per row.
    raw = _bytes(lanes)
    mixed = np.zeros((len(raw), 4), dtype=np.uint32)
    for column in range(4):
        for row, table in enumerate(tables):
            mixed[:, column] ^= table[raw[:, (4 * column + step * row) % 16]]
    return mixed.view(np.uint64) ^ key


@lru_cache(maxsize=1)
def _tables() -> tuple[_Tables, _Tables]:
    """Return what each byte adds to its column, by row: substitution and mixing in one lookup."""
    substituted = _substitution()
    back = np.empty_like(substituted)
    back[substituted] = np.arange(256)
    return _mixing(substituted, (2, 1, 1, 3)), _mixing(back, (14, 9, 13, 11))


def _mixing(substituted: npt.NDArray[np.int64], factors: tuple[int, ...]) -> _Tables:
    columns = [[_times(int(byte), factor) for factor in factors] for byte in substituted]
    first = np.array(columns, dtype=np.uint8)
    return tuple(
        np.ascontiguousarray(np.roll(first, row, axis=1)).view("<u4").ravel() for row in range(4)
    )


def _substitution() -> npt.NDArray[np.int64]:
    powers = list(accumulate(range(254), lambda power, _: _times(power, 3), initial=1))
    box = [0x63]
    for byte in range(1, 256):
        inverse = powers[-powers.index(byte) % 255]  # 3 generates all bytes but 0
        value = inverse
        for turn in range(1, 5):
            value ^= (inverse << turn | inverse >> (8 - turn)) & 0xFF
        box.append(value ^ 0x63)
    return np.array(box)


def _times(left: int, right: int) -> int:
    """Multiply in AES's field of 256 elements."""
    product = 0
    while right:
        if right & 1:
            product ^= left
        left = left << 1 ^ (0x11B if left & 0x80 else 0)
        right >>= 1
    return product
