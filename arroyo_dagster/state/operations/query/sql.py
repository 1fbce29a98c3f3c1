"""SQL over the state below a checkpoint URL: Polars' dialect, read-only.

Names are those of `names.py`. Projections, filters and limits of a query reach files and row
groups. See `docs/decisions/query-engine.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.state.operations.query.metadata_tables import METADATA_TABLES, find_metadata
from arroyo_dagster.state.operations.query.names import (
    ROUTING,
    QueryName,
    not_found,
    parse_name,
    quoted,
)
from arroyo_dagster.state.operations.query.saved import find_saved
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
from arroyo_dagster.state.operations.query.state import OnUnreadable, StateCatalog

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from arroyo_dagster.state.operations.query.table import EpochTable

_ENDS_FROM = frozenset(
    {
        "where",
        "group",
        "order",
        "having",
        "limit",
        "offset",
        "union",
        "intersect",
        "except",
        "select",
        "qualify",
        "window",
    }
)
_NO_ALIAS = _ENDS_FROM | frozenset(
    {
        "on",
        "using",
        "join",
        "inner",
        "left",
        "right",
        "full",
        "cross",
        "semi",
        "anti",
        "natural",
        "outer",
        "asof",
        "fetch",
    }
)
_UNKNOWN_COLUMN = re.compile(r"""unable to find column "([^"]+)"; valid columns: \[([^\]]*)\]""")
_AT = re.compile(r"at Line: (\d+), Column: (\d+)")


@dataclass(frozen=True)
class SqlCatalog:
    """Answers SQL about one checkpoint URL; metadata is read once for each query.

    Attributes:
        state: the state.
        raw: tables have every stored row, with the file that holds it.
        on_unreadable: called with each job that the metadata of all jobs leaves out, and why; None
            = raise the error.
    """

    state: StateCatalog
    raw: bool = False
    on_unreadable: OnUnreadable | None = None

    def query(self, text: str) -> pl.LazyFrame:
        """Return the answer of a query, as a lazy frame: rows are read when it is collected.

        Raises:
            InputError: not one query, or one that Polars cannot answer; marks the word.
            NotFoundError: there is no such job, epoch, operator, table or column; names the
                nearest.
        """

        tokens = sql_tokens(text.strip().rstrip(";"))
        words = [token for token in tokens if token.kind != "space"]
        _check(text, words)
        if [token.word for token in words[:2]] == ["show", "tables"]:
            return self.list_tables().lazy()
        if words[0].word == "describe":
            rest = "".join(token.text for token in words[1:] if token.word != "table")
            return self.describe(rest).lazy()
        scope = _Scope(self)
        query = "".join(token.text for token in scope.resolve(tokens))
        with _answering(text):
            frame = exact_answer(scope.frames, query)
            frame.collect_schema()
        return frame

    def collect(self, text: str) -> pl.DataFrame:
        """Return the rows of a query; errors as `query`, and those of reading."""
        frame = self.query(text)
        with _answering(text):
            answer: pl.DataFrame = frame.collect()
        return answer

    def saved(
        self, name: str, job: str | None = None, values: Mapping[str, str] | None = None
    ) -> pl.DataFrame:
        """Return the rows of a saved query; see `arroyo_dagster.state.operations.query.saved`.

        Args:
            name: such as `offsets`.
            job: `job` or `job@epoch`; None = all jobs, if the query can be asked of all.
            values: of its parameters, as texts.

        Raises:
            NotFoundError: there is no such query; errors of `collect`.
            InputError: a parameter is unknown, missing or not of its kind, or the job is missing.
        """
        query = find_saved(name)
        of_epoch = False
        if job is not None:
            try:
                state_job, epoch = self.state.find(job)
                of_epoch = epoch is not None
                job = f"{state_job.name}@{epoch}" if of_epoch else state_job.name
            except NotFoundError:
                pass  # its journal may be left
        sql, parallelism = query.bind(job, values or {}, of_epoch=of_epoch)
        return replace(self, state=replace(self.state, parallelism=parallelism)).collect(sql)

    def list_tables(self) -> pl.DataFrame:
        """Return every table that a query can name: its name, and what a row is."""
        import polars as pl

        names = [
            (str(QueryName(table.name)), "metadata", table.description)
            for table in METADATA_TABLES.values()
        ]
        for job in self.state.readable_jobs(self.on_unreadable):
            try:
                tables = job.epoch().tables() if job.epochs() else ()
            except ArroyoStateError as error:
                if self.on_unreadable is None:
                    raise
                self.on_unreadable(job.name, error)
                continue
            for table in tables:
                config = table.scan.operator.configs[table.scan.name]
                names.append((str(table.name), config.kind.label, config.config.description))
        return pl.DataFrame(names, schema=["name", "kind", "description"], orient="row")

    def describe(self, name: str) -> pl.DataFrame:
        """Return the columns of a table and their types; errors as `query`."""
        import polars as pl

        schema = self.schema(parse_name(name))
        rows = [(column.name, str(column.type), column.nullable) for column in schema]
        return pl.DataFrame(rows, schema=["column", "type", "nullable"], orient="row")

    def schema(self, name: QueryName) -> pa.Schema:
        """Return the Arrow schema of a table; errors as `query`."""
        if name.operator is None:
            return find_metadata(self.state, name).schema
        return self.table(name).schema

    def table(self, name: QueryName) -> EpochTable:
        """Return a table of an operator; errors as `query`."""
        table = self.state.table(name)
        return table.raw() if self.raw else table

    def frame(self, name: QueryName, routing: Sequence[str] = ()) -> pl.LazyFrame:
        """Return a table as a lazy frame; errors as `query`.

        Args:
            routing: columns of `ROUTING` that it gets, too, if its rows are routed by key.
        """
        if name.operator is not None:
            return self.table(name).to_polars(routing, self.state.parallelism)
        table = find_metadata(self.state, name, on_unreadable=self.on_unreadable)
        return table.to_polars(str(name))


# ---- names in a query ----------------------------------------------------------------------------


@dataclass
class _Scope:
    """The tables of one query, each under a name that Polars accepts."""

    catalog: SqlCatalog
    frames: dict[str, pl.LazyFrame] = field(default_factory=dict)
    routing: Sequence[str] = ()

    def resolve(self, tokens: Sequence[SqlToken]) -> Iterator[SqlToken]:
        """Yield the tokens, with the names of tables replaced.

        Raises:
            NotFoundError, InputError: a name is not that of a table.
        """
        subqueries = _subquery_names(tokens)
        named = {token.text.strip('"`') for token in tokens}
        self.routing = [name for name in ROUTING if name in named]
        position = 0
        for start, end in _table_names(tokens):
            yield from tokens[position:start]
            position = end
            text = "".join(token.text for token in tokens[start:end] if token.kind != "space")
            name = parse_name(text.replace("`", '"'))
            if name.job is None and name.table.lower() in subqueries:
                yield from tokens[start:end]
                continue
            alias = quoted(name.table) if name.table.lower() not in _NO_ALIAS else f'"{name.table}"'
            yield SqlToken("quoted", f'"{self._registered(name)}"')
            if not _has_alias(tokens[end:]):
                yield SqlToken("other", f" AS {alias}")
        yield from tokens[position:]

    def _registered(self, name: QueryName) -> str:
        text = ".".join(name.parts)
        if text not in self.frames:
            self.frames[text] = self.catalog.frame(name, self.routing)
        return text.replace('"', '""')


def _subquery_names(tokens: Sequence[SqlToken]) -> set[str]:
    """Return the names that `with` gives to subqueries: `name as (`."""
    words = [token for token in tokens if token.kind != "space"]
    return {
        name.text.strip('"`').lower()
        for name, as_, bracket in zip(words, words[1:], words[2:], strict=False)
        if as_.word == "as" and bracket.text == "(" and name.kind in ("word", "quoted")
    }


def _table_names(tokens: Sequence[SqlToken]) -> Iterator[tuple[int, int]]:
    """Yield the range of the tokens of each table in a `from` or `join`."""
    within: list[bool] = [False]  # for each bracket, whether a list of tables goes on
    index = 0
    expected = False
    while index < len(tokens):
        token = tokens[index]
        if token.kind == "space":
            index += 1
            continue
        if expected and token.kind in ("word", "quoted"):
            end = _name_end(tokens, index)
            yield index, end
            index, expected = end, False
            continue
        expected = False
        if token.text == "(":
            within.append(False)
        elif token.text == ")":
            within = within[:-1] or [False]
        elif token.word in ("from", "join") and _is_query(tokens, index):
            within[-1] = expected = True
        elif token.word in _ENDS_FROM:
            within[-1] = False
        elif token.text == "," and within[-1]:
            expected = True
        index += 1


def _is_query(tokens: Sequence[SqlToken], at: int) -> bool:
    """Return whether a `from` is that of a query, not of a function such as `extract`."""
    depth = 0
    for token in reversed(tokens[:at]):
        depth += {")": 1, "(": -1}.get(token.text, 0)
        if depth < 0:
            return False
        if depth == 0 and token.word in ("select", "from", "join"):
            return True
    return True


def _name_end(tokens: Sequence[SqlToken], start: int) -> int:
    end = start + 1
    while end + 1 < len(tokens) and tokens[end].text == ".":
        end += 2
    return end


def _has_alias(rest: Sequence[SqlToken]) -> bool:
    following = next((token for token in rest if token.kind != "space"), None)
    if following is None:
        return False
    return following.kind == "quoted" or (
        following.kind == "word" and following.word not in _NO_ALIAS
    )


# ---- errors --------------------------------------------------------------------------------------


def _check(text: str, words: Sequence[SqlToken]) -> None:
    head = first_that_writes(words)
    if head is not None:
        raise InputError(
            f"`{head}` is not a query: state is read-only here",
            sql=short_sql(text),
            next_step="begin with `select`, `with`, `show tables`, `describe` or `explain`",
        )
    function = file_function(text)
    if function is not None:
        raise InputError(
            f"`{function}` reads files; a query reads only state",
            sql=short_sql(text),
            next_step="`show tables` lists the tables",
        )


@contextmanager
def _answering(text: str) -> Iterator[None]:
    """Convert errors of Polars: mark the word that is wrong."""
    try:
        with sql_failures():
            yield
    except SqlFailure as error:
        raise _refused(text, str(error)) from error.__cause__


def _refused(text: str, reason: str) -> ArroyoStateError:
    unknown = _UNKNOWN_COLUMN.search(reason)
    if unknown is not None:
        name = unknown[1]
        columns = re.findall(r'"([^"]+)"', unknown[2])
        error = not_found("column", name, columns)
        error.facts["sql"] = short_sql(_marked(text, name))
        return error
    place = _AT.search(reason)
    marked = text if place is None else _marked_at(text, int(place[1]), int(place[2]))
    return InputError(
        f"the query cannot be answered: {_AT.sub('', reason).strip()}",
        sql=short_sql(marked),
        next_step="`show tables` lists the tables, `describe NAME` their columns; names that are "
        "no identifiers need double quotes",
    )


def _marked(text: str, word: str) -> str:
    match = re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", text)
    return text if match is None else f"{text[: match.start()]}>>{word}<<{text[match.end() :]}"


def _marked_at(text: str, line: int, column: int) -> str:
    lines = text.splitlines(keepends=True)
    if not 0 < line <= len(lines):
        return text
    start = sum(map(len, lines[: line - 1])) + column - 1
    word = re.match(r"\w+|.", text[start:])
    return text if word is None else f"{text[:start]}>>{word[0]}<<{text[start + word.end() :]}"
