"""Frames, by which user code reads whole states and query results.

Source: sdf-states.md 3.3; errors E44, E45.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.errors import access_error, unknown_name
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.values import Key, key_text
from arroyo_dagster.dataflow.views.sql import StateTable, Tables

_TYPES: dict[Any, str] = {
    pl.Boolean: "bool",
    pl.UInt8: "u8",
    pl.UInt16: "u16",
    pl.UInt32: "u32",
    pl.UInt64: "u64",
    pl.Int8: "i8",
    pl.Int16: "i16",
    pl.Int32: "i32",
    pl.Int64: "i64",
    pl.Float32: "f32",
    pl.Float64: "f64",
    pl.String: "string",
}
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    """A column of a frame. `type`: the name of the type in SDF or, without one, in Polars."""

    name: str
    index: int
    type: str


RequestedColumn = ColumnInfo | str
"""A column as getters accept it."""


class Expression:
    """A condition or a value for `Frame.filter`, built from `col` and `lit`."""

    def __init__(self, made: pl.Expr) -> None:
        self._made = made

    def eq(self, other: object) -> Expression:
        return Expression(self._made == _expression(other))

    def neq(self, other: object) -> Expression:
        return Expression(self._made != _expression(other))

    def gt(self, other: object) -> Expression:
        return Expression(self._made > _expression(other))

    def gt_eq(self, other: object) -> Expression:
        return Expression(self._made >= _expression(other))

    def lt(self, other: object) -> Expression:
        return Expression(self._made < _expression(other))

    def lt_eq(self, other: object) -> Expression:
        return Expression(self._made <= _expression(other))

    def plus(self, other: object) -> Expression:
        return Expression(self._made + _expression(other))

    def minus(self, other: object) -> Expression:
        return Expression(self._made - _expression(other))

    def and_(self, other: object) -> Expression:
        return Expression(self._made & _expression(other))

    def or_(self, other: object) -> Expression:
        return Expression(self._made | _expression(other))


def _expression(value: object) -> pl.Expr:
    return value._made if isinstance(value, Expression) else pl.lit(value)


def col(name: str) -> Expression:
    """Return a column as an expression for `Frame.filter`."""
    return Expression(pl.col(name))


def lit(value: Any) -> Expression:
    """Return a value as an expression for `Frame.filter`."""
    return Expression(pl.lit(value))


def query(tables: Tables, text: str, params: Mapping[str, Any] | None = None) -> Frame:
    """Execute a query over the tables in scope. Errors as in `Tables.sql`."""
    return Frame(tables.sql(text, params), tables, "self")


class Frame:
    """The rows of a whole state or of a query. Iteration yields each row as a dict.

    Args:
        frame: the rows.
        tables: the other tables that `sql` sees.
        name: the name of this frame in `sql`, besides `self`.
    """

    def __init__(self, frame: pl.DataFrame, tables: Tables, name: str) -> None:
        self._frame = frame
        self._tables = tables
        self._name = name
        self._by_key: KeyLookup | None = None

    def get(self, key: Key) -> dict[str, Any] | None:
        """Return the columns of a key's row, without `_key`; None = the key has no row.

        Takes the same time at any number of keys. Errors as in `key`.
        """
        index = self._lookup.find(key)
        if index is None:
            return None
        row = self._frame.row(index, named=True)
        del row[KEY]
        return row

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | int) and self._lookup.find(key) is not None

    @property
    def _lookup(self) -> KeyLookup:
        if self._by_key is None:
            self.key()
            self._by_key = KeyLookup(self._frame)
        return self._by_key

    def sql(self, text: str, params: Mapping[str, Any] | None = None) -> Frame:
        """Query this frame, as `self` or by its name, and all tables in scope.

        Errors as in `sdf.sql`.
        """
        # A search by key needs the frame in the order of its keys.
        frame = self._frame.sort(KEY) if KEY in self._frame.columns else self._frame
        table_before = self._tables.by_name.get(self._name)
        table = StateTable(self._name, frame, table_before.aliases if table_before else ())
        answer = self._tables.with_table(table, "self").sql(text, params)
        return Frame(answer, self._tables, self._name)

    def select(self, columns: str | Sequence[str]) -> Frame:
        """Return some of the columns, in the given order."""
        names = [columns] if isinstance(columns, str) else list(columns)
        for name in names:
            self.col(name)
        return self._with(self._frame.select(names))

    def filter(self, condition: Expression) -> Frame:
        """Return the rows for which a condition of `col` and `lit` holds."""
        try:
            return self._with(self._frame.filter(condition._made))
        except pl.exceptions.PolarsError as error:
            raise access_error(
                "E44", f"the condition does not fit: {error}", columns=self._frame.columns
            ) from error

    def sort(
        self,
        columns: str | Sequence[str],
        descending: bool | Sequence[bool] = False,
        maintain_order: bool = False,
    ) -> Frame:
        """Return the rows, sorted by some columns."""
        names = [columns] if isinstance(columns, str) else list(columns)
        for name in names:
            self.col(name)
        flags = descending if isinstance(descending, bool) else list(descending) or False
        return self._with(self._frame.sort(names, descending=flags, maintain_order=maintain_order))

    def head(self, count: int) -> Frame:
        """Return the first `count` rows."""
        return self._with(self._frame.head(count))

    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and of columns."""
        return self._frame.height, self._frame.width

    def name(self) -> str:
        """Return the SQL name of its state; for a query result, `self`."""
        return self._name

    def schema(self, columns: Iterable[str] | None = None) -> list[ColumnInfo]:
        """Return some of the columns in the given order; None = all."""
        names = self._frame.columns if columns is None else columns
        return [self.col(name) for name in names]

    def col(self, name: str) -> ColumnInfo:
        """Return one column.

        Raises:
            StateAccessError: there is no column of this name (E44).
        """
        if name not in self._frame.columns:
            raise unknown_name("column", name, self._frame.columns)
        return ColumnInfo(name, self._frame.columns.index(name), _type_name(self._frame[name]))

    def key(self) -> ColumnInfo:
        """Return the column `_key`. Errors as in `col`, if a projection dropped it."""
        return self.col(KEY)

    def rows(self) -> Rows:
        """Return a cursor before the first row."""
        return Rows(self._frame)

    def to_polars(self) -> pl.DataFrame:
        """Return the rows as a Polars frame."""
        return self._frame

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        return self._frame.to_arrow()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._frame.iter_rows(named=True)

    def __len__(self) -> int:
        return self._frame.height

    def __str__(self) -> str:
        return str(self._frame)

    def _with(self, frame: pl.DataFrame) -> Frame:
        return Frame(frame, self._tables, self._name)


class Rows:
    """A cursor over rows. It is before the first row until `next` is called."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame
        self._at = -1
        self._columns: dict[str, list[Any]] = {}

    def next(self) -> bool:
        """Move to the next row; return False after the last one."""
        if self._at < self._frame.height:
            self._at += 1
        return self._at < self._frame.height

    def end(self) -> bool:
        """Return whether there is no next row."""
        return self._at >= self._frame.height - 1

    def index(self) -> int:
        """Return the index of the current row, from 0; -1 before the first."""
        return self._at

    def skip(self, count: int) -> bool:
        """Move forward by `count` rows; return False if that is after the last one."""
        self._at = min(self._at + count, self._frame.height)
        return self._at < self._frame.height

    def str(self, column: RequestedColumn, default: Any = _MISSING) -> str:
        """Return a text. In all getters, `default` replaces a null."""
        return self._read("str", column, default, ("string",))  # type: ignore[no-any-return]

    def bool(self, column: RequestedColumn, default: Any = _MISSING) -> bool:
        """Return a bool."""
        return self._read("bool", column, default, ("bool",))  # type: ignore[no-any-return]

    def i8(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """Return an integer from a column of any integer type; its value must be in range."""
        return self._integer("i8", column, default)

    def i16(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """See `i8`."""
        return self._integer("i16", column, default)

    def i32(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """See `i8`."""
        return self._integer("i32", column, default)

    def i64(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """See `i8`."""
        return self._integer("i64", column, default)

    def u8(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """See `i8`."""
        return self._integer("u8", column, default)

    def u16(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """See `i8`."""
        return self._integer("u16", column, default)

    def u32(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """See `i8`."""
        return self._integer("u32", column, default)

    def u64(self, column: RequestedColumn, default: Any = _MISSING) -> int:
        """See `i8`."""
        return self._integer("u64", column, default)

    def f32(self, column: RequestedColumn, default: Any = _MISSING) -> float:
        """Return a float from a column of either width."""
        return self._read("f32", column, default, ("f32", "f64"))  # type: ignore[no-any-return]

    def f64(self, column: RequestedColumn, default: Any = _MISSING) -> float:
        """Return a float from a column of either width."""
        return self._read("f64", column, default, ("f32", "f64"))  # type: ignore[no-any-return]

    def _integer(self, getter: Any, column: RequestedColumn, default: Any) -> int:
        value = self._read(getter, column, default, _INTEGERS)
        low, high = ScalarType(getter).bounds or (0, 0)
        if isinstance(value, int) and not low <= value <= high:
            raise access_error(
                "E45", f"rows.{getter}: {value} is out of its range", column=_name_of(column)
            )
        return value  # type: ignore[no-any-return]

    def _read(self, getter: Any, column: RequestedColumn, default: Any, types: Any) -> Any:
        name = _name_of(column)
        if not 0 <= self._at < self._frame.height:
            where = "before `next()`" if self._at < 0 else "behind the last row"
            raise access_error("E45", f"rows.{getter} was read {where}", column=name)
        if name not in self._columns:
            if name not in self._frame.columns:
                raise unknown_name("column", name, self._frame.columns)
            self._columns[name] = self._frame[name].to_list()
        series = self._frame[name]
        type_name = _type_name(series)
        if type_name not in types and series.dtype != pl.Null:
            raise access_error(
                "E45", f"rows.{getter}: column `{name}` is of type {type_name}", column=name
            )
        value = self._columns[name][self._at]
        if value is None and default is _MISSING:
            raise access_error(
                "E45",
                f"rows.{getter}: column `{name}` is null in this row",
                column=name,
                next_step="use coalesce in the query, or pass default=",
            )
        return default if value is None else value


_INTEGERS = tuple(scalar.value for scalar in ScalarType if scalar.is_integer)


def _name_of(column: ColumnInfo | str) -> Any:
    return column.name if isinstance(column, ColumnInfo) else column


def _type_name(series: pl.Series) -> Any:
    dtype = series.dtype
    name = _TYPES.get(dtype.base_type())
    if name is None and dtype.base_type() == pl.Datetime:
        return "timestamp"
    return name or str(dtype).lower()


# ---- lookup --------------------------------------------------------------------------------------
# Look rows of a frame up by key: by binary search first, by a dict once it is worth its cost.
#
# A reader of a state with a million keys gets a new frame with every epoch of the owner, and may
# need one key of it, or all. Few look-ups must not pay for an index of all keys, and many must not
# each search.
#
# Source: the project's design, section 9: look-ups at any number of keys.

_SEARCHES_PER_KEY = 1 / 16
"""After this many searches per key of the frame, they have cost as much as a dict of all keys."""


class KeyLookup:
    """The rows of a frame by the text of their key.

    Args:
        frame: has the column `_key`; if keys are equal, the first row counts.
        is_sorted: whether the frame is in order of `_key`; None = unknown.
    """

    def __init__(self, frame: pl.DataFrame, *, is_sorted: bool | None = None) -> None:
        self._frame = frame
        self._keys = frame.get_column(KEY)
        self._is_sorted = is_sorted
        self._searches = 0
        self._places: dict[str, int] | None = None

    def find(self, key: Key) -> int | None:
        """Return the index of a key's row; None = there is none."""
        text = key_text(key)
        if self._places is None and self._is_searched():
            return self._search(text)
        if self._places is None:
            keys = self._keys.to_list()
            # From the end, so that the first of equal keys stays.
            self._places = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        return self._places.get(text)

    def _is_searched(self) -> bool:
        if self._is_sorted is None:
            self._is_sorted = self._keys.is_sorted()
        self._searches += 1
        return self._is_sorted and self._searches <= len(self._keys) * _SEARCHES_PER_KEY

    def _search(self, text: str) -> int | None:
        # `Series.search_sorted` takes 60 µs for one value, this loop 4 to 8.
        keys, low, high = self._keys, 0, len(self._keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] < text:
                low = middle + 1
            else:
                high = middle
        return low if low < len(keys) and keys[low] == text else None


class Pairs(Sequence[tuple[str, Any]]):
    """The pairs of key and value of a primitive state, in order of key. Immutable.

    Iteration and indexes yield `(key, value)`; `get` and `in` look one key up.

    Args:
        frame: `_key` and `value`, in order of `_key`.
    """

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame.select(KEY, "value")
        self._values = frame.get_column("value")
        self._lookup = KeyLookup(frame, is_sorted=True)

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the value of a key, or `default`. Takes the same time at any number of keys."""
        index = self._lookup.find(key)
        return default if index is None else self._values[index]

    def to_polars(self) -> pl.DataFrame:
        """Return the pairs as a Polars frame of `_key` and `value`."""
        return self._frame

    def to_arrow(self) -> pa.Table:
        """Return the pairs as an Arrow table of `_key` and `value`."""
        return self._frame.to_arrow()

    def __contains__(self, key: object) -> bool:
        if isinstance(key, tuple):
            return len(key) == 2 and key[0] in self and self.get(key[0]) == key[1]
        return isinstance(key, str | int) and self._lookup.find(key) is not None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._frame.iter_rows()

    def __len__(self) -> int:
        return self._frame.height

    @overload
    def __getitem__(self, at: int) -> tuple[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[tuple[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return self._frame[at].rows()
        return self._frame.row(range(len(self))[at])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pairs | list):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
