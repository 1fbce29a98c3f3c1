"""Entries of a managed job's global keyed tables: positions, watermarks and single values.

A change becomes a file of its own behind the others, as an epoch of a run writes it: the last write
of a key wins.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.bincode.plain_values import typed_value
from arroyo_dagster.state.model.checkpoints import CONTENT, OFFSETS, Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import TableName
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.surgery.edits import (
    ALL_PARTITIONS,
    NewPosition,
    SetEntry,
    SetOffsets,
    SetWatermark,
)
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig
from arroyo_dagster.state.operations.surgery.entries import (
    ChangedEntries,
    GlobalTable,
    PairFile,
    changed_entries,
    json_of,
    plain_key,
)
from arroyo_dagster.state.operations.surgery.offsets import moved_position, note_move
from arroyo_dagster.state.planning.restore.rollback import STAGED, is_service
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable
from arroyo_dagster.state.tables.known.catalogue import default_catalogue
from arroyo_dagster.state.tables.managed import WATERMARKS, SourceWatermark

_KEYS_PRINTED = 20
_PRIMITIVE = "SDF primitive state"
_SOURCE_TABLES = ("source offsets", "source watermark")


MovedSources = tuple[tuple[ChangedEntries, ...], str, tuple[str, ...], tuple[str, ...]]
"""New positions of sources: the tables; the offsets of all, as `RunProgress` holds them; and the
duplicate and missing outputs that follow."""


def internal(config: TableConfig) -> str | None:
    """Return why a global keyed table holds nothing of users; None if an operator's keys are in it.

    The engine of a dataflow keeps tables of its own, which describe themselves as such.
    """
    text = config.config.description
    if config.uses_two_phase_commit:
        return "its entries belong to a commit in two phases"
    if text in _SOURCE_TABLES:
        return "it holds the position of a source"
    if text.startswith("SDF ") and text != _PRIMITIVE:
        return "it belongs to the engine of the dataflow"
    return None


def read_entries(
    store: ObjectStore,
    operator: OperatorCheckpoint,
    name: TableName,
    wanted: Collection[bytes] | None = None,
) -> GlobalTable:
    """Read the last writes of a global keyed table, as if they were one file.

    Args:
        wanted: only these keys, encoded; None = all.

    Raises:
        InputError: the table has entries of an older state version.
        FormatError, NotFoundError: a file is broken, or missing.
    """
    files, config = operator.tables[name], operator.configs[name]
    assert isinstance(files, GlobalKeyedFiles)
    entries = GlobalKeyedTable(config, store).load_with_version(files.files)
    kept = {key: entry for key, entry in entries.items() if wanted is None or key in wanted}
    if any(version != config.state_version for version, _ in kept.values()):
        raise InputError(
            "the table holds entries of an older state version",
            operator=operator.operator,
            table=name,
            next_step="run the job once: it migrates them",
        )
    form = default_catalogue().form_of(operator.operator, config, kept)
    pairs = tuple((key, value) for key, (_, value) in kept.items())
    file = (PairFile(files.files[-1], pairs, config.state_version),) if files.files else ()
    return GlobalTable(operator, name, config, file, form)


# ---- sources -------------------------------------------------------------------------------------


def check_sources(checkpoint: Checkpoint, what: str) -> dict[str, Any]:
    """Return the offsets of a job's sources, by name.

    Raises:
        InputError: an SDF service or Spark keeps them in places of its own as well.
    """
    assert checkpoint.progress is not None
    offsets = parse_json(checkpoint.progress.offsets)
    if not isinstance(offsets, dict):
        raise FormatError("the offsets of the sources are no object", path=checkpoint.ref)
    if any(map(is_service, offsets.values())):
        raise InputError(
            f"the {what} of an SDF service cannot be set: its engine keeps clocks and windows that "
            "must agree with it",
            job=checkpoint.job,
            next_step="let the service read again with `arroyo-state sdf clean --offsets`",
        )
    return offsets


def moved_sources(store: ObjectStore, checkpoint: Checkpoint, edit: SetOffsets) -> MovedSources:
    """Compute new positions of sources: of the tables, and of the progress beside them.

    Raises:
        InputError: no source has a partition that is named, or several have it; it has no number;
            or Spark or an SDF service keeps the position.
    """
    if edit.at_micros is not None:
        raise InputError(
            "offsets of a time are looked up for sources of Arroyo jobs only",
            job=checkpoint.job,
            next_step="name partitions and positions, as `arroyo-state sql @offsets JOB` prints "
            "them",
        )
    offsets = check_sources(checkpoint, "position")
    sources = {
        operator.operator: read_entries(store, operator, TableName(OFFSETS))
        for operator in checkpoint.operators
        if TableName(OFFSETS) in operator.tables and str(operator.operator) in offsets
        if edit.operator in (None, operator.operator)
    }
    if not sources:
        raise InputError(
            "the job has no such source",
            job=checkpoint.job,
            operator=edit.operator,
            next_step="`arroyo-state sql @offsets JOB` lists the sources and their partitions",
        )
    by_source = _chosen(edit, {str(name): table for name, table in sources.items()})
    again: list[str] = []
    never: list[str] = []
    tables = []
    for name, positions in by_source.items():
        if set(offsets[name]) == STAGED:
            raise InputError(
                "the position of a Spark source cannot be set: rows that were read are deleted",
                operator=name,
                next_step="choose where the streaming query begins in the pipeline itself",
            )
        table = next(source for key, source in sources.items() if key == name)

        def moved(key: Any, value: Any, name: str = name, positions: Any = positions) -> Any:
            if key not in positions:
                return value
            after = _moved(parse_json(value), positions[key], name, key)
            note_move(f"{name} partition {key}", parse_json(value), after, again, never)
            return json.dumps(after)

        changed = changed_entries(table, moved)
        tables.append(changed)
        for change in changed.changes:
            offsets[name][parse_json(change.key)] = parse_json(parse_json(change.after))
    return tuple(tables), json.dumps(offsets, sort_keys=True), tuple(again), tuple(never)


def _chosen(
    edit: SetOffsets, sources: Mapping[str, GlobalTable]
) -> dict[str, dict[str, NewPosition]]:
    """Return the new positions, by source and partition."""
    partitions = {
        name: [key for _, key, _ in table.entries() if key != CONTENT]
        for name, table in sources.items()
    }
    moves: dict[str, dict[str, NewPosition]] = {}
    for position in edit.positions:
        partition = position.partition
        names = [name for name, keys in partitions.items() if partition in (ALL_PARTITIONS, *keys)]
        if not names or (len(names) > 1 and partition != ALL_PARTITIONS):
            raise InputError(
                f"{len(names) or 'no'} sources have a partition {partition!r}",
                partitions="; ".join(f"{op}: {', '.join(keys)}" for op, keys in partitions.items()),
                next_step="name the source with --operator"
                if names
                else "`arroyo-state sql @offsets JOB` lists the sources and their partitions",
            )
        for name in names:
            mine = moves.setdefault(name, {})
            for key in partitions[name] if partition == ALL_PARTITIONS else [partition]:
                if partition != ALL_PARTITIONS or key not in mine:
                    mine[key] = position
    return moves


def _moved(before: Any, position: NewPosition, name: str, partition: str) -> int:
    where: dict[str, Any] = {"operator": name, "partition": partition}
    if isinstance(before, bool) or not isinstance(before, int):
        raise InputError(
            "the position is no number, so it cannot be set", **where, position=json.dumps(before)
        )
    text = moved_position(before, position, where)
    if not text.isdecimal():
        raise InputError("not a position: it is a whole number", **where, position=text)
    return int(text)


# ---- watermarks ----------------------------------------------------------------------------------


def moved_watermarks(
    store: ObjectStore, checkpoint: Checkpoint, edit: SetWatermark
) -> tuple[ChangedEntries, ...]:
    """Compute the new watermark of every source that has one.

    Raises:
        InputError: no source has a watermark yet; or it is an SDF service.
    """
    check_sources(checkpoint, "watermark")
    name = TableName(WATERMARKS)
    tables = [
        read_entries(store, operator, name)
        for operator in checkpoint.operators
        if name in operator.tables and operator.configs[name].config.description in _SOURCE_TABLES
    ]
    if not any(file.pairs for table in tables for file in table.files):
        raise InputError(
            "no source of the job has a watermark yet",
            job=checkpoint.job,
            next_step="let the job run until `arroyo-state sql @watermarks JOB` shows one",
        )
    new = SourceWatermark(edit.at_micros)
    return tuple(changed_entries(table, lambda key, value: _like(value, new)) for table in tables)


def _like(value: Any, new: SourceWatermark) -> Any:
    """Return the new watermark in the form in which the stored one is decoded."""
    return {"watermark_micros": new.watermark_micros} if isinstance(value, dict) else new


# ---- single entries ------------------------------------------------------------------------------


def set_entry(store: ObjectStore, checkpoint: Checkpoint, edit: SetEntry) -> ChangedEntries:
    """Compute the new value of one entry.

    Raises:
        InputError: there is no such table or entry; it is not an operator's own; or key or value
            are not of the stored types.
    """
    where: dict[str, Any] = {"operator": str(edit.operator), "table": str(edit.table)}
    operator = checkpoint.operator(edit.operator)
    if operator is None or not isinstance(operator.tables.get(edit.table), GlobalKeyedFiles):
        raise InputError(
            f"epoch {checkpoint.epoch} has no such global keyed table",
            **where,
            next_step="`arroyo-state show` lists the tables; rows of others cannot be set",
        )
    config = operator.configs[edit.table]
    reason = internal(config)
    if reason is not None:
        raise InputError(
            f"the table cannot be edited: {reason}",
            **where,
            next_step="`arroyo-state edit offsets` and `watermark` change sources",
        )
    if config.key_type is None or config.value_type is None:
        raise InputError("the job did not record the types of the table", **where)
    key = codec_for(config.key_type).encode(
        typed_value(json_of(edit.key, "key", where), config.key_type)
    )
    table = read_entries(store, operator, edit.table, {key})
    if not any(file.pairs for file in table.files):
        existing = read_entries(store, operator, edit.table)
        raise InputError(
            f"the table has no entry with the key {edit.key:.80}",
            **where,
            keys=", ".join(_some_keys(existing)) or "none",
        )
    value = typed_value(json_of(edit.value, "value", where), config.value_type)
    return changed_entries(table, lambda key, now: value)


def _some_keys(table: GlobalTable) -> Iterator[str]:
    for index, (_, key, _) in enumerate(table.entries()):
        if index == _KEYS_PRINTED:
            return
        yield plain_key(table, key)
