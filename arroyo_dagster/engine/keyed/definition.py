"""Registration of keyed state and timers: which columns their tables have, and what they mean."""

from __future__ import annotations

import datetime as dt
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, TypeAlias

import pyarrow as pa

from arroyo_dagster.engine.keyed.cells import can_be_key, column_of
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.schema import TIMESTAMP_TYPE, memory_schema
from arroyo_dagster.state.model.ids import checked_name
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.tables import (
    NOTE_PREFIX,
    TIMESTAMP_COLUMN,
    ExpiringTimeKeyConfig,
    TableConfig,
)
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.keyed_forms import KEYED_FORM, KeyedForm

ColumnTypes: TypeAlias = Any
"""A Python type (`str`, `int`, `float`, `bool`, `bytes`), an Arrow type, or an Arrow schema."""

POSITION, MAP_KEY, KEY, VALUE, TIME = "position", "map_key", "key", "value", "at"
_KEYS = f"{NOTE_PREFIX}keyed_columns"
_TTL = f"{NOTE_PREFIX}ttl_micros"
_NEVER_MICROS = 1 << 60
"""A retention that no watermark exceeds: what expires is deleted by the engine's clock."""
_ONE_MICRO = dt.timedelta(microseconds=1)
_PYTHON: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedDefinition:
    """The meaning of a keyed table's columns.

    Attributes:
        keys: the columns of the key, by which rows are routed.
        entry: the columns that tell rows of one key apart: the position, the key in the map, or the
            time of the timer.
        values: the other columns that the operator sees.
        ttl_micros: how long a row lives after it was last written; None = for ever.
    """

    form: KeyedForm
    keys: tuple[pa.Field, ...]
    entry: tuple[pa.Field, ...]
    values: tuple[pa.Field, ...]
    ttl_micros: int | None = None

    @property
    def storage_key(self) -> tuple[pa.Field, ...]:
        """The columns that identify a row, in the order of the table."""
        return (*self.entry, *self.keys) if self.form.is_timers else (*self.keys, *self.entry)

    @classmethod
    def of(cls, stored: ExpiringTimeKeyConfig) -> KeyedDefinition:
        """Return the meaning of the columns of a table that holds keyed state."""
        notes = json.loads(stored.schema.arrow_schema)["metadata"]
        fields = list(memory_schema(stored))[:-1]
        form, count = KeyedForm(notes[KEYED_FORM]), int(notes[_KEYS])
        first = len(stored.schema.key_indices or ()) - count if form.is_timers else 0
        keys = tuple(fields[first : first + count])
        identity = fields[: len(stored.schema.key_indices or ())]
        return cls(
            form=form,
            keys=keys,
            entry=tuple(field for field in identity if field not in keys),
            values=tuple(
                field for field in fields[len(identity) :] if field.name != TIMESTAMP_COLUMN
            ),
            ttl_micros=parse_number(notes.get(_TTL, "")),
        )


def keyed_state(
    name: str,
    key: ColumnTypes,
    value: ColumnTypes,
    ttl: dt.timedelta | None = None,
    description: str = "",
) -> TableConfig:
    """Configure state by key: each subtask holds the keys that are routed to it.

    Return it from `Operator.tables`. Open it in `on_start` with `ctx.value_state(name)`,
    `ctx.list_state(name)` or `ctx.map_state(name)`, by the type of `value`. `key` must be what the
    operator's input is keyed by (`key_by`), with the same types, in the same order.

    Args:
        key: `str`, `int`, `bytes`, `bool`, an Arrow type, or an Arrow schema for a key of several
            columns. Texts, bytes, whole numbers, truth values and times can be keys; a key is never
            null.
        value: `str`, `int`, `float`, `bool`, `bytes`, one of them `| None`, an Arrow type, or an
            Arrow schema for several columns. `list[T]` or an Arrow list: the list form. `dict[K,
            V]` or an Arrow map: the map form.
        ttl: remove a value, an item or an entry this long after it was last written, by the
            engine's clock; None = never.

    Raises:
        InputError: a type cannot be stored, two columns have one name, or the ttl is not positive.
    """
    form, entry, values = _form_of(value)
    notes = {}
    if ttl is not None:
        if ttl <= dt.timedelta(0):
            raise InputError("a ttl is positive", table=name, ttl=str(ttl))
        notes[_TTL] = str(ttl // _ONE_MICRO)
    return _config(name, form, _columns(key, KEY), entry, values, description, notes)


def keyed_timers(
    name: str, key: ColumnTypes, *, processing_time: bool = False, description: str = ""
) -> TableConfig:
    """Configure timers by key: `Operator.on_timers` is called when their times come.

    Return it from `Operator.tables`, and open it in `on_start` with `ctx.timers(name)`.

    Args:
        key: as for `keyed_state`.
        processing_time: fire by the engine's clock, which is read once an epoch; by default when
            the operator's watermark reaches the time.

    Raises:
        InputError: as `keyed_state`.
    """
    form = KeyedForm.PROCESSING_TIMERS if processing_time else KeyedForm.EVENT_TIMERS
    time = pa.field(TIME, TIMESTAMP_TYPE, nullable=False)
    return _config(name, form, _columns(key, KEY), (time,), (), description, {})


def _config(
    name: str,
    form: KeyedForm,
    keys: tuple[pa.Field, ...],
    entry: tuple[pa.Field, ...],
    values: tuple[pa.Field, ...],
    description: str,
    notes: dict[str, str],
) -> TableConfig:
    checked_name(name, "table")
    keys = tuple(field.with_nullable(False) for field in keys)
    definition = KeyedDefinition(form=form, keys=keys, entry=entry, values=values)
    identity = definition.storage_key
    for field in identity:
        if not can_be_key(field.type):
            raise InputError(
                f"a column of type {field.type} cannot be part of a key",
                table=name,
                column=field.name,
                next_step="key by texts, bytes, whole numbers, truth values or times",
            )
    for field in values:
        column_of(field)
    names = [field.name for field in (*identity, *values)]
    if len(set(names)) < len(names) or any(column.startswith("_") for column in names):
        raise InputError(
            "columns of keyed state have names of their own, which do not begin with _",
            table=name,
            columns=names,
        )
    notes = {KEYED_FORM: form.value, _KEYS: str(len(keys)), **notes}
    time = pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False)
    return timestamp_table_config(
        name,
        description or f"keyed state, {form.value} form" if not form.is_timers else form.value,
        retention_micros=_NEVER_MICROS,
        schema=pa.schema([*identity, *values, time], metadata=notes),
        keys=[field.name for field in identity],
        routing_keys=[field.name for field in keys],
        generational=True,
    )


# ---- types ---------------------------------------------------------------------------------------


def _form_of(
    value: ColumnTypes,
) -> tuple[KeyedForm, tuple[pa.Field, ...], tuple[pa.Field, ...]]:
    """Return the form of a value's type, its entry columns and its value columns."""
    origin: Any = typing.get_origin(value)
    of = typing.get_args(value)
    if origin is list:
        return KeyedForm.LIST, (_position(),), _columns(of[0], VALUE)
    if origin is dict:
        return KeyedForm.MAP, _map_key(of[0]), _columns(of[1], VALUE)
    if isinstance(value, pa.DataType):
        if pa.types.is_list(value) or pa.types.is_large_list(value):
            return KeyedForm.LIST, (_position(),), _columns(value.value_type, VALUE)
        if pa.types.is_map(value):
            return KeyedForm.MAP, _map_key(value.key_type), _columns(value.item_type, VALUE)
    return KeyedForm.VALUE, (), _columns(value, VALUE)


def _position() -> pa.Field:
    return pa.field(POSITION, pa.int64(), nullable=False)


def _map_key(key: ColumnTypes) -> tuple[pa.Field, ...]:
    return tuple(field.with_nullable(False) for field in _columns(key, MAP_KEY))


def _columns(given: ColumnTypes, name: str) -> tuple[pa.Field, ...]:
    if isinstance(given, pa.Schema):
        return tuple(given)
    if isinstance(given, pa.StructType):
        return tuple(given.field(place) for place in range(given.num_fields))
    if isinstance(given, pa.Field):
        return (given,)
    if isinstance(given, pa.DataType):
        return (pa.field(name, given, nullable=True),)
    plain, nullable = _optional(given)
    if plain not in _PYTHON:
        raise InputError(
            f"{given!r} is no type of keyed state",
            next_step="give str, int, float, bool, bytes, an Arrow type or an Arrow schema",
        )
    return (pa.field(name, _PYTHON[plain], nullable=nullable),)


def _optional(given: Any) -> tuple[Any, bool]:
    if isinstance(given, UnionType) or typing.get_origin(given) is typing.Union:
        rest: Sequence[Any] = [kind for kind in typing.get_args(given) if kind is not NoneType]
        if len(rest) == 1:
            return rest[0], True
    return given, False
