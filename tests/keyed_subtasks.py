"""Subtasks of one operator with keyed tables, whose managers come and go."""

from __future__ import annotations

import pyarrow as pa

from arroyo_dagster.state import (
    Epoch,
    JobId,
    JobPaths,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    PipelineId,
    TableConfig,
    TableManager,
    TaskInfo,
    WorkerGeneration,
)
from tests.formats import ExpiringTimeKeyFiles, TimeFile
from tests.internals import merge_operator

PATHS = JobPaths(JobId("j"), PipelineId("p"))
OPERATOR = OperatorId("o")
TIMED = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("v", pa.int64()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)


class Subtasks:
    """The newest epoch of the operator, and what opens and writes it."""

    def __init__(self, *configs: TableConfig, store: ObjectStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.configs = {config.table: config for config in configs}
        self.newest: OperatorCheckpoint | None = None
        self.clock = 1000

    def open(self, index: int = 0, parallelism: int = 1) -> TableManager:
        """A subtask that starts from the newest epoch."""
        task = TaskInfo(
            pipeline=PATHS.pipeline,
            job=PATHS.job,
            operator=OPERATOR,
            task_index=index,
            parallelism=parallelism,
        )
        backend = ParquetBackend(self.store, PATHS, generation=WorkerGeneration(1))
        return TableManager(backend, task, self.configs, self.newest, clock=lambda: self.clock)

    def write(self, *managers: TableManager) -> OperatorCheckpoint:
        """Write the next epoch."""
        epoch = Epoch((self.newest.epoch if self.newest else 0) + 1)
        reports = [one.checkpoint(epoch, 1, None, False) for one in managers]
        self.newest = merge_operator(PATHS.job, OPERATOR, epoch, reports, self.newest)
        return self.newest

    def files(self, table: str) -> tuple[TimeFile, ...]:
        """The files that the newest epoch lists for a table."""
        listed = self.newest.tables.get(table) if self.newest else None  # type: ignore[call-overload]
        return listed.files if isinstance(listed, ExpiringTimeKeyFiles) else ()
