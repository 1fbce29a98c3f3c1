"""Where each column of a table takes its values from, if another job's table has other columns.

Source: docs/spec/state-surgery.md, `Rules`; docs/spec/arroyo-state.md 5.6 and 5.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.surgery.evolve import Overrides
from arroyo_dagster.state.model.tables import TIMESTAMP_COLUMN, ExpiringTimeKeyConfig

WINDOWS = frozenset({"tumbling_intermediate", "Sliding_intermediate"})
"""Descriptions of tables of partial aggregates, one row for each key and bin."""
ACCUMULATORS = "accumulator_state"
BATCHES = "batch_state"
SESSION = "session"
JOIN_SIDES = frozenset({"left join data", "right join data"})
_RAW_ROWS = JOIN_SIDES | {SESSION, "window function input"}
"""Descriptions of tables that hold rows of the input."""
_OTHER_RETENTION = JOIN_SIDES | {ACCUMULATORS, BATCHES, "window function input"}
"""Descriptions of tables whose retention may differ: it is a time to live, and no window."""
_STATE = re.compile(r"(?s)(.*)\[(.*?)\]")
_NUMBERS = re.compile(r'"(U?Int|Float)\d+"|\{"Decimal')


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A column of a table.

    Attributes:
        kind: the JSON text of its type.
    """

    name: str
    kind: str
    nullable: bool

    @property
    def is_number(self) -> bool:
        """Whether 0 is a value of it."""
        return _NUMBERS.match(self.kind) is not None


@dataclass(frozen=True, slots=True)
class Filled:
    """A column that gets one value in every row: a JSON text."""

    value: str


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Where the columns of a table come from.

    Attributes:
        sources: for each column the index of a column of the source, or its value.
        filled, dropped: names of columns, for people.
        identical: whether the source has exactly these columns.
    """

    sources: tuple[int | Filled, ...]
    filled: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    identical: bool = False


def columns_of(config: ExpiringTimeKeyConfig) -> tuple[StateColumn, ...]:
    """Return the columns of a table as its metadata has them, without `_generation`."""
    return tuple(
        StateColumn(field["name"], _kind(field), bool(field["nullable"]))
        for field in json.loads(config.schema.arrow_schema)["fields"]
    )


def _kind(field: Mapping[str, Any]) -> str:
    # An extension type, such as JSON as text, is a type of its own.
    extension = field.get("metadata")
    kind = field["data_type"]
    return json.dumps([kind, extension] if extension else kind, sort_keys=True)


def keys_of(config: ExpiringTimeKeyConfig) -> tuple[StateColumn, ...]:
    """Return the columns by which rows are routed, in their order."""
    columns = columns_of(config)
    return tuple(columns[index] for index in config.schema.hashed_indices)


def map_columns(
    theirs: ExpiringTimeKeyConfig,
    ours: ExpiringTimeKeyConfig,
    operator: OperatorId,
    overrides: Overrides,
) -> ColumnMap | str:
    """Find where the columns of a table come from.

    Args:
        theirs: the table of the source.
        ours: the table of the job.
        operator: of the job.

    Returns:
        The map; or why the table cannot take the rows of the source, for people.
    """
    renamed = {item.column: item.source for item in overrides.renames if item.operator == operator}
    fills = {fill.column: fill.value for fill in overrides.fills if fill.operator == operator}
    reason = _why_other_table(theirs, ours, renamed, operator)
    if reason is not None:
        return reason
    source, target = columns_of(theirs), columns_of(ours)
    if source == target:
        return ColumnMap(tuple(range(len(target))), identical=True)
    double = sorted(_doubled(source) | _doubled(target))
    if double:
        return f"several of its columns are named {double[0]!r}, and not all columns are equal"
    columns = _Columns(operator, source, target, renamed, fills, ours.description)
    return _mapped(columns, _keys(ours))


@dataclass(frozen=True, slots=True)
class _Columns:
    operator: OperatorId
    found: tuple[StateColumn, ...]
    wanted: tuple[StateColumn, ...]
    renamed: Mapping[str, str]
    given: Mapping[str, str]
    description: str

    def index_of(self, column: StateColumn) -> int | None:
        """Return where the source has a column."""
        name = self.renamed.get(column.name, column.name)
        return next((index for index, source in enumerate(self.found) if source.name == name), None)

    @property
    def left(self) -> list[StateColumn]:
        """The columns of the source that no column takes."""
        taken = {self.index_of(column) for column in self.wanted}
        return [column for index, column in enumerate(self.found) if index not in taken]

    def overrides(self, missing: Sequence[StateColumn]) -> str:
        """Return the overrides that decide about columns which the source may name otherwise."""
        left, renames = self.left, {}
        for column in missing:
            like = next((other for other in left if _alike(other, column)), None)
            if like is not None:
                left.remove(like)
                renames[column.name] = like.name
        fills = {one.name: json.loads(_neutral(one, self.description) or "null") for one in missing}
        lines = [override("rename", self.operator, renames)] if renames else []
        return " or ".join([*lines, override("fill", self.operator, fills)])


def override(name: str, operator: OperatorId, values: Mapping[str, Any]) -> str:
    """Return a line of the overrides that decides about an operator, as YAML."""
    return f"`{name}: {json.dumps({operator: values}, ensure_ascii=False)}`"


def _alike(one: StateColumn, other: StateColumn) -> bool:
    """Whether two columns may be one, of another name: their type, and of a state what it is of."""
    states = [_STATE.fullmatch(column.name) for column in (one, other)]
    of = [None if state is None else (state[1].partition("(")[0], state[2]) for state in states]
    return one.kind == other.kind and of[0] == of[1]


def _mapped(columns: _Columns, keys: Collection[int]) -> ColumnMap | str:
    sources: list[int | Filled] = []
    filled: list[StateColumn] = []
    for column in columns.wanted:
        index = columns.index_of(column)
        if index is not None and columns.found[index].kind != column.kind:
            return (
                f"its column {column.name!r} has the type {column.kind}, and in the source "
                f"{columns.found[index].kind}"
            )
        if index is not None:
            sources.append(index)
            continue
        value = columns.given.get(column.name, _neutral(column, columns.description))
        if value is None:
            reason = _why_no_value(column, columns.description)
            if not columns.left:
                return reason
            return f"{reason}; if it has another name there: {columns.overrides([column])}"
        sources.append(Filled(value))
        filled.append(column)
    taken = {index for index in sources if isinstance(index, int)}
    state = [index for index in taken if columns.found[index].name != TIMESTAMP_COLUMN]
    if columns.description not in _RAW_ROWS and filled and len(state) <= len(keys):
        return "it has no aggregate in common with the source, only the keys"
    names, dropped = [column.name for column in filled], [column.name for column in columns.left]
    guessed = [column for column in filled if column.name not in columns.given]
    if guessed and dropped:
        return (
            f"{', '.join(one.name for one in guessed)} would begin anew, and {', '.join(dropped)} "
            "of the source would be dropped: nothing shows whether they are the same under another "
            f"name; decide it with --overrides: {columns.overrides(guessed)}"
        )
    return ColumnMap(tuple(sources), tuple(names), tuple(dropped))


def _why_other_table(
    theirs: ExpiringTimeKeyConfig,
    ours: ExpiringTimeKeyConfig,
    renamed: Mapping[str, str],
    operator: OperatorId,
) -> str | None:
    """Return why two tables are not of the same kind, keys and window; None = they are."""
    if theirs.description != ours.description or theirs.generational != ours.generational:
        return f"it is a table {ours.description!r}, and in the source {theirs.description!r}"
    schema, source_schema = ours.schema, theirs.schema
    for name, indices, source_indices in (
        ("keys", schema.key_indices, source_schema.key_indices),
        ("routing keys", schema.routing_key_indices, source_schema.routing_key_indices),
    ):
        own, others = _named(ours, indices, renamed), _named(theirs, source_indices, {})
        if own != others:
            reason = f"its {name} are {_listed(own)}, and in the source {_listed(others)}"
            kinds = [[kind for _, kind in keys or ()] for keys in (own, others)]
            if kinds[0] != kinds[1]:
                return reason
            names = {a: b for (a, _), (b, _) in zip(own or (), others or (), strict=True) if a != b}
            return f"{reason}; if they are the same: {override('rename', operator, names)}"
    other = theirs.retention_micros != ours.retention_micros
    if other and ours.description == SESSION:
        # The retention of a session is 100 gaps.
        gaps = ours.retention_micros / 1e8, theirs.retention_micros / 1e8
        return f"its gap is {gaps[0]:g} s, and in the source {gaps[1]:g} s"
    if other and not (theirs.retention_micros and ours.retention_micros):
        return "one of both joins windows, and the other one updates its rows"
    if other and ours.description not in _OTHER_RETENTION:
        widths = ours.retention_micros / 1e6, theirs.retention_micros / 1e6
        return f"its window is {widths[0]:g} s long, and in the source {widths[1]:g} s"
    contents_known = ours.description in WINDOWS | _RAW_ROWS | {ACCUMULATORS, BATCHES}
    if not contents_known and columns_of(theirs) != columns_of(ours):
        return "its columns differ, and what the table holds is not known"
    return None


def _named(
    config: ExpiringTimeKeyConfig, indices: Sequence[int] | None, renamed: Mapping[str, str]
) -> tuple[tuple[str, str], ...] | None:
    if indices is None:
        return None
    columns = columns_of(config)
    return tuple((renamed.get(columns[i].name, columns[i].name), columns[i].kind) for i in indices)


def _listed(columns: Sequence[tuple[str, str]] | None) -> str:
    return "(" + ", ".join(f"{name} {kind}" for name, kind in columns or ()) + ")"


def _keys(config: ExpiringTimeKeyConfig) -> frozenset[int]:
    return frozenset(config.schema.key_indices or ())


def _doubled(columns: Sequence[StateColumn]) -> set[str]:
    names = [column.name for column in columns]
    return {name for name in names if names.count(name) > 1}


def _neutral(column: StateColumn, description: str) -> str | None:
    """Return the value that adds nothing to an aggregate; None = there is none."""
    state = _STATE.fullmatch(column.name)
    adds = state is not None and state[2] in ("sum", "count") and column.is_number
    if description in WINDOWS and column.nullable:
        return "null"
    if description in WINDOWS or description == ACCUMULATORS:
        if adds:
            return "0"
        return "null" if column.nullable else None
    return None


def _why_no_value(column: StateColumn, description: str) -> str:
    if description in _RAW_ROWS:
        return f"the rows of the source do not have its column {column.name!r}"
    return (
        f"the source does not have its column {column.name!r}, which may not be NULL, and no value "
        "of it adds nothing"
    )


# ---- accumulators --------------------------------------------------------------------------------


def aggregates_of(config: ExpiringTimeKeyConfig) -> tuple[str, ...]:
    """Return the aggregates whose state table `a` holds, in the order of the SELECT."""
    keys = _keys(config)
    names = [
        state[1] if (state := _STATE.fullmatch(column.name)) is not None else column.name
        for index, column in enumerate(columns_of(config))
        if index not in keys and index != config.schema.timestamp_index
    ]
    return tuple(dict.fromkeys(names))


def map_accumulators(
    theirs: tuple[Sequence[str], Collection[int]],
    ours: tuple[Sequence[str], Collection[int]],
    moves: Mapping[int, int],
    *,
    same: bool = False,
) -> Mapping[int, int] | str:
    """Find the new numbers of the aggregates whose arguments table `b` holds.

    A number is a position in the SELECT. The aggregates of table `a` take the other positions, so
    those of `b` are compared by the aggregates between which they stand.

    Args:
        theirs: the aggregates of table `a` of the source, and the numbers in its table `b`.
        ours: the same of the job.
        moves: what a person has decided, by number in the source; other numbers are dropped.
        same: whether the programs of both pipelines show that the aggregates are the same.

    Returns:
        The new number of each number of the source; one that is left out is dropped. Or why it is
        not known.
    """
    if moves:
        missing = sorted(set(moves) - set(theirs[1]))
        if missing:
            return f"no row of the source has the accumulator {missing[0]} that is to be moved"
        if len(set(moves.values())) < len(moves):
            return "two accumulators are to be moved to one number"
        return moves
    if same:
        return {number: number for number in theirs[1]}
    if len(theirs[1]) == len(ours[1]) > 1:
        return "nothing shows which of its aggregates that keep their arguments is which"
    if tuple(theirs[0]) == tuple(ours[0]) and set(theirs[1]) == set(ours[1]):
        return {number: number for number in theirs[1]}
    places = [_places(*table) for table in (theirs, ours)]
    if places[0] is None or places[1] is None:
        return "its rows do not show the positions of all aggregates that keep their arguments"
    if len(theirs[1]) != len(ours[1]):
        return (
            f"it keeps the arguments of {len(ours[1])} aggregates, and the source of "
            f"{len(theirs[1])}"
        )
    return dict(zip(sorted(theirs[1]), sorted(ours[1]), strict=True))


def _places(aggregates: Sequence[str], numbers: Collection[int]) -> list[str | None] | None:
    """Return the SELECT by position, None for each aggregate of `b`; None if it has gaps."""
    count = len(aggregates) + len(set(numbers))
    if any(number >= count for number in numbers):
        return None
    rest = iter(aggregates)
    return [None if position in set(numbers) else next(rest) for position in range(count)]
