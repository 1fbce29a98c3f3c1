"""Parquet bytes of data files, as Arroyo writes and reads them.

Source: crates/arroyo-state/src/tables/global_keyed_map.rs and expiring_time_key_map.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from arroyo_dagster.errors import ArroyoStateError, FormatError, StorageError
from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN, TIMESTAMP_COLUMN

SMALL_BYTES = 1 << 20
"""Up to this size a file is decoded without threads."""

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
_VERSION = b"version"
_BOUNDED = {KEY_HASH_COLUMN: 2**64 - 1, TIMESTAMP_COLUMN: -1}
_RAW = ("min_raw", "max_raw")
_BUFFER_BYTES = 1 << 16
_PIECE_BYTES = 1 << 22
BATCH_ROWS = 1024
"""How many rows Arroyo's reader puts into a record batch."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the footer of a data file says."""

    rows: int
    row_groups: int
    schema: pa.Schema
    version: int
    bounds: Mapping[str, tuple[int, int]]
    """Smallest and largest routing key and event time (ns), if asked for and recorded."""


def encode_rows(rows: pa.Table) -> bytes:
    """Encode the rows of an expiring table: ZSTD level 1, statistics, `ARROW:schema` only."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **_settings()) as writer:
        writer.write_table(rows, row_group_size=MAX_ROW_GROUP_ROWS)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def encode_pairs(
    keys: Iterable[bytes], seconds: Iterable[bytes], schema: pa.Schema, *, version: int
) -> bytes:
    """Encode rows of a global keyed table, ordered by key; no rows give no row group.

    Args:
        keys: each once, in any order.
        seconds: the value, or the operation, of each key.
        schema: `GLOBAL_KEY_VALUE_SCHEMA` or `REMOVAL_SCHEMA`.
        version: the state version of the table's values.
    """
    columns = [pa.array(list(column), pa.binary()) for column in (keys, seconds)]
    rows = pa.Table.from_arrays(columns, schema=schema)
    rows = rows.take(pc.sort_indices(rows.column(0)))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, write_statistics=False, **_settings()) as writer:
        writer.add_key_value_metadata({_VERSION.decode(): str(version)})
        if rows.num_rows:
            writer.write_table(rows, row_group_size=MAX_ROW_GROUP_ROWS)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _settings() -> dict[str, object]:
    # parquet-rs takes names inside lists from the Parquet schema: pyarrow's compliant names
    # would fail at the first restore that filters rows by key range.
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_compliant_nested_type": False,
        "store_schema": True,
        # A flipped bit in a page often decompresses to other values: without this nobody notices.
        "write_page_checksum": True,
    }


def decode_file(data: bytes | BinaryIO, path: str) -> tuple[pa.Table, int]:
    """Decode a data file whole.

    Returns:
        Its rows, duplicate column names included, and the state version (0 where not said).

    Raises:
        FormatError: not Parquet, truncated, or a page that does not decode.
        StorageError: the store failed while it was read.
    """
    with decoding(path):
        file = _opened(data)
        small = isinstance(data, bytes) and len(data) <= SMALL_BYTES  # see `DataFile`
        return file.read(use_threads=not small), state_version(file)


def read_facts(data: bytes | BinaryIO, path: str, *, bounds: bool = False) -> FileFacts:
    """Read the footer only. Errors as `decode_file`.

    Args:
        bounds: what the statistics say too; then a few values are read as well.
    """
    with decoding(path):
        file = _opened(data)
        return FileFacts(
            rows=file.metadata.num_rows,
            row_groups=file.metadata.num_row_groups,
            schema=file.schema_arrow,
            version=state_version(file),
            bounds=_bounds(data, file.metadata) if bounds else {},
        )


def _check_columns(data: bytes | BinaryIO, footer: pq.FileMetaData, names: Sequence[str]) -> None:
    # Asked for the statistics in a damaged footer pyarrow ends the process. Reading a value finds
    # the same damage and raises.
    file = open_pages(data, footer)
    for group in range(footer.num_row_groups):
        for name in names:
            next(file.iter_batches(batch_size=1, columns=[name], row_groups=[group]), None)


def _bounds(data: bytes | BinaryIO, footer: pq.FileMetaData) -> dict[str, tuple[int, int]]:
    names = [footer.schema.column(index).path for index in range(footer.num_columns)]
    _check_columns(data, footer, [name for name in _BOUNDED if name in names])
    found: dict[str, tuple[int, int]] = {}
    for name, bits in _BOUNDED.items():
        if name not in names or not footer.num_row_groups:
            continue
        index = names.index(name)
        groups = [
            footer.row_group(g).column(index).statistics for g in range(footer.num_row_groups)
        ]
        if all(one is not None and one.has_min_max for one in groups):
            # Statistics hold an unsigned number as a signed one of the same bits.
            low, high = ([getattr(one, end) & bits for one in groups] for end in _RAW)
            found[name] = (min(low), max(high))
    return found


def open_pages(
    data: bytes | BinaryIO | pa.BufferReader, footer: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    """Open a data file whose columns come into memory page by page; within `decoding`.

    Args:
        footer: of this file, if it was read before.
    """
    source = pa.BufferReader(data) if isinstance(data, bytes) else data
    return pq.ParquetFile(
        source,
        metadata=footer,
        page_checksum_verification=True,
        buffer_size=_BUFFER_BYTES,
        pre_buffer=False,  # or every column is read whole, whatever the buffer
    )


def rows_at_once(footer: pq.FileMetaData, most: int) -> int:
    """How many rows to read at once so that some megabytes are in memory: whole record batches of
    Arroyo's, 1024 to `most`."""
    groups = [footer.row_group(at) for at in range(footer.num_row_groups)]
    widest = max((one.total_byte_size // max(1, one.num_rows) for one in groups), default=0)
    return min(most, max(1, _PIECE_BYTES // max(1, widest) // BATCH_ROWS) * BATCH_ROWS)


def _opened(data: bytes | BinaryIO) -> pq.ParquetFile:
    file = pa.BufferReader(data) if isinstance(data, bytes) else data
    return pq.ParquetFile(file, page_checksum_verification=True)


def state_version(file: pq.ParquetFile) -> int:
    """The state version that the file says its values have; 0 where it does not."""
    text = (file.metadata.metadata or {}).get(_VERSION, b"0")
    return int(text) if text.isdigit() else 0


@contextmanager
def decoding(path: str) -> Iterator[None]:
    """Tell a broken file from a store that failed, in whatever pyarrow raises within.

    Raises:
        FormatError: the bytes are not those of a data file; names `path`.
        StorageError: they could not be read; trying again may help.
    """
    try:
        yield
    except ArroyoStateError:
        raise  # of the store, through pyarrow
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # What pyarrow says of bytes has no number of the operating system.
            raise StorageError(f"a data file could not be read ({error})", path=path) from error
        raise FormatError(
            f"a data file does not decode as Parquet ({error})",
            path=path,
            next_step="keep the object; restore an epoch that does not list it",
        ) from error
