"""Records and files of the format that are not public, in one place for all tests."""

from __future__ import annotations

from arroyo_dagster.state.codec import maintenance_records, metadata, records
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.codec.digest import digest_rows
from arroyo_dagster.state.codec.gc import decode_gc_plan, gc_plan_to_json
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.codec.maintenance_records import decode_change_record
from arroyo_dagster.state.codec.metadata import decode_operator, encode_manifest
from arroyo_dagster.state.codec.operations import INSERT, encode_operation
from arroyo_dagster.state.codec.parquet import decode_file, encode_pairs, encode_rows, read_facts
from arroyo_dagster.state.codec.proto import state_pb2
from arroyo_dagster.state.codec.schema import (
    file_schema,
    memory_schema,
    schema_from_json,
    schema_to_json,
)
from arroyo_dagster.state.model import objects, types
from arroyo_dagster.state.model.checkpoints import (
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    LegacyCheckpoint,
    Manifest,
    RunProgress,
    SubtaskCheckpoint,
)
from arroyo_dagster.state.model.compaction import (
    CompactionRecord,
    LeftOut,
    MergedPairs,
    MergedRows,
    MergeOutcome,
    RowsDigest,
    SortOrder,
)
from arroyo_dagster.state.model.garbage import (
    GRACE_FLOOR_MICROS,
    SKEW_MICROS,
    GcPlan,
    JobPins,
    Pin,
    Quarantined,
    Roots,
)
from arroyo_dagster.state.model.ids import path_error
from arroyo_dagster.state.model.job_facts import (
    Absence,
    CheckpointFacts,
    JobCondition,
    JobFacts,
    SourceAnswer,
)
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY
from arroyo_dagster.state.model.layout import is_compacted, is_rewritten
from arroyo_dagster.state.model.objects import ObjectKind, Packed, StoredObject, object_name
from arroyo_dagster.state.model.rewrite import RewriteShard
from arroyo_dagster.state.model.surgery.edits import (
    Edit,
    KeyDeletion,
    NewPosition,
    Rescale,
    RetainRows,
    SetEntry,
    SetOffsets,
    SetWatermark,
)
from arroyo_dagster.state.model.surgery.evolve import Overrides
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan, TableAction
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.tables.known.sources import KafkaState

__all__ = [
    "GRACE_FLOOR_MICROS", "INSERT", "MAX_ROUTING_KEY", "SKEW_MICROS", "Absence",
    "CheckpointFacts", "CompactionRecord", "CurrentGeneration", "Edit", "EditOutcome", "EditPlan",
    "EpochRecord", "ExpiringTimeKeyConfig", "ExpiringTimeKeyFiles", "GcPlan",
    "GenerationManifest", "GlobalKeyedConfig", "GlobalKeyedFiles", "JobCondition", "JobFacts",
    "JobPins", "KafkaState", "KeyDeletion", "LeftOut", "LegacyCheckpoint", "Manifest",
    "MergeOutcome", "MergedPairs", "MergedRows", "NewPosition", "ObjectKind", "Overrides",
    "Packed", "Pin", "Quarantined", "Rescale", "RetainRows", "RewriteShard", "Roots",
    "RowsDigest", "RunProgress", "SetEntry", "SetOffsets", "SetWatermark", "SortOrder",
    "SourceAnswer", "StoredObject", "SubtaskCheckpoint", "TableAction", "TableFiles", "TimeFile",
    "decode_change_record", "decode_file", "decode_gc_plan", "decode_operator", "digest_rows",
    "encode", "encode_manifest", "encode_operation", "encode_pairs", "encode_rows", "file_schema",
    "gc_plan_to_json", "is_compacted", "is_rewritten", "iso_micros", "maintenance_records",
    "memory_schema", "metadata", "object_name", "objects", "path_error", "read_facts", "records",
    "schema_from_json", "schema_to_json", "state_pb2", "types",
]  # fmt: skip
