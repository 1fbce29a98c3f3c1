"""Sources and sinks of pipelines, and the edges between them and the pipelines. Reads nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.pipelines.model import (
    Key,
    LineageEndpoint,
    ListedPipeline,
    key_part,
)
from arroyo_dagster.redaction import HIDDEN, holds_secret, redact_url

if TYPE_CHECKING:
    from arroyo_dagster.state.model.tables import TableConfig

Role = Literal["source", "sink"]
_T = TypeVar("_T")
_OPERATOR = re.compile(r"(source|sink)_(.+)_\d+", re.DOTALL)
_PREVIEW = re.compile(r"sink_(.+)_\d+_1", re.DOTALL)
_OWNER = re.compile(r"([A-Za-z-]+(?: [A-Za-z]+)*) (?:source|sink)\b")
_CONNECTORS = {"rabbitmq_stream": "rabbitmq"}
_UNKNOWN = "table"
_TOPICS = "topics"  # the source of a dataflow's service, and the member of its offset
_TOPIC = "topic"
_NOWHERE = frozenset({"blackhole", "stdout", "preview", "vec"})
"""Connectors behind which there is nothing that anybody could look at."""
_PLACES = ("namespace", "stream_name", "stream", "subject", "topic", "topic_pattern", "table_name")
_HOSTS = ("endpoint", "url", "address", "servers", "host")


@dataclass(frozen=True, slots=True)
class End:
    """A source or sink of a pipeline, as its state names it.

    Attributes:
        operator: its id.
        table: the table of the pipeline that it reads or writes.
        connector: as of `LineageEndpoint`.
    """

    role: Role
    operator: str
    table: str
    connector: str | None = None


# ---- what the state says -------------------------------------------------------------------------


def ends_of_arroyo(operators: Mapping[str, Iterable[TableConfig]]) -> list[End]:
    """Return the sources and sinks among the operators of an Arroyo job.

    Args:
        operators: the configurations of their tables, by operator; they name the connector.

    Source: arroyo-state.md 1.4, `source_{table}_{i}` and `sink_{table}_{i}`.
    """
    ends = (_end(operator, configs) for operator, configs in sorted(operators.items()))
    return [end for end in ends if end is not None]


def _end(operator: str, configs: Iterable[TableConfig] = ()) -> End | None:
    match = _OPERATOR.fullmatch(operator)
    if match is None:
        return None
    role: Role = "source" if match[1] == "source" else "sink"
    return End(role, operator, match[2], _connector(operator, configs))


def _connector(operator: str, configs: Iterable[TableConfig]) -> str | None:
    """Return the connector that registers these tables, if only one does."""
    from arroyo_dagster.state.tables.known.built_in import BUILT_IN

    owners = {
        match[1]
        for config in configs
        for table in BUILT_IN
        if table.is_of(operator, config) and table.has_version(config.state_version)
        if (match := _OWNER.match(table.owner)) is not None
    }
    if len(owners) != 1 or " or " in (owner := owners.pop()):
        return None
    name = re.sub("[ -]", "_", owner.lower())
    return _CONNECTORS.get(name, name)


def ends_of_managed(operators: Mapping[str, Iterable[TableConfig]], offsets: str) -> list[End]:
    """Return the sources and sinks of a managed job; of a dataflow's service its topics.

    Args:
        operators: as of `ends_of_arroyo`. A sink is an operator that commits in two phases.
        offsets: the JSON of the offsets of its sources.
    """
    try:
        sources = json.loads(offsets)
        topics = sources.get(_TOPICS, {}).get(_TOPICS)
    except (ValueError, AttributeError):
        return []
    if isinstance(topics, dict):
        ends = [End("source", _TOPICS, topic, _TOPIC) for topic in sorted(topics)]
    else:
        ends = [End("source", operator, operator) for operator in sorted(sources)]
    for operator, configs in sorted(operators.items()):
        if any(config.uses_two_phase_commit for config in configs):
            topic = operator.removeprefix("sink.") if isinstance(topics, dict) else ""
            ends.append(End("sink", operator, topic or operator, _TOPIC if topic else None))
    return ends


# ---- what it is outside --------------------------------------------------------------------------


def endpoints_of(
    pipeline: Key, ends: Sequence[End] | None, sql: str | None
) -> tuple[tuple[LineageEndpoint, ...], tuple[LineageEndpoint, ...]]:
    """Return the sources and the sinks of a pipeline, ordered by key.

    The key is the connector and what the SQL names: a topic, a path, a host; never credentials or
    a query. Without SQL nobody knows whether the tables of two pipelines are the same thing: the
    key is the connector (`table` if the state does not tell), the key of the pipeline and the name
    of the table. A topic of a dataflow is `topic`, the dataflow and the topic.

    Args:
        pipeline: its key.
        ends: as its state names them; None = its state could not be read, only the SQL tells.
    """
    tables = tables_of(sql) if sql else SqlTables()
    if ends is None:
        outside = {name for name, options in tables.options.items() if "connector" in options}
        ends = [
            *(End("source", f"source_{name}", name) for name in tables.mentioned & outside),
            *(End("sink", f"sink_{name}", name) for name in tables.written & outside),
        ]
    by_role: dict[Role, list[LineageEndpoint]] = {"source": [], "sink": []}
    for end in ends:
        endpoint = _endpoint(pipeline, end, tables) if end.table else None
        if endpoint is not None:
            by_role[end.role].append(endpoint)
    ordered = [
        tuple(sorted(endpoints, key=lambda endpoint: (endpoint.key, endpoint.operator)))
        for endpoints in by_role.values()
    ]
    return ordered[0], ordered[1]


def ends_of_endpoints(pipeline: ListedPipeline) -> tuple[End, ...]:
    """Return the sources and sinks that a list knows of an Arroyo job, to name them anew."""
    ends = ((_end(endpoint.operator), endpoint.connector) for endpoint in pipeline.ends)
    return tuple(replace(end, connector=connector) for end, connector in ends if end is not None)


def _endpoint(pipeline: Key, end: End, tables: SqlTables) -> LineageEndpoint | None:
    table = end.table
    preview = _PREVIEW.fullmatch(end.operator)
    if preview and table.casefold() not in tables.options:
        table = preview[1] if preview[1].casefold() in tables.options else table
    options = tables.options.get(table.casefold(), {})
    connector = options.get("connector", "").lower() or end.connector
    if connector in _NOWHERE:
        return None
    first = key_part(connector or _UNKNOWN)
    place = _place(options)
    key: Key
    if connector == _TOPIC:
        key = (first, pipeline[0], key_part(table))
    elif place:
        key = (first, *map(key_part, place))
    else:
        key = (first, *pipeline, key_part(table))
    return LineageEndpoint(key, end.operator, connector)


def _place(options: Mapping[str, str]) -> list[str]:
    """Return where the rows of a table are, as parts of a key; empty = its options do not tell."""
    named = [options[name] for name in _PLACES if options.get(name)]
    if named:
        return named
    if options.get("path"):
        return _segments(options["path"])
    # The path of an address may hold a token, as those of webhooks do.
    address = next((options[name] for name in _HOSTS if options.get(name)), "")
    return _segments(address if "://" in address else f"host://{address}")[1:2] if address else []


def _segments(location: str) -> list[str]:
    """Return the parts of a path or URL without user, query and `file:`."""
    if "://" in location:
        url = redact_url(location).partition("?")[0].replace(f"{HIDDEN}@", "")
        scheme, _, rest = url.partition("://")
        location = rest if scheme == "file" else f"{scheme}/{rest}"
    return [part for part in location.split("/") if part]


# ---- edges ---------------------------------------------------------------------------------------


def mapped(
    endpoints: Iterable[LineageEndpoint], mapping: bool | Mapping[str, str | None]
) -> tuple[LineageEndpoint, ...]:
    """Return endpoints with the keys that a user gives them.

    Args:
        mapping: True = all as they are; False = none; or other keys by keys, the parts of both
            joined by `/`. A key with None is left out; one that the mapping does not name stays.

    Raises:
        InputError: another key has an empty part.
    """
    if isinstance(mapping, bool):
        return tuple(endpoints) if mapping else ()
    renamed = []
    for endpoint in endpoints:
        name = "/".join(endpoint.key)
        other = mapping.get(name, name)
        if other is None:
            continue
        parts = tuple(other.split("/"))
        if not all(parts):
            raise InputError(
                "this is no key of an asset: one of its parts is empty",
                key=other,
                instead_of=name,
                next_step="write the parts of the key with one '/' between them",
            )
        renamed.append(replace(endpoint, key=parts))
    return tuple(renamed)


@dataclass(frozen=True, slots=True)
class LineageEdges:
    """The edges between pipelines, by their roots, and their sources and sinks, by their keys.

    Attributes:
        sources: the keys that each pipeline reads.
        sinks: the pipelines that write each key, which are at least one.
        left_out: of each pipeline the keys that it reads or writes, too, but whose edges would
            close a cycle; pipelines without such a key are left out.
    """

    sources: Mapping[str, tuple[Key, ...]]
    sinks: Mapping[Key, tuple[str, ...]]
    left_out: Mapping[str, tuple[Key, ...]]


def without_cycles(pipelines: Iterable[ListedPipeline]) -> LineageEdges:
    """Return the edges of pipelines; Dagster refuses cycles, so edges that close one are left out.

    Which ones depends on the pipelines alone: the edges are added in the order of the keys of the
    pipelines, those of sources first.
    """
    edges = [
        (pipeline.root, key, reads)
        for pipeline in sorted(pipelines, key=lambda pipeline: pipeline.key)
        for reads, ends in ((True, pipeline.sources), (False, pipeline.sinks))
        for key in sorted({end.key for end in ends})
    ]
    refused = _closing(edges)
    sources: dict[str, list[Key]] = {}
    sinks: dict[Key, list[str]] = {}
    left_out: dict[str, list[Key]] = {}
    for edge in edges:
        root, key, reads = edge
        if edge in refused:
            left_out.setdefault(root, []).append(key)
        elif reads:
            sources.setdefault(root, []).append(key)
        else:
            sinks.setdefault(key, []).append(root)
    return LineageEdges(
        sources={root: tuple(keys) for root, keys in sources.items()},
        sinks={key: tuple(roots) for key, roots in sorted(sinks.items())},
        left_out={root: tuple(keys) for root, keys in left_out.items()},
    )


_Edge = tuple[str, Key, bool]
"""A pipeline's root, a key, and whether it reads it, else writes it."""
_Node = str | Key


def _ends(edge: _Edge) -> tuple[_Node, _Node]:
    root, key, reads = edge
    return (key, root) if reads else (root, key)


def _closing(edges: Iterable[_Edge]) -> set[_Edge]:
    """Return the edges that close a cycle with those before them that close none."""
    after: dict[_Node, set[_Node]] = {}
    refused = set()
    for edge in edges:
        start, end = _ends(edge)
        if reaches(end, start, after):
            refused.add(edge)
        else:
            after.setdefault(start, set()).add(end)
    return refused


def reaches(start: _T, end: _T, after: Mapping[_T, Collection[_T]]) -> bool:
    """Return whether `end` is `start`, or follows it."""
    visited, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node == end:
            return True
        fresh = set(after.get(node, ())) - visited
        visited |= fresh
        waiting += fresh
    return False


# ---- what the SQL of a pipeline says about its tables: a tolerant scan, no parser ----------------
# It reads `CREATE TABLE name (…) WITH (key = 'value', …)`, `INSERT INTO name`, and which names
# occur elsewhere. What it does not understand it leaves out.

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
