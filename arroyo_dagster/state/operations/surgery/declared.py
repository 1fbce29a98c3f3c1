"""Read a declared bootstrap from a document: each mistake with its place, before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.iso_times import parse_moment_nanos
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.settings import MAX_SECONDS
from arroyo_dagster.state.model.surgery.declared import (
    DELTA,
    ICEBERG,
    DeclaredBootstrap,
    DeclaredTable,
    EventSource,
)
from arroyo_dagster.state.model.surgery.edits import NewPosition
from arroyo_dagster.state.planning.surgery.documents import mapping_at, select_position_at

_TOP = ("events", "sources", "watermark", "lateness_seconds", "positions", "tables")
_SOURCE = (
    *("time", "format", "path", "table", "options", "select", "where"),
    *("operator", "partition", "offset", "until", "version", "snapshot", "catalog"),
)
_TABLE = ("from", "columns", "where", "every_seconds", "distinct")
_ONLY = "events"
"""The name of the events if there is one source."""


def parse_declared_bootstrap(document: Any) -> DeclaredBootstrap:
    """Return the bootstrap that a document declares, as YAML or JSON decodes it.

    Raises:
        InputError: the document has another form; names the place and what was expected.
    """
    found = _members(document, "the bootstrap", _TOP)
    if ("events" in found) == ("sources" in found):
        raise InputError(
            "a bootstrap needs either `events` or `sources`",
            next_step="give `events` for one source, `sources` with a name for each of several",
        )
    given = (
        {_ONLY: found["events"]} if "events" in found else mapping_at("sources", found["sources"])
    )
    sources = tuple(_source(name, value, "events" in found) for name, value in given.items())
    tables = tuple(_tables(found.get("tables"), [one.name for one in sources]))
    if not (sources and tables):
        raise InputError(f"{'tables' if sources else 'sources'}: expected at least one")
    if ("watermark" in found) == ("lateness_seconds" in found):
        raise InputError(
            "a bootstrap needs either `watermark` or `lateness_seconds`",
            next_step="give `watermark: TIME`, the event time at the cut, or `lateness_seconds: 5`:"
            " the newest event time less so much",
        )
    watermark = found.get("watermark")
    declared = DeclaredBootstrap(
        sources=sources,
        tables=tables,
        watermark_micros=None if watermark is None else _moment(watermark, "watermark"),
        lateness_micros=_micros(found.get("lateness_seconds", 0), "lateness_seconds"),
        positions=tuple(_positions(found.get("positions") or {})),
    )
    for source in sources:
        if source.format == "kafka":
            _check_topic(source, declared)
    return declared


def _source(name: Any, value: Any, alone: bool) -> EventSource:
    place = _ONLY if alone else f"sources.{name}"
    found = _members(value, place, _SOURCE)
    if "time" not in found:
        raise InputError(f"{place}: expected `time`, the SQL of the event time")
    in_catalog = found.get("format") == ICEBERG and "table" in found
    if (("format" in found) == ("table" in found) and not in_catalog) or {"table", "path"} <= {
        *found
    }:
        raise InputError(
            f"{place}: expected either `format` or `table`",
            next_step="give `format: parquet` and `path`, or `table: NAME` of Spark's catalogue",
        )
    version = _version(place, found)
    if ("partition" in found) != ("offset" in found):
        raise InputError(f"{place}: expected both `partition` and `offset`, or neither")
    texts = {
        one: _text(found[one], f"{place}.{one}")
        for one in (
            *("time", "format", "path", "table", "catalog"),
            *("where", "operator", "partition", "offset"),
        )
        if one in found
    }
    kafka, until = texts.get("format") == "kafka", found.get("until")
    if until is not None and not kafka:
        raise InputError(
            f"{place}.until: only the offsets of a topic of Kafka are looked up by time",
            next_step="give `positions`, or `where`",
        )
    if kafka and "partition" not in texts:
        texts |= {"partition": "partition", "offset": "offset"}
    return EventSource(
        name=_text(name, "sources"),
        version=version,
        until_micros=None if until is None else _moment(until, f"{place}.until"),
        options={k: str(v) for k, v in _texts(found.get("options"), f"{place}.options")},
        select=dict(_texts(found.get("select"), f"{place}.select")),
        **texts,
    )


_VERSIONS = {DELTA: "version", ICEBERG: "snapshot"}


def _version(place: str, found: Mapping[str, Any]) -> int | None:
    """Return the version of a table of Delta or Iceberg that is read; None = the newest.

    Raises:
        InputError: it is none; or the source is another one.
    """
    known = _VERSIONS.get(str(found.get("format")))
    for name in _VERSIONS.values():
        if name in found and name != known:
            raise InputError(
                f"{place}.{name}: `version` is that of a Delta table, `snapshot` that of an "
                "Iceberg table"
            )
    if "catalog" in found and (known != "snapshot" or "table" not in found):
        raise InputError(
            f"{place}.catalog: expected `format: iceberg` and `table: NAMESPACE.TABLE` with it"
        )
    if known is None:
        return None
    if not {"path", "table"} & {*found}:
        raise InputError(f"{place}: expected `path`, the folder of the table")
    value = found.get(known)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InputError(f"{place}.{known}: expected a number", found=f"{value!r:.80}")
    return value


def _check_topic(source: EventSource, declared: DeclaredBootstrap) -> None:
    """Check that one topic is read, up to a cut that the job continues from.

    Raises:
        InputError: it is not.
    """
    place = f"the events {source.name!r}"
    topic = source.options.get("subscribe", "")
    if not topic or "," in topic or {"assign", "subscribePattern"} & source.options.keys():
        raise InputError(
            f"{place}: expected one topic, as a source of Arroyo reads one",
            next_step="give `options: {subscribe: TOPIC}`",
        )
    ends = sorted(one for one in source.options if one.startswith("ending"))
    if ends:
        raise InputError(
            f"{place}: `{ends[0]}` would end the events elsewhere than where the job continues",
            next_step="leave it out, and give `positions` or `until`",
        )
    given = declared.positions_of(source)
    if bool(given) == (source.until_micros is not None):
        raise InputError(
            f"{place}: expected either `positions` of its partitions or `until`, the time of the "
            "cut"
        )
    if source.until_micros is not None and source.operator is None and len(declared.sources) > 1:
        raise InputError(f"{place}: expected `operator`, the source of the job that reads them")
    for one in given:
        if not one.partition.isdecimal():
            raise InputError(f"positions.{one.partition}: partitions of Kafka are numbers")


def _tables(value: Any, sources: Sequence[str]) -> Iterator[DeclaredTable]:
    for operator, below in mapping_at("tables", value).items():
        for name, given in mapping_at(f"tables.{operator}", below).items():
            yield _table(_text(operator, "tables"), str(name), given or {}, sources)


def _table(operator: str, name: str, value: Any, sources: Sequence[str]) -> DeclaredTable:
    place = f"tables.{operator}.{name}"
    found = _members(value, place, _TABLE)
    source = found.get("from", sources[0] if len(sources) == 1 else None)
    if source not in sources:
        raise InputError(
            f"{place}.from: expected one of the sources ({', '.join(sources)})",
            found="nothing" if source is None else f"{source!r:.80}",
        )
    every, where = found.get("every_seconds"), found.get("where")
    distinct = mapping_at(f"{place}.distinct", found.get("distinct") or {})
    return DeclaredTable(
        operator=OperatorId(operator),
        table=TableName(name),
        source=source,
        columns=dict(_texts(found.get("columns"), f"{place}.columns")),
        where=None if where is None else _text(where, f"{place}.where"),
        every_micros=None if every is None else _micros(every, f"{place}.every_seconds"),
        distinct={
            select_position_at(f"{place}.distinct", at): _text(sql, f"{place}.distinct.{at}")
            for at, sql in distinct.items()
        },
    )


def _positions(value: Any) -> Iterator[tuple[OperatorId | None, NewPosition]]:
    """Yield positions by partition, or by operator and partition."""
    for key, given in mapping_at("positions", value).items():
        if isinstance(given, Mapping):
            for partition, position in given.items():
                yield OperatorId(str(key)), _position(partition, position, f"positions.{key}")
        else:
            yield None, _position(key, given, "positions")


def _position(partition: Any, position: Any, place: str) -> NewPosition:
    if isinstance(position, bool) or not isinstance(position, int | str) or position == "":
        raise InputError(f"{place}.{partition}: expected a position", found=f"{position!r:.80}")
    return NewPosition(partition=str(partition), position=str(position))


# ---- values --------------------------------------------------------------------------------------


def _members(value: Any, place: str, known: Sequence[str]) -> Mapping[str, Any]:
    found = mapping_at(place, value)
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise InputError(
                f"{place} has no {name!r}",
                next_step=f"did you mean `{close[0]}`?" if close else f"use {', '.join(known)}",
            )
    return {name: one for name, one in found.items() if one is not None}


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    for name, one in mapping_at(place, value or {}).items():
        plain = isinstance(one, str | int | float)
        yield str(name), _text(str(one) if plain else one, f"{place}.{name}")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{place}: expected a text", found=f"{value!r:.80}")
    return value


def _moment(value: Any, place: str) -> int:
    try:
        micros = parse_moment_nanos(str(value)) // 1000
    except InputError as error:
        raise InputError(
            f"{place}: expected a time in ISO 8601, until 2262-04-11", found=f"{value!r:.80}"
        ) from error
    if micros < 0:
        raise InputError(f"{place}: expected a time after 1970", found=f"{value!r:.80}")
    return micros


def _micros(value: Any, place: str) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_SECONDS:
        raise InputError(f"{place}: expected seconds, from 0", found=f"{value!r:.80}")
    return int(value * 1_000_000)
