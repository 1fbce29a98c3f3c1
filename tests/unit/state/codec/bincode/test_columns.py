"""Columns of bincode decoded at once: the same values, and the same refusals with their row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import codec_for
from tests.formats import types as t


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
