"""What topics give a service and take from it: the schemas every source and sink is bound by.

A source of a topic is a `state.operators.Source` whose schema is `topic_schema(...)`; a sink of a
topic is a `state.operators.Sink` that takes rows of `SINK_SCHEMA`. Who implements them decides how
records are stored; what a record means is the converter's business (`converters`).
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
"""The columns of a record beside its value.

`key`: its raw key; null = none. `partition`, `offset`: where it lies in its topic; they order the
records of one epoch. `timestamp`: when it was made; null = unknown, then the engine's clock says.
"""

VALUE = "value"


def topic_schema(value: pa.DataType | None = None) -> pa.Schema:
    """The schema of a topic's source.

    Args:
        value: the Arrow type of a record's value. None = binary: the raw record, one message, for
            the topic's converter to read. Any other type is a value already read, such as the
            columns of a Parquet file as a struct.
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
"""What a sink takes: `key` and `value` as the topic's converter wrote them, `timestamp` that of the
record the result was made of, of a flush the last millisecond of its window."""


def check_topic_schema(topic: str, schema: pa.Schema) -> None:
    """Refuse a source that does not give `topic_schema(...)`.

    Raises:
        InputError: other columns, or another order of them.
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
