"""Overrides of an evolve: read from a document, and checked against the operators of two jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.surgery.evolve import (
    AccumulatorMove,
    ColumnFill,
    ColumnRename,
    Overrides,
)
from arroyo_dagster.state.planning.surgery.documents import mapping_at, select_position_at
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
