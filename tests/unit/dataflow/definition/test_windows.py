"""Windows as arithmetic: the acceptance checks, and a naive model that tries every window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.windows import (
    GLOBAL_WINDOW,
    Window,
    WindowDef,
    WindowKind,
    advanced,
)


def tumbling(duration_ms: int, **more: int) -> WindowDef:
    return WindowDef(
        kind=WindowKind.TUMBLING, duration_ms=duration_ms, slide_ms=duration_ms, **more
    )


def sliding(duration_ms: int, slide_ms: int, **more: int) -> WindowDef:
    return WindowDef(kind=WindowKind.SLIDING, duration_ms=duration_ms, slide_ms=slide_ms, **more)


@st.composite
def definitions(draw: st.DrawFn) -> WindowDef:
    duration = draw(st.integers(1, 40))
    slide = draw(st.integers(1, duration))
    offset = draw(st.integers(0, 90))
    grace = draw(st.integers(0, 30))
    if slide == duration:
        return tumbling(duration, offset_ms=offset, grace_ms=grace)
    return sliding(duration, slide, offset_ms=offset, grace_ms=grace)


def naive_windows(one: WindowDef, time_ms: int) -> list[Window]:
    """Every start within reach, asked whether it is one and whether it holds the time."""
    starts = range(time_ms - one.duration_ms, time_ms + 1)
    return [
        Window(start, start + one.duration_ms)
        for start in starts
        if (start - one.offset_ms) % one.slide_ms == 0
        and start <= time_ms < start + one.duration_ms
    ]


def test_a13_a_tumbling_window_with_grace_accepts_closes_and_drops() -> None:
    one = tumbling(10_000, grace_ms=3_000)
    first, wm = Window(0, 10_000), None
    accepted: list[int] = []
    closed_at: list[int] = []
    opened: set[Window] = set()
    for time in (1_000, 9_000, 12_000, 9_500, 13_000, 9_700):
        windows = one.accepted(time, wm)
        if first in windows:
            accepted.append(time)
        opened.update(windows)
        wm = advanced(wm, time)
        for window in one.due(opened, wm):
            opened.discard(window)
            closed_at.append(time)
    assert accepted == [1_000, 9_000, 9_500]
    assert closed_at == [13_000]
    assert one.accepted(9_700, wm) == ()


def test_a14_a_record_falls_into_every_sliding_window_over_it() -> None:
    windows = sliding(60_000, 10_000).windows_of(65_000)
    assert [start for start, _ in windows] == [10_000, 20_000, 30_000, 40_000, 50_000, 60_000]


def test_a15_idleness_makes_every_open_window_due() -> None:
    one = sliding(30_000, 10_000, idleness_ms=12_000, grace_ms=4_000)
    opened = one.windows_of(5_000)
    wm = one.idle_watermark(opened, 5_000)
    assert wm == 34_000
    assert one.due(opened, wm) == opened
    assert one.due(opened, wm - 1) == opened[:-1]


def test_without_open_windows_the_watermark_stays() -> None:
    assert tumbling(1).idle_watermark((), None) is None
    assert tumbling(1).idle_watermark((), 7) == 7


def test_windows_before_the_epoch_and_with_an_offset_are_aligned_too() -> None:
    assert tumbling(10).windows_of(-1) == (Window(-10, 0),)
    assert tumbling(10, offset_ms=3).windows_of(2) == (Window(-7, 3),)
    assert tumbling(10, offset_ms=3).windows_of(3) == (Window(3, 13),)


def test_the_global_window_is_all_of_64_bits() -> None:
    assert GLOBAL_WINDOW == (-9223372036854775808, 9223372036854775807)


@given(definitions(), st.integers(-200, 200))
def test_windows_of_a_time_are_those_a_naive_search_finds(one: WindowDef, time_ms: int) -> None:
    found = one.windows_of(time_ms)
    assert list(found) == naive_windows(one, time_ms)
    assert 1 <= len(found) <= -(-one.duration_ms // one.slide_ms)


@given(definitions(), st.lists(st.integers(-100, 100), max_size=30))
def test_a_stream_closes_each_window_once_in_order_and_never_reopens_one(
    one: WindowDef, times: list[int]
) -> None:
    wm: int | None = None
    opened: dict[Window, list[int]] = {}
    flushed: dict[Window, list[int]] = {}
    model: dict[Window, list[int]] = {}
    greatest: int | None = None
    for time in times:
        for window in one.accepted(time, wm):
            opened.setdefault(window, []).append(time)
        for window in naive_windows(one, time):  # the rule as the spec words it
            if greatest is None or window.end_ms + one.grace_ms > greatest:
                model.setdefault(window, []).append(time)
        greatest = time if greatest is None else max(greatest, time)
        wm = advanced(wm, time)
        assert wm == greatest
        closing = one.due(opened, wm)
        assert list(closing) == sorted(closing, key=lambda w: (w.end_ms, w.start_ms))
        for window in closing:
            assert window not in flushed
            assert wm >= window.end_ms + one.grace_ms
            flushed[window] = opened.pop(window)
    assert not one.due(opened, wm)
    assert flushed | opened == model
    closing = one.due(opened, one.idle_watermark(opened, wm))
    assert set(closing) == set(opened)
