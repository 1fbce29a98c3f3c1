"""Carry stored states over to a changed definition: renamed, dropped, with other columns or types.

Files of a state that is only renamed, dropped or declared again stay as they are. Others are
converted file by file, under new names.

Source: the decision `sdf-changed-states.md`; error E50.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef, StateForm
from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.errors import StateSchemaError
from arroyo_dagster.dataflow.revisions.conversion import Misfit, converted_columns, misfits
from arroyo_dagster.dataflow.revisions.stored import StoredService, read_stored
from arroyo_dagster.dataflow.runtime.service import service_order
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.engine_tables import (
    DROPPED,
    SCHEMAS,
    SCHEMAS_CONFIG,
    has_unflushed,
    stored_schemas,
)
from arroyo_dagster.dataflow.storage.state_changes import StateChange, advice, state_changes
from arroyo_dagster.dataflow.storage.state_tables import (
    FLUSHED,
    VALUE,
    WindowKey,
    flushed_config,
    state_config,
)
from arroyo_dagster.dataflow.storage.values import arrow_type, bincode_type
from arroyo_dagster.dataflow.views.snapshots import (
    EVERY_KEY,
    FLUSH,
    STATES,
    frame_of_pairs,
    frame_of_rows,
)
from arroyo_dagster.dataflow.views.view import service_paths
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import Epoch, OperatorId, TableName
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.restore.revision import (
    RevisedContent,
    RevisionWriter,
    publish_revision,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable
from arroyo_dagster.state.tables.time_files import write_time_file

_SHOWN = 5
"""The number of values that do not fit which an error shows."""


@dataclass(frozen=True, slots=True)
class ServiceMigration:
    """What carries the stored states of one service over to its definition.

    Attributes:
        stored: the states as they are.
        owned: the states as they are defined.
        changes: those of stored states that need it.
        rows: how many rows each of them has, in the same order.
    """

    stored: StoredService
    owned: tuple[StateDef, ...]
    changes: tuple[StateChange, ...]
    rows: tuple[int, ...]

    @property
    def service(self) -> str:
        """The name of the service."""
        return self.stored.name

    def texts(self) -> list[str]:
        """Describe each change and what happens to the rows."""
        return [
            f"{'; '.join(change.texts)}: {rows} rows {_fate(change)}"
            for change, rows in zip(self.changes, self.rows, strict=True)
        ]


def _fate(change: StateChange) -> str:
    if change.state is not None:
        return "carried over"
    return (
        "kept aside, unread; a state with `was: "
        f"{change.stored}` takes them; `sdf clean DATAFLOW --state …/{change.stored}` removes them"
    )


def plan_migration(dataflow: Dataflow, store: ObjectStore) -> list[ServiceMigration]:
    """Return what must be migrated before the services of a dataflow can run. Writes nothing.

    Raises:
        StateSchemaError: E50, rows cannot be carried over: the kind of a state or its windows have
            changed, or values do not fit; names the first of these.
        CheckpointError: the newest epoch of a service cannot be read (E51).
    """
    found = []
    for service in service_order(dataflow):
        stored = read_stored(store, dataflow, service)
        if stored is None:
            continue
        states = dataflow.services[service].states.values()
        owned = tuple(state for state in states if state.form is StateForm.TYPED)
        changes = state_changes(stored.schemas, stored.aside, owned)
        needed = tuple(change for change in changes if change.needs_revision)
        for change in needed:
            _check(stored, change, changes, owned)
        if needed:
            counts = tuple(stored.rows(one.stored, aside=one.aside) for one in needed)
            found.append(ServiceMigration(stored, owned, needed, counts))
    return found


def _check(
    stored: StoredService,
    change: StateChange,
    changes: Sequence[StateChange],
    owned: Sequence[StateDef],
) -> None:
    state = change.state
    taking = [one.state for one in changes]
    free = [one for one in owned if one not in taking]
    if state is None and change.stored in stored.aside:
        kept = any(one.aside and one.stored == change.stored and one.state for one in changes)
        if not kept:
            raise _refused(
                stored,
                change,
                f"rows of an earlier state `{change.stored}` are kept aside already",
                f"remove them first: `arroyo-state sdf clean DATAFLOW --state "
                f"{stored.name}/{change.stored}`",
            )
    if has_unflushed(stored.store, stored.head.operator(FLUSH)):
        raise _refused(
            stored,
            change,
            "windows of the service wait to be flushed again",
            "run it once with the former definition, so that flush succeeds",
        )
    if state is None:
        return
    if not change.differences.convertible:
        raise _refused(stored, change, "", advice(change, free, stored.name))
    before = stored.definition(change.stored, aside=change.aside)
    wrong: list[Misfit] = []
    for frame in stored.frames(change.stored, aside=change.aside):
        wrong += misfits(frame, state, before.key_type)
    if wrong:
        shown = "; ".join(map(str, wrong[:_SHOWN]))
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        columns = sorted({one.column for one in wrong} - {KEY})
        step = (
            f"declare how `{columns[0]}` is computed: `convert: <SQL over the stored columns>` "
            "beside its type; or correct the rows with the former definition"
            if columns
            else "keep the type of the keys, or remove these rows with the former definition"
        )
        raise _refused(stored, change, f"{len(wrong)} values do not fit: {shown}{more}", step)


def _refused(
    stored: StoredService, change: StateChange, why: str, next_step: str
) -> StateSchemaError:
    state = change.state
    return StateSchemaError(
        "; ".join(text for text in (*change.texts, why) if text),
        number="E50",
        service=stored.name,
        path=None if state is None else state.path,
        line=None if state is None else state.line,
        next_step=f"{next_step}; nothing was changed",
    )


def run_migration(
    dataflow: Dataflow,
    store: ObjectStore,
    plan: ServiceMigration,
    *,
    owner: str = "sdf run --migrate",
    clock: Clock = wall_clock,
) -> Epoch:
    """Carry the states of one service over, and return the epoch that holds them.

    The epoch before stays pinned. Interrupted at any point, all states are as before or carried
    over.

    Raises:
        ConflictError: the service has written an epoch since the plan was made.
        Further errors as of `publish_revision`.
    """
    return publish_revision(
        store,
        service_paths(dataflow, plan.service),
        plan.stored.head,
        partial(_revised, plan),
        reason="before the definition changed (sdf run --migrate)",
        owner=owner,
        clock=clock,
    )


# ---- the new epoch -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    config: TableConfig
    files: TableFiles


class _Operators:
    """The operators of an epoch, whose tables are taken out and put in."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base
        self._tables = {
            one.operator: {
                name: _Table(one.configs[name], files) for name, files in one.tables.items()
            }
            for one in base.operators
        }

    def take(self, operator: OperatorId, table: str) -> _Table | None:
        """Remove a table, and return it."""
        return self._tables.get(operator, {}).pop(TableName(table), None)

    def put(self, operator: OperatorId, table: _Table) -> None:
        """Add a table, or replace it."""
        self._tables.setdefault(operator, {})[table.config.table] = table

    def done(self) -> tuple[OperatorCheckpoint, ...]:
        """Return the operators; without tables, only those that the epoch has already."""
        known = {one.operator: one for one in self._base.operators}
        states = known[STATES]
        for name in self._tables:
            # An operator that is new here expires its rows by the watermark of the states.
            known.setdefault(name, replace(states, operator=name))
        return tuple(
            replace(
                known[name],
                tables={table: one.files for table, one in sorted(tables.items())},
                configs={table: one.config for table, one in sorted(tables.items())},
            )
            for name, tables in self._tables.items()
        )


def _revised(plan: ServiceMigration, base: Checkpoint, writer: RevisionWriter) -> RevisedContent:
    operators = _Operators(base)
    # All are taken before one is put: names may be exchanged.
    taken = [(change, _taken(operators, change)) for change in plan.changes]
    for change, tables in taken:
        for operator, suffix, table in tables:
            name = TableName(f"{change.state.name if change.state else change.stored}{suffix}")
            if change.state is None:
                operators.put(DROPPED, _named(table, name))
            elif change.differences.texts:
                operators.put(operator, _converted(plan.stored, change, table, operator, writer))
            else:
                operators.put(operator, _named(table, name))
    _put_schemas(operators, plan, writer)
    return RevisedContent(operators.done())


def _taken(operators: _Operators, change: StateChange) -> list[tuple[OperatorId, str, _Table]]:
    found = []
    for operator, suffix in ((STATES, ""), (FLUSH, FLUSHED)):
        place = DROPPED if change.aside else operator
        table = operators.take(place, f"{change.stored}{suffix}")
        if table is not None:
            found.append((operator, suffix, table))
    return found


def _named(table: _Table, name: TableName) -> _Table:
    config = cast(Any, table.config.config)
    return replace(table, config=replace(table.config, config=replace(config, table=name)))


def _put_schemas(operators: _Operators, plan: ServiceMigration, writer: RevisionWriter) -> None:
    now, aside = dict(plan.stored.schemas), dict(plan.stored.aside)
    texts = [(aside if change.aside else now).pop(change.stored) for change in plan.changes]
    for change, text in zip(plan.changes, texts, strict=True):
        if change.state is None:
            aside[change.stored] = text
        else:
            now.update(stored_schemas([change.state]))
    for operator, schemas in ((STATES, now), (DROPPED, aside)):
        operators.take(operator, SCHEMAS)
        if schemas:
            operators.put(operator, schemas_table(operator, schemas, writer))


def schemas_table(
    operator: OperatorId, schemas: Mapping[str, str], writer: RevisionWriter
) -> _Table:
    """Write the stored schemas of an operator as one file."""
    text = codec_for(str)
    pairs = {text.encode(name): text.encode(schema) for name, schema in schemas.items()}
    path = writer.put_pairs(operator, SCHEMAS_CONFIG.table, pairs)
    return _Table(SCHEMAS_CONFIG, GlobalKeyedFiles(files=(path,)))


# ---- conversions ---------------------------------------------------------------------------------


def _converted(
    stored: StoredService,
    change: StateChange,
    table: _Table,
    operator: OperatorId,
    writer: RevisionWriter,
) -> _Table:
    state = change.state
    assert state is not None
    config = flushed_config(state) if operator == FLUSH else state_config(state)
    if isinstance(table.files, GlobalKeyedFiles):
        return _converted_pairs(table, table.files, state, config, operator, writer)
    before = stored.definition(change.stored, aside=change.aside)
    converted = (
        _converted_file(table.config, file, before, state, config, operator, writer)
        for file in table.files.files
    )
    files = tuple(file for file in converted if file is not None)
    return _Table(config, ExpiringTimeKeyFiles(files=files))


def _converted_pairs(
    table: _Table,
    files: GlobalKeyedFiles,
    state: StateDef,
    config: TableConfig,
    operator: OperatorId,
    writer: RevisionWriter,
) -> _Table:
    """Convert the values of a primitive state; its keys are stored as text, and stay."""
    assert table.config.value_type is not None
    assert state.scalar_type is not None
    keys, last = GlobalKeyedTable(table.config, writer.store).last_columns(files.files)
    there = last.is_valid()
    keys, last = keys.filter(there), last.filter(there)
    if not len(keys):
        return _Table(config, GlobalKeyedFiles())
    keyed_by_window = operator == STATES and state.window is not None
    frame = frame_of_pairs(
        codec_for(WindowKey if keyed_by_window else str).decode_column(keys),
        codec_for(table.config.value_type).decode_column(last),
    )
    fitting = _filled(converted_columns(frame, state)[VALUE], state.scalar_type)
    encoded = codec_for(bincode_type(state.scalar_type)).encode_many(fitting.to_list())
    pairs = dict(zip(keys.to_pylist(), encoded, strict=True))
    path = writer.put_pairs(operator, config.table, pairs, version=config.state_version)
    return _Table(config, GlobalKeyedFiles(files=(path,)))


def _converted_file(
    before_config: TableConfig,
    file: TimeFile,
    before: StateDef,
    state: StateDef,
    config: TableConfig,
    operator: OperatorId,
    writer: RevisionWriter,
) -> TimeFile | None:
    """Convert one file, with its replaced rows and its deletes; None if no row of it is left.

    A replaced row whose values do not fit gets defaults: nothing reads it.
    """
    parts = ExpiringTimeKeyTable(before_config, writer.store).read([file], EVERY_KEY)
    rows = pa.concat_tables([part.rows for part in parts])
    if not rows.num_rows:
        return None
    operations = pa.chunked_array(
        [chunk for part in parts for chunk in part.operations.chunks], parts[0].operations.type
    )
    types = {column.name: column.type for column in state.columns}
    columns = {
        name: _filled(values, types[name]).to_arrow().cast(arrow_type(types[name]))
        for name, values in converted_columns(frame_of_rows(before, rows), state).items()
    }
    table = ExpiringTimeKeyTable(config, writer.store)
    arrays = [
        columns.get(name) if name in columns else rows.column(name)
        for name in table.memory_schema.names
    ]
    hashed = [arrays[index] for index in table.config.schema.hashed_indices]
    arrays += [key_hashes(hashed, rows=rows.num_rows), operations.cast(pa.binary())]
    written, _ = write_time_file(
        writer.store,
        pa.Table.from_arrays(arrays, schema=table.file_schema),
        writer.name_file(operator, config.table),
        epoch=writer.epoch,
        timestamp_index=table.timestamp_index,
    )
    return written


def _filled(values: pl.Series, scalar: ScalarType) -> pl.Series:
    if not values.null_count():
        return values
    default = pl.Series([scalar.default]).cast(values.dtype)[0]
    return values.fill_null(default)
