"""Several runs of a deletion journal in one Parquet file: one row per object, ordered by run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.parquet import RowsEncoder, decoding

VERSION = "1"
Line = tuple[int, str, int | None, str | None, str]
"""The time its batch was completed, in microseconds; path, size in bytes, etag, outcome."""

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("plan", pa.string()),
        ("end", pa.string()),
        ("at_micros", pa.int64()),
        ("path", pa.string()),
        ("size_bytes", pa.int64()),
        ("etag", pa.string()),
        ("outcome", pa.string()),
    ],
    metadata={"version": VERSION},
)
GROUP_ROWS = 4096
"""The rows decoded at a time, each with the JSON objects of its run."""
_REPEATED = ["run", "plan", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRun:
    """One completed run.

    Attributes:
        plan, end: the text of its JSON objects `plan.json` and `end.json`.
        lines: the outcome of each object.
    """

    name: str
    plan: str
    end: str
    lines: tuple[Line, ...]


def encode_archive(runs: Iterable[ArchivedRun]) -> bytes:
    """Encode runs as one file. A run without objects is a row without a path."""
    encoder = RowsEncoder(SCHEMA)
    rows = (
        (run.name, run.plan, run.end, *line) for run in runs for line in run.lines or ((None,) * 5,)
    )
    while group := list(itertools.islice(rows, GROUP_ROWS)):
        columns = zip(*group, strict=True)
        arrays = [pa.array(one, field.type) for one, field in zip(columns, SCHEMA, strict=True)]
        encoder.write(pa.Table.from_arrays(arrays, schema=SCHEMA))
    return encoder.finish()


def decode_archive(data: bytes, path: str) -> list[ArchivedRun]:
    """Decode such a file completely.

    Raises:
        FormatError: invalid, or of a later release.
    """
    return list(archived_runs(data, path))


def archived_runs(data: bytes, path: str) -> Iterator[ArchivedRun]:
    """Yield the runs of such a file one by one. Errors as in `decode_archive`."""
    with decoding(path):
        rows = _rows(_opened(data, path), path)
        for (name, plan, end), mine in itertools.groupby(rows, itemgetter(0, 1, 2)):
            lines = tuple(row[3:] for row in mine if row[4] is not None)
            yield ArchivedRun(name=name, plan=plan, end=end, lines=lines)


def archived_names(data: bytes, path: str) -> frozenset[str]:
    """Return the names of the runs in such a file. Errors as in `decode_archive`."""
    with decoding(path):
        return frozenset(_opened(data, path).read(columns=["run"])["run"].unique().to_pylist())


def archived_lines(
    data: bytes,
    path: str,
    wanted: Callable[[pa.ChunkedArray], pa.ChunkedArray],
    low: str,
    high: str,
) -> Iterator[tuple[str, str, Line]]:
    """Yield the lines of selected objects: the name of the run, its `plan.json`, and the line.

    Skips row groups whose statistics exclude the range.

    Args:
        wanted: selects paths; returns one boolean for each.
        low, high: the range that contains all selected paths, both ends included.

    Raises:
        FormatError: as in `decode_archive`.
    """
    with decoding(path):
        file = _opened(data, path)
        place = SCHEMA.get_field_index("path")
        for group in range(file.num_row_groups):
            found = file.metadata.row_group(group).column(place).statistics
            known = found is not None and found.has_min_max
            if known and (found.max < low or found.min > high):
                continue
            mask = wanted(file.read_row_group(group, columns=["path"])["path"])
            if pc.any(mask).as_py():
                rows = file.read_row_group(group, columns=SCHEMA.names).filter(mask)
                for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                    yield row[0], row[1], row[3:]


def _opened(data: bytes, path: str) -> pq.ParquetFile:
    plain = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    schema = plain.schema_arrow
    version = (schema.metadata or {}).get(b"version", b"").decode(errors="replace")
    if version != VERSION or not schema.equals(SCHEMA):
        raise _other_version(version, path)
    # Each row repeats the JSON objects of its run; as dictionaries they are in memory once.
    return pq.ParquetFile(
        pa.BufferReader(data), page_checksum_verification=True, read_dictionary=_REPEATED
    )


def _rows(file: pq.ParquetFile, path: str) -> Iterator[tuple[Any, ...]]:
    for batch in file.iter_batches(GROUP_ROWS, use_threads=False):
        nulls = {name: batch[name].null_count for name in SCHEMA.names}
        if any(nulls[name] for name in _REPEATED) or not (
            nulls["path"] == nulls["at_micros"] == nulls["outcome"]
        ):
            raise _other_version(VERSION, path)
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _other_version(version: str, path: str) -> FormatError:
    return FormatError(
        f"not a part of the journal of version {VERSION!r}, but of {version!r}",
        path=path,
        next_step="use a release of arroyo-dagster that knows it; nothing was removed",
    )
