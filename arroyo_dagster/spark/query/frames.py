"""Tables of state as frames of a session, and as views by their names in SQL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.spark.jobs import slots
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.operations.query.names import not_found
from arroyo_dagster.state.operations.query.state import StateCatalog
from arroyo_dagster.state.operations.query.table import EpochTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_TASKS_PER_SLOT = 3


def frame_of(
    session: SparkSession,
    table: EpochTable,
    *,
    columns: Sequence[str] | None = None,
    types: TypeOptions | None = None,
) -> DataFrame:
    """Return the rows of a table as a frame; workers read the files.

    Args:
        columns: the columns to read; None = all. Spark prunes none itself.
        types: how types that Spark does not have are represented.

    Raises:
        NotFoundError: no such column.
    """
    options = types or TypeOptions()
    schema = table.schema
    names = schema.names if columns is None else list(columns)
    for name in names:
        if name not in schema.names:
            raise not_found("column", name, schema.names, table=str(table.name))
    places = tuple(schema.names.index(name) for name in names)
    parts = table.splits(slots(session) * _TASKS_PER_SLOT)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                for rows in table.read(replace(parts[part], columns=places)):
                    yield from options.convert(rows).to_batches()

    fields = pa.schema([schema.field(name) for name in names])
    numbers = session.range(0, len(parts), 1, len(parts))
    return numbers.mapInArrow(read, spark_schema(options.schema_of(fields)))


def register_views(
    session: SparkSession,
    state: StateCatalog,
    jobs: Sequence[str] | None = None,
    *,
    types: TypeOptions | None = None,
) -> list[str]:
    """Create a temporary view for each table of jobs at their newest epochs.

    A view has the name of its table in SQL without quotes, `arroyo.shop/main.join_2.left`, so that
    Spark SQL needs back-ticks around it.

    Args:
        jobs: their names; None = all jobs that have an epoch.
        types: how types that Spark does not have are represented.

    Returns:
        The names of the views.
    """
    selected = state.jobs() if jobs is None else [state.job(name) for name in jobs]
    names = []
    for job in selected:
        for table in job.epoch().tables() if job.epochs() else ():
            name = ".".join(("arroyo", *table.name.parts))
            quoted = name.replace("`", "``")
            frame_of(session, table, types=types).createOrReplaceTempView(f"`{quoted}`")
            names.append(name)
    return names


def spark_schema(schema: pa.Schema) -> StructType:
    """Return a schema as Spark has it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)
