"""The columns of data files, and the columns allowed in files of a table, as plain values."""

from __future__ import annotations

import sys

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA, REMOVAL_SCHEMA
from arroyo_dagster.state.codec.schema import file_schema, schema_to_json
from arroyo_dagster.state.model.tables import GlobalKeyedConfig, TableConfig
from arroyo_dagster.state.planning.verify.checks import ArrowColumn, Columns


def stored_form(schema: pa.Schema) -> str | None:
    """Return a schema as metadata stores it; None if it has a type that cannot be stored."""
    try:
        # Thousands of files share one schema.
        return sys.intern(schema_to_json(schema))
    except (InputError, UnicodeDecodeError):
        return None


def columns_of(schema: pa.Schema) -> Columns:
    """Return a schema as plain values, including duplicate names."""
    return tuple(ArrowColumn(field.name, str(field.type), field.nullable) for field in schema)


def table_forms(config: TableConfig) -> tuple[Columns, ...]:
    """Return the columns that the files of a table may have.

    Raises:
        FormatError: the stored schema is broken, or names columns that it does not have.
    """
    if isinstance(config.config, GlobalKeyedConfig):
        return (columns_of(GLOBAL_KEY_VALUE_SCHEMA), columns_of(REMOVAL_SCHEMA))
    return (columns_of(file_schema(config.config)),)
