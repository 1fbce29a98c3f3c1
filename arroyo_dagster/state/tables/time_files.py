"""Data files of an expiring table: written as a whole, read in the parts that are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.encodings import with_dictionaries
from arroyo_dagster.state.codec.parquet import BATCH_ROWS, encode_rows
from arroyo_dagster.state.codec.row_groups import Bound, DataFile
from arroyo_dagster.state.codec.schema import file_schema, schema_to_json
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TimeFile
from arroyo_dagster.state.planning.restore.schema_evolution import changed_in, how_to_read
from arroyo_dagster.state.storage.concurrency import ahead, concurrently, read_ahead
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.data_files import SLICE_ROWS, FooterCache, open_data_file
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, StoredRows

_Made = TypeVar("_Made")
_FILES_AHEAD = 4
CHUNK_BYTES = 1 << 23
"""How many stored bytes `chunks` decodes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """The parts that a read needs of each file.

    Attributes:
        keys: routing keys, both ends inclusive.
        columns: indices in the file schema of the table, ascending.
        cutoff_micros: row groups that are older as a whole may be left out. Other row groups may
            contain older rows, which the caller must filter. 0 = none.
        batches: whether record batches are numbered.
        bounds: row groups without a value in these bounds may be left out.
    """

    keys: KeyRange
    columns: tuple[int, ...]
    cutoff_micros: int = 0
    batches: bool = False
    bounds: tuple[ValueBounds, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueBounds:
    """The values of a column that a read needs, as statistics hold them.

    Attributes:
        column: its index in the file schema of the table.
        low, high: both ends inclusive; None = no bound.
    """

    column: int
    low: Bound
    high: Bound


class TimeFileReader:
    """Reads files of one table as rows of its current schema.

    Args:
        config: the table, with the notes in its metadata about older columns.
        footers: of files that were opened before; None = each is opened anew.
    """

    def __init__(
        self,
        config: ExpiringTimeKeyConfig,
        store: ObjectStore,
        footers: FooterCache | None = None,
    ) -> None:
        self._config = config
        self._schema = file_schema(config)
        self._changed_in = changed_in(config.schema)
        self._store = store
        self._footers = footers

    def read(self, files: Iterable[TimeFile], part: ReadRequest) -> list[StoredRows]:
        """Read the part of `files` that is in `part.keys`, in replay order.

        Raises:
            FormatError: a file is broken, or its columns are not those of its table.
        """
        return concurrently(lambda file: self._read_file(file, part), _wanted(files, part))

    def stream(self, files: Iterable[TimeFile], part: ReadRequest) -> Iterator[StoredRows]:
        """Read rows as `read`, in pieces of up to `SLICE_ROWS` rows, each from one row group of one
        file.

        Little more than one piece is in memory, whatever the size of the files. Record batches are
        numbered within a piece, and none spans two pieces.
        """
        selected = _wanted(files, part)
        opened = ahead(lambda file: self._open_ranges(file.path), selected)
        for file, data in zip(selected, opened, strict=True):
            with closing(data):
                where = self._places(data, file, part)
                for group in self._groups(data, file, part):
                    yield from self._slices(data, where, group, part)

    def chunks(self, files: Iterable[TimeFile], part: ReadRequest) -> Iterator[StoredRows]:
        """Read rows as `stream`, but in larger pieces: row groups that are small together are
        decoded as one, and several files are read at a time.

        Memory holds up to a few pieces of `CHUNK_BYTES` as stored.
        """

        def chunks_of(file: TimeFile) -> Iterable[StoredRows]:
            data = self._open_begin(file, part)
            if data.size_bytes > CHUNK_BYTES:
                sizes = data.footer.stored_bytes
                if sum(sizes[group] for group in self._groups(data, file, part)) > CHUNK_BYTES:
                    data.close()
                    return self._in_chunks(file, part)
            with closing(data):
                return [self._read_open(data, file, part)]

        weighed = ((file, 1) for file in _wanted(files, part))
        for chunks in read_ahead(chunks_of, weighed, _FILES_AHEAD):
            yield from chunks

    def _in_chunks(self, file: TimeFile, part: ReadRequest) -> Iterator[StoredRows]:
        with closing(self._open_ranges(file.path)) as data:
            where, sizes = self._places(data, file, part), data.footer.stored_bytes
            for groups in _neighbours(self._groups(data, file, part), sizes):
                if len(groups) > 1 or sizes[groups[0]] <= CHUNK_BYTES:
                    yield self._decoded(data, where, groups, part)
                    continue
                yield from self._slices(data, where, groups[0], part)

    def _slices(
        self, data: DataFile, where: _Places, group: int, part: ReadRequest
    ) -> Iterator[StoredRows]:
        for rows in data.slices(where.places, group, SLICE_ROWS):
            batches = batch_numbers([rows.num_rows]) if part.batches else None
            yield self._stored(rows, where, part, batches)

    def ahead(
        self, files: Iterable[TimeFile], part: ReadRequest, then: Callable[[StoredRows], _Made]
    ) -> Iterator[_Made]:
        """Read as `read`, file by file: yield the results of `then`, computed by a few threads."""
        weighed = ((file, 1) for file in _wanted(files, part))
        return read_ahead(lambda file: then(self._read_file(file, part)), weighed, _FILES_AHEAD)

    def _read_file(self, file: TimeFile, part: ReadRequest) -> StoredRows:
        with closing(self._open(file, part)) as data:
            return self._read_open(data, file, part)

    def _read_open(self, data: DataFile, file: TimeFile, part: ReadRequest) -> StoredRows:
        where, groups = self._places(data, file, part), self._groups(data, file, part)
        return self._decoded(data, where, groups, part)

    def _decoded(
        self, data: DataFile, where: _Places, groups: Sequence[int], part: ReadRequest
    ) -> StoredRows:
        batches = batch_numbers([data.row_groups[g] for g in groups]) if part.batches else None
        rows = data.read(where.places, groups, repeating=(data.schema.names[-1],))
        return self._stored(rows, where, part, batches)

    def _places(self, data: DataFile, file: TimeFile, part: ReadRequest) -> _Places:
        sources = self._sources(data.schema, file)
        operation = len(data.schema) - 1
        covered = part.keys.covers(file.min_routing_key, file.max_routing_key)
        needed = {source for index in part.columns if (source := sources[index]) is not None}
        needed |= {operation} if covered else {operation - 1, operation}
        places = tuple(sorted(needed))
        return _Places(
            places=places,
            sources=tuple(
                None if (source := sources[index]) is None else places.index(source)
                for index in part.columns
            ),
            key_hash=None if covered else places.index(operation - 1),
            operation=places.index(operation),
        )

    def _stored(
        self,
        rows: pa.Table,
        where: _Places,
        part: ReadRequest,
        batches: npt.NDArray[np.int64] | None,
    ) -> StoredRows:
        if where.key_hash is not None:
            inside = in_range(rows.column(where.key_hash), part.keys)
            rows = rows.filter(inside)
            batches = None if batches is None else batches[inside.to_numpy()]
        columns = [
            self._as(self._schema.field(index).type, rows, source)
            for index, source in zip(part.columns, where.sources, strict=True)
        ]
        schema = pa.schema([self._schema.field(index) for index in part.columns])
        stored = pa.Table.from_arrays(columns, schema=schema)
        return StoredRows(stored, rows.column(where.operation), batches)

    def stream_file(
        self,
        file: TimeFile,
        source: bytes | BinaryIO,
        batch_rows: int,
        texts: Collection[int] | None = (),
    ) -> Iterator[pa.Table]:
        """Yield all rows of a file in order, including `_key_hash` and `_operation`.

        Args:
            source: the file, or its bytes.
            batch_rows: the maximum number of rows at a time.
            texts: the columns of text to yield as dictionaries, by their index in the file schema
                of the table; None = those with few different values in this file.

        Raises:
            FormatError: as from `read`.
        """
        data = DataFile(source, file.path)
        sources = self._sources(data.schema, file)
        if texts is None:
            texts = [index for index, place in enumerate(sources) if place in data.repeating_texts]
        schema = with_dictionaries(self._schema, texts)
        places = {place for index in texts if (place := sources[index]) is not None}
        for rows in data.stream(batch_rows, dictionaries=places):
            columns = [
                self._as(schema.field(i).type, rows, source) for i, source in enumerate(sources)
            ]
            yield pa.Table.from_arrays(columns, schema=schema)

    def read_back(
        self,
        file: TimeFile,
        source: bytes | BinaryIO,
        batch_rows: int,
        texts: Collection[int] | None = None,
    ) -> Iterator[pa.Table]:
        """Yield the rows of a file that was just written, with texts perhaps as dictionaries.

        Args:
            texts: the columns of text to yield as dictionaries, if the file encodes them so;
                None = those with few different values in this file.

        Raises:
            FormatError: it does not decode, or its schema is not exactly the table's.
        """
        data = DataFile(source, file.path)
        if not data.schema.equals(self._schema, check_metadata=True):
            raise FormatError(
                "a merged file, read back, has another schema than its table",
                table=self._config.table,
                path=file.path,
                expected=self._schema.to_string(),
                found=data.schema.to_string(),
                next_step="keep the file and report it; nothing was published",
            )
        yield from data.stream(
            batch_rows, dictionaries=data.repeating_texts if texts is None else texts
        )

    def _open(self, file: TimeFile, part: ReadRequest) -> DataFile:
        if not self._may_skip(file, part):
            return DataFile(self._store.read(file.path), file.path)
        return self._open_ranges(file.path)

    def _open_begin(self, file: TimeFile, part: ReadRequest) -> DataFile:
        """Open a file that is needed whole, or in chunks if it is large."""
        if self._may_skip(file, part):
            return self._open_ranges(file.path)
        begin = self._store.read_range(file.path, 0, CHUNK_BYTES)
        if len(begin) < CHUNK_BYTES:
            return DataFile(begin, file.path)
        return self._open_ranges(file.path)

    def _open_ranges(self, path: StatePath) -> DataFile:
        if self._footers is not None:
            return self._footers.open(path)
        return open_data_file(self._store, path)

    def _may_skip(self, file: TimeFile, part: ReadRequest) -> bool:
        """Whether reading a part of the file may suffice. Normally only a merged file has several
        row groups, of which some may be older than the cutoff.
        """
        if not part.keys.covers(file.min_routing_key, file.max_routing_key):
            return True
        merged = part.cutoff_micros > 0 and file.compaction_generation > 0
        return merged or bool(part.bounds) or len(part.columns) < len(self._schema) - 2

    def _groups(self, data: DataFile, file: TimeFile, part: ReadRequest) -> list[int]:
        groups = list(range(len(data.row_groups)))
        sources = self._sources(data.schema, file) if part.bounds else ()
        for bound in part.bounds:
            source = sources[bound.column]
            if source is not None and groups:
                groups = data.groups_within(source, bound.low, bound.high, groups, nulls=False)
        if len(groups) < 2:
            return groups  # its bounds are those of the file, which is needed
        width = len(data.schema)
        if not part.keys.covers(file.min_routing_key, file.max_routing_key):
            groups = data.groups_within(width - 2, part.keys.start, part.keys.end, groups)
        time_at = self._sources(data.schema, file)[self._config.schema.timestamp_index]
        if part.cutoff_micros > 0 and time_at is not None:
            cutoff = part.cutoff_micros * NANOS_PER_MICRO
            groups = data.groups_within(time_at, cutoff, None, groups)
        return groups

    # ---- older schemas ---------------------------------------------------------------------------

    def _sources(self, found: pa.Schema, file: TimeFile) -> tuple[int | None, ...]:
        """Return each file-schema column's index in this file; None = null in every row."""
        width = len(self._schema)
        if file.epoch >= self._changed_in and found.equals(self._schema):
            return tuple(range(width))
        problem = "the columns of a data file do not match its table"
        try:
            reading = how_to_read(self._config, schema_to_json(found), file.epoch)
        except InputError:
            pass  # the file has a type that no table can have
        else:
            if reading.problem is None:
                return (*reading.sources, len(found) - 2, len(found) - 1)
            problem = reading.problem
        raise FormatError(
            problem,
            table=self._config.table,
            path=file.path,
            epoch=file.epoch,
            columns_since=self._changed_in,
            expected=[f"{field.name}: {field.type}" for field in self._schema],
            found=[f"{field.name}: {field.type}" for field in found],
            next_step="keep the file and report it; restore an epoch that does not list it",
        )

    def _as(self, kind: pa.DataType, rows: pa.Table, source: int | None) -> pa.ChunkedArray:
        if source is None:
            return pa.chunked_array([pa.nulls(rows.num_rows, kind)], kind)
        column = rows.column(source)
        if column.type.equals(kind):
            return column
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type).dictionary_encode()
        return column.cast(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """The columns to read from one file, and their indices in the result.

    Attributes:
        places: the columns to read, by their index in the file, ascending.
        sources: for each requested column its index in `places`; None = null in every row.
        key_hash: its index in `places`; None if all of the file's keys are needed.
        operation: its index in `places`.
    """

    places: tuple[int, ...]
    sources: tuple[int | None, ...]
    key_hash: int | None
    operation: int


def _wanted(files: Iterable[TimeFile], part: ReadRequest) -> list[TimeFile]:
    keys = part.keys
    return [file for file in files if keys.intersects(file.min_routing_key, file.max_routing_key)]


def _neighbours(groups: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Divide row groups into runs of up to `CHUNK_BYTES` as stored; a larger one is alone."""
    run: list[int] = []
    run_bytes = 0
    for group in groups:
        size = sizes[group]
        if run and run_bytes + size > CHUNK_BYTES:
            yield run
            run, run_bytes = [], 0
        run.append(group)
        run_bytes += size
    if run:
        yield run


def in_range(hashes: pa.ChunkedArray, keys: KeyRange) -> pa.ChunkedArray:
    """Return which of the routing keys are in `keys`, both ends inclusive."""
    unsigned = pa.uint64()
    return pc.and_(
        pc.greater_equal(hashes, pa.scalar(keys.start, unsigned)),
        pc.less_equal(hashes, pa.scalar(keys.end, unsigned)),
    )


def batch_numbers(group_rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the number of the record batch of each row, counted over all row groups."""
    numbers: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    before = 0
    for rows in group_rows:
        numbers.append(before + np.arange(rows, dtype=np.int64) // BATCH_ROWS)
        before += -(-rows // BATCH_ROWS)
    return np.concatenate(numbers)


def write_time_file(
    store: ObjectStore,
    rows: pa.Table,
    path: StatePath,
    *,
    epoch: Epoch,
    timestamp_index: int,
    encode: Callable[[pa.Table], bytes] = encode_rows,
) -> tuple[TimeFile, int]:
    """Write rows of a file schema; return the file's metadata, with exact bounds, and its size."""
    data = encode(rows)
    hashes = pc.min_max(rows.column(rows.num_columns - 2))
    latest = pc.max(rows.column(timestamp_index))
    store.put(path, data)
    return TimeFile(
        epoch=epoch,
        path=path,
        min_routing_key=hashes["min"].as_py(),
        max_routing_key=hashes["max"].as_py(),
        max_timestamp_micros=max(0, latest.value or 0) // NANOS_PER_MICRO,
    ), len(data)
