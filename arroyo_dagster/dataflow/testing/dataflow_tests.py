"""The `tests` section of a dataflow: records of its topics, with the expected records and states.

An entry has these keys:

| key | meaning |
|---|---|
| `name` | the name of the test |
| `records` | by topic, the records that are given; a list of such mappings is given one by one, and all services run after each |
| `close-windows` | whether open windows are closed at the end |
| `expect` | by topic, all records that services wrote, in order |
| `expect-states` | by state, all its rows by key; of a windowed state, those of the window that closed last |
| `expect-failed` | by `service/step`, how many records failed; absent = none |

Text is a record as it is if the converter of its topic is raw; other values are JSON. A mapping of
`record` with `key`, `timestamp` or both is a record with these; a timestamp is an integer of epoch
milliseconds, or a date and time of ISO 8601 with its zone.

Source: an extension of this project; SDF ignores it.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateForm
from arroyo_dagster.dataflow.definition.grammar import DATAFLOW_TEST, RECORD
from arroyo_dagster.dataflow.definition.shapes import check
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.dataflow.testing.in_process import DataflowTrial, ReceivedRecord
from arroyo_dagster.dataflow.testing.section import (
    Difference,
    TestOutcome,
    arguments_of,
    as_text,
    check_expectation,
    check_known,
    compared,
    error_text,
    line_at,
    read_entries,
    row_texts,
)
from arroyo_dagster.dataflow.topics.wiring import services_by_topic
from arroyo_dagster.errors import ArroyoStateError

_EXPECTATIONS = ("expect", "expect-states", "expect-failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowTest:
    """One entry of the section; its members as the grammar has them."""

    name: str
    records: dict[str, list[Any]] | list[dict[str, list[Any]]] = field(default_factory=dict)
    close_windows: bool = False
    expect: dict[str, list[Any]] = field(default_factory=dict)
    expect_states: dict[str, dict[str, Any]] = field(default_factory=dict)
    expect_failed: dict[str, int] = field(default_factory=dict)
    entry: Node = field(compare=False, repr=False)

    @property
    def rounds(self) -> list[dict[str, list[Any]]]:
        """The given records by topic, one mapping for each run."""
        return self.records or [{}] if isinstance(self.records, list) else [self.records]


def read_tests(dataflow: Dataflow) -> list[DataflowTest]:
    """Return the tests of a dataflow; empty if it has no such section.

    Raises:
        InvalidDefinition: the section is invalid, or names topics, states or steps that do not
            exist; with all errors.
    """
    written = services_by_topic(dataflow, "sinks")
    read = [topic for topic in services_by_topic(dataflow, "sources") if topic not in written]
    states = _state_names(dataflow)
    steps = _step_names(dataflow)

    def check_entry(entry: Node) -> None:
        _check_records(entry, read)
        expected = entry.get("expect")
        check_known(expected, "output topic", written)
        _check_keyed(expected.members.values() if expected else ())
        check_known(entry.get("expect-states"), "state", states)
        check_known(entry.get("expect-failed"), "service/step", steps)
        check_expectation(entry, _EXPECTATIONS)

    return [
        DataflowTest(**arguments_of(entry, DATAFLOW_TEST), entry=entry)
        for entry in read_entries(dataflow, DATAFLOW_TEST, check_entry)
    ]


def _check_records(entry: Node, topics: list[str]) -> None:
    records = entry.get("records")
    for given in () if records is None else records.items or (records,):
        if not isinstance(given.value, dict):
            given.report("E04", f"expected the records of each topic, found {given.kind}")
            continue
        check_known(given, "input topic", topics)
        for values in given.members.values():
            if not isinstance(values.value, tuple):
                values.report("E04", f"expected a list of records, found {values.kind}")
        _check_keyed(given.members.values())


# ---- records with a key or a time ----------------------------------------------------------------

_EPOCH = datetime.fromtimestamp(0, UTC)


def _is_keyed(value: Any) -> bool:
    """Return whether a record is given as a mapping with its key or its time."""
    return isinstance(value, dict) and "record" in value and len(value.keys() & _BESIDE) > 0


_BESIDE = RECORD.fields.keys() - {"record"}


def _check_keyed(lists: Iterable[Node]) -> None:
    for record in (item for listed in lists for item in listed.items if _is_keyed(item.value)):
        check(record, RECORD, members_only=True)
        key, timestamp = record.get("key"), record.get("timestamp")
        if key is not None and not isinstance(key.value, str | int):
            key.report("E04", f"expected text, an integer or a boolean, found {key.kind}")
        try:
            _time_of(0 if timestamp is None else timestamp.value)
        except (ValueError, OverflowError):
            assert timestamp is not None
            timestamp.report(
                "E04",
                f"timestamp `{timestamp.plain()}`; expected epoch milliseconds, or a date and time "
                "with its zone, as 2026-01-05T10:00:00Z",
            )


def _time_of(value: Any) -> datetime:
    """Return the time of a timestamp.

    Raises:
        ValueError, OverflowError: it is none.
    """
    if type(value) is int:
        return _EPOCH + timedelta(milliseconds=value)
    found = datetime.fromisoformat(value) if isinstance(value, str) else None
    if found is None or found.tzinfo is None:
        raise ValueError
    return found.astimezone(UTC)


def _record_of(value: Any) -> ReceivedRecord:
    """Return a record as a test gives it."""
    if not _is_keyed(value):
        return ReceivedRecord(value)
    time = value.get("timestamp")
    time_ms = None if time is None else (_time_of(time) - _EPOCH) // timedelta(milliseconds=1)
    return ReceivedRecord(value["record"], value.get("key"), time_ms)


def _texts(records: Iterable[ReceivedRecord], beside: Collection[str]) -> list[str]:
    """Return records as texts, with what is compared beside their values."""
    if not beside:
        return [as_text(record.value) for record in records]
    return [
        as_text(
            {
                "record": record.value,
                **({"key": record.key} if "key" in beside else {}),
                **({"timestamp": _iso(record.time_ms)} if "timestamp" in beside else {}),
            }
        )
        for record in records
    ]


def _iso(time_ms: int | None) -> str | None:
    return None if time_ms is None else (_EPOCH + timedelta(milliseconds=time_ms)).isoformat()


def _state_names(dataflow: Dataflow) -> list[str]:
    """Return `service.state` of each owned state, and its name alone if only one has it."""
    owned = [state for state in dataflow.states if state.form is StateForm.TYPED]
    names = [state.name for state in owned]
    alone = [name for name in names if names.count(name) == 1]
    return [*(f"{state.owner}.{state.name}" for state in owned), *alone]


def _step_names(dataflow: Dataflow) -> list[str]:
    return [
        f"{service.name}/{name}"
        for service in dataflow.services.values()
        for name in (
            *(step.name for step in service.steps),
            *(end.id for end in (*service.sources, *service.sinks) if end.id is not None),
        )
    ]


def run_test(test: DataflowTest, fresh: Callable[[], DataflowTrial]) -> TestOutcome:
    """Run one test.

    Args:
        test: the test.
        fresh: makes a trial of the dataflow without any state, which keeps dead letters.
    """
    line = test.entry.line
    try:
        trial = fresh()
        for number, given in enumerate(test.rounds):
            for topic, at, value in _records_in(given):
                line = _line_of_record(test.entry, number, topic, at)
                record = _record_of(value)
                trial.send(topic, record.value, key=record.key, time_ms=record.time_ms)
            line = test.entry.line
            is_last = number + 1 == len(test.rounds)
            trial.run(close_windows=test.close_windows and is_last)
        found = _differences(test, trial)
    except ArroyoStateError as error:
        found = [Difference(line=line, what=error_text(error))]
    return TestOutcome(name=test.name, line=test.entry.line, differences=tuple(found))


def _records_in(given: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, int, Any]]:
    """Yield the topic, the position in it, and the value of each record of a round."""
    for topic, values in given.items():
        for at, value in enumerate(values):
            yield topic, at, value


def _line_of_record(entry: Node, number: int, topic: str, at: int) -> int:
    records = entry.get("records")
    assert records is not None
    of_topic = (records.items or (records,))[number].members[topic]
    return of_topic.items[at].line


def _differences(test: DataflowTest, trial: DataflowTrial) -> list[Difference]:
    found: list[Difference] = []
    for topic, values in test.expect.items():
        line = line_at(test.entry, "expect", topic)
        beside = {name for value in values if _is_keyed(value) for name in value.keys() & _BESIDE}
        expected = _texts(map(_record_of, values), beside)
        received = _texts(trial.received_records(topic), beside)
        found += compared(line, f"topic {topic}", expected, received)
    for state, rows in test.expect_states.items():
        line = line_at(test.entry, "expect-states", state)
        found += compared(
            line, f"state {state}", row_texts(rows or {}), row_texts(trial.state(state))
        )
    return [*found, *_failures(test, trial)]


def _failures(test: DataflowTest, trial: DataflowTrial) -> list[Difference]:
    """Return how the failed records differ from those that are expected to fail."""
    expected = {step: count for step, count in test.expect_failed.items() if count}
    failed = trial.failed
    line = line_at(test.entry, "expect-failed")
    found = compared(line, "failed records", row_texts(expected), row_texts(failed))
    if not found:
        return []
    reasons = tuple(
        f"+ {letter.service}/{letter.step} on {letter.place}: {letter.reason}"
        for letter in trial.letters
        if expected.get(f"{letter.service}/{letter.step}")
        != failed.get(f"{letter.service}/{letter.step}")
    )
    return [*found, Difference(line=line, what="why they failed", lines=reasons)]
