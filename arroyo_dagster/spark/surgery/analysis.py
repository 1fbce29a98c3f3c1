"""What Spark refuses in a declaration, found by its analysis: no job runs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.planning.surgery.declared_columns import TableQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@contextmanager
def analyzed(place: str) -> Iterator[None]:
    """Name the place in the declaration of what Spark refuses.

    Raises:
        InputError: Spark refuses it.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        absent = next((one for one in lines if "DATA_SOURCE_NOT_FOUND" in one), None)
        if absent is not None:
            raise InputError(
                f"{place}: this Spark cannot read the format: {absent.partition('] ')[2]:.200}",
                next_step="name its package with --spark --packages",
            ) from error
        if not isinstance(error, AnalysisException):
            raise
        raise InputError(f"{place}: Spark refuses it: {lines[0]:.400}") from error


def computed(events: DataFrame, query: TableQuery, place: str) -> DataFrame:
    """Return the rows of a query. Nothing is computed yet.

    Raises:
        InputError: Spark refuses it; names the place.
    """
    view = f"arroyo_events_{uuid.uuid4().hex}"
    events.createOrReplaceTempView(view)
    session = events.sparkSession
    try:
        with analyzed(place):
            return session.sql(query.text(view))
    finally:
        session.catalog.dropTempView(view)


def refusals(events: DataFrame, query: TableQuery, place: str) -> Iterator[InputError]:
    """Yield what Spark refuses in a query: each column that it refuses, or the query as a whole."""
    whole = _refusal(events, query, place)
    if whole is None:
        return
    alone = TableQuery(columns=())
    groups = tuple(
        one
        for one in query.group_by
        if not _refusal(events, replace(alone, columns=(("x", one),)), place)
    )
    parts = [
        _refusal(
            events, TableQuery(columns=(column,), group_by=groups), f"{place}.columns.{column[0]}"
        )
        for column in query.columns
    ]
    if query.where is not None:
        one = TableQuery(columns=(("x", "1"),), where=query.where)
        parts.append(_refusal(events, one, f"{place}.where"))
    found = [one for one in parts if one is not None]
    yield from found or [whole]


def _refusal(events: DataFrame, query: TableQuery, place: str) -> InputError | None:
    try:
        computed(events, query, place)
    except InputError as error:
        return error
    return None
