"""Rows of expiring tables that an edit removes: which tables, which rows, how many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.schema import memory_schema
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import TableName
from arroyo_dagster.state.model.rewrite import RewriteRule, TableRewrite
from arroyo_dagster.state.model.surgery.edits import KeyDeletion, RetainRows
from arroyo_dagster.state.model.surgery.plans import TableAction, TableStep
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles, TimeFile
from arroyo_dagster.state.operations.query.keys import parse_value
from arroyo_dagster.state.planning.compaction.rewrite import (
    UNKNOWN_TABLE,
    TableFacts,
    TableKey,
    rule_for,
    whole_table,
)
from arroyo_dagster.state.planning.restore.reads import ALL_KEYS
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.live_rows import StoredRows
from arroyo_dagster.state.tables.merge.conditions import KeyRows, OlderRows, RowCondition
from arroyo_dagster.state.tables.time_files import ReadRequest, TimeFileReader

_NO_KEY = "its rows have no key"
OTHER_OPERATOR = "another operator was named"


@dataclass(frozen=True, slots=True)
class RewrittenRows:
    """A table whose rows are written anew, without those that an edit removes.

    Attributes:
        rewrite: of all files of the table.
        condition: which rows are removed; None = none.
        step: for the plan.
    """

    rewrite: TableRewrite
    condition: RowCondition | None
    step: TableStep


@dataclass(frozen=True, slots=True)
class _RowTable:
    operator: OperatorCheckpoint
    name: TableName
    config: ExpiringTimeKeyConfig
    files: ExpiringTimeKeyFiles

    @property
    def key(self) -> TableKey:
        return self.operator.operator, self.name


def row_changes(
    store: ObjectStore, edit: KeyDeletion | RetainRows, checkpoint: Checkpoint, facts: TableFacts
) -> tuple[tuple[RewrittenRows, ...], dict[TableKey, str], tuple[str, ...]]:
    """Find the rows that an edit removes. Reads the columns of keys, or of event time, only.

    Returns:
        The expiring tables that change, why each other one stays, and what was not compared.

    Raises:
        InputError: no table of the job has a key of the given form; or a table that holds such rows
            cannot be rewritten.
        FormatError, NotFoundError: a file is broken, or missing.
    """
    stays: dict[TableKey, str] = {}
    conditions: dict[TableKey, RowCondition] = {}
    tables = {table.key: table for table in expiring_tables(checkpoint)}
    for key, table in tables.items():
        found = _condition(edit, table)
        if isinstance(found, str):
            stays[key] = found
        else:
            conditions[key] = found
    if isinstance(edit, KeyDeletion) and not conditions:
        raise _no_such_key(edit, tables.values())
    counts = {key: _count(store, tables[key], condition) for key, condition in conditions.items()}
    changed = _with_siblings({key for key, (_, removed) in counts.items() if removed}, tables)
    steps = []
    for key, condition in conditions.items():
        rows, removed = counts[key]
        if key not in changed:
            stays[key] = f"none of its {rows} rows is removed"
            continue
        steps.append(_removed(tables[key], facts, condition, rows, removed))
    return tuple(steps), stays, tuple(_not_compared(edit, tables, stays))


def expiring_tables(checkpoint: Checkpoint) -> Iterator[_RowTable]:
    """Yield the expiring tables of an epoch that have a configuration."""
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            config = operator.configs[name].config if name in operator.configs else None
            if isinstance(files, ExpiringTimeKeyFiles) and isinstance(
                config, ExpiringTimeKeyConfig
            ):
                yield _RowTable(operator, name, config, files)


# ---- conditions ----------------------------------------------------------------------------------


def _condition(edit: KeyDeletion | RetainRows, table: _RowTable) -> RowCondition | str:
    """Return the rows to remove from a table, or why it stays."""
    if edit.operator not in (None, table.operator.operator):
        return OTHER_OPERATOR
    rule = rule_for(table.config)
    if rule is None:
        return UNKNOWN_TABLE
    if isinstance(edit, KeyDeletion):
        return key_condition(table.config, edit.values)
    if rule.aggregate:
        return "an aggregate keeps one state a key, whatever its age; delete keys instead"
    return OlderRows(table.config.schema.timestamp_index, edit.since_micros * 1000)


def key_condition(
    config: ExpiringTimeKeyConfig, texts: Sequence[str], columns: tuple[int, ...] | None = None
) -> KeyRows | str:
    """Return the rows of a key, by the columns that route them; or why the table has no such key.

    Of table `b` of an aggregate these are the columns of the group.

    Args:
        columns: the places of the key columns, if they are others.
    """
    indices = config.schema.hashed_indices if columns is None else columns
    if not indices:
        return _NO_KEY
    schema = memory_schema(config)
    kinds = [schema.field(index).type for index in indices]
    form = ", ".join(
        f"{schema.field(index).name} {kind}" for index, kind in zip(indices, kinds, strict=True)
    )
    if len(indices) != len(texts):
        return f"its key has {len(indices)} columns ({form})"
    try:
        values = tuple(
            pa.scalar(parse_value(text, "key", kind), kind)
            for text, kind in zip(texts, kinds, strict=True)
        )
    except (InputError, pa.ArrowException, OverflowError):
        return f"its key is of another type ({form})"
    if any(pa.types.is_nested(value.type) for value in values):
        return f"its key is nested, and such keys are not compared ({form})"
    return KeyRows(indices, values)


def _no_such_key(edit: KeyDeletion, tables: Iterable[_RowTable]) -> InputError:
    forms = {
        f"{t.operator.operator}.{t.name}: "
        + ", ".join(
            f"{memory_schema(t.config).field(at).name} {memory_schema(t.config).field(at).type}"
            for at in t.config.schema.hashed_indices
        )
        for t in tables
    }
    return InputError(
        f"no table of the job has a key of {len(edit.values)} such values",
        keys="; ".join(sorted(forms)) or "none",
        next_step="give one value for each column of a key, in this order",
    )


def _not_compared(
    edit: KeyDeletion | RetainRows,
    tables: Mapping[TableKey, _RowTable],
    stays: Mapping[TableKey, str],
) -> Iterator[str]:
    if isinstance(edit, RetainRows):
        return
    for (operator, name), reason in stays.items():
        if not is_compared(reason) and reason not in (_NO_KEY, OTHER_OPERATOR):
            yield f"{operator}.{name} was not compared: {reason}"
    if any(table.config.description == "batch_state" for table in tables.values()):
        yield (
            "arguments of distinct aggregates (args_row of tables `b`) of other keys are not "
            "searched"
        )
    yield "other columns than the keys', and keys that contain the value, are not searched"


def is_compared(reason: str) -> bool:
    """Return whether a table stays because it was searched and holds no such row."""
    return reason.startswith("none of its")


# ---- counts --------------------------------------------------------------------------------------


def _count(store: ObjectStore, table: _RowTable, condition: RowCondition) -> tuple[int, int]:
    """Return the number of stored rows, and of those to remove."""
    rows = removed = 0
    for file in table.files.files:
        stored, matching = count_rows(store, table.config, file, condition)
        rows, removed = rows + stored, removed + matching
    return rows, removed


def count_rows(
    store: ObjectStore, config: ExpiringTimeKeyConfig, file: TimeFile, condition: RowCondition
) -> tuple[int, int]:
    """Return the number of rows of a file, and of those that fulfil a condition.

    Raises:
        FormatError, NotFoundError: the file is broken, or missing.
    """
    rows = removed = 0
    for batch, narrow in narrow_batches(store, config, file, condition):
        rows += batch.rows.num_rows
        removed += pc.sum(narrow.mask(batch.rows)).as_py() or 0
    return rows, removed


def narrow_batches(
    store: ObjectStore, config: ExpiringTimeKeyConfig, file: TimeFile, condition: RowCondition
) -> Iterator[tuple[StoredRows, RowCondition]]:
    """Yield a file with only the columns of a condition, which is moved to their places."""
    narrow: RowCondition
    if isinstance(condition, KeyRows):
        columns = tuple(sorted(set(condition.columns)))
        narrow = KeyRows(tuple(map(columns.index, condition.columns)), condition.values)
    else:
        columns = (condition.column,)
        narrow = OlderRows(0, condition.before_nanos)
    request = ReadRequest(keys=ALL_KEYS, columns=columns)
    for batch in TimeFileReader(config, store).stream([file], request):
        yield batch, narrow


def _with_siblings(changed: set[TableKey], tables: Mapping[TableKey, _RowTable]) -> set[TableKey]:
    """Add the other table of each aggregate: both are rewritten together."""
    aggregates = {key[0] for key in changed if tables[key].config.generational}
    return changed | {
        key for key, table in tables.items() if key[0] in aggregates and table.config.generational
    }


def _removed(
    table: _RowTable, facts: TableFacts, condition: RowCondition, rows: int, removed: int
) -> RewrittenRows:
    rewrite = whole_table(table.operator, table.name, facts)
    if isinstance(rewrite, str) or rewrite.rule is RewriteRule.UNKEYED:
        raise InputError(
            f"a table with {removed} such rows cannot be rewritten: {rewrite}",
            operator=table.operator.operator,
            table=table.name,
            next_step="nothing was changed; name other operators with --operator",
        )
    reason = f"{removed} of {rows} stored rows are removed"
    if not removed:
        reason = "rewritten with the other table of its aggregate; no row is removed"
    step = TableStep(
        operator=table.operator.operator,
        table=table.name,
        action=TableAction.EMPTIED if removed == rows else TableAction.CHANGED,
        reason=reason,
        rows=rows,
        removed=removed,
        files=table.files.paths,
    )
    return RewrittenRows(rewrite, condition, step)
