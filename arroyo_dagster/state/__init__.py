"""The shared state package: read, write, verify and query the checkpoint state of streaming jobs.

Its public names are listed here, each loaded when first asked for. Neither dagster nor pyspark is
ever imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arroyo_dagster.lazy import lazy_names

if TYPE_CHECKING:
    from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for
    from arroyo_dagster.state.codec.hashing.routing import (
        HashVariant,
        hash_key,
        hash_keys,
        key_hashes,
        matching_variants,
    )
    from arroyo_dagster.state.codec.operations import (
        DataOperation,
        DeleteKey,
        DeleteTimeKey,
        DeleteTimeRange,
        DeleteValue,
        Insert,
    )
    from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA
    from arroyo_dagster.state.metadata.backend import BackingStore, ParquetBackend, StateBackend
    from arroyo_dagster.state.model.checkpoints import (
        Checkpoint,
        CheckpointState,
        OperatorCheckpoint,
    )
    from arroyo_dagster.state.model.compaction import (
        CompactionPlan,
        CompactionPolicy,
        CompactionSettings,
    )
    from arroyo_dagster.state.model.garbage import PlanKind, Retention
    from arroyo_dagster.state.model.ids import (
        Epoch,
        JobId,
        OperatorId,
        PipelineId,
        StatePath,
        TableName,
        WorkerGeneration,
    )
    from arroyo_dagster.state.model.keys import (
        KeyRange,
        range_for_server,
        server_for_hash,
    )
    from arroyo_dagster.state.model.layout import (
        JobPaths,
        Layout,
    )
    from arroyo_dagster.state.model.maintenance_window import WindowLimits, WindowOutcome
    from arroyo_dagster.state.model.rewrite import RewriteOutcome, RewritePlan
    from arroyo_dagster.state.model.rollback import (
        RollbackOutcome,
        RollbackPlan,
    )
    from arroyo_dagster.state.model.tables import (
        TableConfig,
        TableKind,
    )
    from arroyo_dagster.state.operations.catalog.hash_variant import HashEvidence, find_hash_variant
    from arroyo_dagster.state.operations.catalog.jobs import (
        find_job,
        list_epochs,
        list_jobs,
        summarise_jobs,
    )
    from arroyo_dagster.state.operations.catalog.query import describe_epoch, read_rows
    from arroyo_dagster.state.operations.compaction.job import CompactionOptions, run_compaction
    from arroyo_dagster.state.operations.compaction.maintenance_window import (
        WindowOptions,
        recover_window,
        run_window,
    )
    from arroyo_dagster.state.operations.compaction.plan import plan_compaction
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome
    from arroyo_dagster.state.operations.compaction.rewrite import (
        RewriteOptions,
        plan_rewrite,
        plan_rewrite_of,
        rewrite_job,
        run_rewrite,
    )
    from arroyo_dagster.state.operations.compaction.rewrite_undo import (
        UndoOptions,
        UndoOutcome,
        UndoPlan,
        plan_undo,
        run_undo,
        undo_rewrite,
    )
    from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome, collect, run_gc
    from arroyo_dagster.state.operations.gc.pins import pin_epoch, unpin_epochs
    from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_collection, plan_gc
    from arroyo_dagster.state.operations.restore.rollback import plan_rollback, run_rollback
    from arroyo_dagster.state.operations.verify.job import JobVerdict, verify_job
    from arroyo_dagster.state.runtime.connectors import ParquetReplay, ParquetSink, TableSource
    from arroyo_dagster.state.runtime.in_process import RunOutcome, run_pipeline
    from arroyo_dagster.state.runtime.operators import (
        Collector,
        Operator,
        OperatorContext,
        Sink,
        Source,
    )
    from arroyo_dagster.state.runtime.pipeline import Pipeline, Stream
    from arroyo_dagster.state.runtime.stop_requests import request_stop
    from arroyo_dagster.state.storage import (
        MemoryStore,
        ObjectStore,
        WriteProtected,
        configure,
        get_storage_provider,
        open_store,
    )
    from arroyo_dagster.state.storage.arroyo.api import ArroyoControl
    from arroyo_dagster.state.tables.expiring_time_key import (
        ExpiringTimeKeyTable,
        timestamp_table_config,
    )
    from arroyo_dagster.state.tables.global_keyed import (
        GlobalKeyedTable,
        GlobalKeyedTableCheckpointer,
        GlobalKeyedView,
        MigratableState,
        VersionInfo,
        global_table_config,
        global_table_config_with_version,
    )
    from arroyo_dagster.state.tables.known.catalogue import (
        Catalogue,
        KnownTable,
        default_catalogue,
        register_table,
    )
    from arroyo_dagster.state.tables.manager import TableManager
    from arroyo_dagster.state.tables.messages import (
        CheckpointMessage,
        StateMessage,
        TableData,
    )
    from arroyo_dagster.state.tables.table import (
        Table,
        TaskInfo,
    )
    from arroyo_dagster.state.tables.time_views import (
        ExpiringTimeKeyView,
        KeyTimeView,
        UncachedKeyValueView,
    )

__all__ = [
    "GLOBAL_KEY_VALUE_SCHEMA",
    "ArroyoControl",
    "BackingStore",
    "Catalogue",
    "Checkpoint",
    "CheckpointMessage",
    "CheckpointState",
    "Codec",
    "Collector",
    "CompactionOptions",
    "CompactionOutcome",
    "CompactionPlan",
    "CompactionPolicy",
    "CompactionSettings",
    "DataOperation",
    "DeleteKey",
    "DeleteTimeKey",
    "DeleteTimeRange",
    "DeleteValue",
    "Epoch",
    "ExpiringTimeKeyTable",
    "ExpiringTimeKeyView",
    "GcOptions",
    "GcOutcome",
    "GcRequest",
    "GlobalKeyedTable",
    "GlobalKeyedTableCheckpointer",
    "GlobalKeyedView",
    "HashEvidence",
    "HashVariant",
    "Insert",
    "JobId",
    "JobPaths",
    "JobVerdict",
    "KeyRange",
    "KeyTimeView",
    "KnownTable",
    "Layout",
    "MemoryStore",
    "MigratableState",
    "ObjectStore",
    "Operator",
    "OperatorCheckpoint",
    "OperatorContext",
    "OperatorId",
    "ParquetBackend",
    "ParquetReplay",
    "ParquetSink",
    "Pipeline",
    "PipelineId",
    "PlanKind",
    "Retention",
    "RewriteOptions",
    "RewriteOutcome",
    "RewritePlan",
    "RollbackOutcome",
    "RollbackPlan",
    "RunOutcome",
    "Sink",
    "Source",
    "StateBackend",
    "StateMessage",
    "StatePath",
    "Stream",
    "Table",
    "TableConfig",
    "TableData",
    "TableKind",
    "TableManager",
    "TableName",
    "TableSource",
    "TaskInfo",
    "UncachedKeyValueView",
    "UndoOptions",
    "UndoOutcome",
    "UndoPlan",
    "VersionInfo",
    "WindowLimits",
    "WindowOptions",
    "WindowOutcome",
    "WorkerGeneration",
    "WriteProtected",
    "codec_for",
    "collect",
    "configure",
    "default_catalogue",
    "describe_epoch",
    "find_hash_variant",
    "find_job",
    "get_storage_provider",
    "global_table_config",
    "global_table_config_with_version",
    "hash_key",
    "hash_keys",
    "key_hashes",
    "list_epochs",
    "list_jobs",
    "matching_variants",
    "open_store",
    "pin_epoch",
    "plan_collection",
    "plan_compaction",
    "plan_gc",
    "plan_rewrite",
    "plan_rewrite_of",
    "plan_rollback",
    "plan_undo",
    "range_for_server",
    "read_rows",
    "recover_window",
    "register_table",
    "request_stop",
    "rewrite_job",
    "run_compaction",
    "run_gc",
    "run_pipeline",
    "run_rewrite",
    "run_rollback",
    "run_undo",
    "run_window",
    "server_for_hash",
    "summarise_jobs",
    "timestamp_table_config",
    "undo_rewrite",
    "unpin_epochs",
    "verify_job",
]

_PUBLIC: dict[str, tuple[str, ...]] = {
    "metadata.backend": ("BackingStore", "ParquetBackend", "StateBackend"),
    "codec.bincode.codec": (
        "Codec",
        "codec_for",
    ),
    "codec.hashing.routing": (
        "HashVariant",
        "hash_key",
        "hash_keys",
        "key_hashes",
        "matching_variants",
    ),
    "codec.operations": (
        "DataOperation",
        "DeleteKey",
        "DeleteTimeKey",
        "DeleteTimeRange",
        "DeleteValue",
        "Insert",
    ),
    "codec.parquet": ("GLOBAL_KEY_VALUE_SCHEMA",),
    "runtime.connectors": (
        "ParquetReplay",
        "ParquetSink",
        "TableSource",
    ),
    "runtime.stop_requests": ("request_stop",),
    "operations.gc.execute": (
        "GcOptions",
        "GcOutcome",
        "collect",
        "run_gc",
    ),
    "operations.gc.plan": (
        "GcRequest",
        "plan_collection",
        "plan_gc",
    ),
    "operations.catalog.hash_variant": (
        "HashEvidence",
        "find_hash_variant",
    ),
    "operations.catalog.jobs": (
        "find_job",
        "list_epochs",
        "list_jobs",
        "summarise_jobs",
    ),
    "runtime.in_process": (
        "RunOutcome",
        "run_pipeline",
    ),
    "operations.catalog.query": (
        "describe_epoch",
        "read_rows",
    ),
    "model.compaction": (
        "CompactionPlan",
        "CompactionPolicy",
        "CompactionSettings",
    ),
    "operations.compaction.job": (
        "CompactionOptions",
        "run_compaction",
    ),
    "operations.compaction.plan": ("plan_compaction",),
    "operations.compaction.publish": ("CompactionOutcome",),
    "operations.compaction.rewrite": (
        "RewriteOptions",
        "plan_rewrite",
        "plan_rewrite_of",
        "rewrite_job",
        "run_rewrite",
    ),
    "operations.compaction.rewrite_undo": (
        "UndoOptions",
        "UndoOutcome",
        "UndoPlan",
        "plan_undo",
        "run_undo",
        "undo_rewrite",
    ),
    "operations.compaction.maintenance_window": (
        "WindowOptions",
        "recover_window",
        "run_window",
    ),
    "model.rewrite": (
        "RewriteOutcome",
        "RewritePlan",
    ),
    "model.rollback": (
        "RollbackOutcome",
        "RollbackPlan",
    ),
    "model.maintenance_window": (
        "WindowLimits",
        "WindowOutcome",
    ),
    "storage.arroyo.api": ("ArroyoControl",),
    "operations.gc.pins": (
        "pin_epoch",
        "unpin_epochs",
    ),
    "operations.restore.rollback": (
        "plan_rollback",
        "run_rollback",
    ),
    "operations.verify.job": (
        "JobVerdict",
        "verify_job",
    ),
    "model.checkpoints": (
        "Checkpoint",
        "CheckpointState",
        "OperatorCheckpoint",
    ),
    "model.garbage": (
        "PlanKind",
        "Retention",
    ),
    "model.ids": (
        "Epoch",
        "JobId",
        "OperatorId",
        "PipelineId",
        "StatePath",
        "TableName",
        "WorkerGeneration",
    ),
    "model.keys": (
        "KeyRange",
        "range_for_server",
        "server_for_hash",
    ),
    "model.layout": (
        "JobPaths",
        "Layout",
    ),
    "model.tables": (
        "TableConfig",
        "TableKind",
    ),
    "runtime.operators": (
        "Collector",
        "Operator",
        "OperatorContext",
        "Sink",
        "Source",
    ),
    "runtime.pipeline": (
        "Pipeline",
        "Stream",
    ),
    "storage": (
        "MemoryStore",
        "ObjectStore",
        "WriteProtected",
        "configure",
        "get_storage_provider",
        "open_store",
    ),
    "tables.known.catalogue": (
        "Catalogue",
        "KnownTable",
        "default_catalogue",
        "register_table",
    ),
    "tables.expiring_time_key": (
        "ExpiringTimeKeyTable",
        "timestamp_table_config",
    ),
    "tables.global_keyed": (
        "GlobalKeyedTable",
        "GlobalKeyedTableCheckpointer",
        "GlobalKeyedView",
        "MigratableState",
        "VersionInfo",
        "global_table_config",
        "global_table_config_with_version",
    ),
    "tables.manager": ("TableManager",),
    "tables.messages": (
        "CheckpointMessage",
        "StateMessage",
        "TableData",
    ),
    "tables.table": (
        "Table",
        "TaskInfo",
    ),
    "tables.time_views": (
        "ExpiringTimeKeyView",
        "KeyTimeView",
        "UncachedKeyValueView",
    ),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
