"""The columns that Spark asks a source for, with the types and the nullability that it expects."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.operations.query.names import not_found


class AskedColumns:
    """Some columns of a schema, in the order asked for.

    Args:
        asked: the names of the columns, and whether Spark takes them for nullable.

    Attributes:
        places: their indices in the schema.

    Raises:
        NotFoundError: no such column.
    """

    def __init__(self, schema: pa.Schema, types: TypeOptions, asked: Mapping[str, bool]) -> None:
        for name in asked:
            if name not in schema.names:
                raise not_found("column", name, schema.names)
        self.places = tuple(schema.names.index(name) for name in asked)
        fields = [schema.field(name).with_nullable(nullable) for name, nullable in asked.items()]
        self._types = types
        self._schema = types.schema_of(pa.schema(fields))

    def batches(self, rows: pa.Table) -> list[pa.RecordBatch]:
        """Return rows of these columns as Spark expects them."""
        columns = self._types.convert(rows).columns
        batches: list[pa.RecordBatch] = pa.Table.from_arrays(
            columns, schema=self._schema
        ).to_batches()
        return batches
