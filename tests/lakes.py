"""Tables of Delta and Iceberg for tests, also such that the Python libraries do not write."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.state.runtime.lakes.rows import read_rows
from arroyo_dagster.state.runtime.lakes.snapshot import LakeSnapshot
from arroyo_dagster.state.storage import open_store

Rows = list[dict[str, Any]]


def rows_of(snapshot: LakeSnapshot, at_least: int = 1) -> Rows:
    """Read a version as the workers do, task by task."""
    found: Rows = []
    for task in snapshot.tasks(at_least):
        for file in task:
            store = open_store(file.root, options=snapshot.options)
            for batch in read_rows(store, file, snapshot.columns, snapshot.name):
                found += batch.to_pylist()
    return found


def in_any_order(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


# ---- Delta ---------------------------------------------------------------------------------------


def field(name: str, kind: Any, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


def mapped(number: int) -> dict[str, Any]:
    """The metadata of a field whose name in files is another one."""
    return {
        "delta.columnMapping.id": number,
        "delta.columnMapping.physicalName": f"col-{number}",
    }


def write_delta_log(
    folder: Path,
    fields: Sequence[dict[str, Any]],
    files: Mapping[str, tuple[pa.Table, dict[str, str | None], dict[str, Any]]],
    *,
    features: Sequence[str] = (),
    configuration: Mapping[str, str] | None = None,
    partitioned_by: Sequence[str] = (),
) -> None:
    """Write a table as its first version: files with rows, partition values and more facts."""
    (folder / "_delta_log").mkdir(parents=True)
    both = {"readerFeatures": list(features), "writerFeatures": list(features)}
    schema = json.dumps({"type": "struct", "fields": list(fields)})
    lines: list[Any] = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **both}},
        {
            "metaData": {
                "id": "0815",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": schema,
                "partitionColumns": list(partitioned_by),
                "configuration": dict(configuration or {}),
                "createdTime": 1,
            }
        },
    ]
    for name, (rows, partition, more) in files.items():
        pq.write_table(rows, folder / name)
        add = {
            "path": name,
            "partitionValues": partition,
            "size": os.path.getsize(folder / name),
            "modificationTime": 1,
            "dataChange": True,
            "stats": json.dumps({"numRecords": rows.num_rows}),
        }
        lines.append({"add": {**add, **more}})
    log = folder / "_delta_log" / f"{0:020}.json"
    log.write_text("\n".join(map(json.dumps, lines)))


_ZMQ = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_RFC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def deletion_vector(*deleted: int) -> dict[str, Any]:
    """The deletion vector of some rows of a file, as its log entry has it."""
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(deleted) - 1, 16)
    bitmap += b"".join(struct.pack("<H", row) for row in deleted)
    data = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    data += b"\0" * (-len(data) % 4)
    text = base64.b85encode(data).decode().translate(str.maketrans(_RFC, _ZMQ))
    facts = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data)}
    return {"deletionVector": {**facts, "cardinality": len(deleted)}}


# ---- Iceberg -------------------------------------------------------------------------------------


def catalog_of(folder: Path) -> dict[str, str]:
    """The properties of a catalog in a folder."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def add_delete_file(table: Any, content: Any, folder: Path) -> str:
    """Write the next metadata file of a table, with a file that deletes rows.

    Args:
        content: `DataFileContent` of the file.

    Returns:
        The metadata file.
    """
    from pyiceberg.manifest import (
        DataFile,
        FileFormat,
        ManifestContent,
        ManifestEntry,
        ManifestEntryStatus,
        ManifestWriterV2,
        write_manifest_list,
    )
    from pyiceberg.typedef import Record

    class Deletes(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

    snapshot = table.current_snapshot()
    number = snapshot.snapshot_id + 1
    file = DataFile.from_args(
        content=content,
        file_path=f"{folder}/deletes.parquet",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=1,
        equality_ids=[1],
    )
    entry = ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED,
        snapshot_id=number,
        sequence_number=snapshot.sequence_number + 1,
        file_sequence_number=snapshot.sequence_number + 1,
        data_file=file,
    )
    manifest = f"{folder}/deletes.avro"
    with Deletes(
        table.spec(), table.schema(), table.io.new_output(manifest), number, "null"
    ) as writer:
        writer.add_entry(entry)
    listed = f"{folder}/list.avro"
    sequence = snapshot.sequence_number + 1
    with write_manifest_list(
        2, table.io.new_output(listed), number, snapshot.snapshot_id, sequence, "null"
    ) as lists:
        lists.add_manifests([*snapshot.manifests(table.io), writer.to_manifest_file()])
    metadata = json.loads(table.metadata.model_dump_json())
    metadata["snapshots"].append(
        {
            "snapshot-id": number,
            "sequence-number": sequence,
            "timestamp-ms": snapshot.timestamp_ms + 1,
            "manifest-list": listed,
            "summary": {"operation": "delete"},
        }
    )
    metadata |= {"current-snapshot-id": number, "last-sequence-number": sequence}
    metadata["refs"]["main"]["snapshot-id"] = number
    path = folder / "00099-x.metadata.json"
    path.write_text(json.dumps(metadata))
    return str(path)
