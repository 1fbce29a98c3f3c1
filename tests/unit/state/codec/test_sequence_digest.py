"""The digest of rows in order: equal exactly where values and their order are."""

from __future__ import annotations

import pyarrow as pa
import pytest

from arroyo_dagster.state.codec.sequence_digest import SequenceDigest
from tests.formats import RowsDigest
from tests.unit.state.codec.test_digest import VALUES

NONE: frozenset[int] = frozenset()


def digest(
    *parts: pa.Table, texts: frozenset[int] = NONE, chunks: list[int] | None = None
) -> RowsDigest:
    found = SequenceDigest(0, texts, chunks)
    for part in parts:
        found.add(part)
    return found.finish()


def one_column(column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return pa.table([column], ["c"])


COLUMNS = {
    **VALUES,
    "lists of views": pa.array([["a", None], None, [], ["b"], ["a"]], pa.list_(pa.string_view())),
    "structs of views": pa.array(
        [{"x": b"a"}, None, {"x": None}, {"x": b""}, {"x": b"b"}],
        pa.struct([("x", pa.binary_view())]),
    ),
    "structs of times": pa.array(
        [{"x": 2**62 + n} if n else None for n in range(5)], pa.struct([("x", pa.timestamp("ns"))])
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_every_value_counts_and_its_place(name: str) -> None:
    column = COLUMNS[name]
    digests = {digest(one_column(column.slice(at, 1))) for at in range(5)}
    assert len(digests) == (3 if name == "flags" else 5)
    whole = one_column(column)
    backwards = one_column(pa.concat_arrays([column.slice(at, 1) for at in range(4, -1, -1)]))
    assert digest(whole) != digest(backwards)
    assert digest(whole) != digest(whole.slice(0, 4))
    assert digest(whole) != digest(whole, whole.slice(4))


@pytest.mark.parametrize("name", COLUMNS)
def test_slices_and_chunks_do_not_count(name: str) -> None:
    column = COLUMNS[name]
    whole = one_column(column)
    padded = pa.concat_arrays([column.slice(2, 3), column, column.slice(0, 2)])
    assert digest(one_column(padded.slice(3, 5))) == digest(whole)
    parts = [one_column(column.slice(at, 1)) for at in range(5)]
    assert digest(*parts) == digest(whole)
    assert digest(pa.concat_tables(parts)) == digest(whole)
    for planned in ([1, 4], [2, 2, 1], [5]):
        first = SequenceDigest(0, NONE, planned)
        first.add(whole)
        expected = first.finish()
        assert first.chunk_rows == planned
        assert digest(*parts, chunks=planned) == expected


@pytest.mark.parametrize("name", ["text", "bytes", "views", "long", "words"])
@pytest.mark.parametrize("texts", [NONE, frozenset([0])])
def test_dictionaries_digest_as_their_values(name: str, texts: frozenset[int]) -> None:
    plain = VALUES[name]
    if isinstance(plain, pa.DictionaryArray):
        plain = plain.dictionary_decode()
    coded = plain.dictionary_encode()
    unused = pa.DictionaryArray.from_arrays(
        coded.indices, pa.concat_arrays([coded.dictionary, coded.dictionary.slice(0, 1)])
    )
    expected = digest(one_column(plain), texts=texts)
    for column in (coded, unused, pa.chunked_array([coded.slice(0, 2), coded.slice(2)])):
        assert digest(one_column(column), texts=texts) == expected
    mixed = [one_column(coded.slice(0, 2)), one_column(plain.slice(2))]
    assert digest(*mixed, texts=texts) == expected


@pytest.mark.parametrize("values", [["a"] * 9, ["a"] * 5 + ["b"] * 4, ["b"] + ["a"] * 8])
def test_equal_values_may_come_from_dictionaries_of_any_size(values: list[str]) -> None:
    plain = pa.array(values)
    texts = frozenset([0])
    expected = digest(one_column(plain), texts=texts)
    for cut in range(10):
        parts = [plain.slice(0, cut).dictionary_encode(), plain.slice(cut).dictionary_encode()]
        assert digest(*map(one_column, parts), texts=texts) == expected
        assert digest(one_column(pa.chunked_array(parts)), texts=texts) == expected
        assert digest(one_column(pa.chunked_array(parts).unify_dictionaries()), texts=texts) == (
            expected
        )


def test_rows_beyond_the_plan_are_counted() -> None:
    rows = one_column(pa.array(range(10)))
    assert digest(rows, chunks=[4]).rows == 10
    assert digest(rows, chunks=[20]).rows == 10
    assert digest(rows.slice(0, 0), chunks=[4]) == RowsDigest()
