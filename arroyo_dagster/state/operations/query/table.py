"""A table of a job at one epoch, read lazily: nothing but the metadata is read before it is asked.

```python
from arroyo_dagster import open_state

orders = open_state("s3://bucket/arroyo").job("shop/main").epoch().table("join_2", "left")
print(orders.schema)
rows = orders.to_arrow(columns=["order_id", "_timestamp"], where=[("customer", "=", 17)])
```
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.keys import range_for_server
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN
from arroyo_dagster.state.operations.query.global_scan import KEY, GlobalScan
from arroyo_dagster.state.operations.query.names import QueryName, not_found
from arroyo_dagster.state.operations.query.scans import ScanRequest
from arroyo_dagster.state.planning.privacy import PRIVATE, TableMask
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.comparisons import Comparison, bind, filter_rows

if TYPE_CHECKING:
    import polars as pl

    from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan

Where = Iterable[tuple[str, str, Any] | tuple[str, str] | Comparison]
"""Conditions that all must hold: `("column", "=", value)`; see `Relation`."""


@dataclass(frozen=True)
class EpochTable:
    """The rows of one table at one epoch.

    By default these are the rows that a restore at the epoch loads: the retention and removals are
    applied, and of generational tables each key has its newest row. `raw()` has every stored row.

    Attributes:
        name: the name in queries.
        epoch: the epoch that is read.
        scan: reads the rows; it can be sent to other processes.
    """

    name: QueryName
    paths: JobPaths
    epoch: Epoch
    scan: ExpiringScan | GlobalScan
    mask: TableMask = field(repr=False)

    @property
    def store(self) -> ObjectStore:
        """The store that is read."""
        return self.scan.store

    @property
    def schema(self) -> pa.Schema:
        """The columns; a repeated name has `_1`, `_2`… appended.

        Raises:
            NotFoundError, FormatError: reading entries, of a global keyed table whose types the job
                did not store.
        """
        with self._reading():
            return mask_schema(self.scan.schema, self.mask)

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns of the key by which `lookup` finds rows; empty = the table has no key."""
        if isinstance(self.scan, GlobalScan):
            return (KEY,)
        return tuple(self.schema.field(index).name for index in self.scan.key_columns)

    def raw(self) -> EpochTable:
        """Return every stored row, with `_operation`, `_file`, `_epoch` and more."""
        return replace(self, scan=replace(self.scan, raw=True))

    # ---- reading ---------------------------------------------------------------------------------

    def to_batches(
        self, columns: Sequence[str] | None = None, where: Where = (), limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows as Arrow batches, in no order; little more than a few files is in memory.

        Args:
            columns: the columns, in this order; None = all.
            where: conditions that all must hold. They also choose files and row groups.
            limit: stop after this many rows.

        Raises:
            NotFoundError: no such column; or the epoch was collected while it was read.
            FormatError: a file is broken.
            InputError: a condition is of the wrong form, or its value of the wrong type.
        """
        schema = self.schema
        names = schema.names if columns is None else list(columns)
        places = tuple(self._place(schema, name) for name in names)
        comparisons = [_comparison(condition) for condition in where]
        filters = [self._bound(schema, comparison) for comparison in comparisons]
        if self.mask:
            # Private values are replaced before a condition sees them.
            masked = self.read(ScanRequest(columns=tuple(range(len(schema)))))
            parts = (filter_rows(part, filters).select(places) for part in masked)
        else:
            parts = self.read(ScanRequest(columns=places, filters=tuple(filters)))
        yield from _limited(parts, limit)

    def read(self, request: ScanRequest) -> Generator[pa.Table, None, None]:
        """Yield the rows of a request, masked; a part of them that `splits` returned, or all."""
        with self._reading():
            for rows in self.scan.rows(request):
                yield mask_rows(rows, self.mask, self.key_columns) if self.mask else rows

    def to_arrow(
        self, columns: Sequence[str] | None = None, where: Where = (), limit: int | None = None
    ) -> pa.Table:
        """Return rows as an Arrow table; arguments and errors as `to_batches`."""
        schema = self.schema
        names = schema.names if columns is None else list(columns)
        fields = [schema.field(self._place(schema, name)) for name in names]
        batches = list(self.to_batches(names, where, limit))
        return pa.Table.from_batches(batches, pa.schema(fields))

    def to_polars(
        self, routing: Sequence[str] = (), parallelism: int | None = None
    ) -> pl.LazyFrame:
        """Return the rows as a lazy frame; projections, filters and limits reach the files.

        Maps are lists of structs of `key` and `value`.

        Args:
            routing: `_key_hash`, `_subtask` or both: columns that it has besides, if its rows are
                routed by key and no column is private.
            parallelism: of the subtasks; None = of the operator.
        """
        from arroyo_dagster.state.operations.query.polars_frames import lazy_frame

        return lazy_frame(self, routing, parallelism)

    def to_pandas(
        self, columns: Sequence[str] | None = None, where: Where = (), limit: int | None = None
    ) -> Any:
        """Return rows as a frame of pandas, which must be installed; else as `to_arrow`.

        Whole numbers beside nulls have nullable types of pandas, such as `UInt64`: a float has not
        all their digits. Lists, structs and maps with such numbers are Python's.
        """
        return pandas_frame(self.to_arrow(columns, where, limit))

    def to_spark(self, session: Any) -> Any:
        """Return the rows as a frame of Spark; see `arroyo_dagster.spark.query.frames`."""
        from importlib import import_module

        # By name, since this package does not import Spark.
        return import_module("arroyo_dagster.spark.query.frames").frame_of(session, self)

    def lookup(self, key: object) -> pa.Table:
        """Return the rows of one key. Only files and row groups that may hold it are read.

        Args:
            key: the value of the key column; of several key columns a tuple in their order, or a
                mapping by name. Of a global keyed table as its column `key` has it: a mapping for
                a struct.

        Raises:
            InputError: the table has no key, or the key is of another form.
            NotFoundError: the epoch was collected while it was read.
            FormatError: a file is broken.
        """
        names = self.key_columns
        if not names:
            raise InputError(
                "the rows of this table have no key",
                table=str(self.name),
                next_step="filter by columns instead",
            )
        if self.mask:
            raise InputError(
                "the table has private columns, so it cannot be looked up by key",
                table=str(self.name),
                next_step="look it up without private columns",
            )
        if isinstance(self.scan, GlobalScan) and not self.scan.raw:
            with self._reading():
                return self.scan.entry(key)
        return self.to_arrow(where=_key_conditions(names, key, str(self.name)))

    def splits(self, count: int) -> list[ScanRequest]:
        """Divide a complete scan into up to `count` parts that can be read on their own."""
        everything = ScanRequest(columns=tuple(range(len(self.scan.schema))))
        paths = list(dict.fromkeys(self.scan.paths))
        if count > 1 and self.scan.divisible_by_file and paths:
            parts = [frozenset(paths[start::count]) for start in range(min(count, len(paths)))]
            return [replace(everything, files=part) for part in parts]
        if count > 1 and self.scan.divisible_by_key:
            ranges = [range_for_server(index, count) for index in range(count)]
            return [replace(everything, keys=keys) for keys in ranges]
        return [everything]

    # ---- parts -----------------------------------------------------------------------------------

    def _place(self, schema: pa.Schema, name: str) -> int:
        if name not in schema.names:
            raise not_found("column", name, schema.names, table=str(self.name))
        return int(schema.get_field_index(name))

    def _bound(self, schema: pa.Schema, one: Comparison) -> Any:
        place = self._place(schema, one.column)
        bound = bind(one, schema, place)
        if bound is None:
            raise InputError(
                f"the column cannot be compared with this value: {one.values!r:.80}",
                table=str(self.name),
                column=one.column,
                expected=str(schema.field(place).type),
                next_step="give a value of the column's type; floats and nested columns cannot be "
                "compared here: filter the rows that were read",
            )
        return bound

    def _reading(self) -> _Reading:
        return _Reading(self)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Tells an epoch that was collected while it was read from a missing file."""

    table: EpochTable

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NotFoundError) and "column" not in error.facts:
            table = self.table
            raise missing_object(table.store, table.paths, table.epoch, error) from error


def missing_object(
    store: ObjectStore, paths: JobPaths, epoch: Epoch, error: NotFoundError
) -> Exception:
    """Return the error for an object of an epoch that is missing: the epoch was collected, or the
    state is damaged.
    """
    epochs = CheckpointTree(store, paths).epochs()
    newest = epochs[-1] if epochs else None
    if epoch not in epochs:
        newest_text = "the job has none any more" if newest is None else f"the newest is {newest}"
        return NotFoundError(
            f"epoch {epoch} was collected; {newest_text}",
            job=paths.root,
            epoch=epoch,
            next_step="read the newest epoch, or pin the epoch that you need with "
            "`arroyo-state pin`",
        )
    error.facts = {"job": paths.root, "epoch": epoch} | error.facts
    error.next_step = "check the epoch with `arroyo-state verify`"
    return error


def _comparison(one: Any) -> Comparison:
    if isinstance(one, Comparison):
        return one
    if not isinstance(one, tuple | list) or len(one) not in (2, 3) or not isinstance(one[0], str):
        raise InputError(f"not a condition: {one!r:.80}", expected='("column", "=", value)')
    return Comparison.of(*one)


def _key_conditions(names: Sequence[str], key: object, table: str) -> list[Comparison]:
    values: Sequence[object]
    if isinstance(key, Mapping) and set(key) == set(names):
        values = [key[name] for name in names]
    elif isinstance(key, tuple | list) and len(key) == len(names):
        values = key
    elif len(names) == 1:
        values = [key]
    else:
        raise InputError(
            f"the key has {len(names)} columns",
            table=table,
            columns=", ".join(names),
            next_step="give a tuple of their values, or a mapping by name",
        )
    return [
        Comparison.of(name, "is null") if value is None else Comparison.of(name, "=", value)
        for name, value in zip(names, values, strict=True)
    ]


def _limited(parts: Iterable[pa.Table], limit: int | None) -> Iterator[pa.RecordBatch]:
    remaining = limit
    for rows in parts:
        kept = rows if remaining is None else rows.slice(0, remaining)
        yield from kept.to_batches()
        if remaining is not None:
            remaining -= kept.num_rows
            if remaining <= 0:
                return


# ---- masks private columns in Arrow rows, before a filter or SQL sees them -----------------------
# Texts become `(private)`, private keys that are texts digests, other values null.

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


# ---- Arrow rows as a frame of pandas, without loss of digits -------------------------------------


def pandas_frame(rows: pa.Table) -> Any:
    """Convert rows; whole numbers beside nulls become nullable types instead of floats.

    Numbers inside lists, structs and maps, beside nulls of their own, become Python's.
    """
    pd = import_module("pandas")
    nullable = {
        pa.int8(): pd.Int8Dtype(),
        pa.int16(): pd.Int16Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(),
        pa.uint8(): pd.UInt8Dtype(),
        pa.uint16(): pd.UInt16Dtype(),
        pa.uint32(): pd.UInt32Dtype(),
        pa.uint64(): pd.UInt64Dtype(),
    }
    frame = rows.to_pandas()
    for place, column in enumerate(rows.columns):
        if column.type in nullable and column.null_count:
            frame.isetitem(place, column.to_pandas(types_mapper=nullable.get))
        elif pa.types.is_nested(column.type) and _has_whole_numbers(column.type):
            frame.isetitem(place, pd.Series(column.to_pylist(), dtype=object))
    return frame


def _has_whole_numbers(kind: pa.DataType) -> bool:
    if pa.types.is_integer(kind):
        return True
    return any(_has_whole_numbers(kind.field(place).type) for place in range(kind.num_fields))
