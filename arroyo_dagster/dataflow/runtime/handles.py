"""Rows and cells: the handles by which user code changes a state, one key at a time.

A slot connects user code with the entries of one state. It creates handles to the entry of the
current key, and rolls back their writes when the function fails.

Source: sdf-states.md 3.2, 6.2 and 6.3; errors E41, E43, E44.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable
from sys import getrefcount
from types import MethodType
from typing import Any

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.definition.types import Column, ScalarType
from arroyo_dagster.dataflow.errors import StateAccessError, access_error, unknown_name
from arroyo_dagster.dataflow.runtime.context import Invocation
from arroyo_dagster.dataflow.storage.values import check_of, value_error

StoredEntries = dict[str, Any]
"""Entries by the text of their key: the values of a row, or the one of a cell, and then the update
time (ms)."""

DELETED: tuple[Any, ...] = ("deleted",)
"""Marks a deleted entry; compared by identity."""


class Slot:
    """Creates handles to the entries of one owned state.

    A write is visible at once to later reads of the entry. If the function fails, `discard` rolls
    it back.

    Args:
        state: the definition of the state.

    Attributes:
        place: the context of the current record; must be set before the first record.
        stored: the entries of the current window, as of the last barrier.
        fresh: what was written since then: rows as entries, the scalars of cells; `DELETED` for a
            deleted one.
        now_ms: the engine's clock, which sets the update time of rows.
    """

    place: Invocation

    def __init__(self, state: StateDef) -> None:
        self.state = state
        self.stored: StoredEntries = {}
        self.fresh: StoredEntries = {}
        self.now_ms = 0
        self._wrote = -1
        self._before: Any = None

    def access(self) -> Any:
        """Return a handle to the current key's entry."""
        raise NotImplementedError

    def write(self, entry: Any) -> None:
        """Write a checked entry; the entry before this record is kept for `discard`."""
        place, fresh = self.place, self.fresh
        key = place.text
        if self._wrote != place.serial:
            self._wrote = place.serial
            self._before = fresh.get(key)
        fresh[key] = entry

    def discard(self) -> None:
        """Roll back the write of the current record, because its function failed."""
        if self._wrote != self.place.serial:
            return
        if self._before is None:
            del self.fresh[self.place.text]
        else:
            self.fresh[self.place.text] = self._before
        self._wrote = -1

    def entry(self, written: Any) -> tuple[Any, ...]:
        """Return the entry of what was written in `fresh`."""
        raise NotImplementedError

    def entries(self, fresh: StoredEntries) -> StoredEntries:
        """Return the entries of what was written in `fresh`, without those that were deleted."""
        raise NotImplementedError

    def settle(self) -> None:
        """Move what was written in `fresh` to `stored`."""
        for key, written in self.fresh.items():
            if written is DELETED:
                self.stored.pop(key, None)
        self.stored.update(self.entries(self.fresh))
        self.fresh.clear()

    def outside(self) -> StateAccessError:
        """Return the error for a use outside an invocation (E43)."""
        return access_error(
            "E43",
            f"state `{self.state.name}` was used outside an invocation, or through a handle of an "
            "earlier one",
            state=self.state.name,
        )


def slot_for(state: StateDef) -> Slot:
    """Return the slot of an owned state."""
    return RowSlot(state) if state.value_kind is ValueKind.ROW else CellSlot(state)


# ---- primitive values ----------------------------------------------------------------------------


class CellSlot(Slot):
    """Creates cells."""

    def __init__(self, state: StateDef) -> None:
        super().__init__(state)
        assert state.scalar_type is not None
        self.scalar: ScalarType = state.scalar_type
        self.default = self.scalar.default
        self.defaults = (self.default,)
        self.ttl_ms = float("inf") if state.ttl_ms is None else state.ttl_ms
        self.low, self.high = self.scalar.bounds or (0, 0)
        self._cell_class = IntegerCell if self.scalar.is_integer else Cell
        self._cell = self._cell_class(self)

    def access(self) -> Cell:
        place = self.place
        if not place.running:
            raise self.outside()
        cell = self._cell
        if getrefcount(cell) > _ALONE:  # user code still holds the last one: keep it invalid
            cell = self._cell = self._cell_class(self)
        cell._serial = place.serial
        return cell

    def read(self) -> Any:
        """Return the value of the current key, or the default."""
        entry = self.found()
        return self.default if entry is None else entry[0]

    def found(self) -> tuple[Any, ...] | None:
        """Return the entry of the current key; None = there is none, or it has expired."""
        key = self.place.text
        written = self.fresh.get(key)
        if written is not None:
            return None if written is DELETED else (written,)
        entry = self.stored.get(key)
        alive = entry is not None and self.now_ms - entry[1] < self.ttl_ms
        return entry if alive else None

    def entry(self, written: Any) -> tuple[Any, ...]:
        return written, self.now_ms

    def entries(self, fresh: StoredEntries) -> StoredEntries:
        now_ms = self.now_ms
        return {key: (value, now_ms) for key, value in fresh.items() if value is not DELETED}


class Cell:
    """The primitive value of the current key. Writes take effect at once.

    A value that does not fit the type is rejected (E41), and changes nothing.
    """

    __slots__ = ("_serial", "_slot")

    def __init__(self, slot: CellSlot) -> None:
        self._slot = slot
        self._serial = -1

    def get(self) -> Any:
        """Return the value; the default of its type if the key has none."""
        return self._alive().read()

    def set(self, value: Any) -> None:
        """Replace the value."""
        slot = self._alive()
        slot.write(_checked(slot, slot.scalar, value, None))

    def increment(self, by: int = 1) -> Any:
        """Add to the value, and return the sum."""
        slot = self._alive()
        if slot.scalar is ScalarType.BOOL or slot.scalar is ScalarType.STRING:
            raise access_error(
                "E45",
                f"a {slot.scalar.value} cannot be incremented; use set",
                state=slot.state.name,
            )
        if isinstance(by, bool) or not isinstance(by, int | float):
            raise value_error(slot.scalar, by, state=slot.state.name, key=slot.place.text)
        self.set(self.get() + by)
        return self.get()

    @property
    def value(self) -> Any:
        """The value; can be assigned."""
        return self.get()

    @value.setter
    def value(self, value: Any) -> None:
        self.set(value)

    @property
    def exists(self) -> bool:
        """Whether the key has a value."""
        return self._alive().found() is not None

    def delete(self) -> None:
        """Remove the value; a later access starts from the default."""
        self._alive().write(DELETED)

    def update(self) -> None:
        """No-op, since writes take effect at once. Exists so that code for rows works on cells."""
        self._alive()

    def __repr__(self) -> str:
        return f"Cell({self.get()!r})"

    def _alive(self) -> CellSlot:
        slot = self._slot
        if self._serial != slot.place.serial:
            raise slot.outside()
        return slot


class IntegerCell(Cell):
    """A cell of an integer type, with a faster `increment`."""

    __slots__ = ()

    def increment(self, by: int = 1) -> Any:
        """Add to the value, and return the sum."""
        slot, serial = self._slot, self._serial
        place = slot.place
        if serial == place.serial and type(by) is int:
            key, fresh = place.text, slot.fresh
            before = fresh.get(key)
            if before is None:
                entry = slot.stored.get(key)
                if entry is None or slot.now_ms - entry[1] >= slot.ttl_ms:
                    value = by
                else:
                    value = entry[0] + by
            else:
                value = by if before is DELETED else before + by
            if slot.low <= value <= slot.high:
                if slot._wrote != serial:
                    slot._wrote, slot._before = serial, before
                fresh[key] = value
                return value
        return super().increment(by)


class _Holder:
    """Holds an object as a slot does, to measure the reference count of an unshared cell."""

    def __init__(self) -> None:
        self._cell = object()

    def references(self) -> int:
        cell = self._cell
        return getrefcount(cell)


_ALONE = _Holder().references()


# ---- rows ----------------------------------------------------------------------------------------


class RowSlot(Slot):
    """Creates copies of rows. A stored row is a tuple of its values and its update time (ms)."""

    def __init__(self, state: StateDef) -> None:
        super().__init__(state)
        self.columns = state.columns
        self.defaults = tuple(column.type.default for column in state.columns)
        self.ttl_ms = state.ttl_ms
        opened = _row_functions(state.columns, state.ttl_ms is not None)
        # Called for every record: bound directly, to save one call each.
        self.access = MethodType(opened, self)  # type: ignore[method-assign]

    def entry(self, written: Any) -> tuple[Any, ...]:
        return written  # type: ignore[no-any-return]

    def entries(self, fresh: StoredEntries) -> StoredEntries:
        return {key: value for key, value in fresh.items() if value is not DELETED}


class Row:
    """A copy of a row, one attribute per column; `update()` writes it back, `delete()` removes it.

    Columns are items too, by their names in the YAML or in Python: `row["pu-zone"]`. Only columns
    can be assigned.
    """

    __slots__ = ("_Row__exists", "_Row__serial", "_Row__slot")

    __slot: RowSlot
    __serial: int
    __exists: bool

    @property
    def exists(self) -> bool:
        """Whether the key had a row when this copy was made."""
        return self.__exists

    def to_dict(self) -> dict[str, Any]:
        """Return the columns by their names in the YAML."""
        return {column.name: getattr(self, _slot_name(column)) for column in self.__slot.columns}

    def update(self) -> None:
        """Write every column back; create the row if it does not exist.

        Raises:
            StateValueError: a value does not fit its column (E41). Nothing is written.
            StateAccessError: a column was deleted (E44), or the invocation is over (E43).
        """
        raise NotImplementedError  # generated for each set of columns: see `_row_functions`

    def delete(self) -> None:
        """Remove the row; a later access starts from defaults."""
        self.__alive().write(DELETED)

    def __getitem__(self, column: str) -> Any:
        return getattr(self, self.__attribute(column))

    def __setitem__(self, column: str, value: Any) -> None:
        setattr(self, self.__attribute(column), value)

    def __attribute(self, name: str) -> str:
        for column in self.__slot.columns:
            if name in (column.name, column.attribute):
                return _slot_name(column)
        if name == "value" and isinstance(vars(type(self)).get("value"), property):
            return name
        names = [column.name for column in self.__slot.columns]
        raise unknown_name("column", name, names, state=self.__slot.state.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        slot = self.__slot
        names = [column.attribute for column in slot.columns]
        raise unknown_name("column", name, names, state=slot.state.name)

    def __repr__(self) -> str:
        columns = (f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"Row({', '.join(columns)})"

    def __alive(self) -> RowSlot:
        slot = self.__slot
        if slot.place.serial != self.__serial:
            raise slot.outside()
        return slot

    def _refuse(self, slot: RowSlot) -> None:
        """Raise the error of the first invalid column."""
        for column in slot.columns:
            _checked(slot, column.type, getattr(self, _slot_name(column)), column.name)


def _slot_name(column: Column) -> str:
    """Return the attribute of a column; if its name is not valid in Python, a generated one."""
    usable = column.attribute.isidentifier() and not keyword.iskeyword(column.attribute)
    return column.attribute if usable else f"column_{column.name.encode().hex()}"


Open = Callable[[RowSlot], Row]

_OPEN = """
def open_row(slot):
    place = slot.place
    if not place.running:
        raise slot.outside()
    key, serial = place.text, place.serial
    values = slot.fresh.get(key)
    if slot._wrote != serial:
        slot._before = values
    if values is None:
        values = slot.stored.get(key)
    elif values is deleted:
        values = None
    {expires}
    row = new(row_class)
    row._Row__slot, row._Row__serial, row._Row__exists = slot, serial, values is not None
    if values is None:
        values = slot.defaults
    {unpacked}
    return row
"""
_EXPIRES = """if values is not None and slot.now_ms - values[-1] >= slot.ttl_ms:
        values = None"""
_UPDATE = """
def update(row):
    slot = row._Row__slot
    place = slot.place
    serial = place.serial
    if serial != row._Row__serial:
        raise slot.outside()
    try:
        {checked}
    except (ValueError, AttributeError):
        row._refuse(slot)
        raise
    slot._wrote = serial  # what was there before is known since the row was opened
    slot.fresh[place.text] = ({values}slot.now_ms,)
"""


@functools.cache
def _row_functions(columns: tuple[Column, ...], expires: bool) -> Open:
    """Generate the functions of a set of columns; return the one that opens the current key's row.

    The other is `update` of the rows. Both are generated since they are called for every record.
    """
    unpacked, checked = [], []
    scope: dict[str, Any] = {"new": object.__new__, "deleted": DELETED, "__name__": __name__}
    for i, column in enumerate(columns):
        name = _slot_name(column)
        unpacked.append(f"row.{name} = values[{i}]")
        checked.append(f"v{i} = row.{name}")
        refused = f"v{i} = check{i}(v{i})"
        if column.type.bounds is not None:
            low, high = column.type.bounds
            refused = f"if type(v{i}) is not int or not {low} <= v{i} <= {high}: {refused}"
        checked.append(refused)
        scope[f"check{i}"] = check_of(column.type)
    exec(
        _OPEN.format(
            expires=_EXPIRES if expires else "", unpacked="\n    ".join(unpacked or ["pass"])
        )
        + _UPDATE.format(
            checked="\n        ".join(checked or ["pass"]),
            values="".join(f"v{i}, " for i in range(len(columns))),
        ),
        scope,
    )
    scope["update"].__doc__ = Row.update.__doc__
    scope["row_class"] = _row_class(columns, scope["update"])
    return scope["open_row"]  # type: ignore[no-any-return]


def _row_class(columns: tuple[Column, ...], update: Callable[[Row], None]) -> type[Row]:
    """Return the class of a state's rows. With a single column, `value` is an alias of it."""
    names = [_slot_name(column) for column in columns]
    members: dict[str, Any] = {"__slots__": tuple(names)}
    if "update" not in names:
        members["update"] = update
    if len(names) == 1 and names != ["value"]:
        only = names[0]
        members["value"] = property(
            lambda row: getattr(row, only),
            lambda row, given: setattr(row, only, given),
            doc="The only column, as older definitions call it.",
        )
    # Python's error for an assignment to an unknown column contains the name of the class.
    return type(f"Row({', '.join(names)})", (Row,), members)


def _checked(slot: Slot, scalar: ScalarType, value: Any, column: str | None) -> Any:
    try:
        return check_of(scalar)(value)
    except ValueError:
        raise value_error(
            scalar, value, state=slot.state.name, key=slot.place.text, column=column
        ) from None
