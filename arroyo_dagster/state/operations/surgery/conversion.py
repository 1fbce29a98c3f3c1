"""Rows of a table converted to other columns: file by file, each row group for itself.

Order, routing keys and row generations stay, so that a restore finds the same rows as before.

Source: docs/spec/state-surgery.md, `Rules`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError, ProtocolError
from arroyo_dagster.state.codec.parquet import RowsEncoder
from arroyo_dagster.state.codec.row_groups import DataFile
from arroyo_dagster.state.codec.schema import file_schema
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY, KeyRange
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TimeFile
from arroyo_dagster.state.planning.surgery.columns import ColumnMap, Filled
from arroyo_dagster.state.storage.store import ObjectStore
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
        found = [
            self._filled(one, field, stored.num_rows)
            if isinstance(one, Filled)
            else stored.column(one)
            for one, field in zip(self.columns.sources, schema, strict=False)
        ]
        # `_generation`, `_key_hash` and `_operation` follow the columns of both.
        rest = stored.columns[stored.num_columns - (len(schema) - count) :]
        for column, field in zip(found, schema, strict=False):
            if column.null_count and not field.nullable:
                raise InputError(
                    f"column {field.name!r} may not be NULL, and the source has NULL in it",
                    table=self.target.table,
                    next_step="nothing was published; let the operator start empty with "
                    "--start-empty",
                )
        return pa.Table.from_arrays([*found, *rest], schema=schema)

    def _filled(self, source: Filled, field: pa.Field, rows: int) -> pa.ChunkedArray:
        value = pa.scalar(json.loads(source.value), field.type)
        return pa.chunked_array([pa.repeat(value, rows)], field.type)

    def _renumbered(self, stored: pa.Table) -> pa.Table:
        assert self.accumulators is not None
        at = accumulator_index(self.source)
        numbers = stored.column(at)
        stored = stored.filter(pc.is_in(numbers, pa.array(list(self.accumulators), numbers.type)))
        moved = [self.accumulators[one] for one in stored.column(at).to_pylist()]
        return stored.set_column(at, stored.schema.field(at), pa.array(moved, numbers.type))


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
    found: dict[int, set[tuple[int, bytes]]] = {}
    for part in stored_columns(store, config, files, columns):
        numbers = part.column(columns.index(keys[-2])).to_pylist()
        arguments = part.column(columns.index(keys[-1])).to_pylist()
        for number, argument in zip(numbers, arguments, strict=True):
            found.setdefault(number, set()).add((len(argument), argument[:2]))
    return found


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
    """Convert a file of the source, and read it back.

    Args:
        name: of the new file, in the store `held`.

    Returns:
        The new file with its exact bounds; None if no row is left, and none was written.

    Raises:
        InputError: a column that may not be NULL is NULL in the source.
        FormatError: the file has other columns than its table.
        ProtocolError: the new file reads back different.
    """
    rows = _converted(DataFile(source.read(file.path), file.path), file, conversion)
    if not any(one.num_rows for one in rows):
        return None
    encoder = RowsEncoder(file_schema(conversion.target))
    for one in rows:
        if one.num_rows:
            encoder.write(one)
    held.put(name, encoder.finish())
    whole = pa.concat_tables(rows)
    _check_read_back(held, name, whole)
    hashes = pc.min_max(whole.column(whole.num_columns - 2))
    latest = pc.max(whole.column(conversion.target.schema.timestamp_index))
    return TimeFile(
        epoch=file.epoch,
        path=name,
        min_routing_key=hashes["min"].as_py(),
        max_routing_key=hashes["max"].as_py(),
        max_timestamp_micros=max(0, latest.value or 0) // NANOS_PER_MICRO
        if not whole.column(conversion.target.schema.timestamp_index).null_count
        # A row without event time hides older ones: its file must not expire before theirs.
        else file.max_timestamp_micros,
        compaction_generation=file.compaction_generation,
    )


def _converted(data: DataFile, file: TimeFile, conversion: RowConversion) -> list[pa.Table]:
    if not data.schema.equals(file_schema(conversion.source)):
        raise FormatError(
            "a file has other columns than its table",
            path=file.path,
            expected=file_schema(conversion.source).to_string(),
            found=data.schema.to_string(),
        )
    every = range(len(data.schema))
    return [conversion.rows(data.read(every, [group])) for group in range(len(data.row_groups))]


def _check_read_back(held: ObjectStore, name: StatePath, rows: pa.Table) -> None:
    data = DataFile(held.read(name), name)
    again = data.read(range(len(data.schema)), range(len(data.row_groups)))
    if not data.schema.equals(rows.schema) or again != rows:
        raise ProtocolError(
            "a converted file reads back different from what was written; nothing was published",
            path=name,
        )
