"""The hashes that Arroyo uses to route rows and keys.

`key_hashes` computes the column `_key_hash` from Arrow arrays; `matching_variants` finds which
build of Arroyo computed a stored column; `hash_key` is the state crate's hash of a single key.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.hashing.ahash import HashVariant, U64Array
from arroyo_dagster.state.codec.hashing.columns import ENGINES, Column, row_hashes
from arroyo_dagster.state.codec.hashing.siphash import hash_key, hash_keys
from arroyo_dagster.state.model.keys import key_range_size

__all__ = [
    "HashVariant",
    "hash_key",
    "hash_keys",
    "key_hashes",
    "matching_variants",
    "subtasks_for_hashes",
]


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
