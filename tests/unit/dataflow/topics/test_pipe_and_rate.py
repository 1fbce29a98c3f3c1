"""Lines that come once, and numbers that come by the clock."""

from __future__ import annotations

import io
import json

import pytest

from arroyo_dagster.dataflow.topics.pipe import ByteStream, PipeSource
from arroyo_dagster.dataflow.topics.rate import RateSource
from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state import MemoryStore, StatePath
from tests.reading import read_on, stored, values

KEPT = StatePath("d/s/stdin/words")


def pipe(
    store: MemoryStore, lines: bytes | ByteStream = b"", *, rows_per_epoch: int = 2
) -> PipeSource:
    stream = io.BytesIO(lines) if isinstance(lines, bytes) else lines
    return PipeSource("words", store, KEPT, stream, rows_per_epoch=rows_per_epoch)


def test_lines_that_were_kept_survive_a_kill_and_come_before_new_ones() -> None:
    store = MemoryStore()
    killed = pipe(store, b"a\nb\nc\n")
    before = stored(killed.latest_offset(killed.initial_offset()))  # then it was killed
    again = pipe(store, b"x\n")
    end = again.latest_offset(again.initial_offset())
    assert end == before
    assert values(again, again.initial_offset(), end) == [b"a", b"b"]
    assert values(again, again.initial_offset(), end) == [b"a", b"b"]
    assert read_on(again, end)[0] == [b"x"]


def test_a_stop_keeps_the_lines_that_had_come() -> None:
    store = MemoryStore()
    source = pipe(store, b"a\nb\nc\nd\n")
    end = stored(source.latest_offset(source.initial_offset()))
    assert values(source, source.initial_offset(), end) == [b"a", b"b"]
    source.close()
    assert read_on(pipe(store), end)[0] == [b"c", b"d"]


def test_two_runs_cannot_keep_lines_as_one_segment() -> None:
    store = MemoryStore()

    class Blind(MemoryStore):
        def head(self, path: StatePath) -> None:
            return None

    pipe(store, b"a\n").latest_offset({"segment": 0})
    blind = Blind(store.url.removeprefix("memory://"))
    with pytest.raises(ConflictError, match="another run"):
        pipe(blind, b"b\n").latest_offset({"segment": 0})


def test_numbers_come_by_the_clock_and_are_the_same_when_read_again() -> None:
    now = 1_000_000
    source = RateSource("ticks", 2, limit=7, rows_per_epoch=3, clock_millis=lambda: now)
    offset = stored(source.initial_offset())
    assert source.latest_offset(offset) == offset
    now += 1_400
    end = source.latest_offset(offset)
    assert [json.loads(value) for value in values(source, offset, end)] == [
        {"value": 0, "time": 1_000_000},
        {"value": 1, "time": 1_000_500},
    ]
    now += 60_000
    again = RateSource("ticks", 2, limit=7, rows_per_epoch=3, clock_millis=lambda: now)
    found, last = read_on(again, offset)
    assert [json.loads(value)["value"] for value in found] == list(range(7))
    assert again.exhausted(last)
    assert not again.exhausted(end)
