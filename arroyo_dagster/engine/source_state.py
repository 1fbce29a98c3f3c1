"""The offsets and watermarks of a run's sources, kept in tables like any operator's state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from arroyo_dagster.engine.operators import Offset
from arroyo_dagster.engine.task import EpochPlan
from arroyo_dagster.state.model.checkpoints import OFFSETS, OperatorCheckpoint, SubtaskCheckpoint
from arroyo_dagster.state.model.ids import TableName, WorkerGeneration
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.model.types import U32
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.managed import WATERMARKS, SourceWatermark
from arroyo_dagster.state.tables.manager import TableManager, WriteSubtaskMetadata
from arroyo_dagster.state.tables.messages import Compaction


def source_tables() -> dict[TableName, TableConfig]:
    """Return the tables of every managed job's source: its offsets, and its watermark."""
    configs = (
        global_table_config(OFFSETS, "source offsets", key=str, value=str),
        global_table_config(WATERMARKS, "source watermark", key=U32, value=SourceWatermark),
    )
    return {config.table: config for config in configs}


@dataclass(frozen=True, slots=True)
class SourceBackend:
    """The parts of a job's backend that the tables of a source need."""

    store: ObjectStore
    generation: WorkerGeneration | None
    write_operator_checkpoint_metadata: WriteSubtaskMetadata


class SourceState:
    """The offset and watermark of one source, kept in tables like any operator's state."""

    def __init__(self, manager: TableManager) -> None:
        self._manager = manager
        self._offsets = manager.get_global_keyed_state(OFFSETS, str, str)
        self._watermarks = manager.get_global_keyed_state(WATERMARKS, U32, SourceWatermark)

    @property
    def offset(self) -> Offset | None:
        """The source's offset; None = none is recorded."""
        stored = self._offsets.get_all()
        return {name: json.loads(value) for name, value in stored.items()} or None

    @property
    def watermark_micros(self) -> int | None:
        """Its watermark; None = none yet."""
        stored = self._watermarks.get(0)
        return None if stored is None else stored.watermark_micros

    def checkpoint(
        self, plan: EpochPlan, offset: Offset, watermark_micros: int | None
    ) -> SubtaskCheckpoint:
        """Write the source's offset and watermark after an epoch."""
        stored = self._offsets.get_all()
        now = {name: json.dumps(value, sort_keys=True) for name, value in offset.items()}
        self._offsets.remove_many([name for name in stored if name not in now])
        self._offsets.insert_many(pair for pair in now.items() if stored.get(pair[0]) != pair[1])
        if watermark_micros is not None and watermark_micros != self.watermark_micros:
            self._watermarks.insert(0, SourceWatermark(watermark_micros))
        return self._manager.checkpoint(
            plan.epoch, plan.min_epoch, watermark_micros, plan.then_stop
        )

    def follow(self, published: OperatorCheckpoint | None, compacted: Sequence[Compaction]) -> None:
        """Continue from the published epoch."""
        assert published is not None
        for message in compacted:
            self._manager.send(message)
        self._manager.follow(published)
