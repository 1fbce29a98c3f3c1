"""How far the sources of a job have read at one epoch, in one form for every connector."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from arroyo_dagster.state.codec.plain import plain_rows
from arroyo_dagster.state.model.checkpoints import CONTENT, OFFSETS
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.numbers import LONGEST_POSITION
from arroyo_dagster.state.model.tables import GlobalKeyedConfig
from arroyo_dagster.state.operations.query.global_scan import KEY, VALUE, GlobalScan
from arroyo_dagster.state.operations.query.metadata_rows import SourcePosition
from arroyo_dagster.state.operations.query.state import StateEpoch
from arroyo_dagster.state.operations.query.table import EpochTable

MANAGED = "managed source"
_POSITIONS = ("offset", "count", "counter", "event_count", "stream_sequence_number")
"""Fields that count what was read, in the states of sources."""
_SOURCE = "source"


def counts_records(position: SourcePosition) -> bool:
    """Return whether `position.position` is known to count what was read, and so never falls."""
    value = json.loads(position.state)
    if position.connector != MANAGED or isinstance(value, int):
        return True
    return isinstance(value, Mapping) and any(name in value for name in _POSITIONS)


def source_positions(epoch: StateEpoch) -> list[SourcePosition]:
    """Return the positions of all sources at an epoch, from source to sink.

    Raises:
        FormatError, NotFoundError: as reading the tables.
    """
    return [
        position
        for operator, name, config in epoch.listed_tables()
        if isinstance(config.config, GlobalKeyedConfig)
        for position in _of_table(epoch, epoch.table(operator.operator, name))
    ]


def _of_table(epoch: StateEpoch, table: EpochTable) -> Iterator[SourcePosition]:
    scan = table.scan
    assert isinstance(scan, GlobalScan)
    connector = _connector(epoch, scan)
    if connector is None:
        return
    for entry in plain_rows(table.to_arrow()):
        if connector == MANAGED and entry[KEY] == CONTENT:
            continue
        partition, value = _partition(entry[KEY], entry[VALUE], connector)
        yield SourcePosition(
            job=epoch.job.name,
            epoch=epoch.number,
            finished_at_micros=epoch.checkpoint.finish_time_micros,
            operator=scan.operator.operator,
            table=scan.name,
            connector=connector,
            partition=partition,
            position=_position(value),
            finished=_finished(value),
            state=json.dumps(value),
        )


def _connector(epoch: StateEpoch, scan: GlobalScan) -> str | None:
    config = scan.operator.configs[scan.name]
    if epoch.checkpoint.progress is not None:
        return MANAGED if scan.name == OFFSETS and config.config.description else None
    table = scan.catalogue.describe(scan.operator.operator, config)
    return table.owner if table is not None and table.owner.endswith(_SOURCE) else None


def _partition(key: Any, value: Any, connector: str) -> tuple[str, Any]:
    """Return the partition of an entry and its state; of a managed source, a part of its offset."""
    if connector == MANAGED:
        return key, parse_json(value)
    if isinstance(value, Mapping) and "partition" in value:
        return str(value["partition"]), value
    if isinstance(value, Mapping) and "shard_id" in value:
        return f"{value.get('stream_name')}/{value['shard_id']}", value
    return key if isinstance(key, str) else json.dumps(key), value


def _position(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and len(value) <= LONGEST_POSITION and value.isdecimal():
        return int(value)
    if isinstance(value, Mapping):
        fields = [*(value.get(name) for name in _POSITIONS), *value.values()]
        positions = (_position(field) for field in fields if not isinstance(field, str))
        return next((position for position in positions if position is not None), None)
    return None


def _finished(value: Any) -> bool | None:
    if isinstance(value, Mapping) and "closed" in value:
        return bool(value["closed"])
    text = json.dumps(value)
    return True if '"Finished"' in text else (False if "RecordsRead" in text else None)
