"""A snapshot of an Iceberg table, through the package pyiceberg; needs `arroyo-dagster[iceberg]`.

Metadata and manifests are read through our own store, so that its options are those of the data
files, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

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
from arroyo_dagster.state.storage.names import ForeignName
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import parse_url

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.types import IcebergType, NestedField

_METADATA = re.compile(r"v?(\d+)(?:-[^/]*)?(?:\.gz)?\.metadata\.json(?:\.gz)?")
_COMPACT = "compact the table (`rewrite_data_files`), or export the events to Parquet"


def iceberg_snapshot(
    path: str, snapshot: int | None = None, options: Mapping[str, Any] | None = None
) -> LakeSnapshot:
    """Return the Iceberg table of a metadata file at a snapshot; reads none of its data files.

    Args:
        path: a metadata file, or the folder of the table, whose newest one is taken.
        snapshot: its id; None = the current one.
        options: of the store's client, as `open_store` takes them.

    Raises:
        InputError: pyiceberg is not installed; the table has no such snapshot, or has what is not
            read here: rows that delete files remove, or files that are not Parquet; or the newest
            metadata file is not the only one of its number.
        NotFoundError: there is no metadata file.
        StorageError: the store failed.
    """
    with explained_imports():
        import pyiceberg  # noqa: F401
    files = _Files(dict(options or {}))
    location, guessed = path, False
    if not path.endswith((".metadata.json", ".metadata.json.gz")):
        location, guessed = _newest_metadata(path, files), True
    shown = str(parse_url(location))
    name = f"the Iceberg table {shown.rpartition('/metadata/')[0] or shown}"
    unknown = (
        (
            f"{name}: whether its catalog has committed {location.rpartition('/')[2]}, the newest "
            "metadata file of the folder",
        )
        if guessed
        else ()
    )
    return _snapshot(name, _loaded(name, location, files), snapshot, files, unknown)


def catalog_snapshot(
    table: str,
    catalog: str | None = None,
    snapshot: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> LakeSnapshot:
    """Return a table of an Iceberg catalog at a snapshot; see `iceberg_snapshot`.

    Args:
        table: `namespace.table`.
        catalog: the catalog, as pyiceberg's own configuration names it; None = `default`.
        options: of the store's client, for the files of the table; the catalog has its own.

    Raises:
        NotFoundError: the catalog has no such table.
        StorageError: the catalog failed.
    """
    with explained_imports():
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    name = f"the Iceberg table {table}"
    try:
        location = load_catalog(catalog).load_table(table).metadata_location
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise NotFoundError(
            f"{name} does not exist in the catalog {catalog or 'default'!r}",
            next_step="give `table: NAMESPACE.TABLE` and `catalog`, as pyiceberg names them",
        ) from error
    except Exception as error:
        raise StorageError(
            f"{name}: the catalog {catalog or 'default'!r} failed ({_reason(error)})",
            retryable=True,
            next_step="check pyiceberg's configuration of this catalog",
        ) from redacted_cause(error)
    files = _Files(dict(options or {}))
    return _snapshot(name, _loaded(name, location, files), snapshot, files, ())


# ---- metadata ------------------------------------------------------------------------------------


class _Files:
    """What pyiceberg needs of a `FileIO` to read."""

    properties: Mapping[str, str] = {}

    def __init__(self, options: dict[str, Any]) -> None:
        register_settings(options)
        self.options = options
        self._stores: dict[str, ObjectStore] = {}

    def new_input(self, location: str) -> _Input:
        return _Input(location, *self.at(location))

    def at(self, location: str) -> tuple[ObjectStore, str]:
        """Return the store of a location, and the name there."""
        root, key = located(location)
        store = self._stores.setdefault(str(root), open_store(root, options=self.options))
        return store, key


class _Input:
    """A file that is read from a store."""

    def __init__(self, location: str, store: ObjectStore, key: str) -> None:
        self.location = location
        self._store = store
        self._path = ForeignName(key)

    def __len__(self) -> int:
        found = self._store.head(self._path)
        return 0 if found is None else found.size_bytes

    def exists(self) -> bool:
        return self._store.head(self._path) is not None

    def open(self, seekable: bool = True) -> BinaryIO:
        return self._store.open_input(self._path)


def _newest_metadata(path: str, files: _Files) -> str:
    """Return the metadata file with the highest number in the folder of a table.

    Raises:
        NotFoundError: there is none.
        InputError: several have this number.
    """
    folder = path.rstrip("/")
    listed = open_store(folder, options=files.options).list_dir("metadata").objects
    found: dict[int, list[str]] = {}
    for one in listed:
        match = _METADATA.fullmatch(one.path.rpartition("/")[2])
        if match is not None:
            found.setdefault(int(match[1]), []).append(one.path)
    if not found:
        raise NotFoundError(
            f"{path} is no Iceberg table: its folder `metadata` has no `….metadata.json`",
            next_step="give the folder of the table, or its metadata file",
        )
    newest = found[max(found)]
    if len(newest) > 1:
        raise InputError(
            f"the Iceberg table {folder} has several metadata files of the highest number: "
            f"{', '.join(sorted(one.rpartition('/')[2] for one in newest))}",
            next_step="give the path of the one that its catalog names",
        )
    return f"{folder}/{newest[0]}"


def _loaded(name: str, location: str, files: _Files) -> Table:
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import StaticTable

    source: Any = files.new_input(location)
    try:
        metadata = FromInputFile.table_metadata(source)
        catalog = NoopCatalog("static")
        return StaticTable(("static", location), metadata, location, files, catalog)  # type: ignore[arg-type]
    except ArroyoStateError:
        raise
    except Exception as error:
        raise InputError(
            f"{name}: its metadata cannot be read ({_reason(error)})", file=location
        ) from redacted_cause(error)


def _reason(error: Exception) -> str:
    return (redact_text(str(error)) or type(error).__name__).splitlines()[0][:300]


# ---- a snapshot ----------------------------------------------------------------------------------


def _snapshot(
    name: str, table: Table, snapshot: int | None, files: _Files, unknown: tuple[str, ...]
) -> LakeSnapshot:
    if snapshot is not None and table.snapshot_by_id(snapshot) is None:
        known = [str(one.snapshot_id) for one in table.snapshots()[-5:]]
        raise InputError(
            f"{name} has no snapshot {snapshot}",
            newest=", ".join(known) or "none",
            next_step="give one of its snapshots",
        )
    scan = table.scan(snapshot_id=snapshot)
    schema = scan.projection()
    try:
        tasks = list(scan.plan_files())
    except ArroyoStateError:
        raise
    except Exception as error:
        if "equality deletes" in str(error):
            raise _deletes(name) from error
        raise StorageError(
            f"{name}: its manifests cannot be read ({_reason(error)})", retryable=True
        ) from redacted_cause(error)
    mapping = _file_names(table)
    fields = [(one, _column(one, mapping)) for one in schema.fields]
    current = table.current_snapshot()
    number = snapshot if snapshot is not None else current and current.snapshot_id
    version = "no snapshot" if number is None else f"snapshot {number}"
    return LakeSnapshot(
        name=name,
        version=f"{version} (table {table.metadata.table_uuid}, schema {schema.schema_id})",
        pin=None if number is None else f"snapshot: {number}",
        columns=tuple(column for _, column in fields if column is not None),
        files=tuple(_file(name, table, one, schema) for one in tasks),
        unreadable={one.name: str(one.field_type) for one, column in fields if column is None},
        unknown=unknown,
        options=files.options,
    )


def _deletes(name: str) -> InputError:
    return InputError(
        f"{name} has delete files: deleted rows that are still in its data files",
        next_step=_COMPACT,
    )


def _file(name: str, table: Table, task: FileScanTask, schema: Schema) -> LakeFile:
    if task.delete_files:
        raise _deletes(name)
    file = task.file
    kind = getattr(file.file_format, "value", str(file.file_format))
    if kind.upper() != "PARQUET":
        raise InputError(
            f"{name} has a file of {kind}, and only Parquet is read",
            file=file.file_path,
            next_step=_COMPACT,
        )
    root, key = located(file.file_path)
    return LakeFile(
        root=root,
        key=key,
        size_bytes=file.file_size_in_bytes,
        constants=dict(_constants(table, file, schema)),
    )


def _constants(table: Table, file: DataFile, schema: Schema) -> Iterator[tuple[ColumnKey, Any]]:
    """Yield the values of columns that the file may lack, because it is a partition of them.

    Source: the specification of Iceberg, `Column Projection`.
    """
    for place, field in enumerate(table.specs()[file.spec_id].fields):
        if str(field.transform) == "identity" and field.source_id in schema.field_ids:
            yield field.source_id, file.partition[place]


# ---- columns -------------------------------------------------------------------------------------


def _file_names(table: Table) -> Mapping[int, tuple[str, ...]]:
    """Return the names of fields in files without field ids."""
    found: dict[int, tuple[str, ...]] = {}

    def add(fields: Iterable[Any]) -> None:
        for one in fields:
            if one.field_id is not None:
                found[one.field_id] = tuple(one.names)
            add(one.fields)

    mapping = table.name_mapping()
    if mapping is not None:
        add(mapping.root)
    return found


def _column(field: NestedField, names: Mapping[int, tuple[str, ...]]) -> LakeColumn | None:
    """Return a field of the schema; None if its type is not read here."""
    found = _typed(field.field_type, names)
    if found is None:
        return None
    kind, children = found
    return LakeColumn(
        name=field.name,
        key=field.field_id,
        names=names.get(field.field_id, ()),
        kind=kind,
        children=children,
        nullable=not field.required,
        default=field.initial_default,
    )


def _typed(
    kind: IcebergType, names: Mapping[int, tuple[str, ...]]
) -> tuple[pa.DataType, tuple[LakeColumn, ...]] | None:
    from pyiceberg import types

    leaves: Mapping[type[IcebergType], pa.DataType] = {
        types.BooleanType: pa.bool_(),
        types.IntegerType: pa.int32(),
        types.LongType: pa.int64(),
        types.FloatType: pa.float32(),
        types.DoubleType: pa.float64(),
        types.DateType: pa.date32(),
        types.TimestampType: pa.timestamp("us"),
        types.TimestamptzType: pa.timestamp("us", "UTC"),
        types.StringType: pa.string(),
        types.BinaryType: pa.binary(),
        types.FixedType: pa.binary(),
    }
    if type(kind) in leaves:
        return leaves[type(kind)], ()
    if isinstance(kind, types.DecimalType):
        return pa.decimal128(kind.precision, kind.scale), ()
    if isinstance(kind, types.StructType):
        fields = [_column(one, names) for one in kind.fields]
        found = tuple(one for one in fields if one is not None)
        if len(found) < len(fields):
            return None
        return pa.struct([(one.name, one.kind) for one in found]), found
    if isinstance(kind, types.ListType):
        element = _column(kind.element_field, names)
        return None if element is None else (pa.list_(element.kind), (element,))
    if isinstance(kind, types.MapType):
        pair = _column(kind.key_field, names), _column(kind.value_field, names)
        if pair[0] is None or pair[1] is None:
            return None
        return pa.map_(pair[0].kind, pair[1].kind), (pair[0], pair[1])
    return None
