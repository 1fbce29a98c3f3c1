"""Rows of a table converted to other columns: file by file, in pieces of each row group.

Order, record batches, routing keys and row generations stay, so that a restore finds the same rows
as before.

Source: docs/spec/state-surgery.md, `Rules`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError, ProtocolError
from arroyo_dagster.state.codec.digest import digest_rows
from arroyo_dagster.state.codec.parquet import RowsEncoder
from arroyo_dagster.state.codec.row_groups import DataFile
from arroyo_dagster.state.codec.schema import file_schema
from arroyo_dagster.state.model.compaction import RowsDigest
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY, KeyRange
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TimeFile
from arroyo_dagster.state.planning.surgery.columns import ColumnMap, Filled
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.data_files import SLICE_ROWS, open_data_file
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO
from arroyo_dagster.state.tables.time_files import ReadRequest, TimeFileReader

_EVERY_KEY = KeyRange(0, MAX_ROUTING_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowConversion:
    """How the rows of a table of the source become rows of a table of the job.

    Attributes:
        source, target: the table of the source, and that of the job.
        accumulators: of table `b` the new numbers by the old ones; rows of other numbers are
            dropped. None = numbers stay.
    """

    source: ExpiringTimeKeyConfig
    target: ExpiringTimeKeyConfig
    columns: ColumnMap
    accumulators: Mapping[int, int] | None = None

    def check_fills(self) -> str | None:
        """Return why a value does not fit its column; None if all do."""
        for field, source in zip(file_schema(self.target), self.columns.sources, strict=False):
            if not isinstance(source, Filled):
                continue
            try:
                value = pa.scalar(json.loads(source.value), field.type)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                return f"the value {source.value} does not fit column {field.name!r} ({error})"
            if not value.is_valid and not field.nullable:
                return f"column {field.name!r} may not be NULL"
        return None

    def rows(self, stored: pa.Table) -> pa.Table:
        """Return rows of the job's file schema from rows of the source's.

        Raises:
            InputError: a column of the job that may not be NULL is NULL in the source.
        """
        if self.accumulators is not None:
            stored = self._renumbered(stored)
        schema = file_schema(self.target)
        count = len(self.columns.sources)
        columns = [
            self._filled(source, field, stored.num_rows)
            if isinstance(source, Filled)
            else stored.column(source)
            for source, field in zip(self.columns.sources, schema, strict=False)
        ]
        # `_generation`, `_key_hash` and `_operation` follow the columns of both.
        rest = stored.columns[stored.num_columns - (len(schema) - count) :]
        for column, field in zip(columns, schema, strict=False):
            if column.null_count and not field.nullable:
                raise InputError(
                    f"column {field.name!r} may not be NULL, and the source has NULL in it",
                    table=self.target.table,
                    next_step="nothing was published; let the operator start empty with "
                    "--start-empty",
                )
        return pa.Table.from_arrays([*columns, *rest], schema=schema)

    def _filled(self, source: Filled, field: pa.Field, rows: int) -> pa.ChunkedArray:
        value = pa.scalar(json.loads(source.value), field.type)
        return pa.chunked_array([pa.repeat(value, rows)], field.type)

    def _renumbered(self, stored: pa.Table) -> pa.Table:
        assert self.accumulators is not None
        index = accumulator_index(self.source)
        numbers = stored.column(index)
        stored = stored.filter(pc.is_in(numbers, pa.array(list(self.accumulators), numbers.type)))
        moved = [self.accumulators[number] for number in stored.column(index).to_pylist()]
        return stored.set_column(index, stored.schema.field(index), pa.array(moved, numbers.type))


def accumulator_index(config: ExpiringTimeKeyConfig) -> int:
    """Return the column of table `b` that names the aggregate: its keys end with this column and
    the arguments.
    """
    keys = config.schema.key_indices or ()
    if len(keys) < 2:
        raise FormatError("a table of distinct arguments without their keys", table=config.table)
    return keys[-2]


def accumulator_numbers(
    store: ObjectStore, config: ExpiringTimeKeyConfig, files: tuple[TimeFile, ...]
) -> dict[int, set[tuple[int, bytes]]]:
    """Return the numbers of the aggregates in a table `b`, each with the sizes of its arguments and
    their first two bytes.

    Raises:
        FormatError, NotFoundError: a file is broken, or missing.
    """
    keys = config.schema.key_indices or ()
    columns = tuple(sorted((accumulator_index(config), keys[-1])))
    by_number: dict[int, set[tuple[int, bytes]]] = {}
    for part in stored_columns(store, config, files, columns):
        numbers = part.column(columns.index(keys[-2])).to_pylist()
        arguments = part.column(columns.index(keys[-1])).to_pylist()
        for number, argument in zip(numbers, arguments, strict=True):
            by_number.setdefault(number, set()).add((len(argument), argument[:2]))
    return by_number


def stored_columns(
    store: ObjectStore,
    config: ExpiringTimeKeyConfig,
    files: tuple[TimeFile, ...],
    columns: tuple[int, ...],
) -> Iterator[pa.Table]:
    """Yield some columns of every row of a table, as it is stored, in pieces.

    Args:
        columns: their indices, ascending.

    Raises:
        FormatError, NotFoundError: a file is broken, or missing.
    """
    request = ReadRequest(keys=_EVERY_KEY, columns=columns)
    for part in TimeFileReader(config, store).stream(files, request):
        yield part.rows


def convert_file(
    source: ObjectStore,
    held: ObjectStore,
    file: TimeFile,
    name: StatePath,
    conversion: RowConversion,
) -> TimeFile | None:
    """Convert a file of the source, and read it back; the new file is in memory, encoded.

    Args:
        name: of the new file, in the store `held`.

    Returns:
        The new file with its exact bounds; None if no row is left, and none was written.

    Raises:
        InputError: a column that may not be NULL is NULL in the source.
        FormatError: the file has other columns than its table.
        ProtocolError: the new file reads back different.
    """
    encoder = RowsEncoder(file_schema(conversion.target))
    written = _NewRows(conversion.target.schema.timestamp_index, [])
    with closing(open_data_file(source, file.path)) as data:
        for rows in _converted(data, file, conversion):
            encoder.write(rows)
            written.add(rows)
    if not written.groups:
        return None
    held.put(name, encoder.finish())
    with closing(open_data_file(held, name)) as data:
        _check_read_back(data, name, conversion.target, written.groups)
    return TimeFile(
        epoch=file.epoch,
        path=name,
        min_routing_key=written.min_routing_key,
        max_routing_key=written.max_routing_key,
        max_timestamp_micros=max(0, written.newest_nanos) // NANOS_PER_MICRO
        if not written.untimed
        # A row without event time hides older ones: its file must not expire before theirs.
        else file.max_timestamp_micros,
        compaction_generation=file.compaction_generation,
    )


@dataclass(slots=True)
class _NewRows:
    """What is known of the rows of a new file.

    Attributes:
        groups: the digest of each row group.
        untimed: the number of rows without event time.
    """

    timestamp_index: int
    groups: list[RowsDigest]
    min_routing_key: int = MAX_ROUTING_KEY
    max_routing_key: int = 0
    newest_nanos: int = 0
    untimed: int = 0

    def add(self, rows: pa.Table) -> None:
        """Take in the rows of one row group."""
        self.groups.append(_digest_in_order(rows))
        hashes = pc.min_max(rows.column(rows.num_columns - 2))
        self.min_routing_key = min(self.min_routing_key, hashes["min"].as_py())
        self.max_routing_key = max(self.max_routing_key, hashes["max"].as_py())
        times = rows.column(self.timestamp_index)
        self.newest_nanos = max(self.newest_nanos, pc.max(times).value or 0)
        self.untimed += times.null_count


def _digest_in_order(rows: pa.Table) -> RowsDigest:
    """Digest rows with their places: those of an aggregate without GROUP BY depend on them."""
    return digest_rows(rows.append_column("place", pa.array(np.arange(rows.num_rows))))


def _converted(data: DataFile, file: TimeFile, conversion: RowConversion) -> Iterator[pa.Table]:
    """Yield the new row groups: pieces of whole record batches, none of two row groups."""
    if not data.schema.equals(file_schema(conversion.source)):
        raise FormatError(
            "a file has other columns than its table",
            path=file.path,
            expected=file_schema(conversion.source).to_string(),
            found=data.schema.to_string(),
        )
    for group in range(len(data.row_groups)):
        for piece in data.slices(range(len(data.schema)), group, SLICE_ROWS):
            rows = conversion.rows(piece)
            if rows.num_rows:
                yield rows


def _check_read_back(
    data: DataFile, name: StatePath, target: ExpiringTimeKeyConfig, groups: list[RowsDigest]
) -> None:
    columns = range(len(data.schema))
    digests = (_digest_in_order(data.read(columns, [at])) for at in range(len(data.row_groups)))
    if not data.schema.equals(file_schema(target)) or list(digests) != groups:
        raise ProtocolError(
            "a converted file reads back different from what was written; nothing was published",
            path=name,
        )
