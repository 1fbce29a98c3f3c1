"""Kafka as the sink of a pipeline, through Spark's writer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.columns import listed_columns
from arroyo_dagster.spark.engine.connectors.sink import INDEX, SinkBinding, SparkSink
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.tables import TIMESTAMP_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JOB, EPOCH, ROW = "arroyo-job", "arroyo-epoch", "arroyo-index"
"""The headers of every record."""

_BYTES = (
    pa.types.is_binary,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_large_string,
)


class KafkaSink(SparkSink):
    """Writes rows to a topic of Kafka, at least once.

    Spark's workers write the records of an epoch after the epoch is ready. Records can come twice,
    with equal headers: those of the newest epoch, if the run dies after they were sent and before
    this was recorded; and some of any epoch, if Spark repeats a task that has sent some of them.
    Each record has the headers `arroyo-job` (`pipeline/job/operator`), `arroyo-epoch` and
    `arroyo-index` (subtask and number of the row in it). The three together are unique as long as
    the job has its state: a consumer that remembers those of an epoch can leave out the repeated
    ones. Records of one subtask are sent in their order, those of several subtasks in any.

    The connector must be on Spark's class path:
    `org.apache.spark:spark-sql-kafka-0-10_2.13:VERSION` in `SparkSettings.packages`.

    Args:
        servers: `kafka.bootstrap.servers`.
        topic: the topic.
        key: the column of the keys, text or bytes; None = no keys.
        value: the column of the values, text or bytes; None = all columns but the key and
            `_timestamp`, as a JSON object.
        options: further options of Spark's writer, such as `kafka.security.protocol`.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        key: str | None = None,
        value: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            "kafka",
            {"kafka.bootstrap.servers": servers, "topic": topic, **(options or {})},
        )
        self._key = key
        self._value = value

    def bind(self, to: SinkBinding | None) -> None:
        """Set the job, as `SparkSink.bind` does.

        Raises:
            InputError: the rows lack the column of keys or of values, or it is neither text nor
                bytes.
        """
        if to is not None:
            for column in filter(None, (self._key, self._value)):
                if not _is_bytes(to.schema, column):
                    raise InputError(
                        f"the rows have no column {column!r} of text or bytes",
                        topic=self._options["topic"],
                        columns=listed_columns(to.schema),
                    )
        super().bind(to)

    def written(self, epoch: Epoch, rows: DataFrame) -> DataFrame:
        """Return the records: key, value and headers."""
        from pyspark.sql import functions as f

        to = self.bound
        others = [name for name in to.schema.names if name not in (self._key, TIMESTAMP_COLUMN)]
        as_json = f.to_json(f.struct(*others), {"ignoreNullFields": "false"})
        value = as_json if self._value is None else f.col(self._value)
        key: Any = f.lit(None) if self._key is None else f.col(self._key)
        headers = {
            JOB: f.lit(f"{to.job}/{to.name}"),
            EPOCH: f.lit(str(int(epoch))),
            ROW: f.col(INDEX),
        }
        return rows.select(
            key.cast("binary").alias("key"),
            value.cast("binary").alias("value"),
            f.array(
                *[
                    f.struct(f.lit(name).alias("key"), header.cast("binary").alias("value"))
                    for name, header in headers.items()
                ]
            ).alias("headers"),
        )


def _is_bytes(schema: pa.Schema, column: str) -> bool:
    index = schema.get_field_index(column)
    return index >= 0 and any(is_bytes(schema.field(index).type) for is_bytes in _BYTES)
