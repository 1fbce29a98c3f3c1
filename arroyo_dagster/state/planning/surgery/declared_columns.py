"""The Spark SQL that computes a table of a job from its events, as far as names show it.

Source: docs/spec/arroyo-state.md 5.6 and 5.7. The engine names a state column after its aggregate,
`sum(orders.price)[count]`. Where an argument is more than a column, a user gives the expression.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.surgery.declared import DeclaredTable, EventSource
from arroyo_dagster.state.model.tables import GENERATION_COLUMN, ExpiringTimeKeyConfig
from arroyo_dagster.state.planning.surgery.columns import (
    ACCUMULATORS,
    BATCHES,
    SESSION,
    WINDOWS,
    columns_of,
)

_STATE = re.compile(r"(?s)(\w+)\((.*)\)\[(\w+)\]")
_LITERAL = re.compile(r"U?Int\d+\((-?\d+)\)")
_COLUMN = re.compile(r"(?:\w+\.)*(\w+)")
_FUNCTIONS = {
    ("count", "count"): "count",
    ("sum", "sum"): "sum",
    ("sum", "count"): "count",
    ("avg", "sum"): "sum",
    ("avg", "count"): "count",
    ("min", "value"): "min",
    ("max", "value"): "max",
}
"""The function of SQL for a state of an aggregate, by the names of both."""
_NEXT, _CLOSED = "__arroyo_next", "__arroyo_closed"
_GAPS = 100
"""A session window keeps rows for so many gaps."""


@dataclass(frozen=True, slots=True)
class TableQuery:
    """How a table is computed from its events.

    Attributes:
        columns: name and expression of each column, in the order of the table.
        group_by: the expressions that make a group.
        where: which events are read; None = all.
        having: which groups are kept; None = all.
        sessions: whose events are read; None = any.
    """

    columns: tuple[tuple[str, str], ...]
    group_by: tuple[str, ...] = ()
    where: str | None = None
    having: str | None = None
    sessions: OpenSessions | None = None

    @property
    def expressions(self) -> tuple[str, ...]:
        """Its SQL over the columns of the events."""
        sessions = self.sessions
        given = (
            *(sql for _, sql in self.columns),
            *self.group_by,
            *((*sessions.keys, sessions.time) if sessions is not None else ()),
            self.where,
            self.having,
        )
        return tuple(one for one in given if one is not None)

    def text(self, events: str) -> str:
        """Return the statement that computes the rows.

        Args:
            events: the name of a view.
        """
        columns = (f"{sql} as `{name.replace('`', '``')}`" for name, sql in self.columns)
        where = "" if self.where is None else f" where {self.where}"
        rows = events + where
        if self.sessions is not None:
            rows = self.sessions.text(rows)
        parts = [f"select {', '.join(columns)} from {rows}"]
        if self.group_by:
            parts.append(f"group by {', '.join(self.group_by)}")
        if self.having is not None:
            parts.append(f"having {self.having}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """The events of sessions that the watermark has not closed.

    Two events that lie exactly one gap apart count as one session. Where Arroyo has two, a restore
    closes the first once more: no event is lost.

    Attributes:
        keys: the expressions that make a key.
        time: the expression of the event time.
    """

    keys: tuple[str, ...]
    time: str
    gap_micros: int
    watermark_micros: int

    def text(self, events: str) -> str:
        """Return the rest of a statement after `from`."""
        keys = f"partition by {', '.join(self.keys)}" if self.keys else ""
        time = f"unix_micros({self.time})"
        ends = f"`{_NEXT}` is null or `{_NEXT}` - {time} > {self.gap_micros}"
        closed = f"{time} + {self.gap_micros} < {self.watermark_micros}"
        return (
            f"(select *, max(case when ({ends}) and {closed} then {time} end) over ({keys}) as "
            f"`{_CLOSED}` from (select *, lead({time}) over ({keys} order by {time}) as `{_NEXT}` "
            f"from {events})) where `{_CLOSED}` is null or {time} > `{_CLOSED}`"
        )


def table_query(
    table: DeclaredTable,
    config: ExpiringTimeKeyConfig,
    source: EventSource,
    known: Collection[str],
    watermark_micros: int,
) -> TableQuery:
    """Return the SQL of a table; of table `b` that of its keys, without the arguments.

    Args:
        config: of the table in the job.
        known: the columns of the events.

    Raises:
        InputError: a column does not exist, or its expression does not follow from its name; or
            the table is of a kind that is not computed.
    """
    work = _Query(table, config, source, known, watermark_micros)
    work.check_given()
    if not config.retention_micros:
        raise InputError(
            f"{work.place}: the table holds rows between two watermarks only: those of a windowed "
            "join, a window function or an instant window",
            next_step="leave it out: at the cut it is empty",
        )
    if config.description in WINDOWS:
        return work.window()
    if config.description == ACCUMULATORS:
        return work.accumulators()
    if config.description == BATCHES:
        return work.tuples()
    if config.description == SESSION:
        return work.open_sessions()
    if config.description.endswith("join data"):
        return work.join_side()
    raise InputError(
        f"{work.place}: a table {config.description!r} is not computed from a declaration",
        next_step="leave it out: it starts empty; or give its rows with `Bootstrap` in Python",
    )


@dataclass(frozen=True, slots=True)
class _Query:
    table: DeclaredTable
    config: ExpiringTimeKeyConfig
    source: EventSource
    known: Collection[str]
    watermark_micros: int

    @property
    def place(self) -> str:
        return f"tables.{self.table.operator}.{self.table.table}"

    @property
    def names(self) -> list[str]:
        return [one.name for one in columns_of(self.config)]

    @property
    def keys(self) -> list[int]:
        return list(self.config.schema.hashed_indices)

    @property
    def event_time(self) -> str:
        return self.names[self.config.schema.timestamp_index]

    @property
    def oldest(self) -> str:
        """The SQL of the oldest event time that the table keeps."""
        return _moment(max(0, self.watermark_micros - self.config.retention_micros))

    def check_given(self) -> None:
        for name in self.table.columns:
            if name not in self.names:
                close = difflib.get_close_matches(name, self.names, n=1)
                raise InputError(
                    f"{self.place}.columns: the job's table has no column {name!r}",
                    next_step=f"did you mean {close[0]!r}?"
                    if close
                    else f"its columns are {', '.join(self.names)}",
                )
        is_tuples = self.config.description == BATCHES
        if is_tuples != bool(self.table.distinct):
            raise InputError(
                f"{self.place}: `distinct` belongs to table `b` of an aggregate, and to it only",
                next_step="""give `distinct: {"1": customer}`: by position in the SELECT, """
                "from 0, what the aggregate counts each value of"
                if is_tuples
                else "remove it",
            )
        every, width = self.table.every_micros, self.config.retention_micros
        if (self.config.description == "Sliding_intermediate") != (every is not None):
            raise InputError(
                f"{self.place}: `every_seconds` is the slide of a sliding window, and of it only",
                next_step="give it" if every is None else "remove it",
            )
        if every is not None and (not every or width % every):
            raise InputError(
                f"{self.place}: the window is {width / 1e6:g} s long, and `every_seconds` does not "
                "divide it",
                next_step="give the slide of the job's SQL, the second argument of `hop`",
            )

    # ---- tables ----------------------------------------------------------------------------------

    def window(self) -> TableQuery:
        width = self.table.every_micros or self.config.retention_micros
        start = f"timestamp_micros(unix_micros({self.source.time}) div {width} * {width})"
        found = self.resolved({self.event_time: start})
        keys = [found[at][1] for at in self.keys]
        # As a restore loads it: that the watermark has just reached the end of is still there.
        return TableQuery(
            columns=found,
            group_by=(*keys, start),
            where=_both(self.table.where, f"{start} >= {self.oldest}"),
        )

    def accumulators(self) -> TableQuery:
        newest = f"max({self.source.time})"
        found = self.resolved({self.event_time: newest})
        return TableQuery(
            columns=(*found, (GENERATION_COLUMN, "count(*)")),
            group_by=tuple(found[at][1] for at in self.keys),
            where=self.table.where,
            having=f"{newest} >= {self.oldest}",
        )

    def tuples(self) -> TableQuery:
        names = [name for at, name in enumerate(self.names) if at in self.keys]
        found = self.resolved({}, names)
        return TableQuery(
            columns=found, group_by=tuple(sql for _, sql in found), where=self.table.where
        )

    def open_sessions(self) -> TableQuery:
        found = self.resolved({self.event_time: self.source.time})
        sessions = OpenSessions(
            keys=tuple(found[at][1] for at in self.keys),
            time=self.source.time,
            gap_micros=self.config.retention_micros // _GAPS,
            watermark_micros=self.watermark_micros,
        )
        return TableQuery(columns=found, where=self.table.where, sessions=sessions)

    def join_side(self) -> TableQuery:
        found = self.resolved({self.event_time: self.source.time})
        fresh = f"{self.source.time} >= {self.oldest}"
        return TableQuery(columns=found, where=_both(self.table.where, fresh))

    # ---- columns ---------------------------------------------------------------------------------

    def resolved(
        self, fixed: dict[str, str], names: list[str] | None = None
    ) -> tuple[tuple[str, str], ...]:
        """Return the expression of each column.

        Raises:
            InputError: some do not follow from their names; names all.
        """
        given = {**fixed, **self.table.columns}
        found = [(name, given.get(name) or self.derived(name)) for name in names or self.names]
        open_ones = [name for name, sql in found if sql is None]
        if open_ones:
            raise InputError(
                f"{self.place}: {len(open_ones)} columns do not follow from their names, given the "
                f"columns of the events ({', '.join(sorted(self.known))})",
                columns=", ".join(open_ones),
                next_step=f"give the SQL of each under {self.place}.columns",
            )
        return tuple((name, sql) for name, sql in found if sql is not None)

    def derived(self, name: str) -> str | None:
        state = _STATE.fullmatch(name)
        if state is None:
            return self.column(name.removeprefix("_key_"))
        function = _FUNCTIONS.get((state[1].lower(), state[3]))
        literal = _LITERAL.fullmatch(state[2])
        argument = literal[1] if literal is not None else self.column(state[2])
        return None if function is None or argument is None else f"{function}({argument})"

    def column(self, text: str) -> str | None:
        """Return the column of the events that a column of the engine's plan is."""
        found = _COLUMN.fullmatch(text)
        return f"`{found[1]}`" if found is not None and found[1] in self.known else None


def _moment(micros: int) -> str:
    return f"timestamp_micros({micros})"


def _both(one: str | None, other: str) -> str:
    return other if one is None else f"({one}) and {other}"
