"""Rows that an edit of a managed job removes: file by file, so that the order of replay stays.

Files without such rows are listed on. A key goes with every delete of it; an old row goes, and old
deletes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.bincode.plain_values import typed_value
from arroyo_dagster.state.codec.parquet import (
    GLOBAL_KEY_VALUE_SCHEMA,
    REMOVAL_SCHEMA,
    encode_pair_columns,
)
from arroyo_dagster.state.codec.plain import plain_value
from arroyo_dagster.state.codec.schema import memory_schema
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import RowsMerge
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.layout import REMOVED
from arroyo_dagster.state.model.surgery.edits import KeyDeletion, RetainRows
from arroyo_dagster.state.model.surgery.plans import TableAction, TableStep
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig, TimeFile
from arroyo_dagster.state.model.types import STRING, Primitive, StructOf, Type
from arroyo_dagster.state.operations.restore.revision import RevisionWriter
from arroyo_dagster.state.operations.surgery.managed.entries import internal
from arroyo_dagster.state.operations.surgery.rows import (
    OTHER_OPERATOR,
    expiring_tables,
    is_compared,
    key_condition,
    narrow_batches,
)
from arroyo_dagster.state.planning.compaction.rewrite import TableKey
from arroyo_dagster.state.planning.restore.reads import ALL_KEYS
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.last_writes import decode_pair_columns
from arroyo_dagster.state.tables.merge.conditions import (
    KeyRows,
    OlderRows,
    RowCondition,
    removed_rows,
)
from arroyo_dagster.state.tables.merge.rows import merge_rows

_WINDOW = ("window_start", "window_end")
_ONE_ROW_A_KEY = "it keeps one state a key, whatever its age; delete keys instead"

KeyTest = Callable[[pa.ChunkedArray], pa.Array]
"""Which of the encoded keys of a file are the key."""


@dataclass(frozen=True, slots=True)
class ShorterTable:
    """A table that loses rows, and the files that hold them.

    Attributes:
        removes: of an expiring table the condition of its rows, of a global keyed one that of keys.
        files: the files to replace, by path.
        step: for the plan.
    """

    operator: OperatorCheckpoint
    config: TableConfig
    removes: RowCondition | KeyTest
    files: frozenset[StatePath]
    step: TableStep


def shorter_tables(
    store: ObjectStore, edit: KeyDeletion | RetainRows, checkpoint: Checkpoint
) -> tuple[tuple[ShorterTable, ...], dict[TableKey, str], tuple[str, ...]]:
    """Find the rows that an edit removes. Reads the columns of keys, or of event time, only.

    Returns:
        The tables that lose rows, why each other one stays, and what was not compared.

    Raises:
        InputError: no table of the job has a key of the given form.
        FormatError, NotFoundError: a file is broken, or missing.
    """
    shorter: list[ShorterTable] = []
    stays: dict[TableKey, str] = {}
    has_key = False
    for operator, name, condition in _conditions(edit, checkpoint):
        key = operator.operator, name
        if isinstance(condition, str):
            stays[key] = condition
            continue
        has_key = True
        counts = _counts(store, operator, name, condition)
        rows = sum(all_rows for all_rows, _ in counts.values())
        removed = sum(gone for _, gone in counts.values())
        if not removed:
            stays[key] = f"none of its {rows} rows is removed"
            continue
        files = frozenset(path for path, (_, gone) in counts.items() if gone)
        step = TableStep(
            operator=operator.operator,
            table=name,
            action=TableAction.EMPTIED if removed == rows else TableAction.CHANGED,
            reason=f"{removed} of {rows} stored rows are removed",
            rows=rows,
            removed=removed,
            files=operator.tables[name].paths,
        )
        config = operator.configs[name]
        shorter.append(ShorterTable(operator, config, condition, files, step))
    if isinstance(edit, RetainRows):
        return tuple(shorter), stays, ()
    if not has_key:
        raise InputError(
            f"no table of the job has a key of {len(edit.values)} such values",
            tables="; ".join(
                f"{operator}.{name}: {reason}" for (operator, name), reason in stays.items()
            )
            or "none",
            next_step="give one value for each column of a key, in this order",
        )
    return tuple(shorter), stays, tuple(_not_compared(stays))


def _not_compared(stays: Mapping[TableKey, str]) -> Iterator[str]:
    for (operator, name), reason in stays.items():
        if not is_compared(reason):
            yield f"{operator}.{name} was not compared: {reason}"
    yield "values, other columns than the keys', and keys that contain the value are not searched"


def _conditions(
    edit: KeyDeletion | RetainRows, checkpoint: Checkpoint
) -> Iterator[tuple[OperatorCheckpoint, TableName, RowCondition | KeyTest | str]]:
    """Yield each table of an epoch with the rows to remove, or why it stays."""
    expiring = {table.key for table in expiring_tables(checkpoint)}
    for operator in checkpoint.operators:
        for name in operator.tables:
            config = operator.configs[name]
            condition: RowCondition | KeyTest | str
            if edit.operator not in (None, operator.operator):
                condition = OTHER_OPERATOR
            elif (operator.operator, name) not in expiring:
                condition = _pairs_condition(edit, config)
            else:
                condition = _rows_condition(edit, config.config)
            yield operator, name, condition


def _rows_condition(edit: KeyDeletion | RetainRows, config: object) -> RowCondition | str:
    assert isinstance(config, ExpiringTimeKeyConfig)
    if isinstance(edit, KeyDeletion):
        return managed_key_condition(config, edit.values)
    if config.generational:
        return _ONE_ROW_A_KEY
    return OlderRows(config.schema.timestamp_index, edit.since_micros * 1000)


def managed_key_condition(config: ExpiringTimeKeyConfig, texts: Sequence[str]) -> KeyRows | str:
    """Return the rows of a key; or why the table has no such key.

    Rows that one subtask keeps for all are not routed: there the storage key counts, without the
    bounds of windows.
    """
    if config.schema.hashed_indices or not config.schema.key_indices:
        return key_condition(config, texts)
    schema = memory_schema(config)
    columns = tuple(
        at for at in config.schema.key_indices if schema.field(at).name.lstrip("_") not in _WINDOW
    )
    return key_condition(config, texts, columns)


# ---- keys of global keyed tables -----------------------------------------------------------------


def _pairs_condition(edit: KeyDeletion | RetainRows, config: TableConfig) -> KeyTest | str:
    if isinstance(edit, RetainRows):
        return "its entries have no event time"
    return internal(config) or pairs_condition(config, edit.values)


def pairs_condition(config: TableConfig, texts: Sequence[str]) -> KeyTest | str:
    """Return a test for the encoded keys of a global keyed table; or why it has no such key.

    A key of several fields takes a value for each, the bounds of a window left out.
    """
    kind = config.key_type
    if kind is None:
        return "the types of its entries are not known"
    fields = kind.fields if isinstance(kind, StructOf) else ()
    own = [member for member in fields if member.name not in _WINDOW]
    if len(texts) != (len(own) if fields else 1):
        return f"its key has {len(own) if fields else 1} values"
    try:
        if not fields:
            return partial(_equal, codec_for(kind).encode(_typed(texts[0], kind)))
        values = {
            member.name: plain_value(_typed(text, member.type), member.type)
            for member, text in zip(own, texts, strict=True)
        }
    except InputError:
        return "its key is of another type"
    return partial(_has_fields, kind, values)


def _typed(text: str, kind: Type) -> object:
    if kind in (STRING, Primitive("bytes"), Primitive("char")):
        return typed_value(text, kind)
    try:
        return typed_value(parse_json(text), kind)
    except ValueError:
        return typed_value(text, kind)


def _equal(wanted: bytes, keys: pa.ChunkedArray) -> pa.Array:
    return pc.equal(keys, pa.scalar(wanted, keys.type))


def _has_fields(kind: Type, wanted: Mapping[str, object], keys: pa.ChunkedArray) -> pa.Array:
    codec = codec_for(kind)
    values = (plain_value(codec.decode(key), kind) for key in keys.to_pylist())
    return pa.array([wanted.items() <= value.items() for value in values], pa.bool_())


# ---- counts --------------------------------------------------------------------------------------


def _counts(
    store: ObjectStore,
    operator: OperatorCheckpoint,
    name: TableName,
    condition: RowCondition | KeyTest,
) -> dict[StatePath, tuple[int, int]]:
    """Return by file the number of stored rows, and of those to remove."""
    files, config = operator.tables[name], operator.configs[name]
    count: Callable[[StatePath], tuple[int, int]]
    if isinstance(condition, KeyRows | OlderRows):
        listed = {file.path: file for file in files.files if isinstance(file, TimeFile)}

        def count(path: StatePath) -> tuple[int, int]:
            return count_stored(store, config, listed[path], condition)
    else:

        def count(path: StatePath) -> tuple[int, int]:
            return count_pairs(store, path, condition)

    return dict(zip(files.paths, concurrently(count, files.paths), strict=True))


def count_stored(
    store: ObjectStore, config: TableConfig, file: TimeFile, condition: RowCondition
) -> tuple[int, int]:
    """Return the number of rows of a file, and of those that an edit removes.

    Raises:
        ProtocolError: it holds deletes that cannot be told apart by the key.
        FormatError, NotFoundError: the file is broken, or missing.
    """
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    key = config.config.schema.key_indices or ()
    in_key = not isinstance(condition, KeyRows) or set(condition.columns) <= set(key)
    rows = removed = 0
    for batch, narrow in narrow_batches(store, config.config, file, condition):
        if not in_key and batch.deletes:
            raise ProtocolError(
                "the key is no part of the storage key, so deletes of it cannot be found",
                path=file.path,
                table=config.table,
                next_step="compact the job with the policy `full`, then edit it; nothing was "
                "changed",
            )
        rows += batch.rows.num_rows
        removed += pc.sum(removed_rows(narrow, batch.rows, batch.operations)).as_py() or 0
    return rows, removed


def count_pairs(store: ObjectStore, path: StatePath, test: KeyTest) -> tuple[int, int]:
    """Return the number of entries and removals in a file, and of those of the key.

    Raises:
        FormatError, NotFoundError: the file is broken, or missing.
    """
    keys = decode_pair_columns(store.read(path), path).keys
    return len(keys), pc.sum(test(keys)).as_py() or 0


# ---- new files -----------------------------------------------------------------------------------


def write_shorter(
    writer: RevisionWriter, table: ShorterTable, files: Iterable[StatePath | TimeFile]
) -> tuple[list[StatePath | TimeFile], int]:
    """Write a table's files without the rows, and return its new list and the rows left out.

    Raises:
        ProtocolError: a file reads back different, or still holds such a row.
    """
    listed: list[StatePath | TimeFile] = []
    removed = 0
    for file in files:
        path = file.path if isinstance(file, TimeFile) else file
        if path not in table.files:
            listed.append(file)
            continue
        new: Sequence[StatePath | TimeFile]
        if isinstance(file, TimeFile):
            new, gone = _without_rows(writer, table, file)
        else:
            new, gone = _without_keys(writer, table, file)
        listed += new
        removed += gone
    return listed, removed


def _without_rows(
    writer: RevisionWriter, table: ShorterTable, file: TimeFile
) -> tuple[Sequence[TimeFile], int]:
    assert isinstance(table.removes, KeyRows | OlderRows)
    name, operator = table.config.table, table.operator.operator
    size = writer.store.head(file.path)
    merge = RowsMerge(
        operator=operator,
        table=name,
        inputs=(file,),
        ranges=(ALL_KEYS,),
        cutoff_micros=0,
        size_bytes=0 if size is None else size.size_bytes,
        from_oldest=False,
        level=file.compaction_generation + 1,
    )
    outcome = merge_rows(
        ExpiringTimeKeyTable(table.config, writer.store),
        writer.store,
        merge,
        lambda keys, suffix: writer.name_file(operator, name, suffix),
        removes=table.removes,
    )
    outputs = [output for output in outcome.merged.outputs if isinstance(output, TimeFile)]
    left = sum(count_stored(writer.store, table.config, out, table.removes)[1] for out in outputs)
    if left or not outcome.same:
        raise _not_as_intended(table, file.path)
    return outputs, outcome.rows_in - outcome.rows_out


def _without_keys(
    writer: RevisionWriter, table: ShorterTable, path: StatePath
) -> tuple[Sequence[StatePath], int]:
    assert not isinstance(table.removes, KeyRows | OlderRows)
    before = decode_pair_columns(writer.store.read(path), path)
    stays = pc.invert(table.removes(before.keys))
    keys, seconds = before.keys.filter(stays), before.seconds.filter(stays)
    gone = len(before.keys) - len(keys)
    if not len(keys):
        return [], gone
    new = writer.name_file(
        table.operator.operator, table.config.table, REMOVED if before.removals else ""
    )
    schema = REMOVAL_SCHEMA if before.removals else GLOBAL_KEY_VALUE_SCHEMA
    data = encode_pair_columns(
        keys.combine_chunks(), seconds.combine_chunks(), schema, version=before.version
    )
    writer.store.put(new, data)
    after = decode_pair_columns(writer.store.read(new), new)
    same = after.keys.equals(keys) and after.seconds.equals(seconds)
    if not same or (after.version, after.removals) != (before.version, before.removals):
        raise _not_as_intended(table, path)
    return [new], gone


def _not_as_intended(table: ShorterTable, path: StatePath) -> ProtocolError:
    return ProtocolError(
        "a new file does not hold exactly the rows that stay; nothing was published",
        operator=table.operator.operator,
        table=table.config.table,
        path=path,
        next_step="report it; the job is unchanged",
    )
