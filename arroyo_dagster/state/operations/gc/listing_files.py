"""Read a listing of a store that another program made: files in Parquet or CSV, by polars.

A listing is old, and may be wrong. Here it becomes a value about one job; `store_listing`
decides what of it counts.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote_plus

import polars as pl

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import Packed, StoredObject
from arroyo_dagster.state.operations.gc.store_listing import StoreListing, plain_etag
from arroyo_dagster.state.storage.names import StoredName, encode_path
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import parse_url

_MOST_FILE_BYTES = 1 << 29
_MOST_PLAIN_BYTES = 1 << 32
_MOST_LETTERS = 200
"""Of what a file contains, in a message."""

_ENCODED = "encoded_path"
_DEFAULTS = {"path": "path", "size": "size", "time": "time", "etag": "etag"}


def read_store_listing(
    sources: Sequence[str], store: ObjectStore, paths: JobPaths, columns: str = ""
) -> StoreListing:
    """Read what a listing says about one job.

    Args:
        sources: paths or URLs of its files: Parquet or CSV, each compressed by gzip or not. Paths
            of objects are keys of the bucket; on local disk, relative to the checkpoint URL. Times
            of CSV have a zone.
        store: the store of the job.
        columns: the columns of the files, as `path=Key,size=Size,time=LastModifiedDate,etag=ETag`;
            `encoded_path` if keys are URL-encoded. Numbers, from 1, are those of CSV without a
            header. What is left out has its own name; without a column `etag`, none is compared.

    Raises:
        InputError: a column is wrong, or a file is too large.
        NotFoundError: a file does not exist.
        ProtocolError: it contains nothing below the job.
        FormatError: a file does not decode.
    """
    names = _column_names(columns)
    url = parse_url(store.url)
    local = url.backend in ("file", "memory")
    root = "" if local or not url.key_prefix else f"{encode_path(url.key_prefix)}/"
    below = f"{root}{encode_path(paths.root)}/"
    made_at, rows, tables = [], 0, []
    for source in sources:
        micros, data = _read(source)
        table = _table(data, names, source)
        made_at.append(micros)
        rows += table.height
        tables.append(table.filter(pl.col("path").str.starts_with(below)))
    frame = pl.concat(tables)
    if frame.is_empty():
        raise ProtocolError(
            f"the listing of {rows} rows contains nothing below the job: expected keys that begin "
            f"with {below}",
            path=", ".join(map(redact_url, sources)),
            next_step="give a listing of the bucket and prefix of the checkpoint URL; nothing was "
            "deleted",
        )
    return StoreListing(
        source=", ".join(map(redact_url, sources)),
        paths=paths,
        made_at_micros=min(made_at),
        stored=Packed(_current(frame, len(root))),
        rows=rows,
    )


def _column_names(text: str) -> dict[str, str]:
    """Return the column of each field; a field without a column is not among them."""
    names = [part.partition("=")[::2] for part in text.split(",") if part.strip()]
    columns = {field.strip(): column.strip() for field, column in names}
    paths = columns.keys() & {"path", _ENCODED}
    wrong = columns.keys() - {*_DEFAULTS, _ENCODED} or not all(columns.values())
    if wrong or len(columns) < len(names) or len(paths) > 1:
        raise InputError(
            f"{text!r} does not name columns of a listing: expected path or {_ENCODED}, size, time "
            "and etag, each at most once",
            next_step="write for example path=Key,size=Size,time=LastModifiedDate,etag=ETag",
        )
    numbered = [column.isdecimal() for column in columns.values()]
    if any(numbered):
        if not all(numbered) or not paths or not columns.keys() >= {"size", "time"}:
            raise InputError(
                f"{text!r} does not name columns of a listing without a header: expected numbers "
                "of path, size, time, and perhaps etag",
                next_step="write for example encoded_path=2,size=3,time=4,etag=5",
            )
        return columns
    defaults = {field: column for field, column in _DEFAULTS.items() if field not in columns}
    if paths:
        defaults.pop("path", None)
    return {**defaults, **columns}


def _read(source: str) -> tuple[int, bytes]:
    """Return when a file was written, and its bytes without compression."""
    url = parse_url(source if ":" in source else os.path.abspath(source))
    directory, _, name = url.key_prefix.rpartition("/")
    if not name or url.backend == "memory":
        raise InputError("not the path or URL of a listing", path=redact_url(source))
    place = open_store(replace(url, key_prefix=directory))
    info = place.head(StatePath(name))
    if info is None:
        raise NotFoundError("there is no such listing", path=redact_url(source))
    if info.modified_micros is None:
        raise InputError(
            "the time of the listing is unknown: its store reports none",
            path=redact_url(source),
            next_step="copy it to a disk or bucket, and keep its time; nothing was deleted",
        )
    if info.size_bytes > _MOST_FILE_BYTES:
        raise _too_large(source, info.size_bytes, _MOST_FILE_BYTES)
    data = place.read(StatePath(name))
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_MOST_PLAIN_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _undecodable(source, error) from error
        if len(data) > _MOST_PLAIN_BYTES:
            raise _too_large(source, len(data), _MOST_PLAIN_BYTES)
    return info.modified_micros, data


def _too_large(source: str, found: int, most: int) -> InputError:
    return InputError(
        f"a file of the listing has {found} bytes: expected at most {most}",
        path=redact_url(source),
        next_step="write the listing in smaller files, or plan without one",
    )


def _undecodable(source: str, error: BaseException) -> FormatError:
    problem = str(error).partition("\n")[0][:_MOST_LETTERS]
    return FormatError(
        f"a file of the listing does not decode, or is truncated ({problem})",
        path=redact_url(source),
        next_step="make a new listing, or plan without one; nothing was deleted",
    )


def _table(data: bytes, names: Mapping[str, str], source: str) -> pl.DataFrame:
    """Return the rows of a file: path, size, time in microseconds of UTC, etag (perhaps null)."""
    try:
        frame = _columns(data, names, source)
        etag = pl.col("etag") if "etag" in frame.columns else pl.lit(None)
        times = frame.schema["time"]
        if times == pl.String:
            zoned = pl.col("time").str.replace(" ", "T").str.replace("Z$", "+00:00")
            time = zoned.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f%:z", time_unit="us")
        elif isinstance(times, pl.Datetime):
            time = pl.col("time")  # without a zone, of UTC
        else:
            raise FormatError(
                f"the times of the listing are of type {times}: expected times with a zone",
                path=redact_url(source),
                next_step="write times as 2026-11-20T01:00:00Z, or as timestamps of Parquet",
            )
        return frame.select(
            pl.col("path").cast(pl.String),
            pl.col("size").cast(pl.Int64),
            time.dt.timestamp("us").alias("time"),
            etag.cast(pl.String).alias("etag"),
        )
    except pl.exceptions.PolarsError as error:
        raise _undecodable(source, error) from error


def _columns(data: bytes, names: Mapping[str, str], source: str) -> pl.DataFrame:
    """Return the columns of a file, by the names of their fields; keys are decoded."""
    file: Any = io.BytesIO(data)
    numbered = names["size"].isdecimal()
    if data[:4] == b"PAR1":
        present = list(pl.read_parquet_schema(file))
        used = [name for name in names.values() if name in present]
        file.seek(0)
        frame = pl.read_parquet(file, columns=used)
    else:
        frame = pl.read_csv(file, has_header=not numbered, infer_schema=False, null_values=[""])
        if numbered:
            frame.columns = [str(number + 1) for number in range(frame.width)]
    columns = dict(names)
    if columns.get("etag") == _DEFAULTS["etag"] and _DEFAULTS["etag"] not in frame.columns:
        del columns["etag"]  # a column that was named otherwise must exist
    missing = [name for name in columns.values() if name not in frame.columns]
    if missing:
        raise FormatError(
            f"the listing has the columns {', '.join(frame.columns):.{_MOST_LETTERS}}: expected "
            f"{missing[0]}",
            path=redact_url(source),
            next_step="name its columns: --listing-columns path=…,size=…,time=…,etag=…",
        )
    frame = frame.select(pl.col(name).alias(field) for field, name in columns.items())
    if _ENCODED not in columns:
        return frame
    keys = [None if key is None else unquote_plus(key) for key in frame[_ENCODED].cast(pl.String)]
    return frame.drop(_ENCODED).with_columns(pl.Series("path", keys, pl.String))


def _current(rows: pl.DataFrame, cut: int) -> Iterator[StoredObject]:
    """Yield the newest version of each object, in order of name; none if that is not certain.

    An object that is left out stays.

    Args:
        cut: how many characters of a key the checkpoint URL is.
    """
    newest = pl.col("time").is_not_null().all() & (pl.col("time") == pl.col("time").max())
    versions = rows.unique().filter(newest.over("path"))
    single = versions.filter((pl.len() == 1).over("path") & (pl.col("size") >= 0))
    for path, size, micros, etag in single.sort("path").iter_rows():
        plain = None if etag is None else plain_etag(etag)
        yield StoredObject(StoredName(path[cut:]), size, micros, plain)
