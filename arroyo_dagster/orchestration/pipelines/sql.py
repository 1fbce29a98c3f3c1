"""What the SQL of a pipeline says about its tables: a tolerant scan, no parser.

It reads `CREATE TABLE name (…) WITH (key = 'value', …)`, `INSERT INTO name`, and which names occur
elsewhere. What it does not understand it leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.redaction import holds_secret

_MOST_LETTERS = 1 << 20
_HIDDEN = "'***'"
_TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?(?:\*/|\Z)|'[^']*(?:''[^']*)*'|"[^"]*(?:""[^"]*)*"|`[^`]*`|[\w.]+|\S""",
    re.DOTALL,
)
_VALUE = re.compile(r"[\w'\"`]")
_CREATE_TABLE = re.compile(r"CREATE (?:OR REPLACE )?(?:TEMPORARY |TEMP |EXTERNAL )?TABLE$")


@dataclass(frozen=True, slots=True)
class SqlTables:
    """The tables of a pipeline's SQL; names are case-folded.

    Attributes:
        options: of `CREATE TABLE`, by the table's name; keys in lower case.
        written: those that rows are inserted into.
        mentioned: every name in a statement that creates no table.
    """

    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()


def tables_of(sql: str) -> SqlTables:
    """Return what the SQL says about its tables; nothing for SQL of more than a million letters."""
    options: dict[str, Mapping[str, str]] = {}
    written: set[str] = set()
    mentioned: set[str] = set()
    for words in _statements(sql):
        name, pairs = _created(words)
        if name is not None:
            options[name] = {key: value for key, value, _ in pairs}
            continue
        targets = {
            at + 2 for at in range(len(words) - 2) if _upper(words[at : at + 2]) == "INSERT INTO"
        }
        written.update(_name(words[index]) for index in targets)
        mentioned.update(_name(word) for index, word in enumerate(words) if index not in targets)
    return SqlTables(options, frozenset(written), frozenset(mentioned))


def without_secrets(sql: str) -> str:
    """Return the SQL with `***` for the values of options that are named like secrets, or hold one.

    SQL of more than a million letters is cut.
    """
    sql = sql[:_MOST_LETTERS]
    hidden = [
        (value.start(), value.end())
        for words in _statements(sql)
        for key, text, value in _created(words)[1]
        if holds_secret(key, text)
    ]
    for start, end in reversed(hidden):
        sql = f"{sql[:start]}{_HIDDEN}{sql[end:]}"
    return sql


_Words = Sequence[re.Match[str]]


def _statements(sql: str) -> Iterator[_Words]:
    words: list[re.Match[str]] = []
    for word in _TOKEN.finditer(sql) if len(sql) <= _MOST_LETTERS else ():
        if word[0] == ";":
            yield words
            words = []
        elif not word[0].startswith(("--", "/*")):
            words.append(word)
    yield words


def _created(words: _Words) -> tuple[str | None, list[tuple[str, str, re.Match[str]]]]:
    """Return the table that a statement creates, with its options and the places of their values;
    None = it creates none.
    """
    first = next((count for count in range(6) if _CREATE_TABLE.match(_upper(words[:count]))), None)
    if first is None:
        return None, []
    if _upper(words[first : first + 3]) == "IF NOT EXISTS":
        first += 3
    if first >= len(words):
        return None, []
    return _name(words[first]), list(_options(words[first + 1 :]))


def _options(words: _Words) -> Iterator[tuple[str, str, re.Match[str]]]:
    depth = 0
    inside = False  # of WITH ( … )
    for pos, word in enumerate(words):
        if word[0] == "(":
            depth += 1
            inside = inside or (depth == 1 and pos > 0 and _upper(words[pos - 1 : pos]) == "WITH")
        elif word[0] == ")":
            depth -= 1
            inside = inside and depth > 0
        elif inside and word[0] == "=":
            for value in words[pos + 1 : pos + 2]:
                if _VALUE.match(value[0]):
                    yield _unquoted(words[pos - 1]).lower(), _unquoted(value), value


def _upper(words: _Words) -> str:
    return " ".join(word[0].upper() for word in words)


def _name(word: re.Match[str]) -> str:
    return _unquoted(word).casefold()


def _unquoted(word: re.Match[str]) -> str:
    text, quote = word[0], word[0][0]
    if quote in "'\"`" and len(text) > 1:
        return text[1:-1].replace(quote * 2, quote)
    return text
