"""State of Arroyo's sinks: files being written, and files to be committed.

Loaded when such state is decoded.

Fields have Arroyo's names and order, because the order is the format.

Source: crates/arroyo-connectors/src/, the file named in the comment beside each table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.state.model.types import (
    I32,
    I64,
    U64,
    EnumOf,
    Field,
    ListOf,
    OptionOf,
    StructOf,
    Type,
    USize,
    Variant,
    describe,
    enum_of,
)


@dataclass(frozen=True, slots=True)
class ColumnBounds:
    """The smallest and the largest value of a column, as Iceberg encodes them."""

    min: bytes | None
    max: bytes | None


@dataclass(frozen=True, slots=True)
class IcebergColumn:
    """Iceberg's metrics of one column of a file."""

    compressed_size: U64
    num_values: U64
    null_values: U64
    bounds: ColumnBounds


@dataclass(frozen=True, slots=True)
class IcebergFileMetadata:
    """Iceberg's metrics of a file; columns by field id."""

    row_count: U64
    split_offsets: list[I64]
    columns: dict[I32, IcebergColumn]


# --- version 1, object stores --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """A part of an upload that is stored."""

    part: USize
    content_id: str


@dataclass(frozen=True, slots=True)
class InProgressPart:
    """A part of an upload that is not stored yet."""

    part: USize
    data: bytes


InFlightPart = Annotated[
    FinishedPart | InProgressPart, enum_of("InFlightPart", FinishedPart, InProgressPart)
]


@dataclass(frozen=True, slots=True)
class Empty:
    """A file to which nothing has been written."""


@dataclass(frozen=True, slots=True)
class MultiPartNotCreated:
    """A file whose upload has not begun."""

    parts_to_add: list[bytes]
    trailing_bytes: bytes | None
    metadata: IcebergFileMetadata | None


@dataclass(frozen=True, slots=True)
class MultiPartInFlight:
    """A file being uploaded."""

    multi_part_upload_id: str
    in_flight_parts: list[InFlightPart]
    trailing_bytes: bytes | None
    metadata: IcebergFileMetadata | None


@dataclass(frozen=True, slots=True)
class MultiPartWriterClosed:
    """A completely written file of which parts are still being uploaded."""

    multi_part_upload_id: str
    in_flight_parts: list[InFlightPart]
    metadata: IcebergFileMetadata | None


@dataclass(frozen=True, slots=True)
class MultiPartWriterUploadCompleted:
    """A file whose parts are all uploaded, but not committed."""

    multi_part_upload_id: str
    completed_parts: list[str]
    metadata: IcebergFileMetadata | None


FileCheckpointData = Annotated[
    Empty
    | MultiPartNotCreated
    | MultiPartInFlight
    | MultiPartWriterClosed
    | MultiPartWriterUploadCompleted,
    enum_of(
        "FileCheckpointData",
        Empty,
        MultiPartNotCreated,
        MultiPartInFlight,
        MultiPartWriterClosed,
        MultiPartWriterUploadCompleted,
    ),
]


@dataclass(frozen=True, slots=True)
class InProgressFileCheckpoint:
    """A file that a subtask has not finished; Arroyo does not use `partition`."""

    filename: str
    partition: str | None
    data: FileCheckpointData
    pushed_size: USize


@dataclass(frozen=True, slots=True)
class FileSystemDataRecovery:
    """The files that a subtask was writing."""

    next_file_index: USize
    active_files: list[InProgressFileCheckpoint]
    delta_version: I64


@dataclass(frozen=True, slots=True)
class FileToFinish:
    """An upload to be completed when the checkpoint commits; Arroyo does not use `partition`."""

    filename: str
    partition: str | None
    multi_part_upload_id: str
    completed_parts: list[str]
    size: USize
    metadata: IcebergFileMetadata | None


# --- version 1, local disk -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file being written, and its final name."""

    tmp_file: str
    bytes_written: USize
    suffix: bytes | None
    destination: str
    metadata: IcebergFileMetadata | None


@dataclass(frozen=True, slots=True)
class LocalFileDataRecovery:
    """The files that a subtask was writing."""

    next_file_index: USize
    current_files: list[LocalFile]


@dataclass(frozen=True, slots=True)
class FilePreCommit:
    """A file to be renamed when the checkpoint commits."""

    tmp_file: str
    destination: str


# --- version 2 -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class New:
    """A file whose upload has not begun."""


@dataclass(frozen=True, slots=True)
class MultipartStarted:
    """A file being uploaded."""

    multipart_id: str
    parts: list[str]


@dataclass(frozen=True, slots=True)
class SingleFileToFinish:
    """A file small enough to be uploaded at once, when the checkpoint commits."""


@dataclass(frozen=True, slots=True)
class InProgressFile:
    """A file that a subtask has not finished, and its bytes not yet uploaded."""

    path: str
    total_size: USize
    data: bytes
    metadata: IcebergFileMetadata | None
    state: Annotated[
        New | MultipartStarted | SingleFileToFinish,
        enum_of("InProgressFileState", New, MultipartStarted, SingleFileToFinish),
    ]


@dataclass(frozen=True, slots=True)
class FilesCheckpointV2:
    """The files that a subtask was writing."""

    open_files: list[InProgressFile]
    file_index: USize
    delta_version: I64


@dataclass(frozen=True, slots=True)
class Multipart:
    """An upload in parts, to be completed."""

    multipart_id: str
    parts: list[str]
    total_size: USize


@dataclass(frozen=True, slots=True)
class Single:
    """A file uploaded at once."""

    total_size: USize


@dataclass(frozen=True, slots=True)
class FileToCommit:
    """A file to be completed when the checkpoint commits."""

    path: str
    typ: Annotated[Multipart | Single, enum_of("FileToCommitType", Multipart, Single)]
    iceberg_metadata: IcebergFileMetadata | None


# --- before v0.15 --------------------------------------------------------------------------------


def _before_iceberg(described: Type) -> Type:
    """Return the layout before v0.15, which added Iceberg's metrics without a new state version."""
    match described:
        case StructOf(name=name, fields=fields):
            kept = [field for field in fields if field.type != OptionOf(_ICEBERG)]
            return StructOf(name, tuple(Field(f.name, _before_iceberg(f.type)) for f in kept))
        case EnumOf(name=name, variants=variants):
            return EnumOf(
                name, tuple(Variant(v.name, _before_iceberg(v.payload)) for v in variants)
            )
        case ListOf(item=item):
            return ListOf(_before_iceberg(item))
        case _:
            return described


_ICEBERG = describe(IcebergFileMetadata)
FilesToCommit = list[FileToCommit]
FilesToFinish = dict[str, FileToFinish]
OLD_LOCAL_FILE_DATA_RECOVERY = _before_iceberg(describe(LocalFileDataRecovery))
OLD_FILE_SYSTEM_DATA_RECOVERY = _before_iceberg(describe(FileSystemDataRecovery))
OLD_FILE_TO_FINISH = _before_iceberg(describe(FileToFinish))
