"""The text of SQL queries: tokens, and what only reads. The dialect is that of Polars."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
    return [SqlToken(str(one.lastgroup), one.group()) for one in _TOKEN.finditer(text)]


def short_sql(text: str) -> str:
    """Return a query for a message."""
    return text if len(text) <= 200 else f"{text[:197]}..."


def first_that_writes(words: Sequence[SqlToken]) -> str | None:
    """Return the first word of a statement that is no query; None = all statements only read.

    Args:
        words: the tokens, without spaces.
    """
    heads = _heads(words)
    return next((head or "nothing" for head in heads or [""] if head not in _READS), None)


def file_function(query: str) -> str | None:
    """Return the first function in a query that reads files; None = it calls none.

    The text as a whole is searched, since Polars may divide it into tokens in another way.
    """
    found = _FILES.search(query)
    return None if found is None else found.group()


def _heads(words: Sequence[SqlToken]) -> list[str]:
    """Return the first word of each statement, and for `with` also the one after its subqueries."""
    heads: list[str] = []
    depth, begins, within = 0, True, False
    for before, one in zip([None, *words], words, strict=False):
        if begins and one.text != ";":
            heads.append(one.word)
            begins = one.word == "explain"
            within = one.word == "with"
        elif (
            within
            and depth == 0
            and before is not None
            and before.text == ")"
            and one.text not in (",", "(")
            and one.word != "as"
        ):
            heads.append(one.word)
            within = False
        depth += {"(": 1, ")": -1}.get(one.text, 0)
        begins = begins or one.text == ";"
    return heads


class SqlFailure(Exception):
    """Polars refused a query; the text is its reason."""


@contextmanager
def sql_failures() -> Iterator[None]:
    """Convert errors of Polars, panics included, to `SqlFailure`."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        raise SqlFailure(_first_line(error)) from error
    except Exception as error:  # a panic inside Polars is no PolarsError
        if type(error).__name__ != "PanicException":
            raise
        raise SqlFailure(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "?"
