"""The rows of one data file, with the columns of its table.

Files hold the columns of the time when they were written: under other names, in narrower types,
in another order, or not at all. A value that does not fit the table is an error, never rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.runtime.lakes.snapshot import (
    ColumnKey,
    LakeColumn,
    LakeFile,
    columns_schema,
)
from arroyo_dagster.state.storage.store import ObjectStore

BATCH_ROWS = 1 << 16
_FIELD_ID = b"PARQUET:field_id"


def read_rows(
    store: ObjectStore, file: LakeFile, columns: Sequence[LakeColumn], table: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, or of a part of it, in their order; one row group is in memory.

    Args:
        store: at `file.root`.
        columns: those to read.
        table: its name, for errors.

    Raises:
        NotFoundError: the file does not exist any more.
        FormatError: it is no Parquet file, lacks a column, or holds values that do not fit.
        StorageError: the store failed.
    """
    where: dict[str, Any] = {"table": table, "file": file.key}
    try:
        with store.open_input(file.path) as source:
            yield from _rows(pq.ParquetFile(source, **_PARQUET), file, columns, where)
    except NotFoundError as error:
        raise NotFoundError(
            "a data file of this version does not exist any more",
            **where,
            next_step="read a newer version if old files were removed (VACUUM, expired snapshots); "
            "workers on other machines do not see local disk",
        ) from error
    except (pa.ArrowException, NotImplementedError) as error:
        raise FormatError(f"a data file cannot be read ({error})", **where) from error


_PARQUET: Mapping[str, Any] = {"coerce_int96_timestamp_unit": "us", "pre_buffer": True}


def _rows(
    parquet: pq.ParquetFile,
    file: LakeFile,
    columns: Sequence[LakeColumn],
    where: Mapping[str, Any],
) -> Iterator[pa.RecordBatch]:
    stored = parquet.schema_arrow
    places = _places(stored, columns)
    lacking = [
        one.name
        for one, at in zip(columns, places, strict=True)
        if at is None and one.key not in file.constants and not one.nullable and one.default is None
    ]
    if lacking:
        raise FormatError(
            f"a data file lacks the columns {', '.join(lacking)}, which may not be null", **where
        )
    schema = columns_schema(columns)
    names = [stored.field(at).name for at in places if at is not None]
    for group in _groups(parquet.metadata, file):
        if not names:
            rows = parquet.metadata.row_group(group).num_rows
            yield pa.record_batch([_constant(one, file, rows) for one in columns], schema=schema)
            continue
        for batch in parquet.iter_batches(
            BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
        ):
            arrays = [
                _constant(one, file, batch.num_rows)
                if at is None
                else _column(batch, stored.field(at), one, where)
                for one, at in zip(columns, places, strict=True)
            ]
            yield pa.record_batch(arrays, schema=schema)


def _groups(metadata: pq.FileMetaData, file: LakeFile) -> Iterator[int]:
    """Yield the row groups that begin within the part of the file."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        first = group.column(0)
        begin = first.data_page_offset
        if first.has_dictionary_page:
            begin = min(begin, first.dictionary_page_offset)
        if file.begin <= begin < file.end and group.num_rows:
            yield number


def _column(
    batch: pa.RecordBatch, stored: pa.Field, column: LakeColumn, where: Mapping[str, Any]
) -> pa.Array:
    try:
        return _fitted(batch.column(batch.schema.get_field_index(stored.name)), stored, column)
    except (pa.ArrowException, NotImplementedError) as error:
        raise FormatError(
            f"column {column.name!r} is {stored.type} in a data file and does not fit "
            f"{column.kind}, the type of the table ({error})",
            **where,
            next_step="rewrite the file, or export the events to Parquet",
        ) from error


def _constant(column: LakeColumn, file: LakeFile, rows: int) -> pa.Array:
    """Return a column that the file does not hold."""
    value = file.constants.get(column.key, column.default)
    return pa.repeat(pa.scalar(value, column.kind), rows)


def _places(stored: Any, columns: Sequence[LakeColumn]) -> list[int | None]:
    """Return where the columns are among the stored fields; None: they are missing.

    Args:
        stored: a schema, or the type of a struct.
    """
    fields = [stored.field(at) for at in range(_length(stored))]
    ids = [_field_id(one) for one in fields]
    by_id = any(one is not None for one in ids)
    at: dict[ColumnKey, int] = {one.name: number for number, one in enumerate(fields)}
    at |= {one: number for number, one in enumerate(ids) if one is not None}
    found = []
    for one in columns:
        keys = one.names if isinstance(one.key, int) and not by_id else (one.key,)
        found.append(next((at[key] for key in keys if key in at), None))
    return found


def _length(stored: Any) -> int:
    return len(stored) if isinstance(stored, pa.Schema) else stored.num_fields


def _field_id(one: pa.Field) -> int | None:
    text = (one.metadata or {}).get(_FIELD_ID)
    return None if text is None else int(text)


# ---- values --------------------------------------------------------------------------------------


def _fitted(values: pa.Array, stored: pa.Field, column: LakeColumn) -> pa.Array:
    """Return stored values in the type of the table.

    Raises:
        pa.ArrowException, NotImplementedError: a value does not fit.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_struct(column.kind):
        return _struct(values, column)
    if pa.types.is_map(column.kind):
        return _map(values, column)
    if pa.types.is_list(column.kind):
        (element,) = column.children
        items = _fitted(values.flatten(), values.type.value_field, element)
        return pa.ListArray.from_arrays(
            _offsets(values), items, type=column.kind, mask=values.is_null()
        )
    if values.type == column.kind:
        return values
    return values.cast(column.kind, safe=True)


def _struct(values: pa.Array, column: LakeColumn) -> pa.Array:
    if not pa.types.is_struct(values.type):
        raise pa.ArrowTypeError(f"expected a struct, found {values.type}")
    fields = [
        pa.repeat(pa.scalar(one.default, one.kind), len(values))
        if at is None
        else _fitted(values.field(at), values.type.field(at), one)
        for one, at in zip(column.children, _places(values.type, column.children), strict=True)
    ]
    return pa.StructArray.from_arrays(fields, fields=list(column.kind), mask=values.is_null())


def _map(values: pa.Array, column: LakeColumn) -> pa.Array:
    if not pa.types.is_map(values.type):
        raise pa.ArrowTypeError(f"expected a map, found {values.type}")
    stored = pa.list_(pa.struct([values.type.key_field, values.type.item_field]))
    lists = values.cast(stored)
    entries = lists.flatten()
    key, value = column.children
    return pa.MapArray.from_arrays(
        _offsets(lists),
        _fitted(entries.field(0), values.type.key_field, key),
        _fitted(entries.field(1), values.type.item_field, value),
        type=column.kind,
        mask=values.is_null(),
    )


def _offsets(values: pa.Array) -> pa.Array:
    """Return where each list begins among the values of all."""
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int32())
    return pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
