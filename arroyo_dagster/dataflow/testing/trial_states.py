"""States in memory that a test of a package fills, and that functions change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.types import Column
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.runtime.handles import Slot, slot_for
from arroyo_dagster.dataflow.storage.state_tables import rows_of
from arroyo_dagster.dataflow.storage.values import check_of, checked, key_for, key_text
from arroyo_dagster.dataflow.views.snapshots import empty_frame, frame_of_rows
from arroyo_dagster.dataflow.views.sql import Tables
from arroyo_dagster.dataflow.views.view import StateView
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.clock import Clock


class TrialStates:
    """The content of the states that the functions of a package see.

    Args:
        known: the states by name.
        clock: the clock that expires rows, in epoch milliseconds.
        place: what has these states, for errors.
    """

    def __init__(self, known: Mapping[str, StateDef], clock: Clock, place: str) -> None:
        self._known = known
        self._clock = clock
        self._place = place
        self._stored: dict[str, dict[str, Any]] = {name: {} for name in known}

    def contents(self) -> dict[str, dict[str, Any]]:
        """Return every state: scalars, or rows as dicts, by the text of their key."""
        return {
            name: {key: _plain_entry(state, self._stored[name][key]) for key in self._live(name)}
            for name, state in self._known.items()
        }

    def _live(self, name: str) -> list[str]:
        ttl, entries, now = self._known[name].ttl_ms, self._stored[name], self._clock()
        return [key for key, one in entries.items() if ttl is None or now - one[-1] < ttl]

    def add(self, state: str, key: str | int | bool, value: Any) -> None:
        """Write a value into a state.

        Args:
            state: the name of the state.
            key: its key.
            value: a scalar, or the columns of a row; absent columns have their defaults.

        Raises:
            InputError: there is no such state, the key or value does not fit it (E41), or a row
                has unknown columns.
        """
        found = self.state(state)
        assert found.key_type is not None
        text = key_text(key_for(found.key_type, key, state=state))
        self._stored[found.name][text] = self._entry(found, text, value)

    def state(self, name: str) -> StateDef:
        """Return a state by its name; `-` and `_` are equal.

        Raises:
            InputError: there is none.
        """
        wanted = mangled(name)
        for state in self._known.values():
            if mangled(state.name) == wanted:
                return state
        raise InputError(
            f"{self._place} has no state `{name}`",
            states=", ".join(self._known) or "none",
            next_step="name one of these",
        )

    def _entry(self, state: StateDef, key: str, value: Any) -> Any:
        if state.value_kind is not ValueKind.ROW:
            assert state.scalar_type is not None
            return checked(state.scalar_type, value, state=state.name, key=key), self._clock()
        names = {column.name: column for column in state.columns}
        unknown = sorted(set(value) - names.keys()) if isinstance(value, dict) else None
        if unknown is None or unknown:
            raise InputError(
                f"a row of state `{state.name}` is an object of its columns",
                found=unknown or value,
                columns=", ".join(names),
            )
        cells = (_cell(state, key, one, value) for one in state.columns)
        return (*cells, self._clock())

    def slot(self, state: StateDef) -> Slot:
        """Return a slot of a state, without a place."""
        slot = slot_for(state)
        slot.stored = self._stored[state.name]
        slot.now_ms = self._clock()
        return slot

    def view(self, state: StateDef) -> StateView:
        """Return a state as a whole."""
        entries = sorted(self._stored[state.name].items())
        if not entries:
            frame = empty_frame(state, live=False)
        else:
            rows = pa.concat_tables(rows_of(state, {GLOBAL_WINDOW: dict(entries)}, 0))
            frame = frame_of_rows(state, rows)
        return StateView(state, None, frame, self._clock)

    def tables(self) -> Tables:
        """Return every arrow-row state as a table for SQL."""
        rows = [one for one in self._known.values() if one.value_kind is ValueKind.ROW]
        return Tables([self.view(state).table() for state in rows])


def _cell(state: StateDef, key: str, column: Column, row: Mapping[str, Any]) -> Any:
    value = row.get(column.name, column.type.default)
    try:
        return check_of(column.type)(value)
    except ValueError:
        return checked(column.type, value, state=state.name, key=key, column=column.name)


def _plain_entry(state: StateDef, entry: Any) -> Any:
    if state.value_kind is not ValueKind.ROW:
        return entry[0]
    return dict(zip((column.name for column in state.columns), entry, strict=False))
