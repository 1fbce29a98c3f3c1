"""The stored events of a declared bootstrap, up to the cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.jobs import fetch_rows
from arroyo_dagster.spark.surgery.analysis import analyzed
from arroyo_dagster.state.model.surgery.declared import DeclaredBootstrap, EventSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_UTC = ("UTC", "Etc/UTC", "GMT", "Z", "+00:00")
_TIME_ZONE = "spark.sql.session.timeZone"


def check_time_zone(session: SparkSession) -> None:
    """Check that Spark takes a time without a zone as Arroyo does.

    Raises:
        InputError: its time zone is another one than UTC.
    """
    found = session.conf.get(_TIME_ZONE)
    if found not in _UTC:
        raise InputError(
            f"the time zone of the Spark session is {found}: times without a zone would be read in "
            "it, and Arroyo reads them in UTC",
            next_step=f"set {_TIME_ZONE}=UTC",
        )


def read_events(
    session: SparkSession,
    source: EventSource,
    declared: DeclaredBootstrap,
    stored: DataFrame | None = None,
) -> DataFrame:
    """Return the events of a source before the cut, with the selected columns.

    Args:
        stored: all its events; None = Spark reads them.

    Raises:
        InputError: the source cannot be read, or an expression is wrong; names the place.
    """
    place = f"the events {source.name!r}"
    with analyzed(place):
        if stored is not None:
            frame = stored
        elif source.table is not None:
            frame = session.table(source.table)
        else:
            reader = session.read.format(str(source.format)).options(**source.options)
            frame = reader.load() if source.path is None else reader.load(source.path)
        for name, expression in source.select.items():
            frame = frame.selectExpr("*", f"{expression} as `{name}`")
        if source.where is not None:
            frame = frame.where(source.where)
        if source.partition is not None:
            frame = frame.where(_before(source, declared))
        (time,) = frame.selectExpr(source.time).schema
    if not time.dataType.simpleString().startswith("timestamp"):
        raise InputError(
            f"{place}: `time` is {time.dataType.simpleString()}, and no timestamp",
            next_step="convert it, for example `time: timestamp_millis(at)`",
        )
    return frame


def positions_of(source: EventSource, declared: DeclaredBootstrap) -> dict[str, int]:
    """Return the positions that cut the events of a source, by partition.

    Raises:
        InputError: there are none, or one is no number.
    """
    found = {}
    for new in declared.positions_of(source):
        if not new.position.isdecimal():
            raise InputError(
                f"positions.{new.partition}: the events are cut at a number, not at "
                f"{new.position!r}",
                next_step="cut them with `where`, and leave out `partition` and `offset`",
            )
        found[new.partition] = int(new.position)
    if not found:
        raise InputError(
            f"the events {source.name!r} are cut at positions, and there are none",
            next_step="give `positions`, or leave out `partition` and `offset`",
        )
    return found


def _before(source: EventSource, declared: DeclaredBootstrap) -> str:
    """Return the SQL of the events before the positions of the cut."""
    cases = []
    for name, position in positions_of(source, declared).items():
        partition = name.replace("\\", "\\\\").replace("'", "\\'")
        cases.append(
            f"when cast({source.partition} as string) = '{partition}' "
            f"then {source.offset} < {position}"
        )
    return f"case {' '.join(cases)} else false end"


def newest_micros(declared: DeclaredBootstrap, events: Mapping[str, DataFrame]) -> int:
    """Return the newest event time of the slowest source, in microseconds.

    Raises:
        InputError: a source has no event before the cut.
    """
    found = []
    for source in declared.sources:
        newest = events[source.name].selectExpr(f"unix_micros(max({source.time})) as newest")
        (row,) = fetch_rows(newest.sparkSession, newest)
        if row.newest is None:
            raise InputError(
                f"the events {source.name!r} have no event time before the cut",
                next_step="give `watermark`, or other positions",
            )
        found.append(int(row.newest))
    return min(found)
