"""Hashes of whole columns against a plain implementation, value by value."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state import (
    HashVariant,
    hash_key,
    hash_keys,
    key_hashes,
    matching_variants,
    server_for_hash,
)
from arroyo_dagster.state.codec.hashing.routing import subtasks_for_hashes
from arroyo_dagster.state.model.types import U8

MASK = 2**64 - 1
K0, K1 = 0x0398DE1C8C83F7FD, 0xA7C36364ED09B486
K2, K3 = 0xAF18AC566EFEA448, 0xC77B0AD1D14D0FE1
MULTIPLE = 6364136223846793005


class Hasher:
    """The fallback hasher of ahash 0.8.7, as the specification describes it."""

    def __init__(self) -> None:
        self.buffer = K0

    def update(self, word: int) -> None:
        self.buffer = folded(word ^ self.buffer, MULTIPLE)

    def large(self, low: int, high: int) -> None:
        mixed = ((self.buffer + K1) & MASK) ^ folded(low ^ K2, high ^ K3)
        self.buffer = rotated(mixed, 23)

    def write(self, data: bytes) -> None:
        size = len(data)
        self.buffer = (self.buffer + size) * MULTIPLE & MASK
        if size > 16:
            self.large(*struct.unpack("<QQ", data[-16:]))
            while len(data) > 16:
                self.large(*struct.unpack("<QQ", data[:16]))
                data = data[16:]
        elif size > 8:
            self.large(number(data[:8]), number(data[-8:]))
        elif size > 3:
            self.large(number(data[:4]), number(data[-4:]))
        elif size > 1:
            self.large(number(data[:2]), data[-1])
        else:
            self.large(number(data), number(data))

    def finish(self) -> int:
        return rotated(folded(self.buffer, K1), self.buffer & 63)


def folded(left: int, right: int) -> int:
    product = left * right
    return (product & MASK) ^ (product >> 64)


def rotated(word: int, by: int) -> int:
    return (word << by | word >> (64 - by)) & MASK


def number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def hash_one(kind: pa.DataType, value: Any) -> int:
    hasher = Hasher()
    if pa.types.is_boolean(kind):
        hasher.update(int(value))
    elif pa.types.is_integer(kind):
        hasher.update(value & (2**kind.bit_width - 1))
    elif pa.types.is_floating(kind):
        code = {16: "<e", 32: "<f", 64: "<d"}[kind.bit_width]
        hasher.update(number(struct.pack(code, value)))
    elif pa.types.is_decimal(kind):
        whole = int(value)
        for place in range(kind.byte_width // 16):
            part = whole >> (128 * place)
            hasher.large(part & MASK, part >> 64 & MASK)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        hasher.write(value.encode())
        hasher.update(0xFF)
    else:
        hasher.update(len(value))
        hasher.write(value)
    return hasher.finish()


def combine(left: int, right: int) -> int:
    return ((629 + left) * 37 + right) & MASK


def hash_row(kinds: Sequence[pa.DataType], values: Sequence[Any]) -> int:
    found = 0
    for place, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if pa.types.is_null(kind):
            hasher = Hasher()
            hasher.update(1)
            found = hasher.finish() if place == 0 else combine(hasher.finish(), found)
        elif value is None:
            continue
        elif pa.types.is_struct(kind):
            inner, parts = [f.type for f in kind], [value[f.name] for f in kind]
            found = combine(found, hash_row(inner, parts))
        elif pa.types.is_map(kind):
            for pair in value:
                row = hash_row([kind.key_type, kind.item_type], pair)
                found = combine(found, combine(0, row))
        elif pa.types.is_nested(kind):
            for item in value:
                found = combine(found, hash_row([kind.value_type], [item]))
        else:
            new = hash_one(kind, value)
            found = new if place == 0 else combine(new, found)
    return found


def ints(bits: int, signed: bool) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)) if signed else 0, 2 ** (bits - signed) - 1)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
FLAT: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    **{getattr(pa, f"int{bits}")(): ints(bits, True) for bits in (8, 16, 32, 64)},
    **{getattr(pa, f"uint{bits}")(): ints(bits, False) for bits in (8, 16, 32, 64)},
    pa.float16(): st.floats(width=16, allow_nan=False),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.decimal128(38, 0): st.decimals(-(10**37), 10**37, places=0),
    pa.decimal256(76, 0): st.decimals(-(10**70), 10**70, places=0),
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.binary(): st.binary(max_size=70),
    pa.large_binary(): st.binary(max_size=20),
    pa.binary(5): st.binary(min_size=5, max_size=5),
    pa.null(): st.none(),
}


@st.composite
def kinds_with_values(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, Any]:
    shape = draw(st.sampled_from(["flat"] * 6 + ["struct", "list", "large", "fixed", "map"]))
    if shape == "flat" or depth == 0:
        kind = draw(st.sampled_from(list(FLAT)))
        return kind, FLAT[kind] | st.none()
    inner, values = draw(kinds_with_values(depth - 1))
    if shape == "struct":
        other, others = draw(kinds_with_values(depth - 1))
        made = st.fixed_dictionaries({"a": values, "b": others})
        return pa.struct([("a", inner), ("b", other)]), made | st.none()
    if shape == "fixed":
        return pa.list_(inner, 2), st.lists(values, min_size=2, max_size=2) | st.none()
    if shape == "map":
        pairs = st.lists(st.tuples(TEXT, values), max_size=3)
        return pa.map_(pa.string(), inner), pairs | st.none()
    make = pa.list_ if shape == "list" else pa.large_list
    return make(inner), st.lists(values, max_size=3) | st.none()


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[pa.DataType], list[list[Any]]]:
    rows = draw(st.integers(0, 12))
    kinds, columns = [], []
    for _ in range(draw(st.integers(1, 3))):
        kind, values = draw(kinds_with_values())
        kinds.append(kind)
        columns.append(draw(st.lists(values, min_size=rows, max_size=rows)))
    return kinds, columns


@given(tables(), st.data())
def test_whole_columns_hash_as_row_by_row(
    table: tuple[list[pa.DataType], list[list[Any]]], data: st.DataObject
) -> None:
    kinds, columns = table
    rows = len(columns[0])
    expected = [hash_row(kinds, row) for row in zip(*columns, strict=True)]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    assert key_hashes(arrays).to_pylist() == expected

    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    part = [array.slice(start, stop - start) for array in arrays]
    assert key_hashes(part).to_pylist() == expected[start:stop]
    chunked = [pa.chunked_array([a.slice(0, start), a.slice(start)]) for a in arrays]
    assert key_hashes(chunked).to_pylist() == expected


@given(st.lists(st.none() | st.sampled_from(["", "a", "bc"]), max_size=20), st.integers(0, 20))
def test_dictionaries_hash_as_their_values(values: list[str | None], start: int) -> None:
    plain = pa.array(values, pa.string())
    encoded = plain.dictionary_encode().slice(start)
    assert key_hashes([encoded]) == key_hashes([plain.slice(start)])
    second = pa.array(range(len(encoded)), pa.int64())
    assert key_hashes([second, encoded]) == key_hashes([second, plain.slice(start)])


@given(st.lists(st.integers(0, MASK)), st.integers(1, 2**31 - 1))
def test_many_hashes_go_where_each_alone_goes(hashes: list[int], parallelism: int) -> None:
    found = subtasks_for_hashes(pa.array(hashes, pa.uint64()), parallelism)
    assert found.tolist() == [server_for_hash(one, parallelism) for one in hashes]


@given(st.binary(max_size=40))
def test_bytes_hash_as_the_list_of_them(data: bytes) -> None:
    assert hash_key(data) == hash_key(list(data), list[U8])


@given(tables(), st.sampled_from(HashVariant))
def test_every_variant_hashes_whole_columns_as_row_by_row(
    table: tuple[list[pa.DataType], list[list[Any]]], variant: HashVariant
) -> None:
    kinds, columns = table
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    whole = key_hashes(arrays, variant=variant)
    rows = range(len(columns[0]))
    alone = [key_hashes([a.slice(row, 1) for a in arrays], variant=variant) for row in rows]
    assert whole.to_pylist() == [one[0].as_py() for one in alone]
    assert variant in matching_variants(arrays, whole)


def siphash13(data: bytes) -> int:
    """SipHash-1-3 with keys 0 and 0, word by word, as its authors write it."""
    v = [0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573]
    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) & 0xFF])

    def mix(left: int, right: int, by: int) -> None:
        v[left] = v[left] + v[right] & MASK
        v[right] = rotated(v[right], by) ^ v[left]

    def a_round() -> None:
        mix(0, 1, 13)
        mix(2, 3, 16)
        v[0] = rotated(v[0], 32)
        mix(0, 3, 21)
        mix(2, 1, 17)
        v[2] = rotated(v[2], 32)

    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        a_round()
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(3):
        a_round()
    return v[0] ^ v[1] ^ v[2] ^ v[3]


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_many_keys_hash_as_the_plain_siphash_of_each(keys: list[bytes]) -> None:
    expected = [siphash13(struct.pack("<Q", len(key)) + key) for key in keys]
    assert hash_keys(keys).tolist() == expected
    assert [hash_key(key) for key in keys] == expected
