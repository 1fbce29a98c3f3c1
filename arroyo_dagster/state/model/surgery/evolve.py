"""The request to give a job of changed SQL the state of another one, and how operators match."""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFill:
    """The value of a column that the source does not have.

    Attributes:
        value: the JSON text of the value; `null` = NULL.
    """

    operator: OperatorId
    column: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRename:
    """A column of the job's operator that has another name in the source."""

    operator: OperatorId
    column: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorMove:
    """The new position in the SELECT of an aggregate whose arguments table `b` holds."""

    operator: OperatorId
    source: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What a person decides about an evolve. Operators are those of the job, unless it says so.

    Attributes:
        matches: pairs of an operator of the source and one of the job.
        drop: operators of the source whose state is not taken.
        start_empty: operators that start without state.
        same_columns: operators whose tables have the columns of the source, although the job has
            not written them yet.
    """

    matches: tuple[tuple[OperatorId, OperatorId], ...] = ()
    drop: tuple[OperatorId, ...] = ()
    start_empty: tuple[OperatorId, ...] = ()
    same_columns: tuple[OperatorId, ...] = ()
    fills: tuple[ColumnFill, ...] = ()
    renames: tuple[ColumnRename, ...] = ()
    accumulators: tuple[AccumulatorMove, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolve:
    """Take over the state of another job whose SQL may differ.

    Attributes:
        source: the path of the other job, and `epoch` its epoch.
    """

    source: StatePath
    epoch: Epoch
    overrides: Overrides = Overrides()

    name = "evolve"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMatch:
    """An operator of the job, and the operator of the source whose state it takes.

    Attributes:
        why: what decided, for people.
    """

    source: OperatorId
    operator: OperatorId
    why: str
