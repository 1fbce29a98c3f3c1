"""Call functions of a package one at a time, over states in memory that a test fills.

With a state key, an accessor returns the handle of that key, as in a partition. Without one, it
returns the whole state, as in a flush or a reader.

Source: sdf-states.md 5.3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.bodies import inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    FunctionDef,
    Package,
    Parameter,
    StateDef,
    ValueKind,
)
from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.packages import visible_states
from arroyo_dagster.dataflow.definition.types import (
    Column,
    ScalarType,
    Scope,
    TypeDef,
    same_name,
    scope_of,
)
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.errors import OperatorResultError, UnboundOperatorError
from arroyo_dagster.dataflow.runtime.batch_states import ColumnUpdate
from arroyo_dagster.dataflow.runtime.columnar import called, column_result, mask_result, rows_result
from arroyo_dagster.dataflow.runtime.context import CONTEXT, Accessor, Invocation
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.runtime.functions import Function, FunctionBody, FunctionPlan, load
from arroyo_dagster.dataflow.runtime.handles import Slot, slot_for
from arroyo_dagster.dataflow.runtime.steps import OUTCOMES
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.payloads import frame_of, records_of
from arroyo_dagster.dataflow.storage.state_tables import rows_of
from arroyo_dagster.dataflow.storage.values import check_of, checked, key_for, key_text
from arroyo_dagster.dataflow.views.snapshots import empty_frame, frame_of_rows
from arroyo_dagster.dataflow.views.sql import Tables
from arroyo_dagster.dataflow.views.view import StateView
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms

MISSING: Any = object()
"""Marks an absent value."""


class Trial:
    """The functions and states of one package, for tests.

        trial = Trial(load_document("sdf-package.yaml"))
        trial.add("hits", "/home", {"hits": 2})
        trial.call("bump", "/home", state_key="/home")
        trial.states["hits"]                            # {"/home": {"hits": 3}}

    Args:
        package: the package; each body that is called is inline Python or bound.
        functions: bound bodies by name: callables, or `module:function`.
        packages: the packages that it imports, by id.
        env: the environment that functions see as `env`.
        clock: the engine's clock, in epoch milliseconds.
    """

    def __init__(
        self,
        package: Package,
        *,
        functions: Mapping[str, FunctionBody | str] | None = None,
        packages: Mapping[str, Package] | None = None,
        env: Mapping[str, str] | None = None,
        clock: Clock = wall_clock_ms,
    ) -> None:
        self.package = package
        self._packages = dict(packages or {})
        self._bound = {same_name(name): body for name, body in (functions or {}).items()}
        self._env = dict(env or {})
        self._types = scope_of(package, self._packages)
        known = visible_states(package, self._packages)
        self._held = TrialStates(known, clock, f"package `{package.id}`")

    # ---- states ----------------------------------------------------------------------------------

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """The content of every state: scalars, or rows as dicts, by the text of their key."""
        return self._held.contents()

    def add(self, state: str, key: str | int | bool, value: Any) -> None:
        """Write a value into a state. Arguments and errors as in `TrialStates.add`."""
        self._held.add(state, key, value)

    def state(self, name: str) -> StateDef:
        """Return a state by its name. Errors as in `TrialStates.state`."""
        return self._held.state(name)

    # ---- functions -------------------------------------------------------------------------------

    def function(self, name: str) -> FunctionDef:
        """Return a function by its name.

        Raises:
            InputError: there is none.
        """
        for function in self.package.functions.values():
            if same_name(function.name) == same_name(name):
                return function
        raise InputError(
            f"package `{self.package.id}` has no function `{name}`",
            functions=", ".join(self.package.functions) or "none",
            next_step="name one of these",
        )

    def call(
        self, name: str, value: Any = MISSING, *, key: Any = None, state_key: Any = MISSING
    ) -> Any:
        """Call a function once.

        Args:
            name: the function.
            value: the record as JSON, which is converted to the declared type. For
                `assign-timestamp` it may be a list of the record and its event time. For a function
                of whole batches, a list is the records of a batch.
            key: the record's key, for functions that take one.
            state_key: the key whose row or cell accessors return; `MISSING` = they return the
                whole states. For an update-state of whole batches, a key or one for each record.

        Returns:
            The function's result as JSON: a list for flat-map and for a batch, None for
            update-state. Its writes are kept, unless it raises.

        Raises:
            InputError: there is no such function, its body is not bound (E26), or the value or the
                result does not fit its declared type.
            Exception: any exception of the function.
        """
        function = self.function(name)
        plan = self._plan(function)
        if load(plan, {}).form:
            return self._call_batch(function, plan, value, state_key)
        place, slots = self._place(function, state_key)
        loaded = load(plan, {**CONTEXT, **place.accessors})
        arguments = self._arguments(function, loaded, value, key)
        with place.entered():
            try:
                result = loaded.body(*arguments)
                if function.operator == "flat-map" and result is not None:
                    result = list(result)
                answer = self._answer(function, loaded, arguments, result)
            except BaseException:
                for slot in slots:
                    slot.discard()
                raise
        for slot in slots:
            slot.settle()
        return answer

    def _plan(self, function: FunctionDef) -> FunctionPlan:
        bound = self._bound.get(same_name(function.name))
        make: dict[str, Any] = {
            "name": function.name,
            "operator": function.operator,
            "states": function.states,
            "path": f"functions.{function.name}",
        }
        if bound is not None:
            return FunctionPlan(target=bound, **make)
        if function.source is not None:
            body = inspect_body(function.source, function.language, function.operator)
            if body.language in ("python", "sql"):
                return FunctionPlan(source=function.source, language=body.language, **make)
        raise UnboundOperatorError(
            f"the body of function `{function.name}` is "
            + ("not Python" if function.source else "not in the package")
            + ", and no Python function is bound to it",
            number="E26",
            path=f"functions.{function.name}",
            next_step=f"bind one: `--bind {function.name}=module:function`",
        )

    def unbound(self, names: Iterable[str]) -> list[str]:
        """Return those functions that cannot be called, since their body is not bound (E26)."""
        found = []
        for function in map(self.function, sorted(names)):
            try:
                self._plan(function)
            except UnboundOperatorError:
                found.append(function.name)
        return found

    def _arguments(
        self, function: FunctionDef, loaded: Function, value: Any, key: Any
    ) -> tuple[Any, ...]:
        if function.operator == "flush":
            return ()
        _check_given(function, value)
        inputs = [parameter for parameter in function.inputs if not parameter.is_key]
        values = [value]
        if function.operator == "assign-timestamp":
            values = list(value) if isinstance(value, list) and len(value) == 2 else [value, 0]
        read = [
            _reader(parameter, self._types)(argument)
            for parameter, argument in zip(chain(inputs, repeat(None)), values, strict=False)
        ]
        return (key, *read) if loaded.takes_key else tuple(read)

    # ---- functions of whole batches --------------------------------------------------------------

    def _call_batch(
        self, function: FunctionDef, plan: FunctionPlan, value: Any, state_key: Any
    ) -> Any:
        _check_given(function, value)
        inputs = [parameter for parameter in function.inputs if not parameter.is_key]
        read = _reader(inputs[0] if inputs else None, self._types)
        records = [read(item) for item in (value if isinstance(value, list) else [value])]
        if function.operator == "update-state":
            self._update_batch(function, plan, records, state_key)
            return None
        place, _ = self._place(function, MISSING)
        loaded = load(plan, {**CONTEXT, **place.accessors})
        with place.entered():
            results = _call_columns(loaded, records)
        if function.operator == "map":
            write = _writer(function.output, self._types, pair=False)
            results = [write(item) for item in results]
        return results if isinstance(value, list) else results[0]

    def _update_batch(
        self, function: FunctionDef, plan: FunctionPlan, records: list[Any], state_key: Any
    ) -> None:
        keys = state_key if isinstance(state_key, list) else [state_key] * len(records)
        if state_key is MISSING or len(keys) != len(records):
            raise InputError(
                f"function `{function.name}` needs a key for each record of the batch",
                records=len(records),
                next_step="give `state-key`: one key for all records, or a list of one for each",
            )
        states = [self.state(name) for name in function.states]
        kind = _key_type(states[0]) if states else ScalarType.STRING
        texts = [key_text(key_for(kind, key)) for key in keys]
        slots = {state.name: self._held.slot(state) for state in states}
        update = ColumnUpdate(slots, lambda words: self._held.tables())
        accessors = {
            name: update.accessors[state.name]
            for state in states
            for name in (mangled(state.name), state.accessor)
        }
        place = Invocation(accessors, self._held.tables, self._env, update.tables_in)
        loaded = load(plan, {**CONTEXT, **accessors})
        with place.entered():
            update.call(loaded, frame_of(records), pl.Series(KEY, texts, pl.String))
        for slot in slots.values():
            slot.settle()

    # ---- results ---------------------------------------------------------------------------------

    def _answer(
        self, function: FunctionDef, loaded: Function, arguments: tuple[Any, ...], result: Any
    ) -> Any:
        operator = function.operator
        if operator == "update-state":
            if result is not None:
                raise OperatorResultError(
                    f"update-state `{function.name}` returned {result!r:.80}; expected None",
                    number="E42",
                )
            return None
        if operator in ("map", "filter", "filter-map", "flat-map"):
            OUTCOMES[operator](loaded, arguments[-1], result)  # raises if a run counts a failure
        if operator in ("filter", "assign-key", "assign-timestamp") or result is None:
            return result
        write = _writer(function.output, self._types, pair=loaded.gives_pair)
        return [write(item) for item in result] if operator == "flat-map" else write(result)

    # ---- the context of a function ---------------------------------------------------------------

    def _place(self, function: FunctionDef, state_key: Any) -> tuple[Invocation, list[Slot]]:
        accessors: dict[str, Accessor] = {}
        place = Invocation({}, self._held.tables, self._env)
        slots: list[Slot] = []
        for name in function.states:
            state = self.state(name)
            if state_key is MISSING:
                access = self._whole(state)
            else:
                slots.append(self._held.slot(state))
                slots[-1].place = place
                place.text = key_text(key_for(_key_type(state), state_key, state=state.name))
                access = slots[-1].access
            accessors[mangled(name)] = accessors[state.accessor] = access
        place.accessors.update(accessors)
        if slots:
            place.key = key_for(_key_type(slots[0].state), state_key)
        elif state_key is not MISSING:
            place.key = state_key
        return place, slots

    def _whole(self, state: StateDef) -> Callable[[], Any]:
        def access() -> Any:
            return self._held.view(state).whole(self._held.tables())

        return access


def _key_type(state: StateDef) -> ScalarType:
    assert state.key_type is not None
    return state.key_type


def _check_given(function: FunctionDef, value: Any) -> None:
    if value is MISSING:
        raise InputError(
            f"function `{function.name}` needs a value",
            operator=function.operator,
            next_step="give it with --value or --value-file",
        )


def _call_columns(function: Function, records: list[Any]) -> list[Any]:
    """Call a map, filter or assign-key of whole batches; return a result for each record.

    Raises:
        OperatorResultError: the results are not one for each record (E42).
        Exception: any exception of the function.
    """
    result = called(function, frame_of(records))
    if function.plan.operator == "filter":
        return list(mask_result(function, result, len(records)).tolist())
    if function.plan.operator == "assign-key":
        return column_result(function, result, len(records)).to_list()
    return [*records_of(rows_result(function, result, len(records)))]


def _reader(declared: Parameter | None, types: Scope) -> Callable[[Any], Any]:
    """Return a function that converts a JSON value to the argument of a user function."""
    if declared is None:
        return Converter(types=types).arrow_reader()
    convert = Converter(type=declared.type, types=types).arrow_reader()

    def read(value: Any) -> Any:
        if value is None and declared.optional:
            return None
        try:
            return convert(value)
        except ValueError as error:
            raise InputError(
                f"the value does not fit input `{declared.name}` ({error})", value=value
            ) from error

    return read


def _writer(declared: Parameter | None, types: Scope, *, pair: bool) -> Callable[[Any], Any]:
    """Return a function that converts the result of a user function to a JSON value."""
    kind: TypeDef | None = None if declared is None or pair else declared.type
    write = Converter(type=kind, types=types).writer()

    def plain(value: Any) -> Any:
        if pair:
            key, inner = value
            return {"key": key, "value": json.loads(write(inner))}
        try:
            return json.loads(write(value))
        except ValueError as error:
            raise OperatorResultError(
                f"the result does not fit the declared output ({error})",
                number="E42",
                found=repr(value)[:200],
            ) from error

    return plain


# ---- states in memory that a test of a package fills, and that functions change ------------------


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
        return [key for key, writes in entries.items() if ttl is None or now - writes[-1] < ttl]

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
        cells = (_cell(state, key, column, value) for column in state.columns)
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
        rows = [state for state in self._known.values() if state.value_kind is ValueKind.ROW]
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
