"""Documents that a user gives: overrides of an evolve, checked against the operators of two jobs;
offsets that a client of the broker has looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.surgery.edits import NewPosition
from arroyo_dagster.state.model.surgery.evolve import (
    AccumulatorMove,
    ColumnFill,
    ColumnRename,
    Overrides,
)
from arroyo_dagster.state.planning.surgery.matching import OperatorShape

_NAMES = ("map", "drop", "start_empty", "same_columns", "fill", "rename", "accumulators")


def parse_overrides(
    document: Any, start_empty: Sequence[str] = (), pairs: Iterable[tuple[str, str]] = ()
) -> Overrides:
    """Return the overrides of a document, as YAML or JSON decodes it.

    Args:
        start_empty: further operators that start without state.
        pairs: further operators of the source and of the job that match.

    Raises:
        InputError: the document has another form.
    """
    fields = mapping_at("the overrides", {} if document is None else document)
    unknown = sorted(set(fields) - set(_NAMES))
    if unknown:
        raise InputError(
            f"the overrides have no {unknown[0]!r}", next_step=f"use {', '.join(_NAMES)}"
        )
    empty = [*_operators(fields, "start_empty"), *map(OperatorId, start_empty)]
    return Overrides(
        matches=tuple(
            (OperatorId(_text(source, "map")), OperatorId(_text(operator, "map")))
            for source, operator in (*mapping_at("map", fields.get("map") or {}).items(), *pairs)
        ),
        drop=_operators(fields, "drop"),
        start_empty=tuple(dict.fromkeys(empty)),
        same_columns=_operators(fields, "same_columns"),
        fills=tuple(
            ColumnFill(operator=operator, column=str(column), value=_json(value))
            for operator, column, value in _below(fields, "fill")
        ),
        renames=tuple(
            ColumnRename(operator=operator, column=str(column), source=_text(value, "rename"))
            for operator, column, value in _below(fields, "rename")
        ),
        accumulators=tuple(
            AccumulatorMove(
                operator=operator,
                source=select_position_at("accumulators", source),
                number=select_position_at("accumulators", number),
            )
            for operator, source, number in _below(fields, "accumulators")
        ),
    )


def _operators(found: Mapping[Any, Any], name: str) -> tuple[OperatorId, ...]:
    values = found.get(name) or []
    if not isinstance(values, list):
        raise InputError(f"{name}: expected a list of operators", found=f"{values!r:.80}")
    return tuple(OperatorId(_text(value, name)) for value in values)


def _below(found: Mapping[Any, Any], name: str) -> Iterator[tuple[OperatorId, Any, Any]]:
    for operator, values in mapping_at(name, found.get(name) or {}).items():
        for key, value in mapping_at(f"{name} of {operator}", values).items():
            yield OperatorId(_text(operator, name)), key, value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name}: expected a name", found=f"{value!r:.80}")
    return value


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InputError("fill: expected a value of JSON", found=f"{value!r:.80}") from error


def check_overrides(
    theirs: Sequence[OperatorShape], ours: Sequence[OperatorShape], overrides: Overrides
) -> None:
    """Check that overrides name operators that exist, pairs of one kind, and decide nothing twice.

    Raises:
        InputError: they do not.
    """
    there = {shape.operator: shape for shape in theirs}
    here = {shape.operator: shape for shape in ours}
    of_source = [*(source for source, _ in overrides.matches), *overrides.drop]
    of_job = [*(operator for _, operator in overrides.matches), *overrides.start_empty]
    named = [
        *of_job,
        *overrides.same_columns,
        *(fill.operator for fill in overrides.fills),
        *(rename.operator for rename in overrides.renames),
        *(move.operator for move in overrides.accumulators),
    ]
    for names, shapes, side in ((of_source, there, "source"), (named, here, "job")):
        for name in names:
            if name not in shapes:
                raise InputError(
                    f"an override names {name}, which is no operator of the {side}",
                    operators=", ".join(shapes),
                    next_step="name operators as `arroyo-state show` prints them",
                )
    for names in (of_source, of_job):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(
                f"the overrides decide twice about {twice[0]}",
                next_step="name it once, under `map`, `drop` or `start_empty`",
            )
    for source, operator in overrides.matches:
        if there[source].kind != here[operator].kind:
            raise InputError(
                f"{operator} is of the kind {here[operator].kind!r} and cannot take the state of "
                f"{source}, of the kind {there[source].kind!r}",
                next_step="map operators of one kind",
            )


# ---- values of a document, checked by place; errors together -------------------------------------


def mapping_at(place: str, value: Any) -> Mapping[Any, Any]:
    """Return a mapping. Raises InputError: the value is none."""
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: expected a mapping", found=f"{value!r:.80}")
    return value


def select_position_at(place: str, value: Any) -> int:
    """Return a position in a SELECT, from 0. Raises InputError: the value is none."""
    number = (
        int(value) if isinstance(value, str) and len(value) <= 10 and value.isdecimal() else value
    )
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 32:
        raise InputError(
            f"{place}: expected positions in the SELECT, from 0", found=f"{value!r:.80}"
        )
    return number


def raise_together(what: str, errors: Sequence[InputError]) -> None:
    """Raise several errors as one; the only one as it is.

    Args:
        what: has them, for people.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "".join(f"\n  {error}" for error in errors)
        raise InputError(f"{what} has {len(errors)} errors:{lines}")


# ---- offsets of a topic at a time, as a client of the broker has looked them up -----------------

_PAIRS = json.JSONDecoder(object_pairs_hook=list)
"""Of equal names a dict would keep the last."""
_LINE = re.compile(r"([^:]+):(\d{1,10}):(\d{0,19})")
_FORMS = (
    "give what `kafka-get-offsets.sh --bootstrap-server HOST:9092 --topic TOPIC --time MILLIS` "
    'prints, or a JSON object such as {"0": 120000, "1": 118500}'
)


def parse_lookup(data: bytes) -> tuple[NewPosition, ...]:
    """Return the offset of each partition of one topic.

    Args:
        data: lines `TOPIC:PARTITION:OFFSET`, as Kafka's own tool prints them, or a JSON object of
            offsets by partition; in UTF-8.

    Raises:
        InputError: it has another form; it is of several topics; or no record of a partition is at
            or after the time.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"the lookup is no text in UTF-8 ({error})", next_step=_FORMS) from error
    pairs = list(_of_json(text) if text.lstrip().startswith("{") else _of_lines(text))
    partitions = [partition for partition, _ in pairs]
    if not pairs or len(set(partitions)) < len(partitions):
        raise InputError(
            "the lookup has no partition" if not pairs else "the lookup has a partition twice",
            next_step=_FORMS,
        )
    return tuple(NewPosition(partition=partition, position=offset) for partition, offset in pairs)


def _of_json(text: str) -> Iterator[tuple[str, str]]:
    try:
        pairs = parse_json(text, _PAIRS)
    except ValueError as error:
        raise InputError(f"the lookup is no JSON ({error})", next_step=_FORMS) from error
    for partition, offset in pairs:
        if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
            raise InputError(
                f"the lookup has no offset of partition {partition}", found=f"{offset!r:.40}"
            )
        yield partition, str(offset)


def _of_lines(text: str) -> Iterator[tuple[str, str]]:
    topics: set[str] = set()
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(
                f"not a line of a lookup: {line:.80}",
                expected="TOPIC:PARTITION:OFFSET",
                next_step=_FORMS,
            )
        topic, partition, offset = match.groups()
        if not offset:
            raise InputError(
                f"no record of partition {partition} of topic {topic} is at or after the time",
                next_step="give the end of the partition in its line, which `--time latest` prints",
            )
        topics.add(topic)
        if len(topics) > 1:
            raise InputError(
                f"the lookup is of several topics: {', '.join(sorted(topics))}",
                next_step="look up the topic of one source",
            )
        yield partition, offset
