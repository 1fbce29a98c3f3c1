"""Files with each encoding restore here, and parquet-rs, which Arroyo reads with, reads them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, convert_to_deltalake

from arroyo_dagster.state import (
    Epoch,
    MemoryStore,
    StatePath,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.tables.time_files import ReadRequest, TimeFileReader, write_time_file
from tests.fabricated import stored_rows
from tests.formats import ExpiringTimeKeyConfig, encode_rows
from tests.unit.state.codec.test_encodings import COLUMNS, READABLE

ALL = pa.Table.from_arrays(
    [*COLUMNS.values(), COLUMNS["times"]],
    schema=pa.schema(
        [
            *(pa.field(name.replace(" ", "_"), column.type) for name, column in COLUMNS.items()),
            pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
        ]
    ),
)


def used(data: bytes) -> set[str]:
    """The encodings and codecs of a file."""
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    return {name for column in columns for name in (*column.encodings, column.compression)}


def test_the_rows_above_need_each_encoding_and_codec() -> None:
    assert used(encode_rows(ALL)) == READABLE | {"ZSTD", "UNCOMPRESSED"}


def test_a_file_with_each_encoding_restores() -> None:
    names = ["unique", "few", "times", "doubles", "ids", "names", "structs", "gaps", "_timestamp"]
    given = ALL.select(names)
    config = timestamp_table_config("t", retention_micros=1, schema=given.schema, keys=["names"])
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    store, path = MemoryStore(), StatePath("f")
    rows = stored_rows(config, given)
    file, _ = write_time_file(store, rows, path, epoch=Epoch(1), timestamp_index=len(names) - 1)
    assert used(store.read(path)) == READABLE | {"ZSTD", "UNCOMPRESSED"}
    wanted = ReadRequest(keys=range_for_server(0, 1), columns=tuple(range(len(names))))
    (restored,) = TimeFileReader(config.config, store).read([file], wanted)
    assert restored.rows.equals(given)
    assert restored.rows.schema.equals(given.schema, check_metadata=True)


@pytest.mark.parametrize("name", COLUMNS)
def test_parquet_rs_reads_every_column(name: str, tmp_path: Path) -> None:
    """As Arroyo does; decisions/encodings-and-proof.md lists the releases that were tried."""
    arro3: Any = pytest.importorskip("arro3.io", reason="arro3-io of requirements/dev.txt")
    rows = pa.table([COLUMNS[name]], [name])
    (tmp_path / "f.parquet").write_bytes(encode_rows(rows))
    assert pa.table(arro3.read_parquet(str(tmp_path / "f.parquet")).read_all()).equals(rows)


def test_parquet_rs_in_delta_rs_reads_each_encoding(tmp_path: Path) -> None:
    names = ["few", "doubles", "flags", "ids", "names", "gaps"]
    rows = ALL.select(names).append_column("delta", COLUMNS["times"].view(pa.int64()))
    data = encode_rows(rows)
    assert used(data) == READABLE | {"ZSTD", "UNCOMPRESSED"}
    (tmp_path / "f.parquet").write_bytes(data)
    convert_to_deltalake(str(tmp_path))
    query = QueryBuilder().register("t", DeltaTable(str(tmp_path)))
    found = pa.table(query.execute("select * from t").read_all())
    assert found.num_rows == rows.num_rows
    assert found.cast(rows.schema).sort_by("delta").equals(rows.sort_by("delta"))
