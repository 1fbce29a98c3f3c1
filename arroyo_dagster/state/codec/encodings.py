"""How the columns of a data file are encoded and compressed, chosen by their values.

The encodings written are PLAIN, RLE (levels), RLE_DICTIONARY and DELTA_BINARY_PACKED, the codecs
none and ZSTD. Every release of parquet-rs that any Arroyo was built with reads all of them.

Source: docs/decisions/encodings-and-proof.md.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.state.codec.digest import list_elements

DICTIONARY_BYTES = 1 << 20
"""The largest estimated size of a dictionary that is written."""
_DICTIONARY_LIMIT_BYTES = 1 << 23
"""The size at which a writer falls back to plain values. It is never reached, even if an estimate
is eight times too low."""
_MIN_ROWS = 1 << 12
"""Files of fewer rows keep the defaults: a dictionary per column, ZSTD."""
_RUNS = 8
_RUN_ROWS = 1 << 8
"""A sample is so many runs of so many neighbouring values."""
_REPEATING = 0.5
"""A dictionary does not pay if a larger share of the values is distinct."""
_COMPRESSIBLE = 0.9
"""ZSTD does not pay if a larger share of the bytes remains."""
_SLOW_STEP = 1 << 44
"""The limit of differences for delta encoding: almost five hours of ns timestamps."""
_BATCH_ROWS = 1 << 14
_BATCH_BYTES = 1 << 22
_DELTA = "DELTA_BINARY_PACKED"


@dataclass(frozen=True, slots=True)
class LeafEncoding:
    """How a Parquet column is written.

    Attributes:
        dictionary: whether with a dictionary.
        delta: whether as differences, without a dictionary.
        compressed: whether with ZSTD.
    """

    dictionary: bool = False
    delta: bool = False
    compressed: bool = True


_DICTIONARY = LeafEncoding(dictionary=True)
_PLAIN = LeafEncoding()


def writer_options(rows: pa.Table, *, dictionaries: bool = True) -> dict[str, Any]:
    """Return the arguments of a Parquet writer for columns with such values.

    Args:
        rows: the first row group. Columns of text may be dictionaries, each with one dictionary in
            all chunks.
        dictionaries: whether a column of a few rows, whose values are not looked at, gets one.
    """
    if rows.num_rows < _MIN_ROWS and rows.nbytes < DICTIONARY_BYTES:
        return {"compression": "zstd", "compression_level": 1, "use_dictionary": dictionaries}
    paths = leaf_paths(rows.schema)
    leaves = [leaf for column in rows.columns for leaf in _leaves(column)]
    by_path = _by_path(paths, [_encoding(leaf) for leaf in leaves])
    return {
        "compression": {
            path: "zstd" if leaf.compressed else "none" for path, leaf in by_path.items()
        },
        "compression_level": None,  # the default of ZSTD is 1; the codec "none" accepts no level
        "use_dictionary": [path for path, leaf in by_path.items() if leaf.dictionary] or False,
        "column_encoding": {path: _DELTA for path, leaf in by_path.items() if leaf.delta} or None,
        "dictionary_pagesize_limit": _DICTIONARY_LIMIT_BYTES,
        "write_batch_size": _batch_rows(rows),
    }


def _batch_rows(rows: pa.Table) -> int | None:
    """Return how many values are written at a time; the size of a page is checked in between. The
    statistics of a dictionary are collected once per batch.
    """
    small = rows.nbytes * _BATCH_ROWS <= _BATCH_BYTES * rows.num_rows
    return _BATCH_ROWS if small else None


def with_dictionaries(schema: pa.Schema, columns: Collection[int]) -> pa.Schema:
    """Return a schema with some columns, by index, as dictionaries of their type."""
    for index in columns:
        field = schema.field(index)
        if not pa.types.is_dictionary(field.type):
            schema = schema.set(index, field.with_type(pa.dictionary(pa.int32(), field.type)))
    return schema


@functools.lru_cache(maxsize=256)
def leaf_paths(schema: pa.Schema) -> tuple[str, ...]:
    """Return the paths of the Parquet columns, in order, as a writer's options name them."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, use_compliant_nested_type=False):
        pass
    parquet = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return tuple(parquet.column(leaf).path for leaf in range(len(parquet)))


def _by_path(paths: Sequence[str], chosen: Sequence[LeafEncoding]) -> dict[str, LeafEncoding]:
    """Return one encoding per path. A writer names columns by path, and paths may repeat: columns
    with the same path that need different encodings are written as plain values.
    """
    if len(paths) != len(chosen):  # a type that is stored in other Parquet columns than expected
        return dict.fromkeys(paths, _PLAIN)
    by_path: dict[str, LeafEncoding] = {}
    for path, leaf in zip(paths, chosen, strict=True):
        by_path[path] = leaf if by_path.get(path, leaf) == leaf else _PLAIN
    return by_path


def _leaves(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """Yield the values of each Parquet column that stores `column`."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in column.chunks]
        yield from _leaves(pa.chunked_array(chunks, kind.storage_type))
    elif pa.types.is_nested(kind):
        # The encoding depends on all elements together; those of a sample are enough.
        for values in _children(_sample(column)):
            yield from _leaves(pa.chunked_array([values]))
    else:
        yield column


def _children(array: pa.Array) -> Sequence[pa.Array]:
    kind = array.type
    if pa.types.is_struct(kind):
        return tuple(array.field(index) for index in range(kind.num_fields))
    _, values = list_elements(array)
    return _children(values) if pa.types.is_map(kind) else (values,)


def _encoding(leaf: pa.ChunkedArray) -> LeafEncoding:
    kind = leaf.type
    if pa.types.is_dictionary(kind):
        return _DICTIONARY if _pays(len(_dictionary(leaf)), leaf) else _PLAIN
    sample = _sample(leaf)
    without_dictionary = pa.types.is_boolean(kind) or pa.types.is_null(kind)
    if not without_dictionary and _pays(_distinct(leaf, sample), leaf):
        return _DICTIONARY
    if (steps := _small_steps(sample)) is not None:
        # Packed differences hardly compress, unless few different ones repeat.
        return LeafEncoding(delta=True, compressed=len(steps.unique()) < _REPEATING * len(steps))
    return LeafEncoding(compressed=_compressible(sample))


def _dictionary(leaf: pa.ChunkedArray) -> pa.Array:
    empty = pa.array([], leaf.type.value_type)
    return leaf.chunk(0).dictionary if leaf.num_chunks else empty


def _pays(distinct: float, leaf: pa.ChunkedArray) -> bool:
    """Whether a dictionary of so many values is small, and saves bytes."""
    if pa.types.is_dictionary(leaf.type):
        values = _dictionary(leaf)
        width = 4 + values.nbytes / max(1, len(values))
    else:
        # The bytes of a plain value.
        width = float(leaf.nbytes / max(1, len(leaf) - leaf.null_count))
    return distinct <= _REPEATING * len(leaf) and distinct * width <= DICTIONARY_BYTES


# ---- samples -------------------------------------------------------------------------------------


def _sample(leaf: pa.ChunkedArray) -> pa.Array:
    """Return `_RUNS` runs of neighbouring values, at equal distances; or all, if they are few."""
    if len(leaf) <= _RUNS * _RUN_ROWS:
        return _joined(leaf.chunks, leaf.type)
    starts = np.linspace(0, len(leaf) - _RUN_ROWS, _RUNS).astype(int)
    runs = [leaf.slice(start, _RUN_ROWS) for start in starts]
    return _joined([chunk for run in runs for chunk in run.chunks], leaf.type)


def _joined(chunks: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays(chunks) if chunks else pa.array([], kind)


def _distinct(leaf: pa.ChunkedArray, sample: pa.Array) -> float:
    """Estimate the number of distinct values from those that occur in one run or two (Chao2)."""
    if pa.types.is_float16(sample.type):
        sample = sample.view(pa.int16())  # pyarrow before 26 counts no halves
    encoded = sample.dictionary_encode()
    seen = len(encoded.dictionary)
    if len(sample) == len(leaf):
        return seen
    codes = encoded.indices.fill_null(seen).to_numpy()
    occurs = np.zeros((_RUNS, seen + 1), np.bool_)
    occurs[np.repeat(np.arange(_RUNS), _RUN_ROWS), codes] = True
    _, once, twice, *_ = np.bincount(occurs[:, :seen].sum(axis=0), minlength=3)
    by_runs = seen + once * (once - 1) / (2 * (twice + 1))
    # No more than if all rows were like the sample, or than there are changes from row to row.
    by_rows = seen * len(leaf) / len(sample)
    by_changes = _RUNS + np.count_nonzero(np.diff(codes)) * len(leaf) / len(sample)
    return float(min(by_runs, by_rows, by_changes))


def _small_steps(sample: pa.Array) -> pa.Array | None:
    """Return the differences of neighbours; None if they are no 64-bit numbers, or if a difference
    within a run is large.
    """
    kind = sample.type
    if not (pa.types.is_integer(kind) or pa.types.is_temporal(kind)) or kind.bit_width != 64:
        return None
    steps = np.diff(sample.drop_null().view(pa.int64()).to_numpy())
    if len(steps) <= _RUNS:
        return None
    largest = np.partition(np.abs(steps), -_RUNS)[-_RUNS]  # without the steps from run to run
    return pa.array(steps) if largest < _SLOW_STEP else None


def _compressible(sample: pa.Array) -> bool:
    buffers = [buffer for buffer in sample.buffers()[1:] if buffer is not None]
    codec = pa.Codec("zstd", 1)
    left = sum(len(codec.compress(buffer)) for buffer in buffers)
    return bool(left < _COMPRESSIBLE * sum(buffer.size for buffer in buffers))
