"""What differs between the versions of pyspark that this package runs on.

| Call | From | Before |
|---|---|---|
| `DataFrame.repartitionById` | 4.1 | `repartition` by keys whose hashes name the partitions |
| `createDataFrame` of an Arrow table | 4.0 | of its rows |
| `InheritableThread(session=…)` | 4.0 | without a session |
| `SparkSession.addArtifacts` on a classic session | 4.0 | `SparkContext.addArchive` |
| cloudpickle keeps the fields of dataclasses | 4.0 | added, see `cloudpickle` |
| data sources in Python; Spark Connect | 4.0 | refused, see `require_pyspark` |
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import re
from collections.abc import Callable
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

from arroyo_dagster.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

OLDEST, NEWEST = (3, 5), (5, 0)
"""The versions of pyspark that this package runs on, without the last."""

CONNECT = DATA_SOURCES = (4, 0)
"""The first versions with them."""


def pyspark_version() -> tuple[int, int]:
    """Return the first two numbers of the version of the pyspark that this process imports."""
    import pyspark

    major, minor = re.findall(r"\d+", pyspark.__version__)[:2]
    return int(major), int(minor)


def require_pyspark(purpose: str, version: tuple[int, int] = OLDEST) -> None:
    """Refuse a pyspark that is too old.

    Args:
        purpose: what needs the version, for the message.
        version: the first one that has it.

    Raises:
        InputError: this process imports an older one.
    """
    import pyspark

    if pyspark_version() < version:
        needed = ".".join(map(str, version))
        raise InputError(
            f"{purpose} needs pyspark {needed} or newer; {pyspark.__version__} is installed",
            next_step=f"install it: pip install 'pyspark>={needed},<{NEWEST[0]}'",
        )


def in_partitions(frame: DataFrame, partitions: int, column: str) -> DataFrame:
    """Return a frame whose partition n has the rows with n in a column.

    Args:
        column: its name; an int from 0 to below `partitions`.
    """
    from pyspark.sql import functions as f

    if hasattr(type(frame), "repartitionById"):  # the frame itself would look for a column
        return frame.repartitionById(partitions, column)
    keys = ", ".join(map(str, _keys(partitions)))
    return frame.repartition(partitions, f.expr(f"array({keys})[{column}]"))


@functools.lru_cache(maxsize=256)
def _keys(partitions: int) -> tuple[int, ...]:
    """Return for each partition a number that Spark's hash partitioning sends there."""
    keys: dict[int, int] = {}
    number = 0
    while len(keys) < partitions:
        keys.setdefault(_spark_hash(number) % partitions, number)
        number += 1
    return tuple(keys[partition] for partition in range(partitions))


def _spark_hash(number: int) -> int:
    """Return Spark's hash of an int.

    Source: Spark, `HashPartitioning.partitionIdExpression` and `Murmur3_x86_32.hashInt`, seed 42.
    """

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & mask

    mask = 0xFFFFFFFF
    mixed = rotated(number * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    value = (rotated(42 ^ mixed, 13) * 5 + 0xE6546B64 & mask) ^ 4
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ value >> shift) * factor & mask
    return value - (1 << 32) if value >> 31 else value


def frame_of_rows(session: SparkSession, rows: pa.Table) -> DataFrame:
    """Return a frame with the rows of an Arrow table, which are few."""
    if pyspark_version() >= (4, 0):
        return session.createDataFrame(rows)
    from pyspark.sql.pandas.types import from_arrow_schema

    values = [tuple(row.values()) for row in rows.to_pylist()]
    return session.createDataFrame(values, from_arrow_schema(rows.schema))


def session_thread(session: SparkSession, target: Callable[[], None]) -> Thread:
    """Return a thread, not started, with the properties and tags of a session in this thread."""
    from pyspark import InheritableThread

    of_session = {"session": session} if pyspark_version() >= (4, 0) else {}
    return InheritableThread(target=target, name="arroyo-spark", daemon=True, **of_session)


def cloudpickle() -> ModuleType:
    """Return pyspark's cloudpickle, which keeps the fields of dataclasses."""
    from pyspark import cloudpickle as pickler

    if pyspark_version() < (4, 0):
        # `dataclasses.fields` tells fields by the identity of a mark, of which it made a copy.
        copyreg.pickle(dataclasses._FIELD_BASE, _reduced_mark)  # type: ignore[attr-defined]
    return pickler


def _reduced_mark(mark: Any) -> tuple[Any, ...]:
    return getattr, (dataclasses, mark.name)


def add_archive(session: SparkSession, archive: str) -> None:
    """Send an archive, `PATH#FOLDER`, to the workers of a session; Python imports from it."""
    if pyspark_version() >= (4, 0):
        session.addArtifacts(archive, archive=True)
    else:
        session.sparkContext.addArchive(archive)
