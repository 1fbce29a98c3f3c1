"""Streaming sources of Spark by format and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import redacted_cause
from arroyo_dagster.spark.connectors.columns import can_deliver, struct_type
from arroyo_dagster.spark.jobs import failure_reason

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkStream:
    """A streaming source of Spark.

    Attributes:
        name: the topic of a dataflow, or the operator of a pipeline, for messages.
        format: the format for `spark.readStream.format`; `kafka` needs its connector on the class
            path.
        options: the options for `.options`.
        schema: the columns, in Arrow or in Spark's DDL, for formats that need it (`json`, `csv`,
            `parquet`).
        columns: the columns to take; None = all.
        where: the rows to take, as a condition of Spark SQL; None = all.
    """

    name: str
    format: str
    options: Mapping[str, str] = field(repr=False)
    schema: pa.Schema | str | None = None
    columns: pa.Schema | None = None
    where: str | None = None

    def frame(self, session: SparkSession) -> DataFrame:
        """Return the stream.

        Raises:
            InputError: Spark does not know the format, or rejects the options or the condition; or
                the stream has no such column, or one of another type.
        """
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        reader = session.readStream.format(self.format).options(**dict(self.options))
        if self.schema is not None:
            schema = self.schema if isinstance(self.schema, str) else struct_type(self.schema)
            reader = reader.schema(schema)
        try:
            frame = reader.load()
            frame = frame if self.where is None else frame.where(self.where)
        except (PySparkException, Py4JError) as error:
            raise InputError(
                f"Spark cannot read this source ({failure_reason(error)})",
                source=self.name,
                format=self.format,
                next_step="check its options; add a format that Spark does not include to the "
                "class path with --spark packages=…",
            ) from redacted_cause(error)
        return frame if self.columns is None else self._chosen(frame, self.columns)

    def _chosen(self, frame: DataFrame, columns: pa.Schema) -> DataFrame:
        types = {field.name: field.dataType for field in frame.schema}
        for column in struct_type(columns):
            if column.name not in types or not can_deliver(types[column.name], column.dataType):
                raise InputError(
                    f"the source has no column {column.name!r} of type "
                    f"{column.dataType.simpleString()}",
                    source=self.name,
                    format=self.format,
                    found=[f"{name}: {kind.simpleString()}" for name, kind in types.items()],
                    next_step="correct its schema",
                )
        return frame.select(*[f"`{name}`" for name in columns.names])
