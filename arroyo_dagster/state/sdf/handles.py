"""Rows and cells: what user code changes a state through, one key at a time.

A slot stands between user code and the entries of one state. Within one invocation it hands out
handles to the entry of the current key, remembers what they wrote, and keeps it only when the
function has returned.

Source: sdf-states.md 3.2, 6.2 and 6.3; errors E41, E43, E44.
"""

from __future__ import annotations

from typing import Any

from arroyo_dagster.state.sdf.context import Invocation
from arroyo_dagster.state.sdf.definition import StateDef, ValueKind
from arroyo_dagster.state.sdf.faults import StateAccessError, access_error, unknown_name
from arroyo_dagster.state.sdf.types import ScalarType
from arroyo_dagster.state.sdf.values import check_of, value_error

Stored = dict[str, Any]
"""Entries by the text of their key: a scalar, or the values of a row and when it was updated."""

_DELETED: tuple[Any, ...] = (object(),)


class Slot:
    """Where handles to one owned state come from.

    Args:
        state: whose.

    Attributes:
        place: says whether a function is running; set before any is.
        key: the text of the current key.
        stored, changed: the entries of the current window, and which of them changed.
        now_ms: the engine's clock, of which updates are.
    """

    place: Invocation

    def __init__(self, state: StateDef) -> None:
        self.state = state
        self.key = ""
        self.stored: Stored = {}
        self.changed: set[str] = set()
        self.now_ms = 0

    def access(self) -> Any:
        """What the accessor gives: a handle to the current key's entry."""
        raise NotImplementedError

    def keep(self) -> None:
        """Keep what was written: the function has returned."""
        raise NotImplementedError

    def discard(self) -> None:
        """Forget what was written: the function has failed."""
        raise NotImplementedError

    def outside(self) -> StateAccessError:
        """The error for a use outside an invocation."""
        return access_error(
            "E43",
            f"state `{self.state.name}` was used outside an invocation, or through a handle of an "
            "earlier one",
            state=self.state.name,
        )


def slot_for(state: StateDef) -> Slot:
    """The slot of an owned state."""
    return RowSlot(state) if state.value_kind is ValueKind.ROW else CellSlot(state)


# ---- primitive values ----------------------------------------------------------------------------


class CellSlot(Slot):
    """Hands out cells."""

    def __init__(self, state: StateDef) -> None:
        super().__init__(state)
        assert state.scalar_type is not None
        self.scalar: ScalarType = state.scalar_type
        self.default = self.scalar.default
        self.is_integer = self.scalar.is_integer
        self.low, self.high = self.scalar.bounds or (0, 0)
        self.cell: Cell | None = None

    def access(self) -> Cell:
        cell = self.cell
        if cell is None:
            if not self.place.running:
                raise self.outside()
            cell = self.cell = Cell(self, self.stored.get(self.key, self.default))
        return cell

    def keep(self) -> None:
        cell = self.cell
        if cell is not None:
            self.cell = None
            if cell._written:
                self.stored[self.key] = cell._value
                self.changed.add(self.key)
            cell._slot = None

    def discard(self) -> None:
        if self.cell is not None:
            self.cell._slot = None
            self.cell = None


class Cell:
    """The primitive value of the current key. Writes take effect at once.

    What the type cannot hold is refused (E41), and changes nothing.
    """

    __slots__ = ("_slot", "_value", "_written")

    def __init__(self, slot: CellSlot, value: Any) -> None:
        self._slot: CellSlot | None = slot
        self._value = value
        self._written = False

    def get(self) -> Any:
        """The value; a key never seen has its type's default."""
        return self._value

    def set(self, value: Any) -> None:
        """Replace the value."""
        slot = self._alive()
        self._value = _checked(slot, slot.scalar, value, None)
        self._written = True

    def increment(self, by: int = 1) -> Any:
        """Add to the value, and give the sum."""
        slot = self._slot
        if slot is not None and slot.is_integer and type(by) is int:
            value = self._value + by
            if slot.low <= value <= slot.high:
                self._value = value
                self._written = True
                return value
        return self._increment_carefully(by)

    def _increment_carefully(self, by: Any) -> Any:
        slot = self._alive()
        if slot.scalar is ScalarType.BOOL or slot.scalar is ScalarType.STRING:
            raise access_error(
                "E45",
                f"a {slot.scalar.value} cannot be incremented; use set",
                state=slot.state.name,
            )
        if isinstance(by, bool) or not isinstance(by, int | float):
            raise value_error(slot.scalar, by, state=slot.state.name, key=slot.key)
        self.set(self._value + by)
        return self._value

    @property
    def value(self) -> Any:
        """The value, to read and to assign."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self.set(value)

    def update(self) -> None:
        """Does nothing: writes take effect at once. Here so that a row's code serves a cell."""
        self._alive()

    def __repr__(self) -> str:
        return f"Cell({self._value!r})"

    def _alive(self) -> CellSlot:
        if self._slot is None:
            raise access_error("E43", "a cell was used after the invocation it was made for")
        return self._slot


# ---- rows ----------------------------------------------------------------------------------------


class RowSlot(Slot):
    """Hands out copies of rows. A stored row is its values and, last, when it was updated."""

    def __init__(self, state: StateDef) -> None:
        super().__init__(state)
        self.columns = state.columns
        self.attributes = [column.attribute for column in state.columns]
        self.checks = [(column.attribute, check_of(column.type)) for column in state.columns]
        self.defaults = tuple(column.type.default for column in state.columns)
        self.ttl_ms = state.ttl_ms
        self.pending: tuple[Any, ...] | None = None
        self.serial = 0
        self._class = _row_class(self.attributes)

    def access(self) -> Row:
        if not self.place.running:
            raise self.outside()
        values = self.live(self.key) if self.pending is None else self.pending
        if values is None or values is _DELETED:
            row = self._class(self, False)
            values = self.defaults
        else:
            row = self._class(self, True)
        vars(row).update(zip(self.attributes, values, strict=False))
        return row

    def live(self, key: str) -> tuple[Any, ...] | None:
        """The stored row of a key, unless it has expired."""
        stored: tuple[Any, ...] | None = self.stored.get(key)
        if stored is None or self.ttl_ms is None or self.now_ms - stored[-1] < self.ttl_ms:
            return stored
        return None

    def keep(self) -> None:
        self.serial += 1
        values = self.pending
        if values is None:
            return
        self.pending = None
        key = self.key
        self.changed.add(key)
        if values is _DELETED:
            self.stored.pop(key, None)
            return
        if self.ttl_ms is not None:
            self.stored.pop(key, None)  # so that the oldest rows stay in front
        self.stored[key] = (*values, self.now_ms)

    def discard(self) -> None:
        self.serial += 1
        self.pending = None


class Row:
    """A copy of a row, one attribute a column; `update()` writes it back, `delete()` removes it.

    Columns are items too, under the names of the YAML or of Python: `row["pu-zone"]`.
    """

    __slots__ = ("_Row__exists", "_Row__serial", "_Row__slot", "__dict__")

    def __init__(self, slot: RowSlot, exists: bool) -> None:
        self.__slot = slot
        self.__serial = slot.serial
        self.__exists = exists

    @property
    def exists(self) -> bool:
        """Whether the key had a row when this copy was made."""
        return self.__exists

    def to_dict(self) -> dict[str, Any]:
        """The columns by their names in the YAML."""
        return {column.name: getattr(self, column.attribute) for column in self.__slot.columns}

    def update(self) -> None:
        """Write every column back; creates the row if there is none.

        Raises:
            StateValueError: a value its column cannot hold (E41). Nothing is written then.
            StateAccessError: an attribute that is no column was assigned (E44), or the invocation
                is over (E43).
        """
        slot = self.__alive()
        values = vars(self)
        try:
            if len(values) == len(slot.checks):
                slot.pending = tuple([check(values[name]) for name, check in slot.checks])
                return
        except (ValueError, KeyError):
            pass
        self.__refuse(slot, values)

    def delete(self) -> None:
        """Remove the row; a later access starts from defaults."""
        self.__alive().pending = _DELETED

    def __getitem__(self, column: str) -> Any:
        return getattr(self, self.__attribute(column))

    def __setitem__(self, column: str, value: Any) -> None:
        setattr(self, self.__attribute(column), value)

    def __attribute(self, name: str) -> str:
        for column in self.__slot.columns:
            if name in (column.name, column.attribute):
                return column.attribute
        if name == "value" and isinstance(vars(type(self)).get("value"), property):
            return name
        known = [column.name for column in self.__slot.columns]
        raise unknown_name("column", name, known, state=self.__slot.state.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        slot = self.__slot
        raise unknown_name("column", name, slot.attributes, state=slot.state.name)

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __alive(self) -> RowSlot:
        slot = self.__slot
        if slot.serial != self.__serial or not slot.place.running:
            raise access_error(
                "E43", "a row was used after the invocation it was made for", state=slot.state.name
            )
        return slot

    def __refuse(self, slot: RowSlot, values: dict[str, Any]) -> None:
        """Raise the error that names what is wrong with a row."""
        for name in values:
            if name not in slot.attributes:
                raise unknown_name("column", name, slot.attributes, state=slot.state.name)
        for column in slot.columns:
            if column.attribute not in values:
                raise unknown_name("column", column.name, list(values), state=slot.state.name)
            _checked(slot, column.type, values[column.attribute], column.name)


def _row_class(attributes: list[str]) -> type[Row]:
    """The class of a state's rows: `value` is its only column, where that has another name."""
    if len(attributes) != 1 or attributes == ["value"]:
        return Row
    only = attributes[0]
    value = property(
        lambda row: getattr(row, only),
        lambda row, given: setattr(row, only, given),
        doc="The only column, as older definitions call it.",
    )
    return type("Row", (Row,), {"__slots__": (), "value": value})


def _checked(slot: Slot, scalar: ScalarType, value: Any, column: str | None) -> Any:
    try:
        return check_of(scalar)(value)
    except ValueError:
        raise value_error(
            scalar, value, state=slot.state.name, key=slot.key, column=column
        ) from None
