"""Windows as arithmetic: the acceptance checks, and a naive model that tries every window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.windows import Window, WindowDef, WindowKind, advanced


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
