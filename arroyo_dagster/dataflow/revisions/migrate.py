"""Carry stored states over to a changed definition: renamed, dropped, with other columns or types.

Files of a state that is only renamed, dropped or declared again stay as they are. Others are
converted file by file, under new names.

Source: the decision `sdf-changed-states.md`; error E50.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import polars as pl
import polars.exceptions as polars_errors
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef, StateForm, ValueKind
from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.errors import StateSchemaError
from arroyo_dagster.dataflow.revisions.content import RevisedTable, RevisedTables
from arroyo_dagster.dataflow.revisions.stored import StoredService, read_stored
from arroyo_dagster.dataflow.runtime.service import service_order
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.engine_tables import DROPPED, has_unflushed, stored_schemas
from arroyo_dagster.dataflow.storage.state_changes import StateChange, advice, state_changes
from arroyo_dagster.dataflow.storage.state_tables import (
    FLUSHED,
    VALUE,
    WindowKey,
    flushed_config,
    state_columns,
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
from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import Epoch, OperatorId, TableName
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.operations.restore.revision import (
    BEFORE_MIGRATION,
    RevisedContent,
    RevisionWriter,
    publish_revision,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable
from arroyo_dagster.state.tables.time_files import write_time_file

_LISTED = 5
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
            f"{'; '.join(change.texts)}: {rows} rows {_fate(change, self.service)}"
            for change, rows in zip(self.changes, self.rows, strict=True)
        ]


def _fate(change: StateChange, service: str) -> str:
    if change.state is not None:
        return "carried over"
    return (
        f"kept, unread; a state with `was: {change.stored}` takes them; `sdf clean DATAFLOW "
        f"--state {service}/{change.stored}` removes them"
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
        changes = state_changes(stored.schemas, stored.dropped, owned)
        needed = tuple(change for change in changes if change.needs_revision)
        for change in needed:
            _check(stored, change, changes, owned)
        if needed:
            counts = tuple(stored.rows(change.stored, dropped=change.dropped) for change in needed)
            found.append(ServiceMigration(stored, owned, needed, counts))
    return found


def _check(
    stored: StoredService,
    change: StateChange,
    changes: Sequence[StateChange],
    owned: Sequence[StateDef],
) -> None:
    state = change.state
    taking = [other.state for other in changes]
    free = [definition for definition in owned if definition not in taking]
    if state is None and change.stored in stored.dropped:
        kept = any(
            other.dropped and other.stored == change.stored and other.state for other in changes
        )
        if not kept:
            raise _refused(
                stored,
                change,
                f"rows of an earlier state `{change.stored}` are kept unread already",
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
    before = stored.definition(change.stored, dropped=change.dropped)
    wrong: list[Misfit] = []
    for frame in stored.frames(change.stored, dropped=change.dropped):
        wrong += misfits(frame, state, before.key_type)
    if wrong:
        shown = "; ".join(map(str, wrong[:_LISTED]))
        more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        columns = sorted({misfit.column for misfit in wrong} - {KEY})
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
        ArroyoStateError: as of `publish_revision`.
    """
    return publish_revision(
        store,
        service_paths(dataflow, plan.service),
        plan.stored.head,
        partial(_revised, plan),
        reason=BEFORE_MIGRATION,
        owner=owner,
        clock=clock,
    )


def migrate(
    dataflow: Dataflow, store: ObjectStore, *, owner: str = "sdf run --migrate"
) -> Iterator[tuple[ServiceMigration, Epoch]]:
    """Plan and run the migration of every service; yield each with the epoch that holds it.

    Raises:
        ConflictError: a service is running, or was started meanwhile.
        ArroyoStateError: as of `plan_migration` and `run_migration`.
    """
    for plan in plan_migration(dataflow, store):
        try:
            yield plan, run_migration(dataflow, store, plan, owner=owner)
            continue
        except ConflictError as error:
            # A migration that was killed may have left an epoch that only a start claims: this one
            # has claimed it.
            again = [
                later for later in plan_migration(dataflow, store) if later.service == plan.service
            ]
            if again and again[0].stored.head.ref == plan.stored.head.ref:
                raise error
        for later in again:
            yield later, run_migration(dataflow, store, later, owner=owner)


# ---- the new epoch -------------------------------------------------------------------------------


def _revised(plan: ServiceMigration, base: Checkpoint, writer: RevisionWriter) -> RevisedContent:
    operators = RevisedTables(base)
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


def _taken(
    operators: RevisedTables, change: StateChange
) -> list[tuple[OperatorId, str, RevisedTable]]:
    found = []
    for operator, suffix in ((STATES, ""), (FLUSH, FLUSHED)):
        place = DROPPED if change.dropped else operator
        table = operators.take(place, f"{change.stored}{suffix}")
        if table is not None:
            found.append((operator, suffix, table))
    return found


def _named(table: RevisedTable, name: TableName) -> RevisedTable:
    config = cast(Any, table.config.config)
    return replace(table, config=replace(table.config, config=replace(config, table=name)))


def _put_schemas(operators: RevisedTables, plan: ServiceMigration, writer: RevisionWriter) -> None:
    now, dropped = dict(plan.stored.schemas), dict(plan.stored.dropped)
    texts = [(dropped if change.dropped else now).pop(change.stored) for change in plan.changes]
    for change, text in zip(plan.changes, texts, strict=True):
        if change.state is None:
            dropped[change.stored] = text
        else:
            now.update(stored_schemas([change.state]))
    operators.put_schemas(STATES, now, writer)
    operators.put_schemas(DROPPED, dropped, writer)


# ---- conversions ---------------------------------------------------------------------------------


def _converted(
    stored: StoredService,
    change: StateChange,
    table: RevisedTable,
    operator: OperatorId,
    writer: RevisionWriter,
) -> RevisedTable:
    state = change.state
    assert state is not None
    as_pairs = isinstance(table.files, GlobalKeyedFiles)
    flushed = operator == FLUSH
    config = flushed_config(state) if flushed else state_config(state, as_pairs=as_pairs)
    if isinstance(table.files, GlobalKeyedFiles):
        # Convert the values of a primitive state; its keys are stored as text, and stay.
        assert table.config.value_type is not None
        assert state.scalar_type is not None
        keys, last = GlobalKeyedTable(table.config, writer.store).last_columns(table.files.files)
        there = last.is_valid()
        keys, last = keys.filter(there), last.filter(there)
        if not len(keys):
            return RevisedTable(config, GlobalKeyedFiles())
        keyed_by_window = operator == STATES and state.window is not None
        frame = frame_of_pairs(
            codec_for(WindowKey if keyed_by_window else str).decode_column(keys),
            codec_for(table.config.value_type).decode_column(last),
        )
        fitting = _filled(converted_columns(frame, state)[VALUE], state.scalar_type)
        encoded = codec_for(bincode_type(state.scalar_type)).encode_many(fitting.to_list())
        pairs = dict(zip(keys.to_pylist(), encoded, strict=True))
        path = writer.put_pairs(operator, config.table, pairs, version=config.state_version)
        return RevisedTable(config, GlobalKeyedFiles(files=(path,)))
    before = stored.definition(change.stored, dropped=change.dropped)
    converted = (
        _converted_file(table.config, file, before, state, config, operator, writer)
        for file in table.files.files
    )
    files = tuple(file for file in converted if file is not None)
    return RevisedTable(config, ExpiringTimeKeyFiles(files=files))


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
    types = {column.name: column.type for column in state_columns(state)}
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


# ---- convert the values of a state to another definition, and find those that do not fit ---------
# Nothing is rounded or cut off: a value fits if the new type holds exactly it.
#
# Source: the decision `sdf-changed-states.md`.


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that the new definition cannot hold. `key`: of its row."""

    key: str
    column: str
    value: Any
    type: ScalarType

    def __str__(self) -> str:
        return f"key {self.key!r}, `{self.column}`: {self.value!r} is no {self.type.value}"


def converted_columns(frame: pl.DataFrame, state: StateDef) -> dict[str, pl.Series]:
    """Convert the columns of stored rows to those of a definition.

    Args:
        frame: `_key` and the stored columns; of a primitive state, `_key` and `value`.
        state: the definition.

    Returns:
        By name, each value as the definition has it; null where it does not fit. Columns that are
        not stored, and have no `convert`, hold the default. A `convert` counts only where a column
        is not stored yet, or with another type: what it has made is not converted again.

    Raises:
        StateSchemaError: E50, a `convert` cannot be computed.
    """
    if state.value_kind is not ValueKind.ROW:
        assert state.scalar_type is not None
        wanted = [(VALUE, state.scalar_type, state.convert)]
    else:
        wanted = [(column.name, column.type, column.convert) for column in state.columns]
    found = {}
    for name, scalar, convert in wanted:
        if name in frame.columns and frame.schema[name] == _dtype(scalar):
            values = frame[name]
        elif convert is not None:
            values = _computed(frame, state, name, convert)
        elif name in frame.columns:
            values = frame[name]
        else:
            values = pl.Series(name, [scalar.default]).new_from_index(0, frame.height)
        found[name] = fitted(values, scalar).alias(name)
    return found


def misfits(frame: pl.DataFrame, state: StateDef, key_type: ScalarType | None) -> list[Misfit]:
    """Return the values of stored rows that a definition cannot hold.

    Args:
        frame, state: as in `converted_columns`. Null values are defaults, which fit.
        key_type: the type of the keys before; None = unchanged.
    """
    found: list[Misfit] = []
    keys = frame[KEY]
    types = {column.name: column.type for column in state.columns}
    for name, values in converted_columns(frame, state).items():
        scalar = types.get(name) or state.scalar_type
        assert scalar is not None
        wrong = values.is_null()
        if name in frame.columns:
            wrong = wrong & frame[name].is_not_null()
            shown = frame[name]
        else:
            shown = values
        for key, value in zip(keys.filter(wrong), shown.filter(wrong), strict=True):
            found.append(Misfit(key, name, value, scalar))
    if key_type is not None and state.key_type not in (None, key_type, ScalarType.STRING):
        assert state.key_type is not None
        # A key is stored as text: it fits if its text is that of a key of the new type.
        same = (fitted(keys, state.key_type).cast(pl.String) == keys).fill_null(value=False)
        found += [Misfit(key, KEY, key, state.key_type) for key in keys.filter(~same)]
    return found


def fitted(values: pl.Series, scalar: ScalarType) -> pl.Series:
    """Convert values to a type; null where the type does not hold exactly the value."""
    target = _dtype(scalar)
    if values.dtype == target:
        return values
    if isinstance(values.dtype, pl.Decimal):  # of an expression
        values = values.cast(pl.Float64)
    if target == pl.Boolean:
        text = values.cast(pl.String)
        known = {"true": True, "false": False}
        return text.replace_strict(known, default=None, return_dtype=pl.Boolean)
    if values.dtype == pl.Boolean and target != pl.String:
        values = values.cast(pl.UInt8)
    if isinstance(target, pl.Datetime):
        if not values.dtype.is_integer():
            return pl.Series(values.name, [None], dtype=target).new_from_index(0, len(values))
        return values.cast(pl.Int64, strict=False).cast(target)
    if isinstance(values.dtype, pl.Datetime):
        values = values.cast(pl.Int64)
    result = values.cast(target, strict=False)
    if values.dtype.is_numeric() and target.is_numeric():
        back = result.cast(values.dtype, strict=False)
        exact = (back == values).fill_null(value=False)
        if values.dtype.is_float() and target.is_float():
            exact = exact | result.is_finite()  # f32 rounds
        result = _only(result, exact)
    if target.is_float():
        result = _only(result, result.is_finite().fill_null(value=False))
    return result


def _only(values: pl.Series, where: pl.Series) -> pl.Series:
    return pl.select(pl.when(where).then(values)).to_series().alias(values.name)


def _dtype(scalar: ScalarType) -> Any:
    empty = pl.from_arrow(pa.chunked_array([], arrow_type(scalar)))
    return cast(pl.Series, empty).dtype


def _computed(frame: pl.DataFrame, state: StateDef, name: str, convert: str) -> pl.Series:
    try:
        found = frame.select(pl.sql_expr(convert).alias(name))[name]
    except (polars_errors.PolarsError, pl.exceptions.SQLInterfaceError) as error:
        first = str(error).strip().splitlines()[0]
        raise _unusable(frame.columns, state, name, convert, first) from error
    if len(found) == 1 and frame.height != 1:
        return found.new_from_index(0, frame.height)  # a constant
    if len(found) != frame.height:
        raise _unusable(frame.columns, state, name, convert, "it yields not one value per row")
    return found


def _unusable(
    columns: Sequence[str], state: StateDef, name: str, convert: str, why: str
) -> StateSchemaError:
    return StateSchemaError(
        f"`convert` of `{name}` of state `{state.name}` cannot be computed: {why}",
        number="E50",
        path=state.path,
        line=state.line,
        convert=convert,
        next_step=f"give an SQL expression over the stored columns: {', '.join(columns)}",
    )
