"""Decoding rows of a Parquet file, with a limit on the decoded bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.errors import FormatError

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
