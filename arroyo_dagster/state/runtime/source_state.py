"""Where the sources of a run stand, kept in tables of their own like any operator's state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint, SubtaskCheckpoint
from arroyo_dagster.state.model.ids import TableName, WorkerGeneration
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.model.types import U32, U64
from arroyo_dagster.state.runtime.operators import Offset
from arroyo_dagster.state.runtime.task import EpochPlan
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.manager import TableManager, WriteSubtaskMetadata
from arroyo_dagster.state.tables.messages import Compaction

OFFSETS = "offsets"
WATERMARKS = "watermark"


@dataclass(frozen=True, slots=True)
class SourceWatermark:
    """The value of a source's table `watermark`, key 0."""

    watermark_micros: U64


def source_tables() -> dict[TableName, TableConfig]:
    """The tables every source of ours keeps: where it stands, and its watermark."""
    configs = (
        global_table_config(OFFSETS, "source offsets", key=str, value=str),
        global_table_config(WATERMARKS, "source watermark", key=U32, value=SourceWatermark),
    )
    return {config.table: config for config in configs}


@dataclass(frozen=True, slots=True)
class SourceBackend:
    """What the tables of a source need of the backend of their job."""

    store: ObjectStore
    generation: WorkerGeneration | None
    write_operator_checkpoint_metadata: WriteSubtaskMetadata


class SourceState:
    """Where one source stands, kept in tables of its own like any operator's state."""

    def __init__(self, manager: TableManager) -> None:
        self._manager = manager
        self._offsets = manager.get_global_keyed_state(OFFSETS, str, str)
        self._watermarks = manager.get_global_keyed_state(WATERMARKS, U32, SourceWatermark)

    @property
    def offset(self) -> Offset | None:
        """Where the source stands; None = nothing recorded."""
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
        """Write where the source stands behind an epoch."""
        known = self._offsets.get_all()
        now = {name: json.dumps(value, sort_keys=True) for name, value in offset.items()}
        self._offsets.remove_many([name for name in known if name not in now])
        self._offsets.insert_many(pair for pair in now.items() if known.get(pair[0]) != pair[1])
        if watermark_micros is not None and watermark_micros != self.watermark_micros:
            self._watermarks.insert(0, SourceWatermark(watermark_micros))
        return self._manager.checkpoint(
            plan.epoch, plan.min_epoch, watermark_micros, plan.then_stop
        )

    def follow(self, published: OperatorCheckpoint | None, compacted: Sequence[Compaction]) -> None:
        """Go on from the epoch that was published."""
        assert published is not None
        for message in compacted:
            self._manager.send(message)
        self._manager.follow(published)
