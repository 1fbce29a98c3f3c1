"""The text of SQL queries: tokens, and what only reads. The dialect is that of Polars."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import polars as pl

_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/)
      | (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`)
      | (?P<parameter>(?<!:):(?!:)[A-Za-z_]\w*)
      | (?P<word>[^\W\d]\w*)
      | (?P<number>\d[\w.]*)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_WRAPPING = (pl.Int32, pl.UInt32, pl.Int64, pl.UInt64)
"""The types that Polars sums in themselves."""
_READS = {"select", "with", "show", "explain", "from", "values", "(", "table", "describe"}
_FILES = re.compile(r"(?:read|scan)_(?:csv|parquet|ipc|n?d?json|avro|delta|iceberg)", re.IGNORECASE)
"""Functions of Polars that read files: state files, too, without what masks and hides rows."""


@dataclass(frozen=True, slots=True)
class SqlToken:
    """One token; `kind`: space, text, quoted, parameter, word, number, other."""

    kind: str
    text: str

    @property
    def word(self) -> str:
        """The token in lower case if it can be a keyword, else an empty text."""
        return self.text.lower() if self.kind in ("word", "other") else ""


def sql_tokens(text: str) -> list[SqlToken]:
    """Return all tokens of a query; together they are its text."""
    return [SqlToken(str(match.lastgroup), match.group()) for match in _TOKEN.finditer(text)]


def short_sql(text: str) -> str:
    """Return a query for a message."""
    return text if len(text) <= 200 else f"{text[:197]}..."


def first_that_writes(words: Sequence[SqlToken]) -> str | None:
    """Return the first word of a statement that is no query; None = all statements only read.

    Args:
        words: the tokens, without spaces.
    """
    # The first word of each statement, and for `with` also the one after its subqueries.
    heads: list[str] = []
    depth, begins, within = 0, True, False
    for before, token in zip([None, *words], words, strict=False):
        if begins and token.text != ";":
            heads.append(token.word)
            begins = token.word == "explain"
            within = token.word == "with"
        elif (
            within
            and depth == 0
            and before is not None
            and before.text == ")"
            and token.text not in (",", "(")
            and token.word != "as"
        ):
            heads.append(token.word)
            within = False
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        begins = begins or token.text == ";"
    return next((head or "nothing" for head in heads or [""] if head not in _READS), None)


def file_function(query: str) -> str | None:
    """Return the first function in a query that reads files; None = it calls none.

    The text as a whole is searched, since Polars may divide it into tokens in another way.
    """
    match = _FILES.search(query)
    return None if match is None else match.group()


def exact_answer(frames: Mapping[str, pl.LazyFrame], query: str) -> pl.LazyFrame:
    """Return the answer of a query, in which no sum of whole numbers wraps.

    Polars sums numbers of 32 and 64 bits in their own type, without a check. So the columns that
    occur in a `sum` are read as numbers of 128 bits. The answer has the types that it would have
    without that, but at least 64 bits; a number that does not fit is an error when it is collected.

    Raises:
        PolarsError: Polars cannot answer the query.
    """
    context = pl.SQLContext(dict(frames), eager=False)
    # The names within the parentheses of `sum(…)`: of columns, and any other.
    tokens = sql_tokens(query)
    summed: set[str] = set()
    depth = 0
    called = ""
    for token in tokens:
        if token.kind == "space":
            continue
        if token.text == "(" and (depth or called == "sum"):
            depth += 1
        elif token.text == ")" and depth:
            depth -= 1
        elif depth and token.kind in ("word", "quoted"):
            summed.add(token.text.strip('"`'))
        called = token.word
    wide = {name: _widened(frame, summed) for name, frame in frames.items()} if summed else frames
    plain: pl.LazyFrame = context.execute(query)
    if all(wide[name] is frame for name, frame in frames.items()):
        return plain
    kinds = plain.collect_schema()
    try:
        answer: pl.LazyFrame = pl.SQLContext(dict(wide), eager=False).execute(query)
        schema = answer.collect_schema()
    except pl.exceptions.PolarsError:
        # A join of such a column with another one: all of them must have one type.
        wide = {name: _widened(frame, None) for name, frame in frames.items()}
        answer = pl.SQLContext(dict(wide), eager=False).execute(query)
        schema = answer.collect_schema()
    narrow = {
        name: kinds[name] if kinds.get(name) in (pl.Int64, pl.UInt64) else pl.Int64
        for name, kind in schema.items()
        if kind == pl.Int128
    }
    return answer.cast(narrow)  # type: ignore[arg-type]


def _widened(frame: pl.LazyFrame, names: set[str] | None) -> pl.LazyFrame:
    """Return a frame with whole numbers of 128 bits; `names`: the columns, None = all."""
    kinds = frame.collect_schema()
    columns = [
        name
        for name, kind in kinds.items()
        if kind in _WRAPPING and (names is None or name in names)
    ]
    return frame.with_columns(pl.col(columns).cast(pl.Int128)) if columns else frame


class SqlFailure(Exception):
    """Polars refused a query; the text is its reason."""


@contextmanager
def sql_failures() -> Iterator[None]:
    """Convert errors of Polars, panics included, to `SqlFailure`."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        if "conversion from `i128`" in str(error):
            raise SqlFailure(
                "a sum does not fit into 64 bits: sum floating-point numbers, as in "
                "sum(cast(NAME as double))"
            ) from error
        raise SqlFailure(_first_line(error)) from error
    except Exception as error:  # a panic inside Polars is no PolarsError
        if type(error).__name__ != "PanicException":
            raise
        raise SqlFailure(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "?"
