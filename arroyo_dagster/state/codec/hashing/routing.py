"""The hashes that Arroyo uses to route rows and keys.

`key_hashes` computes the column `_key_hash` from Arrow arrays; `matching_variants` finds which
build of Arroyo computed a stored column; `hash_key` is the state crate's hash of a single key.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.shapes import pick_variant, struct_values
from arroyo_dagster.state.codec.hashing.ahash import HashVariant, U64Array
from arroyo_dagster.state.codec.hashing.columns import ENGINES, Column, row_hashes
from arroyo_dagster.state.model.keys import key_range_size
from arroyo_dagster.state.model.types import (
    ArrayOf,
    EnumOf,
    ListOf,
    OptionOf,
    Primitive,
    StructOf,
    TupleOf,
    Type,
    describe,
)


def key_hashes(
    columns: Sequence[Column],
    rows: int | None = None,
    *,
    variant: HashVariant = HashVariant.FALLBACK,
) -> pa.Array:
    """Compute the routing key of every row, as Arroyo does.

    Args:
        columns: the routing-key columns in index order, all of the same length.
        rows: the number of rows; required without columns, where every hash is 0.
        variant: the build of Arroyo; by default the official ones.

    Returns:
        `_key_hash`, one uint64 per row, never null.

    Raises:
        InputError: columns of different lengths, or of a type Arroyo cannot hash.

    Source: crates/arroyo-types/src/lib.rs, `HASH_SEEDS`; DataFusion, `create_hashes`; ahash 0.8.7.

    Differs: intervals of months, and of days and milliseconds, are not supported: pyarrow has no
        arrays of them.
    """
    count = _checked_rows(columns, rows)
    return pa.array(row_hashes(columns, count, ENGINES[variant]), type=pa.uint64())


def _checked_rows(columns: Sequence[Column], rows: int | None) -> int:
    for place, column in enumerate(columns):
        if not isinstance(column, pa.Array | pa.ChunkedArray):
            raise InputError(
                "a column of a key must be an Arrow array",
                column=place,
                found=column.__class__.__name__,
            )
    if rows is None:
        if not columns:
            raise InputError("without columns the number of rows must be given")
        rows = len(columns[0])
    for place, column in enumerate(columns):
        if len(column) != rows:
            raise InputError(
                "the columns of a key have different lengths",
                column=place,
                rows=len(column),
                expected=rows,
            )
    return rows


def matching_variants(
    columns: Sequence[Column],
    stored: Column,
    among: Collection[HashVariant] = tuple(HashVariant),
) -> tuple[HashVariant, ...]:
    """Return which builds of Arroyo would compute the stored routing keys of some rows.

    Args:
        columns: the routing-key columns in index order.
        stored: the column `_key_hash` of the same rows.
        among: the variants to try.

    Returns:
        Normally one variant. Empty: the rows were hashed otherwise, or changed since. Several: the
        rows do not decide, because there are none or all their keys are null or empty.

    Raises:
        InputError: as in `key_hashes`; or `stored` is not uint64.
    """
    expected = _u64_values(stored)
    if not columns and expected.any():
        return ()
    return tuple(
        variant
        for variant in HashVariant
        if variant in among
        and np.array_equal(
            row_hashes(columns, _checked_rows(columns, len(expected)), ENGINES[variant]), expected
        )
    )


def subtasks_for_hashes(
    hashes: pa.Array | pa.ChunkedArray | npt.NDArray[np.uint64], parallelism: int
) -> npt.NDArray[np.int32]:
    """Return the subtask that owns each routing key.

    Args:
        hashes: uint64, without nulls.
        parallelism: the number of subtasks.

    Returns:
        Numbers from 0 to `parallelism - 1`, one per hash.

    Raises:
        InputError: the hashes are not uint64 or have nulls; `parallelism` is out of its range.

    Source: crates/arroyo-rpc/src/df.rs, `server_for_hash_array`.
    """
    size = key_range_size(parallelism)
    values = hashes if isinstance(hashes, np.ndarray) else _u64_values(hashes)
    if values.dtype != np.uint64:
        raise InputError("routing keys must be uint64", found=str(values.dtype))
    if parallelism == 1:
        return np.zeros(len(values), dtype=np.int32)
    return (values // np.uint64(size)).astype(np.int32)


def _u64_values(hashes: Column) -> U64Array:
    if not isinstance(hashes, pa.Array | pa.ChunkedArray):
        raise InputError("routing keys must be an Arrow or numpy array of uint64")
    if hashes.type != pa.uint64() or hashes.null_count:
        raise InputError(
            "routing keys must be uint64 without nulls",
            found=str(hashes.type),
            nulls=hashes.null_count,
        )
    # `to_numpy` would load pandas, which takes ten times as long as everything else here.
    chunks = hashes.chunks if isinstance(hashes, pa.ChunkedArray) else [hashes]
    views = [_u64_view(chunk) for chunk in chunks]
    return views[0] if len(views) == 1 else np.concatenate([np.empty(0, np.uint64), *views])


def _u64_view(hashes: pa.Array) -> U64Array:
    values = hashes.buffers()[1]
    if not len(hashes) or values is None:
        return np.empty(0, np.uint64)
    return np.frombuffer(values, np.uint64, len(hashes), hashes.offset * 8)


# ---- the hash of keys in Rust's standard library: SipHash-1-3 with keys 0 and 0 ------------------
# Source: crates/arroyo-state/src/lib.rs, `hash_key`; Rust's std, `DefaultHasher`. Arroyo also
# assigns Kinesis shards and source files by it.

_MASK64 = 2**64 - 1
_START = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)

_WIDTHS = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "u128": 16,
    "usize": 8,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "i128": 16,
    "isize": 8,
}


def hash_key(value: object, type: Any = None) -> int:  # noqa: A002 - the word users know
    """Hash one key as the state crate does: SipHash-1-3 with keys 0 and 0.

    Args:
        value: the key.
        type: the Rust type of the key, as a Python type or a description; without it an int has 64
            bits, and the items of a list or tuple are hashed by their own Python types.

    Raises:
        InputError: the value does not fit the type, or Rust cannot hash the type: floats, sets and
            maps; times are not supported because Rust does not guarantee their layout.

    Source: crates/arroyo-state/src/lib.rs, `hash_key`; Rust's std, `DefaultHasher`.
    """
    # Hash one row with Python ints, which are faster than numpy for a single row.
    fed = _fed(value, None if type is None else describe(type))
    whole = len(fed) & ~7
    last = int.from_bytes(fed[whole:], "little") | (len(fed) & 0xFF) << 56
    state = _START
    for (word,) in (*struct.iter_unpack("<Q", fed[:whole]), (last,)):
        v0, v1, v2, v3 = _round_of_one(*state[:3], state[3] ^ word)
        state = (v0 ^ word, v1, v2, v3)
    v0, v1, v2, v3 = state
    state = (v0, v1, v2 ^ 0xFF, v3)
    for _ in range(3):
        state = _round_of_one(*state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def hash_keys(
    values: Iterable[object],
    type: Any = None,  # noqa: A002
) -> npt.NDArray[np.uint64]:
    """Hash many keys at once, each as in `hash_key`.

    Raises:
        InputError: as in `hash_key`.
    """
    described = None if type is None else describe(type)
    # Hash rows of bytes, in groups of similar size, within which shorter rows are padded.
    fed = [_fed(value, described) for value in values]
    words = np.array([len(row) // 8 + 1 for row in fed], dtype=np.int64)
    order = np.argsort(-words, kind="stable")
    sizes = np.frexp(words[order].astype(np.float64))[1]
    hashes = np.empty(len(fed), dtype=np.uint64)
    for rows in np.split(order, np.flatnonzero(np.diff(sizes)) + 1):
        hashes[rows] = _hash_rows([fed[row] for row in rows], words[rows])
    return hashes


def _fed(value: object, described: Type | None) -> bytes:
    fed = bytearray()
    if described is None and is_dataclass(value):
        described = describe(value.__class__)
    if described is None:
        _feed_untyped(value, fed)
    else:
        _feed_typed(value, described, fed)
    return bytes(fed)


def _feed_untyped(value: object, fed: bytearray) -> None:
    if isinstance(value, bool):
        fed.append(value)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise InputError("an int without a type is hashed as 64 bits", value=value)
        fed += (value & _MASK64).to_bytes(8, "little")
    elif isinstance(value, str):
        fed += _utf8(value) + b"\xff"
    elif isinstance(value, bytes | bytearray | memoryview):
        fed += _counted_bytes(value)
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            fed += struct.pack("<Q", len(value))
        for item in value:
            _feed_untyped(item, fed)
    else:
        raise InputError(
            f"a {value.__class__.__name__} cannot be hashed without its type",
            next_step="hash_key(value, type), for example hash_key(None, int | None)",
        )


def _feed_typed(value: Any, kind: Type, fed: bytearray) -> None:
    match kind:
        case Primitive():
            fed += _primitive_bytes(value, kind.name)
        case OptionOf(item=item):
            fed += struct.pack("<Q", value is not None)
            if value is not None:
                _feed_typed(value, item, fed)
        case ListOf() | ArrayOf():
            _feed_items(value, kind, fed)
        case TupleOf(items=items):
            _expect(isinstance(value, list | tuple), value, "a tuple")
            _expect(len(value) == len(items), value, f"{len(items)} items")
            for part, item in zip(value, items, strict=True):
                _feed_typed(part, item, fed)
        case StructOf(fields=fields):
            for part, field in zip(struct_values(value, kind), fields, strict=True):
                _feed_typed(part, field.type, fed)
        case EnumOf(variants=variants):
            index, payload = pick_variant(value, kind)
            fed += struct.pack("<Q", index)
            _feed_typed(payload, variants[index].payload, fed)
        case _:
            raise InputError(f"a value of the type {kind} cannot be hashed")


def _feed_items(value: Any, kind: ListOf | ArrayOf, fed: bytearray) -> None:
    _expect(isinstance(value, list | tuple), value, "a list")
    if isinstance(kind, ArrayOf):
        _expect(len(value) == kind.length, value, f"{kind.length} items")
    fed += struct.pack("<Q", len(value))
    for part in value:
        _feed_typed(part, kind.item, fed)


def _primitive_bytes(value: Any, name: str) -> bytes:
    if name in _WIDTHS:
        width, signed = _WIDTHS[name], name.startswith("i")
        _expect(isinstance(value, int) and not isinstance(value, bool), value, f"an int for {name}")
        bits = width * 8 - signed
        _expect(-(2**bits) * signed <= value < 2**bits, value, f"a number that fits {name}")
        return int(value).to_bytes(width, "little", signed=signed)
    if name == "bool":
        _expect(isinstance(value, bool), value, "a bool")
        return bytes([value])
    if name == "char":
        _expect(isinstance(value, str) and len(value) == 1, value, "one character")
        return struct.pack("<I", ord(value))
    if name == "string":
        _expect(isinstance(value, str), value, "a str")
        return _utf8(value) + b"\xff"
    if name == "bytes":
        _expect(isinstance(value, bytes | bytearray | memoryview), value, "bytes")
        return _counted_bytes(value)
    if name == "unit":
        _expect(value is None, value, "None")
        return b""
    raise InputError(f"Rust cannot hash the type {name}", type=name)


def _counted_bytes(value: bytes | bytearray | memoryview) -> bytes:
    data = bytes(value)
    return struct.pack("<Q", len(data)) + data


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError("the text is not Unicode: it holds half a surrogate pair") from error


def _expect(right: bool, value: object, expected: str) -> None:
    if not right:
        raise InputError(f"cannot hash {value!r:.200}: expected {expected}")


# --- SipHash-1-3 ---------------------------------------------------------------------------------


def _round_of_one(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = (v0 + v1) & _MASK64
    v1 = ((v1 << 13 | v1 >> 51) & _MASK64) ^ v0
    v0 = (v0 << 32 | v0 >> 32) & _MASK64
    v2 = (v2 + v3) & _MASK64
    v3 = ((v3 << 16 | v3 >> 48) & _MASK64) ^ v2
    v0 = (v0 + v3) & _MASK64
    v3 = ((v3 << 21 | v3 >> 43) & _MASK64) ^ v0
    v2 = (v2 + v1) & _MASK64
    v1 = ((v1 << 17 | v1 >> 47) & _MASK64) ^ v2
    v2 = (v2 << 32 | v2 >> 32) & _MASK64
    return v0, v1, v2, v3


def _hash_rows(fed: list[bytes], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Hash rows, which are ordered by their number of words, descending."""
    state = [np.full(len(fed), start, dtype=np.uint64) for start in _START]
    words = _words(fed, counts)
    for place in range(words.shape[1]):
        # The rows that still have a word are always the first ones.
        rows = slice(0, int(np.count_nonzero(counts > place)))
        begun = [lane[rows] for lane in state]
        begun[3] ^= words[rows, place]
        _sip_round(begun)
        begun[0] ^= words[rows, place]
    state[2] ^= np.uint64(0xFF)
    for _ in range(3):
        _sip_round(state)
    hashes: npt.NDArray[np.uint64] = state[0] ^ state[1] ^ state[2] ^ state[3]
    return hashes


def _words(fed: list[bytes], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the words of each row; the last one ends with the row's size modulo 256."""
    width = int(counts.max(initial=1))
    padded = b"".join(row.ljust(width * 8, b"\0") for row in fed)
    words = np.frombuffer(padded, dtype="<u8").reshape(len(fed), width).copy()
    sizes = np.array([len(row) & 0xFF for row in fed], dtype=np.uint64)
    words[np.arange(len(fed)), counts - 1] |= sizes << np.uint64(56)
    return words


def _sip_round(state: list[npt.NDArray[np.uint64]]) -> None:
    v0, v1, v2, v3 = state
    _mix(v0, v1, 13)
    _mix(v2, v3, 16)
    v0[:] = _turned(v0, 32)
    _mix(v0, v3, 21)
    _mix(v2, v1, 17)
    v2[:] = _turned(v2, 32)


def _mix(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64], turn: int) -> None:
    left += right
    right[:] = _turned(right, turn) ^ left


def _turned(word: npt.NDArray[np.uint64], by: int) -> npt.NDArray[np.uint64]:
    turned: npt.NDArray[np.uint64] = (word << np.uint64(by)) | (word >> np.uint64(64 - by))
    return turned
