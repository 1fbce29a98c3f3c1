"""Arrow schemas as metadata holds them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import OperatorCheckpoint
from arroyo_dagster.state.codec.metadata import decode_manifest
from arroyo_dagster.state.codec.schema import interval_type, stored_schema
from tests.compat.arroyo import DATA
from tests.formats import ExpiringTimeKeyConfig, decode_operator, schema_from_json, schema_to_json

TIMESTAMP = pa.field("_timestamp", pa.timestamp("ns"), nullable=False)

NAMED = {
    "Null": pa.null(),
    "Boolean": pa.bool_(),
    **{f"Int{bits}": getattr(pa, f"int{bits}")() for bits in (8, 16, 32, 64)},
    **{f"UInt{bits}": getattr(pa, f"uint{bits}")() for bits in (8, 16, 32, 64)},
    **{f"Float{bits}": getattr(pa, f"float{bits}")() for bits in (16, 32, 64)},
    "Utf8": pa.string(),
    "LargeUtf8": pa.large_string(),
    "Utf8View": pa.string_view(),
    "Binary": pa.binary(),
    "LargeBinary": pa.large_binary(),
    "BinaryView": pa.binary_view(),
    "Date32": pa.date32(),
    "Date64": pa.date64(),
}
WITH_PARTS = [
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    pa.timestamp("us", tz="Europe/Berlin"),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.time64("ns"),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    *(interval_type(unit) for unit in ("YearMonth", "DayTime", "MonthDayNano")),
    pa.binary(16),
    pa.decimal128(38, 10),
    pa.decimal256(76, -3),
    pa.list_(pa.field("item", pa.int64(), nullable=False)),
    pa.list_(pa.field("a", pa.list_(pa.field("b", pa.string())))),
    pa.large_list(pa.field("item", pa.int64())),
    pa.list_(pa.field("item", pa.float32(), nullable=False), 3),
    pa.struct([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.uint64())]),
    pa.map_(pa.string(), pa.field("values", pa.int64(), nullable=False)),
    pa.dictionary(pa.int32(), pa.string()),
    pa.map_(pa.string(), pa.int64(), keys_sorted=True),
    pa.dictionary(pa.int8(), pa.string(), ordered=True),
    pa.dictionary(pa.uint64(), pa.decimal128(5, 2)),
    pa.list_view(pa.field("item", pa.int64(), nullable=False)),
    pa.large_list_view(pa.field("item", pa.timestamp("ns"))),
    pa.sparse_union([pa.field("a", pa.int64()), pa.field("b", pa.string())], [0, 5]),
    pa.dense_union([pa.field("a", pa.int64(), nullable=False)]),
    pa.run_end_encoded(pa.int16(), pa.string()),
    pa.struct([]),
    pa.list_(pa.field("item", pa.int64(), metadata={"ARROW:extension:name": "arroyo.json"})),
]


def real_operators() -> list[tuple[str, OperatorCheckpoint]]:
    found: list[tuple[str, OperatorCheckpoint]] = []
    for archive in ("legacy", "leader", "flights"):
        with tarfile.open(DATA / f"arroyo-{archive}.tar.gz") as file:
            for member in file:
                path, content = Path(member.name), file.extractfile(member)
                if content is None:
                    continue
                if path.name == "checkpoint-manifest.pb":
                    manifest = decode_manifest(content.read(), member.name)
                    found.extend((archive, operator) for operator in manifest.operators)
                elif path.name == "metadata" and path.parent.name.startswith("operator-"):
                    found.append((archive, decode_operator(content.read(), member.name)))
    return found


def test_every_schema_a_real_arroyo_stored_is_written_again_byte_for_byte() -> None:
    texts = {
        config.config.schema.arrow_schema
        for _, operator in real_operators()
        for config in operator.configs.values()
        if isinstance(config.config, ExpiringTimeKeyConfig)
    }
    assert len(texts) >= 15
    for text in texts:
        assert schema_to_json(schema_from_json(text)) == text


@pytest.mark.parametrize("kind", WITH_PARTS, ids=str)
def test_a_type_with_parts_comes_back_whole(kind: pa.DataType) -> None:
    schema = pa.schema([pa.field("c", kind, nullable=False), pa.field("c", kind)])
    text = schema_to_json(schema)
    back = schema_from_json(text)
    assert back.equals(schema, check_metadata=True)
    assert [field.nullable for field in back] == [False, True]
    assert schema_to_json(back) == text


def test_a_type_without_a_stored_form_is_refused() -> None:
    kind = pa.decimal32(5, 2)
    with pytest.raises(InputError, match="no stored form"):
        schema_to_json(pa.schema([pa.field("c", kind)]))


def test_a_table_needs_event_time_and_keys_that_are_columns() -> None:
    plain = pa.schema([pa.field("k", pa.string())])
    with pytest.raises(InputError, match="_timestamp"):
        stored_schema(plain, keys=["k"])
    with pytest.raises(InputError, match="_timestamp"):
        stored_schema(plain.append(pa.field("_timestamp", pa.timestamp("us"))), keys=["k"])
    timed = plain.append(TIMESTAMP)
    with pytest.raises(InputError, match="'nope'"):
        stored_schema(timed, keys=["nope"])
    with pytest.raises(InputError, match="'k'"):
        stored_schema(timed.append(pa.field("k", pa.string())), keys=["k"])
