"""Run steps over records. A failing user function skips the record; the run continues unless
failures are fatal.

Source: sdf-states.md 3.1, 3.2 (f), 8.2, 9; errors E42 and what functions raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from arroyo_dagster.dataflow.definition.windows import Window
from arroyo_dagster.dataflow.errors import OperatorResultError, StepFailed
from arroyo_dagster.dataflow.runtime.columnar import (
    call_divided,
    called,
    joined,
    mask_result,
    rows_result,
)
from arroyo_dagster.dataflow.runtime.functions import Function
from arroyo_dagster.dataflow.runtime.letters import Letter
from arroyo_dagster.dataflow.runtime.reasons import next_step_of, reason_of
from arroyo_dagster.dataflow.runtime.record import as_record, last_change
from arroyo_dagster.dataflow.storage.engine_tables import Metrics, StepLog
from arroyo_dagster.dataflow.storage.payloads import frame_of, records_of
from arroyo_dagster.errors import StorageError
from arroyo_dagster.user_modules import begin_step

_LOG = logging.getLogger("arroyo_dagster.sdf")
_MOST_LOGGED = 20
"""The maximum number of failures per step and epoch that are logged individually."""


@dataclass(slots=True)
class Place:
    """The position of a record in its topic, for messages and dead letters.

    Attributes:
        file: the file that it was read from; None = unknown.
        key, record: its raw key and value, if records carry them for dead letters.
        time_ms: its timestamp, likewise.
    """

    topic: str
    partition: int
    offset: int
    file: str | None = None
    key: bytes | None = None
    record: bytes | None = None
    time_ms: int | None = None


class Records:
    """Records between steps, as Python values or as a frame; each is made of the other when needed.

    Args:
        values: the value of each record; None = `frame` has them.
        at: the index of each record in its input batch.
        keys: the key of each record; None = no keys.
        windows: the windows that accepted each record; None outside of windows.
        frame: the records as rows; see `frame_of`.
    """

    def __init__(
        self,
        values: list[Any] | None,
        at: Sequence[int],
        keys: list[Any] | None = None,
        windows: list[tuple[Window, ...]] | None = None,
        *,
        frame: pl.DataFrame | None = None,
    ) -> None:
        self._values = values
        self._frame = frame
        self._change = last_change()
        self.at = at
        self.keys = keys
        self.windows = windows

    @property
    def values(self) -> list[Any]:
        """The value of each record."""
        if self._values is None:
            assert self._frame is not None
            self._values, self._change = [*records_of(self._frame)], last_change()
        return self._values

    @property
    def frame(self) -> pl.DataFrame | None:
        """The records as rows; None = there are values only, or a function may have changed one."""
        if self._values is not None and self._change is not last_change():
            self._frame = None
        return self._frame

    def __len__(self) -> int:
        return len(self.at)

    def columns(self, start: int, stop: int) -> pl.DataFrame:
        """Return some records as a frame. Errors as in `frame_of`."""
        frame = self.frame
        if frame is not None:
            return frame.slice(start, stop - start)
        return frame_of(self.values[start:stop])

    def taken(self, kept: list[int], values: list[Any], keys: list[Any] | None) -> Records:
        """Return records with new values and keys, derived from those at the indexes `kept`."""
        if len(kept) == len(self.at) and kept == list(range(len(kept))):
            return Records(values, self.at, keys, self.windows)
        windows = None if self.windows is None else [self.windows[index] for index in kept]
        return Records(values, [self.at[index] for index in kept], keys, windows)

    def chosen(self, kept: list[int], frame: pl.DataFrame | None = None) -> Records:
        """Return the records at the indexes `kept`; with `frame`, with these rows as values."""
        if frame is None and len(kept) == len(self.at):
            return self
        keys = None if self.keys is None else [self.keys[index] for index in kept]
        if frame is None and self.frame is None:
            return self.taken(kept, [self.values[index] for index in kept], keys)
        records = self.taken(kept, [], keys)
        rows = self.frame[kept] if frame is None and self.frame is not None else frame
        return Records(None, records.at, records.keys, records.windows, frame=rows)


class Failures:
    """Counts and logs records with a failing function or converter, or ends the run.

    Args:
        service: the name of the service, for the log.
        metrics: where failures are counted.
        log: keeps the last failures of each step.
        fatal: whether the first failure ends the run.
        keeps: whether failed records become dead letters.
    """

    def __init__(
        self,
        service: str,
        metrics: Metrics,
        log: StepLog,
        *,
        fatal: bool,
        keeps: bool = False,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._log = log
        self._fatal = fatal
        self._keeps = keeps
        self._letters: list[Letter] = []
        self._logged: dict[str, int] = {}

    def note(
        self,
        step: str,
        error: Exception,
        record: Any,
        place: Place | None,
        *,
        topic: bool = False,
        partial: bool = False,
    ) -> None:
        """Count and log one failure, and keep a dead letter of the record.

        Args:
            step: the function, topic or sink.
            error: why it failed.
            record: the value that the step was given.
            place: the position of the record that it comes from; None = no single one.
            topic: whether the step is a topic or a sink, which counts offsets.
            partial: whether other parts of the record have effects; see `Letter`.

        Raises:
            StepFailed: failures are fatal.
            StorageError: the store failed, so the epoch must be run again.
        """
        if isinstance(error, StorageError):
            raise error
        offset = place.offset if topic and place is not None else None
        self._metrics.count(step, failed=1, error_offset=offset)
        reason = reason_of(error, in_topic=topic)
        names = () if place is None else ("topic", "partition", "offset")
        where: dict[str, Any] = {name: getattr(place, name) for name in names}
        if self._fatal:
            raise StepFailed(
                f"{step} failed on a record: {reason}",
                service=self._service,
                record=_short(record),
                next_step=f"{next_step_of(error, in_topic=topic)}, or run with --on-error skip",
                **where,
            ) from error
        file = None if place is None else place.file
        kept = {**where, "file": file, "reason": reason}
        self._log.add_failure(step, self._metrics.failed(step), kept)
        if self._keeps and place is not None:
            self._letters.append(self._letter(step, reason, record, place, partial))
        count = self._logged[step] = self._logged.get(step, 0) + 1
        if count <= _MOST_LOGGED:
            text = ", ".join(f"{name} {value}" for name, value in where.items())
            next_step = f"{next_step_of(error, in_topic=topic)}; {self._after(place)}"
            advice = f". Next: {next_step}" if count == 1 else ""
            _LOG.warning(
                "service %s: %s %s (%s): %s; record %s%s",
                self._service,
                step,
                self._outcome(place),
                text or "no place",
                reason,
                _short(record),
                advice,
            )

    def _letter(self, step: str, reason: str, value: Any, place: Place, partial: bool) -> Letter:
        return Letter(
            service=self._service,
            step=step,
            topic=place.topic,
            partition=place.partition,
            offset=place.offset,
            file=place.file,
            key=place.key,
            record=place.record,
            time_ms=place.time_ms,
            value=value,
            reason=reason,
            partial=partial,
        )

    def _outcome(self, place: Place | None) -> str:
        if place is None:
            return "failed; its window is kept, to be flushed again"
        return "put a record into the dead letters" if self._keeps else "skipped a record"

    def _after(self, place: Place | None) -> str:
        if place is None:
            return "the next run flushes the window again"
        if self._keeps:
            return "then `sdf replay` processes the record again"
        return "--on-error dead-letter keeps such records for `sdf replay`"

    def take_letters(self) -> list[Letter]:
        """Return the dead letters since the last call."""
        letters, self._letters = self._letters, []
        return letters

    def epoch_done(self) -> None:
        """Log the numbers of failures that were not logged individually, and reset the counts."""
        for step, count in self._logged.items():
            if count > _MOST_LOGGED:
                _LOG.warning(
                    "service %s: %s failed on %d more records in this epoch",
                    self._service,
                    step,
                    count - _MOST_LOGGED,
                )
        self._logged.clear()


def _short(record: Any) -> str:
    try:
        text = repr(record)
    except Exception:
        text = f"a {type(record).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


# ---- the records of each operator's result -------------------------------------------------------

_NOTHING: Any = object()


def _wrong(function: Function, expected: str, found: Any) -> OperatorResultError:
    return OperatorResultError(
        f"{function.plan.operator} `{function.plan.name}` returned {_short(found)}; "
        f"expected {expected}",
        number="E42",
        path=function.plan.path,
    )


def _pair(function: Function, result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise _wrong(function, "a pair of key and value", result)


def _mapped(function: Function, value: Any, result: Any) -> Sequence[Any]:
    if result is None:
        raise _wrong(function, "a record", result)
    return (result,)


def _filtered(function: Function, value: Any, result: Any) -> Sequence[Any]:
    if result is True:
        return (value,)
    if result is False:
        return ()
    raise _wrong(function, "True or False", result)


def _flat_mapped(function: Function, value: Any, result: Any) -> Sequence[Any]:
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        raise _wrong(function, "a list of records", result)
    results = list(result)
    if any(item is None for item in results):
        raise _wrong(function, "records", None)
    return results


Outcome = Callable[[Function, Any, Any], Sequence[Any]]
OUTCOMES: dict[str, Outcome] = {
    "map": _mapped,
    "filter": _filtered,
    "filter-map": lambda function, value, result: () if result is None else (result,),
    "flat-map": _flat_mapped,
}
"""For each operator, a function from a record's value and the function's result to new values."""


@dataclass(slots=True)
class Step:
    """A loaded transform. `partial`: whether records may reach it in parts; see `Letter`."""

    function: Function
    partial: bool = False
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = OUTCOMES[self.function.plan.operator]

    @property
    def name(self) -> str:
        return self.function.plan.name

    def one(self, key: Any, value: Any) -> list[tuple[Any, Any]]:
        """Return the results for one record, as pairs of key and value."""
        function = self.function
        body = function.body
        result = body(key, value) if function.takes_key else body(value)
        results = self.outcome(function, value, result)
        if function.plan.operator == "filter":
            return [(key, value) for _ in results]
        # Converted here, once, so that the next step gets what it would get from a topic.
        if not function.gives_pair:
            return [(key, as_record(item)) for item in results]
        pairs = [_pair(function, item) for item in results]
        return [(new_key, as_record(new_value)) for new_key, new_value in pairs]


def run_steps(
    steps: Sequence[Step],
    records: Records,
    failures: Failures,
    metrics: Metrics,
    place: Callable[[int], Place],
    enter: Callable[[tuple[Window, ...]], None] | None = None,
) -> Records:
    """Run records through steps, one step after the other.

    Args:
        steps: the steps in order.
        records: the input.
        failures: receives the failures.
        metrics: counts the successes.
        place: returns the position in its topic of the record at an index of the batch.
        enter: called with the windows of each record before its function is called.
    """
    for step in steps:
        begin_step(step.name)
        before = len(records)
        fails = 0
        if step.function.form:
            records, fails = _columnar(step, records, failures, place)
        elif _is_plain(step) and enter is None:
            records, fails = _plain_map(step, records, failures, place)
        else:
            kept: list[int] = []
            values: list[Any] = []
            keys: list[Any] = []
            failed = 0
            for index, value in enumerate(records.values):
                key = None if records.keys is None else records.keys[index]
                if enter is not None and records.windows is not None:
                    enter(records.windows[index])
                try:
                    results = step.one(key, value)
                except Exception as error:
                    failures.note(
                        step.name, error, value, place(records.at[index]), partial=step.partial
                    )
                    failed += 1
                    continue
                for new_key, new_value in results:
                    kept.append(index)
                    values.append(new_value)
                    keys.append(new_key)
            has_keys = any(key is not None for key in keys)
            records, fails = records.taken(kept, values, keys if has_keys else None), failed
        metrics.count(step.name, succeeded=before - fails)
    return records


def _is_plain(step: Step) -> bool:
    function = step.function
    return (
        function.plan.operator in ("map", "filter")
        and not function.takes_key
        and not function.gives_pair
    )


def _plain_map(
    step: Step, records: Records, failures: Failures, place: Callable[[int], Place]
) -> tuple[Records, int]:
    """Run a map or filter whose function takes only the value: the fast path."""
    results, failed = call_each(
        step.function.body,
        records.values,
        lambda index, error: failures.note(
            step.name, error, records.values[index], place(records.at[index]), partial=step.partial
        ),
    )
    operator = step.function.plan.operator
    filters = operator == "filter"
    kept: list[int] = []
    values: list[Any] = []
    for index, result in enumerate(results):
        if result is _NOTHING:
            continue
        value = records.values[index]
        if (result is not True and result is not False) if filters else result is None:
            error = _wrong(step.function, "True or False" if filters else "a record", result)
            failures.note(step.name, error, value, place(records.at[index]), partial=step.partial)
            failed += 1
        elif not filters or result:
            kept.append(index)
            values.append(value if filters else as_record(result))
    keys = None if records.keys is None else [records.keys[index] for index in kept]
    return records.taken(kept, values, keys), failed


def _columnar(
    step: Step, records: Records, failures: Failures, place: Callable[[int], Place]
) -> tuple[Records, int]:
    """Run a map or filter of whole batches."""
    function, failed = step.function, 0
    filters = function.plan.operator == "filter"

    def call(start: int, stop: int) -> Any:
        result = called(function, records.columns(start, stop))
        check = mask_result if filters else rows_result
        return check(function, result, stop - start)

    def fail(at: int, error: Exception) -> None:
        nonlocal failed
        failed += 1
        value = records.values[at]
        failures.note(step.name, error, value, place(records.at[at]), partial=step.partial)

    parts = call_divided(len(records), call, fail)
    if filters:
        kept = [start + row for start, _, mask in parts for row in np.flatnonzero(mask).tolist()]
        return records.chosen(kept), failed
    kept = [index for start, stop, _ in parts for index in range(start, stop)]
    frames = [frame for _, _, frame in parts]
    whole = joined(frames) if frames else None
    if whole is not None:
        return records.chosen(kept, whole), failed
    keys = None if records.keys is None else [records.keys[index] for index in kept]
    values = [value for frame in frames for value in records_of(frame)]
    return records.taken(kept, values, keys), failed


def call_each(
    body: Callable[[Any], Any], values: Sequence[Any], fail: Callable[[int, Exception], None]
) -> tuple[list[Any], int]:
    """Call a function with each value, exactly once, since it may have side effects.

    Returns:
        The results, with a marker for each failed call (see `has_result`), and the number of
        failures.
    """
    results: list[Any] = []
    append = results.append
    rest: Iterator[Any] = iter(values)
    failed = 0
    while True:
        try:
            for value in rest:
                append(body(value))
            return results, failed
        except Exception as error:
            fail(len(results), error)
            append(_NOTHING)
            failed += 1


def no_results(count: int) -> list[Any]:
    """Return as many markers of failures as `call_each` returns."""
    return [_NOTHING] * count


def has_result(result: Any) -> bool:
    """Return whether an item of `call_each` is a result, not the marker of a failure."""
    return result is not _NOTHING
