"""SQL over states: Polars' dialect, read-only, over the tables in scope.

Source: sdf-states.md 4.1, 4.2; error E46.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import polars as pl

from arroyo_dagster.dataflow.errors import SqlError, did_you_mean
from arroyo_dagster.dataflow.storage.columns import KEY, UPDATED_AT
from arroyo_dagster.state.operations.query.sql_text import (
    SqlFailure,
    SqlToken,
    exact_answer,
    file_function,
    first_that_writes,
    short_sql,
    sql_failures,
    sql_tokens,
)

_MAX_LISTED = 20
_UNKNOWN_TABLE = re.compile(r"relation '([^']*)' was not found")


@dataclass(frozen=True)
class StateTable:
    """A state as a table in SQL.

    Attributes:
        name: the canonical name.
        frame: `_key`, the columns by name, `_updated_at`; sorted by `_key`.
        aliases: other names of the table.
    """

    name: str
    frame: pl.DataFrame
    aliases: tuple[str, ...] = ()

    @cached_property
    def plain(self) -> pl.DataFrame:
        """The columns of `*`: all but `_updated_at`."""
        return self.frame.drop(UPDATED_AT, strict=False)

    def of_key(self, key: str) -> StateTable:
        """Return the table with only the rows of one key."""
        keys = self.frame.get_column(KEY)
        start = keys.search_sorted(key, side="left")
        end = keys.search_sorted(key, side="right")
        return StateTable(self.name, self.frame.slice(start, end - start), self.aliases)


@dataclass(frozen=True)
class Tables:
    """The tables in scope of a query. Immutable.

    Attributes:
        tables: the tables.
        star_includes_updated_at: whether `*` includes `_updated_at`.
        primitives: names of states that are no tables, for errors.
    """

    tables: Sequence[StateTable]
    star_includes_updated_at: bool = False
    primitives: frozenset[str] = frozenset()
    _contexts: dict[bool, pl.SQLContext[pl.DataFrame]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def by_name(self) -> dict[str, StateTable]:
        """Every table by its name and its aliases; names take precedence over aliases."""
        by_alias = {alias: table for table in self.tables for alias in table.aliases}
        return by_alias | {table.name: table for table in self.tables}

    def with_table(self, table: StateTable, *also: str) -> Tables:
        """Return these tables and one more, which replaces a table of the same name.

        Args:
            table: the additional table; its aliases take precedence over those of other tables.
            also: additional aliases of it.
        """
        others = [other for other in self.tables if other.name != table.name]
        added = StateTable(table.name, table.frame, (*table.aliases, *also))
        return replace(self, tables=[*others, added], _contexts={})

    def sql(self, text: str, params: Mapping[str, Any] | None = None) -> pl.DataFrame:
        """Execute a query.

        Raises:
            SqlError: unknown table or column, a syntax error, a statement that writes, or a
                parameter without a valid value (E46).
        """
        tokens = sql_tokens(text)
        words = [token for token in tokens if token.kind != "space"]
        # Reject statements that do not begin with a keyword of a query.
        head = first_that_writes(words)
        if head is not None:
            raise SqlError(
                f"`{head}` is not a query: states are read-only here; only the service that owns a "
                "state changes it",
                number="E46",
                sql=short_sql(text),
                next_step="begin with `select`, `with`, `show tables` or `explain`",
            )
        if [token.word for token in words[:2]] == ["show", "tables"]:
            names = sorted(table.name for table in self.tables)
            return pl.DataFrame({"name": names}, schema={"name": pl.String})
        bound = _bound(text, tokens, params or {})
        return self._answer(text, bound)

    def _answer(self, text: str, tokens: list[SqlToken]) -> pl.DataFrame:
        timed = self.star_includes_updated_at or any(
            token.text.strip('"`').lower() == UPDATED_AT for token in tokens
        )
        if timed and not self.star_includes_updated_at:
            tokens = _without_updated_at(tokens)
        scope = self._narrowed(tokens)
        query = "".join(token.text for token in _with_sums_of_nothing(tokens))
        function = file_function(query)
        if function is not None:
            raise SqlError(
                f"`{function}` reads files; a query reads only the states in scope",
                number="E46",
                sql=short_sql(query),
                next_step="`show tables` lists the states",
            )
        try:
            with sql_failures():
                tables = scope.by_name.items()
                frames = {name: scope._frame(table, timed).lazy() for name, table in tables}
                answer: pl.DataFrame = (
                    exact_answer(frames, query).collect()
                    if any(token.word == "sum" for token in tokens)
                    else scope._context(timed).execute(query, eager=True)
                )
            return answer
        except SqlFailure as error:
            raise self._refused(text, str(error)) from error.__cause__
        finally:
            if scope is not self:
                scope._contexts.clear()

    def _context(self, timed: bool) -> pl.SQLContext[pl.DataFrame]:
        if timed not in self._contexts:
            frames = {name: self._frame(table, timed) for name, table in self.by_name.items()}
            self._contexts[timed] = pl.SQLContext(frames, eager=True)
        return self._contexts[timed]

    @staticmethod
    def _frame(table: StateTable, timed: bool) -> pl.DataFrame:
        return table.frame if timed else table.plain

    def _narrowed(self, tokens: list[SqlToken]) -> Tables:
        """Return only one table with the rows of one key if the query reads a single key.

        A view may have millions of keys, and Polars would scan all of them.
        """
        point = _point_query([token for token in tokens if token.kind != "space"])
        table = None if point is None else self.by_name.get(point[0])
        if point is None or table is None:
            return self
        return Tables([table.of_key(point[1])], self.star_includes_updated_at)

    def _refused(self, text: str, reason: str) -> SqlError:
        names = sorted(table.name for table in self.tables)
        columns = {
            table.name: [*table.plain.columns, UPDATED_AT] for table in self.tables[:_MAX_LISTED]
        }
        unknown = _UNKNOWN_TABLE.search(reason)
        if unknown is not None:
            listed = ", ".join(names[:_MAX_LISTED]) or "no tables"
            name = unknown.group(1)
            reason += f"; there are {listed}{did_you_mean(name, names)}"
            if name in self.primitives:
                reason += f". `{name}` is a primitive state, and only arrow-rows are tables"
        return SqlError(
            f"the query cannot be answered: {reason}",
            number="E46",
            sql=short_sql(text),
            tables=names[:_MAX_LISTED],
            columns=columns,
            next_step="check the names; quote names with a dash in back-ticks",
        )


def _bound(text: str, tokens: list[SqlToken], params: Mapping[str, Any]) -> list[SqlToken]:
    """Return the tokens with each parameter replaced by a literal."""
    bound: list[SqlToken] = []
    for token in tokens:
        if token.kind != "parameter":
            bound.append(token)
            continue
        name = token.text[1:]
        if name not in params:
            raise SqlError(
                f"the query has a parameter :{name} without a value",
                number="E46",
                sql=short_sql(text),
                given=sorted(params),
                next_step="pass it: sql(text, params={…})",
            )
        bound.append(_literal(name, params[name]))
    return bound


def _literal(name: str, value: Any) -> SqlToken:
    if value is None or isinstance(value, bool):
        return SqlToken("word", {None: "null", True: "true", False: "false"}[value])
    if isinstance(value, int | float):
        return SqlToken("number", f"({value!r})" if value < 0 else repr(value))
    if isinstance(value, str):
        escaped = value.replace("'", "''")
        return SqlToken("text", f"'{escaped}'")
    raise SqlError(
        f"parameter :{name} is a {type(value).__name__}; expected text, a number, a bool or None",
        number="E46",
    )


def _without_updated_at(tokens: list[SqlToken]) -> list[SqlToken]:
    """Exclude `_updated_at` from every `*` of a projection."""
    changed: list[SqlToken] = []
    before = ""
    for token in tokens:
        changed.append(token)
        if token.text == "*" and before in ("select", "distinct", ",", "."):
            changed.append(SqlToken("other", f" exclude ({UPDATED_AT})"))
        if token.kind != "space":
            before = token.word or token.text
    return changed


def _with_sums_of_nothing(tokens: list[SqlToken]) -> list[SqlToken]:
    """Return the tokens with `sum(…)` as `coalesce(sum(…), 0)`.

    The Polars inside SDF sums no rows to 0, the installed one to null, which getters refuse. Sums
    over windows stay as they are.
    """
    changed = list(tokens)
    for index in [i for i, token in enumerate(tokens) if token.word == "sum"]:
        opened = _next_token(tokens, index)
        closed = _closing(tokens, opened)
        if closed is None:
            continue
        behind = _next_token(tokens, closed)
        if behind < len(tokens) and tokens[behind].word in ("over", "filter"):
            continue
        changed[index] = SqlToken("other", f"coalesce({tokens[index].text}")
        changed[closed] = SqlToken("other", "), 0)")
    return changed


def _next_token(tokens: Sequence[SqlToken], at: int) -> int:
    """Return the index of the first token behind `at` that is no space."""
    at += 1
    while at < len(tokens) and tokens[at].kind == "space":
        at += 1
    return at


def _closing(tokens: Sequence[SqlToken], opened: int) -> int | None:
    """Return the index of the parenthesis that closes the one at `opened`; None = there is none."""
    if opened >= len(tokens) or tokens[opened].text != "(":
        return None
    depth = 0
    for index in range(opened, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[index].text, 0)
        if depth == 0:
            return index
    return None


_ONE_TABLE_ONLY = {"join", "union", "intersect", "except", "or", "not", "with", "values", "having"}


def _point_query(words: list[SqlToken]) -> tuple[str, str] | None:
    """Return the table and the key if a query reads one table `where _key = '…'`, else None.

    Further conditions after `and` are allowed, as are `order`, `limit` and `group`.
    """
    texts = [token.word for token in words]
    if texts.count("select") != 1 or texts[:1] != ["select"] or _ONE_TABLE_ONLY & {*texts}:
        return None
    if texts.count("from") != 1 or texts.count("where") != 1:
        return None
    table, condition = texts.index("from") + 1, texts.index("where") + 1
    if condition - table != 2 or len(words) < condition + 3:
        return None
    column, equals, key = words[condition : condition + 3]
    if column.text.strip('"`') != KEY or equals.text != "=" or key.kind != "text":
        return None
    behind = texts[condition + 3 : condition + 4]
    if behind not in ([], [";"], ["and"], ["order"], ["limit"], ["group"]):
        return None
    return words[table].text.strip('"`'), key.text[1:-1].replace("''", "'")
