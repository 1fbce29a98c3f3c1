"""Routing keys: the hashes of the specification, and those of the crate Arroyo uses."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import HashVariant, hash_key, key_hashes, matching_variants
from tests.formats import types as t

NS = pa.timestamp("ns")
WINDOW = pa.struct([("start", NS), ("end", NS)])
ALPHABET_100 = ("abcdefghijklmnopqrstuvwxyz" * 4)[:100]

ONE_COLUMN: list[tuple[pa.DataType, Any, int]] = [
    (pa.int32(), 0, 15749363693000283441),
    (pa.int64(), 0, 15749363693000283441),
    (pa.uint64(), 0, 15749363693000283441),
    (pa.int32(), 1, 14262756777131202979),
    (pa.int64(), 1, 14262756777131202979),
    (pa.uint64(), 1, 14262756777131202979),
    (pa.bool_(), True, 14262756777131202979),
    (pa.int8(), 1, 14262756777131202979),
    (pa.null(), None, 14262756777131202979),
    (pa.int8(), -1, 3140710861565491642),
    (pa.int16(), -1, 2881395789848385441),
    (pa.int32(), -1, 13272590287290275861),
    (pa.int32(), 2147483647, 12635505347212555349),
    (pa.date32(), 2147483647, 12635505347212555349),
    (pa.time32("s"), 2147483647, 12635505347212555349),
    (pa.int64(), -1, 12486264415119056660),
    (pa.uint64(), 2**64 - 1, 12486264415119056660),
    (pa.duration("us"), -1, 12486264415119056660),
    (pa.int64(), 1700000000000000000, 3309074062187510211),
    (NS, 1700000000000000000, 3309074062187510211),
    (pa.timestamp("ns", "UTC"), 1700000000000000000, 3309074062187510211),
    (pa.decimal128(38, 0), Decimal(0), 15945280452366466194),
    (pa.decimal128(38, 0), Decimal(1), 5136710567219575393),
    (pa.decimal128(38, 0), Decimal(-1), 9328080980463273263),
    (pa.decimal128(38, 0), Decimal(123456789012345678901234567890), 5472706070164973075),
    (pa.float64(), -0.0, 9333533520502905397),
    (pa.float64(), 1.5, 9134649341497371238),
    (pa.float64(), float("nan"), 570217379685195854),
    (pa.float32(), 1.5, 16315331368936840864),
    (pa.string(), "", 7533845322284773119),
    (pa.string(), "a", 9164075518525621433),
    (pa.string(), "ab", 3979523898192570582),
    (pa.string(), "abc", 12372895915561882831),
    (pa.string(), "abcd", 16217862868369501604),
    (pa.string(), "abcde", 5442188463367438880),
    (pa.string(), "abcdefgh", 8345732107123325070),
    (pa.string(), "abcdefghi", 15118152602392856133),
    (pa.string(), "0123456789abcdef", 17975747009403871802),
    (pa.string(), "0123456789abcdefg", 7059520370720816380),
    (pa.large_string(), "0123456789abcdefg", 7059520370720816380),
    (pa.string_view(), "0123456789abcdefg", 7059520370720816380),
    (pa.string(), "hello", 10901611628064662358),
    (pa.string(), "héllo", 18201042336611163868),
    (pa.string(), "The quick brown fox jumps over the lazy dog", 8071376282252929640),
    (pa.string(), ALPHABET_100, 12586841752960038658),
    (pa.binary(), b"", 17630280387749357318),
    (pa.binary(), b"a", 11448505194923874647),
    (pa.binary(), bytes(range(9)), 18353000878631360631),
    (pa.binary(9), bytes(range(9)), 18353000878631360631),
    (pa.large_binary(), b"0123456789abcdefg", 15679415791247905370),
    (pa.binary_view(), b"0123456789abcdefg", 15679415791247905370),
    (WINDOW, {"start": 0, "end": 60000000000}, 6291158604920774119),
    (pa.list_(pa.int64()), [1, 2], 8549032322769544499),
    (pa.large_list(pa.int64()), [1, 2], 8549032322769544499),
    (pa.list_(pa.int64(), 2), [1, 2], 8549032322769544499),
    # Real:
    (pa.string(), "N14228", 17669808957346973724),
    (pa.decimal128(20, 0), Decimal(4), 3122633927942134196),
]


@pytest.mark.parametrize(("kind", "value", "expected"), ONE_COLUMN)
def test_values_hash_as_specified(kind: pa.DataType, value: Any, expected: int) -> None:
    array = pa.array([value], kind)
    assert key_hashes([array]).to_pylist() == [expected]
    among_others = pa.array([None, value, None, value], kind).slice(1)
    found = key_hashes([among_others]).to_pylist()
    assert found == [expected, expected if pa.types.is_null(kind) else 0, expected]


ROWS: list[tuple[list[tuple[pa.DataType, Any]], int]] = [
    ([(pa.int64(), 1), (pa.string(), "a")], 2845413562097738569),
    ([(pa.string(), "a"), (pa.int64(), 1)], 1930498134803158065),
    ([(pa.int64(), None), (pa.string(), "a")], 7029400858676087206),
    ([(pa.int64(), 1), (pa.string(), None)], 14262756777131202979),
    ([(pa.int64(), None), (pa.string(), None)], 0),
    # Real:
    ([(pa.int64(), None), (pa.string(), "k6")], 1814589107227670151),
    ([(pa.string(), "k0"), (pa.int64(), None)], 8980569226083972050),
    (
        [(pa.bool_(), False), (pa.float64(), 0.0), (pa.int64(), 1), (NS, 3000000000)],
        8696258008882867697,
    ),
    (
        [
            (WINDOW, {"start": 1795227740000000000, "end": 1795227744000000000}),
            (pa.string(), "k4"),
            (pa.int64(), 2),
        ],
        344467327313249425,
    ),
]


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_rows_hash_as_specified(row: list[tuple[pa.DataType, Any]], expected: int) -> None:
    columns = [pa.array([value], kind) for kind, value in row]
    assert key_hashes(columns).to_pylist() == [expected]


# Computed with the crate ahash 0.8.7, built three times: without features, with `+aes`, and with
# `+aes,+ssse3`. Texts are so many letters of the alphabet, over and over.
VARIANTS: list[tuple[pa.DataType, Any, int, int]] = [
    (pa.int64(), 0, 18216259114846615597, 9196430264860440795),
    (pa.int64(), 1, 1718045178694605050, 8793010008681262550),
    (pa.int64(), -1, 11956613624234174275, 17627469802317453701),
    (pa.int8(), -1, 17955110078080275123, 96823313191808735),
    (pa.uint16(), 65535, 11131901151868533477, 2905228250356858218),
    (pa.int32(), -1, 9036906356122012649, 16520632431243729487),
    (pa.bool_(), True, 1718045178694605050, 8793010008681262550),
    (pa.decimal128(38, 0), Decimal(1), 1718045178694605050, 8793010008681262550),
    (pa.decimal128(38, 0), Decimal(-1), 18257280411789631508, 2375608711931281216),
    (
        pa.decimal128(38, 0),
        Decimal(123456789012345678901234567890),
        7347672882475951722,
        11667219995175993940,
    ),
    (pa.decimal256(76, 0), Decimal(7 - 3 * 2**128), 3490453432822995111, 14685882170515355440),
    (pa.month_day_nano_interval(), (-1, 2, -3), 17476545492234068354, 8458481467867488791),
    (pa.string(), "abc", 650548222058631080, 8699134442567446475),
    (pa.string(), 0, 13417961194849879456, 12373624335915152300),
    (pa.string(), 1, 2976433467958677665, 1561786332185779674),
    (pa.string(), 4, 14536573216738493357, 571031328575399589),
    (pa.string(), 8, 2088101024362081849, 885781853407647933),
    (pa.string(), 9, 11209642630467324911, 10448083525187527508),
    (pa.string(), 16, 2973754930239711498, 7254241350835591637),
    (pa.string(), 17, 16270660922030144233, 13207085292802077459),
    (pa.string(), 32, 10219990613919634097, 8460797490426965838),
    (pa.string(), 33, 1436173161668077302, 3035072464396597886),
    (pa.string(), 64, 13713973892930350287, 16832153832301585046),
    (pa.string(), 65, 1327544380756465727, 9904568305243257330),
    (pa.string(), 128, 8727991441090174720, 6099614257863316307),
    (pa.string(), 129, 14601271502751098906, 15979170541232782992),
    (pa.string(), 200, 2846534755569714485, 7133009637765788666),
    (pa.binary(), 0, 1673948788051024159, 3273402633718993414),
    (pa.binary(), 3, 18077553510312939202, 17328449242136529555),
    (pa.binary(), 31, 16804108605675557024, 4167424524433718551),
    (pa.binary(), 48, 11059103310764134700, 15991812240441641601),
    (pa.binary(), 127, 12282549029326566193, 2779401733723980798),
]
FALLBACK_LONG = [
    (pa.decimal256(76, 0), Decimal(7 - 3 * 2**128), 6224350709168064952),
    (pa.month_day_nano_interval(), (-1, 2, -3), 17736480500858617869),
    (pa.string(), 64, 6065290231490709548),
    (pa.string(), 129, 2206023589569396335),
    (pa.binary(), 200, 11319278556858537194),
]


def of_letters(kind: pa.DataType, value: Any) -> pa.Array:
    if kind in (pa.string(), pa.binary()) and isinstance(value, int):
        value = ("abcdefghijklmnopqrstuvwxyz" * 8)[:value]
    return pa.array([value], kind)


@pytest.mark.parametrize(("kind", "value", "aes", "ssse3"), VARIANTS)
def test_builds_with_aes_hash_apart(kind: pa.DataType, value: Any, aes: int, ssse3: int) -> None:
    column = [of_letters(kind, value)]
    assert key_hashes(column, variant=HashVariant.AES).to_pylist() == [aes]
    assert key_hashes(column, variant=HashVariant.AES_SSSE3).to_pylist() == [ssse3]


@pytest.mark.parametrize(("kind", "value", "expected"), FALLBACK_LONG)
def test_long_values_hash_as_the_crate_does(kind: pa.DataType, value: Any, expected: int) -> None:
    assert key_hashes([of_letters(kind, value)]).to_pylist() == [expected]


@pytest.mark.parametrize("variant", HashVariant)
def test_the_build_that_wrote_rows_is_found_from_their_hashes(variant: HashVariant) -> None:
    columns = [pa.array(["a", None, "b"]), pa.array([1, 2, None], pa.decimal128(20, 0))]
    stored = key_hashes(columns, variant=variant)
    assert matching_variants(columns, stored) == (variant,)
    assert matching_variants(columns, pa.chunked_array([stored])) == (variant,)
    others = [other for other in HashVariant if other is not variant]
    assert matching_variants(columns, stored, others) == ()


UNSUPPORTED = [
    pa.run_end_encoded(pa.int32(), pa.string()),
    pa.dense_union([pa.field("a", pa.int8())]),
    pa.list_view(pa.int8()),
    pa.decimal32(5, 0),
]


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=str)
def test_types_arroyo_cannot_hash_are_refused_even_without_rows(kind: pa.DataType) -> None:
    empty = (
        pa.UnionArray.from_dense(pa.array([], pa.int8()), pa.array([], pa.int32()), [pa.nulls(0)])
        if pa.types.is_union(kind)
        else pa.array([], kind)
    )
    with pytest.raises(InputError, match="cannot be part of a routing key"):
        key_hashes([empty])
    if not pa.types.is_union(kind):
        with pytest.raises(InputError, match="cannot be part of a routing key"):
            key_hashes([pa.nulls(2, kind)])
        with pytest.raises(InputError, match="cannot be part of a routing key"):
            key_hashes([pa.StructArray.from_arrays([empty], ["inside"])])


@dataclass
class Pair:
    one: t.U64
    two: int


STD: list[tuple[Any, Any, int]] = [
    ((), None, 15130871412783076140),
    ("", None, 3476900567878811119),
    ("a", None, 8186225505942432243),
    ("ab", None, 7391266126405785627),
    ("abc", None, 17224545590736200989),
    ("hello", None, 16156531084128653017),
    ("héllo", None, 16660529101961148543),
    ("path/to/file.json", None, 9840440731389857059),
    ("shardId-000000000000", None, 15865885821373814340),
    ("shardId-000000000001", str, 8605211468092787034),
    (0, t.U8, 7541581120933061747),
    (1, t.U8, 4952851536318644461),
    (255, t.U8, 3476900567878811119),
    (True, None, 4952851536318644461),
    (0, t.U32, 14709398186846620400),
    (1, t.U32, 1742378985846435984),
    (7, t.U32, 13916993215237271530),
    (2**32 - 1, t.U32, 5963905586759915234),
    (-1, t.I32, 5963905586759915234),
    (0, None, 13646096770106105413),
    (1, None, 2206609067086327257),
    (42, t.U64, 8880661182590738257),
    (2**64 - 1, None, 3395815149532668813),
    (-1, None, 3395815149532668813),
    (1700000000000000000, None, 16266748605167258222),
    (b"", None, 13646096770106105413),
    ([1], list[t.U8], 14494360753792957044),
    (b"\x01\x02\x03", None, 8086395815454877121),
    (b"abc", bytes, 5378393838603134665),
    ((1, 2), None, 18088007599891946824),
    (Pair(1, 2), None, 18088007599891946824),
    (("a", 1), None, 16331044847874628985),
    ((1, -1), tuple[t.I32, t.I64], 10755956974200402104),
    ([1, 2], None, 8031926490300119127),
    ([1, 2], t.ArrayOf(t.Primitive("u64"), 2), 8031926490300119127),
    (["a", "b"], None, 1368289100260679826),
    (None, int | None, 13646096770106105413),
    (1, t.OptionOf(t.Primitive("u64")), 7912899488978770657),
    (1, t.U128, 9886797495896358906),
    ("a", t.Char, 7144977204516799495),
]


@pytest.mark.parametrize(("value", "kind", "expected"), STD)
def test_hash_key_is_the_standard_hasher_of_rust(value: Any, kind: Any, expected: int) -> None:
    assert hash_key(value, kind) == expected


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (None, None, "without its type"),
        (1.0, None, "without its type"),
        (1.0, float, "Rust cannot hash"),
        ({1}, None, "without its type"),
        ({1}, set[int], "cannot be hashed"),
        ({"a": 1}, dict[str, int], "cannot be hashed"),
        (2**64, None, "64 bits"),
        (256, t.U8, "fits u8"),
        (True, t.U8, "an int for u8"),
        (1, bool, "expected a bool"),
        (1, str, "expected a str"),
        ((1,), tuple[int, int], "2 items"),
        ("\ud800", None, "surrogate"),
        ({"one": 1}, Pair, "exactly a Pair"),
        (frozenset({3}), t.without_classes(t.describe(Pair)), "frozenset of pairs"),
    ],
)
def test_keys_rust_would_not_hash_are_refused(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hash_key(value, kind)
