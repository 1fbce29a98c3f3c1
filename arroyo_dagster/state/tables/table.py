"""What the two kinds of table have in common, and who the subtask is that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from arroyo_dagster.state.model.ids import JobId, OperatorId, PipelineId
from arroyo_dagster.state.model.keys import KeyRange, range_for_server
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, GlobalKeyedConfig, TableConfig
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable


@runtime_checkable
class Table(Protocol):
    """The stored side of a table: reads its files and opens checkpointers (`checkpoint`)."""

    @property
    def config(self) -> TableConfig | GlobalKeyedConfig | ExpiringTimeKeyConfig:
        """How the table is kept."""


def open_table(config: TableConfig, store: ObjectStore) -> GlobalKeyedTable | ExpiringTimeKeyTable:
    """The stored side of the table that `config` describes."""
    if isinstance(config.config, GlobalKeyedConfig):
        return GlobalKeyedTable(config, store)
    return ExpiringTimeKeyTable(config, store)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """Which subtask of which operator of which job.

    Source: crates/arroyo-types/src/lib.rs, `TaskInfo`.
    """

    pipeline: PipelineId | None
    job: JobId
    operator: OperatorId
    task_index: int
    parallelism: int

    @property
    def key_range(self) -> KeyRange:
        """The routing keys this subtask owns, both ends included."""
        return range_for_server(self.task_index, self.parallelism)
