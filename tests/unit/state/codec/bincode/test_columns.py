"""Columns of bincode decoded at once: the same values, and the same refusals with their row."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state import codec_for
from arroyo_dagster.state.model import types as t


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclass(frozen=True)
class KafkaState:
    partition: t.I32
    offset: t.I64


BROKEN: list[tuple[Any, bytes]] = [
    (t.U16, bytes.fromhex("fc00000000")),
    (t.U32, bytes.fromhex("fd0000000000000000")),
    (t.U64, b"\xff"),
    (t.U64, b""),
    (t.U64, b"\xfb\x01"),
    (t.U64, b"\x01\x02"),
    (float, b"\x00" * 7),
    (bool, b"\x02"),
    (str, bytes.fromhex("fdffffffffffffffff61")),
    (str, b"\x02a"),
    (str, b"\x02\xc3\x28"),
    (bytes, b"\x05a"),
    (t.Char, b"\x80"),
    (t.Char, b"\xc3"),
    (int | None, b"\x02"),
    (int | None, b"\x01"),
    (Side, b"\x02"),
    (KafkaState, b"\x06\xfb\xa4"),
]


@pytest.mark.parametrize(("kind", "raw"), BROKEN)
def test_a_broken_row_is_refused_as_it_is_alone(kind: Any, raw: bytes) -> None:
    codec = codec_for(kind)
    good = {t.Char: "a", Side: Side.LEFT, KafkaState: KafkaState(1, 1), bool: True, float: 1.0}
    good |= {str: "a", bytes: b"a"}
    right = codec.encode(good.get(kind, 1))
    with pytest.raises(FormatError) as alone:
        codec.decode(raw)
    rows = pa.chunked_array([[right] * 3, [right, raw, right, raw]], pa.binary())
    with pytest.raises(FormatError) as caught:
        codec.decode_column(rows)
    assert str(caught.value.message) == str(alone.value.message)
    assert caught.value.facts == alone.value.facts | {"row": 4}


@pytest.mark.parametrize(
    "kind", [list[int], dict[str, int], set[int], t.U128, tuple[int, list[int]]]
)
def test_types_without_a_fixed_shape_say_so(kind: Any) -> None:
    assert codec_for(kind).column_type is None
    with pytest.raises(InputError, match="no fixed shape"):
        codec_for(kind).decode_column(pa.array([], pa.binary()))


def test_a_time_that_no_column_holds_is_refused() -> None:
    codec = codec_for(t.SystemTimeNanos)
    rows = pa.array([codec.encode(2**63)])
    with pytest.raises(InputError, match="too late"):
        codec.decode_column(rows)
