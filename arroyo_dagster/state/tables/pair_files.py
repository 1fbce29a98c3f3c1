"""Data files of global keyed tables, decoded as columns.

Source: crates/arroyo-state/src/tables/global_keyed_map.rs.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.parquet import decode_file
from arroyo_dagster.state.model.ids import StatePath


@dataclass(frozen=True, slots=True)
class PairColumns:
    """One decoded file as columns of type binary: keys, and values or operations.

    Attributes:
        removals: whether it removes its keys.
    """

    keys: pa.ChunkedArray
    seconds: pa.ChunkedArray
    version: int
    removals: bool


def decode_pair_columns(data: bytes, path: StatePath) -> PairColumns:
    """Decode one file of a global keyed table.

    Raises:
        FormatError: it has columns other than key and value (or `_operation`), or types other than
            binary.
    """
    rows, version = decode_file(data, path)
    names = rows.schema.names
    second = "value" if "value" in names else "_operation"
    for name in ("key", second):
        if names.count(name) != 1 or rows.schema.field(name).type != pa.binary():
            raise FormatError(
                "a global keyed table has the columns key and value (or key and _operation), "
                f"of type binary; this file has {rows.schema.to_string()}",
                path=path,
            )
    return PairColumns(rows.column("key"), rows.column(second), version, removals=second != "value")
