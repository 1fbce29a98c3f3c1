"""Read an inventory of a store: S3 Inventory (CSV, Parquet), plain Parquet, plain CSV.

An inventory is an old listing that somebody else made. Here it becomes a value about one job;
`inventory_listing` decides what of it counts.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote_plus

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.state.codec.records import decode_fields
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import Packed, StoredObject
from arroyo_dagster.state.storage.local_documents import MOST_BYTES
from arroyo_dagster.state.storage.names import StoredName, encode_path, listed_path
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.storage.urls import CheckpointUrl, parse_url

OpenStore = Callable[[str | CheckpointUrl], ObjectStore]

_NAMES = {"lastmodified": "lastmodifieddate"}
_NEEDED = ("key", "size", "lastmodifieddate")
_USED = (*_NEEDED, "bucket", "etag", "islatest", "isdeletemarker")
_MOST_FILE_BYTES = 1 << 29
_ANOTHER = "make a new inventory, or plan without one; nothing was deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInventory:
    """What an inventory of a store says about the objects of one job.

    Attributes:
        source: where it was read, for people.
        made_at_micros: when it was made: as its manifest says, else when its file was written.
        stored: the current version of each object, under its stored name, in the order of a
            listing. Objects whose current version is not certain are left out.
        rows: the number of its rows, of this job and others.
    """

    source: str
    paths: JobPaths
    made_at_micros: int
    stored: Packed
    rows: int

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield the objects as a listing would."""
        for one in self.stored:
            path = listed_path(one.path)
            yield ObjectInfo(
                path=path,
                size_bytes=one.size_bytes or 0,
                modified_micros=one.modified_micros,
                etag=one.etag,
                addressable=not isinstance(path, StoredName),
            )


def read_store_inventory(
    source: str, store: ObjectStore, paths: JobPaths, *, open_at: OpenStore = open_store
) -> StoreInventory:
    """Read what an inventory says about one job.

    Args:
        source: a path or URL: `manifest.json` of S3 Inventory with parts in CSV or Parquet; or one
            file, `.parquet`, `.csv` or `.csv.gz`, with the columns key, size and last_modified, and
            perhaps bucket, etag, is_latest and is_delete_marker. Keys are as in the bucket; on
            local disk, relative to the checkpoint URL. Times have a zone.
        store: the store of the job.
        open_at: opens the store of the inventory.

    Raises:
        InputError: it is not one of these formats, or of another bucket.
        NotFoundError: it does not exist.
        ProtocolError: it is incomplete: a part is missing or damaged; or it contains nothing below
            the job.
        FormatError: it does not decode.
    """
    place, name = _located(source, open_at)
    if name.name.endswith(".json"):
        made_at, parts = _s3_files(place, name, source, store, open_at)
    else:
        info = place.head(name)
        if info is None:
            raise NotFoundError("there is no such inventory", path=redact_url(source))
        if info.modified_micros is None:
            raise InputError(
                "the time of the inventory is unknown: its store reports none",
                path=redact_url(source),
                next_step="use an inventory with a manifest.json; nothing was deleted",
            )
        made_at = info.modified_micros
        parts = iter([_InventoryFile(_read(place, name), name, _format(name), None)])
    return _of_job(source, store, paths, made_at, parts)


# ---- where it is ---------------------------------------------------------------------------------


def _located(source: str, open_at: OpenStore) -> tuple[ObjectStore, StatePath]:
    """Return the store of the directory of an inventory, and the name of the inventory in it."""
    url = parse_url(source if ":" in source else os.path.abspath(source))
    directory, _, name = url.key_prefix.rpartition("/")
    if not name or url.backend == "memory":
        raise InputError("not the path or URL of an inventory", path=redact_url(source))
    return open_at(replace(url, key_prefix=directory)), StatePath(name)


@dataclass(frozen=True, slots=True)
class _InventoryFile:
    """One file of an inventory.

    Attributes:
        encoding: `csv` or `parquet`.
        columns: of a CSV file without a header, whose keys are URL-encoded; None = it has one.
    """

    data: bytes
    path: str
    encoding: str
    columns: Sequence[str] | None


def _format(name: str) -> str:
    for suffix, encoding in ((".parquet", "parquet"), (".csv", "csv"), (".csv.gz", "csv")):
        if name.endswith(suffix):
            return encoding
    raise InputError(
        "not an inventory that can be read: expected manifest.json, .parquet, .csv or .csv.gz",
        path=name,
    )


# ---- S3 Inventory --------------------------------------------------------------------------------


def _s3_files(
    place: ObjectStore, name: StatePath, source: str, store: ObjectStore, open_at: OpenStore
) -> tuple[int, Iterator[_InventoryFile]]:
    """Return when an S3 Inventory was made, and its parts; each is read when it is asked for."""
    try:
        data = _read(place, name, MOST_BYTES)
    except NotFoundError as error:
        raise NotFoundError("there is no such inventory", path=redact_url(source)) from error
    _check_manifest(place, name, data, source)
    with decode_fields(data, name) as fields:
        bucket, made_at = fields.text("sourceBucket"), fields.text("creationTimestamp")
        encoding, schema = fields.text("fileFormat").lower(), fields.text("fileSchema")
        files = [file for file in fields.list("files") if isinstance(file, dict)]
    expected = parse_url(store.url).bucket
    if bucket.rpartition(":")[2] != expected:
        raise InputError(
            f"the inventory is of bucket {bucket!r}: expected {expected or 'no bucket'!r}",
            path=redact_url(source),
            next_step="give the inventory of the bucket in the checkpoint URL; nothing was deleted",
        )
    if encoding not in ("csv", "parquet"):
        raise InputError(
            f"an inventory in the format {encoding.upper()} cannot be read: expected CSV or "
            "Parquet",
            path=redact_url(source),
            next_step="change the format of the inventory configuration",
        )
    if not (made_at.isdecimal() and len(made_at) <= 15):
        raise FormatError("creationTimestamp is not a number of milliseconds", path=name)
    columns = [column.strip() for column in schema.split(",")] if encoding == "csv" else None
    read = _file_reader(source, place, open_at)
    parts = (
        _InventoryFile(_checked(read, file, name), str(file["key"]), encoding, columns)
        for file in files
    )
    return int(made_at) * 1000, parts


def _check_manifest(place: ObjectStore, name: StatePath, data: bytes, source: str) -> None:
    """Compare the manifest with the checksum that S3 writes beside it, if there is one."""
    try:
        checksum = place.read(StatePath("manifest.checksum")).decode("ascii", "replace").strip()
    except NotFoundError:
        return
    if name.name == "manifest.json" and checksum.lower() != _md5(data):
        raise ProtocolError(
            "the manifest of the inventory does not match manifest.checksum",
            path=redact_url(source),
            next_step=_ANOTHER,
        )


def _file_reader(source: str, place: ObjectStore, open_at: OpenStore) -> Callable[[str], bytes]:
    """Return a function that reads a part by its key in the bucket of the inventory.

    On local disk, parts are looked for below the directory of the manifest and its parent, by their
    key or their last names.
    """
    url = parse_url(source if ":" in source else os.path.abspath(source))
    if url.backend != "file":
        whole = open_at(replace(url, key_prefix=""))
        return lambda key: _read(whole, listed_path(key))
    above = open_at(replace(url, key_prefix=url.key_prefix.rpartition("/")[0].rpartition("/")[0]))

    def read(key: str) -> bytes:
        name = key.rpartition("/")[2]
        for where, path in ((place, key), (place, f"data/{name}"), (place, name)):
            if where.head(StatePath(path)) is not None:
                return _read(where, StatePath(path))
        return _read(above, StatePath(f"data/{name}"))

    return read


def _checked(read: Callable[[str], bytes], file: Mapping[str, Any], manifest: StatePath) -> bytes:
    key = file.get("key")
    if not isinstance(key, str):
        raise FormatError("a file of the inventory has no key", path=manifest)
    try:
        data = read(key)
    except NotFoundError as error:
        raise ProtocolError(
            "the inventory is incomplete: a part that its manifest lists is missing",
            path=key,
            next_step=_ANOTHER,
        ) from error
    size, checksum = file.get("size"), file.get("MD5checksum")
    if size not in (None, len(data)) or (checksum is not None and checksum != _md5(data)):
        raise ProtocolError(
            f"the inventory is incomplete: a part of {len(data)} bytes differs from the {size} "
            "bytes that its manifest lists",
            path=key,
            next_step=_ANOTHER,
        )
    return data


def _read(store: ObjectStore, path: StatePath, most_bytes: int = _MOST_FILE_BYTES) -> bytes:
    """Read a file of an inventory whole. Raises InputError: it is too large for that."""
    info = store.head(path)
    if info is not None and info.size_bytes > most_bytes:
        raise InputError(
            f"a file of the inventory has {info.size_bytes} bytes: expected at most {most_bytes}",
            path=path,
            next_step="let the inventory be written in smaller files, or plan without one",
        )
    return store.read(path)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


# ---- rows ----------------------------------------------------------------------------------------


def _of_job(
    source: str, store: ObjectStore, paths: JobPaths, made_at: int, parts: Iterator[_InventoryFile]
) -> StoreInventory:
    url = parse_url(store.url)
    local = url.backend in ("file", "memory")
    root = "" if local or not url.key_prefix else f"{encode_path(url.key_prefix)}/"
    below = f"{root}{encode_path(paths.root)}/"
    rows, found = 0, []
    for part in parts:
        for batch in _batches(part):
            rows += batch.num_rows
            _check_bucket(batch, "" if local else url.bucket, part)
            found.append(_selected(batch, below))
    table = pa.concat_tables(found) if found else pa.table({name: [] for name in _USED})
    if not table.num_rows:
        raise ProtocolError(
            f"the inventory of {rows} rows contains nothing below the job: expected keys that "
            f"begin with {below}",
            path=redact_url(source),
            next_step="give an inventory of the bucket and prefix of the checkpoint URL; nothing "
            "was deleted",
        )
    table = table.sort_by([("key", "ascending"), ("lastmodifieddate", "ascending")])
    return StoreInventory(
        source=redact_url(source),
        paths=paths,
        made_at_micros=made_at,
        stored=Packed(_current(table, len(root))),
        rows=rows,
    )


def _batches(part: _InventoryFile) -> Iterator[pa.Table]:
    """Yield the rows of a part with the columns `_USED`; a column that is not there is null."""
    try:
        for batch in _parquet(part) if part.encoding == "parquet" else _csv(part):
            yield _normalized(pa.Table.from_batches([batch]), part)
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        if isinstance(error, FormatError | ProtocolError):
            raise
        raise FormatError(
            f"a part of the inventory does not decode, or is truncated ({error})",
            path=part.path,
            next_step=_ANOTHER,
        ) from error


def _parquet(part: _InventoryFile) -> Iterator[pa.RecordBatch]:
    file = pq.ParquetFile(io.BytesIO(part.data))
    names = [name for name in file.schema_arrow.names if _name(name) in _USED]
    yield from file.iter_batches(columns=names)


def _csv(part: _InventoryFile) -> Iterator[pa.RecordBatch]:
    source: Any = io.BytesIO(part.data)
    if part.data[:2] == b"\x1f\x8b":
        source = gzip.GzipFile(fileobj=source)  # unlike Arrow's, it refuses a truncated file
    source, names = io.BufferedReader(source), part.columns
    if names is not None and not source.peek(1):
        return  # a part without rows
    if names is None:
        header = source.peek(1 << 16).split(b"\n", 1)[0].decode(errors="replace").strip()
        names = [name.strip().strip('"') for name in header.split(",")]
    reader = pa_csv.open_csv(
        source,
        read_options=pa_csv.ReadOptions(
            column_names=names, skip_rows=0 if part.columns else 1, use_threads=False
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
            null_values=[""],
        ),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
    )
    yield from reader


def _name(column: str) -> str:
    plain = column.lower().replace("_", "").replace(" ", "")
    return _NAMES.get(plain, plain)


def _normalized(rows: pa.Table, part: _InventoryFile) -> pa.Table:
    rows = rows.rename_columns([_name(name) for name in rows.column_names])
    missing = [name for name in _NEEDED if name not in rows.column_names]
    if missing or len(set(rows.column_names)) < rows.num_columns:
        raise FormatError(
            f"the inventory has the columns {', '.join(rows.column_names)}: expected key, size "
            "and last_modified, each once",
            path=part.path,
            next_step="add Size and LastModifiedDate to the fields of the inventory",
        )
    columns = {name: _typed(rows, name) for name in _USED}
    if part.columns is not None:
        decoded = [unquote_plus(key) for key in columns["key"].to_pylist() if key is not None]
        if len(decoded) < rows.num_rows:
            raise FormatError("a row of the inventory has no key", path=part.path)
        columns["key"] = pa.chunked_array([pa.array(decoded, pa.string())])
    return pa.table(columns)


_TYPES = {
    "size": pa.int64(),
    "lastmodifieddate": pa.timestamp("us", "UTC"),
    "islatest": pa.bool_(),
    "isdeletemarker": pa.bool_(),
}


def _typed(rows: pa.Table, name: str) -> pa.ChunkedArray:
    kind = _TYPES.get(name, pa.string())
    if name not in rows.column_names:
        return pa.chunked_array([pa.nulls(rows.num_rows, kind)])
    column = rows.column(name)
    if name == "lastmodifieddate" and pa.types.is_integer(column.type):
        raise pa.ArrowInvalid("last_modified is a number: expected a time with a zone")
    if pa.types.is_boolean(kind) and pa.types.is_string(column.type):
        column = pc.utf8_lower(column)
    return column.cast(kind, safe=name != "lastmodifieddate")


def _check_bucket(rows: pa.Table, expected: str, part: _InventoryFile) -> None:
    others = [name for name in pc.unique(rows.column("bucket")).to_pylist() if name is not None]
    strange = next((name for name in others if name != expected), None)
    if strange is not None and expected:
        raise InputError(
            f"the inventory contains objects of bucket {strange!r}: expected {expected!r}",
            path=part.path,
            next_step="give the inventory of the bucket in the checkpoint URL; nothing was deleted",
        )


def _selected(rows: pa.Table, below: str) -> pa.Table:
    chosen = pc.fill_null(pc.starts_with(rows.column("key"), below), False)
    return rows.filter(chosen)


# ---- versions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    size: int | None
    micros: int | None
    etag: str | None
    latest: bool | None
    deleted: bool

    @property
    def facts(self) -> tuple[object, ...]:
        return (self.size, self.micros, self.etag, self.deleted)


def _current(rows: pa.Table, cut: int) -> Iterator[StoredObject]:
    """Yield the current version of each object, in order of name.

    Args:
        rows: sorted by key and time.
        cut: how many characters of a key the checkpoint URL is.
    """
    versions: list[_Row] = []
    for row in _rows(rows):
        if versions and versions[0].key != row.key:
            yield from _current_of(versions, cut)
            versions = []
        versions.append(row)
    if versions:
        yield from _current_of(versions, cut)


def _rows(rows: pa.Table) -> Iterator[_Row]:
    for batch in rows.to_batches(max_chunksize=1 << 16):
        micros = batch.column("lastmodifieddate").cast(pa.int64())
        names = ("key", "size", "etag", "islatest", "isdeletemarker")
        columns = [batch.column(name).to_pylist() for name in names]
        for key, size, etag, latest, deleted, at in zip(*columns, micros.to_pylist(), strict=True):
            plain = None if etag is None else plain_etag(etag)
            yield _Row(key, size, at, plain, latest, deleted is True)


def _current_of(versions: Sequence[_Row], cut: int) -> Iterator[StoredObject]:
    """Yield the current version among all rows of one key; none if that is not certain.

    An object that is left out stays.
    """
    named = [row for row in versions if row.latest is not None]
    if named:
        chosen = [row for row in named if row.latest]
    else:
        chosen = [row for row in versions if row.micros == versions[-1].micros]
    if len({row.facts for row in chosen}) != 1:
        return
    row = chosen[0]
    if row.deleted or row.size is None or row.size < 0 or row.micros is None:
        return
    yield StoredObject(StoredName(row.key[cut:]), row.size, row.micros, row.etag)


def plain_etag(etag: str) -> str:
    """Return an etag without quotes and weakness, as inventories have it."""
    return etag.removeprefix("W/").strip('"').lower()
