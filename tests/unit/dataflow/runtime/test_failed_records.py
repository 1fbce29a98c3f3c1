"""Nothing is consumed in vain: limits of skipping, dead letters, replays, failed flushes."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import pytest

from arroyo_dagster.dataflow.runtime.failures import TooManyErrors
from arroyo_dagster.dataflow.views.step_log import read_step_log
from arroyo_dagster.state import MemoryStore
from tests.dataflows import Flow, KeepSink, KilledAt, Sent, Topic, builder, definition, row_of
from tests.faulty_stores import Crash
from tests.shares import Share, share_or_all

WRONG = "cuonts().increment(1)"
RIGHT = "counts().increment(1)"
PICKY = """
if record.startswith('!'):
    raise ValueError(f"no {record}")
counts().increment(1)
"""


def flow(body: str, **more: Any) -> Flow:
    return Flow(definition(builder(body), converter="raw"), **more)


def corrected(before: Flow, body: str, **more: Any) -> Flow:
    """The same state and topics, with another body."""
    return flow(body, store=before.store, topics=before.topics, clock=before.clock, **more)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_epoch", "lost"), [(1, 9), (4, 8), (10, 0)])
def test_however_small_the_epochs_are_fewer_than_ten_records_are_consumed_in_vain(
    per_epoch: int, lost: int
) -> None:
    wrong = flow(WRONG)
    wrong.topics["words"].per_epoch = per_epoch
    wrong.topics["words"].send(*(f"w{at}" for at in range(40)))
    with pytest.raises(TooManyErrors, match="build_update failed on each of the 1"):
        wrong.run()
    right = corrected(wrong, RIGHT)
    right.run()
    assert len(right.cells("build.counts")) == 40 - lost


@pytest.mark.parametrize("parallelism", [1, 3])
def test_more_failures_than_max_errors_stop_before_the_epoch_is_published(parallelism: int) -> None:
    picky = flow(PICKY, max_errors=2, parallelism=parallelism)
    picky.send("words", ["a", "!1", "!2"])
    assert picky.cells("build.counts") == {"a": 1}
    with pytest.raises(TooManyErrors, match="3 records failed in this run") as caught:
        picky.send("words", ["b", "!3"])
    assert caught.value.facts["failed"] == "build_update 3"
    right = corrected(picky, RIGHT, parallelism=parallelism)
    assert right.run().cells("build.counts") == {"a": 1, "b": 1, "!3": 1}


@pytest.mark.parametrize("converter", ["raw", "json"])
def test_a_record_without_a_value_fails_alone(converter: str) -> None:
    counting = Flow(definition(builder(RIGHT), converter=converter), max_errors=1)
    counting.send("words", [Sent(b'"a"'), Sent(None), Sent(b'"b"')])
    assert len(counting.cells("build.counts")) == 2
    assert counting.metrics("build")["words"].failed == 1


# ---- dead letters --------------------------------------------------------------------------------

KEEPS = {"on_error": "dead-letter"}


@pytest.mark.parametrize("parallelism", [1, 3])
def test_failed_records_become_letters_and_replay_brings_them_in_once(parallelism: int) -> None:
    options = {**KEEPS, "parallelism": parallelism}
    picky = flow(PICKY, **options)
    picky.send("words", ["a", Sent(b"!1", b"key", 7), "!2", "a"])
    first, second = sorted(picky.letters("build"), key=lambda one: one.offset)
    assert (first.step, first.reason) == (
        "build_update",
        'ValueError: no !1; in line 3 of the body: `raise ValueError(f"no {record}")`',
    )
    assert (first.topic, first.partition, first.offset) == ("words", 0, 1)
    assert (first.key, first.record, first.time_ms, first.partial) == (b"key", b"!1", 7, False)
    assert second.record == b"!2"
    right = corrected(picky, RIGHT, **options).replay()
    assert right.cells("build.counts") == {"a": 2, "!1": 1, "!2": 1}
    assert right.letters("build") == []
    assert right.replay().send("words", ["a"]).cells("build.counts")["!1"] == 1


def test_a_record_that_fails_again_is_a_new_letter_at_its_first_position() -> None:
    picky = flow(PICKY, **KEEPS).send("words", ["a", "!1"])
    assert [one.offset for one in picky.replay().letters("build")] == [1]
    assert corrected(picky, RIGHT, **KEEPS).replay().cells("build.counts") == {"a": 1, "!1": 1}


def test_a_record_that_does_not_decode_is_kept_as_it_came() -> None:
    typed = Flow(definition(builder(RIGHT), topics={"words": "u32"}), extended=True, **KEEPS)
    typed.send("words", [Sent(b"5"), Sent(b"\xff{"), Sent(b'"x"')])
    assert [one.record for one in typed.letters("build")] == [b"\xff{", b'"x"']


SPLIT = """
  split:
    sources: [{type: topic, id: words}]
    transforms:
      - operator: flat-map
        run: |
          def split(line):
              return line.split()
      - operator: map
        run: |
          def shout(word):
              BODY
              return word.upper()
    sinks: [{type: topic, id: answers}]
"""


def test_a_record_of_which_parts_had_effects_is_replayed_only_on_request() -> None:
    text = definition(SPLIT.replace("BODY", "assert word != 'b'"), converter="raw")
    split = Flow(text, **KEEPS).send("words", ["a b", "c"])
    assert split.sinks["answers"].values == ["A", "C"]
    (letter,) = split.letters("split")
    assert (letter.record, letter.value, letter.partial) == (b"a b", "b", True)
    right = Flow(
        definition(SPLIT.replace("BODY", "pass"), converter="raw"), store=split.store, **KEEPS
    )
    assert right.replay().sinks["answers"].values == []
    assert len(right.letters("split")) == 1
    assert right.replay(partial=True).sinks["answers"].values == ["A", "B"]
    assert right.letters("split") == []


def test_a_record_behind_a_state_that_a_step_changed_is_a_part() -> None:
    services = """
  part:
    sources: [{type: topic, id: words}]
    states:
      counts: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
    partition:
      assign-key: {run: "def whole(word): return word"}
      transforms:
        - operator: map
          run: "def first(word): return counts().increment(1) and word"
        - operator: map
          run: "def second(word): return 1 / 0"
    sinks: [{type: topic, id: answers}]
"""
    keeps = Flow(definition(services, converter="raw"), **KEEPS).send("words", ["a"])
    assert [one.partial for one in keeps.letters("part")] == [True]
    assert keeps.cells("part.counts") == {"a": 1}


# ---- failed flushes ------------------------------------------------------------------------------

WINDOWED = """
  gather:
    sources: [{type: topic, id: words}]
    states:
      counts: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
      lengths:
        type: keyed-state
        properties: {key: {type: string}, value: ROW}
    window:
      tumbling: {duration: 10s}
      assign-timestamp: {run: "def when(word, time): return time"}
      partition:
        assign-key: {run: "def of(word): return word"}
        update-state:
          run: |
            def gather(word):
                counts().increment(1)
                row = lengths()
                row.total += len(word)
                row.update()
      flush:
        run: |
          def close():
              BODY
              rows = lengths()
              return f"{window()[0] // 1000} {sorted(counts())} {len(rows)}"
    sinks: [{type: topic, id: answers}]
""".replace("ROW", row_of(total="u32"))


def windowed(body: str, **more: Any) -> Flow:
    return Flow(definition(WINDOWED.replace("BODY", body), converter="raw"), **more)


def at(word: str, second: int) -> Sent:
    return Sent(word.encode(), time_ms=second * 1000)


FIRST, SECOND = "0 [('a', 2), ('b', 1)] 2", "10 [('c', 1)] 1"
RECORDS = [at("a", 0), at("a", 1), at("b", 2), at("c", 11), at("d", 21)]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_failed_flush_keeps_its_window_and_is_called_again(parallelism: int) -> None:
    wrong = windowed("raise ValueError('down')", parallelism=parallelism)
    wrong.send("words", RECORDS)
    assert wrong.sinks["answers"].values == []
    assert wrong.metrics("gather")["close"].failed == 2
    right = windowed("pass", store=wrong.store, topics=wrong.topics, parallelism=parallelism)
    assert right.run().sinks["answers"].values == [FIRST, SECOND]
    right.restart()
    assert right.run().sinks["answers"].values == [FIRST, SECOND]


def test_a_window_that_closes_has_earlier_ones_flushed_first() -> None:
    services = "if env['down'] == 'yes' and window()[0] == 0: raise ValueError('down')"
    down = windowed(services, env={"down": "yes"})
    down.topics["words"].per_epoch = 4
    down.send("words", RECORDS)
    assert down.sinks["answers"].values == [SECOND]
    up = windowed(services, env={"down": "no"}, store=down.store, topics=down.topics)
    assert up.send("words", [at("e", 31)]).sinks["answers"].values == [
        FIRST, "20 [('d', 1)] 1",
    ]  # fmt: skip
    assert up.cells("gather.counts") == {"d": 1}  # readers see the window that closed last


# ---- killed at every call of the store -----------------------------------------------------------


def run_to_the_end(store: Any, topics: dict[str, Topic], sink: Any) -> Flow:
    """A service some of whose records and flushes fail; then one in which all succeed."""
    body = "if env['down'] == 'yes' and window()[0] == 0: raise ValueError('down')"
    text = WINDOWED.replace("BODY", body).replace(
        "def gather(word):", "def gather(word):\n                assert word != env['bad']"
    )
    found: Any = None
    for env in ({"down": "yes", "bad": "b"}, {"down": "no", "bad": ""}):
        found = Flow(
            definition(text, converter="raw"), store=store, topics=topics, env=env, **KEEPS
        )
        found.sinks["answers"] = found.bindings.sinks["answers"] = sink  # type: ignore[index]
        found.run()
    return found  # type: ignore[no-any-return]


def replay_all(store: Any, topics: dict[str, Topic], sink: Any) -> Flow:
    """A service with dead letters, all of which its corrected version replays."""
    flow(PICKY, store=store, topics=topics, **KEEPS).run()
    return flow(RIGHT, store=store, topics=topics, **KEEPS).replay()


def result_of(found: Flow, sink: Any) -> Any:
    service = next(iter(found.dataflow.services))
    letters = [(one.record, one.offset, one.reason) for one in found.letters(service)]
    # A flush that fails is called again by each run, and so more often if one is killed.
    log = [one for one in read_step_log(found.store, found.dataflow) if one.topic is not None]
    logged = sorted((one.step, one.number, one.offset, one.reason) for one in log)
    assert len(logged) >= max(len(letters), 1)
    return sorted(sink.values), letters, found.cells(f"{service}.counts"), logged


@share_or_all(12)
@pytest.mark.parametrize(
    ("story", "records"),
    [(run_to_the_end, RECORDS), (replay_all, [Sent(one) for one in (b"a", b"!1", b"b", b"!2")])],
)
def test_letters_and_windows_are_the_same_wherever_it_is_killed(
    story: Any, records: list[Sent], share: Share
) -> None:
    def topics() -> dict[str, Topic]:
        return {"words": Topic(records=list(records), per_epoch=2)}

    sink = KeepSink()
    plain = KilledAt(MemoryStore(uuid.uuid4().hex), 1 << 30)
    expected = result_of(story(plain, topics(), sink), sink)
    assert expected[0] or expected[2]
    for point in share(range(1, (1 << 30) - plain.left + 1)):
        store, sink = MemoryStore(uuid.uuid4().hex), KeepSink()
        with contextlib.suppress(Crash):
            story(KilledAt(store, point), topics(), sink)
        assert result_of(story(store, topics(), sink), sink) == expected, point
