"""Events in a table of Delta or Iceberg, at one version: workers read its data files.

Spark needs no connector for it, and no client of the store. The version is found once, so that a
plan and its execution read the same files.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.jobs import slots
from arroyo_dagster.spark.tasks import TASKS_PER_SLOT
from arroyo_dagster.state.model.surgery.declared import DELTA, EventSource
from arroyo_dagster.state.runtime.lakes.delta import delta_snapshot
from arroyo_dagster.state.runtime.lakes.iceberg import catalog_snapshot, iceberg_snapshot
from arroyo_dagster.state.runtime.lakes.rows import read_rows
from arroyo_dagster.state.runtime.lakes.snapshot import (
    LakeColumn,
    LakeSnapshot,
    columns_schema,
    located,
)
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import CheckpointUrl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COUNT = re.compile(r"(?i)\bcount\s*\(\s*\*\s*\)")
_ALL = re.compile(r"[(,.]\s*\*|\*\s*[),]|^\s*\*")
_STORES: dict[tuple[str, str], ObjectStore] = {}
"""Of a worker: a store by its root and options."""


def lake_snapshot(source: EventSource) -> LakeSnapshot:
    """Return the version of a table that holds events.

    Raises:
        InputError, NotFoundError, StorageError: as `delta_snapshot` and `iceberg_snapshot`.
    """
    if source.path is not None:
        try:
            located(source.path)
        except InputError as error:
            raise InputError(
                f"the events {source.name!r}: `path` is no absolute path, and no URL of a store",
                path=source.path,
                next_step="give the folder of the table, or a URL such as s3://bucket/table",
            ) from error
    if source.format == DELTA:
        return delta_snapshot(str(source.path), source.version, source.options)
    if source.table is not None:
        return catalog_snapshot(source.table, source.catalog, source.version, source.options)
    return iceberg_snapshot(str(source.path), source.version, source.options)


def lake_frame(
    session: SparkSession, snapshot: LakeSnapshot, used_in: Sequence[str] | None = None
) -> DataFrame:
    """Return the rows of a table; nothing is read yet.

    Args:
        used_in: the SQL that reads them: columns that it does not name are left out. None = all.

    Raises:
        InputError: it names a column whose type is not read.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    columns = _used(snapshot, used_in)
    tasks = [pickle.dumps(some) for some in snapshot.tasks(slots(session) * TASKS_PER_SLOT)]
    read = partial(_read, tasks, columns, snapshot.name, dict(snapshot.options))
    numbers = session.range(0, len(tasks), 1, max(1, len(tasks)))
    schema = from_arrow_schema(columns_schema(columns), prefer_timestamp_ntz=True)
    return numbers.mapInArrow(read, schema)


def reads_all(sql: str) -> bool:
    """Return whether an expression may read columns that it does not name: `struct(*)`."""
    return bool(_ALL.search(_COUNT.sub("", sql)))


def _used(snapshot: LakeSnapshot, used_in: Sequence[str] | None) -> tuple[LakeColumn, ...]:
    if used_in is None or any(map(reads_all, used_in)):
        return snapshot.columns
    text = "\n".join(used_in).lower()
    named = tuple(one for one in snapshot.columns if one.name.lower() in text)
    return named or snapshot.columns[:1]


def check_readable(snapshot: LakeSnapshot, used_in: Sequence[str], place: str) -> None:
    """Check that no expression names a column whose type is not read.

    Raises:
        InputError: one does.
    """
    text = "\n".join(used_in).lower()
    for name, kind in snapshot.unreadable.items():
        if re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", text):
            raise InputError(
                f"{place}: column {name!r} of {snapshot.name} is {kind}, which is not read",
                next_step="do without it, or export the events to Parquet with another type",
            )


def _read(
    tasks: Sequence[bytes],
    columns: tuple[LakeColumn, ...],
    table: str,
    options: Mapping[str, Any],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the files of the tasks whose numbers come."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for file in pickle.loads(tasks[number]):
                yield from read_rows(_store(file.root, options), file, columns, table)


def _store(root: CheckpointUrl, options: Mapping[str, Any]) -> ObjectStore:
    key = str(root), repr(sorted(options.items()))
    if key not in _STORES:
        _STORES[key] = open_store(root, options=options)
    return _STORES[key]
