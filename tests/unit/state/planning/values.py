"""Checkpoints, operators and files as values, of which a test says only what it is about."""

from __future__ import annotations

from typing import Any

from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    Epoch,
    JobId,
    OperatorCheckpoint,
    OperatorId,
    StatePath,
    TableConfig,
    TableName,
)
from arroyo_dagster.state.model.tables import StoredSchema
from tests.formats import MAX_ROUTING_KEY, ExpiringTimeKeyConfig, GlobalKeyedConfig, TimeFile


def time_file(path: str, **changes: Any) -> TimeFile:
    """A file of epoch 1 with rows of all keys, of which the newest is of microsecond 1."""
    values: dict[str, Any] = {
        "epoch": Epoch(1),
        "path": StatePath(path),
        "min_routing_key": 0,
        "max_routing_key": MAX_ROUTING_KEY,
        "max_timestamp_micros": 1,
    }
    return TimeFile(**values | changes)


def expiring(table: str, retention_micros: int, **changes: Any) -> ExpiringTimeKeyConfig:
    """The configuration of an expiring time-key table, whose columns do not matter."""
    schema = changes.pop("schema", StoredSchema(arrow_schema="{}", timestamp_index=0))
    return ExpiringTimeKeyConfig(
        table=TableName(table), retention_micros=retention_micros, schema=schema, **changes
    )


def pairs(table: str) -> TableConfig:
    """The configuration of a global keyed table."""
    return TableConfig(config=GlobalKeyedConfig(table=TableName(table)))


def operator(name: str = "op", **changes: Any) -> OperatorCheckpoint:
    """An operator of job `j` at epoch 1, of one subtask, without tables."""
    values: dict[str, Any] = {"job": JobId("j"), "epoch": Epoch(1), "parallelism": 1}
    return OperatorCheckpoint(operator=OperatorId(name), **values | changes)


def checkpoint(*operators: OperatorCheckpoint, **changes: Any) -> Checkpoint:
    """Epoch 1 of job `j` in the legacy layout, ready."""
    values: dict[str, Any] = {
        "pipeline": None,
        "job": JobId("j"),
        "worker_generation": None,
        "epoch": Epoch(1),
        "min_epoch": Epoch(1),
        "start_time_micros": 0,
        "finish_time_micros": 0,
        "state": CheckpointState.READY,
        "ref": StatePath("j/metadata"),
    }
    return Checkpoint(operators=operators, **values | changes)
