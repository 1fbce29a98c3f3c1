"""The shared state package: read, write, verify and query the checkpoint state of streaming jobs.

Its public names are listed here, each loaded when first asked for. Neither dagster nor pyspark is
ever imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arroyo_dagster.lazy import lazy_names

if TYPE_CHECKING:
    from arroyo_dagster.state.backend import (
        BackingStore,
        ParquetBackend,
        StateBackend,
    )
    from arroyo_dagster.state.codec.bincode import (
        Codec,
        codec_for,
    )
    from arroyo_dagster.state.codec.hashing import (
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
    from arroyo_dagster.state.connectors import (
        ParquetReplay,
        ParquetSink,
        TableSource,
    )
    from arroyo_dagster.state.coordinator import request_stop
    from arroyo_dagster.state.local.collecting import (
        collect,
    )
    from arroyo_dagster.state.local.gc_plans import (
        GcRequest,
        plan_collection,
    )
    from arroyo_dagster.state.local.hashes import (
        HashEvidence,
        find_hash_variant,
    )
    from arroyo_dagster.state.local.jobs import (
        find_job,
        list_epochs,
        list_jobs,
        summarise_jobs,
    )
    from arroyo_dagster.state.local.maintenance_window import (
        WindowOptions,
        recover_window,
        run_window,
    )
    from arroyo_dagster.state.local.pipeline import (
        RunOutcome,
        run_pipeline,
    )
    from arroyo_dagster.state.local.query import (
        describe_epoch,
        read_rows,
    )
    from arroyo_dagster.state.local.retained import (
        pin_epoch,
        unpin_epochs,
    )
    from arroyo_dagster.state.local.rewriting import (
        plan_rewrite_of,
        rewrite_job,
    )
    from arroyo_dagster.state.local.rewriting_undo import (
        undo_rewrite,
    )
    from arroyo_dagster.state.local.rollback import (
        plan_rollback,
        run_rollback,
    )
    from arroyo_dagster.state.local.verify import (
        JobVerdict,
        verify_job,
    )
    from arroyo_dagster.state.model.checkpoints import (
        Checkpoint,
        CheckpointState,
        OperatorCheckpoint,
    )
    from arroyo_dagster.state.model.collecting import (
        PlanKind,
        Retention,
    )
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
    from arroyo_dagster.state.model.rewriting import (
        RewriteOutcome,
        RewritePlan,
    )
    from arroyo_dagster.state.model.rollback import (
        RollbackOutcome,
        RollbackPlan,
    )
    from arroyo_dagster.state.model.tables import (
        TableConfig,
        TableKind,
    )
    from arroyo_dagster.state.model.window import (
        WindowLimits,
        WindowOutcome,
    )
    from arroyo_dagster.state.operators import (
        Collector,
        Operator,
        OperatorContext,
        Sink,
        Source,
    )
    from arroyo_dagster.state.pipeline import (
        Pipeline,
        Stream,
    )
    from arroyo_dagster.state.storage import (
        MemoryStore,
        ObjectStore,
        WriteProtected,
        configure,
        get_storage_provider,
        open_store,
    )
    from arroyo_dagster.state.storage.arroyo_api import (
        ArroyoControl,
    )
    from arroyo_dagster.state.tables.catalogue import (
        Catalogue,
        KnownTable,
        default_catalogue,
        register_table,
    )
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
    "DataOperation",
    "DeleteKey",
    "DeleteTimeKey",
    "DeleteTimeRange",
    "DeleteValue",
    "Epoch",
    "ExpiringTimeKeyTable",
    "ExpiringTimeKeyView",
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
    "plan_rewrite_of",
    "plan_rollback",
    "range_for_server",
    "read_rows",
    "recover_window",
    "register_table",
    "request_stop",
    "rewrite_job",
    "run_pipeline",
    "run_rollback",
    "run_window",
    "server_for_hash",
    "summarise_jobs",
    "timestamp_table_config",
    "undo_rewrite",
    "unpin_epochs",
    "verify_job",
]

_PUBLIC: dict[str, tuple[str, ...]] = {
    "backend": ("BackingStore", "ParquetBackend", "StateBackend"),
    "codec.bincode": (
        "Codec",
        "codec_for",
    ),
    "codec.hashing": (
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
    "connectors": (
        "ParquetReplay",
        "ParquetSink",
        "TableSource",
    ),
    "coordinator": ("request_stop",),
    "local.collecting": ("collect",),
    "local.gc_plans": (
        "GcRequest",
        "plan_collection",
    ),
    "local.hashes": (
        "HashEvidence",
        "find_hash_variant",
    ),
    "local.jobs": (
        "find_job",
        "list_epochs",
        "list_jobs",
        "summarise_jobs",
    ),
    "local.pipeline": (
        "RunOutcome",
        "run_pipeline",
    ),
    "local.query": (
        "describe_epoch",
        "read_rows",
    ),
    "local.rewriting": (
        "plan_rewrite_of",
        "rewrite_job",
    ),
    "local.rewriting_undo": ("undo_rewrite",),
    "local.maintenance_window": (
        "WindowOptions",
        "recover_window",
        "run_window",
    ),
    "model.rewriting": (
        "RewriteOutcome",
        "RewritePlan",
    ),
    "model.rollback": (
        "RollbackOutcome",
        "RollbackPlan",
    ),
    "model.window": (
        "WindowLimits",
        "WindowOutcome",
    ),
    "storage.arroyo_api": ("ArroyoControl",),
    "local.retained": (
        "pin_epoch",
        "unpin_epochs",
    ),
    "local.rollback": (
        "plan_rollback",
        "run_rollback",
    ),
    "local.verify": (
        "JobVerdict",
        "verify_job",
    ),
    "model.checkpoints": (
        "Checkpoint",
        "CheckpointState",
        "OperatorCheckpoint",
    ),
    "model.collecting": (
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
    "operators": (
        "Collector",
        "Operator",
        "OperatorContext",
        "Sink",
        "Source",
    ),
    "pipeline": (
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
    "tables.catalogue": (
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
