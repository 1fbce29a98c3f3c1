"""The schemas that sources and sinks of topics must have.

The source of a topic is a `engine.operators.Source` with the schema `topic_schema(...)`. The
sink of a topic is a `engine.operators.Sink` that accepts rows of `SINK_SCHEMA`. Their
implementations decide how records are stored; `converters` decide how records are interpreted.
"""

from __future__ import annotations

import pyarrow as pa

from arroyo_dagster.errors import InputError

RECORD_COLUMNS = (
    pa.field("key", pa.binary()),
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("timestamp", pa.timestamp("ms")),
)
"""The columns of a record besides its value.

`key`: its raw key; null = none. `partition`, `offset`: its position in the topic, which orders the
records of one epoch. `timestamp`: its creation time; null = unknown, use the engine's clock.
"""

VALUE = "value"

FILE_METADATA = b"arroyo_dagster.file"
"""Metadata of a batch's schema: the file that its records were read from."""


def topic_schema(value: pa.DataType | None = None) -> pa.Schema:
    """Return the schema of a topic's source.

    Args:
        value: the Arrow type of a record's value. None = binary: the raw record, which the topic's
            converter decodes. Any other type is a decoded value, such as the columns of a Parquet
            file as a struct.
    """
    key, *others = RECORD_COLUMNS
    return pa.schema([key, pa.field(VALUE, value or pa.binary()), *others])


SINK_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field(VALUE, pa.binary(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms")),
    ]
)
"""The rows that a sink accepts: `key` and `value` as the topic's converter encoded them, and the
`timestamp` of the record that the result was made from; for a flush, its window's last millisecond.
"""


def check_topic_schema(topic: str, schema: pa.Schema) -> None:
    """Check that a source's schema is `topic_schema(...)`, with any type of value.

    Raises:
        InputError: it has other columns, or another order of them.
    """
    value = schema.field(VALUE).type if schema.names.count(VALUE) == 1 else None
    expected = topic_schema(value)
    if value is None or not schema.equals(expected):
        raise InputError(
            "a source's schema is not the schema of a topic's source",
            topic=topic,
            expected=[f"{field.name}: {field.type}" for field in expected],
            found=[f"{field.name}: {field.type}" for field in schema],
            next_step="give it the schema `topic_schema(...)`",
        )
