"""Bytes that nobody meant: every codec answers with a value or a typed error, and little memory."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import ArroyoStateError, FormatError
from arroyo_dagster.state.codec import parquet
from arroyo_dagster.state.codec.derived import encode_json
from arroyo_dagster.state.codec.gc import decode_gc_plan, decode_pins
from arroyo_dagster.state.codec.journal import decode_batch, decode_records, encode_batch
from arroyo_dagster.state.codec.maintenance_records import decode_compaction_record
from arroyo_dagster.state.codec.operations import decode_operation
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.codec.row_groups import DataFile
from tests.compat.arroyo import DATA
from tests.formats import decode_file, encode_rows, metadata, read_facts, records, schema_from_json

Decode = Callable[[bytes], object]


def named(decode: Callable[[bytes, str], object]) -> Decode:
    return lambda data: decode(data, "the/path")


PROTOBUF: dict[str, Decode] = {
    "references of a manifest": named(manifest_references),
    "references of an operator": named(operator_references),
    "manifest": named(metadata.decode_manifest),
    "checkpoint": named(metadata.decode_legacy_checkpoint),
    "operator": named(metadata.decode_operator),
}
JSON: dict[str, Decode] = {
    "current generation": named(records.decode_current_generation),
    "generation manifest": named(records.decode_generation_manifest),
    "epoch record": named(records.decode_epoch_record),
    "marker": named(records.decode_committed_marker),
    "commit note": named(records.decode_commit_note),
    "compaction record": named(decode_compaction_record),
    "gc plan": named(decode_gc_plan),
    "pins": named(decode_pins),
    "type": lambda data: records.decode_type(data.decode(errors="replace")),
    "schema": lambda data: schema_from_json(data.decode(errors="replace")),
}
OTHER: dict[str, Decode] = {
    "operation": decode_operation,
    "footer": named(read_facts),
    "bounds": lambda data: read_facts(data, "the/path", bounds=True),
    "file": named(decode_file),
    "journal": lambda data: [
        decode_batch(text, "the/path") for text in decode_records(data, "the/path")
    ],
}
ALL = PROTOBUF | JSON | OTHER


def settled(decode: Decode, data: bytes) -> None:
    """A value, or a FormatError that can be shown."""
    problem: ArroyoStateError | None = None
    try:
        decode(data)
    except ArroyoStateError as error:
        problem = error
    assert problem is None or isinstance(problem, FormatError), problem
    assert len(str(problem)) < 5000


def real(name: str, ending: str, archive: str) -> bytes:
    with tarfile.open(DATA / f"arroyo-{archive}.tar.gz") as file:
        for member in sorted(file.getnames()):
            if member.endswith(ending):
                content = file.extractfile(member)
                assert content is not None
                return content.read()
    raise AssertionError(name)


@pytest.fixture(scope="module")
def written() -> dict[str, bytes]:
    return {
        "manifest": real("manifest", "checkpoint-manifest.pb", "leader"),
        "checkpoint": real("checkpoint", "0000008/metadata", "flights"),
        "operator": real("operator", "SessionWindow%3C21600s%3E/metadata", "flights"),
        "current generation": real("fence", "current-generation.json", "leader"),
        "generation manifest": real("generation", "generation-manifest.json", "leader"),
        "epoch record": real("record", ".record", "leader"),
        "marker": real("marker", "committed.json", "leader"),
        "footer": encode_rows(pa.table({"a": [1, 2], "_key_hash": pa.array([1, 2], pa.uint64())})),
        "file": encode_rows(pa.table({"a": [1, 2], "b": ["x", "y"]})),
        "journal": encode_batch(7, [("a/b", 1, None, "deleted")]),
        "bounds": encode_rows(pa.table({"_key_hash": pa.array([1, 2], pa.uint64())})),
    }


# ---- truncation and damage -----------------------------------------------------------------------


def test_an_object_cut_at_any_byte_is_another_value_or_a_typed_error(
    written: dict[str, bytes],
) -> None:
    for name, data in written.items():
        for length in range(len(data)):
            settled(ALL[name], data[:length])


@given(data=st.data())
def test_an_object_with_damaged_bytes_is_another_value_or_a_typed_error(
    written: dict[str, bytes], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(written)))
    damaged = bytearray(written[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    settled(ALL[name], bytes(damaged))


@given(name=st.sampled_from(sorted(ALL)), data=st.binary(max_size=300))
def test_random_bytes_are_a_value_or_a_typed_error(name: str, data: bytes) -> None:
    settled(ALL[name], data)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
WORDS = """
version pipeline_id job_id generation epoch checkpoint_ref merged token inputs outputs rows fields
metadata name data_type nullable dict_id data records manifests epochs keep_from min_epoch
created_at_micros option list map enum struct tuple array
"""
NAMES = st.sampled_from(WORDS.split())


@given(name=st.sampled_from(sorted(JSON)), value=st.dictionaries(NAMES, JSON_VALUES))
def test_json_of_any_shape_is_a_value_or_a_typed_error(name: str, value: Any) -> None:
    settled(JSON[name], encode_json(value))


@pytest.mark.parametrize("name", sorted(JSON))
def test_json_that_lies_within_itself_without_end_is_refused(name: str) -> None:
    for data in (b"[" * 200_000, b'{"a":' * 200_000, b'{"fields":' * 50_000 + b"1" + b"}" * 50_000):
        settled(JSON[name], data)


# ---- numbers and lengths -------------------------------------------------------------------------


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**35, 2**63 - 1, 2**63, 2**64 - 1, 2**70]
FIELDS = range(1, 16)


@pytest.mark.parametrize("name", sorted(PROTOBUF))
def test_giant_numbers_and_lengths_cost_no_memory(name: str) -> None:
    messages = [
        prefix + varint(number << 3 | wire) + varint(huge) + b"\x01"
        for prefix in (b"", b"\x52\x04", b"\x0a\x02")
        for number in FIELDS
        for wire in (0, 2)
        for huge in HUGE
    ]
    messages += [b"\xff" * 20, b"\x80" * 1000, varint(1 << 3 | 2) + b"\xff" * 10]
    tracemalloc.start()
    for data in messages:
        settled(PROTOBUF[name], data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_messages_that_lie_within_each_other_without_end_are_refused() -> None:
    # A group of an unknown field within itself: field 999, wire types 3 and 4.
    opened, closed = varint(999 << 3 | 3), varint(999 << 3 | 4)
    data = opened * 100_000 + closed * 100_000
    for name in PROTOBUF:
        with pytest.raises(FormatError, match="do not decode"):
            PROTOBUF[name](data)


def test_many_small_parts_take_time_and_memory_in_proportion() -> None:
    # The smallest time file that is one: what a hostile object can hold most of.
    file = b"\x12\x01a"
    files = b"".join(varint(1 << 3 | 2) + varint(len(file)) + file for _ in range(50_000))
    table = b"\x08\x02" + varint(2 << 3 | 2) + varint(len(files)) + files
    entry = b"\x0a\x01t" + varint(2 << 3 | 2) + varint(len(table)) + table
    data = b"\x0a\x00" + varint(13 << 3 | 2) + varint(len(entry)) + entry
    tracemalloc.start()
    began = time.perf_counter()
    operator = metadata.decode_operator(data, "p")
    took = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(operator.paths) == 50_000
    assert peak < 400 * len(data)
    assert took < 10


def zigzag(number: int) -> bytes:
    return varint(number << 1)


def claiming(data: bytes, **claims: int) -> bytes:
    """A file of one row group whose footer lies about it, and about its first column."""
    (length,) = struct.unpack("<I", data[-8:-4])
    body, footer = data[: -8 - length], data[-8 - length : -8]
    meta = pq.ParquetFile(pa.BufferReader(data)).metadata
    column, rows = meta.row_group(0).column(0), meta.num_rows
    known = {
        "values": column.num_values,
        "uncompressed": column.total_uncompressed_size,
        "compressed": column.total_compressed_size,
    }

    def fields(numbers: Iterable[int]) -> bytes:
        return b"".join(b"\x16" + zigzag(number) for number in numbers)

    lied = (claims.get(name, number) for name, number in known.items())
    assert footer.count(fields(known.values())) == 1
    footer = footer.replace(fields(known.values()), fields(lied))
    before, _, after = footer.partition(b"\x16" + zigzag(rows) + b"\x19")  # of the file
    group, _, rest = after.rpartition(b"\x16" + zigzag(rows) + b"\x26")  # of the row group
    encoded = b"\x16" + zigzag(meta.row_group(0).total_byte_size)
    assert group.endswith(encoded)
    if "encoded" in claims:
        group = group.removesuffix(encoded) + b"\x16" + zigzag(claims["encoded"])
    footer = before + b"\x16" + zigzag(claims.get("file_rows", rows)) + b"\x19"
    footer += group + b"\x16" + zigzag(claims.get("group_rows", rows)) + b"\x26" + rest
    return body + footer + struct.pack("<I", len(footer)) + b"PAR1"


REPEATED = pa.table({"a": [7] * 3000, "b": ["x"] * 3000})


def rows_in(parts: Iterable[pa.Table]) -> int:
    return sum(part.num_rows for part in parts)


WHOLE: dict[str, Callable[[bytes], int]] = {
    "whole": lambda data: decode_file(data, "the/path")[0].num_rows,
    "whole, by ranges": lambda data: decode_file(io.BytesIO(data), "the/path")[0].num_rows,
    "part": lambda data: DataFile(data, "the/path").read([0], [0]).num_rows,
    "part, by ranges": lambda data: DataFile(io.BytesIO(data), "the/path").read([0], [0]).num_rows,
}


STREAMED: dict[str, Callable[[bytes], int]] = {
    "streamed": lambda data: rows_in(DataFile(data, "the/path").stream(1024)),
    "in pieces": lambda data: rows_in(DataFile(data, "the/path").slices([0], 0, 1024)),
}
DECODERS = WHOLE | STREAMED


@pytest.mark.parametrize("decoder", WHOLE)
@pytest.mark.parametrize("claimed", [2**50, 2**62])
def test_a_footer_that_claims_petabytes_is_refused(decoder: str, claimed: int) -> None:
    with pytest.raises(FormatError, match=f"would decode to {str(claimed)[:4]}"):
        WHOLE[decoder](claiming(encode_rows(REPEATED), encoded=claimed))


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_size_that_a_column_claims_is_not_believed(decoder: str) -> None:
    """It decides nothing: pyarrow aborts at some columns of damaged footers, so none is asked."""
    assert DECODERS[decoder](claiming(encode_rows(REPEATED), uncompressed=2**62)) == 3000


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "claims",
    [
        {"compressed": 2**50},
        {"compressed": 2**31},
        {"file_rows": 2**40},
        {"file_rows": 2**40, "group_rows": 2**40},
        {"file_rows": 2**40, "group_rows": 2**40, "values": 2**40},
        {"file_rows": 3001, "group_rows": 3001},
    ],
    ids=str,
)
def test_a_footer_that_claims_what_the_file_does_not_hold_is_refused(
    decoder: str, claims: dict[str, int]
) -> None:
    assert DECODERS[decoder](claiming(encode_rows(REPEATED))) == 3000
    began = pa.total_allocated_bytes()
    with pytest.raises(FormatError, match=r"footer says|decode") as caught:
        DECODERS[decoder](claiming(encode_rows(REPEATED), **claims))
    assert caught.value.facts["path"] == "the/path"
    assert pa.total_allocated_bytes() - began < 1 << 20


@pytest.mark.parametrize("decoder", WHOLE)
@pytest.mark.parametrize("kind", ["numbers", "texts", "lists"])
def test_a_small_file_that_decodes_to_much_is_refused(
    monkeypatch: pytest.MonkeyPatch, decoder: str, kind: str
) -> None:
    """A bomb, made small: by run lengths, by compression, by a dictionary of one long text."""
    monkeypatch.setattr(parquet, "_FLOOR_BYTES", 4 << 20)
    values = {
        "numbers": lambda: pa.array(np.zeros(1_000_000, np.int64)),
        "texts": lambda: pa.array(["x" * 60] * 200_000),
        "lists": lambda: pa.array([[0] * 1000] * 1000),
    }[kind]()
    data = encode_rows(pa.table({"a": values}))
    assert len(data) < 40_000
    with pytest.raises(FormatError, match=r"would decode to .* expected at most"):
        WHOLE[decoder](data)
    monkeypatch.setattr(parquet, "_FLOOR_BYTES", 40 << 20)
    assert WHOLE[decoder](data) == len(values)


def test_a_footer_that_claims_to_be_giant_is_refused_without_reading_it() -> None:
    data = encode_rows(pa.table({"a": [1]}))
    for length in (2**31 - 1, 2**31, 2**32 - 1, len(data), len(data) + 1):
        claimed = data[:-8] + struct.pack("<I", length) + b"PAR1"
        with pytest.raises(FormatError):
            read_facts(claimed, "p")
        with pytest.raises(FormatError):
            read_facts(io.BytesIO(claimed), "p")


FOOTERS = """
import random, struct
import pyarrow as pa
from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows, read_facts
from arroyo_dagster.state.codec.row_groups import DataFile

rows = pa.table({"a": [1, 2], "t": ["x", "x"], "_key_hash": pa.array([1, 2], pa.uint64())})
whole = encode_rows(rows, row_group_rows=1)
footer = len(whole) - 8 - struct.unpack("<I", whole[-8:-4])[0]
for seed in range(6000):
    chance, data = random.Random(seed), bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(footer, len(whole) - 8)] = chance.randrange(256)
    try:
        if seed % 3 == 0:
            read_facts(bytes(data), "the/path", bounds=seed % 2 == 0)
        elif seed % 3 == 1:
            decode_file(bytes(data), "the/path")
        else:
            file = DataFile(bytes(data), "the/path")
            file.groups_within(2, 1, 1, range(len(file.row_groups)))
            file.footer.stored_bytes, file.repeating_texts, file.group_sizes
            list(file.stream(1))
    except FormatError:
        pass
"""


def test_a_damaged_footer_does_not_abort_the_process() -> None:
    """pyarrow ends the process where it is asked for some columns of a damaged footer."""
    done = subprocess.run([sys.executable, "-c", FOOTERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
