"""Keys that people type: text to values of the key columns of a table."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.operations.query.table import EpochTable

_NULL = "null"
_BOOLS = {"true": True, "false": False}


def parse_key(table: EpochTable, texts: Sequence[str]) -> Any:
    """Convert one text for each key column to a key for `EpochTable.lookup`.

    Raises:
        InputError: another number of texts than of key columns, or a text is no value of its
            column's type.
    """
    names = table.key_columns
    if len(texts) != len(names):
        raise InputError(
            f"the key has {len(names)} columns, and {len(texts)} values were given",
            table=str(table.name),
            columns=", ".join(names) or "none",
            next_step="give one value for each, in this order",
        )
    schema = table.schema
    values = tuple(
        parse_value(text, name, schema.field(name).type)
        for text, name in zip(texts, names, strict=True)
    )
    return values if len(values) > 1 else values[0]


def parse_value(text: str, name: str, kind: pa.DataType) -> Any:
    """Convert a text to a value of a column.

    Raises:
        InputError: the text is no value of its type.
    """
    types = pa.types
    try:
        if types.is_string(kind) or types.is_large_string(kind):
            return text
        if text == _NULL:
            return None
        if types.is_boolean(kind):
            return _BOOLS[text.lower()]
        if types.is_integer(kind):
            return int(text)
        if types.is_binary(kind) or types.is_large_binary(kind):
            return bytes.fromhex(text.removeprefix("0x"))
        if types.is_timestamp(kind):
            moment = dt.datetime.fromisoformat(text)
            if kind.tz is None and moment.tzinfo is not None:
                moment = moment.astimezone(dt.UTC).replace(tzinfo=None)
            return pa.scalar(moment, pa.timestamp("us", kind.tz)).cast(kind)
        if types.is_nested(kind):
            return parse_json(text)
        return pa.scalar(text).cast(kind)
    except (ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(
            f"not a value of the key column: {text!r:.80}", column=name, expected=str(kind)
        ) from error
