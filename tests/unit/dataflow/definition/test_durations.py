"""Durations: read, refused, and written so that they are read back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.durations import (
    DURATION_PATTERN,
    MAX_DURATION_MS,
    UNITS_NANOS,
    format_duration,
    parse_duration_ms,
)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("10s", 10_000),
        ("1h 30m", 5_400_000),
        ("1h30min", 5_400_000),
        ("2 days", 172_800_000),
        ("1M", 2_630_016_000),
        ("1m", 60_000),
        ("1y", 31_557_600_000),
        ("500us", 0),
        ("999us 1ns", 0),
        ("600us 400us", 1),
        ("0", 0),
    ],
)
def test_a_duration_is_read_to_whole_milliseconds(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    ["", " ", "60", "1.5h", "-1s", "1 fortnight", "s", "1s-", "1sx", "1 h 2", "١s", "9" * 30 + "y"],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    assert parse_duration_ms(text) is None


def test_a_long_text_is_refused_at_once() -> None:
    assert parse_duration_ms("1s " * 100_000) is None


@given(st.integers(0, MAX_DURATION_MS))
def test_what_is_written_is_read_back(milliseconds: int) -> None:
    assert parse_duration_ms(format_duration(milliseconds)) == milliseconds


@given(
    st.lists(
        st.tuples(
            st.integers(0, 999), st.sampled_from(sorted(UNITS_NANOS)), st.sampled_from(["", " "])
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_sum_of_the_spans_is_cut_off_once(spans: list[tuple[int, str, str]]) -> None:
    text = " ".join(f"{count}{blank}{unit}" for count, unit, blank in spans)
    nanos = sum(count * UNITS_NANOS[unit] for count, unit, _ in spans)
    assert parse_duration_ms(text) == nanos // 1_000_000
    assert re.search(DURATION_PATTERN, text)
