"""Parts of data files, by position."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.codec.row_groups import DataFile

NESTED = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.struct([("z", pa.string())])))])
SCHEMA = pa.schema(
    [
        pa.field("0", pa.list_(pa.field("item", pa.uint64(), nullable=False)), nullable=False),
        pa.field("0", pa.uint64(), nullable=False),
        pa.field("a.b", NESTED),
        pa.field("a", pa.struct([("b", pa.int64())])),
        pa.field("m", pa.map_(pa.string(), pa.int64())),
        pa.field("f", pa.list_(pa.int8(), 2)),
        pa.field("d", pa.dictionary(pa.int32(), pa.string())),
        pa.field("t", pa.timestamp("ns")),
    ]
)
ROWS = pa.table(
    [
        [[1], [2, 3], []],
        [2**64 - 1, 2**63, 5],
        [{"x": 1, "y": [{"z": "q"}]}, None, {"x": None, "y": []}],
        [{"b": 1}, {"b": 2}, None],
        [[("k", 1)], [], None],
        [[1, 2], [3, 4], None],
        pa.array(["u", "v", "u"]).dictionary_encode(),
        [1, 10**18 + 1, None],
    ],
    schema=SCHEMA,
)


def encoded(rows: pa.Table = ROWS, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    options.setdefault("use_compliant_nested_type", False)
    pq.write_table(rows, sink, **options)
    return bytes(sink.getvalue())


def test_row_groups_are_chosen_by_unsigned_numbers_and_by_time() -> None:
    file = DataFile(encoded(row_group_size=1), "f")
    every = [0, 1, 2]
    assert file.row_groups == (1, 1, 1)
    assert file.groups_within(1, 2**63, None, every) == [0, 1]
    assert file.groups_within(1, 2**63 + 1, 2**64 - 1, every) == [0]
    assert file.groups_within(1, 0, 5, every) == [2]
    assert file.groups_within(1, 6, 2**63 - 1, every) == []
    assert file.groups_within(1, 0, 5, [0, 1]) == []
    # The third has a null, which has no place among the others.
    assert file.groups_within(7, 2, None, every) == [1, 2]
    assert file.read([1], [1, 0]).column(0).to_pylist() == [2**63, 2**64 - 1]


def test_a_null_among_others_keeps_its_row_group() -> None:
    times = pa.table({"t": pa.array([1, None, 3, 4], pa.timestamp("ns"))})
    file = DataFile(encoded(times, row_group_size=2), "f")
    assert file.groups_within(0, 9, None, [0, 1]) == [0]


def test_a_store_that_fails_is_not_mistaken_for_a_broken_file() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise StorageError("no answer", url="x")

    with pytest.raises(StorageError, match="no answer"):
        DataFile(Failing(encoded()), "f")


def in_groups(numbers: list[int], size: int, *, ascending: bool) -> DataFile:
    order = [pq.SortingColumn(0)] if ascending else None
    rows = pa.table({"h": pa.array(numbers, pa.uint64())}, schema=UNSIGNED)
    return DataFile(encoded(rows, row_group_size=size, sorting_columns=order), "f")


UNSIGNED = pa.schema([pa.field("h", pa.uint64(), nullable=False)])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_groups_of_sorted_rows_are_found_by_few_statistics(size: int) -> None:
    numbers = sorted([1, 1, 1, 1, 5, 7, 7, 9, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1])
    for low in (0, 1, 2, 7, 2**63, 2**64 - 1):
        for high in (1, 6, 7, 2**63, 2**64 - 1):
            found, expected = (
                file.groups_within(0, low, high, range(len(file.row_groups)), nulls=False)
                for file in (
                    in_groups(numbers, size, ascending=True),
                    in_groups(numbers, size, ascending=False),
                )
            )
            assert found == expected
    many = in_groups(list(range(1000)), 1, ascending=True)
    assert many.groups_within(0, 500, 501, range(1000)) == [500, 501]
    assert len(many.footer.limits) < 30
