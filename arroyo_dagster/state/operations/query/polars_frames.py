"""Tables as lazy frames of Polars: projections, filters and limits reach files and row groups.

Polars hands a predicate over as an expression. Its conjuncts that compare a column with values
choose files and row groups; Polars' own evaluation of the whole predicate decides which rows match.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.codec.hashing.routing import key_hashes, subtasks_for_hashes
from arroyo_dagster.state.operations.query.global_scan import GlobalScan
from arroyo_dagster.state.operations.query.metadata_rows import lazy_source
from arroyo_dagster.state.operations.query.names import KEY_HASH, SUBTASK
from arroyo_dagster.state.operations.query.scans import ScanRequest
from arroyo_dagster.state.tables.comparisons import ColumnFilter, Comparison, Relation, bind

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.query.table import EpochTable

_RELATIONS = {
    "Eq": Relation.EQUAL,
    "Lt": Relation.LESS,
    "LtEq": Relation.AT_MOST,
    "Gt": Relation.GREATER,
    "GtEq": Relation.AT_LEAST,
}
_MIRRORED = {"Lt": "Gt", "LtEq": "GtEq", "Gt": "Lt", "GtEq": "LtEq", "Eq": "Eq"}


def lazy_frame(
    table: EpochTable, routing: Sequence[str] = (), parallelism: int | None = None
) -> pl.LazyFrame:
    """Return the rows of a table as a lazy frame.

    Args:
        routing: columns of `ROUTING` that it has besides, unless its rows are not routed by key or
            it has private columns.
        parallelism: of the subtasks; None = of the operator.
    """
    schema = table.schema
    routed = _Routing.of(table, routing, parallelism)
    empty = routed.added(polars_rows(schema.empty_table()), schema.empty_table())

    def source(
        columns: list[str] | None,
        predicate: pl.Expr | None,
        rows: int | None,
        batch_rows: int | None,
    ) -> Iterator[pl.DataFrame]:
        names = empty.columns if columns is None else columns
        compared = predicate.meta.root_names() if predicate is not None else []
        read = routed.needed(dict.fromkeys([*names, *compared]))
        request = ScanRequest(
            columns=tuple(schema.names.index(name) for name in read),
            # Private values are replaced before a condition sees them.
            filters=() if table.mask else tuple(column_filters(predicate, schema)),
        )
        remaining = rows
        yielded = False
        for part in table.read(request):
            frame = routed.added(polars_rows(part), part)
            if predicate is not None:
                frame = frame.filter(predicate)
            frame = frame.select(names)
            if remaining is not None:
                frame = frame.head(remaining)
                remaining -= frame.height
            yielded = True
            yield frame
            if remaining is not None and remaining <= 0:
                return
        if not yielded:
            yield empty.select(names)

    return lazy_source(source, empty.schema, str(table.name))


@dataclass(frozen=True, slots=True)
class _Routing:
    """Adds columns of `ROUTING` to live rows.

    Attributes:
        columns: those that are added.
        hashed: the names of the columns that are hashed to the routing key.
    """

    columns: tuple[str, ...]
    hashed: tuple[str, ...]
    variant: HashVariant
    parallelism: int

    @classmethod
    def of(cls, table: EpochTable, columns: Sequence[str], parallelism: int | None) -> _Routing:
        scan = table.scan
        subtasks = parallelism or scan.operator.parallelism
        if not columns or table.mask or isinstance(scan, GlobalScan) or not scan.routing_columns:
            return cls((), (), HashVariant.FALLBACK, subtasks)
        names = table.schema.names
        added = tuple(name for name in columns if name not in names)  # raw rows have the key
        hashed = tuple(names[index] for index in scan.routing_columns)
        return cls(added, hashed, scan.variant, subtasks)

    def needed(self, columns: Iterable[str]) -> list[str]:
        """Return the columns to read for these."""
        names = dict.fromkeys(columns)
        if any(name in names for name in self.columns):
            names |= dict.fromkeys(self.hashed)
        return [name for name in names if name not in self.columns]

    def added(self, frame: pl.DataFrame, rows: pa.Table) -> pl.DataFrame:
        """Return rows, a frame of them, with the columns; without, if the key was not read."""
        if not self.columns or not {*self.hashed} <= {*rows.column_names}:
            return frame
        keys = [rows.column(name) for name in self.hashed]
        hashes = key_hashes(keys, rows.num_rows, variant=self.variant)
        series = {
            KEY_HASH: lambda: pl.Series(KEY_HASH, hashes.to_numpy(), pl.UInt64),
            SUBTASK: lambda: pl.Series(
                SUBTASK, subtasks_for_hashes(hashes, self.parallelism), pl.Int64
            ),
        }
        return frame.with_columns(series[name]() for name in self.columns)


def polars_rows(rows: pa.Table) -> pl.DataFrame:
    """Convert Arrow rows; intervals, which Polars does not have, become structs.

    Raises:
        InputError: Polars has no form for a column.
    """
    try:
        frame = pl.from_arrow(rows)
    except (pl.exceptions.PolarsError, pa.ArrowException, NotImplementedError) as error:
        raise InputError(
            f"Polars cannot hold a column of this table ({error})",
            next_step="leave the column out, or use to_arrow()",
        ) from error
    assert isinstance(frame, pl.DataFrame)
    return frame


# ---- predicates ----------------------------------------------------------------------------------

_WHOLE = frozenset({"Int", *(f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64))})
_UNITS = {"Milliseconds": "ms", "Microseconds": "us", "Nanoseconds": "ns"}


def column_filters(predicate: pl.Expr | None, schema: pa.Schema) -> Iterator[ColumnFilter]:
    """Yield the conjuncts of a predicate that compare a column with values; others are left out."""
    for comparison in [] if predicate is None else _comparisons(predicate):
        if comparison.column in schema.names:
            bound = bind(comparison, schema, schema.names.index(comparison.column))
            if bound is not None:
                yield bound


def _comparisons(predicate: pl.Expr) -> Iterator[Comparison]:
    """Yield the comparisons in the JSON form of an expression. It has no documented schema: what
    is not recognised is left out.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Polars warns that the form may change
            node = json.loads(predicate.meta.serialize(format="json"))
    except (ValueError, pl.exceptions.PolarsError):
        return  # an expression without this form, such as a Python function
    try:
        yield from _conjuncts(node)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, pa.ArrowException):
        return  # another release of Polars has another form


def _conjuncts(node: dict[str, Any]) -> Iterator[Comparison]:
    if "BinaryExpr" in node:
        yield from _binary(node["BinaryExpr"])
    elif "Function" in node:
        kind = node["Function"]["function"].get("Boolean")
        column, *literals = node["Function"]["input"]
        if not isinstance(kind, dict) or "Column" not in column:
            return
        if "IsIn" in kind and not kind["IsIn"]["nulls_equal"]:
            values = _values(literals[0])
            if values is not None:
                yield Comparison(column["Column"], Relation.IN, values)
        elif "IsBetween" in kind:
            for literal, relation in zip(literals, ("GtEq", "LtEq"), strict=True):
                yield from _compared(column, relation, literal)


def _binary(node: dict[str, Any]) -> Iterator[Comparison]:
    left, operator, right = node["left"], node["op"], node["right"]
    if operator in ("And", "LogicalAnd"):
        yield from _conjuncts(left)
        yield from _conjuncts(right)
    elif operator in _RELATIONS and "Column" in left:
        yield from _compared(left, operator, right)
    elif operator in _RELATIONS and "Column" in right:
        yield from _compared(right, _MIRRORED[operator], left)


def _compared(column: dict[str, Any], operator: str, literal: Any) -> Iterator[Comparison]:
    value = _literal(literal)
    if value is not None:
        yield Comparison(column["Column"], _RELATIONS[operator], (value,))


def _literal(node: dict[str, Any]) -> Any:
    """Return the value of a literal, as Python or Arrow has it; None = of another kind."""
    if "Literal" not in node:
        return None
    ((kind, value),) = node["Literal"].items()
    if kind in ("Dyn", "Scalar"):
        ((kind, value),) = value.items()
    if kind in _WHOLE:
        return int(value)
    if kind == "Binary":
        return bytes(value)
    if kind == "Datetime" and value[2] is None:
        return pa.scalar(value[0], pa.timestamp(_UNITS[value[1]]))
    return value if kind in ("String", "Boolean") else None


def _values(node: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the values of a literal list, which is the bytes of an Arrow stream."""
    ((_, value),) = node["Literal"].items()
    if "List" not in value:
        return None
    column = pa.ipc.open_stream(bytes(value["List"])).read_all().column(0)
    return None if column.null_count else tuple(column)
