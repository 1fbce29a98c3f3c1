"""Parquet bytes of data files, as Arroyo writes and reads them.

Source: crates/arroyo-state/src/tables/global_keyed_map.rs and expiring_time_key_map.rs.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.errors import ArroyoStateError, FormatError, StorageError
from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN, TIMESTAMP_COLUMN

SMALL_BYTES = 1 << 20
"""The largest file that is decoded without threads."""

MAX_ROW_GROUP_ROWS = 1_048_576
GLOBAL_KEY_VALUE_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
REMOVAL_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("_operation", pa.binary(), nullable=False),
    ]
)
_WRITES_BLOOM_FILTERS = int(pa.__version__.partition(".")[0]) >= 24
"""A file without them is read in the same way; the look-up of a key may open it in vain."""
_VERSION = b"version"
_ARROW_SCHEMA = "ARROW:schema"
_BOUNDED = {KEY_HASH_COLUMN: 2**64 - 1, TIMESTAMP_COLUMN: -1}
_RAW = ("min_raw", "max_raw")
_BUFFER_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 22
BATCH_ROWS = 1024
"""The number of rows in a record batch of Arroyo's reader."""
_WIDE_BYTES = 256
"""The average size from which values of `encode_single_rows` are compressed."""


@dataclass(frozen=True, slots=True)
class FooterFacts:
    """The facts from the footer of a data file; `row_groups` has the number of rows of each."""

    rows: int
    row_groups: tuple[int, ...]
    schema: pa.Schema
    version: int
    bounds: Mapping[str, tuple[int, int]]
    """Smallest and largest routing key and event time (ns), if requested and recorded."""


def encode_rows(rows: pa.Table, *, row_group_rows: int = MAX_ROW_GROUP_ROWS) -> bytes:
    """Encode the rows of an expiring table: statistics, `ARROW:schema` as the only metadata, and
    each column as `writer_options` chooses.
    """
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **_settings(), **_encodings(rows)) as writer:
        writer.write_table(rows, row_group_size=row_group_rows)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def encode_single_rows(rows: pa.Table) -> bytes:
    """Encode the rows of an expiring table, each in its own row group.

    Every row then costs a page and a footer entry per column, about 80 bytes. So everything else is
    omitted: dictionary pages, statistics, and the ZSTD frame around a single number.
    """
    wide = rows.num_rows * _WIDE_BYTES
    compression = {
        field.name: "zstd" if rows.column(index).nbytes > wide else "none"
        for index, field in enumerate(rows.schema)
    }
    settings = {
        **_settings(),
        "compression": compression,
        "use_dictionary": False,
        "write_statistics": False,
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **settings) as writer:
        writer.write_table(rows, row_group_size=1)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


class RowsEncoder:
    """Encodes rows of an expiring table, one row group after the other, as `encode_rows` does.

    The values of the first row group determine the encoding of each column.

    Args:
        schema: of the rows as they are stored. Text columns of the rows may be dictionaries, the
            same columns in every row group.
        sorted_by: the index of the column by which the rows ascend; None = unsorted.
        bloom_filter: the index of a column for which to write Bloom filters; None = none.
    """

    def __init__(
        self, schema: pa.Schema, *, sorted_by: int | None = None, bloom_filter: int | None = None
    ) -> None:
        self._schema = schema
        self._sorted_by = sorted_by
        self._bloom_filter = bloom_filter
        self._sink = io.BytesIO()
        self._writer: pq.ParquetWriter | None = None

    @property
    def size_bytes(self) -> int:
        """The number of bytes written so far."""
        return self._sink.tell()

    def write(self, rows: pa.Table, row_group_rows: int = MAX_ROW_GROUP_ROWS) -> None:
        """Add rows as one row group, or as several if there are more than `row_group_rows`."""
        for index, (field, stored) in enumerate(zip(rows.schema, self._schema, strict=True)):
            if field.type != stored.type:
                # A second dictionary would end the dictionary encoding of the column.
                rows = rows.set_column(index, field, rows.column(index).unify_dictionaries())
        if self._writer is None:
            self._writer = self._open(rows, row_group_rows)
        self._writer.write_table(rows, row_group_size=row_group_rows)

    def finish(self) -> bytes:
        """Close the file and return its bytes."""
        if self._writer is None:
            self.write(self._schema.empty_table())
        assert self._writer is not None
        self._writer.close()
        return self._sink.getvalue()  # no copy, unlike Arrow's buffers

    def _open(self, rows: pa.Table, row_group_rows: int) -> pq.ParquetWriter:
        options = {**_settings(), **self._form(rows, row_group_rows)}
        if rows.schema.equals(self._schema):
            return pq.ParquetWriter(self._sink, self._schema, **options)
        writer = pq.ParquetWriter(self._sink, rows.schema, **{**options, "store_schema": False})
        stored = base64.b64encode(self._schema.serialize()).decode()
        writer.add_key_value_metadata({_ARROW_SCHEMA: stored})
        return writer

    def _form(self, rows: pa.Table, row_group_rows: int) -> dict[str, object]:
        form = _encodings(rows)
        if self._sorted_by is not None and _is_flat(self._schema, self._sorted_by):
            form["sorting_columns"] = [pq.SortingColumn(self._sorted_by)]
        if self._bloom_filter is not None and _WRITES_BLOOM_FILTERS:
            name = self._schema.field(self._bloom_filter).name
            options = {"ndv": max(1, min(rows.num_rows, row_group_rows)), "fpp": 0.01}
            form["bloom_filter_options"] = {name: options}
        return form


def _is_flat(schema: pa.Schema, place: int) -> bool:
    """Return whether the column at `place` is the Parquet column with the same index."""
    return not any(pa.types.is_nested(schema.field(index).type) for index in range(place))


def encode_pairs(
    keys: Iterable[bytes], seconds: Iterable[bytes], schema: pa.Schema, *, version: int
) -> bytes:
    """Encode rows of a global keyed table, ordered by key; without rows there is no row group.

    Args:
        keys: in any order, without duplicates.
        seconds: the value, or the operation, of each key.
        schema: `GLOBAL_KEY_VALUE_SCHEMA` or `REMOVAL_SCHEMA`.
        version: the state version of the table's values.
    """
    import pyarrow.compute as pc  # slow to import, and not needed to read

    first, second = (pa.array(list(column), pa.binary()) for column in (keys, seconds))
    order = pc.sort_indices(first)
    return encode_pair_columns(first.take(order), second.take(order), schema, version=version)


def encode_pair_columns(
    keys: pa.Array, seconds: pa.Array, schema: pa.Schema, *, version: int
) -> bytes:
    """Encode columns as `encode_pairs` does; they must already be ordered by key."""

    def group(start: int) -> pa.Table:
        columns = [
            column.slice(start, MAX_ROW_GROUP_ROWS).cast(pa.binary()) for column in (keys, seconds)
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    options = _encodings(group(0), dictionaries=False)
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, **_settings(), **options, write_statistics=False) as writer:
        writer.add_key_value_metadata({_VERSION.decode(): str(version)})
        for start in range(0, len(keys), MAX_ROW_GROUP_ROWS):
            writer.write_table(group(start))
    return sink.getvalue()


def _encodings(rows: pa.Table, *, dictionaries: bool = True) -> dict[str, Any]:
    from arroyo_dagster.state.codec.encodings import writer_options  # readers load none of it

    return writer_options(rows, dictionaries=dictionaries)


def _settings() -> dict[str, object]:
    # parquet-rs takes names inside lists from the Parquet schema. With pyarrow's compliant names,
    # the first restore that filters rows by key range would fail.
    return {
        "use_compliant_nested_type": False,
        "store_schema": True,
        # A flipped bit in a page often decompresses to other values; checksums detect it.
        "write_page_checksum": True,
    }


def decode_file(data: bytes | BinaryIO, path: str) -> tuple[pa.Table, int]:
    """Decode a data file completely.

    Returns:
        Its rows, including duplicate column names, and the state version (0 if it has none).

    Raises:
        FormatError: not Parquet, truncated, or a page that does not decode.
        StorageError: the store failed while the file was read.
    """
    with decoding(path):
        file = _opened(data)
        size_bytes = source_size(data)
        small = isinstance(data, bytes) and size_bytes <= SMALL_BYTES  # see `DataFile`
        footer = file.metadata
        rows = read_groups(
            file,
            range(footer.num_row_groups),
            range(footer.num_columns),
            path=path,
            size_bytes=size_bytes,
            use_threads=not small,
        )
        return rows, state_version(file)


def read_facts(data: bytes | BinaryIO, path: str, *, bounds: bool = False) -> FooterFacts:
    """Read the footer only. Errors as in `decode_file`.

    Args:
        bounds: also return the bounds from the statistics; this reads a few values.
    """
    with decoding(path):
        file = _opened(data)
        return FooterFacts(
            rows=file.metadata.num_rows,
            row_groups=tuple(group.num_rows for group in _groups(file.metadata)),
            schema=file.schema_arrow,
            version=state_version(file),
            bounds=_bounds(data, file.metadata) if bounds else {},
        )


def _bounds(data: bytes | BinaryIO, footer: pq.FileMetaData) -> dict[str, tuple[int, int]]:
    names = [footer.schema.column(index).path for index in range(footer.num_columns)]
    leaves = [names.index(name) for name in _BOUNDED if name in names]
    check_chunks(data, footer, range(footer.num_row_groups), leaves)
    bounds: dict[str, tuple[int, int]] = {}
    for name, bits in _BOUNDED.items():
        if name not in names or not footer.num_row_groups:
            continue
        index = names.index(name)
        groups = [
            footer.row_group(g).column(index).statistics for g in range(footer.num_row_groups)
        ]
        if all(statistic is not None and statistic.has_min_max for statistic in groups):
            # Statistics store an unsigned number as a signed one with the same bits.
            low, high = ([getattr(statistic, end) & bits for statistic in groups] for end in _RAW)
            bounds[name] = (min(low), max(high))
    return bounds


def open_pages(
    data: bytes | BinaryIO | pa.BufferReader, footer: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    """Open a data file whose columns are read page by page; call it within `decoding`.

    Args:
        footer: of this file, if it was read before.
    """
    source = pa.BufferReader(data) if isinstance(data, bytes) else data
    return pq.ParquetFile(
        source,
        metadata=footer,
        page_checksum_verification=True,
        buffer_size=_BUFFER_BYTES,
        pre_buffer=False,  # otherwise every column is read completely, whatever the buffer
    )


def check_chunks(
    source: bytes | BinaryIO | pa.BufferReader,
    metadata: pq.FileMetaData,
    groups: Sequence[int],
    leaves: Sequence[int],
) -> None:
    """Read one value of Parquet columns in row groups; call it within `decoding`.

    pyarrow aborts the process when it is asked for a column in a damaged footer, or for its
    statistics. Reading a value first finds the same damage and raises.
    """
    pages = open_pages(source, metadata)
    for group in groups if leaves else ():
        batches = pages.reader.iter_batches(
            batch_size=1, row_groups=[group], column_indices=list(leaves), use_threads=False
        )
        next(iter(batches), None)


def rows_at_once(footer: pq.FileMetaData, most: int, group: int | None = None) -> int:
    """Return how many rows to read at a time for about 4 MiB of them: a multiple of Arroyo's record
    batches of 1024 rows, up to `most`.

    Args:
        group: of this row group; None = of any.
    """
    groups = _groups(footer) if group is None else [footer.row_group(group)]
    sizes = (g.total_byte_size // max(1, g.num_rows) for g in groups)
    widest = max(sizes, default=0)
    return min(most, max(1, _CHUNK_BYTES // max(1, widest) // BATCH_ROWS) * BATCH_ROWS)


def _groups(footer: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    return [footer.row_group(index) for index in range(footer.num_row_groups)]


def source_size(source: bytes | BinaryIO) -> int:
    """Return the size of a file in bytes, and rewind it."""
    if isinstance(source, bytes):
        return len(source)
    size_bytes = source.seek(0, io.SEEK_END)
    source.seek(0)
    return size_bytes


def _opened(data: bytes | BinaryIO) -> pq.ParquetFile:
    source = pa.BufferReader(data) if isinstance(data, bytes) else data
    file = pq.ParquetFile(source, page_checksum_verification=True)
    check_footer(file.metadata)
    return file


def check_footer(footer: pq.FileMetaData) -> None:
    """Refuse a footer with contradictory row counts; call it within `decoding`."""
    rows = sum(group.num_rows for group in _groups(footer))
    if rows != footer.num_rows:
        raise pa.ArrowInvalid(f"row groups of {rows} rows in a file of {footer.num_rows}")


def state_version(file: pq.ParquetFile) -> int:
    """Return the state version of the file's values; 0 if it has none."""
    text = (file.metadata.metadata or {}).get(_VERSION, b"0")
    return int(text) if text.isdigit() else 0


@contextmanager
def decoding(path: str) -> Iterator[None]:
    """Convert pyarrow's errors: a broken file, or a failed store.

    Raises:
        FormatError: the bytes are not those of a data file; names `path`.
        StorageError: they could not be read; a retry may help.
    """
    try:
        yield
    except ArroyoStateError:
        raise  # raised by the store and passed through pyarrow
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # pyarrow's errors about the content have no errno of the operating system.
            raise StorageError(f"a data file could not be read ({error})", path=path) from error
        raise FormatError(
            f"a data file does not decode as Parquet ({error})",
            path=path,
            next_step="keep the object; restore an epoch that does not list it",
        ) from error


# ---- decoding rows of a Parquet file, with a limit on the decoded bytes --------------------------

_FLOOR_BYTES = 1 << 31
_RATIO = 200
"""Data files decode to 2 to 30 times their size. But equal rows take almost no bytes, and Arroyo's
row groups have up to 1,048,576 rows of about 100 bytes each: 20 of them are below the floor."""

_BATCH_ROWS = 1 << 16


def read_groups(
    file: pq.ParquetFile,
    groups: Sequence[int],
    leaves: Sequence[int],
    *,
    path: str,
    size_bytes: int,
    use_threads: bool,
) -> pa.Table:
    """Read columns of row groups; must be called within `decoding`.

    Checks the footer's claims before anything is read, and the decoded bytes after every batch.

    Args:
        leaves: indices of Parquet columns.
        size_bytes: of the file.

    Raises:
        FormatError: the rows exceed the limit for a file of this size, or differ in number from the
            footer.
    """
    # How many bytes a file may decode to: 2 GiB plus 200 times its size.
    most = _FLOOR_BYTES + _RATIO * size_bytes
    rows_claimed, bytes_claimed = _claims(file, groups, leaves)
    if bytes_claimed > most:
        raise _too_large(path, size_bytes, bytes_claimed, most)
    batches: list[pa.RecordBatch] = []
    rows = decoded = 0
    for batch in file.reader.iter_batches(
        batch_size=_BATCH_ROWS,
        row_groups=list(groups),
        column_indices=list(leaves),
        use_threads=use_threads,
    ):
        batches.append(batch)
        rows += batch.num_rows
        decoded += batch.nbytes
        if decoded > most:
            raise _too_large(path, size_bytes, decoded, most)
    check_rows(path, rows, rows_claimed)
    if not batches:
        return file.reader.read_row_groups([], column_indices=list(leaves), use_threads=False)
    return pa.Table.from_batches(batches)


def check_rows(path: str, rows: int, claimed: int) -> None:
    """Refuse a number of rows that differs from the footer's. Raises FormatError."""
    if rows != claimed:
        raise FormatError(
            f"a data file holds {rows} rows, and its footer says {claimed}",
            path=path,
            next_step="keep the object; restore an epoch that does not list it",
        )


def _claims(file: pq.ParquetFile, groups: Sequence[int], leaves: Sequence[int]) -> tuple[int, int]:
    """Return the rows of row groups, and the bytes they may have, according to the footer.

    A fixed-width value occupies its width in memory, even if fewer bytes encode it.
    """
    schema, rows, total = file.metadata.schema, 0, 0
    columns = [schema.column(leaf) for leaf in leaves]
    width = sum(
        _WIDTHS.get(field.physical_type, 0) for field in columns if field.max_repetition_level == 0
    )
    for index in groups:
        # Of all columns: pyarrow aborts the process when it is asked for one that is damaged.
        group = file.metadata.row_group(index)
        rows += group.num_rows
        total += max(group.total_byte_size if leaves else 0, width * group.num_rows)
    return rows, total


_WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8, "BOOLEAN": 0}


def _too_large(path: str, size_bytes: int, found: int, most: int) -> FormatError:
    return FormatError(
        f"a data file of {size_bytes} bytes would decode to {found} bytes or more, "
        f"expected at most {most}",
        path=path,
        next_step="keep the object and report it; restore an epoch that does not list it",
    )
