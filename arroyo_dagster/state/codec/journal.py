"""Runs of a journal of deletions, many in one Parquet file: a row an object, in order of runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows

VERSION = "1"
Line = tuple[int, str, int | None, str | None, str]
"""When its batch was completed, in microseconds; path, size in bytes, etag, what became of it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRun:
    """One run that has ended.

    Attributes:
        plan, end: the JSON objects with which it began and ended, as they were.
        lines: what became of each object.
    """

    name: str
    plan: str
    end: str
    lines: tuple[Line, ...]


def encode_archive(runs: Iterable[ArchivedRun]) -> bytes:
    """Runs as one file. One without objects is a row without a path."""
    rows = [
        (run.name, run.plan, run.end, *line) for run in runs for line in run.lines or ((None,) * 5,)
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(one, field.type) for one, field in zip(columns, SCHEMA, strict=True)]
    return encode_rows(pa.Table.from_arrays(arrays, schema=SCHEMA))


def decode_archive(data: bytes, path: str) -> list[ArchivedRun]:
    """Read such a file.

    Raises:
        FormatError: it is none, or of a later release.
    """
    table, _ = decode_file(data, path)
    version = (table.schema.metadata or {}).get(b"version", b"").decode(errors="replace")
    nulls = {name: table[name].null_count for name in SCHEMA.names if name in table.schema.names}
    if (
        version != VERSION
        or not table.schema.equals(SCHEMA)
        or any(nulls[name] for name in ("run", "plan", "end"))
        or not nulls["path"] == nulls["at_micros"] == nulls["outcome"]
    ):
        raise FormatError(
            f"not a part of the journal of version {VERSION!r}, but of {version!r}",
            path=path,
            next_step="use a release of arroyo-dagster that knows it; nothing was removed",
        )
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return [_run_of(list(mine)) for _, mine in itertools.groupby(rows, itemgetter(0))]


def _run_of(rows: Sequence[tuple[Any, ...]]) -> ArchivedRun:
    name, plan, end = rows[0][:3]
    lines = tuple(row[3:] for row in rows if row[4] is not None)
    return ArchivedRun(name=name, plan=plan, end=end, lines=lines)
