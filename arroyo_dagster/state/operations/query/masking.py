"""Masks private columns in Arrow rows, before a filter or SQL sees them.

Texts become `(private)`, private keys that are texts digests, other values null.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN
from arroyo_dagster.state.planning.privacy import PRIVATE, TableMask

_RAW = (pa.types.is_binary, pa.types.is_large_binary)


def mask_schema(schema: pa.Schema, mask: TableMask) -> pa.Schema:
    """Return the schema of masked rows: all columns may be null."""
    return pa.schema([field.with_nullable(True) for field in schema]) if mask else schema


def mask_rows(rows: pa.Table, mask: TableMask, keys: Collection[str]) -> pa.Table:
    """Mask the private columns and fields of rows.

    Args:
        keys: the columns of the key. A hash of a private key is masked, too: it has no salt.
    """
    private_key = any(mask.hides_leaf((name,)) for name in keys)
    columns = [
        _masked(column, mask, (field.name,), is_key=field.name in keys)
        if field.name != KEY_HASH_COLUMN or not private_key
        else pa.nulls(rows.num_rows, field.type)
        for field, column in zip(rows.schema, rows.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=mask_schema(rows.schema, mask))


def _masked(
    column: pa.ChunkedArray, mask: TableMask, path: tuple[str, ...], *, is_key: bool
) -> pa.ChunkedArray:
    kind = column.type
    if mask.hides(path):
        return _hidden(column, mask, is_key=is_key)
    if pa.types.is_struct(kind):
        chunks = [_struct(chunk, mask, path, is_key=is_key) for chunk in column.chunks]
        return pa.chunked_array(chunks, kind)
    if pa.types.is_nested(kind):
        leaves = _leaf_paths(kind, path)
        return _hidden(column, mask, is_key=False) if any(map(mask.hides_leaf, leaves)) else column
    unknown = any(is_raw(kind) for is_raw in _RAW)
    if mask.hides_leaf(path) or unknown:
        return _hidden(column, mask, is_key=is_key)
    return column


def _struct(
    chunk: pa.StructArray, mask: TableMask, path: tuple[str, ...], *, is_key: bool
) -> pa.StructArray:
    fields = [
        _masked(pa.chunked_array([part]), mask, (*path, field.name), is_key=is_key).combine_chunks()
        for field, part in zip(chunk.type, chunk.flatten(), strict=True)
    ]
    return pa.StructArray.from_arrays(fields, fields=list(chunk.type), mask=chunk.is_null())


def _leaf_paths(kind: pa.DataType, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the paths of the values within a type; elements of lists add nothing to them."""
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaf_paths(field.type, (*path, field.name))]
    if pa.types.is_map(kind):
        parts = (kind.key_type, kind.item_type)
        return [leaf for part in parts for leaf in _leaf_paths(part, path)]
    if pa.types.is_nested(kind):
        return _leaf_paths(kind.value_type, path)
    return [path]


def _hidden(column: pa.ChunkedArray, mask: TableMask, *, is_key: bool) -> pa.ChunkedArray:
    kind = column.type
    if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
        return pa.chunked_array([pa.nulls(len(column), kind)], kind)
    values = column.to_pylist()
    texts = [None if one is None else (mask.digest(one) if is_key else PRIVATE) for one in values]
    return pa.chunked_array([pa.array(texts, kind)], kind)
