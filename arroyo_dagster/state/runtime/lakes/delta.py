"""A version of a Delta table, through the package deltalake; needs `arroyo-dagster[delta]`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError, StorageError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, redacted_cause, register_settings
from arroyo_dagster.state.runtime.lakes.snapshot import (
    ColumnKey,
    LakeColumn,
    LakeFile,
    LakeSnapshot,
    located,
)
from arroyo_dagster.state.storage.remote.obstore_options import obstore_options
from arroyo_dagster.state.storage.urls import CheckpointUrl, parse_url

if TYPE_CHECKING:
    from deltalake import DeltaTable

_READ_HERE = frozenset(
    {
        *("columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint"),
        *("typeWidening", "typeWidening-preview", "vacuumProtocolCheck"),
    }
)
_NEWEST_READER = 3
_MAPPING = "delta.columnMapping"
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_TYPES = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_COMPACT = "rewrite it without (`REORG TABLE … APPLY (PURGE)`), or export the events to Parquet"


def delta_snapshot(
    url: str, version: int | None = None, options: Mapping[str, Any] | None = None
) -> LakeSnapshot:
    """Return a Delta table at a version; reads its log, and none of its files.

    Args:
        url: any URL that the checkpoint URL may have.
        version: None = the newest.
        options: of the store's client, as `open_store` takes them; also for deltalake.

    Raises:
        InputError: deltalake is not installed; the URL is none; the table has no such version; or
            it needs what is not read here: deletion vectors, or another feature.
        NotFoundError: there is no Delta table.
        StorageError: the store failed.
    """
    with explained_imports():
        import deltalake  # noqa: F401
    given = {name: value for name, value in (options or {}).items() if name != "client"}
    register_settings(given)
    parsed = parse_url(url)
    name = f"the Delta table {parsed}"
    table = _opened(name, parsed, version, given)
    _check_features(name, table)
    _check_deletion_vectors(name, table)
    try:
        fields = json.loads(table.schema().to_json())["fields"]
        actions = pa.table(table.get_add_actions(flatten=False))
    except Exception as error:
        raise _failed(name, version, error) from redacted_cause(error)
    mode = table.metadata().configuration.get(f"{_MAPPING}.mode", "none")
    columns = [(one["name"], one["type"], _column(one, mode)) for one in fields]
    keys = {name: _key(one, mode) for name, one in ((one["name"], one) for one in fields)}
    return LakeSnapshot(
        name=name,
        version=f"version {table.version()} (table {table.metadata().id})",
        pin=f"version: {table.version()}",
        columns=tuple(column for _, _, column in columns if column is not None),
        files=tuple(_files(name, parsed, actions, keys)),
        unreadable={name: str(kind) for name, kind, column in columns if column is None},
        options=dict(options or {}),
    )


def _opened(
    name: str, url: CheckpointUrl, version: int | None, options: Mapping[str, Any]
) -> DeltaTable:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        uri, storage = _client(url, options)
        return DeltaTable(uri, version=version, storage_options=storage)
    except ArroyoStateError:
        raise
    except TableNotFoundError as error:
        raise NotFoundError(
            f"{name} does not exist: there is no `_delta_log`",
            next_step="give the folder of the table, the one that contains `_delta_log`",
        ) from redacted_cause(error)
    except Exception as error:
        raise _failed(name, version, error) from redacted_cause(error)


def _client(url: CheckpointUrl, options: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return how deltalake reaches the table: as our own client does, with the same keys."""
    if url.backend == "file":
        return url.directory, {}
    found = obstore_options(url, options)
    config = {name: str(value) for name, value in found.config.items() if value is not None}
    if found.provider is not None:
        keys = found.provider()
        config |= {name: str(keys[name]) for name in ("access_key_id", "secret_access_key")}
        if keys["token"]:
            config["session_token"] = keys["token"]
    if url.backend in ("s3", "r2"):
        config = {f"aws_{name.removeprefix('aws_')}": value for name, value in config.items()}
    scheme = {"s3": "s3", "r2": "s3", "gs": "gs"}.get(url.backend)
    uri = f"{scheme}://{url.bucket}/{url.key_prefix}" if scheme else str(url)
    return uri.rstrip("/"), {**config, "allow_http": "true"}


def _failed(name: str, version: int | None, error: Exception) -> ArroyoStateError:
    reason = redact_text(str(error)).splitlines()[0][:300]
    if re.search(r"[Uu]nsupported|not supported", reason):
        return InputError(
            f"{name} needs a reader that deltalake is not ({reason})",
            next_step="export the events to Parquet",
        )
    if version is not None and re.search(r"[Vv]ersion", reason):
        return InputError(
            f"{name} cannot be read at version {version} ({reason})",
            next_step="give a version whose log still exists; `DESCRIBE HISTORY` lists them",
        )
    return StorageError(
        f"{name} cannot be read: deltalake failed ({reason})",
        retryable=True,
        next_step="check the path, and `options` with the credentials of its store",
    )


# ---- what is not read here -----------------------------------------------------------------------


def _check_features(name: str, table: DeltaTable) -> None:
    protocol = table.protocol()
    strange = sorted({*(protocol.reader_features or ())} - _READ_HERE)
    if protocol.min_reader_version > _NEWEST_READER:
        strange.append(f"reader version {protocol.min_reader_version}")
    if strange:
        raise InputError(
            f"{name} needs what is not read here: {', '.join(strange)}",
            next_step="drop the feature from the table, or export the events to Parquet",
        )


def _check_deletion_vectors(name: str, table: DeltaTable) -> None:
    """Refuse files of which some rows are deleted; a table that may have such files is read."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return
    try:
        found = any(batch.num_rows for batch in table.deletion_vectors())
    except Exception as error:
        raise InputError(
            f"{name} may have deletion vectors, and they cannot be read "
            f"({redact_text(str(error)).splitlines()[0][:300]})",
            next_step=_COMPACT,
        ) from redacted_cause(error)
    if found:
        raise InputError(
            f"{name} has deletion vectors: deleted rows that are still in its files",
            next_step=_COMPACT,
        )


# ---- columns and files ---------------------------------------------------------------------------


def _key(one: Mapping[str, Any], mode: str) -> ColumnKey:
    """Return how files name a field of the schema."""
    if mode == "id":
        return int(one["metadata"][f"{_MAPPING}.id"])
    if mode == "name":
        return str(one["metadata"][f"{_MAPPING}.physicalName"])
    return str(one["name"])


def _column(one: Mapping[str, Any], mode: str) -> LakeColumn | None:
    """Return a field of the schema; None if its type is not read here."""
    found = _typed(one["type"], mode)
    if found is None:
        return None
    kind, children = found
    return LakeColumn(
        name=one["name"],
        key=_key(one, mode),
        kind=kind,
        children=children,
        nullable=one.get("nullable", True),
    )


def _typed(kind: Any, mode: str) -> tuple[pa.DataType, tuple[LakeColumn, ...]] | None:
    if isinstance(kind, str):
        decimal = _DECIMAL.fullmatch(kind)
        leaf = _TYPES.get(kind) if decimal is None else pa.decimal128(*map(int, decimal.groups()))
        return None if leaf is None else (leaf, ())
    if kind["type"] == "struct":
        fields = [_column(one, mode) for one in kind["fields"]]
        found = tuple(one for one in fields if one is not None)
        if len(found) < len(fields):
            return None
        return pa.struct([(one.name, one.kind) for one in found]), found
    if kind["type"] == "array":
        element = _typed(kind["elementType"], mode)
        if element is None:
            return None
        return pa.list_(element[0]), (_item(*element),)
    pair = _typed(kind["keyType"], mode), _typed(kind["valueType"], mode)
    if pair[0] is None or pair[1] is None:
        return None
    return pa.map_(pair[0][0], pair[1][0]), (_item(*pair[0]), _item(*pair[1]))


def _item(kind: pa.DataType, children: tuple[LakeColumn, ...]) -> LakeColumn:
    """Return an element of a list, or a key or value of a map: files have one, by its place."""
    return LakeColumn(name="", key="", kind=kind, children=children)


def _files(
    name: str, table: CheckpointUrl, actions: pa.Table, keys: Mapping[str, ColumnKey]
) -> Iterator[LakeFile]:
    root, prefix = located(table)
    partitions = (
        actions.column("partition").to_pylist()
        if "partition" in actions.column_names
        else [{}] * actions.num_rows
    )
    for path, size, values in zip(
        actions.column("path").to_pylist(),
        actions.column("size_bytes").to_pylist(),
        partitions,
        strict=True,
    ):
        # The log encodes names as URLs.
        stored = unquote(path)
        at, key = (root, "/".join(filter(None, (prefix, stored))))
        if "://" in path or path.startswith(("/", "file:")):
            at, key = located(stored)
        if not isinstance(size, int):
            raise InputError(f"{name}: the log has a file without its size", file=stored)
        yield LakeFile(
            root=at,
            key=key,
            size_bytes=size,
            constants={keys[column]: value for column, value in values.items()},
        )
