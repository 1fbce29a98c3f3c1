"""The encodings of data files: exact values, no dictionary that falls back, readable by Arroyo."""

from __future__ import annotations

import decimal
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.state import GLOBAL_KEY_VALUE_SCHEMA
from arroyo_dagster.state.codec import encodings
from arroyo_dagster.state.codec.parquet import encode_pair_columns
from tests.formats import decode_file, encode_pairs, encode_rows

ROWS = 20_000
CHANCE = np.random.default_rng(7)
READABLE = {"PLAIN", "RLE", "RLE_DICTIONARY", "DELTA_BINARY_PACKED"}
"""The encodings that every release of parquet-rs reads that any Arroyo was built with."""


def times(values: Any) -> pa.Array:
    return pa.array(values, pa.int64()).view(pa.timestamp("ns"))


RANDOM = CHANCE.integers(0, 2**63, ROWS)
COLUMNS: dict[str, pa.Array] = {
    "unique": pa.array(RANDOM.astype(np.uint64) * 2),
    "few": pa.array(RANDOM % 100),
    "times": times(np.sort(RANDOM % 10**12) + 2**60),
    "milliseconds": times(np.sort(RANDOM % 10**6) * 10**6),
    "doubles": pa.array(CHANCE.normal(size=ROWS)),
    "halves": pa.array(CHANCE.normal(size=ROWS).astype(np.float16)),
    "flags": pa.array(RANDOM % 3 == 0),
    "ids": pa.array([f"flight-{n}" for n in RANDOM.tolist()]),
    "names": pa.array([f"carrier-{n % 50}" for n in RANDOM.tolist()]),
    "sorted names": pa.array(sorted(f"carrier-{n % 5000}" for n in RANDOM.tolist())),
    "bytes": pa.array([bytes([n % 251]) * (n % 40) for n in RANDOM.tolist()]),
    "operations": pa.array([b"\0"] * ROWS),
    "decimals": pa.array([decimal.Decimal(n) for n in (RANDOM % 10**6).tolist()]),
    "gaps": pa.array(RANDOM, mask=RANDOM % 2 == 0),
    "nothing": pa.nulls(ROWS, pa.int64()),
    "untyped": pa.nulls(ROWS),
    "structs": pa.StructArray.from_arrays(
        [times(np.sort(RANDOM % 10**12)), pa.array([f"s{n % 9}" for n in RANDOM.tolist()])],
        fields=[pa.field("at", pa.timestamp("ns"), nullable=False), pa.field("b", pa.string())],
        mask=pa.array(RANDOM % 5 == 0),
    ),
    "lists": pa.array(
        [None if n % 7 == 0 else list(range(n % 4)) for n in RANDOM.tolist()],
        pa.list_(pa.field("item", pa.uint64(), nullable=False)),
    ),
    "pairs": pa.array([[n % 5, n] for n in RANDOM.tolist()], pa.list_(pa.int64(), 2)),
    "maps": pa.array(
        [[(f"k{n % 3}", n)] for n in RANDOM.tolist()], pa.map_(pa.string(), pa.int64())
    ),
    "dictionaries": pa.array([f"d{n % 20}" for n in RANDOM.tolist()]).dictionary_encode(),
}


def column_chunks(data: bytes) -> list[pq.ColumnChunkMetaData]:
    footer = pq.ParquetFile(io.BytesIO(data)).metadata
    groups = [footer.row_group(at) for at in range(footer.num_row_groups)]
    return [group.column(at) for group in groups for at in range(group.num_columns)]


def falls_back(rows: pa.Table) -> bool:
    """Whether a dictionary of any size would make another file."""
    limits = (encodings._DICTIONARY_LIMIT_BYTES, 1 << 30)
    files = []
    for limit in limits:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(encodings, "_DICTIONARY_LIMIT_BYTES", limit)
            files.append(encode_rows(rows))
    return files[0] != files[1]


@pytest.mark.parametrize("name", COLUMNS)
def test_every_kind_of_column_reads_back_exactly(name: str) -> None:
    column = COLUMNS[name]
    required = not column.null_count and name != "untyped"
    schema = pa.schema([pa.field(name, column.type, nullable=not required)])
    rows = pa.Table.from_arrays([column], schema=schema)
    data = encode_rows(rows)
    back, _ = decode_file(data, "p")
    assert back.schema.equals(
        schema, check_metadata=name != "maps"
    )  # names of entries are metadata
    assert back.equals(rows)
    for chunk in column_chunks(data):
        assert set(chunk.encodings) <= READABLE
        assert chunk.compression in ("ZSTD", "UNCOMPRESSED")
    assert not falls_back(rows)


@pytest.mark.parametrize(
    ("name", "dictionary", "delta", "compressed"),
    [
        ("unique", False, False, False),
        ("few", True, False, True),
        ("times", False, True, False),
        ("doubles", False, False, False),
        ("flags", False, False, False),
        ("ids", False, False, True),
        ("names", True, False, True),
        ("sorted names", True, False, True),
        ("operations", True, False, True),
    ],
)
def test_the_values_decide(name: str, dictionary: bool, delta: bool, compressed: bool) -> None:
    (chunk,) = column_chunks(encode_rows(pa.table([COLUMNS[name]], [name])))
    assert chunk.has_dictionary_page == dictionary
    assert ("DELTA_BINARY_PACKED" in chunk.encodings) == delta
    assert (chunk.compression == "ZSTD") == compressed


@pytest.mark.parametrize("other", ["few", "doubles", "names", "structs", "times"])
def test_columns_of_one_name_are_written_so_that_both_can_be(other: str) -> None:
    columns = [COLUMNS["times"], COLUMNS[other], COLUMNS["unique"]]
    schema = pa.schema(
        [
            pa.field("0", columns[0].type, nullable=False),
            pa.field("0", columns[1].type),
            pa.field("0.at", pa.uint64(), nullable=False),
        ]
    )
    rows = pa.Table.from_arrays(columns, schema=schema)
    data = encode_rows(rows)
    back, _ = decode_file(data, "p")
    assert back.schema.equals(schema, check_metadata=True)
    assert back.equals(rows)
    assert not falls_back(rows)


def test_keys_of_pairs_get_no_dictionary_and_repeated_values_do() -> None:
    keys = pa.array(sorted(b"%020d" % n for n in RANDOM.tolist()), pa.large_binary())
    values = pa.array([b"v%d" % (n % 9) for n in range(ROWS)], pa.large_binary())
    data = encode_pair_columns(keys, values, GLOBAL_KEY_VALUE_SCHEMA, version=2)
    first, second = column_chunks(data)
    assert not first.has_dictionary_page
    assert second.has_dictionary_page
    rows, version = decode_file(data, "p")
    assert (rows.column("key").to_pylist(), version) == (keys.to_pylist(), 2)
    assert rows.column("value").to_pylist() == values.to_pylist()


def test_a_file_of_pairs_looks_like_one_of_arroyo() -> None:
    data = encode_pairs([b"b", b"a"], [b"2", b"1"], GLOBAL_KEY_VALUE_SCHEMA, version=3)
    file = pq.ParquetFile(io.BytesIO(data))
    column = file.metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"
    assert column.statistics is None
    assert file.metadata.metadata[b"version"] == b"3"
    assert file.schema.column(0).physical_type == "BYTE_ARRAY"
    assert file.schema.column(0).max_definition_level == 0
    rows, version = decode_file(data, "p")
    assert version == 3
    assert rows.to_pylist() == [{"key": b"a", "value": b"1"}, {"key": b"b", "value": b"2"}]
